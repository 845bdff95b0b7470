"""Emit reshards into a rank's graph as local ops and functional collectives; the only place that
pads uneven shards.

Collectives need equal parts: each rank pads its ``local`` elements of a dim to the first rank's
``chunk``. Chunks are cut from the front, so that after a gather all padding is at the end.

A zigzag is turned into a plain cut before a collective, and back into a zigzag after it: see
`zigzag`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import fx

from ftp.partitioning.reshard_site import CutDim, Offset, ReshardSite
from ftp.partitioning.zigzag import from_zigzag, pad_chunks, to_zigzag, trim_chunks
from ftp.sharding.local_pieces import Piece

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


def emit_reshard(site: ReshardSite, x: fx.Node) -> fx.Node:
    """Emit the ops that bring ``x`` from the reshard's source layout to its destination.

    Results are made contiguous: kernels of attention and of norms' backward accept strided views
    and compute wrong values.
    """
    reshard = site.reshard
    src_shape, dst_shape = (
        site.shape(site.node.rule.operands[0]),
        site.shape(site.node.rule.results[0]),
    )
    match reshard.op:
        case "all_reduce":
            return site.collective(c10d.all_reduce.default, x, reshard.src.op, shape=src_shape)
        case "contribute":
            target = aten.alias.default if site.is_first else aten.zeros_like.default
            return site.emit(target, x)
        case "pad":
            return _resharded(_pad, site, x, src_shape, dst_shape, site.cut(reshard.src))
        case "all_gather" if reshard.dst.kind == "R":
            made = _resharded(_all_gather, site, x, src_shape, dst_shape, site.cut(reshard.src))
        case "all_gather":
            made = _recut(site, x, src_shape, dst_shape)
        case "reduce_scatter":
            made = _resharded(
                _reduce_scatter, site, x, src_shape, dst_shape, None, site.cut(reshard.dst)
            )
        case "all_to_all" if reshard.src.dim == reshard.dst.dim:
            made = _exchange_parts(site, x, src_shape, dst_shape)
        case "all_to_all":
            src, dst = site.cut(reshard.src), site.cut(reshard.dst)
            made = _resharded(_all_to_all, site, x, src_shape, dst_shape, src, dst)
        case "slice":
            made = _resharded(_slice, site, x, src_shape, dst_shape, None, site.cut(reshard.dst))
        case _:
            raise AssertionError(reshard)
    return site.contiguous(made)


def _resharded(
    emit: Callable[..., fx.Node],
    site: ReshardSite,
    x: fx.Node,
    src_shape: list[int],
    dst_shape: list[int],
    src: CutDim | None = None,
    dst: CutDim | None = None,
) -> fx.Node:
    """Call ``emit`` on ``x`` to bring it from shape ``src_shape`` to ``dst_shape``, and its dim
    from cut ``src`` to ``dst``. Zigzags are turned into plain cuts before the call, and back after.
    """
    n, cuts, given, due = site.reshard.n, [], list(src_shape), list(dst_shape)
    for cut, sending, held, whole in ((src, True, given, due), (dst, False, due, given)):
        if cut is None or cut.zigzag_chunks is None:
            cuts += [] if cut is None else [cut]
            continue
        even = cut.even(n)
        cuts.append(even)
        x = (pad_chunks if sending else to_zigzag)(site, x, given, cut, n)
        held[cut.dim], whole[cut.dim] = (
            even.outer * size * even.inner for size in (even.local, even.size)
        )
    x = emit(site, x, given, due, *cuts)
    for cut, sending in ((src, True), (dst, False)):
        if cut is not None and cut.zigzag_chunks is not None:
            x = (from_zigzag if sending else trim_chunks)(site, x, due, cut, n)
            size = cut.size if sending else sum(cut.zigzag_chunks)
            due = cut.resized(due, size)
    return x


def emit_chunks(site: ReshardSite, x: fx.Node, count: int) -> fx.Node:
    """Emit the reshard as ``count`` collectives, each on an equal chunk of dim 0 (of its outer part
    if dim 0 is cut).
    """
    factor = "o0" if "o0" in site.sizes else "~0"
    sizes = {**site.sizes, factor: site.sizes[factor] // count}
    rows, of_all = site.shape(site.node.rule.operands[0])[0] // count, site.global_shape[0] // count
    part = replace(site, sizes=sizes, global_shape=(of_all, *site.global_shape[1:]))
    chunks = [
        emit_reshard(part, site.emit(aten.slice.Tensor, x, 0, i * rows, (i + 1) * rows))
        for i in range(count)
    ]
    return site.emit(aten.cat.default, chunks)


def emit_gathered_pieces(
    site: ReshardSite,
    x: fx.Node,
    dim: int,
    shape: Sequence[int],
    held: Sequence[Sequence[Piece]],
) -> fx.Node:
    """Gather a dim of which rank i holds the pieces ``held[i]``, concatenated; ranks may hold the
    same piece. ``shape`` is this rank's.
    """
    n, most = len(held), max(sum(b - a for a, b in pieces) for pieces in held)
    padded = [*shape[:dim], most, *shape[dim + 1 :]]
    x = site.pad_to(x, shape, dim, most)
    x = site.contiguous(site.reshape(x, padded, [math.prod(padded)]))
    y = site.collective(c10d.all_gather_into_tensor.default, x, n, shape=[n * math.prod(padded)])
    y = site.emit(aten.reshape.default, y, [n, *padded])
    found: list[tuple[int, int, int, int]] = []
    for rank, pieces in enumerate(held):
        at = 0
        for start, stop in pieces:
            if start < stop:
                found.append((start, stop, rank, at))
            at += stop - start
    parts, end = [], 0
    for start, stop, rank, at in sorted(found):
        if start < end:  # another rank's piece; formulas of one size may differ, and not be equal
            continue
        of_rank = site.emit(aten.select.int, y, 0, rank)
        parts.append(site.emit(aten.slice.Tensor, of_rank, dim, at, at + stop - start))
        end = stop
    return site.contiguous(site.emit(aten.cat.default, parts, dim))


def emit_pieces(site: ReshardSite, x: fx.Node, dim: int, pieces: Sequence[Piece]) -> fx.Node:
    """This rank's pieces of a dim, concatenated."""
    parts = [site.emit(aten.slice.Tensor, x, dim, a, b) for a, b in pieces]
    return site.contiguous(parts[0] if len(parts) == 1 else site.emit(aten.cat.default, parts, dim))


