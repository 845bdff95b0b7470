"""Local forms that several families share."""

import functools
from typing import Any

import torch
from torch import fx

from ftp.rules.local_op import LocalOp
from ftp.rules.overloads import aten
from ftp.rules.rule import LocalHook

NOTHING = -0.0  # added to any number gives it, with its sign; 0.0 makes 0.0 of -0.0


def with_shape(at: int) -> LocalHook:
    """The op with its argument ``at`` replaced by the local shape of its result."""
    return lambda op: op.replaced(at, op.shape())


def contiguous(*operands: int) -> LocalHook:
    """The op on contiguous copies of some positional arguments, for kernels that misread other
    strides.
    """

    def local(op: LocalOp) -> fx.Node:
        return op.default(
            *(
                op.emit(aten.contiguous.default, a) if i in operands and a is not None else a
                for i, a in enumerate(op.args)
            )
        )

    return local


def zeros(op: LocalOp, result: int = 0, zero: float = 0) -> fx.Node:
    """Zeros in a result's local shape."""
    meta = op.call.results[result]
    return op.emit(aten.full.default, op.shape(result), zero, dtype=meta.dtype, device=op.device)


def unless_empty(local: LocalHook | None = None, *, inputs: bool = True) -> LocalHook:
    """``local``, or zeros if a cut leaves this rank no element of the first result or (with
    ``inputs``) of an operand: kernels differ on empty tensors.

    A call that is empty before any cut gets the kernel's value: the determinant of matrices without
    rows is one.
    """

    def guarded(op: LocalOp) -> Any:
        call = op.call
        shapes = [(op.shape(0), call.results[0])]
        shapes += [(op.operand_shape(i), meta) for i, meta in enumerate(call.operands) if inputs]
        if op.is_cut() and any(
            size == 0 and whole
            for shape, meta in shapes
            for size, whole in zip(shape, meta.shape, strict=True)
        ):
            made = tuple(zeros(op, i) for i in range(len(call.results)))
            return made[0] if len(made) == 1 else made
        return local(op) if local is not None else op.default()

    return guarded


def is_first(op: LocalOp, *factors: str) -> fx.Node | None:
    """A 0-d bool that is true on exactly one of the ranks that ``factors`` are cut over; None if
    none is cut.
    """
    starts = [cut.start for f in factors for cut in op.cuts.get(f, ())]
    tests = [
        op.emit(
            aten.eq.Scalar,
            op.emit(aten.scalar_tensor.default, s, dtype=torch.int64, device=op.device),
            0,
        )
        for s in starts
    ]
    return (
        functools.reduce(lambda a, b: op.emit(aten.bitwise_and.Tensor, a, b), tests)
        if tests
        else None
    )


def contributed_once(op: LocalOp, value: fx.Node, *factors: str) -> fx.Node:
    """``value`` on one of the ranks that ``factors`` are cut over and zero on the others, so that
    the pending sum counts it once.
    """
    first = is_first(op, *factors)
    return value if first is None else addend(op, value, first)


def masked(op: LocalOp, value: fx.Node, keep: fx.Node, zero: float = 0) -> fx.Node:
    """``value`` where ``keep`` is true, zero elsewhere, even in place of NaN."""
    return op.emit(aten.masked_fill.Scalar, value, op.emit(aten.bitwise_not.default, keep), zero)


def addend(op: LocalOp, value: fx.Node, keep: fx.Node) -> fx.Node:
    """``value`` where ``keep`` is true, elsewhere what adds nothing to a sum."""
    return masked(op, value, keep, NOTHING)


def held_rows(op: LocalOp, factor: str, index: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Global indices along a cut factor as indices into this rank's shard (0 for rows of others),
    and a mask of the rows that it holds.
    """
    at, held = op.to_local(factor, index)
    assert held is not None
    return masked(op, at, held), held


def unsqueezed(op: LocalOp, x: fx.Node, dims: int) -> fx.Node:
    """``x`` with ``dims`` dims of size one behind its own."""
    for _ in range(dims):
        x = op.emit(aten.unsqueeze.default, x, -1)
    return x
