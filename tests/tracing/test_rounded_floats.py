"""Ints that a function makes of floats, which it computes from dynamic sizes: at all sizes those
that Python computes, whose floats depend on the order of sums and products.
"""

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import ftp
from ftp import P

DIMS = {1: torch.export.Dim("S", min=1, max=512)}
STEPS = {
    "times": lambda x, k, s: x * k,
    "by the left": lambda x, k, s: k * x,
    "plus": lambda x, k, s: x + k,
    "less": lambda x, k, s: x - k,
    "from": lambda x, k, s: k - x,
    "over": lambda x, k, s: x / k,
    "under": lambda x, k, s: k / (math.exp(-x * x) + 1),
    "root": lambda x, k, s: math.sqrt(x * x),
    "power": lambda x, k, s: (x * x + 1) ** 0.5,
    "logarithm": lambda x, k, s: math.log(x * x + 1),
    "rounded": lambda x, k, s: math.floor(x) * k,
    "a share more": lambda x, k, s: x + s * k,
    "sign": lambda x, k, s: -x,
}
NUMBERS = [0.1, 10, 0.7, 3, 0.5, 1.25, 7, 1 / 3, 2.5, -0.3]
DRAWN = st.lists(st.tuples(st.sampled_from([*STEPS]), st.sampled_from(NUMBERS)), max_size=4)
ROUNDINGS = {"floor": math.floor, "ceil": math.ceil, "trunc": math.trunc, "round": round}


def computed(s, steps, rounding):
    x = s
    for name, k in steps:
        x = STEPS[name](x, k, s)
    return ROUNDINGS[rounding](x)


@pytest.mark.cases_by_default(1)
@pytest.mark.parametrize("rounding", ROUNDINGS)
@settings(max_examples=2)
@given(steps=DRAWN)
@example(steps=[("times", 0.1), ("times", 10)])
@example(steps=[("from", 7), ("over", 2.5)])
def test_it_is_the_int_that_python_computes(rounding, steps):
    def fn(x):
        n = computed(x.shape[1], steps, rounding)
        share = abs(n) % (x.shape[1] + 1)
        return x.square().sum() * n + x[:, :share].sum() + x.new_ones(share).sum()

    mesh = ftp.simulated_mesh((2,), ("cp",))
    step = ftp.spmd(fn, mesh, P(None, "cp"), P(), dynamic_shapes=DIMS)
    for size in (9, 13, 6, 57, 2):
        x = torch.linspace(-1, 2, 6 * size, dtype=torch.float64).reshape(2, size, 3)
        torch.testing.assert_close(step(x), fn(x), rtol=1e-12, atol=1e-12)
    assert step.shapes.traces <= 4 and not step.shapes.one_by_one


def test_the_order_of_products_decides():
    """torch's formulas of both numbers are ``1.0*S``."""
    step = ftp.spmd(
        lambda x: x.new_ones(math.ceil(x.shape[1] * 0.1 * 10)).sum(),
        ftp.simulated_mesh((2,), ("cp",)),
        P(None, "cp"),
        P(),
        dynamic_shapes=DIMS,
    )
    sizes = [s for s in range(2, 400) if math.ceil(s * 0.1 * 10) != s][:4]
    assert sizes
    for size in (8, *sizes):
        assert step(torch.ones(2, size)) == math.ceil(size * 0.1 * 10)
    assert step.shapes.traces == 1 and not step.shapes.one_by_one
