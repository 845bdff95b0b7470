"""Ints computed from the sizes of dynamic dims: a value at one size, and the formula for others.

Planning and partitioning compute with sizes as ints. With a ``DynamicInt`` for a dim whose size
changes from call to call, the same code yields formulas, and records each comparison of formulas
with its answer: the conditions under which the results hold for another size.

``isinstance`` takes a ``DynamicInt`` for an ``int``, but it is not one: C code has to ask for its
value, which is recorded as the condition that the formula has this value. So no call can lose a
formula unnoticed.

Above 450 lines: `DynamicInt`, `Sizes` and `Conditions` are defined in terms of each other.
"""

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from ftp.dataclass import dataclass

T = TypeVar("T")
Terms = dict[tuple[int, ...], int]
"""A polynomial: of each product of atoms, named by their numbers, the coefficient."""

ROUNDINGS: dict[str, Callable[[Any], Any]] = {
    "floor": math.floor, "ceil": math.ceil, "trunc": math.trunc, "round": round
}  # fmt: skip
INT_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "//": operator.floordiv, "%": operator.mod, **ROUNDINGS
}  # fmt: skip
"""The functions whose values are atoms: of two ints, or of a float computed from sizes."""


class NotDivisible(Exception):
    """Sizes were tested for a divisor that they have: formulas of its multiples are simpler. Caught
    by `in_multiples`.

    Attributes:
        multiples: the divisor of each such size, by name.
    """

    def __init__(self, multiples: Mapping[str, int]):
        super().__init__(multiples)
        self.multiples = multiples


class IsOne(Exception):
    """A size of a trace is one or zero at the sizes at hand, and something was decided by it. Other
    decisions of the trace took it for another number: it serves no size.
    """


@dataclass(frozen=True)
class Symbol:
    """The size of a dynamic dim: ``multiple`` times a number from ``low`` to ``high``."""

    name: str
    value: int
    low: int
    high: int | float
    multiple: int = 1

    @property
    def count(self) -> int:
        return self.value // self.multiple


