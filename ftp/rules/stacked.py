"""Stacks of layers: a slice and its stack are cut alike, on dims that the slices have."""

import torch
from torch import fx

from ftp.localize import LocalOp
from ftp.notation import Notation
from ftp.registry import Call, Rule, rule
from ftp.stacked import STACK, UNSTACK

aten = torch.ops.aten

# Neither hands on a pending sum: each slice is reduced by itself, and what is held at once is one layer's.


@rule(UNSTACK)
def unstack(call: Call) -> Rule:
    dims = tuple((f"~{d}",) for d in range(call.operands[0].ndim - 1))
    n = len(call.results)
    local = _emitting(aten.unbind.int)
    return Rule(Notation(((("k",), *dims),), (dims,) * n, frozenset("k"), ((),) * n), (), local, {"k": call.operands[0].shape[0]})


@rule(STACK)
def stack(call: Call) -> Rule:
    dims = tuple((f"~{d}",) for d in range(call.operands[0].ndim))
    n = len(call.operands)
    return Rule(Notation((dims,) * n, ((("k",), *dims),), frozenset("k"), ((),)), (), _emitting(aten.stack.default), {"k": n})


def _emitting(target: torch._ops.OpOverload):
    def local(op: LocalOp) -> fx.Node:
        return op.emit(target, op.args[0])

    return local
