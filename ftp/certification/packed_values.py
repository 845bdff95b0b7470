"""Packed values: several values concatenated in one tensor, so that one collective sends them."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate

from ftp.certification.element_map import (
    ElementMap,
    Position,
    common_position,
    concatenate,
    reshape,
    resolved,
    slice_dim,
    zeros_like,
)
from ftp.certification.unsound import Unsound
from ftp.dataclass import dataclass


@dataclass(frozen=True, eq=False)
class PackedValues:
    """The ``parts`` concatenated along ``dim`` and reshaped to ``shape``."""

    parts: tuple[ElementMap, ...]
    dim: int
    shape: tuple[int, ...]

    @property
    def unflattened(self) -> tuple[int, ...]:
        """The shape of the concatenation."""
        first, dim = self.parts[0].shape, self.dim
        return (*first[:dim], sum(p.shape[dim] for p in self.parts), *first[dim + 1 :])

    def require_unflattened(self) -> None:
        if self.shape != self.unflattened:
            raise Unsound(
                f"values packed in shape {self.unflattened} are unpacked from shape {self.shape}"
            )

    def reshaped(self, shape: Sequence[int]) -> "PackedValues":
        return replace(self, shape=tuple(resolved(shape, math.prod(self.shape))))

    def sliced(self, dim: int, start: Position, stop: Position) -> "ElementMap | PackedValues":
        self.require_unflattened()
        if dim != self.dim:
            return pack([slice_dim(p, dim, start, stop) for p in self.parts], self.dim)
        first, last = common_position(start), common_position(stop)
        if first is None or last is None:
            raise Unsound("ranks with one program slice different parts of packed values")
        taken, at = [], 0
        for part in self.parts:
            size = part.shape[dim]
            a, b = max(first - at, 0), min(last - at, size)
            if a < b:
                taken.append(slice_dim(part, dim, a, b))
            at += size
        return pack(taken or [slice_dim(self.parts[0], dim, 0, 0)], dim)

    def split(self, dim: int, sizes: Sequence[int]) -> "Sequence[ElementMap | PackedValues]":
        """Split along ``dim``. The sizes of the parts give the parts, empty ones too."""
        if dim == self.dim and list(sizes) == [p.shape[dim] for p in self.parts]:
            self.require_unflattened()
            return self.parts
        ends = accumulate(sizes)
        return [self.sliced(dim, end - size, end) for size, end in zip(sizes, ends, strict=True)]

    # Collectives: ``each(i)`` is the result for part i, sent alone.

    def reduced(self, each: Callable[[int], ElementMap]) -> "PackedValues":
        return replace(self, parts=tuple(each(i) for i in range(len(self.parts))))

    def gathered(self, n: int, each: Callable[[int], ElementMap]) -> "PackedValues":
        self.require_unflattened()
        if self.dim or len(self.shape) != 1:
            raise Unsound("packed values that are no vector are gathered")
        parts = [reshape(each(i), (n, p.shape[0])) for i, p in enumerate(self.parts)]
        return PackedValues(tuple(parts), 1, (n * self.shape[0],))

    def scattered(self, n: int, each: Callable[[int], ElementMap]) -> "ElementMap | PackedValues":
        if (
            self.dim != 1
            or len(self.unflattened) != 2
            or self.unflattened[0] != n
            or len(self.shape) != 1
        ):
            raise Unsound(f"packed values that are not {n} rows are scattered")
        return pack([each(i) for i in range(len(self.parts))], 0)


def pack(parts: Sequence[ElementMap], dim: int) -> "ElementMap | PackedValues":
    """Concatenate parts: parts of one value give an element map, others packed values."""
    first = parts[0]
    is_one = all(p.value == first.value and p.pending == first.pending for p in parts)
    if len(parts) == 1 or (is_one and not any(p.is_zero for p in parts)):
        return concatenate(parts, dim)
    if is_one and all(p.is_zero for p in parts):
        length = sum(p.shape[dim] for p in parts)
        return zeros_like(first, (*first.shape[:dim], length, *first.shape[dim + 1 :]))
    shapes = [(*p.shape[:dim], *p.shape[dim + 1 :]) for p in parts]
    if any(not p.groups for p in parts) or any(s != shapes[0] for s in shapes):
        raise Unsound(f"tensors of shapes {[p.shape for p in parts]} are concatenated")
    made = PackedValues(tuple(parts), dim, ())
    return replace(made, shape=made.unflattened)
