"""Arithmetic on values of a residue field."""

import hashlib
import zlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ftp.certification.residues.field import (
    Field,
    hashed,
    inverse,
    logarithm,
    matmul,
    modpow,
    power,
    square_root,
)
from ftp.certification.residues.value import (
    Blind,
    Planes,
    Window,
    common_window,
    degenerate_if,
    infinities,
    levels,
    made,
    order,
    separate,
    signs,
)


def add(f: Field, a: Planes, b: Planes) -> Planes:
    window = a.window & b.window
    both = [(x + y) % p for x, y, p in zip(levels(f, a), levels(f, b), f.primes, strict=True)]
    sign = [x ^ y for x, y in zip(signs(f, a), signs(f, b), strict=True)]
    infinite = None
    if f.has_infinities:
        x, y = a.planes[-1], b.planes[-1]
        if (x * y < 0).any():
            raise Blind("the difference of two infinities")
        infinite = torch.sign(x + y)
    return made(f, both, window, a.dtype, sign, infinite)


def negate(f: Field, a: Planes) -> Planes:
    found = [-x % p for x, p in zip(levels(f, a), f.primes, strict=True)]
    infinite = -a.planes[-1] if f.has_infinities else None
    return made(f, found, a.window, a.dtype, signs(f, a), infinite)


def multiply(f: Field, a: Planes, b: Planes) -> Planes:
    if a is b and (number := _squared(f, a)) is not None:
        return separate(number)
    window = a.window & b.window
    ra, rb = levels(f, a), levels(f, b)
    found = [x * y % p for x, y, p in zip(ra, rb, f.primes, strict=True)]
    sign = []
    for x, y, sx, sy, p in zip(ra, rb, signs(f, a), signs(f, b), f.primes, strict=False):
        by_unit = [((u == 1) | (u == p - 1)).to(torch.int64) for u in (x, y)]
        sign.append((sx * by_unit[1]) ^ (sy * by_unit[0]))
    infinite = None
    if f.has_infinities:
        x, y = a.planes[-1], b.planes[-1]
        if x.any() or y.any():
            infinite = _infinite_product(f, a, b)
    return made(f, found, window, a.dtype, sign, infinite)


def _infinite_product(f: Field, a: Planes, b: Planes) -> Tensor:
    """Infinity times one or minus one. The sign of other numbers is unknown."""
    found = torch.zeros(torch.broadcast_shapes(a.shape, b.shape), dtype=torch.int64)
    for x, y in ((a, b), (b, a)):
        infinite, unit = x.planes[-1], torch.zeros_like(y.planes[0])
        unit += (y.planes[0] == 1).to(torch.int64)
        unit -= (y.planes[0] == f.primes[0] - 1).to(torch.int64)
        if ((infinite != 0) & (unit == 0)).any():
            raise Blind("a product with an infinity")
        found = found + infinite * unit
    return torch.sign(found)


def reciprocal(f: Field, a: Planes) -> Planes:
    infinite = infinities(f, a)
    finite = torch.ones_like(a.planes[0]) if infinite is None else (infinite == 0)
    for level in range(a.window.low, a.window.high + 1):
        degenerate_if(f, (a.planes[level] == 0) & (finite != 0))
    found = [inverse(x, p) for x, p in zip(levels(f, a), f.primes, strict=True)]
    return made(f, found, a.window, a.dtype)


def scaled(f: Field, a: Planes, numerator: int, denominator: int = 1) -> Planes:
    """``a`` times a fraction."""
    found = [
        x * (numerator * pow(denominator, p - 2, p) % p) % p
        for x, p in zip(levels(f, a), f.primes, strict=True)
    ]
    is_odd = denominator == 1 and numerator % 2 == 1
    sign = [s.clone() for s in signs(f, a)] if is_odd else None
    return made(f, found, a.window, a.dtype, sign, infinities(f, a))


def summed(f: Field, op: Callable[[Tensor], Tensor], a: Planes) -> Planes:
    """A sum of elements; ``op`` adds the integers of one plane."""
    found = [op(x) % p for x, p in zip(levels(f, a), f.primes, strict=True)]
    sign = [op(s) % 2 for s in signs(f, a)]
    infinite = torch.sign(op(a.planes[-1])) if f.has_infinities else None
    return made(f, found, a.window, a.dtype, sign, infinite)


def matmul_of_values(f: Field, a: Planes, b: Planes) -> Planes:
    if f.has_infinities and (a.planes[-1].any() or b.planes[-1].any()):
        raise Blind("a product with an infinity")
    found = [matmul(x, y, p) for x, y, p in zip(levels(f, a), levels(f, b), f.primes, strict=True)]
    return made(f, found, a.window & b.window, a.dtype)


