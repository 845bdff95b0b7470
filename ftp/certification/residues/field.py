"""Residue fields in which real formulas are evaluated: primes, powers, logarithms, constants.

Level ``k`` computes modulo the prime ``p[k]``, and ``p[k + 1] = 2 p[k] + 1``. Modulo ``p[k + 1]``,
4 generates a group of order ``p[k]``, so ``x -> 4 ** x`` from level ``k`` to level ``k + 1`` turns
sums into products, as ``exp`` does. Its inverse, up to sign, is ``log``.

A formula without exponentials is evaluated at one level, modulo a prime drawn from many. These
primes are -1 modulo 4, so that either ``x`` or ``-x`` is a square. The square counts as positive;
then signs multiply as those of real numbers do.

Source: the tower of two primes is Mirage's (Wu et al., OSDI 2025, section 5); chains of such primes
are Cunningham's.
"""

import functools
import math
from fractions import Fraction

import torch
from torch import Tensor

from ftp.dataclass import dataclass

# A Cunningham chain. Its primes are -1 modulo 8, 3 and 5, so that 2, 3 and 5 have square roots.
CHAIN = (2245319, 4490639, 8981279, 17962559, 35925119, 71850239)
BASE = 4
_SQUARES = (2, 3, 5, 7, 11, 13)  # positive modulo the primes of a single level, and their products
_CHOICE = 64
_LOW = 13  # bits of the lower half of a residue
_SIGN = 1 << 30


@dataclass(frozen=True)
class Ranking:
    """The order of some numbers: their residues, sorted, and a key for each."""

    residues: Tensor
    keys: Tensor

    def holds(self, x: Tensor) -> Tensor:
        return self.residues[self._at(x)] == x

    def ordered(self, x: Tensor, others: Tensor) -> Tensor:
        """The keys of the numbers ``x``; ``others`` are the keys of numbers that are not held."""
        return torch.where(self.holds(x), self.keys[self._at(x)], others)

    def _at(self, x: Tensor) -> Tensor:
        return torch.searchsorted(self.residues, x.contiguous()).clamp(max=len(self.residues) - 1)


@dataclass(frozen=True)
class Field:
    """One draw of a model of the reals.

    Attributes:
        primes: one for each level.
        seed: of inputs, of unknown functions, and of the order of numbers.
        order_level: the level whose residues are compared.
        has_logs: whether values carry the signs that logarithms leave.
        has_infinities: whether values mark infinite elements.
        ranking: the order of some numbers, if it is given rather than drawn.
        suspects: if given, collects whether runs are degenerate, in place of an error: some runs of
            a batch may be.
    """

    primes: tuple[int, ...]
    seed: int
    order_level: int
    has_logs: bool
    has_infinities: bool
    ranking: Ranking | None = None
    suspects: list[Tensor] | None = None

    @classmethod
    def of_depth(cls, exps: int, logs: int, has_infinities: bool, seed: int) -> "Field":
        """A field in which ``exps`` exponentials nest, and ``logs`` logarithms."""
        levels = min(exps + logs + 1, len(CHAIN))
        primes = CHAIN[:levels]
        if levels == 1:
            primes = (signed_primes()[seed % _CHOICE],)
        order = min(exps, max(levels - 1 - logs, 0))
        return cls(primes, seed, order, logs > 0, has_infinities)

    @property
    def levels(self) -> int:
        return len(self.primes)

    @property
    def has_signs(self) -> bool:
        """Whether numbers have the signs of ``sign``. With a chain they have none: its primes are
        few, and a constant that is not a square modulo one would be negative in every draw.
        """
        return self.levels == 1

    @property
    def planes(self) -> int:
        """Number of integer tensors of a value."""
        return self.levels * (2 if self.has_logs else 1) + self.has_infinities


def modpow(x: Tensor, exponent: int, p: int) -> Tensor:
    found = torch.ones_like(x)
    while exponent:
        if exponent & 1:
            found = found * x % p
        x = x * x % p
        exponent >>= 1
    return found


