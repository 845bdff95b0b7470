"""Functions of given sizes: what torch's own give, padded; the same in a sharded program."""

import re
import runpy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ftp
from ftp import P
from ftp.errors import InputError, TraceError

integers = st.lists(st.integers(-3, 6), max_size=9).map(
    lambda v: torch.tensor(v, dtype=torch.int64)
)


def padded(values: torch.Tensor, size: int, fill: float) -> torch.Tensor:
    rest = values.new_full((max(size - len(values), 0), *values.shape[1:]), fill)
    return torch.cat([values[:size], rest])


@given(integers, st.integers(0, 12))
def test_eager_results_are_torchs_padded_or_cut(x: torch.Tensor, size: int):
    assert torch.equal(ftp.static.nonzero(x, size=size), padded(x.nonzero(), size, -1))
    chosen = ftp.static.masked_select(x, x > 0, size=size, fill_value=-7)
    assert torch.equal(chosen, padded(x[x > 0], size, -7))
    expected = torch.unique(x, return_inverse=True, return_counts=True)
    found = ftp.static.unique(x, size=size, return_inverse=True, return_counts=True)
    assert torch.equal(found[0], padded(expected[0], size, -1))
    assert torch.equal(found[1], expected[1])
    assert torch.equal(found[2], padded(expected[2], size, 0))
    natural = x[x >= 0]
    if size:
        counts = torch.bincount(natural)
        assert torch.equal(ftp.static.bincount(x, minlength=size), padded(counts, size, 0))
        weights = torch.rand(len(natural), dtype=torch.float64)
        assert torch.equal(
            ftp.static.bincount(natural, weights, size=size),
            padded(torch.bincount(natural, weights), size, 0),
        )


@settings(max_examples=6, deadline=None)
@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=7),
    st.sampled_from([((2,), ("dp",)), ((3,), ("dp",)), ((2, 2), ("dp", "tp"))]),
)
def test_sharded_results_and_gradients(values: list[int], mesh: tuple[tuple, tuple]):
    ids = torch.tensor(values)
    table = torch.randn(6, 3, dtype=torch.float64)

    def loss(table, ids):
        rows = table[ids]
        chosen = ftp.static.masked_select(rows, rows > 0, size=24)
        names = ftp.static.unique(ids, size=6, fill_value=0)
        counts = ftp.static.bincount(ids, rows.sum(1), size=6)
        near = rows.detach().argmin(1)
        counts = counts + torch.bincount(near, minlength=6) * near.bincount(rows[:, 0].detach(), 6)
        at = ftp.static.nonzero(ids, size=4, fill_value=0)[:, 0]
        return (chosen**3).sum() + (table[names] ** 2).sum() + (counts**2).sum() + rows[at].sum()

    wanted, gradient = torch.func.grad_and_value(loss)(table, ids)[::-1]
    batch = P("dp")
    step = ftp.shard(loss, ftp.simulated_mesh(*mesh), P(None, mesh[1][-1]), batch_specs=batch)
    value, grads = step(table, ids)
    torch.testing.assert_close(value, wanted, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grads, gradient, rtol=1e-12, atol=1e-12)


def test_what_does_not_fit_is_listed_and_checked():
    def loss(w, x):
        return (w * ftp.static.masked_select(x, x > 0, size=2)).sum()

    mesh, w, x = ftp.simulated_mesh((2,), ("dp",)), torch.ones(2), torch.tensor([1.0, 2.0, 3.0, -1])
    plain = ftp.shard(loss, mesh, P(), batch_specs=P("dp"))
    assert float(plain(w, x)[0]) == 3.0 == float(loss(w, x))
    (claim,) = plain.lower(w, x).assumptions
    assert "at most 2 elements are selected, the size of ftp.static.masked_select" in claim
    assert "test_static.py" in claim
    checked = ftp.shard(loss, mesh, P(), batch_specs=P("dp"), check_inputs=True, certify=True)
    assert float(checked(w, -x)[0]) == 1.0
    with pytest.raises(InputError, match=r"at most 2 elements are selected.*does not hold at call"):
        checked(w, x)


RANGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "argmax": lambda x: x.argmax(1),
    "argmin over all": lambda x: (x[:2, :2] + x[:2, 2:]).argmin().reshape(1),
    "topk": lambda x: x.topk(2, -1).indices.flatten(),
    "sort": lambda x: x.sort(dim=1, descending=True)[1].T.reshape(-1)[2:],
    "argsort": lambda x: x.argsort(1).to(torch.int32)[:, 1],
    "max": lambda x: x.max(1, keepdim=True).indices.squeeze(1),
    "sorted": lambda x: x.topk(2, -1).indices.flatten().sort().values.flip(0),
    "gathered": lambda x: x.argmax(1)[x.argsort(0)[:, 0]].gather(0, torch.arange(3)),
    "remainder": lambda x: (x * 9).long().flatten() % 4,
    "clamp": lambda x: (x * 9).long()[0].clamp(0, 3),
}


