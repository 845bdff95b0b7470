"""Losses: of elements, reduced as an argument says, and connectionist temporal classification."""

import math

from torch import fx
from torch._ops import OpOverload

from ftp.dynamic_int import broadcast_shapes
from ftp.ops.static_shape import ctc_loss, ctc_loss_backward
from ftp.rules.call import Call
from ftp.rules.dims import broadcast_notation
from ftp.rules.forms import pointwise
from ftp.rules.local_forms import unless_empty
from ftp.rules.local_op import LocalOp
from ftp.rules.notation import Notation
from ftp.rules.overloads import aten
from ftp.rules.registry import register, rule
from ftp.rules.rule import Rule


def losses(*ops: OpOverload) -> None:
    """Elementwise losses whose argument ``reduction`` asks for all terms, their mean or sum.

    >>> losses(aten.mse_loss.default)
    """
    register(ops, _loss)


def _loss(call: Call) -> Rule:
    """A mean divides the sum by the size of the whole."""
    reduction, operands = call.arg("reduction"), [m.shape for m in call.operands]
    if reduction == 0:
        return Rule(broadcast_notation(operands, [m.shape for m in call.results]))
    terms = broadcast_notation(operands, [])
    count = math.prod(broadcast_shapes(*operands))

    def local(op: LocalOp) -> fx.Node:
        if not op.is_cut() or reduction == 2:
            return op.default()
        return op.emit(aten.div.Scalar, _with_reduction(op, 2), count)

    factors = dict.fromkeys(f for dims in terms.operands for dim in dims for f in dim)
    summed = tuple((f, "sum") for f in factors)
    return Rule(Notation(terms.operands, ((),), frozenset(), (summed,)), (), local)


def _share_of_mean(op: LocalOp) -> fx.Node:
    """The gradient of a mean is that of a sum over the number of elements of the whole."""
    if not op.is_cut() or op.call.arg("reduction") != 1:
        return op.default()
    count = math.prod(op.call.results[0].shape)
    return _with_reduction(op, 2, op.emit(aten.div.Scalar, op.args[0], count))


def _with_reduction(op: LocalOp, reduction: int, *args: fx.Node) -> fx.Node:
    names = [a.name for a in op.target._schema.arguments]
    at = names.index("reduction")
    given = [*args, *op.args[len(args) :]]
    if at < len(given):
        given[at] = reduction
        return op.emit(op.target, *given, **op.kwargs)
    return op.emit(op.target, *given, **{**op.kwargs, "reduction": reduction})


losses(
    aten.binary_cross_entropy.default, aten.huber_loss.default,
    aten.mse_loss.default, aten.smooth_l1_loss.default, aten.soft_margin_loss.default,
)  # fmt: skip
pointwise(
    aten.binary_cross_entropy_backward.default, aten.huber_loss_backward.default,
    aten.mse_loss_backward.default, aten.smooth_l1_loss_backward.default,
    aten.soft_margin_loss_backward.default,
    linear=[(0,)], local=_share_of_mean,
)  # fmt: skip

# CTC: examples are independent. Targets in one row, of all examples, are whole, and so are the
# examples.
rule(
    ctc_loss,
    "[t] n [c], n [l], n, n -> n, n [t] [w]",
    "[t] [n] [c], [l], [n], [n] -> [n], [n] [t] [w]",
    local=unless_empty(inputs=False),
)
rule(
    ctc_loss_backward,
    "n, [t] n [c], n [l], n, n, n, n [t] [w] -> [t] n [c]",
    "[n], [t] [n] [c], [l], [n], [n], [n], [n] [t] [w] -> [t] [n] [c]",
    linear=[(0,)],
    local=unless_empty(inputs=False),
)
