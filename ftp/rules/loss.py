"""Rules of losses: elementwise ones with a ``reduction``, margin losses, and CTC."""

import math
from typing import Any

import torch
from torch import fx

from ftp.ops.static_shape import ctc_loss, ctc_loss_backward
from ftp.rules.call import Call
from ftp.rules.decompositions.registry import HALF
from ftp.rules.dims import broadcast_notation
from ftp.rules.forms import pointwise
from ftp.rules.local_forms import unless_empty
from ftp.rules.local_op import LocalOp
from ftp.rules.notation import Dims, Notation
from ftp.rules.overloads import aten
from ftp.rules.registry import register, rule
from ftp.rules.rule import Rule
from ftp.rules.size_functions import broadcast_shapes
from ftp.torch_internals.op_types import OpOverload


def losses(*ops: OpOverload) -> None:
    """Elementwise losses whose argument ``reduction`` asks for all terms, their mean or sum.

    >>> losses(aten.mse_loss.default)
    """
    register(ops, _loss)


def _loss(call: Call) -> Rule:
    """The local form of a mean divides the local sum by the global number of elements."""
    reduction, operands = call.arg("reduction"), [m.shape for m in call.operands]
    if reduction == 0:
        return Rule(broadcast_notation(operands, [m.shape for m in call.results]))
    terms = broadcast_notation(operands, [])
    count = math.prod(broadcast_shapes(*operands))

    def local(op: LocalOp) -> fx.Node:
        if not op.is_cut() or reduction == 2:
            return op.default()
        dtype = call.results[0].dtype
        if dtype not in HALF:
            return op.emit(aten.div.Scalar, _with_reduction(op, 2), count)
        # Their sum may be beyond the range of half precision.
        total = op.emit(aten.sum.default, _with_reduction(op, 0), dtype=torch.float32)
        mean = op.emit(aten.div.Scalar, total, count)
        return op.emit(aten._to_copy.default, mean, dtype=dtype)

    factors = dict.fromkeys(f for dims in terms.operands for dim in dims for f in dim)
    summed = tuple((f, "sum") for f in factors)
    return Rule(Notation(terms.operands, ((),), frozenset(), (summed,)), (), local)


def _share_of_mean(op: LocalOp) -> fx.Node:
    """The gradient of a mean: that of the sum, divided by the global number of elements."""
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
    aten.binary_cross_entropy.default, aten.binary_cross_entropy_with_logits.default,
    aten.huber_loss.default,
    aten.mse_loss.default, aten.smooth_l1_loss.default, aten.soft_margin_loss.default,
)  # fmt: skip
pointwise(
    aten.binary_cross_entropy_backward.default, aten.huber_loss_backward.default,
    aten.mse_loss_backward.default, aten.smooth_l1_loss_backward.default,
    aten.soft_margin_loss_backward.default,
    linear=[(0,)], local=_share_of_mean,
)  # fmt: skip

# Margins between an example's classes, which are whole: one loss per example, reduced.


def _example_dims(call: Call, at: int) -> tuple[Dims, Dims]:
    """Dims of operand ``at``, (examples, classes), and of the losses, (examples,). A single example
    has no dim.
    """
    ndim = call.operands[at].ndim
    return ((("n",), ("c",)) if ndim == 2 else (("c",),) * ndim), (("n",),) if ndim == 2 else ()


def _of_one(ndim: int, dims: Dims) -> Dims:
    """``dims``; for a single example, dims of size one."""
    return dims or ((),) * ndim


def _margin_operands(call: Call, at: int, x: Dims, one: Dims) -> tuple[Dims, ...]:
    """Dims of a margin loss' operands from ``at`` on: there is one label per example, or a label
    (and a mark) per class; there is one weight per class.
    """
    names = [a.name for a in call.target._schema.arguments if "Tensor" in str(a.type)]
    given = [name for name in names if call.arg(name) is not None][at:]
    is_multilabel = "weight" not in names
    found = {
        "self": x,
        "target": x if is_multilabel else _of_one(call.operands[at + 1].ndim, one),
        "weight": (("c",),),
        "is_target": x,
    }
    return tuple(found[name] for name in given)


@rule(aten.multi_margin_loss.default, aten.multilabel_margin_loss_forward.default)
def margin_loss(call: Call) -> Rule:
    """The local form of a mean divides the local sum by the global number of examples."""
    x, one = _example_dims(call, 0)
    reduction, many = call.arg("reduction"), len(call.results) == 2
    loss = () if reduction else _of_one(call.results[0].ndim, one)
    summed = (("n", "sum"),) if reduction and one else ()

    def local(op: LocalOp) -> Any:
        if not op.is_cut() or reduction != 1:
            return op.default()
        out = _with_reduction(op, 2)
        total = op.item(out, 0) if many else out
        mean = op.emit(aten.div.Scalar, total, op.rule.sizes["n"])
        return (mean, op.item(out, 1)) if many else mean

    results, pending = ((loss, x), (summed, ())) if many else ((loss,), (summed,))
    notation = Notation(_margin_operands(call, 0, x, one), results, frozenset("c"), pending)
    return Rule(notation, (), unless_empty(local))


@rule(aten.multi_margin_loss_backward.default, aten.multilabel_margin_loss_backward.default)
def margin_loss_backward(call: Call) -> Rule:
    x, one = _example_dims(call, 1)
    reduction = call.arg("reduction")
    grad = _of_one(call.operands[0].ndim, one) if not reduction else ((),) * call.operands[0].ndim

    def local(op: LocalOp) -> fx.Node:
        if not op.is_cut() or reduction != 1:
            return op.default()
        share = op.emit(aten.div.Scalar, op.args[0], op.rule.sizes["n"])
        return _with_reduction(op, 2, share)

    operands = (grad, *_margin_operands(call, 1, x, one))
    notation = Notation(operands, (x,), frozenset("c"), ((),))
    return Rule(notation, ((0,),), unless_empty(local))


# CTC: examples are independent. If all examples' targets are in one row, targets and examples are
# whole.
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