def symbol(name: str, value: int, low: int, high: float, multiple: int = 1) -> Symbol:
    """The symbol of sizes from ``low`` to ``high`` that are multiples of ``multiple``."""
    most = high if math.isinf(high) else int(high) // multiple
    return Symbol(name, value, -(-low // multiple), most, multiple)


@dataclass(frozen=True)
class _Atom:
    """A number in formulas: a symbol, or the value of a function of formulas."""

    kind: str  # "symbol", "//", "%"
    of: tuple[Any, ...]
    low: float
    high: float


class Sizes:
    """The sizes of a program's dynamic dims, with the formulas computed from them and the
    conditions that were tested.

    >>> sizes = Sizes([Symbol("S", 7, 1, 512)])
    >>> (s,) = sizes.symbols
    >>> 2 * s + 1, -(-s // 3), -(-s // 3) > 2, list(sizes.conditions)
    (2*S + 1, -((-S)//3), True, ['-((-S)//3) - 2 > 0'])
    >>> sizes.function([2 * s + 1])([12]), sizes.conditions.holds([5])
    ((25,), False)
    """

    def __init__(self, symbols: Sequence[Symbol]):
        self.given = tuple(symbols)
        self.memo: dict[Any, Any] = {}
        self.conditions = self._noting = Conditions(self)
        self.prefers_multiples = False
        self._now = [s.count for s in symbols]
        self._values: dict[int, int] = {}  # of atoms, now
        self._atoms: list[_Atom] = []
        self._numbers: dict[Any, int] = {}
        self.symbols: tuple[DynamicInt, ...] = tuple(
            self.formula({(self._atom("symbol", (s.name,), s.low, s.high),): s.multiple})
            for s in symbols
        )

    @contextmanager
    def noting(self, values: Sequence[int] | None = None) -> "Iterator[Conditions]":
        """Within the block conditions are tested at ``values``, and recorded separately."""
        outer, now = self._noting, self._now
        self._noting = Conditions(self)
        if values is not None:
            self._now, self._values = self._counts(values), {}
        try:
            yield self._noting
        finally:
            self._noting, self._now, self._values = outer, now, {}

    @property
    def now(self) -> tuple[int, ...]:
        """The sizes at which conditions are tested."""
        return tuple(c * s.multiple for c, s in zip(self._now, self.given, strict=True))

    def value(self, terms: Terms) -> int:
        """The value of a formula at the current sizes."""
        total = 0
        for atoms, c in terms.items():
            for a in atoms:
                c *= self._value(a)
            total += c
        return total

    def _value(self, atom: int) -> int:
        if atom not in self._values:
            kind, of = self.made_of(atom)
            if kind == "symbol":
                found = self._now[[s.name for s in self.given].index(of[0])]
            else:
                found = INT_FUNCTIONS[kind](*(x.value if _is_formula(x) else x for x in of))
            self._values[atom] = found
        return self._values[atom]

    def _atom(self, kind: str, of: tuple[Any, ...], low: float, high: float) -> int:
        key = (kind, *of)
        if key not in self._numbers:
            self._numbers[key] = len(self._atoms)
            self._atoms.append(_Atom(kind, of, low, high))
        return self._numbers[key]

    def formula(self, terms: Terms) -> Any:
        """The formula of these terms; an int if they are constant."""
        terms = {atoms: c for atoms, c in terms.items() if c}
        if not terms or (len(terms) == 1 and () in terms):
            return terms.get((), 0)
        return DynamicInt(self, terms)

    def _bounds(self, terms: Terms) -> tuple[float, float]:
        low = high = 0.0
        for atoms, c in terms.items():
            ends = [float(c)]
            for a in atoms:
                ends = [e * x if e and x else 0.0 for e in ends for x in self._ends(a)]
                ends = [min(ends), max(ends)]
            low, high = low + min(ends), high + max(ends)
        return low, high

    def _ends(self, atom: int) -> tuple[float, float]:
        return self._atoms[atom].low, self._atoms[atom].high

    def is_zero(self, x: "DynamicInt") -> bool:
        """Whether ``x`` is zero; recorded as a condition if other sizes may differ."""
        low, high = self._bounds(x.terms)
        if low > 0 or high < 0:
            return False
        (atoms, _), *more = x.terms.items()
        if (
            self.prefers_multiples
            and not more
            and len(atoms) == 1
            and self._atoms[atoms[0]].kind == "%"
            and not x.value
        ):
            of, n = self._atoms[atoms[0]].of
            is_of_symbols = is_dynamic(of) and all(
                self._atoms[a].kind == "symbol" for product in of.terms for a in product
            )
            if is_of_symbols and not is_dynamic(n):
                self._prefer_multiples(of, n)
        return self._ask("zero", x, x.value == 0)

    def _prefer_multiples(self, of: "DynamicInt", n: int) -> None:
        """Ask for formulas of multiples of ``n``, where the sizes that ``of`` is made of are such.

        Raises:
            NotDivisible: they are.
        """
        names = {self.made_of(a)[1][0] for product in of.terms for a in product}
        n //= math.gcd(n, *of.terms.values())
        found = {}
        for s in self.given:
            # Of multiples of 2, half of the size is asked for a factor of 2: multiples of 4.
            wanted = math.lcm(s.multiple, n) if s.multiple % n else s.multiple * n
            if s.name in names and s.value % wanted == 0 and (s.value or s.multiple % n):
                found[s.name] = wanted
        if len(of.terms) == 1 and found:  # one factor suffices
            raise NotDivisible(dict([*found.items()][:1]))
        if len(found) == len(names):
            raise NotDivisible(found)

    def is_positive(self, x: "DynamicInt") -> bool:
        """Whether ``x`` is positive; recorded as a condition if other sizes may differ."""
        low, high = self._bounds(x.terms)
        if low > 0 or high <= 0:
            return low > 0
        return self._ask("positive", x, x.value > 0)

    def fix(self, x: "DynamicInt") -> int:
        """The value of ``x``; the condition that it has this value is recorded."""
        self._ask("zero", x - x.value, True)
        return x.value

    def _ask(self, question: str, x: "DynamicInt", answer: bool) -> bool:
        self._noting.add(question, x, answer)
        return answer

    def note(self, question: str, x: Any, answer: bool) -> None:
        """Record a condition on ``x`` that was tested elsewhere, unless it holds at all sizes.

        Raises:
            ValueError: it does not hold at the current sizes.
        """
        value = value_of(x)
        if ((value == 0) if question == "zero" else (value > 0)) != answer:
            raise ValueError(f"{x!r} is {value}")
        if is_dynamic(x):
            low, high = self._bounds(x.terms)
            apart = low > 0 or high < 0 if question == "zero" else low > 0 or high <= 0
            if not apart:
                self._ask(question, x, answer)

    def note_all(self, conditions: "Conditions") -> None:
        """Record conditions that were recorded separately."""
        self._noting.include(conditions)

    def ask_again(self, conditions: "Conditions") -> None:
        """Record conditions on formulas of other `Sizes` with the same names."""
        for question, x, answer in conditions.each():
            here = moved(x, self)
            if is_dynamic(here):
                is_above = question == "positive" and self._bounds(here.terms)[0] == 0
                if (question == "zero" and answer) or (is_above and not answer):
                    self.is_zero(here)
            self.note(question, here, answer)

    def count(self, x: "DynamicInt") -> "DynamicInt":
        """The number that a symbol's size is a multiple of."""
        (atoms,) = x.terms
        return self.formula({atoms: 1})

    def alone(self, atom: int) -> "DynamicInt":
        """The formula of one atom."""
        return self.formula({(atom,): 1})

    def made_of(self, atom: int) -> tuple[str, tuple[Any, ...]]:
        """The function whose value an atom is, and its arguments."""
        return self._atoms[atom].kind, self._atoms[atom].of

    def takes(self, values: Sequence[int]) -> bool:
        """Whether the formulas apply to these sizes: within limits, and multiples as required."""
        return all(
            v % s.multiple == 0 and s.low <= v // s.multiple <= s.high
            for v, s in zip(values, self.given, strict=True)
        )

    def function(self, formulas: Sequence[Any]) -> Callable[[Sequence[int]], tuple[int, ...]]:
        """A function from sizes to the values of formulas."""
        texts = [x.written() if _is_formula(x) else repr(x) for x in formulas]
        needed = [part for x in filter(_is_formula, formulas) for part in x.ints()]
        return self.compiled(needed, f"({''.join(f'{text}, ' for text in texts)})")

    def _counts(self, values: Sequence[int]) -> list[int]:
        return [v // s.multiple for v, s in zip(values, self.given, strict=True)]

    def compiled(
        self, needed: Iterable["DynamicInt"], result: str
    ) -> Callable[[Sequence[int]], Any]:
        """A function from sizes to the value of ``result``, a Python expression of formulas."""
        numbers: set[int] = set()
        stack = list(needed)
        while stack:
            for product in stack.pop().terms:
                for a in product:
                    if a not in numbers:
                        numbers.add(a)
                        of = filter(_is_formula, self._atoms[a].of)
                        stack += [x for part in of for x in part.ints()]
        names = [f"a{self._numbers['symbol', s.name]}" for s in self.given]
        lines = [f"def f({', '.join(names)}):"]
        for a in sorted(numbers):  # an atom's number is higher than those of its arguments
            kind, of = self._atoms[a].kind, self._atoms[a].of
            if kind in ROUNDINGS:
                function = kind if kind == "round" else f"math.{kind}"
                lines.append(f"    a{a} = {function}({of[0].written()})")
            elif kind != "symbol":
                x, y = (one.written() if is_dynamic(one) else str(one) for one in of)
                lines.append(f"    a{a} = ({x}) {kind} ({y})")
        lines.append(f"    return {result}")
        scope: dict[str, Any] = {"math": math}
        exec("\n".join(lines), scope)
        return lambda values: scope["f"](*self._counts(values))

    def quotient(self, x: Any, y: Any) -> Any:
        """``x // y``: the part that ``y`` divides at all sizes, plus an atom for the rest."""
        if y == 1:
            return x
        if is_dynamic(y):
            if self._bounds(y.terms)[0] <= 0 and not self.is_positive(y):
                return x // self.fix(y)
            whole = self._divided(terms_of(x), y)
            return self._opaque("//", x, y) if whole is None else whole
        if y <= 0:
            return self.quotient(-x, -y) if y else x.value // y
        if (exact := self._exact(x, y)) is not None:
            return exact
        whole = {atoms: c // y for atoms, c in x.terms.items() if c % y == 0}
        rest = self.formula({atoms: c for atoms, c in x.terms.items() if c % y})
        rest = self._floor_of(rest, y) if is_dynamic(rest) else rest // y
        return self.formula(whole) + rest

    def _floor_of(self, x: "DynamicInt", y: int) -> Any:
        """``x // y`` in one way of writing: ``(2*S + 1) // 4`` is ``S // 2``, and ``(S // 2) // 3``
        is ``S // 6``. Equal sizes that are written in two ways count as different.
        """
        constant = x.terms.get((), 0)
        terms = {atoms: c for atoms, c in x.terms.items() if atoms}
        common = math.gcd(y, *terms.values())
        if common > 1:
            reduced = {atoms: c // common for atoms, c in terms.items()}
            return self.quotient(self.formula({**reduced, (): constant // common}), y // common)
        ((atoms, c), *more) = terms.items()
        if not more and c == 1 and len(atoms) == 1:
            kind, of = self.made_of(atoms[0])
            if kind == "//" and not is_dynamic(of[1]):
                return self.quotient(of[0] + constant * of[1], of[1] * y)
        return self._opaque("//", x, y)

    def _divided(self, terms: Terms, y: "DynamicInt") -> Any:
        """``terms / y`` where ``terms`` is a multiple of ``y`` by a number, or ``y`` is one product
        and divides each of them; else None.
        """
        (atoms, by), *more = y.terms.items()
        if more:
            times = terms.get(atoms, 0) // by
            return times if terms == {a: times * c for a, c in y.terms.items()} else None
        found: Terms = {}
        for product, c in terms.items():
            left = list(product)
            for a in atoms:
                if a not in left:
                    return None
                left.remove(a)
            if c % by:
                return None
            found[tuple(left)] = c // by
        return self.formula(found)

    def rounded(self, kind: str, x: Any) -> Any:
        """An int that one of `ROUNDINGS` makes of a float computed from sizes."""
        return self.formula({(self._atom(kind, (x,), -math.inf, math.inf),): 1})

    def remainder(self, x: Any, y: Any) -> Any:
        """``x % y``."""
        if is_dynamic(y):
            if self._bounds(y.terms)[0] <= 0 and not self.is_positive(y):
                return x % self.fix(y)
            return self._opaque("%", x, y) if self._divided(terms_of(x), y) is None else 0
        if y <= 0:
            return x - y * (x // y)
        if self._exact(x, y) is not None:
            return 0
        rest = self._of_remainders(x, y)
        return self._opaque("%", rest, y) if is_dynamic(rest) else rest % y

    def _exact(self, x: "DynamicInt", y: int) -> Any:
        """``x // y`` where ``y`` divides ``x`` at all sizes, as a size and its padding to a
        multiple of ``y``; else None.
        """
        for terms in (x.terms, x.plain):
            if not any(c % y for c in terms.values()):
                return self.formula({atoms: c // y for atoms, c in terms.items()})
        return None

    def plain(self, terms: Terms) -> Terms:
        """Terms of the same value, equal for more of the sums that are equal at all sizes: a
        remainder is written by its quotient, and a quotient by coefficients below its divisor.
        """
        if not any(self._plain(a) is not None for product in terms for a in product):
            return terms
        total: Any = 0
        for atoms, c in terms.items():
            product: Any = c
            for a in atoms:
                factor = self._plain(a)
                product = product * (self.alone(a) if factor is None else factor)
            total = total + product
        return terms_of(total)

    def _plain(self, atom: int) -> Any:
        """As `plain`, for one atom; None where it is so."""
        kind, of = self.made_of(atom)
        if kind not in ("//", "%") or is_dynamic(of[1]):
            return None
        terms, n = of[0].plain, of[1]
        if kind == "//" and terms is of[0].terms and all(0 <= c < n for c in terms.values()):
            return None
        whole = self.formula({atoms: c // n for atoms, c in terms.items()})
        rest = self.formula({atoms: c % n for atoms, c in terms.items()})
        quotient = whole + (self._opaque("//", rest, n) if is_dynamic(rest) else rest // n)
        return quotient if kind == "//" else self.formula(terms) - n * quotient

    def _of_remainders(self, x: "DynamicInt", y: int) -> Any:
        """Equal to ``x`` modulo ``y``, with ``a`` for ``a % n`` where ``y`` divides n."""
        total: Any = 0
        for atoms, c in x.terms.items():
            product: Any = c % y
            for a in atoms:
                kind, of = self.made_of(a)
                is_free = kind == "%" and not is_dynamic(of[1]) and of[1] % y == 0
                product = product * (of[0] if is_free else self.alone(a))
            total = total + product
        return self.formula({atoms: c % y for atoms, c in terms_of(total).items()})

    def _opaque(self, kind: str, x: Any, y: Any) -> Any:
        """``x // y`` or ``x % y`` as an atom, for a positive ``y``."""
        low, high = self._bounds(terms_of(x))
        least, most = (max(end, 1.0) for end in self._bounds(terms_of(y)))
        if kind == "//":
            ends = [0.0 if math.isinf(d) else e / d for e in (low, high) for d in (least, most)]
            low, high = _floor(min(ends)), _floor(max(ends))
        elif low >= 0 and high <= least - 1:
            return x
        else:
            low, high = 0, most - 1
        return self.formula({(self._atom(kind, (x, y), low, high),): 1})

    def written(self, terms: Terms, name: Callable[[int], str]) -> str:
        parts = []
        for atoms, c in sorted(terms.items(), key=lambda t: (-len(t[0]), t[0])):
            product = "*".join(map(name, atoms))
            if not atoms:
                parts.append(str(c))
            elif c in (1, -1):
                parts.append(product if c == 1 else f"-{product}")
            else:
                parts.append(f"{c}*{product}")
        return " + ".join(parts).replace("+ -", "- ")

    def described(self, atom: int) -> str:
        kind, of = self.made_of(atom)
        if kind == "symbol":
            return of[0]
        if kind in ROUNDINGS:
            return f"{kind}({of[0]!r})"
        x, y = (repr(one) if str(one).isalnum() else f"({one!r})" for one in of)
        return f"({x}{kind}{y})"


class Conditions:
    """Conditions on formulas, each with its answer."""

    def __init__(self, sizes: Sizes):
        self._sizes = sizes
        self._asked: dict[tuple[str, DynamicInt], bool] = {}
        self._test: Callable[[Sequence[int]], Any] | None = None

    def add(self, question: str, x: "DynamicInt", answer: bool) -> None:
        if (question, x) not in self._asked:
            self._asked[question, x] = answer
            self._test = None

    def include(self, other: "Conditions") -> None:
        """Add those of ``other``."""
        for (question, x), answer in other._asked.items():
            self.add(question, x, answer)

    def pins(self) -> bool:
        """Whether they hold for only one size, as far as those beside it tell."""
        if not any(
            q == "zero" and answer and x.is_of_few() for (q, x), answer in self._asked.items()
        ):
            return False
        now, given = self._sizes.now, self._sizes.given
        beside = [
            (*now[:i], now[i] + step * s.multiple, *now[i + 1 :])
            for i, s in enumerate(given)
            for step in (-1, 1)
        ]
        return not any(map(self.holds, beside))

    def __iter__(self) -> Iterator[str]:
        """The conditions as text."""
        return (_condition(q, repr(x), answer) for (q, x), answer in self._asked.items())

    def each(self) -> "list[tuple[str, DynamicInt, bool]]":
        """The conditions: "zero" or "positive", the formula, and the answer."""
        return [(question, x, answer) for (question, x), answer in self._asked.items()]

    def holds(self, values: Sequence[int]) -> bool:
        """Whether all conditions hold for these sizes."""
        if not self._sizes.takes(values):
            return False
        if self._test is None:
            parts = [_condition(q, x.written(), a) for (q, x), a in self._asked.items()]
            self._test = self._sizes.compiled(
                [x for _, x in self._asked], " and ".join(parts) or "True"
            )
        try:
            return bool(self._test(values))
        except (ArithmeticError, TypeError, ValueError):  # such as a division by zero
            return False


class DynamicInt:
    """An int computed from the sizes of dynamic dims; see the module.

    ``==`` compares formulas. Tests for zero and for order compare values, and are recorded. So code
    that treats two sizes as different must be right if they are equal too.
    """

    __slots__ = ("_hash", "_plain", "sizes", "terms")

    def __init__(self, sizes: Sizes, terms: Terms):
        self.sizes, self.terms = sizes, terms
        self._hash: int | None = None
        self._plain: Terms | None = None

    @property
    def plain(self) -> Terms:
        """The terms to compare by; see `Sizes.plain`."""
        if self._plain is None:
            self._plain = self.sizes.plain(self.terms)
        return self._plain

    @property
    def __class__(self) -> type:
        return int

    @property
    def value(self) -> int:
        """The value at the current sizes."""
        return self.sizes.value(self.terms)

    def is_of_few(self) -> bool:
        """Whether few sizes give it one value: it has sums, products and rounded floats only."""
        kinds = {self.sizes.made_of(a)[0] for product in self.terms for a in product}
        return kinds <= {"symbol", *ROUNDINGS}

    def __repr__(self) -> str:
        return self.sizes.written(self.terms, self.sizes.described)

    def ints(self) -> "list[DynamicInt]":
        """The formulas of ints that it is computed from."""
        return [self]

    def written(self) -> str:
        """The formula in the names that `Sizes.function` gives to atoms."""
        return f"({self.sizes.written(self.terms, 'a{}'.format)})"

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = hash(frozenset(self.plain.items()))
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, int):
            return NotImplemented
        if is_dynamic(other):
            of: Any = other
            if self.sizes is not of.sizes:
                return False
            return self.terms == of.terms or self.plain == of.plain
        return other == 0 and self.sizes.is_zero(self)

    def __bool__(self) -> bool:
        return not self.sizes.is_zero(self)

    def __gt__(self, other: Any) -> bool:
        return _is_positive(self - other)

    def __lt__(self, other: Any) -> bool:
        return _is_positive(other - self)

    def __ge__(self, other: Any) -> bool:
        return not _is_positive(other - self)

    def __le__(self, other: Any) -> bool:
        return not _is_positive(self - other)

    def __index__(self) -> int:
        return self.sizes.fix(self)

    def __int__(self) -> int:
        return self.sizes.fix(self)

    def __float__(self) -> float:
        return float(self.sizes.fix(self))

    def __truediv__(self, other: Any) -> float:
        return self.sizes.fix(self) / other

    def __rtruediv__(self, other: Any) -> float:
        return other / self.sizes.fix(self)

    def __add__(self, other: Any) -> Any:
        if not isinstance(other, int):
            return NotImplemented if not isinstance(other, float) else other + float(self)
        found = dict(self.terms)
        for atoms, c in terms_of(other).items():
            found[atoms] = found.get(atoms, 0) + c
        return self.sizes.formula(found)

    __radd__ = __add__

    def __neg__(self) -> Any:
        return self.sizes.formula({atoms: -c for atoms, c in self.terms.items()})

    def __pos__(self) -> "DynamicInt":
        return self

    __floor__ = __ceil__ = __trunc__ = __round__ = __pos__

    def __abs__(self) -> Any:
        return self if self >= 0 else -self

    def __sub__(self, other: Any) -> Any:
        return self + (-other)

    def __rsub__(self, other: Any) -> Any:
        return -self + other

    def __mul__(self, other: Any) -> Any:
        if not isinstance(other, int):
            return other * float(self) if isinstance(other, float) else NotImplemented
        found: Terms = {}
        for a, c in self.terms.items():
            for b, d in terms_of(other).items():
                product = tuple(sorted((*a, *b)))
                found[product] = found.get(product, 0) + c * d
        return self.sizes.formula(found)

    __rmul__ = __mul__

    def __pow__(self, power: int) -> Any:
        return (
            math.prod([self] * power)
            if isinstance(power, int) and power >= 0
            else float(self) ** power
        )

    def __floordiv__(self, other: Any) -> Any:
        return self.sizes.quotient(self, other)

    def __rfloordiv__(self, other: Any) -> Any:
        return self.sizes.quotient(other, self)

    def __mod__(self, other: Any) -> Any:
        return self.sizes.remainder(self, other)

    def __rmod__(self, other: Any) -> Any:
        return self.sizes.remainder(other, self)

    def __divmod__(self, other: Any) -> tuple[Any, Any]:
        return self // other, self % other


def is_dynamic(x: Any) -> bool:
    """Whether a number is a formula of dynamic sizes."""
    return type(x) is DynamicInt


def _is_formula(x: Any) -> bool:
    """As `ftp.dynamic_float.is_formula`."""
    return hasattr(type(x), "ints")


def value_of(x: Any) -> Any:
    """The value at the sizes that a plan is made for; for prices, which may differ elsewhere."""
    return x.value if type(x) is DynamicInt else x


def terms_of(x: Any) -> Terms:
    """The polynomial of a formula or an int."""
    return x.terms if is_dynamic(x) else {(): int(x)}


def _is_positive(x: Any) -> bool:
    return x.sizes.is_positive(x) if is_dynamic(x) else x > 0


def _condition(question: str, formula: str, answer: bool) -> str:
    if question == "zero":
        return f"{formula} {'==' if answer else '!='} 0"
    return f"{formula} {'>' if answer else '<='} 0"


def _floor(x: float) -> float:
    return x if math.isinf(x) else math.floor(x)


def moved(x: Any, to: Sizes) -> Any:
    """A formula of other `Sizes` with the same names, as a formula of ``to``."""
    if not is_dynamic(x):
        return x.moved(to) if _is_formula(x) else x
    if x.sizes is to:
        return x
    memo = to.memo.setdefault(("moved", id(x.sizes)), {"of": x.sizes})
    if x not in memo:
        total: Any = 0
        for atoms, c in x.terms.items():
            product: Any = c
            for atom in atoms:
                product = product * _moved_atom(x.sizes, atom, to)
            total = total + product
        memo[x] = total
    return memo[x]


def _moved_atom(of: Sizes, atom: int, to: Sizes) -> Any:
    kind, parts = of.made_of(atom)
    if kind == "symbol":
        at = next(i for i, s in enumerate(of.given) if s.name == parts[0])
        return to.symbols[at] // of.given[at].multiple
    return INT_FUNCTIONS[kind](*(moved(part, to) for part in parts))


def in_multiples(sizes_of: Callable[[Mapping[str, int]], Sizes], make: Callable[[Sizes], T]) -> T:
    """What ``make`` makes of sizes. A size that it tests for a divisor, and that has it, is written
    as a multiple of the divisor: shards of such sizes have formulas too.

    Args:
        sizes_of: gives the sizes, by the multiples of those that are written so.
    """
    multiples: dict[str, int] = {}
    while True:
        sizes = sizes_of(multiples)
        sizes.prefers_multiples = True
        try:
            made = make(sizes)
        except NotDivisible as asked:
            multiples |= asked.multiples
            continue
        sizes.prefers_multiples = False
        return made
