"""Rules of ops that read or write at an index.

If the indexed dim is cut, a rank has some rows only. It reads the rows of other ranks as zero, so
that the sum over ranks is the lookup (the vocab-parallel embedding), and skips writes to them.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ftp.rules.call import Call
from ftp.rules.dims import all_whole, broadcast_notation, factors, numbered
from ftp.rules.forms import along_dim, whole
from ftp.rules.local_forms import (
    NOTHING,
    addend,
    contributed_once,
    held_rows,
    unless_empty,
    unsqueezed,
    zeros,
)
from ftp.rules.local_op import LocalOp
from ftp.rules.notation import Dims, Notation
from ftp.rules.overloads import aten
from ftp.rules.registry import rule
from ftp.rules.rule import Rule
from ftp.rules.size_functions import broadcast_shapes


def masked_lookup(op: LocalOp) -> fx.Node:
    """Rows that another rank holds read as zero, so that the sum over ranks is the lookup."""
    if not op.is_cut("v"):
        return op.default()
    if not op.sizes["v"]:
        return zeros(op, zero=NOTHING)
    weight, index, *_ = op.args
    at, held = held_rows(op, "v", index)
    held = op.emit(aten.unsqueeze.default, held, len(op.rule.operands[1]))
    return addend(op, op.emit(op.target, weight, at), held)


rule(aten.embedding.default, "v d, ... -> ... d {v}", linear=[(0,)], local=masked_lookup)


def _to_held_rows(op: LocalOp) -> fx.Node:
    """Send gradients of rows that another rank holds to a row after the last, which the kernel
    treats as padding.
    """
    if not op.is_cut("v"):
        return op.default()
    grad, index, *rest = op.args
    size, padding = op.sizes["v"], op.call.arg("padding_idx")
    at, held = op.to_local("v", index)
    if padding >= 0:
        held = _and(op, held, op.emit(aten.ne.Scalar, index, padding))
    at = op.emit(aten.where.ScalarOther, held, at, size)
    return _without_last(op, op.emit(op.target, grad, at, size + 1, size, *rest[2:]), 0, size)


# Counting how often a token occurs needs all tokens.
rule(
    aten.embedding_dense_backward.default,
    "... d, ... -> v d {...}",
    linear=[(0,)],
    whole_if="scale_grad_by_freq",
    local=_to_held_rows,
)


# Along ``dim``: x has d rows, of which k are named by the index.


def _dim(op: LocalOp) -> tuple[int, int]:
    """The dim that the op acts along, and how many dims x has after it."""
    ndim = op.call.operands[0].ndim
    dim = op.call.arg("dim") % ndim
    return dim, ndim - dim - 1


def _read(op: LocalOp) -> fx.Node:
    """Rows that another rank holds read as zero."""
    if not op.is_cut("d"):
        return op.default()
    if not op.sizes["d"]:
        return zeros(op, zero=NOTHING)
    dim, after = _dim(op)
    at, held = held_rows(op, "d", op.args[2])
    if op.target is aten.index_select.default:
        held = unsqueezed(op, held, after)
    return addend(op, op.emit(op.target, op.args[0], dim, at), held)


def _add(op: LocalOp) -> fx.Node:
    """If the index is cut, only the first rank adds ``self``; if x is cut, each rank adds to its
    own rows.
    """
    x, _, index, source = op.args
    dim, after = _dim(op)
    if op.is_cut("k"):
        x = contributed_once(op, x, "k")
    if not op.is_cut("d"):
        return op.emit(op.target, x, dim, index, source, **op.kwargs)
    if not op.sizes["d"]:
        return op.emit(aten.alias.default, x)
    at, held = held_rows(op, "d", index)
    if op.target is aten.index_add.default:
        held = unsqueezed(op, held, after)
    return op.emit(op.target, x, dim, at, addend(op, source, held), **op.kwargs)


def _write(op: LocalOp) -> fx.Node:
    """Write rows that another rank holds to a row after the last, which is then cut off."""
    if not op.is_cut("d"):
        return op.default()
    dim, after = _dim(op)
    x, _, index, *rest = op.args
    if op.target is aten.index_copy.default and op.call.operands[1].shape == (1,):
        return _write_one(op, x, index, rest[0])
    if op.target not in (aten.scatter.src, aten.scatter.value):  # these take no negative indices
        index = _from_the_front(op, index, op.rule.sizes["d"])
    at, held = op.to_local("d", index)
    at = op.emit(aten.where.ScalarOther, held, at, op.sizes["d"])
    made = op.emit(op.target, _with_extra(op, x, after), dim, at, *rest)
    return _without_last(op, made, dim, op.sizes["d"])


def _write_one(op: LocalOp, x: fx.Node, index: fx.Node, row: fx.Node) -> fx.Node:
    """Write one row. A rank that does not hold it writes what its first row is, so that ``x`` may
    be written in place.
    """
    if not op.sizes["d"]:
        return op.emit(aten.alias.default, x)
    dim, after = _dim(op)
    at, held = held_rows(op, "d", index)
    before = op.emit(aten.index_select.default, x, dim, at)
    row = op.emit(aten.where.self, unsqueezed(op, held, after), row, before)
    return op.emit(op.target, x, dim, at, row)


# One index per element.
along_dim(aten.gather.default, "... d, ... k -> ... k {d}", linear=[(0,)], local=_read)
along_dim(aten.scatter_add.default, "... d, ... k, ... k -> ... d {k}", linear=[(0, 2)], local=_add)
along_dim(aten.scatter.src, "... d, ... [k], ... [k] -> ... d", linear=[(0, 2)], local=_write)
along_dim(
    aten.scatter.value, "... d, ... [k] -> ... d", linear=[(0,)], if_zero="value", local=_write
)
along_dim(aten.scatter.reduce, aten.scatter_reduce.two, "... [d], ... [k], ... [k] -> ... [d]")
along_dim(aten.scatter.value_reduce, "... [d], ... [k] -> ... [d]")


def is_sum_of_source(scatter: Sequence[Any], dims: Sequence[int] | None) -> bool:
    """Whether the sums over ``dims`` of what ``scatter_add`` puts onto zeros are the sums of its
    source: it adds every element, and changes no other element.

    Args:
        scatter: the shapes of its first operand, the dim, and the shapes of index and source.
    """
    onto, dim, index, source = scatter
    ndim = max(len(onto), 1)
    at = dim % ndim
    others = [d for d in range(len(onto)) if d != at and onto[d] != source[d]]
    is_along = [d % ndim for d in dims or ()] == [at]
    return is_along and tuple(index) == tuple(source) and not others


def is_of_difference(shapes: Sequence[Any], dim: int) -> bool:
    """Whether ``(x - row).gather(dim, index)`` is ``x.gather(dim, index) - row``: the row has one
    element along ``dim``.

    Args:
        shapes: of the difference, x, row and index.
    """
    whole, x, row, index = map(tuple, shapes)
    if not len(whole) == len(x) == len(row) == len(index) > 0 or x != whole:
        return False
    at = dim % len(whole)
    return row[at] == 1 and all(
        whole[d] == row[d] == index[d] for d in range(len(whole)) if d != at
    )


# One index per row.
along_dim(aten.index_select.default, "... d, k -> ... k {d}", linear=[(0,)], local=_read)
along_dim(aten.index_add.default, "... d, k, ... k -> ... d {k}", linear=[(0, 2)], local=_add)
along_dim(aten.index_copy.default, "... d, [k], ... [k] -> ... d", local=_write)
along_dim(aten.index_fill.int_Scalar, "... d, [k] -> ... d", local=_write)
along_dim(aten.index_reduce.default, "... [d], [k], ... [k] -> ... [d]")


# Indices that broadcast together.


@rule(aten.index.Tensor, aten._unsafe_index.Tensor)
def index(call: Call) -> Rule:
    if any(i is not None and i.dtype in MASKS for i in call.args[1]):
        return all_whole(call, linear=[(0,)])
    seen = _Indexed(call)

    def local(op: LocalOp) -> fx.Node:
        cut = [f for f in seen.indexed if op.is_cut(f)]
        if not cut:
            return op.default()
        if any(not op.sizes[f] for f in cut):
            return zeros(op, zero=NOTHING)
        indices, held = seen.local_indices(op, op.args[1])
        rows = op.emit(op.target, op.args[0], indices)
        return addend(op, rows, unsqueezed(op, held, seen.after))

    pending = tuple((f, "sum") for f in seen.indexed)
    return Rule(
        Notation((seen.x, *seen.indices), (seen.result,), frozenset(), (pending,)), ((0,),), local
    )


@rule(aten.index_put.default, aten._unsafe_index_put.default)
def index_put(call: Call) -> Rule:
    """With ``accumulate`` the values may be cut, and the first rank adds ``self``. Writes that
    replace need all values.
    """
    if any(i is not None and i.dtype in MASKS for i in call.args[1]):
        return _masked_put(call)
    seen = _Indexed(call)
    adds = bool(call.arg("accumulate"))
    values = call.arg("values")
    skip = len(seen.result) - values.ndim
    value_dims = tuple(
        dim if size == seen.result_shape[skip + d] else ()
        for d, (dim, size) in enumerate(zip(seen.result[skip:], values.shape, strict=True))
    )
    batch = [f for dim in seen.batch for f in dim]

    def local(op: LocalOp) -> fx.Node:
        x, indices, value, *rest = op.args
        if batch and op.is_cut(*batch):
            x = contributed_once(op, x, *batch)
        cut = [f for f in seen.indexed if op.is_cut(f)]
        if not cut:
            return op.emit(op.target, x, indices, value, *rest, **op.kwargs)
        if adds and any(not op.sizes[f] for f in cut):
            return op.emit(aten.alias.default, x)
        at, held = seen.local_indices(op, indices)
        if adds:
            value = addend(op, value, unsqueezed(op, held, seen.after))
            return op.emit(op.target, x, at, value, *rest, **op.kwargs)
        dim = seen.x.index((cut[0],))
        size = op.sizes[cut[0]]
        at[dim] = op.emit(aten.where.ScalarOther, held, at[dim], size)
        x = _with_extra(op, x, len(seen.x) - 1 - dim)
        made = op.emit(op.target, x, at, value, *rest, **op.kwargs)
        return _without_last(op, made, dim, size)

    whole = frozenset() if adds else frozenset(batch)
    if not adds and len(seen.indexed) > 1:
        whole |= set(seen.indexed)
    pending = tuple((f, "sum") for f in batch) if adds else ()
    return Rule(
        Notation((seen.x, *seen.indices, value_dims), (seen.x,), whole, (pending,)),
        ((0, len(seen.indices) + 1),),
        local,
    )


MASKS = (torch.bool, torch.uint8)


def _masked_put(call: Call) -> Rule:
    """A mask with one value is elementwise; several values are assigned in order."""
    x, *masks, values = call.operands
    at = next(d for d, i in enumerate(call.args[1]) if i is not None)
    if len(masks) > 1 or math.prod(values.shape) != 1:
        return all_whole(call)
    dims = numbered(x.ndim)
    one = ((),) * values.ndim
    return Rule(Notation((dims, dims[at : at + masks[0].ndim], one), (dims,), frozenset(), ((),)))


class _Indexed:
    """The dims of ``x[indices]``: of x, of each index and of the result, whose last ``after`` dims
    are not indexed.
    """

    def __init__(self, call: Call):
        x, given = call.args[0], list(call.args[1])
        at = [d for d, i in enumerate(given) if i is not None]
        metas = [given[d] for d in at]
        broadcast = broadcast_shapes(*(m.shape for m in metas))
        notation = broadcast_notation([m.shape for m in metas], [tuple(broadcast)])
        self.x: Dims = numbered(x.ndim)
        self.indices: tuple[Dims, ...] = tuple(map(_of_batch, notation.operands))
        self.batch: Dims = _of_batch(notation.results[0])
        self.indexed = [f for d in at for f in self.x[d]]
        self.sizes = {d: x.shape[d] for d in at}
        rest = [d for d in range(x.ndim) if d not in at]
        together = at == list(range(at[0], at[0] + len(at)))
        before = [d for d in rest if d < at[0]] if together else []
        behind = [d for d in rest if d not in before]
        self.after = len(behind)
        self.result: Dims = (
            *(self.x[d] for d in before),
            *self.batch,
            *(self.x[d] for d in behind),
        )
        self.result_shape = (
            *(x.shape[d] for d in before),
            *broadcast,
            *(x.shape[d] for d in behind),
        )
        self.at = at

    def local_indices(
        self, op: LocalOp, indices: Sequence[fx.Node | None]
    ) -> tuple[list[fx.Node | None], fx.Node]:
        """The indices into this rank's shard (0 for rows of others), and a mask of its own rows."""
        local, all_held = list(indices), None
        for d in self.at:
            (factor,) = self.x[d]
            index = indices[d]
            if not op.is_cut(factor):
                continue
            index = _from_the_front(op, index, self.sizes[d])
            local[d], held = held_rows(op, factor, index)
            all_held = held if all_held is None else _and(op, all_held, held)
        assert all_held is not None
        return local, all_held


