"""Emit reshards into a rank's graph as local ops and functional collectives; the only place that
pads uneven shards. A cut dim is viewed as ``[outer, g, inner]``, ``g`` this rank's part of ``f``.

Collectives need equal parts: ``g`` is padded to the first rank's ``c = ceil(f / n)``. Chunks are
cut from the front, so that after a gather all padding is at the end.

A zigzag is made a plain cut before a collective, or a plain cut a zigzag after it: see `zigzag`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import fx

from ftp.partitioning.reshard_site import CutDim, Offset, ReshardSite
from ftp.partitioning.zigzag import dealt, padded_pieces, trimmed_pieces, undealt
from ftp.sharding.spec import Interval

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


def emit_reshard(site: ReshardSite, x: fx.Node) -> fx.Node:
    """Emit the ops that bring ``x`` from the reshard's source layout to its destination.

    Results are made contiguous: kernels of attention and of norms' backward accept strided views
    and compute wrong values.
    """
    reshard = site.reshard
    here, there = site.shape(site.node.rule.operands[0]), site.shape(site.node.rule.results[0])
    match reshard.op:
        case "all_reduce":
            return site.collective(c10d.all_reduce.default, x, reshard.src.op, shape=here)
        case "contribute":
            target = aten.alias.default if site.is_first else aten.zeros_like.default
            return site.emit(target, x)
        case "pad":
            return _resharded(_pad, site, x, here, there, site.cut(reshard.src))
        case "all_gather" if reshard.dst.kind == "R":
            made = _resharded(_all_gather, site, x, here, there, site.cut(reshard.src))
        case "all_gather":
            made = _recut(site, x, here, there)
        case "reduce_scatter":
            made = _resharded(_reduce_scatter, site, x, here, there, None, site.cut(reshard.dst))
        case "all_to_all" if reshard.src.dim == reshard.dst.dim:
            made = _exchange_parts(site, x, here, there)
        case "all_to_all":
            src, dst = site.cut(reshard.src), site.cut(reshard.dst)
            made = _resharded(_all_to_all, site, x, here, there, src, dst)
        case "slice":
            made = _resharded(_slice, site, x, here, there, None, site.cut(reshard.dst))
        case _:
            raise AssertionError(reshard)
    return site.contiguous(made)


def _resharded(
    emit: Callable[..., fx.Node],
    site: ReshardSite,
    x: fx.Node,
    here: list[int],
    there: list[int],
    src: CutDim | None = None,
    dst: CutDim | None = None,
) -> fx.Node:
    """Call ``emit`` on ``x`` to bring it from shape ``here`` to ``there``, and its dim from cut
    ``src`` to ``dst``. Zigzags are permuted to plain cuts before, and back after it.
    """
    n, cuts, given, due = site.reshard.n, [], list(here), list(there)
    for cut, sending, held, whole in ((src, True, given, due), (dst, False, due, given)):
        if cut is None or cut.pieces is None:
            cuts += [] if cut is None else [cut]
            continue
        even = cut.even(n)
        cuts.append(even)
        x = (padded_pieces if sending else dealt)(site, x, given, cut, n)
        held[cut.dim], whole[cut.dim] = (
            even.outer * size * even.inner for size in (even.g, even.f)
        )
    x = emit(site, x, given, due, *cuts)
    for cut, sending in ((src, True), (dst, False)):
        if cut is not None and cut.pieces is not None:
            x = (undealt if sending else trimmed_pieces)(site, x, due, cut, n)
            size = cut.f if sending else sum(cut.pieces)
            due = cut.resized(due, size)
    return x


def emit_chunks(site: ReshardSite, x: fx.Node, count: int) -> fx.Node:
    """The reshard in ``count`` equal chunks of dim 0, or of its part above the cut, each a
    collective of its own.
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
    held: Sequence[Sequence[Interval]],
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
    where: dict[Interval, tuple[int, int]] = {}
    for rank, pieces in enumerate(held):
        at = 0
        for piece in pieces:
            if piece[0] < piece[1]:
                where.setdefault(piece, (rank, at))
            at += piece[1] - piece[0]
    parts = []
    for (start, stop), (rank, at) in sorted(where.items()):
        of_rank = site.emit(aten.select.int, y, 0, rank)
        parts.append(site.emit(aten.slice.Tensor, of_rank, dim, at, at + stop - start))
    return site.contiguous(site.emit(aten.cat.default, parts, dim))