@functools.cache
def signed_primes() -> tuple[int, ...]:
    """The largest primes that are -1 modulo 8 and have the small primes among their squares.

    >>> p = signed_primes()[-1]
    >>> p % 8, [pow(small, (p - 1) // 2, p) for small in (2, 3, 5, 7, 11, 13)]
    (7, [1, 1, 1, 1, 1, 1])
    """
    found: list[int] = []
    p = CHAIN[-1]  # itself -1 modulo 8
    while len(found) < _CHOICE:
        p -= 8
        if all(pow(small, (p - 1) // 2, p) == 1 for small in _SQUARES) and _is_prime(p):
            found.append(p)
    return tuple(found)


def _is_prime(p: int) -> bool:
    return all(p % d for d in range(3, math.isqrt(p) + 1, 2))


def sign(x: Tensor, p: int) -> Tensor:
    """1 if ``x`` is a square modulo ``p``, 0 if zero, else -1; it maps products to products."""
    found = modpow(x, (p - 1) // 2, p)
    return torch.where(found == p - 1, -1, found)


def inverse(x: Tensor, p: int) -> Tensor:
    """The inverse modulo ``p``; of zero it is zero."""
    return modpow(x, p - 2, p)


def square_root(x: Tensor, p: int) -> Tensor:
    """A root of ``x`` or of ``-x``, whichever has one; it maps products to products."""
    return modpow(x, (p + 1) // 4, p)


@functools.lru_cache(maxsize=16)
def _powers(p: int) -> tuple[Tensor, Tensor]:
    low = [1]
    for _ in range((1 << _LOW) - 1):
        low.append(low[-1] * BASE % p)
    step = pow(BASE, 1 << _LOW, p)
    high = [1]
    for _ in range(p >> _LOW):
        high.append(high[-1] * step % p)
    return torch.tensor(low), torch.tensor(high)


def power(x: Tensor, p: int) -> Tensor:
    """``4 ** x`` modulo ``p``, for ``0 <= x < (p - 1) / 2``."""
    low, high = _powers(p)
    return low[x & ((1 << _LOW) - 1)] * high[x >> _LOW] % p


@functools.lru_cache(maxsize=8)
def _logarithms(p: int) -> Tensor:
    powers = torch.ones(1, dtype=torch.int64)
    order = (p - 1) // 2
    while len(powers) < order:
        more = powers[: order - len(powers)] * pow(BASE, len(powers), p) % p
        powers = torch.cat([powers, more])
    exponents = torch.arange(order, dtype=torch.int32)
    table = torch.zeros(p, dtype=torch.int32)
    table[powers] = exponents
    table[p - powers] = exponents | _SIGN
    return table


def logarithm(x: Tensor, p: int) -> tuple[Tensor, Tensor]:
    """``k`` and ``s`` with ``x = (-1) ** s * 4 ** k`` modulo ``p``."""
    found = _logarithms(p)[x].to(torch.int64)
    return found & (_SIGN - 1), (found & _SIGN) // _SIGN


def hashed(x: Tensor, seed: int) -> Tensor:
    """A random function of integers, drawn by ``seed``: 61 bits for each element."""
    mask = (1 << 62) - 1
    h = x ^ (seed & mask)
    for odd in (0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9, 0x14D049BB133111EB):
        h = (h * odd) & mask
        h = h ^ (h >> 29)
    return h >> 1


def matmul(a: Tensor, b: Tensor, p: int) -> Tensor:
    """A product of matrices, or of batches of them, modulo ``p``; exact in float64."""
    found = None
    for start in range(0, max(a.shape[-1], 1), 4096):
        rows, columns = a[..., start : start + 4096], b[..., start : start + 4096, :]
        right = columns.to(torch.float64)
        high = torch.matmul((rows >> _LOW).to(torch.float64), right).to(torch.int64) % p
        low = torch.matmul((rows & ((1 << _LOW) - 1)).to(torch.float64), right).to(torch.int64)
        part = ((high << _LOW) + low) % p
        found = part if found is None else (found + part) % p
    assert found is not None
    return found


# Constants.


def residue(value: float, p: int) -> int:
    """The residue of the fraction, or of the root, that a finite float stands for."""
    number, roots = exact(value)
    found = number.numerator % p * pow(number.denominator % p, p - 2, p) % p
    for _ in range(roots):
        found = pow(found, (p + 1) // 4, p)
    return found if value >= 0 or not roots else -found % p


@functools.lru_cache(maxsize=65536)
def exact(value: float) -> tuple[Fraction, int]:
    """The fraction whose square root, taken a number of times, a float stands for.

    >>> exact(0.1), exact(1 / 3), exact(8**-0.5)
    ((Fraction(1, 10), 0), (Fraction(1, 3), 0), (Fraction(1, 8), 1))
    """
    written = Fraction(repr(float(value)))
    if value == int(value) or len(repr(abs(value)).split("e")[0]) < 12:
        return written, 0
    for roots in range(3):
        power_of = abs(value) ** (1 << roots) if roots else value
        near = Fraction(power_of).limit_denominator(10**5)
        if near and math.isclose(near, power_of, rel_tol=(1 << roots) * 4e-16, abs_tol=0.0):
            return near, roots
    return written, 0
