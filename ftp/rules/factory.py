"""Tensors made from sizes: every rank makes its own part."""

from collections.abc import Sequence

import torch
from torch import fx

from ftp.rules.local_forms import with_shape
from ftp.rules.local_op import LocalOp
from ftp.rules.notation import Dims, Notation
from ftp.rules.registry import make, rule
from ftp.rules.rule import Call, LocalHook, Rule

aten = torch.ops.aten


@rule(aten.empty.memory_format, aten.full.default, aten.ones.default, aten.zeros.default)
def filled(call: Call) -> Rule:
    return Rule(Notation((), (_dims(call.results[0].ndim),), frozenset(), ((),)), (), with_shape(0))


@rule(aten.empty_strided.default, aten.empty_permuted.default)
def empty_strided(call: Call) -> Rule:
    """A part has other strides."""
    (y,) = call.results

    def local(op: LocalOp) -> fx.Node:
        return op.emit(aten.empty.memory_format, op.shape(), dtype=y.dtype, device=op.device)

    return Rule(Notation((), (_dims(y.ndim),), frozenset(), ((),)), (), local)


@rule(aten.new_empty.default, aten.new_full.default, aten.new_ones.default, aten.new_zeros.default)
def new(call: Call) -> Rule:
    """Only the type of the operand counts; dims of one size are taken for the same, so that it
    need not be gathered.
    """
    is_zero = call.target is aten.new_zeros.default or (
        call.target is aten.new_full.default and call.arg("fill_value") == 0
    )
    return _like(call, with_shape(1), [(0,)] if is_zero else ())


@rule(aten.new_empty_strided.default)
def new_empty_strided(call: Call) -> Rule:
    return _like(
        call, lambda op: op.emit(aten.new_empty.default, op.args[0], op.shape(), **op.kwargs)
    )


def _like(call: Call, local: LocalHook, linear: Sequence[tuple[int]] = ()) -> Rule:
    x, (y,) = call.operands[0], call.results
    operand = tuple(
        (f"~{d}",) if d < y.ndim and y.shape[d] == s else (f"x{d}",) for d, s in enumerate(x.shape)
    )
    return Rule(Notation((operand,), (_dims(y.ndim),), frozenset(), ((),)), tuple(linear), local)


rule(aten.scalar_tensor.default, "-> ()")


@rule(*(
    getattr(packet, overload)
    for packet in (aten.bartlett_window, aten.blackman_window, aten.hamming_window, aten.hann_window, aten.kaiser_window)
    for overload in packet.overloads()
    if not overload.endswith("out")
))  # fmt: skip
def window(call: Call) -> Rule:
    """As short as a spectrum's frame: every rank makes all of it."""
    return make("-> [n]")


@rule(aten.arange.default, aten.arange.start, aten.arange.start_step)
def arange(call: Call) -> Rule:
    """A cut one is made from the global positions of what a rank holds."""
    names = [a.name for a in call.target._schema.arguments]
    start = call.arg("start") if "start" in names else 0
    step = call.arg("step") if "step" in names else 1
    (y,) = call.results

    def local(op: LocalOp) -> fx.Node:
        if not op.is_cut():
            return op.default()
        at = op.positions("i")
        if step != 1:
            at = op.emit(aten.mul.Scalar, at, step)
        if start != 0:
            at = op.emit(aten.add.Scalar, at, start)
        return op.emit(aten._to_copy.default, at, dtype=y.dtype)

    return Rule(Notation((), ((("i",),),), frozenset(), ((),)), (), local)


@rule(aten.eye.default, aten.eye.m)
def eye(call: Call) -> Rule:
    (y,) = call.results

    def local(op: LocalOp) -> fx.Node:
        if not op.is_cut():
            return op.default()
        rows, columns = op.positions("m"), op.positions("n")
        same = op.emit(aten.eq.Tensor, columns, op.emit(aten.unsqueeze.default, rows, 1))
        return op.emit(aten._to_copy.default, same, dtype=y.dtype)

    return Rule(Notation((), ((("m",), ("n",)),), frozenset(), ((),)), (), local)


@rule(
    aten.linspace.default,
    aten.logspace.default,
    aten.tril_indices.default,
    aten.triu_indices.default,
)
def whole(call: Call) -> Rule:
    dims = _dims(call.results[0].ndim)
    return Rule(Notation((), (dims,), frozenset(f for dim in dims for f in dim), ((),)))


def _dims(ndim: int) -> Dims:
    return tuple((f"~{d}",) for d in range(ndim))
