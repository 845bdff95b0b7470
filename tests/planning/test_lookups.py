"""Tables cut on the axis of the batch: the rows of its ids are moved, or the table."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from plan_reshards import unbucketed
from torch import Tensor
from torch.nn import functional as F

import ftp
from ftp import P

B, D = 6, 5  # of both, no mesh below has a divisor
OF_TABLES = {
    "rows": P("dp"),
    "features": P(None, "dp"),
    "rows, both axes": P(("dp", "tp")),
    "rows, then features": P("dp", "tp"),
    "features, then rows": P("tp", "dp"),
}


def embedded(p: Any, ids: Tensor) -> Tensor:
    return torch.stack([F.embedding(ids[:, i, 0], t) for i, t in enumerate(p)], 1)


def padded(p: Any, ids: Tensor) -> Tensor:
    tables = (F.embedding(ids[:, i, 0], t, padding_idx=1) for i, t in enumerate(p))
    return torch.stack([x * (i + 1.0) for i, x in enumerate(tables)], 1)


def indexed(p: Any, ids: Tensor) -> Tensor:
    return torch.stack([t[ids[:, i, 1] - t.shape[0]] for i, t in enumerate(p)], 1)


def selected(p: Any, ids: Tensor) -> Tensor:
    return torch.cat([t.index_select(0, ids[:, i, 0]) for i, t in enumerate(p)], 1)


def of_one_table(p: Any, ids: Tensor) -> Tensor:
    first = torch.tensor([0, p[0].shape[0]], device=ids.device)
    return F.embedding(ids[:, :, 0] + first, torch.cat(p))


def summed(p: Any, ids: Tensor) -> Tensor:
    return torch.cat([F.embedding_bag(ids[:, i], t, mode="sum") for i, t in enumerate(p)], 1)


def averaged(p: Any, ids: Tensor) -> Tensor:
    bags = (F.embedding_bag(ids[:, i], t, mode="mean", padding_idx=0) for i, t in enumerate(p))
    return torch.cat(list(bags), 1)


def largest(p: Any, ids: Tensor) -> Tensor:
    return torch.cat([F.embedding_bag(ids[:, i], t, mode="max") for i, t in enumerate(p)], 1)


def weighted(p: Any, ids: Tensor) -> Tensor:
    return torch.stack([(F.embedding(ids[:, i], t).sum(1) / 3).tanh() for i, t in enumerate(p)], 1)


LOOKUPS = [embedded, padded, indexed, selected, of_one_table, summed, averaged, largest, weighted]


def drawn(rows: tuple[int, int]) -> tuple[Any, Tensor, Tensor]:
    """Parameters, ids and weights of the loss; some ids are equal."""
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator)

    ids = [torch.randint(n, (B, 3), generator=generator) for n in rows]
    params = {"tables": [randn(n, D) for n in rows], "w": randn(2 * D, 3)}
    return params, torch.stack(ids, 1), randn(B, 3)


@pytest.mark.cases_by_default(9)
@pytest.mark.parametrize("rows", [(50, 41), (2, 7)], ids=["many rows", "few rows"])
@pytest.mark.parametrize("cut", OF_TABLES)
@pytest.mark.parametrize("shape", [(4,), (3,), (2, 2), (3, 2), (8,)], ids=str)
@pytest.mark.parametrize("lookup", LOOKUPS)
def test_lookups_equal_torch(
    lookup: Callable[..., Tensor], shape: tuple[int, ...], cut: str, rows: tuple[int, int]
):
    axes = ("dp", "tp")[: len(shape)]
    if not set(OF_TABLES[cut].axes) <= set(axes):
        pytest.skip("needs two axes")

    def loss(p: Any, ids: Tensor, y: Tensor) -> Tensor:
        return (lookup(p["tables"], ids).reshape(B, -1) @ p["w"] * y).tanh().sum()

    params, *batch = drawn(rows)
    expected = torch.func.grad_and_value(loss)(params, *batch)[::-1]
    specs = {"tables": [OF_TABLES[cut]] * 2, "w": P()}
    mesh, certify = ftp.simulated_mesh(shape, axes), len(shape) == 2
    step = ftp.shard(loss, mesh, specs, batch_specs=P("dp"), certify=certify)
    torch.testing.assert_close(step(params, *batch), expected, rtol=1e-12, atol=1e-12)
    if len(axes) == 1 and rows[0] > B and lookup not in (of_one_table, largest):
        sent = unbucketed(step.lower(params, *batch)).collectives
        assert not any(c.global_shape[:1] in {(n,) for n in rows} for c in sent)


def moved(lowered: ftp.Lowered) -> dict[str, int]:
    """The bytes of each kind of collective."""
    found: Counter[str] = Counter()
    for c in unbucketed(lowered).collectives:
        found[c.op] += c.nbytes
    return dict(found)


def losses(batch: int, rows: int, cut: P, bags: str | None = None, mesh: Any = None) -> ftp.Lowered:
    """A step of four tables with 8 features each over four ranks."""

    def loss(p: Any, ids: Tensor) -> Tensor:
        if bags:
            x = [F.embedding_bag(ids[:, i], t, mode=bags) for i, t in enumerate(p["tables"])]
        else:
            x = [F.embedding(ids[:, i], t) for i, t in enumerate(p["tables"])]
        return ftp.constrain((torch.cat(x, 1).tanh() @ p["w"]).tanh().sum(), P())

    tables = [torch.empty(rows, 8, device="meta") for _ in range(4)]
    params = {"tables": tables, "w": torch.empty(32, 256, device="meta")}
    shape = (batch, 4, 5) if bags else (batch, 4)
    ids = torch.empty(shape, dtype=torch.int64, device="meta")
    mesh = mesh or ftp.AbstractMesh((4,), ("dp",))
    specs = {"tables": cut, "w": P()}
    is_one = len(mesh.axes) == 1
    step = ftp.shard(loss, mesh, specs, batch_specs=P("dp"), explicit=is_one, strict=is_one)
    return step.lower(params, ids)


FOUND = 1024 * 32 * 4  # bytes of the rows of all ids
REDUCED = 4 + 32 * 256 * 4  # of the loss and of the gradient of w


def bytes_of_ids(bags: str | None) -> int:
    return 1024 * 4 * (5 if bags else 1) * 8


@pytest.mark.parametrize("bags", [None, "sum", "mean"])
def test_rows_of_the_batch_travel(bags: str | None):
    """What ranks find at the ids of all is added up in the batch's shards; gradients of rows are
    gathered.
    """
    assert moved(losses(1024, 10_000, P("dp"), bags)) == {
        "all_gather": bytes_of_ids(bags) + FOUND,
        "reduce_scatter": FOUND,
        "all_reduce": REDUCED,
    }


@pytest.mark.parametrize("bags", [None, "sum", "mean"])
def test_features_are_exchanged(bags: str | None):
    assert moved(losses(1024, 10_000, P(None, "dp"), bags)) == {
        "all_gather": bytes_of_ids(bags),
        "all_to_all": 2 * FOUND // 4,
        "all_reduce": REDUCED,
    }


@pytest.mark.parametrize("cut", [P("dp"), P(None, "dp")])
def test_tables_of_few_rows_are_gathered(cut: P):
    tables = 4 * 100 * 8 * 4
    found = moved(losses(4096, 100, cut))
    assert found == {"all_gather": tables, "reduce_scatter": tables, "all_reduce": REDUCED}


def test_two_axes():
    """On the first, rows of the batch travel; on the second, all ranks have the same ids."""
    lowered = losses(1024, 10_000, P(("dp", "tp")), mesh=ftp.AbstractMesh((4, 2), ("dp", "tp")))
    found: Counter[Any] = Counter()
    for c in unbucketed(lowered).collectives:
        found[c.axes, c.op] += c.nbytes
    assert found == {
        (("dp",), "all_gather"): bytes_of_ids(None) + FOUND,
        (("dp",), "reduce_scatter"): FOUND,
        (("tp",), "all_reduce"): FOUND // 4,
        (("dp",), "all_reduce"): REDUCED,
    }


@pytest.mark.parametrize("bags", ["sum", "mean"])
def test_bags_of_one_length_need_no_exchange(bags: str):
    """In whole tables, of a batch that is cut; they were added up over all ranks."""
    tables = 4 * 10_000 * 8 * 4
    assert moved(losses(1024, 10_000, P(), bags)) == {"all_reduce": tables + REDUCED}


@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("padding", [None, 1])
@pytest.mark.parametrize(
    ("mode", "end", "length", "last"),
    [
        ("sum", 18, 3, False),
        ("mean", 18, 3, False),
        ("sum", 18, 4, False),  # the last bag is shorter
        ("mean", 12, 4, False),  # the last bag is longer
        ("mean", 21, 3, True),  # the end of the last bag is given
    ],
)
def test_bags_by_offsets_equal_torch(
    mode: str,
    end: int,
    length: int,
    last: bool,
    padding: Any,
    weights: bool,
):
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(7, 4, dtype=torch.float64, generator=generator)
    ids = torch.randint(7, (18,), generator=generator)
    y = torch.randn(7, 4, dtype=torch.float64, generator=generator)
    scales = torch.randn(18, dtype=torch.float64, generator=generator)

    def loss(table: Tensor, ids: Tensor, scales: Tensor) -> Tensor:
        offsets = torch.arange(0, end, length)
        x = F.embedding_bag(
            ids,
            table,
            offsets,
            mode=mode,
            per_sample_weights=scales if weights else None,
            include_last_offset=last,
            padding_idx=padding,
        )
        return (x * y[: len(x)]).tanh().sum()

    if weights and mode != "sum":
        pytest.skip("torch has no such call")
    expected = torch.func.grad_and_value(loss)(table, ids, scales)[::-1]
    mesh = ftp.simulated_mesh((3,), ("dp",))
    step = ftp.shard(loss, mesh, P("dp"), batch_specs=P("dp"))
    torch.testing.assert_close(step(table, ids, scales), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("include_last", [False, True])
@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("starts", [[0, 3, 6, 9, 12], [0, 2, 2, 5]])
def test_last_bag_goes_on_to_the_end(starts: list[int], mode: str, include_last: bool):
    """As in torch, also where the given end is before the last id."""
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(7, 4, dtype=torch.float64, generator=generator)
    ids = torch.randint(7, (15,), generator=generator)
    y = torch.randn(5, 4, dtype=torch.float64, generator=generator)

    def loss(table: Tensor, ids: Tensor) -> Tensor:
        offsets = torch.arange(0, 15, 3) if len(starts) == 5 else torch.tensor(starts)
        x = F.embedding_bag(ids, table, offsets, mode=mode, include_last_offset=include_last)
        return (x * y[: len(x)]).tanh().sum()

    expected = torch.func.grad_and_value(loss)(table, ids)[::-1]
    step = ftp.shard(loss, ftp.simulated_mesh((3,), ("dp",)), P("dp"), batch_specs=P("dp"))
    torch.testing.assert_close(step(table, ids), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_no_bags(mode: str):
    def loss(table: Tensor, ids: Tensor) -> Tensor:
        return F.embedding_bag(ids, table, mode=mode).sum()

    args = torch.ones(7, 4), torch.zeros(0, 3, dtype=torch.int64)
    step = ftp.shard(loss, ftp.simulated_mesh((2,), ("dp",)), P("dp"), batch_specs=P("dp"))
    torch.testing.assert_close(step(*args), (torch.tensor(0.0), torch.zeros(7, 4)))


@pytest.mark.parametrize("cut", [P(), P("dp")])
@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_frequencies_in_bags(mode: str, cut: P):
    """Gradients are divided by the frequencies of their own ids, as of `F.embedding`; torch's
    kernel for CPUs takes those of other ids.
    """
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(7, 4, dtype=torch.float64, generator=generator)
    ids = torch.randint(7, (5, 3), generator=generator)

    def reference(table: Tensor, ids: Tensor) -> Tensor:
        rows = F.embedding(ids, table, scale_grad_by_freq=True)
        return (rows.sum(1) if mode == "sum" else rows.mean(1)).tanh().sum()

    def loss(table: Tensor, ids: Tensor) -> Tensor:
        return F.embedding_bag(ids, table, mode=mode, scale_grad_by_freq=True).tanh().sum()

    expected = torch.func.grad_and_value(reference)(table, ids)[::-1]
    step = ftp.shard(loss, ftp.simulated_mesh((2,), ("dp",)), cut, batch_specs=cut, certify=True)
    torch.testing.assert_close(step(table, ids), expected, rtol=1e-12, atol=1e-12)


def step_of(loss: Callable[..., Tensor], cut: P, explicit: bool = True) -> ftp.Lowered:
    mesh = ftp.AbstractMesh((4,), ("dp",))
    step = ftp.shard(loss, mesh, {"t": cut, "w": P()}, batch_specs=P("dp"), explicit=explicit)
    params = {"t": torch.empty(100_000, 64, device="meta"), "w": torch.empty(64, 4, device="meta")}
    return step.lower(params, torch.empty(1024, dtype=torch.int64, device="meta"))


@pytest.mark.parametrize("along", [lambda x: x.flip(0), lambda x: x.cumsum(0).tanh()])
def test_explicit_refuses_to_gather_rows_for_an_op_along_the_batch(
    along: Callable[[Tensor], Tensor],
):
    def loss(p: Any, ids: Tensor) -> Tensor:
        return (along(F.embedding(ids, p["t"])) @ p["w"]).tanh().sum()

    with pytest.raises(ftp.errors.ExplicitError, match="all_reduce over dp"):
        step_of(loss, P("dp"))


@pytest.mark.parametrize("cut", [P("dp"), P(None, "dp")])
def test_explicit_takes_moved_rows(cut: P):
    """Also after a frozen product, and before a product of rows; rows are not replicated."""

    def frozen(p: Any, ids: Tensor) -> Tensor:
        return (F.embedding(torch.arange(1) + ids, p["t"]) @ p["w"].detach()).tanh().sum()

    def of_rows(p: Any, ids: Tensor) -> Tensor:
        a, b = F.embedding(ids, p["t"]), F.embedding(ids // 2, p["t"])
        return F.softplus((a * b).sum(-1)).sum()

    def plain(p: Any, ids: Tensor) -> Tensor:
        return F.embedding(ids, p["t"]).tanh().sum()

    for loss in (of_rows, plain, *([frozen] if cut == P("dp") else [])):
        sent = unbucketed(step_of(loss, cut)).collectives
        assert all(c.global_shape[:1] != (100_000,) for c in sent)
        assert all(c.global_shape == () for c in sent if c.op == "all_reduce")
