"""Zigzag cuts in reshards: pad a rank's two pieces, and permute a whole dim to the order of ranks.

Rank i of n holds chunks i and 2n-1-i of 2n. Each piece is padded to ``ceil(f / 2n)``, so that
collectives have equal parts.
"""

import torch
from torch import fx

from ftp.partitioning.reshard_site import CutDim, ReshardSite

aten = torch.ops.aten


def padded_pieces(site: ReshardSite, x: fx.Node, shape: list[int], cut: CutDim, n: int) -> fx.Node:
    """Both pieces of a zigzag, padded to whole chunks."""
    assert cut.pieces is not None
    a, b = cut.pieces
    before, after = cut.split(shape)
    at, half = len(before), -(-cut.f // (2 * n))
    full = [*before, 2 * half, *after]
    whole = cut.resized(shape, 2 * half)
    if (a, b) == (half, half):
        return x
    x = site.reshape(x, shape, [*before, a + b, *after])
    if not b:
        return site.reshape(site.pad_to(x, [*before, a, *after], at, 2 * half), full, whole)
    parts = [
        site.pad_to(
            site.emit(aten.slice.Tensor, x, at, start, start + length),
            [*before, length, *after],
            at,
            half,
        )
        for start, length in ((0, a), (a, b))
    ]
    return site.reshape(site.emit(aten.cat.default, parts, at), full, whole)


def trimmed_pieces(site: ReshardSite, x: fx.Node, shape: list[int], cut: CutDim, n: int) -> fx.Node:
    """The inverse of ``padded_pieces``; ``shape`` has the padded dim."""
    assert cut.pieces is not None
    a, b = cut.pieces
    before, after = cut.split(shape)
    at, half = len(before), -(-cut.f // (2 * n))
    if (a, b) == (half, half):
        return x
    x = site.reshape(x, shape, [*before, 2 * half, *after])
    parts = [
        site.emit(aten.slice.Tensor, x, at, start, start + length)
        for start, length in ((0, a), (half, b))
        if length or not start
    ]
    made = site.emit(aten.cat.default, parts, at) if len(parts) > 1 else parts[0]
    whole = cut.resized(shape, (a + b))
    return site.reshape(made, [*before, a + b, *after], whole)


def dealt(site: ReshardSite, x: fx.Node, shape: list[int], cut: CutDim, n: int) -> fx.Node:
    """A whole dim, padded to 2n chunks, in zigzag order: chunks 0, 2n-1, 1, 2n-2, ..."""
    before, after = cut.split(shape)
    at, half = len(before), -(-cut.f // (2 * n))
    seen = [*before, cut.f, *after]
    x = site.pad_to(site.reshape(x, shape, seen), seen, at, 2 * n * half)
    x = site.emit(aten.reshape.default, x, [*before, 2 * n, half, *after])
    front = site.emit(aten.slice.Tensor, x, at, 0, n)
    back = site.emit(aten.flip.default, site.emit(aten.slice.Tensor, x, at, n, 2 * n), [at])
    made = site.emit(aten.cat.default, [front, back], at + 1)
    whole = cut.resized(shape, 2 * n * half)
    return site.emit(aten.reshape.default, made, whole)


def undealt(site: ReshardSite, x: fx.Node, shape: list[int], cut: CutDim, n: int) -> fx.Node:
    """The inverse of ``dealt``; ``shape`` has the padded dim."""
    before, after = cut.split(shape)
    at, half = len(before), -(-cut.f // (2 * n))
    x = site.emit(aten.reshape.default, x, [*before, n, 2 * half, *after])
    front = site.emit(aten.slice.Tensor, x, at + 1, 0, half)
    back = site.emit(aten.slice.Tensor, x, at + 1, half, 2 * half)
    made = site.emit(aten.cat.default, [front, site.emit(aten.flip.default, back, [at])], at)
    made = site.emit(aten.reshape.default, made, [*before, 2 * n * half, *after])
    made = site.trim(made, [*before, 2 * n * half, *after], at, cut.f)
    whole = cut.resized(shape, cut.f)
    return site.reshape(made, [*before, cut.f, *after], whole)
