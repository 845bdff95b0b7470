"""Values that a function needs as Python numbers are read before it goes on: each value has a
program of its own, equal to one device.
"""

import logging
import re
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint

import ftp
from ftp import P
from ftp.errors import InputError, ReadWarning, TraceError
from ftp.tracing import input_values

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*:ftp.errors.ReadWarning", "ignore:(.|\\n)*torch.bincount of a tensor:UserWarning"
)
W = torch.linspace(-1, 2, 24, dtype=torch.float64).sin().reshape(4, 6)
X = torch.linspace(-2, 3, 24, dtype=torch.float64).cos().reshape(6, 4)
MESH = ftp.simulated_mesh((2,), ("tp",))
MESHES = [((2,), ("tp",)), ((3,), ("tp",)), ((2, 2), ("dp", "tp"))]


def _a_size(w: Tensor, x: Tensor, k: Tensor) -> Tensor:
    """Pooling of graphs, whose number is read."""
    n = int(k.max()) + 1
    sums = x.new_zeros(n, x.shape[1]).index_add(0, k, x)
    return (sums @ w / torch.bincount(k, minlength=n).clamp(min=1)[:, None]).square().mean()


def _a_loop(w: Tensor, x: Tensor, k: Tensor) -> Tensor:
    parts = [(x[k == i] @ w).logsumexp(0) for i in range(int(k.max().item()) + 1)]
    return torch.stack(parts).square().mean()


def _a_prefix(w: Tensor, x: Tensor, k: Tensor) -> Tensor:
    scores = x @ w
    n = int((scores.detach().sum(1) > 0).long().cumprod(0).sum())
    return scores[:n].square().sum() / max(n, 1) + scores[n:].sum() + 0.1 * n


def _sorted_rows(w: Tensor, x: Tensor, k: Tensor) -> Tensor:
    rows, order = (x[k > 0] @ w).sum(1).sort(descending=True)
    weights = torch.arange(len(rows), dtype=x.dtype).cos()
    return (rows.cumsum(0) * weights).sum() + (k[k > 0][order] * rows).sum()


def _rows_one_by_one(w: Tensor, x: Tensor, k: Tensor) -> Tensor:
    total = x.new_zeros(6)
    for i in (k > 0).nonzero():
        total = torch.tanh(total + x[i[0]] @ w)
    return total.square().sum()


def _padded(w: Tensor, x: Tensor, k: Tensor) -> Tensor:
    lengths = torch.bincount(k)
    padded = pad_sequence(list((x @ w).split(lengths.tolist())), batch_first=True)
    return padded.softmax(1).square().sum() + F.one_hot(k).cumsum(0).sum()


