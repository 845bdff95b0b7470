"""Emit reshards into a rank's graph as local ops and functional collectives; the only place that
pads uneven shards. A cut dim is seen as ``[outer, g, inner]``, ``g`` this rank's part of ``f``.
Collectives need equal parts: ``g`` is padded to the first rank's ``c = ceil(f / n)``. Chunks are
cut from the front, so that after a gather all padding is at the end.

Of a zigzag each of the two pieces is padded to ``c = ceil(f / 2n)``. The collectives see equal
parts of ``2c``; before or after them the whole dim is brought from the order of its 2n chunks into
that of the ranks, or back.

Above 450 lines: every collective shares the padding, and the order of zigzag chunks.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from ftp.partitioning.collectives import Collective
from ftp.planning.graph import PARAMETER, Node, Reshard
from ftp.sharding.layout import Layout
from ftp.sharding.layout import pieces as pieces_held
from ftp.sharding.spec import Interval

aten = torch.ops.aten
c10d = torch.ops._c10d_functional
Offset = int | fx.Node


@dataclass(frozen=True)
class _CutDim:
    """A dim of a rank's tensor seen as ``[outer, g, inner]``, ``g`` of ``f`` in chunks of ``c``.

    Attributes:
        pieces: of a zigzag the lengths of the rank's two pieces.
        dealt: the size of the whole dim in the order of the ranks, where it is no plain cut's.
    """

    dim: int
    outer: int
    f: int
    inner: int
    g: int
    c: int
    pieces: tuple[int, int] | None = None
    dealt: int | None = None

    def even(self, n: int) -> "_CutDim":
        """A zigzag with its pieces padded, as a plain cut of the dim in the order of the ranks."""
        half = -(-self.f // (2 * n))
        return _CutDim(
            self.dim, self.outer, 2 * n * half, self.inner, 2 * half, 2 * half, None, 2 * n * half
        )


@dataclass(frozen=True)
class ReshardSite:
    """Where a reshard is emitted: the rank's graph, the sizes of the reshard's factors on this
    rank, and its offsets.

    Attributes:
        offset: gives the input that holds this rank's start, stop or what is after it, of the
            resharded dim or of one of another size.
        coordinate: the rank's.
        group: name of the process group of the axis.
        is_first: whether the rank is the first of its axis: it contributes replicated values to
            sums.
    """

    graph: fx.Graph
    node: Node
    sizes: Mapping[str, int]
    global_shape: tuple[int, ...]
    offset: Callable[[str, int | None], Offset]
    coordinate: Mapping[str, int]
    group: str
    is_first: bool

    @property
    def reshard(self) -> Reshard:
        return self.node.target

    def emit(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return self.graph.call_function(target, args, kwargs)

    def shape(self, dims: Sequence[tuple[str, ...]]) -> list[int]:
        return [math.prod(self.sizes[f] for f in dim) for dim in dims]

    def cut(self, layout: Layout) -> _CutDim:
        d = layout.dim
        o, g, i, m, h = (self.sizes.get(f"{letter}{d}") for letter in "ogimh")
        assert o is not None and g is not None and i is not None
        if h is not None:
            return self.dim(layout, o, h, i, g)
        assert m is not None
        return _CutDim(d, o, m * g, i, g, g)

    def dim(self, layout: Layout, outer: int, f: int, inner: int, g: int) -> _CutDim:
        """The dim of a layout that cuts ``f``, of which this rank holds ``g``."""
        n = self.reshard.n
        if not layout.zigzag:
            return _CutDim(layout.dim, outer, f, inner, g, -(-f // n))
        (_, a), (_, b) = pieces_held(f, n, self.coordinate[self.reshard.axis], True)
        return _CutDim(layout.dim, outer, f, inner, g, -(-f // n), (a, b))

    def collective(self, target: Any, x: fx.Node, *args: Any, shape: Sequence[int]) -> fx.Node:
        """Issue a functional collective and wait for it; ``shape`` is the larger side's."""
        node = self.emit(target, x, *args, self.group)
        dtype, n, op = self.node.results[0].dtype, self.reshard.n, self.reshard.op
        nbytes = math.prod(shape) * dtype.itemsize
        wire = {"all_reduce": 2 * nbytes * (n - 1) // n}.get(op, nbytes * (n - 1) // n)
        node.meta["collective"] = Collective(
            op,
            self.reshard.axes,
            tuple(shape),
            dtype,
            nbytes,
            self.global_shape,
            wire,
            self.node.source,
            self.node.cause,
        )
        node.meta["axis"] = self.reshard.axis
        node.meta["is_ahead"] = self.node.depends == PARAMETER and not self.node.branch
        return self.emit(c10d.wait_tensor.default, node)


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
        case "all_gather" if reshard.dst.kind == "R":
            return _contiguous(
                site, _resharded(_all_gather, site, x, here, there, site.cut(reshard.src))
            )
        case "all_gather":
            return _contiguous(site, _recut(site, x, here, there))
        case "reduce_scatter":
            return _contiguous(
                site, _resharded(_reduce_scatter, site, x, here, there, None, site.cut(reshard.dst))
            )
        case "all_to_all":
            return _contiguous(
                site,
                _resharded(
                    _all_to_all, site, x, here, there, site.cut(reshard.src), site.cut(reshard.dst)
                ),
            )
        case "slice":
            return _contiguous(
                site, _resharded(_slice, site, x, here, there, None, site.cut(reshard.dst))
            )
        case "contribute":
            return (
                site.emit(aten.alias.default, x)
                if site.is_first
                else site.emit(aten.zeros_like.default, x)
            )
        case "pad":
            return _resharded(_pad, site, x, here, there, site.cut(reshard.src))
    raise AssertionError(reshard)


def _resharded(
    emit: Callable[..., fx.Node],
    site: ReshardSite,
    x: fx.Node,
    here: list[int],
    there: list[int],
    src: _CutDim | None = None,
    dst: _CutDim | None = None,
) -> fx.Node:
    """``emit`` of ``x``, of shape ``here``, to ``there``: of a dim that is cut in ``src`` before
    and in ``dst`` after it. Zigzags are brought to plain cuts and back.
    """
    n, cuts, given, due = site.reshard.n, [], list(here), list(there)
    for cut, sending, held, whole in ((src, True, given, due), (dst, False, due, given)):
        if cut is None or cut.pieces is None:
            cuts += [] if cut is None else [cut]
            continue
        even = cut.even(n)
        cuts.append(even)
        x = (_padded_pieces if sending else _dealt)(site, x, given, cut, n)
        held[cut.dim], whole[cut.dim] = (
            even.outer * size * even.inner for size in (even.g, even.f)
        )
    x = emit(site, x, given, due, *cuts)
    for cut, sending in ((src, True), (dst, False)):
        if cut is not None and cut.pieces is not None:
            x = (_undealt if sending else _trimmed_pieces)(site, x, due, cut, n)
            size = cut.f if sending else sum(cut.pieces)
            due[cut.dim] = cut.outer * size * cut.inner
    return x


def _padded_pieces(
    site: ReshardSite, x: fx.Node, shape: list[int], cut: _CutDim, n: int
) -> fx.Node:
    """Both pieces of a zigzag, padded to whole chunks."""
    assert cut.pieces is not None
    a, b = cut.pieces
    before, _, after = _split(shape, cut)
    at, half = len(before), -(-cut.f // (2 * n))
    full = [*before, 2 * half, *after]
    whole = [*shape[: cut.dim], cut.outer * 2 * half * cut.inner, *shape[cut.dim + 1 :]]
    if (a, b) == (half, half):
        return x
    x = _reshape(site, x, shape, [*before, a + b, *after])
    if not b:
        return _reshape(site, _pad_to(site, x, [*before, a, *after], at, 2 * half), full, whole)
    parts = [
        _pad_to(
            site,
            site.emit(aten.slice.Tensor, x, at, start, start + length),
            [*before, length, *after],
            at,
            half,
        )
        for start, length in ((0, a), (a, b))
    ]
    return _reshape(site, site.emit(aten.cat.default, parts, at), full, whole)


def _trimmed_pieces(
    site: ReshardSite, x: fx.Node, shape: list[int], cut: _CutDim, n: int
) -> fx.Node:
    """The inverse of ``_padded_pieces``; ``shape`` has the padded dim."""
    assert cut.pieces is not None
    a, b = cut.pieces
    before, _, after = _split(shape, cut)
    at, half = len(before), -(-cut.f // (2 * n))
    if (a, b) == (half, half):
        return x
    x = _reshape(site, x, shape, [*before, 2 * half, *after])
    parts = [
        site.emit(aten.slice.Tensor, x, at, start, start + length)
        for start, length in ((0, a), (half, b))
        if length or not start
    ]
    made = site.emit(aten.cat.default, parts, at) if len(parts) > 1 else parts[0]
    whole = [*shape[: cut.dim], cut.outer * (a + b) * cut.inner, *shape[cut.dim + 1 :]]
    return _reshape(site, made, [*before, a + b, *after], whole)


def _dealt(site: ReshardSite, x: fx.Node, shape: list[int], cut: _CutDim, n: int) -> fx.Node:
    """A whole dim, padded to 2n chunks, in zigzag order: chunks 0, 2n-1, 1, 2n-2, ..."""
    before, _, after = _split(shape, cut)
    at, half = len(before), -(-cut.f // (2 * n))
    seen = [*before, cut.f, *after]
    x = _pad_to(site, _reshape(site, x, shape, seen), seen, at, 2 * n * half)
    x = site.emit(aten.reshape.default, x, [*before, 2 * n, half, *after])
    front = site.emit(aten.slice.Tensor, x, at, 0, n)
    back = site.emit(aten.flip.default, site.emit(aten.slice.Tensor, x, at, n, 2 * n), [at])
    made = site.emit(aten.cat.default, [front, back], at + 1)
    whole = [*shape[: cut.dim], cut.outer * 2 * n * half * cut.inner, *shape[cut.dim + 1 :]]
    return site.emit(aten.reshape.default, made, whole)


def _undealt(site: ReshardSite, x: fx.Node, shape: list[int], cut: _CutDim, n: int) -> fx.Node:
    """The inverse of ``_dealt``; ``shape`` has the padded dim."""
    before, _, after = _split(shape, cut)
    at, half = len(before), -(-cut.f // (2 * n))
    x = site.emit(aten.reshape.default, x, [*before, n, 2 * half, *after])
    front = site.emit(aten.slice.Tensor, x, at + 1, 0, half)
    back = site.emit(aten.slice.Tensor, x, at + 1, half, 2 * half)
    made = site.emit(aten.cat.default, [front, site.emit(aten.flip.default, back, [at])], at)
    made = site.emit(aten.reshape.default, made, [*before, 2 * n * half, *after])
    made = _trim(site, made, at, 2 * n * half, cut.f)
    whole = [*shape[: cut.dim], cut.outer * cut.f * cut.inner, *shape[cut.dim + 1 :]]
    return _reshape(site, made, [*before, cut.f, *after], whole)


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
    x = _pad_to(site, x, shape, dim, most)
    x = _contiguous(site, _reshape(site, x, padded, [math.prod(padded)]))
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
    return _contiguous(site, site.emit(aten.cat.default, parts, dim))


def emit_pieces(site: ReshardSite, x: fx.Node, dim: int, pieces: Sequence[Interval]) -> fx.Node:
    """This rank's pieces of a dim, concatenated."""
    parts = [site.emit(aten.slice.Tensor, x, dim, a, b) for a, b in pieces]
    return _contiguous(
        site, parts[0] if len(parts) == 1 else site.emit(aten.cat.default, parts, dim)
    )


def _reshape(site: ReshardSite, x: fx.Node, old: Sequence[int], new: Sequence[int]) -> fx.Node:
    return x if list(old) == list(new) else site.emit(aten.reshape.default, x, list(new))


def _split(
    shape: Sequence[int], cut: _CutDim, *middle: int
) -> tuple[list[int], list[int], list[int]]:
    return [*shape[: cut.dim], cut.outer], list(middle), [cut.inner, *shape[cut.dim + 1 :]]


def _pad_to(site: ReshardSite, x: fx.Node, shape: Sequence[int], dim: int, size: int) -> fx.Node:
    missing = size - shape[dim]
    if not missing:
        return x
    return site.emit(
        aten.constant_pad_nd.default, x, [0, 0] * (len(shape) - 1 - dim) + [0, missing], 0.0
    )


def _contiguous(site: ReshardSite, x: fx.Node) -> fx.Node:
    return site.emit(aten.contiguous.default, x)


def _all_gather(
    site: ReshardSite, x: fx.Node, here: list[int], there: list[int], cut: _CutDim
) -> fx.Node:
    n = site.reshard.n
    before, _, after = _split(here, cut)
    at = len(before)
    seen = [*before, cut.g, *after]
    if math.prod(before) == 1:  # the cut is the major dim: the ranks' parts are consecutive in
        # memory
        x = _pad_to(site, _reshape(site, x, here, seen), seen, at, cut.c)
        flat = [cut.c, math.prod(after)]
        x = _contiguous(site, _reshape(site, x, [*before, cut.c, *after], flat))
        y = site.collective(c10d.all_gather_into_tensor.default, x, n, shape=[n * cut.c, *flat[1:]])
        y = _trim(site, y, 0, n * cut.c, cut.f)
        return _reshape(site, y, [cut.f, *flat[1:]], there)
    x = _pad_to(site, _reshape(site, x, here, seen), seen, at, cut.c)
    padded = [*before, cut.c, *after]
    x = _contiguous(site, _reshape(site, x, padded, [math.prod(padded)]))
    y = site.collective(c10d.all_gather_into_tensor.default, x, n, shape=[n * math.prod(padded)])
    y = site.emit(aten.reshape.default, y, [n, *padded])
    y = site.emit(aten.permute.default, y, [*range(1, at + 1), 0, *range(at + 1, len(padded) + 1)])
    y = site.emit(aten.reshape.default, y, [*before, n * cut.c, *after])
    y = _trim(site, y, at, n * cut.c, cut.f)
    return _reshape(site, y, [*before, cut.f, *after], there)


def _trim(site: ReshardSite, x: fx.Node, dim: int, size: int, to: int) -> fx.Node:
    return x if size == to else site.emit(aten.slice.Tensor, x, dim, 0, to)


def _reduce_scatter(
    site: ReshardSite, x: fx.Node, here: list[int], there: list[int], cut: _CutDim
) -> fx.Node:
    n = site.reshard.n
    before, _, after = _split(here, cut)
    at = len(before)
    x = _pad_to(
        site,
        _reshape(site, x, here, [*before, cut.f, *after]),
        [*before, cut.f, *after],
        at,
        n * cut.c,
    )
    part = [*before, cut.c, *after]
    if math.prod(before) != 1:
        x = site.emit(aten.reshape.default, x, [*before, n, cut.c, *after])
        x = site.emit(aten.permute.default, x, [at, *range(at), *range(at + 1, len(part) + 1)])
    x = _contiguous(site, site.emit(aten.reshape.default, x, [n * math.prod(part)]))
    y = site.collective(
        c10d.reduce_scatter_tensor.default, x, "sum", n, shape=[n * math.prod(part)]
    )
    y = site.emit(aten.reshape.default, y, part)
    y = _trim(site, y, at, cut.c, cut.g)
    return _reshape(site, y, [*before, cut.g, *after], there)


def _all_to_all(
    site: ReshardSite, x: fx.Node, here: list[int], there: list[int], src: _CutDim, dst: _CutDim
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
    x = _reshape(site, x, here, seen)
    x = _pad_to(site, x, seen, s, src.c)
    seen[s] = src.c
    x = _pad_to(site, x, seen, d, n * dst.c)
    seen[d] = dst.c
    x = site.emit(aten.reshape.default, x, [*seen[:d], n, *seen[d:]])
    x = site.emit(aten.permute.default, x, [d, *(k for k in range(7) if k != d)])
    x = _contiguous(site, site.emit(aten.reshape.default, x, [n * math.prod(seen)]))
    split = [math.prod(seen)] * n
    y = site.collective(
        c10d.all_to_all_single.default, x, split, split, shape=[n * math.prod(seen)]
    )
    y = site.emit(aten.reshape.default, y, [n, *seen])
    y = site.emit(aten.permute.default, y, [*range(1, s + 1), 0, *range(s + 1, 7)])
    y = site.emit(aten.reshape.default, y, [*seen[:s], n * src.c, *seen[s + 1 :]])
    y = _trim(site, y, s, n * src.c, src.f)
    y = _trim(site, y, d, dst.c, dst.g)
    return site.emit(aten.reshape.default, y, there)


def _slice(
    site: ReshardSite, x: fx.Node, here: list[int], there: list[int], cut: _CutDim
) -> fx.Node:
    before, _, after = _split(here, cut)
    x = _reshape(site, x, here, [*before, cut.f, *after])
    x = site.emit(aten.slice.Tensor, x, len(before), *_bounds(site, cut, "stop"))
    return site.emit(aten.reshape.default, x, there)


def _pad(site: ReshardSite, x: fx.Node, here: list[int], there: list[int], cut: _CutDim) -> fx.Node:
    before, _, after = _split(here, cut)
    x = _reshape(site, x, here, [*before, cut.g, *after])
    x = site.emit(
        aten.constant_pad_nd.default,
        x,
        [*[0, 0] * len(after), *_bounds(site, cut, "after")],
        0.0,
    )
    return _reshape(site, x, [*before, cut.f, *after], there)


def _bounds(site: ReshardSite, cut: _CutDim, end: str) -> list[Offset]:
    return [site.offset(kind, cut.dealt) for kind in ("start", end)]


def _recut(site: ReshardSite, x: fx.Node, here: list[int], there: list[int]) -> fx.Node:
    """From one cut of a dim to another cut of it: gather, then slice."""
    d = site.reshard.src.dim
    src, dst = (
        site.dim(layout, *(site.sizes[f"{side}{name}"] for name in "ofig"))
        for side, layout in (("x", site.reshard.src), ("y", site.reshard.dst))
    )
    full = [*here[:d], src.outer * src.f * src.inner, *here[d + 1 :]]
    whole = _resharded(_all_gather, site, x, here, full, src)
    return _resharded(_slice, site, whole, full, there, None, dst)
