"""Ops that read or write where an index says.

Where the indexed dim is cut, a rank finds its own rows only: what it reads of others' is zero, so
the sum over ranks is the lookup (the vocab-parallel embedding), and what it would write to others'
it leaves out.
"""

import math
from collections.abc import Sequence

import torch
from torch import fx

from ftp.rules.forms import broadcast_notation
from ftp.rules.local_forms import (
    contributed_once,
    held_rows,
    masked,
    unless_empty,
    unsqueezed,
    zeros,
)
from ftp.rules.local_op import LocalOp
from ftp.rules.notation import Dim, Dims, Notation
from ftp.rules.registry import rule
from ftp.rules.rule import Call, Meta, Rule

aten = torch.ops.aten


@rule(aten.embedding.default)
def embedding(call: Call) -> Rule:
    """``v d, ... -> ... d {v}``"""
    batch = _dims(call.operands[1].ndim)

    def local(op: LocalOp) -> fx.Node:
        if not op.is_cut("v"):
            return op.default()
        if not op.sizes["v"]:
            return zeros(op, call)
        weight, index, *_ = op.args
        at, held = held_rows(op, "v", index)
        return masked(
            op, op.emit(op.target, weight, at), op.emit(aten.unsqueeze.default, held, len(batch))
        )

    return Rule(
        Notation(((("v",), ("d",)), batch), ((*batch, ("d",)),), frozenset(), ((("v", "sum"),),)),
        ((0,),),
        local,
    )


@rule(aten.embedding_dense_backward.default)
def embedding_dense_backward(call: Call) -> Rule:
    """``... d, ... -> v d {...}``; counting how often a token occurs needs all of them."""
    batch = _dims(call.operands[1].ndim)
    names = tuple(f for dim in batch for f in dim)
    counts = bool(call.arg("scale_grad_by_freq"))
    padding = call.arg("padding_idx")

    def local(op: LocalOp) -> fx.Node:
        if not op.is_cut("v"):
            return op.default()
        grad, index, *rest = op.args
        size = op.sizes["v"]
        at, held = op.to_local("v", index)
        if padding >= 0:
            held = _and(op, held, op.emit(aten.ne.Scalar, index, padding))
        at = op.emit(
            aten.where.ScalarOther, held, at, size
        )  # a row beyond the last, which the kernel leaves out
        return op.emit(
            aten.slice.Tensor, op.emit(op.target, grad, at, size + 1, size, *rest[2:]), 0, 0, size
        )

    whole = frozenset(names if counts else ())
    notation = Notation(
        ((*batch, ("d",)), batch),
        ((("v",), ("d",)),),
        whole,
        (() if counts else tuple((f, "sum") for f in names),),
    )
    return Rule(notation, ((0,),), local)


# One index per element: self and index agree in all dims but ``dim``.


@rule(aten.gather.default)
def gather(call: Call) -> Rule:
    x, index = call.operands
    if x.ndim == 0 or index.ndim != x.ndim:
        return _all_whole(call, linear=[(0,)])
    dim = call.arg("dim") % x.ndim
    x_dims, index_dims, whole = _elementwise(x, index, dim)
    (at_dim,) = x_dims[dim]

    def local(op: LocalOp) -> fx.Node:
        if not op.is_cut(at_dim):
            return op.default()
        if not op.sizes[at_dim]:
            return zeros(op, call)
        at, held = held_rows(op, at_dim, op.args[2])
        return masked(op, op.emit(op.target, op.args[0], dim, at), held)

    return Rule(
        Notation((x_dims, index_dims), (index_dims,), whole, (((at_dim, "sum"),),)), ((0,),), local
    )


@rule(aten.scatter_add.default)
def scatter_add(call: Call) -> Rule:
    """Indices may be cut: then ``self`` is added by the first rank alone."""
    x, index, src = call.operands
    if x.ndim == 0 or index.ndim != x.ndim or index.shape != src.shape:
        return _all_whole(call, linear=[(0, 2)])
    dim = call.arg("dim") % x.ndim
    x_dims, index_dims, whole = _elementwise(x, index, dim)
    (at_dim,), (along,) = x_dims[dim], index_dims[dim]

    def local(op: LocalOp) -> fx.Node:
        x, _, index, src = op.args
        if op.is_cut(along):
            x = contributed_once(op, x, along)
        if not op.is_cut(at_dim):
            return op.emit(op.target, x, dim, index, src)
        if not op.sizes[at_dim]:
            return op.emit(aten.alias.default, x)
        at, held = held_rows(op, at_dim, index)
        return op.emit(op.target, x, dim, at, masked(op, src, held))

    return Rule(
        Notation((x_dims, index_dims, index_dims), (x_dims,), whole, (((along, "sum"),),)),
        ((0, 2),),
        local,
    )


