"""Zigzag cuts in reshards: pad a rank's two chunks, and permute a whole dim to zigzag order.

Rank i of n holds chunks i and 2n-1-i of 2n. In zigzag order a rank's two chunks are adjacent, so
that the zigzag is a plain cut. Each chunk is padded to ``ceil(size / 2n)`` elements: collectives
need equal parts.
"""

import torch
from torch import fx

from ftp.partitioning.reshard_site import CutDim, ReshardSite

aten = torch.ops.aten


def pad_chunks(site: ReshardSite, x: fx.Node, shape: list[int], cut: CutDim, n: int) -> fx.Node:
    """Pad both chunks of a rank to whole chunks."""
    assert cut.zigzag_chunks is not None
    a, b = cut.zigzag_chunks
    before, after = cut.split(shape)
    at, half = len(before), -(-cut.size // (2 * n))
    full = [*before, 2 * half, *after]
    shape_after = cut.resized(shape, 2 * half)
    if (a, b) == (half, half):
        return x
    x = site.reshape(x, shape, [*before, a + b, *after])
    if not b:
        return site.reshape(site.pad_to(x, [*before, a, *after], at, 2 * half), full, shape_after)
    parts = [
        site.pad_to(
            site.emit(aten.slice.Tensor, x, at, start, start + length),
            [*before, length, *after],
            at,
            half,
        )
        for start, length in ((0, a), (a, b))
    ]
    return site.reshape(site.emit(aten.cat.default, parts, at), full, shape_after)


def trim_chunks(site: ReshardSite, x: fx.Node, shape: list[int], cut: CutDim, n: int) -> fx.Node:
    """The inverse of `pad_chunks`; ``shape`` has the padded dim."""
    assert cut.zigzag_chunks is not None
    a, b = cut.zigzag_chunks
    before, after = cut.split(shape)
    at, half = len(before), -(-cut.size // (2 * n))
    if (a, b) == (half, half):
        return x
    x = site.reshape(x, shape, [*before, 2 * half, *after])
    parts = [
        site.emit(aten.slice.Tensor, x, at, start, start + length)
        for start, length in ((0, a), (half, b))
        if length or not start
    ]
    made = site.emit(aten.cat.default, parts, at) if len(parts) > 1 else parts[0]
    shape_after = cut.resized(shape, (a + b))
    return site.reshape(made, [*before, a + b, *after], shape_after)


def to_zigzag(site: ReshardSite, x: fx.Node, shape: list[int], cut: CutDim, n: int) -> fx.Node:
    """Permute a whole dim, padded to 2n chunks, to zigzag order: chunks 0, 2n-1, 1, 2n-2, ..."""
    before, after = cut.split(shape)
    at, half = len(before), -(-cut.size // (2 * n))
    view = [*before, cut.size, *after]
    x = site.pad_to(site.reshape(x, shape, view), view, at, 2 * n * half)
    x = site.emit(aten.reshape.default, x, [*before, 2 * n, half, *after])
    front = site.emit(aten.slice.Tensor, x, at, 0, n)
    back = site.emit(aten.flip.default, site.emit(aten.slice.Tensor, x, at, n, 2 * n), [at])
    made = site.emit(aten.cat.default, [front, back], at + 1)
    shape_after = cut.resized(shape, 2 * n * half)
    return site.emit(aten.reshape.default, made, shape_after)


def from_zigzag(site: ReshardSite, x: fx.Node, shape: list[int], cut: CutDim, n: int) -> fx.Node:
    """The inverse of `to_zigzag`; ``shape`` has the padded dim."""
    before, after = cut.split(shape)
    at, half = len(before), -(-cut.size // (2 * n))
    x = site.emit(aten.reshape.default, x, [*before, n, 2 * half, *after])
    front = site.emit(aten.slice.Tensor, x, at + 1, 0, half)
    back = site.emit(aten.slice.Tensor, x, at + 1, half, 2 * half)
    made = site.emit(aten.cat.default, [front, site.emit(aten.flip.default, back, [at])], at)
    made = site.emit(aten.reshape.default, made, [*before, 2 * n * half, *after])
    made = site.trim(made, [*before, 2 * n * half, *after], at, cut.size)
    shape_after = cut.resized(shape, cut.size)
    return site.reshape(made, [*before, cut.size, *after], shape_after)
