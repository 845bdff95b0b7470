"""Ops that run along a dim: sums so far, orders."""

import torch

from ftp.registry import Call, Rule, acting_on, rule
from ftp.rules.local import unless_empty

aten = torch.ops.aten


@rule(aten.cumsum.default)
def cumsum(call: Call) -> Rule:
    return acting_on(call, [call.arg("dim")], linear=[(0,)])


@rule(
    aten.cummax.default, aten.cummin.default, aten.cumprod.default, aten.logcumsumexp.default,
    aten.sort.default, aten.sort.stable, aten.argsort.default, aten.argsort.stable, aten.topk.default,
)  # fmt: skip
def ordered(call: Call) -> Rule:
    return acting_on(call, [call.arg("dim")], local=unless_empty(call))
