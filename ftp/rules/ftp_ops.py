"""Rules of ftp's own ops: stacks, functions of slices, choices, random bits, fused optimizers."""

import itertools
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import fx

from ftp.ops.choose import CHOOSE
from ftp.ops.fused_optimizer import UPDATES
from ftp.ops.map_slices import MAP_SLICES, slice_program_of
from ftp.ops.mapped_arguments import evaluated, mapped_arguments
from ftp.ops.philox import random_bits, random_keys
from ftp.ops.repeat_each import REPEAT_EACH, SUM_EACH
from ftp.ops.stack import STACK, UNSTACK
from ftp.rules.call import Call
from ftp.rules.dims import broadcast_notation
from ftp.rules.forms import along_dim, pointwise
from ftp.rules.local_forms import zeros
from ftp.rules.local_op import LocalCut, LocalOp, Offset
from ftp.rules.notation import Dims, Notation
from ftp.rules.overloads import aten
from ftp.rules.registry import rule
from ftp.rules.rule import LocalHook, Rule
from ftp.torch_internals.op_types import OpOverload

# Neither op passes a pending sum on: each slice is reduced by itself, so that a rank holds one
# layer's terms at a time.


def _emitting(target: OpOverload) -> LocalHook:
    return lambda op: op.emit(target, op.args[0])


along_dim(UNSTACK, "... [k] -> ...", dim=0, local=_emitting(aten.unbind.int))
along_dim(STACK, "... -> ... [k]", dim=0, local=_emitting(aten.stack.default))


def _picked(op: LocalOp) -> fx.Node:
    x, times, dim = op.args
    if not op.is_cut("g"):
        return op.default()
    rows = op.emit(aten.floor_divide.Scalar, op.positions("g"), times)
    return op.emit(aten.index_select.default, x, dim, rows)


def _summed(op: LocalOp) -> fx.Node:
    """The sums of this rank's elements at their place among zeros. In an even cut, neighbours that
    have one place are summed first: adding at a place twice is in no fixed order on GPUs.
    """
    x, times, dim = op.args
    if not op.is_cut("g"):
        return op.default()
    rows = op.emit(aten.floor_divide.Scalar, op.positions("g"), times)
    held, cuts = op.sizes["g"], op.cuts["g"]
    is_even = all((c.outer, c.inner, c.size % c.n, c.second) == (1, 1, 0, None) for c in cuts)
    step = math.gcd(held, times) if is_even else 1
    if step > 1:
        x = op.emit(SUM_EACH, x, step, dim)
        rows = op.emit(aten.slice.Tensor, rows, 0, 0, held, step)
    return op.emit(aten.index_add.default, zeros(op), dim, rows, x)


# The elements before they are repeated are whole, so that a rank may hold any of the repeated ones:
# query heads are cut over more ranks than there are heads of keys.
along_dim(REPEAT_EACH, "... [k] -> ... g", linear=[(0,)], local=_picked)
along_dim(SUM_EACH, "... g -> ... [k] {g}", linear=[(0,)], local=_summed)


@rule(MAP_SLICES)
def map_slices(call: Call) -> Rule:
    """Slices may be on any rank; each slice is whole, and so are tensors that all slices share."""
    stacks, shared, _ = call.args
    names = (f"~{i}" for i in itertools.count())
    operands = [(("k",), *_whole(x.ndim - 1, names)) for x in stacks]
    operands += [_whole(x.ndim, names) for x in shared]
    results = [(("k",), *_whole(x.ndim - 1, names)) for x in call.results]
    dims = [factor for tensor in (*operands, *results) for (factor,) in tensor]
    pending = ((),) * len(results)
    notation = Notation(tuple(operands), tuple(results), frozenset(dims) - {"k"}, pending)
    return Rule(notation, (), _each_slice)


def _whole(ndim: int, names: Iterator[str]) -> Dims:
    return tuple((next(names),) for _ in range(ndim))


def _each_slice(op: LocalOp) -> tuple[fx.Node, ...]:
    """Emit the function's nodes once for each slice that the rank holds."""
    stacks, shared, key = op.args
    graph, count = slice_program_of(key).gm.graph, op.sizes["k"]
    if not count:
        return tuple(
            op.emit(aten.full.default, op.shape(i), 0, dtype=meta.dtype, device=op.device)
            for i, meta in enumerate(op.call.results)
        )
    # The function was traced on contiguous slices, and kernels were chosen for those.
    columns = [_slices(op, i, x) for i, x in enumerate(stacks)]
    shared = [op.emit(aten.contiguous.default, x) for x in shared]

    def emitted(node: fx.Node, known: Mapping[fx.Node, fx.Node]) -> fx.Node:
        args, kwargs = mapped_arguments(node, known.__getitem__)
        target: Any = aten.reshape.default if node.target is aten.view.default else node.target
        return op.emit(target, *args, **kwargs)

    made = [
        evaluated(graph, [*(column[i] for column in columns), *shared], emitted)
        for i in range(count)
    ]
    return tuple(op.emit(aten.stack.default, list(x)) for x in zip(*made, strict=True))


