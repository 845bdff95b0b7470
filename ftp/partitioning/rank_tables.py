"""Tables: a quantity that depends on the rank, for all ranks of a mesh at once. A table has a dim
per mesh axis, of size 1 where the quantity does not change along the axis.
"""

import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ftp.sharding.layout import Chunk, Size, chunk_at

Table = np.ndarray


def table(axes: Mapping[str, int], over: Sequence[str], of: Callable[[Any], Hashable]) -> Table:
    """Tabulate ``of`` over the coordinates on the axes ``over``. Ints stand for themselves; other
    values are numbered.

    >>> table({"dp": 2, "tp": 3}, ["tp"], lambda at: at["tp"] == 0)
    array([[1, 0, 0]])
    """
    found = np.empty([n if axis in over else 1 for axis, n in axes.items()], dtype=np.int64)
    numbers: dict[Hashable, int] = {}
    for at in itertools.product(*(range(n) for n in found.shape)):
        value = of(dict(zip(axes, at, strict=True)))
        found[at] = value if isinstance(value, int) else numbers.setdefault(value, len(numbers))
    return found


def size_table(axes: Mapping[str, int], size: Size) -> Table:
    """A size on every rank."""
    if isinstance(size, int):
        return np.full((1,) * len(axes), size)
    found = np.full((1,) * len(axes), size.const)
    for chunk in size.chunks:
        found = found * chunk_table(axes, chunk, _length)
    return found


def chunk_table(
    axes: Mapping[str, int], chunk: Any, of: Callable[[Any, Mapping[str, int]], int]
) -> Table:
    """``of(chunk, coordinate)`` on every rank. It may depend only on the size that is cut and on
    the coordinate on the chunk's axis; it is called once per distinct pair of these.
    """
    sizes, which = np.unique(cut := size_table(axes, chunk.size), return_inverse=True)
    n = axes[chunk.axis]
    answers = np.array(
        [
            [of(replace(chunk, size=size), {chunk.axis: i}) for i in range(n)]
            for size in sizes.tolist()
        ]
    )
    ranks = np.arange(n).reshape([n if axis == chunk.axis else 1 for axis in axes])
    return shrunk(answers[which.reshape(cut.shape), ranks])


def _length(chunk: Chunk, coordinate: Mapping[str, int]) -> int:
    return chunk_at(chunk, coordinate)[1]


def shrunk(found: Table) -> Table:
    for dim in range(found.ndim):
        first = found.take([0], dim)
        if (found == first).all():
            found = first
    return found


def classes(axes: Mapping[str, int], tables: Sequence[Table]) -> list[list[list[int]]]:
    """Per axis, its coordinates in groups that no table tells apart.

    >>> classes({"tp": 3}, [table({"tp": 3}, ["tp"], lambda at: at["tp"] == 0)])
    [[[0], [1, 2]]]
    """
    found = []
    for dim, n in enumerate(axes.values()):
        varying = [t for t in tables if t.shape[dim] > 1]
        alike: dict[Any, list[int]] = {}
        for i in range(n):
            alike.setdefault(tuple(t.take(i, dim).tobytes() for t in varying), []).append(i)
        found.append(list(alike.values()))
    return found