def _after_decisions(w: Tensor, x: Tensor, k: Tensor) -> Tensor:
    y = x @ w
    if y.sum() > 0:
        y = y * 2
    return y[: int(k.sum()) // 2].square().sum()


def _in_many_ways(w: Tensor, x: Tensor, k: Tensor) -> Tensor:
    y, step = x @ w, torch.tensor(0.5, dtype=x.dtype)
    for _ in range(6):
        error = (y.detach() * step).sin().norm()
        if error < 2:
            y = y + step * y.cos()
        else:
            step = step / 2
    return y.square().mean() * step


def _views(w: Tensor, x: Tensor, k: Tensor) -> Tensor:
    y = x @ w
    y = y.clone()
    part = y[: k.max() + 1]
    turned = part.reshape(3, -1) if part.numel() % 3 == 0 else part
    y.mul_(2)
    part.add_(1)
    return (turned.sort(0).values * turned).sum() + y.sum()


def _in_blocks(w: Tensor, x: Tensor, k: Tensor) -> Tensor:
    """Blocks that run again read the same values."""

    def rows(y: Tensor, n: Tensor) -> Tensor:
        y = y[: int(n)].cumsum(0)
        return y[y[:, 0] > 0].sort(0).values.sum() + y[: n - 1].exp().sum()

    first = checkpoint(rows, x @ w, k.max() + 2, use_reentrant=False)
    return first.sin() + ftp.remat(lambda y: rows(y.tanh(), k.sum()))(x @ w)


def _repeats(w: Tensor, x: Tensor, k: Tensor) -> Tensor:
    """Rows of images packed into one sequence, as in NaViT and Qwen2-VL."""
    image = torch.repeat_interleave(k)
    rows = (x @ w).repeat_interleave(k, dim=0)
    rows = torch.cat([rows, torch.repeat_interleave(x @ w, k.max()[None], 0)])
    return (rows.cumsum(0).square().sum(1) / (1 + torch.arange(len(rows)))).sum() + image.sum()


FUNCTIONS = [
    _a_prefix, _repeats, _in_blocks, _sorted_rows, _after_decisions, _views, _a_size, _a_loop,
    _rows_one_by_one, _padded,
]  # fmt: skip
INDICES = [torch.tensor([0, 0, 1, 2, 1, 0]), torch.tensor([1, 0, 3, 2, 0, 2])]


def expected(fn: Callable[..., Tensor], *args: Tensor) -> tuple[Tensor, Tensor]:
    w = args[0].clone().requires_grad_()
    loss = fn(w, *args[1:])
    return loss.detach(), torch.autograd.grad(loss, w)[0]


@pytest.mark.parametrize(
    ("fn", "mesh"),
    [
        pytest.param(fn, mesh, marks=() if i < 6 and mesh is MESHES[0] else pytest.mark.slow)
        for i, fn in enumerate(FUNCTIONS)
        for mesh in MESHES
    ],
)
def test_equal_to_one_device_for_each_value(fn: Callable[..., Tensor], mesh: Any):
    shape, names = mesh
    batch = (P("dp"), P()) if "dp" in names else P()
    mesh = ftp.simulated_mesh(shape, names)
    step = ftp.shard(fn, mesh, P("tp"), batch_specs=batch, certify=True)
    for k in (*INDICES, INDICES[0]):
        for x in (X, -X):
            torch.testing.assert_close(step(W, x, k), expected(fn, W, x, k), rtol=1e-10, atol=1e-12)


@pytest.mark.slow
def test_conditions_are_read_where_there_are_too_many_ways():
    step = ftp.shard(_in_many_ways, ftp.simulated_mesh((2,), ("tp",)), P("tp"), certify=True)
    for x in (X, -X):
        found = step(W, x, INDICES[0])
        torch.testing.assert_close(found, expected(_in_many_ways, W, x, INDICES[0]))


def test_no_rows():
    step = ftp.shard(_sorted_rows, ftp.simulated_mesh((2,), ("tp",)), P("tp"))
    k = torch.zeros(6, dtype=torch.int64)
    torch.testing.assert_close(step(W, X, k), expected(_sorted_rows, W, X, k))


def test_a_block_of_autograd_counts_its_rows():
    def loss(w: Tensor, x: Tensor) -> Tensor:
        def counted(y: Tensor) -> Tensor:
            chosen = y[y[:, 0] > 0]
            return chosen.sum() * len(chosen)

        return ftp.remat(counted)(x @ w)

    def both(w: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return expected(loss, w, x)

    step = ftp.spmd(both, ftp.simulated_mesh((2,), ("tp",)), (P("tp"), P()), (P(), P("tp")))
    for x in (X, -X):
        torch.testing.assert_close(step(W, x), expected(loss, W, x))


def test_a_value_is_planned_once():
    traced = []

    def fn(x: Tensor, k: Tensor) -> Tensor:
        traced.append(1)
        return x[: int(k.sum())].sort(0).values

    step = ftp.spmd(fn, ftp.simulated_mesh((2,), ("tp",)), P())
    for k in (INDICES[0], INDICES[0], INDICES[0]):
        assert torch.equal(step(X, k), fn(X, k))
    once = len(traced)
    step(X, INDICES[0])
    assert len(traced) == once
    step(X, INDICES[1])
    assert len(traced) > once


def test_it_is_warned_of_and_again_at_many_values():
    step = ftp.spmd(lambda x: x.new_zeros(int(x.sum())), ftp.simulated_mesh((2,), ("tp",)), P())
    with pytest.warns(ReadWarning, match=r"test_values_read.py:(.|\n)*as a Python number"):
        step(torch.tensor([1, 2]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for n in range(8):
            assert step(torch.tensor([n + 2, 2])).shape == (n + 4,)
    with pytest.warns(ReadWarning, match="has read 10 different values here"):
        step(torch.tensor([20, 2]))


def _row_count(w: Tensor, x: Tensor, k: Tensor) -> Tensor:
    return w.new_zeros(int(k.sum())).sum() + w.sum()


@pytest.mark.parametrize("is_strict", [True, False])
def test_refused_where_nothing_can_be_read(is_strict: bool):
    meshes = ftp.simulated_mesh((2,), ("tp",)), ftp.AbstractMesh((2,), ("tp",))
    step = ftp.shard(_row_count, meshes[not is_strict], P(), strict=is_strict)
    with pytest.raises(TraceError, match="needs a tensor's value"):
        step.lower(W, X, INDICES[0])


def _catches_what_is_refused(x: Tensor) -> Tensor:
    try:
        scale = float(x.sum())
    except Exception:
        scale = 1.0
    return x * scale


def _reads_before_a_write(x: Tensor) -> Tensor:
    n = x.sum()
    y = x[: int(n)]
    n.zero_()
    return y.sum()


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: torch.vmap(lambda r: r.new_zeros(int(r.sum())))(x),
        lambda x: torch.func.grad(ftp.remat(_reads_before_a_write))(x),
        lambda x: x * float(x.sum()),
        lambda x: torch.from_numpy(x.numpy()),
        _catches_what_is_refused,
    ],
)
def test_what_is_refused(fn: Callable[[Tensor], Tensor]):
    step = ftp.spmd(fn, ftp.simulated_mesh((2,), ("tp",)), P())
    with pytest.raises(TraceError, match=r"needs a tensor's value|depends on values"):
        step(X.abs())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_integers_of_floats_are_pythons(dtype: torch.dtype):
    def fn(w: Tensor, x: Tensor) -> Tensor:
        try:
            n = int(x.max().to(dtype))
        except (OverflowError, ValueError) as error:
            n = 3 if isinstance(error, ValueError) else 5
        return w.sum() * min(n, 7) + float(n) * 1e-9

    step = ftp.shard(fn, ftp.simulated_mesh((2,), ("tp",)), P("tp"), check_inputs=True)
    for largest in (2.9, -2.9, float("nan"), 1e30, float("inf"), float("nan"), -1e-9):
        x = torch.full((6, 4), largest, dtype=torch.float64)
        torch.testing.assert_close(step(W, x), expected(fn, W, x))


@pytest.mark.parametrize("at", [bool, int, lambda x: 1 if x else 2])
def test_one_number_of_many_elements_is_torchs_error(at: Callable[[Tensor], Any]):
    step = ftp.spmd(lambda x, k: x[: int(k.sum())].sum() * at(k), MESH, P())
    with pytest.raises((RuntimeError, ValueError)) as due:
        at(INDICES[0])
    with pytest.raises(due.type, match=re.escape(str(due.value))):
        step(X, INDICES[0])


def test_reports_are_of_the_values_read_last():
    step = ftp.shard(_a_size, ftp.simulated_mesh((2,), ("tp",)), P("tp"), check_inputs=True)
    with pytest.raises(TraceError, match=r"test_values_read.py"):
        step.lower(W, X, INDICES[0])
    for k in INDICES:
        step(W, X, k)
        claims = step.lower(W, X, k).assumptions
        assert any(f"as a Python number is {int(k.max())}" in claim for claim in claims)


@pytest.mark.filterwarnings("ignore::ftp.errors.StaleCaptureWarning")  # `runs` changes
def test_a_function_that_computes_another_value_when_it_is_run_again(monkeypatch):
    runs: list[int] = []

    def fn(x: Tensor) -> Tensor:
        runs.append(1)
        return x.new_zeros(int(x.sum()) + int(x.sum() * 0 + len(runs)))

    step = ftp.spmd(fn, ftp.simulated_mesh((2,), ("tp",)), P(), check_inputs=True)
    with monkeypatch.context() as patched:
        patched.setattr(input_values, "_MOST", 0)
        with pytest.raises(InputError, match="as a Python number is"):
            step(torch.tensor([1, 2]))


def test_donated_arguments_are_kept_until_the_result():
    def fn(w: Tensor, k: Tensor) -> Tensor:
        return w * w.new_ones(int(k.sum()), 1).sum()

    step = ftp.spmd(fn, ftp.simulated_mesh((2,), ("tp",)), (P("tp"), P()), P("tp"), donate=(0,))
    w, due = W.clone(), W.clone()
    for k in (*INDICES, *INDICES):
        w, due = step(w, k), fn(due, k)
        torch.testing.assert_close(w, due)


def test_draws_are_those_of_one_program():
    def fn(x: Tensor, *, n: int | None = None) -> Tensor:
        y = x + torch.rand_like(x)
        n = int((y > 0.5).sum()) if n is None else n
        return torch.cat([y.flatten(), x.new_zeros(n)])

    step = ftp.spmd(fn, ftp.simulated_mesh((2,), ("tp",)), P("tp"), P(), rng=True)
    found = step(X, key := ftp.random.key(3))
    count = found.numel() - X.numel()
    assert count == int((found[: X.numel()] > 0.5).sum())
    plain = ftp.spmd(lambda x: fn(x, n=count), step.mesh, P("tp"), P(), rng=True)(X, key)
    assert torch.equal(plain, found)


def _caught(w: Tensor, x: Tensor, k: Tensor) -> Tensor:
    try:
        n = int(k.sum())
    except:  # noqa: E722
        n = 0
    return (w * n).square().sum() + int(k.max()) * w.sum()


def _written_at_the_end(w: Tensor, x: Tensor, k: Tensor) -> Tensor:
    count = k.sum()
    try:
        n = int(count)
    finally:
        m = int(k.max())
        count.zero_()
    return (w * n).square().sum() + m * w.sum()


def _caught_alone(w: Tensor, x: Tensor, k: Tensor) -> Tensor:
    n = 0
    with suppress(Exception):
        n = int(k.sum())
    return (w * n).square().sum()


def _caught_as_torch_raises(w: Tensor, x: Tensor, k: Tensor) -> Tensor:
    try:
        rows = x[k > 0].sort(0).values.cumsum(0)
    except RuntimeError:
        rows = x[:1]
    return (rows @ w).square().sum()


def _a_list_before_a_block(w: Tensor, x: Tensor, k: Tensor) -> Tensor:
    """torch.func refuses the block, whose number depends on another argument."""
    n = int(k.sum())
    if k[0] > 0:
        n += 1
    most = max(k[:3].tolist())
    block = lambda x: torch.tanh(x @ w) * int((x @ w).detach().sum() * 3)  # noqa: E731
    y: Any = checkpoint(block, x, use_reentrant=False)
    return y.square().sum() * (n + most)


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * 3


def _caught_where_torch_func_raises(w: Tensor, x: Tensor, k: Tensor) -> Tensor:
    y: Any = x @ w
    with suppress(Exception):
        y = _Doubled.apply(y)
    with suppress(Exception):
        y = checkpoint(lambda y: torch.tanh(y) * 2, y, use_reentrant=False)
    return y.square().sum()


def _raised_as_another(w: Tensor, x: Tensor, k: Tensor) -> Tensor:
    try:
        n = [1, 2, 4, 8][k.max()]
    except Exception as error:
        raise ValueError("no number") from error
    return (w * n).square().sum()


@pytest.mark.parametrize(
    "fn",
    [
        _caught,
        _written_at_the_end,
        _caught_alone,
        _caught_as_torch_raises,
        _a_list_before_a_block,
        _caught_where_torch_func_raises,
        _raised_as_another,
    ],
)
def test_blocks_around_a_read(fn: Callable[..., Tensor]):
    step = ftp.shard(fn, ftp.simulated_mesh((2,), ("tp",)), P("tp"))
    torch.testing.assert_close(step(W, X, INDICES[1]), expected(fn, W, X, INDICES[1]))


def test_shapes_that_read_other_values():
    def fn(w: Tensor, x: Tensor, k: Tensor) -> Tensor:
        count, y = k.sum().item(), x @ w
        if len(x) > 3 and y.sum() > 0:  # so that the count is read too
            y = y * 2
        return y[: int(k.max())].square().sum() + count * w.sum()

    step = ftp.shard(fn, ftp.simulated_mesh((2,), ("tp",)), P("tp"))
    for k in (torch.tensor([3, 0, 0, 0, 0, 0]), torch.tensor([1, 3, 1, 0, 0, 0])):
        for n in (6, 3):
            args = W, X[:n], k[:n]
            torch.testing.assert_close(step(*args), expected(fn, *args), rtol=1e-10, atol=1e-12)


def test_counts_of_small_integers():
    step = ftp.spmd(torch.bincount, ftp.simulated_mesh((2,), ("tp",)), P())
    k = torch.tensor([255, 3], dtype=torch.uint8)
    assert torch.equal(step(k), torch.bincount(k))


def test_a_program_of_its_own_is_for_values_that_it_checks(tmp_path: Path):
    mesh = ftp.simulated_mesh((2,), ("tp",))
    step = ftp.shard(_row_count, mesh, P("tp"))
    step(W, X, INDICES[0])
    lowered = step.lower(W, X, INDICES[0])
    with pytest.raises(InputError, match=r"values that the function reads(.|\n)*number is 4"):
        lowered.compile()
    with pytest.raises(InputError, match="values that the function reads"):
        lowered.save(tmp_path / "step.ftp")
    step = ftp.shard(_row_count, mesh, P("tp"), check_inputs=True)
    step(W, X, INDICES[0])
    lowered = step.lower(W, X, INDICES[0])
    lowered.save(tmp_path / "step.ftp")
    for made in (lowered.compile(), ftp.load_program(tmp_path / "step.ftp", mesh)):
        found = made(W, X, INDICES[0])
        torch.testing.assert_close(found, expected(_row_count, W, X, INDICES[0]))
        with pytest.raises(InputError, match="as a Python number is 4"):
            made(W, X, INDICES[1])


def test_arrays_of_numpy_are_read():
    def fn(w: Tensor, x: Tensor, k: Tensor) -> Tensor:
        kept = (k > 0).numpy()
        return x[: (kept * 1).sum()].sum() * w.sum()

    step = ftp.shard(fn, ftp.simulated_mesh((2,), ("tp",)), P("tp"))
    for k in INDICES:
        torch.testing.assert_close(step(W, X, k), expected(fn, W, X, k))


@pytest.mark.parametrize(
    "counted",
    [
        lambda k: (k.to(torch.uint8).numpy() + 250).sum(),  # of 8 bits
        lambda k: (~k.int().numpy()).sum() * (2 if k.int().numpy().dtype == np.int32 else 3),
        lambda k: np.bincount(k.numpy()).max(),  # which takes no Python objects
        lambda k: torch.from_numpy(k.numpy() * 2).max().item(),
        lambda k: np.sort(k.numpy().copy())[::-1].cumsum()[2],
    ],
)
def test_arrays_compute_as_numpys(counted: Callable[[Tensor], Any]):
    def fn(w: Tensor, x: Tensor, k: Tensor) -> Tensor:
        return (x @ w).sum() * float(counted(k))

    step = ftp.shard(fn, ftp.simulated_mesh((2,), ("tp",)), P("tp"))
    for k in (*INDICES, INDICES[0]):
        torch.testing.assert_close(step(W, X, k), expected(fn, W, X, k))


def _written_array(k: Tensor) -> Tensor:
    array = k.numpy()
    array[0] = 3
    return k.sum()


def _written_beside_an_array(k: Tensor) -> Tensor:
    y = k + 0
    part = y.numpy()[1:]
    y[2] = 3
    return y.new_tensor(part[1])


def _written_constant(k: Tensor) -> Tensor:
    places = torch.arange(3)
    array = places.numpy()
    places += 1
    return k.sum() + int(array[0])


@pytest.mark.parametrize("fn", [_written_array, _written_beside_an_array, _written_constant])
def test_an_array_shares_memory_with_its_tensor(fn: Callable[[Tensor], Tensor]):
    with pytest.raises(TraceError, match=r"test_values_read.py(.|\n)*x.numpy\(\)"):
        ftp.spmd(fn, ftp.simulated_mesh((2,), ("tp",)), P())(INDICES[0])


def test_an_array_that_is_no_more_forbids_no_write():
    def fn(k: Tensor) -> Tensor:
        y = k + 0
        first = y.numpy()[0]
        y.zero_()
        return y + first

    step = ftp.spmd(fn, ftp.simulated_mesh((2,), ("tp",)), P())
    assert torch.equal(step(INDICES[1]), fn(INDICES[1]))


def test_a_number_that_torch_asserts_to_be_a_list():
    def fn(w: Tensor, x: Tensor, k: Tensor) -> Tensor:
        y = x @ w
        y = y.roll(k.sum().tolist() % 3, 0)
        return (y * X[:, :1]).sum()

    step = ftp.shard(fn, MESH, P("tp"))
    for k in (*INDICES, INDICES[0]):
        torch.testing.assert_close(step(W, X, k), expected(fn, W, X, k))


def test_a_list_is_one_value():
    def fn(w: Tensor, k: Tensor) -> Tensor:
        first, second, *_ = k.tolist()
        return w.new_ones(first, 4) @ w + w.new_ones(second, 1).cumsum(0)[-1]

    step = ftp.spmd(fn, MESH, (P("tp"), P()), P())
    k = torch.arange(70) % 4 + 1
    torch.testing.assert_close(step(W, k), fn(W, k))
    assert len([c for c in step.lower(W, k).assumptions if "a Python number" in c]) == 1


def test_an_array_of_values_is_an_index():
    def fn(w: Tensor, x: Tensor, k: Tensor) -> Tensor:  # TimesNet: periods of frequencies
        y = x @ w
        top = y.square().mean(0).topk(2)[1].detach().cpu().numpy()
        periods, weights = 7 // (top + 2), y[:, top]
        parts = [y.reshape(-1, period, 6).amax(1).sum() for period in periods]
        return (torch.stack(parts) * weights.mean(0)).sum()

    step = ftp.shard(fn, ftp.simulated_mesh((2,), ("tp",)), P(None, "tp"))
    torch.testing.assert_close(step(W, X, INDICES[0]), expected(fn, W, X, INDICES[0]))


SIZED = [
    lambda y, n: y.new_zeros(n + 1, 6).index_add(0, torch.arange(6) // 3, y),
    lambda y, n: torch.zeros(size=(n, 6)) + y[:1],
    lambda y, n: torch.arange(1, n)[:, None] * y[0],
    lambda y, n: y.view(n, -1).logsumexp(1),
    lambda y, n: y[None].expand(n, -1, -1).cumsum(0),
    lambda y, n: y.repeat_interleave(n, 0).cumsum(0),
    lambda y, n: y.split([n, 6 - n])[1].cumsum(0),
    lambda y, n: F.pad(y, (0, n)).cumsum(1),
    lambda y, n: y.narrow(0, n - 1, n).T @ y[:1].expand(n, -1).clone(),
    lambda y, n: torch.linspace(0, 1, n)[:, None] * y.topk(n, 0).values,
    lambda y, n: F.pad(n[None], (0, n)).sum() * y,
    lambda y, n: F.pad(input=n[None], pad=(0, n)).sum() * y,
    lambda y, n: y[: F.pad(input=n[None], pad=(1, 0)).sum()].cumsum(0),
    lambda y, n: torch.reshape(input=y[:n], shape=(n * 6,)).cumsum(0),
    lambda y, n: y[:n].reshape(shape=(6 * n,)).cumsum(0),
    lambda y, n: y * F.one_hot(input=n[None], num_classes=6).cumsum(1),
    lambda y, n: y[: torch.nonzero(input=n[None]).shape[0]].cumsum(0),
    lambda y, n: y.cumsum(0 if torch.is_nonzero(input=n - 3) else 1),
    lambda y, n: y.cumsum(0 if torch.equal(input=n, other=n.clone().fill_(3)) else 1),
    lambda y, n: y.cumsum(0 if torch.allclose(input=n, other=n + 1) else 1),
    lambda y, n: torch.broadcast_to(n[None], (n,))[:, None] * y[0],
    lambda y, n: torch.repeat_interleave(n[None], n).sum() * y,
]


@pytest.mark.parametrize("sized", SIZED)
def test_a_tensor_of_one_integer_is_a_size(sized: Callable[[Tensor, Tensor], Tensor]):
    def fn(w: Tensor, x: Tensor, k: Tensor) -> Tensor:
        return sized(x @ w, k.max()).square().sum()

    step = ftp.shard(fn, ftp.simulated_mesh((2,), ("tp",)), P("tp"))
    for k in INDICES:
        torch.testing.assert_close(step(W, X, k), expected(fn, W, X, k), rtol=1e-10, atol=1e-12)


def test_a_value_is_read_once_until_it_is_written_to():
    def fn(w: Tensor, x: Tensor, k: Tensor, is_written: bool) -> Tensor:
        n = k.max().clone()
        sums = x.new_zeros(n, 4) + x.new_zeros(int(n), 4) + x.new_zeros(k.max(), 4)
        if is_written:
            n.add_(1)
        return (torch.cat([sums, x.new_zeros(n, 4), x]) @ w).square().mean()

    for is_written in (False, True):
        step = ftp.spmd(fn, ftp.simulated_mesh((2,), ("tp",)), (P("tp"), P(), P(), P()))
        arguments = W, X, INDICES[0], is_written
        torch.testing.assert_close(step(*arguments), fn(*arguments))
        claims = step.lower(*arguments).assumptions
        assert len([claim for claim in claims if "a Python number" in claim]) == 1 + is_written


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.bool])
def test_numbers_of_a_tensor_are_those_before_a_write(dtype: torch.dtype):
    def fn(w: Tensor, x: Tensor, k: Tensor) -> Tensor:
        n = k.to(dtype).clone()
        first, (_, second, _), third = n[0].item(), n[:3].tolist(), n[:1].item()
        n[0] = n[2]
        n[1:].zero_()
        return (x @ w).sum() * (first + 10 * second + 100 * third + 1000 * n[0].item())

    step = ftp.spmd(fn, ftp.simulated_mesh((2,), ("tp",)), (P("tp"), P(), P()))
    k = torch.tensor([0, 5, 3])
    torch.testing.assert_close(step(W, X, k), fn(W, X, k))


def test_a_size_of_numbers_alone_beside_writes():
    def fn(w: Tensor, x: Tensor) -> Tensor:
        y = (x @ w).clone()
        y.add_(1)
        return y.view(torch.div(6, 3, rounding_mode="trunc"), -1).logsumexp(1)

    step = ftp.spmd(fn, ftp.simulated_mesh((2,), ("tp",)), (P("tp"), P()), strict=True)
    torch.testing.assert_close(step(W, X), fn(W, X))


def test_a_line_of_a_log_may_need_values(capsys: pytest.CaptureFixture[str]):
    def fn(w: Tensor, x: Tensor) -> Tensor:
        log = logging.getLogger("ftp_test_values_read")
        log.propagate = False
        handler = logging.StreamHandler()
        log.addHandler(handler)
        log.warning("loss %.3f", x.sum().item())
        log.removeHandler(handler)
        return (x @ w).sum()

    step = ftp.spmd(fn, ftp.simulated_mesh((2,), ("tp",)), (P("tp"), P()))
    torch.testing.assert_close(step(W, X), (X @ W).sum())
    assert "Logging error" in capsys.readouterr().err