ALIGNMENT = 64  # bytes, of fresh memory


def _slices(op: LocalOp, at: int, stack: fx.Node) -> list[fx.Node]:
    """The slices of a stack that the rank holds, each aligned like a separate tensor: a kernel
    may round differently on memory that is not aligned.
    """
    stack, meta = op.emit(aten.contiguous.default, stack), op.call.operands[at]
    count = op.sizes["k"]
    if math.prod(meta.shape[1:]) * meta.dtype.itemsize % ALIGNMENT:
        copies = op.emit(UNSTACK, stack)
        return [op.item(copies, i) for i in range(count)]
    return [op.emit(aten.select.int, stack, 0, i) for i in range(count)]


Pieces = list[tuple[int, int]]  # a dim as sizes, major to minor, each with its stride in the stream


@rule(random_bits)
def bits(call: Call) -> Rule:
    batch = call.operands[0].ndim - 1
    dims = tuple((f"~{d}",) for d in range(call.results[0].ndim))
    return Rule(Notation(((*dims[:batch], ("k",)),), (dims,), frozenset({"k"}), ((),)), (), _part)


def _part(op: LocalOp) -> fx.Node:
    if not op.is_cut():
        return op.default()
    key, size, stride, offset = op.args
    batch = len(op.rule.operands[0]) - 1
    pieces: Pieces = []
    picked: dict[int, str] = {}
    for d, (n, step) in enumerate(zip(size, stride, strict=True), batch):
        factor = f"~{d}"
        found = _pieces(op, op.cuts.get(factor, ()), n, step, offset)
        if found is None:
            picked[d] = factor
            found = [(n, step)], offset
        of_dim, offset = found
        pieces += of_dim
    made = op.emit(op.target, key, [n for n, _ in pieces], [step for _, step in pieces], offset)
    shape = op.shape()
    if not picked:
        return (
            made
            if not batch and shape == [n for n, _ in pieces]
            else op.emit(aten.view.default, made, shape)
        )
    made = op.emit(
        aten.view.default,
        made,
        [size[d - batch] if d in picked else n for d, n in enumerate(shape)],
    )
    for d, factor in picked.items():
        made = op.emit(aten.index_select.default, made, d, op.positions(factor))
    return made


def _pieces(
    op: LocalOp, cuts: Sequence[LocalCut], n: int, step: int, offset: Offset
) -> tuple[Pieces, Offset] | None:
    """The part of a dim that the cuts leave, and its offset; None if nested cuts leave a part that
    strides cannot describe.
    """
    pieces: Pieces = [(n, step)]
    for cut in cuts:
        if len(pieces) == 1 and cut.outer == 1 and pieces[0][0] == cut.size:
            before, middle, after = [], pieces, []  # as of other sizes where the size is one
        else:
            before, rest = _split(pieces, cut.outer)
            middle, after = _split(rest, cut.size) if rest is not None else (None, None)
        if before is None or middle is None or after is None or cut.second is not None:
            return None
        within = _narrow(op, middle, cut.start, cut.length, offset)
        if within is None:
            return None
        middle, offset = within
        pieces = [*before, *middle, *after]
    return pieces, offset


def _narrow(
    op: LocalOp, pieces: Pieces, start: Offset, length: int, offset: Offset
) -> tuple[Pieces, Offset] | None:
    """The pieces of elements ``start`` to ``start + length``; None if these are not pieces again.

    If the length is a multiple of the inner pieces' size, or divides it, so does the start, which
    is a multiple of the length or, in the last part, the rest of the whole.
    """
    if not pieces or length == 0:
        return [(length, 1)], offset
    (_, step), *inner = pieces
    size = math.prod(n for n, _ in inner)
    if size > 1 and length % size and size % length:
        return None
    offset = op.emit(
        operator.add, offset, op.emit(operator.mul, op.emit(operator.floordiv, start, size), step)
    )
    if length % size:
        return _narrow(op, inner, op.emit(operator.mod, start, size), length, offset)
    return [(length // size, step), *inner], offset


def _split(pieces: Pieces, size: int) -> tuple[Pieces | None, Pieces | None]:
    """Split pieces in two: the major ones, whose sizes multiply to ``size``, and the others."""
    left: Pieces = []
    right = [p for p in pieces if p[0] != 1]
    while size != 1:
        if not right:
            return None, None
        n, step = right.pop(0)
        if n and size % n == 0:
            left.append((n, step))
            size //= n
        elif size and n % size == 0:
            inner = n // size
            left.append((size, step * inner))
            right.insert(0, (inner, step))
            size = 1
        else:
            return None, None
    return left, right


@rule(random_keys)
def keys(call: Call) -> Rule:
    key, counter = call.operands
    notation = broadcast_notation([key.shape[:-1], counter.shape], [call.results[0].shape[:-1]])
    (of_key, of_counter), (made,) = notation.operands, notation.results
    last: Dims = (("k",),)
    return Rule(Notation((of_key + last, of_counter), (made + last,), frozenset({"k"}), ((),)))


pointwise(*UPDATES)
pointwise(CHOOSE, linear=[(1, 2)])