def emit_pieces(site: ReshardSite, x: fx.Node, dim: int, pieces: Sequence[Interval]) -> fx.Node:
    """This rank's pieces of a dim, concatenated."""
    parts = [site.emit(aten.slice.Tensor, x, dim, a, b) for a, b in pieces]
    return site.contiguous(parts[0] if len(parts) == 1 else site.emit(aten.cat.default, parts, dim))


def _all_gather(
    site: ReshardSite, x: fx.Node, here: list[int], there: list[int], cut: CutDim
) -> fx.Node:
    n = site.reshard.n
    before, after = cut.split(here)
    if math.prod(before) == 1:  # the ranks' parts are consecutive in memory
        before, after = [], [math.prod(after)] if after else []
    at, padded = len(before), [*before, cut.c, *after]
    flat = [math.prod(padded)] if at else padded
    x = site.contiguous(
        _in_view(site.pad_to, site, x, here, [*before, cut.g, *after], at, cut.c, flat)
    )
    given = [n * flat[0], *flat[1:]]
    y = site.collective(c10d.all_gather_into_tensor.default, x, n, shape=given)
    if at:
        y = site.emit(aten.reshape.default, y, [n, *padded])
        order = [*range(1, at + 1), 0, *range(at + 1, len(padded) + 1)]
        y = site.emit(aten.permute.default, y, order)
        given = [*before, n, cut.c, *after]
    return _in_view(site.trim, site, y, given, [*before, n * cut.c, *after], at, cut.f, there)


def _reduce_scatter(
    site: ReshardSite, x: fx.Node, here: list[int], there: list[int], cut: CutDim
) -> fx.Node:
    n = site.reshard.n
    before, after = cut.split(here)
    at, part = len(before), [*before, cut.c, *after]
    seen, flat = [*before, cut.f, *after], [n * math.prod(part)]
    if math.prod(before) == 1:
        x = _in_view(site.pad_to, site, x, here, seen, at, n * cut.c, flat)
    else:
        x = _in_view(site.pad_to, site, x, here, seen, at, n * cut.c, [*before, n, cut.c, *after])
        x = site.emit(aten.permute.default, x, [at, *range(at), *range(at + 1, len(part) + 1)])
        x = site.emit(aten.reshape.default, x, flat)
    x = site.contiguous(x)
    y = site.collective(c10d.reduce_scatter_tensor.default, x, "sum", n, shape=flat)
    return _in_view(site.trim, site, y, [math.prod(part)], part, at, cut.g, there)


def _in_view(
    resize: Callable[..., fx.Node],
    site: ReshardSite,
    x: fx.Node,
    here: Sequence[int],
    seen: Sequence[int],
    at: int,
    size: int,
    to: Sequence[int],
) -> fx.Node:
    """View ``x`` of shape ``here`` as ``seen``, bring dim ``at`` to ``size`` with ``resize``, and
    return the result in shape ``to``.
    """
    if seen[at] == size:
        return site.reshape(x, here, to)
    x = resize(site.reshape(x, here, seen), seen, at, size)
    return site.reshape(x, [*seen[:at], size, *seen[at + 1 :]], to)