def _of_batch(dims: Dims) -> Dims:
    """Dims of indices, whose factors are apart from those of x."""
    return tuple(tuple(f"b{f[1:]}" for f in dim) for dim in dims)


# Others.


@rule(aten.take.default)
def take(call: Call) -> Rule:
    """Numbers count through all of x, which is whole."""
    x, index = call.operands
    dims = numbered(index.ndim)
    x_dims = tuple((f"x{d}",) for d in range(x.ndim))
    return Rule(Notation((x_dims, dims), (dims,), frozenset(f for (f,) in x_dims), ((),)), ((0,),))


whole(aten.repeat_interleave.Tensor)  # the indices of repeated rows, as many as the call states
whole(
    aten.put.default,
    aten.masked_scatter.default,
    aten.bincount.default,
    aten.nonzero_static.default,
)
whole(aten.masked_scatter_backward.default, linear=((0,),))


@rule(aten.histc.default)
def histc(call: Call) -> Rule:
    """Counts of parts add up if a range is given; an empty one stands for the data's."""
    x = call.operands[0]
    given = call.arg("min") != call.arg("max")
    dims = numbered(x.ndim)
    pending = tuple((f, "sum") for (f,) in dims) if given else ()
    whole = frozenset({"bins"}) if given else factors(dims) | {"bins"}
    return Rule(Notation((dims,), ((("bins",),),), whole, (pending,)), (), unless_empty())


# The sorter is optional.
rule(
    aten.searchsorted.Tensor,
    "[s], ..., [s] -> ...",
    "... [s], ... k, ... [s] -> ... k",
    local=unless_empty(inputs=False),
)
rule(aten.bucketize.Tensor, "..., [s] -> ...")


def _and(op: LocalOp, a: fx.Node | None, b: fx.Node) -> fx.Node:
    return b if a is None else op.emit(aten.bitwise_and.Tensor, a, b)


def _from_the_front(op: LocalOp, index: fx.Node | None, size: int) -> fx.Node:
    """Indices with negative ones replaced by their positions from the front."""
    is_negative = op.emit(aten.lt.Scalar, index, 0)
    return op.emit(aten.where.self, is_negative, op.emit(aten.add.Scalar, index, size), index)


def _with_extra(op: LocalOp, x: fx.Node, after: int) -> fx.Node:
    """``x`` with one more row at the end of the dim before the last ``after`` dims."""
    return op.emit(aten.constant_pad_nd.default, x, [0, 0] * after + [0, 1])


def _without_last(op: LocalOp, x: fx.Node, dim: int, size: int) -> fx.Node:
    return op.emit(aten.slice.Tensor, x, dim, 0, size)
