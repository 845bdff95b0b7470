"""Values computed from Python numbers alone are known while a function is traced, also where code
writes to them or to views of them.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import ftp
from ftp import P
from ftp.errors import TraceError

X = torch.linspace(-1, 2, 6, dtype=torch.float64)
WRITES = st.tuples(st.integers(0, 3), st.integers(0, 9), st.integers(0, 9))


def _run(writes: list[tuple[int, int, int]], x: Tensor) -> Tensor:
    """Writes to constants and views of them, and reads between the writes."""
    held = [torch.arange(6), torch.full((6,), 2), torch.tensor([3, 1, 4, 1, 5, 9])]
    total = x
    for kind, i, j in writes:
        a, b = held[i % len(held)], held[j % len(held)]
        if kind == 0:
            held.append(a[1:] if len(a) > 2 else a.clone())
        elif kind == 1:
            a[j % len(a)] = b[i % len(b)]
        elif kind == 2:
            a += j
        else:
            total = total * (1 + int(a.sum()) % 7) + b[0].item()
        if a[0] > a[-1]:
            total = total.sin()
    return total.sum()


@settings(max_examples=25, deadline=None)
@given(st.lists(WRITES, max_size=12))
def test_writes_to_constants(writes: list[tuple[int, int, int]]):
    step = ftp.spmd(lambda x: _run(writes, x), MESH, P("tp"), strict=True)
    torch.testing.assert_close(step(X), _run(writes, X), rtol=1e-12, atol=0)


MESH = ftp.simulated_mesh((2,), ("tp",))


def test_a_grid_of_time_steps_is_known():
    """As torchdiffeq makes it: its last point is written to it. 40 decisions have one way."""

    def integrate(x: Tensor) -> Tensor:
        grid = torch.arange(0, 41, dtype=x.dtype) * 0.025
        grid[-1] = 1.0
        for i in range(40):
            start, end = grid[i], grid[i + 1]
            x = x + (end - start) * x.sin()
            if end >= 0.5:
                x = x * (1 - 1e-3 * end)
        return x.sum()

    step = ftp.spmd(integrate, MESH, P("tp"), strict=True)
    torch.testing.assert_close(step(X), integrate(X), rtol=1e-12, atol=0)


def _from_an_input(x: Tensor) -> Tensor:
    grid = torch.zeros(3, dtype=x.dtype)
    grid[0] = x[0]
    return x[: int(grid[0])]


def _after_a_write_of_an_input(x: Tensor) -> Tensor:
    grid, before = torch.ones(3, dtype=x.dtype), torch.ones(3, dtype=x.dtype)
    part = grid[1:]
    x = x * int(part.sum())
    grid[1] = x[0]
    return x[: int(part.sum())] + int(before.sum())


@pytest.mark.parametrize("fn", [_from_an_input, _after_a_write_of_an_input])
def test_a_write_of_an_input_makes_a_constant_unknown(fn):
    with pytest.raises(TraceError, match=r"int\("):
        ftp.spmd(fn, MESH, P("tp"), strict=True)(X)
