"""Sizes that do not divide: what the ranks that hold most waste, and the nearest sizes that divide."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ftp.spec import PartitionSpec, local_shape


@dataclass(frozen=True)
class Uneven:
    """A dim whose shards differ.

    Attributes:
        size: the dim's, and ``ranks`` that share it, in units of ``unit``.
        largest: the longest shard.
        wasted: the part of all ranks' memory and time for it that an even division would save.
        below, above: the nearest sizes that divide.
    """

    dim: int
    size: int
    ranks: int
    unit: int
    largest: int
    wasted: float
    below: int
    above: int


def uneven_dims(spec: PartitionSpec, shape: Sequence[int], axes: Mapping[str, int]) -> list[Uneven]:
    """
    >>> [(u.dim, u.largest, round(u.wasted, 3), u.below, u.above) for u in uneven_dims(PartitionSpec("tp"), (10, 3), {"tp": 4})]
    [(0, 3, 0.167, 8, 12)]
    """
    found = []
    most = local_shape(spec, shape, dict(axes))
    for dim, size in enumerate(shape):
        cuts = spec.cuts(dim)
        n = math.prod(axes[c.axis] for c in cuts)
        if n == 1 or not size or most[dim] * n == size:
            continue
        unit = max(c.size for c in cuts)
        step = n * unit
        if all(c.is_plain or c.pack == 1 for c in cuts) and most[dim] * n > size:
            below = size // step * step
            found.append(Uneven(dim, size, n, unit, most[dim], 1 - size / (most[dim] * n), below, below + step))
    return found
