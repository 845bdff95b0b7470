"""Formulas of dynamic sizes: their values, and one way of writing for equal ones."""

import math
import operator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftp.dynamic_float import DynamicFloat
from ftp.dynamic_int import Sizes, Symbol, is_dynamic

_BY = st.integers(1, 12)
_STEPS = st.lists(
    st.tuples(st.sampled_from(["add", "mul", "floordiv", "mod"]), _BY, st.booleans()), max_size=6
)


@given(multiple=st.sampled_from([1, 2, 6]), steps=_STEPS, counts=st.tuples(_BY, _BY))
def test_a_formula_has_the_value_that_python_computes(multiple, steps, counts):
    """Of sums, products, quotients and remainders, each by a number or the other size."""
    values = [multiple * c for c in counts]
    sizes = Sizes([Symbol(name, multiple, 1, 100, multiple) for name in "ST"])

    def computed(s, t):
        x = s
        for name, n, by_size in steps:
            x = getattr(operator, name)(x, t if by_size and name in ("add", "mul") else n)
        return x

    x = computed(*sizes.symbols)
    assert sizes.function([x])(values) == (computed(*values),)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda s: (2 * s) // 4, lambda s: s // 2),
        (lambda s: (2 * s + 1) // 4, lambda s: s // 2),
        (lambda s: (s // 2) // 3, lambda s: s // 6),
        (lambda s: (s // 2 + 5) // 3, lambda s: (s + 10) // 6),
        (lambda s: -(-2 * s // 4), lambda s: -(-s // 2)),
        (lambda s: (6 * s + 9) // 3, lambda s: 2 * s + 3),
        (lambda s: s + (4 - s % 4) % 4, lambda s: (s + (4 - s % 4) % 4) // 4 * 4),
        (lambda s: (4 - s % 4) % 4, lambda s: -s % 4),
        (lambda s: s + -s % 4, lambda s: -(-s // 4) * 4),
        (lambda s: s % 4, lambda s: s - 4 * (s // 4)),
    ],
)
def test_equal_quotients_are_written_alike(one, other):
    (s,) = Sizes([Symbol("S", 7, 1, 512)]).symbols
    assert is_dynamic(one(s)) and one(s) == other(s)


def test_formulas_of_floats_are_compared_with_formulas_alone():
    (s,) = Sizes([Symbol("S", 8, 1, 512)]).symbols
    x, same, whole = (DynamicFloat("/", left, s) for left in (1.0, 1.0, 1))
    assert x == same and hash(x) == hash(same) and {x: 1}[same] == 1
    assert x != whole and x != s and s != x and x != "S"
    assert DynamicFloat("*", x, s) != DynamicFloat("*", 1.0, s)
    asks = [
        lambda: x == 0.125,
        lambda: x != 0.125,
        lambda: x == 0,
        lambda: x < 0.125,
        lambda: 0.125 in (x,),
        lambda: bool(x),
        lambda: float(x),
        lambda: math.sqrt(x),
    ]
    for ask in asks:
        with pytest.raises(TypeError, match="which is another at every size"):
            ask()