@rule(aten.scatter.src, aten.scatter.value)
def scatter(call: Call) -> Rule:
    """Rows that others hold are written beyond the last, then cut off."""
    x, index, *src = call.operands
    value = None if src else call.args[3]
    linear = [(0, 2)] if src else [(0,)] if value == 0 else []
    if x.ndim == 0 or index.ndim != x.ndim or (src and index.shape != src[0].shape):
        return _all_whole(call, linear=linear)
    dim = call.arg("dim") % x.ndim
    x_dims, index_dims, whole = _elementwise(x, index, dim)
    (at_dim,), (along,) = x_dims[dim], index_dims[dim]

    def local(op: LocalOp) -> fx.Node:
        if not op.is_cut(at_dim):
            return op.default()
        x, _, index, src = op.args
        at, held = op.to_local(at_dim, index)
        at = op.emit(aten.where.ScalarOther, held, at, op.sizes[at_dim])
        return _without_last(
            op,
            op.emit(op.target, _with_extra(op, x, x_dims, dim), dim, at, src),
            dim,
            op.sizes[at_dim],
        )

    return Rule(
        Notation(
            (x_dims, index_dims, *(index_dims,) * len(src)), (x_dims,), whole | {along}, ((),)
        ),
        tuple(map(tuple, linear)),
        local,
    )


@rule(aten.scatter_reduce.two, aten.scatter.reduce, aten.scatter.value_reduce)
def scatter_reduce(call: Call) -> Rule:
    x, index, *src = call.operands
    if x.ndim == 0 or index.ndim != x.ndim or (src and index.shape != src[0].shape):
        return _all_whole(call)
    dim = call.arg("dim") % x.ndim
    x_dims, index_dims, whole = _elementwise(x, index, dim)
    return Rule(
        Notation(
            (x_dims, index_dims, *(index_dims,) * len(src)),
            (x_dims,),
            whole | {*x_dims[dim], *index_dims[dim]},
            ((),),
        )
    )


def _elementwise(x: Meta, index: Meta, dim: int) -> tuple[Dims, Dims, frozenset[str]]:
    """Dims of x and of the index; they correspond where as large and are whole where the index
    is smaller.
    """
    whole = set()
    x_dims, index_dims = [], []
    for d in range(x.ndim):
        if d == dim:
            names = (f"x{d}", f"k{d}")
        elif x.shape[d] == index.shape[d]:
            names = (f"~{d}", f"~{d}")
        else:
            names = (f"x{d}", f"k{d}")
            whole |= set(names)
        x_dims.append((names[0],))
        index_dims.append((names[1],))
    return tuple(x_dims), tuple(index_dims), frozenset(whole)


# One index per row.


@rule(aten.index_select.default)
def index_select(call: Call) -> Rule:
    x, index = call.operands
    if x.ndim == 0 or index.ndim == 0:
        return _all_whole(call, linear=[(0,)])
    dim = call.arg("dim") % x.ndim
    dims = _dims(x.ndim)
    (at_dim,) = dims[dim]

    def local(op: LocalOp) -> fx.Node:
        if not op.is_cut(at_dim):
            return op.default()
        if not op.sizes[at_dim]:
            return zeros(op, call)
        at, held = held_rows(op, at_dim, op.args[2])
        return masked(
            op, op.emit(op.target, op.args[0], dim, at), unsqueezed(op, held, 0, x.ndim - dim - 1)
        )

    result = (*dims[:dim], ("k",), *dims[dim + 1 :])
    return Rule(
        Notation((dims, (("k",),)), (result,), frozenset(), (((at_dim, "sum"),),)), ((0,),), local
    )


@rule(aten.index_add.default)
def index_add(call: Call) -> Rule:
    x, index, source = call.operands
    if x.ndim == 0 or index.ndim == 0 or source.ndim != x.ndim:
        return _all_whole(call, linear=[(0, 2)])
    dim = call.arg("dim") % x.ndim
    dims = _dims(x.ndim)
    (at_dim,) = dims[dim]

    def local(op: LocalOp) -> fx.Node:
        x_, _, index, source = op.args
        if op.is_cut("k"):
            x_ = contributed_once(op, x_, "k")
        if not op.is_cut(at_dim):
            return op.emit(op.target, x_, dim, index, source, **op.kwargs)
        if not op.sizes[at_dim]:
            return op.emit(aten.alias.default, x_)
        at, held = held_rows(op, at_dim, index)
        return op.emit(
            op.target,
            x_,
            dim,
            at,
            masked(op, source, unsqueezed(op, held, 0, x.ndim - dim - 1)),
            **op.kwargs,
        )

    rows = (*dims[:dim], ("k",), *dims[dim + 1 :])
    return Rule(
        Notation((dims, (("k",),), rows), (dims,), frozenset(), ((("k", "sum"),),)),
        ((0, 2),),
        local,
    )


