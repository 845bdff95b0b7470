"""``x.data_ptr()`` of a traced tensor: equal where memory is shared, and no number."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import ftp
from ftp import P
from ftp.errors import TraceError

MESH = ftp.simulated_mesh((2,), ("tp",))
X = torch.linspace(-1, 2, 16, dtype=torch.float64).reshape(4, 4)


def facts(q: Tensor, k: Tensor, v: Tensor) -> tuple[Any, ...]:
    """What attention of old, caches and kernels ask for."""
    known = {q.data_ptr(): "q", k.data_ptr(): "k"}
    return (
        q.data_ptr() == k.data_ptr() == v.data_ptr(),
        k.data_ptr() != v.data_ptr(),
        known.get(q.view(2, 8).data_ptr()),
        q[1:].data_ptr() == q.data_ptr(),
        q[1:, 2:].data_ptr() == q[1:, 2:].t().data_ptr(),
        q.data_ptr() % 16,
        q[0, 1:].data_ptr() % 16,
        q.detach().data_ptr() == q.data_ptr(),
        q.clone().data_ptr() == q.data_ptr(),
        bool(v.data_ptr()),
    )


@pytest.mark.parametrize("transform", [lambda f: f, torch.func.grad], ids=["plain", "grad"])
def test_decisions_are_those_of_real_memory(transform: Callable[..., Any]):
    seen: list[Any] = []

    def fn(x: Tensor, w: Tensor) -> Tensor:
        doubled = x * 2
        for given in ((x, x, x), (doubled, x, x), (doubled, x, w), (w, doubled, x)):
            seen.append(facts(*given))
        written = x.clone()
        before = written.data_ptr()
        written[0] = 1.0
        seen.append(written.data_ptr() == before)
        return (written @ w * doubled).sum()

    fn(X, X + 1)
    expected = list(seen)
    seen.clear()
    ftp.spmd(transform(fn), MESH, (P("tp"), P(None, "tp")))(X, X + 1)
    assert seen[: len(expected)] == expected


def test_addresses_of_values_that_are_gone_are_not_given_again():
    given: list[Any] = []

    def fn(x: Tensor) -> Tensor:
        for i in range(50):
            given.append((x + i).data_ptr())
        return x

    ftp.spmd(fn, MESH, P("tp"))(X)
    assert len(set(given)) == len(given) == 50


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x * int(x.data_ptr()),
        lambda x: x * (x.data_ptr() > 3),
        lambda x: x * (x.data_ptr() & 1),
        lambda x: x * (x.data_ptr() % 7),
        lambda x: x * float(f"{x.data_ptr()}"),
        lambda x: x * (x.data_ptr() + 4),
    ],
    ids=["int", "order", "bits", "remainder", "text", "sum"],
)
def test_an_address_as_a_number_is_refused(fn: Callable[[Tensor], Tensor]):
    with pytest.raises(
        TraceError, match=r"(?s)test_addresses.*needs a tensor's address as a number"
    ):
        ftp.spmd(fn, MESH, P("tp"))(X)


def test_a_captured_tensor_has_the_address_that_it_has():
    seen: list[Any] = []
    ftp.spmd(lambda x: (seen.append(X.data_ptr()), x)[1], MESH, P("tp"))(X + 1)
    assert seen and set(seen) == {X.data_ptr()}