@pytest.mark.cases_by_default(3)
@pytest.mark.parametrize("name", RANGES)
def test_torchs_bincount_of_a_range_that_ops_show(name: str):
    mesh, w = ftp.simulated_mesh((2,), ("dp",)), torch.linspace(1, 2, 5)
    x = torch.linspace(-4, 7, 24).cos().reshape(6, 4)

    def loss(w, x):
        return (w * torch.bincount(RANGES[name](x), minlength=5)).square().sum()

    step = ftp.shard(loss, mesh, P(), batch_specs=P("dp"), certify=True)
    expected = torch.func.grad_and_value(loss)(w, x)[::-1]
    torch.testing.assert_close(step(w, x), expected)
    assert not step.lower(w, x).assumptions


UNKNOWN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "of the batch": lambda x: x.long().flatten(),
    "gathered by a range": lambda x: x.long().flatten()[x.argmax(1)],
    "a largest value": lambda x: x.long().max(1).values,
    "a sum": lambda x: x.argmax(1) + 1,
    "negative": lambda x: (x * 9).long()[0].clamp(-1, 3),
    "written": lambda x: x.argmax(1).index_fill_(0, torch.tensor([0]), 7),
    "unbounded": lambda x: (x * 9).long()[0].clamp(min=0),
}


def test_torchs_bincount_of_a_wider_range_is_refused():
    step = ftp.shard(
        lambda w, x: (w * torch.bincount(x.argmax(0), minlength=5)).sum(),
        ftp.simulated_mesh((2,), ("dp",)), P(), batch_specs=P("dp"),
    )  # fmt: skip
    with pytest.raises(TraceError, match="bincount"):
        step(torch.ones(5), torch.linspace(-4, 7, 24).cos().reshape(6, 4))


@pytest.mark.parametrize("name", UNKNOWN)
def test_torchs_bincount_of_other_values_assumes_their_range(name: str):
    def loss(w, x):
        return (w * torch.bincount(UNKNOWN[name](x), minlength=5)).sum()

    step = ftp.shard(loss, ftp.simulated_mesh((2,), ("dp",)), P(), batch_specs=P("dp"))
    with pytest.warns(UserWarning, match="bincount of a tensor whose values are not known"):
        lowered = step.lower(torch.ones(5), torch.linspace(-4, 7, 24).cos().reshape(6, 4))
    assert any("bincount" in str(assumption) for assumption in lowered.assumptions)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64, torch.int32])
def test_counts_have_torchs_dtype(dtype: torch.dtype):
    ids, weights = torch.tensor([0, 2, 2]), torch.ones(3, dtype=dtype)
    expected = torch.bincount(ids, weights, minlength=4)
    assert torch.equal(ftp.static.bincount(ids, weights, minlength=4), expected)
    assert ftp.static.bincount(ids, weights, minlength=4).dtype is expected.dtype


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8])
def test_small_integers_are_counted_in_sizes_beyond_their_range(dtype: torch.dtype):
    ids = torch.tensor([0, 3, 127, 127, 7]).to(dtype)
    expected = torch.bincount(ids, minlength=300)
    assert torch.equal(ftp.static.bincount(ids, size=300), expected)
    assert torch.equal(ftp.static.bincount(ids, size=256), expected[:256])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: ftp.static.nonzero(x, size=-1), "nonzero(size=-1): it must be a number of"),
        (lambda x: ftp.static.unique(x, size=True), "unique(size=True)"),
        (lambda x: ftp.static.masked_select(x, x, size=1), "takes a mask of torch.bool"),
        (lambda x: ftp.static.bincount(x), "bincount needs size="),
        (lambda x: ftp.static.bincount(x.float(), size=1), "integers of one dim, not torch.float"),
    ],
)
def test_errors(call, message: str):
    with pytest.raises(InputError) as error:
        call(torch.tensor([1, 2]))
    assert message in str(error.value)


@pytest.mark.filterwarnings("ignore:(.|\\n)*as a Python number:ftp.errors.ReadWarning")
def test_the_page_runs(tmp_path: Path):
    """As a file, since guards are read where they stand."""
    page = (Path(__file__).resolve().parents[1] / "docs/values.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", page, flags=re.M | re.S)
    assert len(blocks) == 13
    (tmp_path / "page.py").write_text("\n".join(blocks))
    runpy.run_path(str(tmp_path / "page.py"))