@rule(aten.index_copy.default, aten.index_fill.int_Scalar, aten.index_reduce.default)
def index_copy(call: Call) -> Rule:
    """Rows that others hold are written beyond the last, then cut off."""
    x, index, *source = call.operands
    if x.ndim == 0 or index.ndim == 0 or any(s.ndim != x.ndim for s in source):
        return _all_whole(call)
    dim = call.arg("dim") % x.ndim
    dims = _dims(x.ndim)
    (at_dim,) = dims[dim]
    rows = (*dims[:dim], ("k",), *dims[dim + 1 :])
    reduces = call.target is aten.index_reduce.default

    def local(op: LocalOp) -> fx.Node:
        if not op.is_cut(at_dim):
            return op.default()
        x_, _, index, *rest = op.args
        index = op.emit(
            aten.where.self,
            op.emit(aten.lt.Scalar, index, 0),
            op.emit(aten.add.Scalar, index, x.shape[dim]),
            index,
        )
        at, held = op.to_local(at_dim, index)
        at = op.emit(aten.where.ScalarOther, held, at, op.sizes[at_dim])
        return _without_last(
            op,
            op.emit(op.target, _with_extra(op, x_, dims, dim), dim, at, *rest),
            dim,
            op.sizes[at_dim],
        )

    whole = frozenset({"k", at_dim} if reduces else {"k"})
    return Rule(
        Notation((dims, (("k",),), *(rows,) * len(source)), (dims,), whole, ((),)), (), local
    )


# Indices that broadcast together.


@rule(aten.index.Tensor, aten._unsafe_index.Tensor)
def index(call: Call) -> Rule:
    if any(i is not None and i.dtype in MASKS for i in call.args[1]):
        return _all_whole(call, linear=[(0,)])
    seen = _Indexed(call)

    def local(op: LocalOp) -> fx.Node:
        cut = [f for f in seen.indexed if op.is_cut(f)]
        if not cut:
            return op.default()
        if any(not op.sizes[f] for f in cut):
            return zeros(op, call)
        indices, held = seen.local_indices(op, op.args[1])
        return masked(
            op, op.emit(op.target, op.args[0], indices), unsqueezed(op, held, 0, seen.after)
        )

    pending = tuple((f, "sum") for f in seen.indexed)
    return Rule(
        Notation((seen.x, *seen.indices), (seen.result,), frozenset(), (pending,)), ((0,),), local
    )


@rule(aten.index_put.default, aten._unsafe_index_put.default)
def index_put(call: Call) -> Rule:
    """What is added may be cut, ``self`` is then added by the first rank alone; where writes
    replace, all of them are needed.
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
        if op.is_cut(*batch) if batch else False:
            x = contributed_once(op, x, *batch)
        cut = [f for f in seen.indexed if op.is_cut(f)]
        if not cut:
            return op.emit(op.target, x, indices, value, *rest, **op.kwargs)
        if adds and any(not op.sizes[f] for f in cut):
            return op.emit(aten.alias.default, x)
        at, held = seen.local_indices(op, indices)
        if adds:
            return op.emit(
                op.target,
                x,
                at,
                masked(op, value, unsqueezed(op, held, 0, seen.after)),
                *rest,
                **op.kwargs,
            )
        dim = seen.x.index((cut[0],))
        size = op.sizes[cut[0]]
        at[dim] = op.emit(aten.where.ScalarOther, held, at[dim], size)
        return _without_last(
            op,
            op.emit(op.target, _with_extra(op, x, seen.x, dim), at, value, *rest, **op.kwargs),
            dim,
            size,
        )

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
    """One value put where a mask holds is elementwise; several are taken in order."""
    x, *masks, values = call.operands
    at = next(d for d, i in enumerate(call.args[1]) if i is not None)
    if len(masks) > 1 or math.prod(values.shape) != 1:
        return _all_whole(call)
    dims = _dims(x.ndim)
    one = ((),) * values.ndim
    return Rule(Notation((dims, dims[at : at + masks[0].ndim], one), (dims,), frozenset(), ((),)))


class _Indexed:
    """The dims of ``x[indices]``: of x, of each index, of the result, which ends in ``after``
    dims that no index stands for.
    """

    def __init__(self, call: Call):
        x, given = call.args[0], list(call.args[1])
        at = [d for d, i in enumerate(given) if i is not None]
        metas = [given[d] for d in at]
        broadcast = torch.broadcast_shapes(*(m.shape for m in metas))
        notation = broadcast_notation([m.shape for m in metas], [tuple(broadcast)])
        rename = lambda dims: tuple(tuple(f"b{f[1:]}" for f in dim) for dim in dims)  # noqa: E731
        self.x: Dims = _dims(x.ndim)
        self.indices: tuple[Dims, ...] = tuple(map(rename, notation.operands))
        self.batch: Dims = rename(notation.results[0])
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
        """The indices into this rank's part, 0 for rows of others, and which are its own."""
        local, all_held = list(indices), None
        for d in self.at:
            (factor,) = self.x[d]
            index = indices[d]
            if not op.is_cut(factor):
                continue
            index = op.emit(
                aten.where.self,
                op.emit(aten.lt.Scalar, index, 0),
                op.emit(aten.add.Scalar, index, self.sizes[d]),
                index,
            )
            local[d], held = held_rows(op, factor, index)
            all_held = held if all_held is None else _and(op, all_held, held)
        assert all_held is not None
        return local, all_held


