"""Ops that run along a dim: sums so far, orders."""

import torch

from ftp.rules.forms import acting_on
from ftp.rules.local_forms import unless_empty
from ftp.rules.registry import rule
from ftp.rules.rule import Call, Rule

aten = torch.ops.aten


@rule(aten.cumsum.default)
def cumsum(call: Call) -> Rule:
    return acting_on(call, [call.arg("dim")], linear=[(0,)])


@rule(
    aten.cummax.default, aten.cummin.default, aten.cumprod.default, aten.logcumsumexp.default,
    aten.sort.default, aten.sort.stable, aten.argsort.default, aten.argsort.stable,
    aten.topk.default,
)  # fmt: skip
def ordered(call: Call) -> Rule:
    return acting_on(call, [call.arg("dim")], local=unless_empty(call))
