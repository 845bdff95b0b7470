"""How a value is sharded over one mesh axis, and sizes that may differ from rank to rank.

For one axis, a layout is replicated (``R``), a pending reduction (``P``) or cut (``S``). If it is
cut, dim ``dim`` is viewed as ``[outer, f, inner]``, and ``f`` is cut like ``torch.chunk``, or in
zigzag: of 2n chunks rank r holds chunks r and 2n-1-r. A size is an int if all ranks agree on it;
the length of an uneven chunk is a ``Chunk``, and a product with such lengths is a ``Product``. So
no decision depends on one rank's shard.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import torch

from ftp.dataclass import dataclass
from ftp.dynamic_int import is_dynamic, value_of


@dataclass(frozen=True)
class Chunk:
    """The length of a rank's part of ``size``, cut in ``n`` over mesh axis ``axis``. The cut is
    uneven; the length of an even cut is an int.
    """

    size: "Size"
    axis: str
    n: int
    zigzag: bool = False


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
        return a // b if _divides(b, a) else None
    const, chunks = _parts(a)
    other, fewer = _parts(b)
    if not _divides(other, const):
        return None
    left = list(chunks)
    for chunk in fewer:
        if chunk not in left:
            return None
        left.remove(chunk)
    return _product(const // other, tuple(left))


def _divides(b: int, a: int) -> bool:
    """Whether ``a`` is a multiple of ``b``; for a dynamic ``b``, at all sizes."""
    if not is_dynamic(b):
        return b != 0 and a % b == 0
    rest = a % b if b > 0 else 1
    return not is_dynamic(rest) and rest == 0


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
    return size.const * math.prod(map(_most, size.chunks))


def estimated(size: Size) -> int:
    """``nominal`` for prices: dynamic sizes have the values that the plan is made for."""
    return size if type(size) is int else nominal(_at_values(size))


def bytes_of(
    shape: Iterable[Size], dtype: torch.dtype, size_of: Callable[[Size], int] = estimated
) -> int:
    """Bytes of a tensor on the rank that holds most."""
    return math.prod(map(size_of, shape)) * dtype.itemsize


def _at_values(size: Size) -> Size:
    if isinstance(size, int):
        return value_of(size)
    chunks = [replace(c, size=_at_values(c.size)) for c in size.chunks]
    return Product(value_of(size.const), tuple(chunks))


def _most(chunk: Chunk) -> int:
    ranks = range(chunk.n) if chunk.zigzag else range(1)
    whole = nominal(chunk.size)
    return max(sum(length for _, length in pieces(whole, chunk.n, i, chunk.zigzag)) for i in ranks)


def size_at(size: Size, coordinate: Mapping[str, int]) -> int:
    """The size on the rank at ``coordinate``."""
    if isinstance(size, int):
        return size
    return size.const * math.prod(chunk_at(c, coordinate)[1] for c in size.chunks)


def pieces(size: int, n: int, index: int, zigzag: bool = False) -> list[tuple[int, int]]:
    """Offset and length of each piece that rank ``index`` of ``n`` holds, as ``torch.chunk`` cuts.

    >>> pieces(7, 2, 1), pieces(7, 2, 0, True), pieces(7, 2, 1, True)
    ([(4, 3)], [(0, 2), (6, 1)], [(2, 2), (4, 2)])
    """
    step = -(-size // (2 * n if zigzag else n))
    starts = [min(i * step, size) for i in ((index, 2 * n - 1 - index) if zigzag else (index,))]
    return [(start, min(step, size - start)) for start in starts]


def pieces_at(chunk: Chunk, coordinate: Mapping[str, int]) -> list[tuple[int, int]]:
    """Offset and length of each piece that the rank at ``coordinate`` holds."""
    whole = size_at(chunk.size, coordinate)
    return pieces(whole, chunk.n, coordinate[chunk.axis], chunk.zigzag)


def chunk_at(chunk: Chunk, coordinate: Mapping[str, int]) -> tuple[int, int]:
    """Offset and length of the part of the rank at ``coordinate``; for a zigzag the offset of the
    first piece and the length of both pieces.
    """
    found = pieces_at(chunk, coordinate)
    return found[0][0], sum(length for _, length in found)


def cut_size(size: Size, axis: str, n: int, zigzag: bool = False) -> Size:
    """The length of a rank's part of ``size``; with a ``Chunk`` if the ranks' parts differ."""
    if is_even(size, n, zigzag):
        if isinstance(size, int):
            return size // n
        return _product(size.const // n, size.chunks)
    return Product(1, (Chunk(size, axis, n, zigzag),))


def is_even(size: Size, n: int, zigzag: bool = False) -> bool:
    """Whether all ranks hold equal parts: a zigzag has twice as many chunks as ranks."""
    return (size if isinstance(size, int) else size.const) % (2 * n if zigzag else n) == 0


def _parts(size: Size) -> tuple[int, tuple[Chunk, ...]]:
    return (size, ()) if isinstance(size, int) else (size.const, size.chunks)


def _product(const: int, chunks: tuple[Chunk, ...]) -> Size:
    if not chunks or const == 0:
        return const
    return Product(const, tuple(sorted(chunks, key=repr)))


class Layout(NamedTuple):
    """The placement of a value on one axis: kind ``R``, ``P`` (pending reduction ``op``) or ``S``
    (cut: dim, outer, inner, and whether the chunks are in zigzag order).
    """

    kind: str
    dim: int = 0
    outer: Size = 1
    inner: Size = 1
    op: str = ""
    zigzag: bool = False

    def __repr__(self) -> str:
        if self.kind == "S":
            within = "" if self.outer == self.inner == 1 else f", {self.outer}, {self.inner}"
            return f"S({self.dim}{within}{', zigzag' if self.zigzag else ''})"
        return f"P({self.op})" if self.kind == "P" else "R"


R = Layout("R")
PARTIAL = Layout("P", op="sum")


@cache
def partial(op: str) -> Layout:
    return Layout("P", op=op)


def shard(dim: int, outer: Size, f: Size, inner: Size, n: int, zigzag: bool = False) -> Layout:
    """The layout that cuts ``f`` in ``[outer, f, inner]``, in normal form: ``inner`` units matter
    only if they change a boundary.
    """
    if inner != 1:
        whole, parts = mul(f, inner), 2 * n if zigzag else n
        if is_even(f, n, zigzag) or (
            isinstance(whole, int)
            and isinstance(f, int)
            and isinstance(inner, int)
            and -(-f // parts) * inner == -(-whole // parts)
        ):
            inner = 1
    return Layout("S", dim, outer, inner, zigzag=zigzag)


def cut_extent(size: Size, layout: Layout) -> Size | None:
    """``f`` of a cut of a dim of ``size``; None if the layout does not fit the dim."""
    rest = div(size, layout.outer)
    return None if rest is None else div(rest, layout.inner)


def cut_shape(shape: tuple[Size, ...], layout: Layout, axis: str, n: int) -> tuple[Size, ...]:
    """The local shape under ``layout`` of a value of ``shape``."""
    if layout.kind != "S":
        return shape
    f = cut_extent(shape[layout.dim], layout)
    assert f is not None, (shape, layout)
    local = prod((layout.outer, cut_size(f, axis, n, layout.zigzag), layout.inner))
    return (*shape[: layout.dim], local, *shape[layout.dim + 1 :])