# Others.


@rule(aten.take.default)
def take(call: Call) -> Rule:
    """Numbers count through all of x, which is whole."""
    x, index = call.operands
    dims = _dims(index.ndim)
    x_dims = tuple((f"x{d}",) for d in range(x.ndim))
    return Rule(Notation((x_dims, dims), (dims,), frozenset(f for (f,) in x_dims), ((),)), ((0,),))


@rule(
    aten.put.default,
    aten.masked_scatter.default,
    aten.bincount.default,
    aten.nonzero_static.default,
)
def anywhere(call: Call) -> Rule:
    return _all_whole(call)


@rule(aten.histc.default)
def histc(call: Call) -> Rule:
    """Counts of parts add up if the range is given; else it is the data's."""
    x = call.operands[0]
    given = call.arg("min") != 0 or call.arg("max") != 0
    dims = _dims(x.ndim)
    names = tuple(f for dim in dims for f in dim)
    pending = tuple((f, "sum") for f in names) if given else ()
    return Rule(
        Notation(
            (dims,), ((("bins",),),), frozenset({"bins", *(() if given else names)}), (pending,)
        ),
        (),
        unless_empty(call),
    )


@rule(aten.searchsorted.Tensor)
def searchsorted(call: Call) -> Rule:
    sequence, x, *sorter = call.operands
    dims = _dims(x.ndim)
    if sequence.ndim == 1:
        sorted_dims: Dims = (("s",),)
        return Rule(
            Notation(
                (sorted_dims, dims, *(sorted_dims,) * len(sorter)), (dims,), frozenset("s"), ((),)
            )
        )
    sorted_dims = (*dims[:-1], ("s",))
    return Rule(
        Notation(
            (sorted_dims, dims, *(sorted_dims,) * len(sorter)), (dims,), frozenset("s"), ((),)
        ),
        (),
        unless_empty(call, inputs=False),
    )


@rule(aten.bucketize.Tensor)
def bucketize(call: Call) -> Rule:
    dims = _dims(call.operands[0].ndim)
    return Rule(Notation((dims, (("s",),)), (dims,), frozenset("s"), ((),)))


def _dims(ndim: int) -> Dims:
    return tuple((f"~{d}",) for d in range(ndim))


def _all_whole(call: Call, linear: Sequence[Sequence[int]] = ()) -> Rule:
    def dims(letter: str, meta: Meta) -> tuple[Dim, ...]:
        return tuple((f"{letter}{d}",) for d in range(meta.ndim))

    operands = tuple(dims(f"x{i}_", m) for i, m in enumerate(call.operands))
    results = tuple(dims(f"y{i}_", m) for i, m in enumerate(call.results))
    whole = frozenset(f for t in (*operands, *results) for dim in t for f in dim)
    return Rule(Notation(operands, results, whole, ((),) * len(results)), tuple(map(tuple, linear)))


def _and(op: LocalOp, a: fx.Node | None, b: fx.Node) -> fx.Node:
    return b if a is None else op.emit(aten.bitwise_and.Tensor, a, b)


def _with_extra(op: LocalOp, x: fx.Node, dims: Dims, dim: int) -> fx.Node:
    """``x`` with one more row at the end of ``dim``."""
    return op.emit(aten.constant_pad_nd.default, x, [0, 0] * (len(dims) - 1 - dim) + [0, 1])


def _without_last(op: LocalOp, x: fx.Node, dim: int, size: int) -> fx.Node:
    return op.emit(aten.slice.Tensor, x, dim, 0, size)
