"""Scans along a cut dim: each rank scans its chunk, and the chunks' totals are gathered. Their
numbers, and those of gradients, are of one device.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

import ftp
from ftp import P
from ftp.planning import algebra
from ftp.rules.windows import SCANS, FarApart, by_windows

aten = torch.ops.aten
DTYPES = (
    torch.float64, torch.float32, torch.bfloat16, torch.complex128, torch.int64, torch.int32,
    torch.uint8, torch.bool,
)  # fmt: skip


def _drawn(shape: list[int], dtype: torch.dtype, seed: int) -> Tensor:
    """Small numbers, of which some are equal, NaN or infinite."""
    torch.manual_seed(seed)
    x = torch.randint(-4, 5, shape).double()
    if dtype.is_floating_point and seed % 3 == 0:
        x = x / 3
        x[torch.rand(shape) < 0.1] = [torch.inf, -torch.inf, torch.nan][seed % 9 // 3]
    return x.to(dtype)


@pytest.mark.parametrize("op", sorted(SCANS, key=str), ids=str)
@settings(max_examples=40)
@given(
    size=st.integers(1, 17),
    n=st.integers(1, 6),
    dim=st.integers(0, 2),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 99),
)
def test_scans_on_windows(op: Any, size: int, n: int, dim: int, dtype: torch.dtype, seed: int):
    shape = [2, 3, 1]
    shape[dim] = size
    x = _drawn(shape, dtype, seed)
    try:
        expected = op(x, dim)
    except (RuntimeError, NotImplementedError):  # torch has no such scan
        return
    torch.testing.assert_close(by_windows(op, n, dim)(x, dim), expected, equal_nan=True)
    torch.testing.assert_close(by_windows(op, n, dim)(x, dim - 3), expected, equal_nan=True)
    with pytest.raises(FarApart):
        by_windows(op, n, (dim + 1) % 3)(x, dim)


def test_sums_in_another_dtype():
    x = torch.full((9,), 200, dtype=torch.uint8)
    by = by_windows(aten.cumsum.default, 2, 0)
    for dtype in (torch.uint8, torch.int32, torch.float64, torch.bfloat16):
        expected = x.cumsum(0, dtype=dtype)
        torch.testing.assert_close(by(x, 0, dtype=dtype), expected, rtol=0, atol=0)


def test_half_precision_is_rounded_once():
    torch.manual_seed(0)
    x = torch.rand(4096).bfloat16()
    found, exact = by_windows(aten.cumsum.default, 8, 0)(x, 0), x.double().cumsum(0)
    assert torch.equal(found, exact.bfloat16())


# Whole programs.


def check(
    fn: Callable[..., Any], x: Tensor, spec: P, axes: dict[str, int], **options: Any
) -> ftp.Lowered:
    """A function of one tensor to one of its shape, cut alike, against one device; returns the
    certified program.
    """
    mesh = ftp.simulated_mesh(tuple(axes.values()), tuple(axes))
    step = ftp.spmd(fn, mesh, spec, spec, certify=True, **options)
    placed = ftp.device_put(x, mesh, spec)
    torch.testing.assert_close(ftp.device_get(step(placed), mesh, spec), fn(x), equal_nan=True)
    return step.lower(placed)


def gathered(lowered: ftp.Lowered) -> int:
    """Bytes that a rank sends, in gathers alone."""
    assert {c.op for c in lowered.collectives} <= {"all_gather"}
    return sum(c.wire_nbytes for c in lowered.collectives)


def grad_of(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return torch.func.grad(lambda x: fn(x).square().sum())


def returns(x: Tensor) -> Tensor:
    """The sum of each element and of those after it, as of rewards."""
    return x.flip(1).cumsum(-1).flip(-1)


def positions(x: Tensor) -> Tensor:
    """The place of each token in its document; documents begin at positive numbers."""
    place = torch.arange(x.shape[1], device=x.device).expand(x.shape)
    return x + place - torch.where(x > 0, place, 0).cummax(1).values


# By a function, how often totals are gathered forward, and for gradients.
FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], int, int]] = {
    "cumsum": (lambda x: x.cumsum(1), 1, 2),
    "logcumsumexp": (lambda x: x.logcumsumexp(1), 1, 3),
    "exclusive": (lambda x: x.cumsum(1) - x, 1, 2),
    "returns": (returns, 1, 2),
    "twice": (lambda x: x.cumsum(1).cumsum(1), 2, 4),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize(("size", "n"), [(24, 2), (23, 4), (9, 4)])
def test_only_totals_are_gathered(name: str, size: int, n: int):
    torch.manual_seed(size)
    fn, forward, both = FUNCTIONS[name]
    x, spec = torch.randn(2, size).double(), P(None, "s")
    total = 2 * 8 * (n - 1)  # the other ranks' totals of two rows
    assert gathered(check(fn, x, spec, {"s": n})) == forward * total
    assert gathered(check(grad_of(fn), x, spec, {"s": n})) == both * total


OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    **{name: fn for name, (fn, _, _) in FUNCTIONS.items()},
    "reverse logcumsumexp": lambda x: x.flip(1).logcumsumexp(1).flip(1),
    "cummin": lambda x: x.cummin(1).values * x,
    "flips": lambda x: x.flip(1, 0) * x,
}


@pytest.mark.slow
@settings(max_examples=60)
@given(
    st.sampled_from(sorted(OTHERS)),
    st.integers(1, 33),
    st.sampled_from([{"s": 2}, {"s": 5}, {"b": 2, "s": 3}]),
    st.integers(0, 9),
)
def test_many_scans(name: str, size: int, axes: dict[str, int], seed: int):
    torch.manual_seed(seed)
    fn, spec = OTHERS[name], P("b" if "b" in axes else None, "s")
    for of in (fn, grad_of(fn)):
        check(of, torch.randn(3, size).double(), spec, axes)


@pytest.mark.parametrize("axes", [{"s": 3}, {"b": 2, "s": 2}], ids=str)
def test_positions_in_packed_documents(axes: dict[str, int]):
    torch.manual_seed(0)
    x = torch.randint(-3, 2, (4, 65))
    lowered = check(positions, x, P("b" if "b" in axes else None, "s"), axes)
    assert gathered(lowered) == 4 // axes.get("b", 1) * 8 * (axes["s"] - 1)


@pytest.mark.parametrize("index", [0, 1])
def test_one_result_of_a_running_maximum(index: int):
    torch.manual_seed(0)
    x = torch.randint(-5, 6, (2, 31)).double()
    check(lambda x: x.cummax(1)[index], x, P(None, "s"), {"s": 3})
    check(lambda x: sum(x.cummin(1)), x, P(None, "s"), {"s": 3})


def test_gradients_of_a_running_maximum():
    torch.manual_seed(0)
    check(
        grad_of(lambda x: x.cummax(1).values), torch.randn(2, 31).double(), P(None, "s"), {"s": 3}
    )


def test_scans_and_flips_of_single_numbers():
    fn = lambda x: x.sum().flip(0).cumsum(0).flip(0) + x.flip(0)  # noqa: E731
    check(fn, torch.randn(16, dtype=torch.float64), P("a"), {"a": 4})


def test_scans_beside_windows_of_a_dim_that_they_lack():
    torch.manual_seed(0)
    x, y = torch.randn(2, 2, dtype=torch.float64)

    def fn(x, y):
        kernel = x.reshape(1, 2, 1, 1)
        scanned = ftp.constrain(x.cumsum(0), P("a"))
        return F.conv2d(kernel + y, kernel, padding=1).sum() + scanned.square().sum()

    step = ftp.shard(fn, ftp.simulated_mesh((2,), ("a",)), P(), batch_specs=P("a"), certify=True)
    torch.testing.assert_close(step(x, y)[1], torch.func.grad(fn)(x, y))


def test_a_dim_that_two_axes_cut():
    torch.manual_seed(0)
    x = torch.randn(2, 37).double()
    for fn in (FUNCTIONS["cumsum"][0], grad_of(FUNCTIONS["cumsum"][0])):
        check(fn, x, P(None, ("a", "b")), {"a": 2, "b": 2})


@pytest.mark.parametrize("n", [2, 3, 4])
def test_a_flip_sends_each_chunk_once(n: int):
    x = torch.randn(2, 24, 3).double()
    lowered = check(lambda x: x.flip(2, 1) * 2, x, P(None, "s"), {"s": n})
    assert {c.op for c in lowered.collectives} == {"halo_exchange"}
    assert sum(c.wire_nbytes for c in lowered.collectives) == 2 * 24 // n * 3 * 8
    check(lambda x: x.flip(1) * 2, torch.randn(2, 23).double(), P(None, "s"), {"s": n})


def test_a_router_with_capacity_gathers_counts_alone():
    """Positions of tokens within their experts, over tokens that a data axis cuts."""
    tokens, width, experts, n = 48, 4, 3, 4

    def loss(gate: Tensor, x: Tensor) -> Tensor:
        weight, expert = (x @ gate).softmax(-1).max(-1)
        chosen = F.one_hot(expert, experts)
        place = ((chosen.cumsum(0) - 1) * chosen).sum(-1)
        return (x * (weight * (place < 12))[:, None]).square().mean()

    torch.manual_seed(0)
    gate, x = torch.randn(width, experts).double(), torch.randn(tokens, width).double()
    mesh = ftp.simulated_mesh((n,), ("dp",))
    step = ftp.shard(loss, mesh, P(), batch_specs=P("dp"), certify=True)
    found, grad = step(gate, ftp.device_put(x, mesh, P("dp")))
    expected, of_one = torch.func.grad_and_value(loss)(gate, x)[::-1]
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(grad, of_one)
    lowered = step.lower(gate, ftp.device_put(x, mesh, P("dp")))
    moved = {c.op: 0 for c in lowered.collectives}
    for c in lowered.collectives:
        moved[c.op] += c.wire_nbytes
    assert moved["all_gather"] == (n - 1) * experts * 8
    assert moved.keys() == {"all_gather", "all_reduce"}


def test_gathering_totals_breaks_no_constraint():
    spec, mesh = P("dp"), ftp.AbstractMesh((4,), ("dp",))
    fn = lambda w, x: (x @ w).cumsum(0).square().sum()  # noqa: E731
    lowered = ftp.shard(fn, mesh, P(), batch_specs=spec).lower(torch.ones(8, 8), torch.ones(64, 8))
    assert "keeps all placement constraints" not in str(lowered)


# Certificates.


def _scanned(fn: Callable[[Tensor], Tensor]) -> ftp.Lowered:
    mesh = ftp.AbstractMesh((4,), ("s",))
    return ftp.spmd(fn, mesh, P(None, "s"), P(None, "s")).lower(torch.ones(2, 64))


@pytest.mark.parametrize(
    ("op", "at", "value"),
    [
        (aten.cumsum.default, 1, 0),  # over the windows, within a window
        (aten.select.int, 2, 0),  # the first element for the last
        (aten.constant_pad_nd.default, 1, [0, 0, 0, 0]),  # a window's own total too
    ],
    ids=str,
)
def test_wrong_totals_are_refused(op: Any, at: int, value: Any):
    lowered = _scanned(lambda x: x.cumsum(1))
    nodes = [n for n in lowered.graph.graph.nodes if n.target is op]
    nodes[0].args = (*nodes[0].args[:at], value, *nodes[0].args[at + 1 :])
    with pytest.raises(ftp.errors.CertificateError):
        ftp.certify(lowered)


def test_a_wrong_law_is_refused(monkeypatch: pytest.MonkeyPatch):
    right = algebra.scan_between_flips

    def wrong(call: Any, *args: Any) -> Any:
        found = right(call, *args)
        return found and (aten.cumsum.default, *found[1:])

    monkeypatch.setattr(algebra, "scan_between_flips", wrong)
    lowered = _scanned(returns)
    with pytest.raises(ftp.errors.CertificateError):
        ftp.certify(lowered)


LIKE_RETURNS: dict[str, Callable[[Tensor], Tensor]] = {
    "another dim": lambda x: x.flip(1).cumsum(0).flip(1),
    "flipped once": lambda x: x.flip(1).cumsum(1),
    "flipped along two dims": lambda x: x.flip(0, 1).cumsum(1).flip(0, 1),
    "flipped differently": lambda x: x.flip(1).cumsum(1).flip(0),
    "in another dtype": lambda x: x.flip(1).cumsum(1, dtype=torch.float32).flip(1).double(),
    "flipped twice": lambda x: x.flip(1).flip(1).cumsum(1).flip(1).flip(1),
    "parts used again": lambda x: x.flip(1).cumsum(1).flip(1) + x.flip(1) * x.flip(1).cumsum(1),
}


@pytest.mark.parametrize("name", LIKE_RETURNS)
def test_programs_like_scans_from_the_end(name: str):
    torch.manual_seed(0)
    x = torch.randint(-9, 9, (4, 23)).double()
    fn = LIKE_RETURNS[name]
    check(lambda x: fn(x) + grad_of(fn)(x), x, P(None, "s"), {"s": 2})
