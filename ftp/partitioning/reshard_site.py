"""Where a reshard is emitted: the rank's graph, and the cut dims of the rank's tensors."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ftp.dataclass import dataclass
from ftp.partitioning.collectives import Collective
from ftp.planning.graph import PARAMETER, Node, Reshard
from ftp.sharding.layout import Layout
from ftp.sharding.layout import pieces as pieces_held

aten = torch.ops.aten
c10d = torch.ops._c10d_functional
Offset = int | fx.Node


@dataclass(frozen=True)
class CutDim:
    """A cut dim of a rank's tensor, viewed as ``[outer, local, inner]``.

    Attributes:
        size: of the part of the global dim that is cut.
        local: the elements of ``size`` that this rank holds.
        chunk: the elements that the first rank holds, the most of all.
        zigzag_chunks: the sizes of the rank's two chunks in a zigzag; None for a plain cut.
        zigzag_size: of a zigzag turned into a plain cut: its size with padded chunks; else None.
    """

    dim: int
    outer: int
    size: int
    inner: int
    local: int
    chunk: int
    zigzag_chunks: tuple[int, int] | None = None
    zigzag_size: int | None = None

    def split(self, shape: Sequence[int]) -> tuple[list[int], list[int]]:
        """The sizes before and after ``local`` in a tensor of ``shape``, viewed with this cut."""
        outer, inner = ([size] * (size != 1) for size in (self.outer, self.inner))
        return [*shape[: self.dim], *outer], [*inner, *shape[self.dim + 1 :]]

    def resized(self, shape: Sequence[int], size: int) -> list[int]:
        """The shape of a tensor that holds ``size`` elements in place of ``local``."""
        here = self.outer * size * self.inner
        return [*shape[: self.dim], here, *shape[self.dim + 1 :]]

    def even(self, n: int) -> "CutDim":
        """The plain cut of the dim in zigzag order, with chunks padded to one size."""
        half = -(-self.size // (2 * n))
        return CutDim(
            self.dim, self.outer, 2 * n * half, self.inner, 2 * half, 2 * half, None, 2 * n * half
        )


@dataclass(frozen=True)
class ReshardSite:
    """Where a reshard is emitted: the rank's graph, the sizes of the reshard's factors on this
    rank, and its offsets.

    Attributes:
        offset: gives the input that holds an offset of this rank (a kind of `ShardOffset`) in the
            resharded dim, or in a dim of the given size.
        coordinate: of the rank.
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

    def cut(self, layout: Layout) -> CutDim:
        d = layout.dim
        o, g, i, m, h = (self.sizes.get(f"{letter}{d}") for letter in "ogimh")
        assert o is not None and g is not None and i is not None
        if h is not None:
            return self.dim(layout, o, h, i, g)
        assert m is not None
        return CutDim(d, o, m * g, i, g, g)

    def dim(self, layout: Layout, outer: int, f: int, inner: int, g: int) -> CutDim:
        """The dim that ``layout`` cuts: this rank holds ``g`` of ``f`` elements."""
        n = self.reshard.n
        if not layout.zigzag:
            return CutDim(layout.dim, outer, f, inner, g, -(-f // n))
        (_, a), (_, b) = pieces_held(f, n, self.coordinate[self.reshard.axis], True)
        return CutDim(layout.dim, outer, f, inner, g, -(-f // n), (a, b))

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

    def reshape(self, x: fx.Node, old: Sequence[int], new: Sequence[int]) -> fx.Node:
        return x if list(old) == list(new) else self.emit(aten.reshape.default, x, list(new))

    def pad_to(self, x: fx.Node, shape: Sequence[int], dim: int, size: int) -> fx.Node:
        missing = size - shape[dim]
        if not missing:
            return x
        padding = [0, 0] * (len(shape) - 1 - dim) + [0, missing]
        return self.emit(aten.constant_pad_nd.default, x, padding, 0.0)

    def trim(self, x: fx.Node, shape: Sequence[int], dim: int, size: int) -> fx.Node:
        return x if shape[dim] == size else self.emit(aten.slice.Tensor, x, dim, 0, size)

    def contiguous(self, x: fx.Node) -> fx.Node:
        return self.emit(aten.contiguous.default, x)