def _all_to_all(
    site: ReshardSite, x: fx.Node, here: list[int], there: list[int], src: CutDim, dst: CutDim
) -> fx.Node:
    n = site.reshard.n
    s, d = (1, 4) if src.dim < dst.dim else (4, 1)  # positions of g and f in the view below
    first, second = sorted((src, dst), key=lambda cut: cut.dim)
    parts = {id(src): src.g, id(dst): dst.f}
    lead, between, rest = (
        math.prod(here[: first.dim]),
        here[first.dim + 1 : second.dim],
        math.prod(here[second.dim + 1 :]),
    )
    seen = [
        lead * first.outer,
        parts[id(first)],
        first.inner,
        math.prod(between) * second.outer,
        parts[id(second)],
        second.inner * rest,
    ]
    x = site.reshape(x, here, seen)
    x = site.pad_to(x, seen, s, src.c)
    seen[s] = src.c
    x = site.pad_to(x, seen, d, n * dst.c)
    seen[d] = dst.c
    x = site.emit(aten.reshape.default, x, [*seen[:d], n, *seen[d:]])
    x = site.emit(aten.permute.default, x, [d, *(k for k in range(7) if k != d)])
    x = site.contiguous(site.emit(aten.reshape.default, x, [n * math.prod(seen)]))
    split = [math.prod(seen)] * n
    y = site.collective(
        c10d.all_to_all_single.default, x, split, split, shape=[n * math.prod(seen)]
    )
    y = site.emit(aten.reshape.default, y, [n, *seen])
    y = site.emit(aten.permute.default, y, [*range(1, s + 1), 0, *range(s + 1, 7)])
    arrived = [*seen[:s], n * src.c, *seen[s + 1 :]]
    y = site.emit(aten.reshape.default, y, arrived)
    y = site.trim(y, arrived, s, src.f)
    y = site.trim(y, seen, d, dst.g)
    return site.emit(aten.reshape.default, y, there)


def _slice(
    site: ReshardSite, x: fx.Node, here: list[int], there: list[int], cut: CutDim
) -> fx.Node:
    before, after = cut.split(here)
    x = site.reshape(x, here, [*before, cut.f, *after])
    x = site.emit(aten.slice.Tensor, x, len(before), *_bounds(site, cut, "stop"))
    return site.reshape(x, [*before, cut.g, *after], there)


def _pad(site: ReshardSite, x: fx.Node, here: list[int], there: list[int], cut: CutDim) -> fx.Node:
    before, after = cut.split(here)
    x = site.reshape(x, here, [*before, cut.g, *after])
    x = site.emit(
        aten.constant_pad_nd.default,
        x,
        [*[0, 0] * len(after), *_bounds(site, cut, "after")],
        0.0,
    )
    return site.reshape(x, [*before, cut.f, *after], there)


def _bounds(site: ReshardSite, cut: CutDim, end: str) -> list[Offset]:
    return [site.offset(kind, cut.dealt) for kind in ("start", end)]


def _recut(site: ReshardSite, x: fx.Node, here: list[int], there: list[int]) -> fx.Node:
    """Reshard from one cut of a dim to another cut of it: gather, then slice."""
    src, dst = (
        site.dim(layout, *(site.sizes[f"{side}{name}"] for name in "ofig"))
        for side, layout in (("x", site.reshard.src), ("y", site.reshard.dst))
    )
    full = src.resized(here, src.f)
    whole = _resharded(_all_gather, site, x, here, full, src)
    return _resharded(_slice, site, whole, full, there, None, dst)


def _exchange_parts(site: ReshardSite, x: fx.Node, here: list[int], there: list[int]) -> fx.Node:
    """Reshard from a cut of a dim to a cut within each of its parts, or back, by an all-to-all."""
    reshard, d = site.reshard, site.reshard.src.dim
    assert reshard.parts is not None
    (outer, parts, rest), n = reshard.parts, reshard.n
    to_parts = reshard.src.outer == outer
    src, dst = (
        CutDim(at, 1, n, 1, 1, 1) for at in ((d + 1, d + 3) if to_parts else (d + 3, d + 1))
    )
    seen = [outer, 1, parts, n, rest] if to_parts else [outer, n, parts, 1, rest]
    due = [outer, n, parts, 1, rest] if to_parts else [outer, 1, parts, n, rest]
    sizes = ([*here[:d], *dim, *here[d + 1 :]] for dim in (seen, due))
    given, taken = sizes
    x = site.emit(aten.reshape.default, x, given)
    return site.reshape(_all_to_all(site, x, given, taken, src, dst), taken, there)