def _all_gather(
    site: ReshardSite, x: fx.Node, src_shape: list[int], dst_shape: list[int], cut: CutDim
) -> fx.Node:
    n = site.reshard.n
    before, after = cut.split(src_shape)
    if math.prod(before) == 1:  # the ranks' parts are contiguous
        before, after = [], [math.prod(after)] if after else []
    at, padded = len(before), [*before, cut.chunk, *after]
    flat = [math.prod(padded)] if at else padded
    x = site.contiguous(
        _in_view(site.pad_to, site, x, src_shape, [*before, cut.local, *after], at, cut.chunk, flat)
    )
    given = [n * flat[0], *flat[1:]]
    y = site.collective(c10d.all_gather_into_tensor.default, x, n, shape=given)
    if at:
        y = site.emit(aten.reshape.default, y, [n, *padded])
        order = [*range(1, at + 1), 0, *range(at + 1, len(padded) + 1)]
        y = site.emit(aten.permute.default, y, order)
        given = [*before, n, cut.chunk, *after]
    return _in_view(
        site.trim, site, y, given, [*before, n * cut.chunk, *after], at, cut.size, dst_shape
    )


def _reduce_scatter(
    site: ReshardSite, x: fx.Node, src_shape: list[int], dst_shape: list[int], cut: CutDim
) -> fx.Node:
    n = site.reshard.n
    before, after = cut.split(src_shape)
    at, part = len(before), [*before, cut.chunk, *after]
    view, flat = [*before, cut.size, *after], [n * math.prod(part)]
    is_flat = math.prod(before) == 1  # the ranks' parts are contiguous
    padded = flat if is_flat else [*before, n, cut.chunk, *after]
    x = _in_view(site.pad_to, site, x, src_shape, view, at, n * cut.chunk, padded)
    if not is_flat:
        x = site.emit(aten.permute.default, x, [at, *range(at), *range(at + 1, len(part) + 1)])
        x = site.emit(aten.reshape.default, x, flat)
    x = site.contiguous(x)
    y = site.collective(c10d.reduce_scatter_tensor.default, x, "sum", n, shape=flat)
    return _in_view(site.trim, site, y, [math.prod(part)], part, at, cut.local, dst_shape)


def _in_view(
    resize: Callable[..., fx.Node],
    site: ReshardSite,
    x: fx.Node,
    src_shape: Sequence[int],
    view: Sequence[int],
    at: int,
    size: int,
    to: Sequence[int],
) -> fx.Node:
    """View ``x`` of shape ``src_shape`` as ``view``, bring dim ``at`` to ``size`` with ``resize``,
    and return the result in shape ``to``.
    """
    if view[at] == size:
        return site.reshape(x, src_shape, to)
    x = resize(site.reshape(x, src_shape, view), view, at, size)
    return site.reshape(x, [*view[:at], size, *view[at + 1 :]], to)