def integer_power(f: Field, a: Planes, exponent: int) -> Planes:
    if exponent < 0:
        return integer_power(f, reciprocal(f, a), -exponent)
    if exponent > 1 and not exponent % 2 and (number := _squared(f, a)) is not None:
        return integer_power(f, number, exponent // 2)
    found = [modpow(x, exponent, p) for x, p in zip(levels(f, a), f.primes, strict=True)]
    result = made(f, found, a.window, a.dtype, signs(f, a) if exponent == 1 else None)
    if exponent == 1:
        result.root_of = a.root_of
    return result


def root(f: Field, a: Planes) -> Planes:
    found = made(f, _roots(f, a), a.window, a.dtype)
    found.root_of = separate(a)
    return found


def _roots(f: Field, a: Planes) -> list[Tensor]:
    return [square_root(x, p) for x, p in zip(levels(f, a), f.primes, strict=True)]


def _squared(f: Field, a: Planes) -> Planes | None:
    """The number whose root ``a`` is, if ``a`` is unchanged since: modulo a prime, the square of a
    root may be minus the number.
    """
    number = a.root_of
    if number is None or not all(map(torch.equal, levels(f, a), _roots(f, number))):
        return None
    return number


def exponential(f: Field, a: Planes) -> Planes:
    """``exp``, which maps sums to products; nested too deep it is an unknown function."""
    if a.window.low + 1 >= f.levels:
        return function(f, "exp", a)
    found = [torch.zeros_like(a.planes[0])]
    for level in range(f.levels - 1):
        p = f.primes[level + 1]
        value = power(levels(f, a)[level], p)
        if f.has_logs:
            value = torch.where(signs(f, a)[level] == 1, -value % p, value)
        found.append(value)
    infinite = infinities(f, a)
    if infinite is not None:
        found = [torch.where(infinite < 0, 0, x) for x in found]
        infinite = infinite.clamp(min=0)
    window = Window(a.window.low + 1, min(a.window.high + 1, f.levels - 1))
    return made(f, found, window, a.dtype, infinite=infinite)


def natural_logarithm(f: Field, a: Planes) -> Planes:
    """``log``, the inverse of ``exp``; under too few exponentials it is an unknown function."""
    low, high = max(a.window.low - 1, 0), a.window.high - 1
    if high < low:
        return function(f, "log", a)
    nothing = torch.zeros_like(a.planes[0])
    infinite = infinities(f, a)
    found, sign = [nothing] * f.levels, [nothing] * f.levels
    for level in range(low, high + 1):
        x = levels(f, a)[level + 1]
        degenerate_if(f, (x == 0) if infinite is None else (x == 0) & (infinite == 0))
        found[level], sign[level] = logarithm(x, f.primes[level + 1])
    return made(f, found, Window(low, high), a.dtype, sign, infinite)


def function(f: Field, name: str, *operands: Planes) -> Planes:
    """An unknown elementwise function: equal operands give equal results, at random."""
    found = []
    for level, p in enumerate(f.primes):
        h = None
        for x in operands:
            h = x.planes[level] if h is None else h + x.planes[level]
            if f.has_infinities:
                h = h + x.planes[-1] * (1 << 40)
            h = hashed(h, _seed(f, name))
        assert h is not None
        found.append(h % p)
    return made(f, found, common_window(operands), operands[0].dtype)


def opaque(f: Field, name: str, operands: Sequence[Planes], shape: Sequence[int]) -> Planes:
    """The result of an unknown op: equal operands give equal results, at random."""
    found = []
    for level, p in enumerate(f.primes):
        digest = hashlib.blake2b(f"{_seed(f, name)}".encode(), digest_size=7)
        for x in operands:
            planes = [x.planes[level], *([x.planes[-1]] if f.has_infinities else [])]
            for plane in planes:
                digest.update(repr(tuple(plane.shape)).encode())
                digest.update(plane.contiguous().numpy().tobytes())
        generator = torch.Generator().manual_seed(int.from_bytes(digest.digest()))
        found.append(torch.randint(1, p, tuple(shape), generator=generator, dtype=torch.int64))
    return made(f, found, common_window(operands), operands[0].dtype)


def _seed(f: Field, name: str) -> int:
    return zlib.crc32(name.encode()) * 0x9E3779B97F4A7C15 + f.seed * 0x5851F42D4C957F2D


# Order: random, but equal numbers are equal; at most it respects signs.


def chosen(first: Tensor, a: Planes, b: Planes) -> Planes:
    """``a`` where ``first``, else ``b``."""
    planes = [torch.where(first, x, y) for x, y in zip(a.planes, b.planes, strict=True)]
    return Planes(planes, a.window & b.window, a.dtype)


def larger(f: Field, a: Planes, b: Planes) -> Planes:
    return chosen(order(f, a) >= order(f, b), a, b)


def smaller(f: Field, a: Planes, b: Planes) -> Planes:
    return chosen(order(f, a) <= order(f, b), a, b)


def extreme(f: Field, a: Planes, dim: int, keepdim: bool, largest: bool) -> tuple[Planes, Tensor]:
    """The largest or smallest elements along a dim, and their positions."""
    key = order(f, a)
    at = (key.argmax if largest else key.argmin)(dim, keepdim=True)
    planes = [p.gather(dim, at) for p in a.planes]
    if not keepdim:
        planes, at = [p.squeeze(dim) for p in planes], at.squeeze(dim)
    return Planes(planes, a.window.copy(), a.dtype), at
