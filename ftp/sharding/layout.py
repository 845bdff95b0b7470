"""How a value is sharded over one mesh axis, and sizes that may differ from rank to rank.

A layout says, for one axis, that a value is replicated (``R``), a pending reduction (``P``) or cut
(``S``). Cut means: dim ``dim`` is seen as ``[outer, f, inner]`` and ``f`` is cut as ``torch.chunk``
cuts. Sizes are ints wherever all ranks agree; the length of an uneven chunk is a ``Chunk``, and a
product with such a length in it is a ``Product``, so that a decision never looks at one rank's
shard.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple


@dataclass(frozen=True)
class Chunk:
    """How much of ``size`` a rank holds when it is cut in ``n`` over mesh axis ``axis``; uneven,
    or it would be an int.
    """

    size: "Size"
    axis: str
    n: int


@dataclass(frozen=True)
class Product:
    """``const`` times the lengths of ``chunks`` (at least one)."""

    const: int
    chunks: tuple[Chunk, ...]

    def __repr__(self) -> str:
        parts = [f"{c.size!r}/{c.axis}" for c in self.chunks]
        return "*".join(([str(self.const)] if self.const != 1 else []) + parts)


Size = int | Product


def mul(a: Size, b: Size) -> Size:
    """The product of two sizes.

    >>> mul(3, 4)
    12
    """
    if isinstance(a, int) and isinstance(b, int):
        return a * b
    const, chunks = _parts(a)
    other, more = _parts(b)
    return _product(const * other, (*chunks, *more))


def div(a: Size, b: Size) -> Size | None:
    """``a / b`` if it is a size, else None."""
    if isinstance(a, int) and isinstance(b, int):
        return (a // b if a % b == 0 else None) if b else None
    const, chunks = _parts(a)
    other, fewer = _parts(b)
    if not other or const % other:
        return None
    left = list(chunks)
    for chunk in fewer:
        if chunk not in left:
            return None
        left.remove(chunk)
    return _product(const // other, tuple(left))


def prod(sizes: Iterable[Size]) -> Size:
    total: Size = 1
    for size in sizes:
        total = (
            total * size if isinstance(total, int) and isinstance(size, int) else mul(total, size)
        )
    return total


def nominal(size: Size) -> int:
    """The size on the rank that holds most."""
    if isinstance(size, int):
        return size
    return size.const * math.prod(math.ceil(nominal(c.size) / c.n) for c in size.chunks)


def size_at(size: Size, coordinate: Mapping[str, int]) -> int:
    """The size on the rank at ``coordinate``."""
    if isinstance(size, int):
        return size
    return size.const * math.prod(chunk_at(c, coordinate)[1] for c in size.chunks)


def chunk_at(chunk: Chunk, coordinate: Mapping[str, int]) -> tuple[int, int]:
    """Offset and length of the chunk that the rank at ``coordinate`` holds."""
    whole = size_at(chunk.size, coordinate)
    step = -(-whole // chunk.n)
    start = min(coordinate[chunk.axis] * step, whole)
    return start, min(step, whole - start)


def cut_size(size: Size, axis: str, n: int) -> Size:
    """The length of a rank's part of ``size``: an int or a product of what was there if all
    ranks hold as much.
    """
    if isinstance(size, int) and size % n == 0:
        return size // n
    const, chunks = _parts(size)
    if const % n == 0:
        return _product(const // n, chunks)
    return Product(1, (Chunk(size, axis, n),))


def is_even(size: Size, n: int) -> bool:
    return (size if isinstance(size, int) else size.const) % n == 0


def _parts(size: Size) -> tuple[int, tuple[Chunk, ...]]:
    return (size, ()) if isinstance(size, int) else (size.const, size.chunks)


def _product(const: int, chunks: tuple[Chunk, ...]) -> Size:
    if not chunks or const == 0:
        return const
    return Product(const, tuple(sorted(chunks, key=repr)))


class Layout(NamedTuple):
    """One axis' placement of a value: kind ``R``, ``P`` (pending reduction ``op``) or ``S``
    (cut: dim, outer, inner).
    """

    kind: str
    dim: int = 0
    outer: Size = 1
    inner: Size = 1
    op: str = ""

    def __repr__(self) -> str:
        if self.kind == "S":
            return (
                f"S({self.dim})"
                if self.outer == self.inner == 1
                else f"S({self.dim}, {self.outer}, {self.inner})"
            )
        return f"P({self.op})" if self.kind == "P" else "R"


R = Layout("R")
PARTIAL = Layout("P", op="sum")


@cache
def partial(op: str) -> Layout:
    return Layout("P", op=op)


def shard(dim: int, outer: Size, f: Size, inner: Size, n: int) -> Layout:
    """The cut of ``f`` in ``[outer, f, inner]``, by its one name: units matter only where they
    move a boundary.
    """
    if inner != 1:
        whole = mul(f, inner)
        if is_even(f, n) or (
            isinstance(whole, int)
            and isinstance(f, int)
            and isinstance(inner, int)
            and -(-f // n) * inner == -(-whole // n)
        ):
            inner = 1
    return Layout("S", dim, outer, inner)


def cut_extent(size: Size, layout: Layout) -> Size | None:
    """``f`` of a cut of a dim of ``size``, or None where the layout does not fit the dim."""
    rest = div(size, layout.outer)
    return None if rest is None else div(rest, layout.inner)


def cut_shape(shape: tuple[Size, ...], layout: Layout, axis: str, n: int) -> tuple[Size, ...]:
    """The local shape under ``layout`` of a value of ``shape``."""
    if layout.kind != "S":
        return shape
    f = cut_extent(shape[layout.dim], layout)
    assert f is not None, (shape, layout)
    local = prod((layout.outer, cut_size(f, axis, n), layout.inner))
    return (*shape[: layout.dim], local, *shape[layout.dim + 1 :])