def _all_to_all(
    site: ReshardSite,
    x: fx.Node,
    src_shape: list[int],
    dst_shape: list[int],
    src: CutDim,
    dst: CutDim,
) -> fx.Node:
    n = site.reshard.n
    s, d = (1, 4) if src.dim < dst.dim else (4, 1)  # positions of g and f in the view below
    first, second = sorted((src, dst), key=lambda cut: cut.dim)
    parts = {id(src): src.local, id(dst): dst.size}
    lead, between, rest = (
        math.prod(src_shape[: first.dim]),
        src_shape[first.dim + 1 : second.dim],
        math.prod(src_shape[second.dim + 1 :]),
    )
    view = [
        lead * first.outer,
        parts[id(first)],
        first.inner,
        math.prod(between) * second.outer,
        parts[id(second)],
        second.inner * rest,
    ]
    x = site.reshape(x, src_shape, view)
    x = site.pad_to(x, view, s, src.chunk)
    view[s] = src.chunk
    x = site.pad_to(x, view, d, n * dst.chunk)
    view[d] = dst.chunk
    x = site.emit(aten.reshape.default, x, [*view[:d], n, *view[d:]])
    x = site.emit(aten.permute.default, x, [d, *(k for k in range(7) if k != d)])
    x = site.contiguous(site.emit(aten.reshape.default, x, [n * math.prod(view)]))
    split = [math.prod(view)] * n
    y = site.collective(
        c10d.all_to_all_single.default, x, split, split, shape=[n * math.prod(view)]
    )
    y = site.emit(aten.reshape.default, y, [n, *view])
    y = site.emit(aten.permute.default, y, [*range(1, s + 1), 0, *range(s + 1, 7)])
    arrived = [*view[:s], n * src.chunk, *view[s + 1 :]]
    y = site.emit(aten.reshape.default, y, arrived)
    y = site.trim(y, arrived, s, src.size)
    y = site.trim(y, view, d, dst.local)
    return site.emit(aten.reshape.default, y, dst_shape)


def _slice(
    site: ReshardSite, x: fx.Node, src_shape: list[int], dst_shape: list[int], cut: CutDim
) -> fx.Node:
    before, after = cut.split(src_shape)
    x = site.reshape(x, src_shape, [*before, cut.size, *after])
    x = site.emit(aten.slice.Tensor, x, len(before), *_bounds(site, cut, "stop"))
    return site.reshape(x, [*before, cut.local, *after], dst_shape)


def _pad(
    site: ReshardSite, x: fx.Node, src_shape: list[int], dst_shape: list[int], cut: CutDim
) -> fx.Node:
    before, after = cut.split(src_shape)
    x = site.reshape(x, src_shape, [*before, cut.local, *after])
    x = site.emit(
        aten.constant_pad_nd.default,
        x,
        [*[0, 0] * len(after), *_bounds(site, cut, "after")],
        0.0,
    )
    return site.reshape(x, [*before, cut.size, *after], dst_shape)


def _bounds(site: ReshardSite, cut: CutDim, end: str) -> list[Offset]:
    return [site.offset(kind, cut.zigzag_size) for kind in ("start", end)]


def _recut(site: ReshardSite, x: fx.Node, src_shape: list[int], dst_shape: list[int]) -> fx.Node:
    """Reshard from one cut of a dim to another cut of it: gather, then slice."""
    src, dst = (
        site.dim(layout, *(site.sizes[f"{side}{name}"] for name in "ofig"))
        for side, layout in (("x", site.reshard.src), ("y", site.reshard.dst))
    )
    full = src.resized(src_shape, src.size)
    whole = _resharded(_all_gather, site, x, src_shape, full, src)
    return _resharded(_slice, site, whole, full, dst_shape, None, dst)


def _exchange_parts(
    site: ReshardSite, x: fx.Node, src_shape: list[int], dst_shape: list[int]
) -> fx.Node:
    """Reshard from a cut of a dim to a cut within each of its parts, or back, by an all-to-all."""
    reshard, d = site.reshard, site.reshard.src.dim
    assert reshard.parts is not None
    (outer, parts, rest), n = reshard.parts, reshard.n
    to_parts = reshard.src.outer == outer
    src, dst = (
        CutDim(at, 1, n, 1, 1, 1) for at in ((d + 1, d + 3) if to_parts else (d + 3, d + 1))
    )
    view = [outer, 1, parts, n, rest] if to_parts else [outer, n, parts, 1, rest]
    due = [outer, n, parts, 1, rest] if to_parts else [outer, 1, parts, n, rest]
    sizes = ([*src_shape[:d], *dim, *src_shape[d + 1 :]] for dim in (view, due))
    given, taken = sizes
    x = site.emit(aten.reshape.default, x, given)
    return site.reshape(_all_to_all(site, x, given, taken, src, dst), taken, dst_shape)
