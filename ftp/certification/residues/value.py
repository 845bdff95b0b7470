"""Values of a residue field: a tensor of numbers as a few tensors of integers, its *planes*.

The planes are the residues at each level, the signs that logarithms leave at each level, and which
elements are infinite. Data movement, views and writes are torch's own op on every plane.
"""

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from ftp.certification.residues.field import Field, hashed, residue, sign
from ftp.dataclass import dataclass


class Blind(Exception):
    """The residue field knows too little of an op; the message names the op."""


class Degenerate(Exception):
    """A divisor, or the operand of a logarithm, is zero by accident: draw again."""


def degenerate_if(field: Field, bad: Tensor) -> None:
    """Raise Degenerate if an element of ``bad`` is true, or note it for a batch of runs."""
    if field.suspects is not None:
        field.suspects.append(bad.any())
    elif bad.any():
        raise Degenerate


@dataclass
class Window:
    """The levels at which a value's residues have a meaning; a view shares its base's window."""

    low: int
    high: int

    def __and__(self, other: "Window") -> "Window":
        return Window(max(self.low, other.low), min(self.high, other.high))

    def copy(self) -> "Window":
        return Window(self.low, self.high)

    def narrow(self, other: "Window") -> None:
        self.low, self.high = max(self.low, other.low), min(self.high, other.high)

    def __contains__(self, level: int) -> bool:
        return self.low <= level <= self.high


@dataclass(eq=False)
class Planes:
    """A tensor of numbers.

    Attributes:
        planes: of one shape and one layout in memory.
        dtype: of the program's tensor.
        root_of: if the numbers are square roots, a copy of the numbers whose roots were taken.
    """

    planes: list[Tensor]
    window: Window
    dtype: torch.dtype
    root_of: "Planes | None" = None

    @property
    def shape(self) -> torch.Size:
        return self.planes[0].shape


def whole(field: Field) -> Window:
    return Window(0, field.levels - 1)


def common_window(xs: Sequence[Planes]) -> Window:
    """The levels at which all values have a meaning, as a new window."""
    return reduce(Window.__and__, [x.window for x in xs], xs[0].window)


def levels(field: Field, x: Planes) -> list[Tensor]:
    return x.planes[: field.levels]


def signs(field: Field, x: Planes) -> list[Tensor]:
    return x.planes[field.levels : 2 * field.levels] if field.has_logs else []


def infinities(field: Field, x: Planes) -> Tensor | None:
    return x.planes[-1] if field.has_infinities else None


def made(
    field: Field,
    residues: Sequence[Tensor],
    window: Window,
    dtype: torch.dtype,
    signs: Sequence[Tensor] | None = None,
    infinite: Tensor | None = None,
) -> Planes:
    """A value from its planes, with a window of its own. Planes that are not given are zero. An
    infinite element has the residue zero.
    """
    planes = list(residues)
    if field.has_logs:
        planes += signs or [torch.zeros_like(r) for r in residues]
    if field.has_infinities:
        if infinite is None:
            infinite = torch.zeros_like(residues[0])
        else:
            finite = infinite == 0
            planes = [p * finite for p in planes]
        planes.append(infinite)
    return Planes(planes, window.copy(), dtype)


def embed(field: Field, x: Tensor, dtype: torch.dtype) -> Planes:
    """The value of known numbers: integers, booleans, or the fractions that floats stand for."""
    if not x.is_floating_point():
        x = x.to(torch.int64)
        return made(field, [x % p for p in field.primes], whole(field), dtype)
    if x.isnan().any():
        raise Blind("a constant that is not a number")
    distinct, where = x.to(torch.float64).reshape(-1).unique(return_inverse=True)
    numbers = distinct.tolist()
    finite = [0.0 if abs(v) == float("inf") else v for v in numbers]
    infinite = torch.tensor(
        [(v == float("inf")) - (v == -float("inf")) for v in numbers], dtype=torch.int64
    )
    if infinite.any() and not field.has_infinities:
        raise Blind("an infinity that no constant of the program holds")
    planes = [
        torch.tensor([residue(v, p) for v in finite], dtype=torch.int64)[where].reshape(x.shape)
        for p in field.primes
    ]
    return made(field, planes, whole(field), dtype, infinite=infinite[where].reshape(x.shape))


def drawn(field: Field, shape: Sequence[int], seed: int, dtype: torch.dtype) -> Planes:
    """Numbers drawn at random."""
    generator = torch.Generator().manual_seed(seed % (1 << 63))
    planes = [
        torch.randint(1, p, tuple(shape), generator=generator, dtype=torch.int64)
        for p in field.primes
    ]
    return made(field, planes, whole(field), dtype)


def move(
    op: Callable[..., Any],
    xs: Sequence[Planes],
    dtype: torch.dtype | None = None,
) -> Planes:
    """Data movement: ``op`` on each plane of the values."""
    window = xs[0].window if len(xs) == 1 else common_window(xs)
    planes = [op(*planes) for planes in zip(*(x.planes for x in xs), strict=True)]
    return Planes(planes, window, dtype or xs[0].dtype)


def separate(x: Planes) -> Planes:
    """A copy of ``x``."""
    planes = [p.clone(memory_format=torch.contiguous_format) for p in x.planes]
    return Planes(planes, x.window.copy(), x.dtype)


def write(x: Planes, new: Planes) -> None:
    """Write ``new`` over ``x``."""
    for plane, values in zip(x.planes, new.planes, strict=True):
        plane.copy_(values)
    x.window.narrow(new.window)


def order(field: Field, x: Planes) -> Tensor:
    """Keys that put the numbers in a random order; equal numbers have equal keys.

    At a single level the order respects signs: the key of a negative number is negative, and the
    key of ``-x`` is minus the key of ``x``.
    """
    if field.order_level not in x.window:
        raise Blind("a comparison of numbers under too many exponentials")
    residues = x.planes[field.order_level]
    if field.has_signs:
        p = field.primes[0]
        size = hashed(torch.minimum(residues, p - residues), field.seed * 2 + 1)
        key = sign(residues, p) * (size + 1)
    else:
        key = hashed(residues, field.seed * 2 + 1)
    if field.ranking is not None:
        key = field.ranking.ordered(residues, key)
    infinite = infinities(field, x)
    return key if infinite is None else torch.where(infinite == 0, key, infinite * (1 << 62))


def same(field: Field, a: Planes, b: Planes) -> Tensor:
    """Per element, whether two values of one shape are equal at every level of both windows."""
    window = a.window & b.window
    if window.low > window.high:
        raise Blind("a value under too many exponentials and logarithms")
    found = torch.ones(a.shape, dtype=torch.bool)
    for level in range(window.low, window.high + 1):
        found = found & (a.planes[level] == b.planes[level])
    if field.has_infinities:
        found = found & (a.planes[-1] == b.planes[-1])
    return found
