"""Buckets by default: what they hold, what they do not delay, what they cost in memory, and that
values are the same with and without.
"""

from collections import Counter
from typing import Any

import pytest
import torch
from few_or_many import slow_after
from models import LlamaConfig, build, lm_loss
from torch import nn
from torch.nn import functional as F

import ftp
from ftp import P
from ftp.report.lowered import Lowered

WIDTH = 160  # a weight of 1 x 1 filters is larger than what may travel with statistics


def normed(layers: int, width: int = 8) -> tuple[Any, ...]:
    """A loss of convolutions with batch norm, which returns new buffers, and its arguments."""
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(nn.Conv2d(3 if i == 0 else width, width, 1), nn.BatchNorm2d(width), nn.ReLU())
        for i in range(layers)
    ]
    fn, params, buffers = ftp.functionalize(nn.Sequential(*blocks).train(), buffers=True)

    def loss(params: Any, buffers: Any, x: torch.Tensor) -> Any:
        out, new = fn(params, buffers, x)
        return (out * torch.linspace(-1, 2, out.shape[-1])).square().mean(), new

    return loss, params, {k: b.clone() for k, b in buffers.items()}, torch.randn(7, 3, 2, 5)


def step_of(loss: Any, mesh: Any, specs: Any, **options: Any) -> ftp.Step:
    return ftp.shard(
        loss, mesh, specs, batch_specs=(P(), P("dp")), has_aux=True, data_axes=("dp",), **options
    )


def test_batch_norm_is_one_reduction_a_layer_and_direction():
    loss, *args = normed(3, WIDTH)
    lowered = step_of(loss, ftp.AbstractMesh((2,), ("dp",)), P()).lower(*args)
    issued = [(c.dtype, len(c.members), c.nbytes) for c in lowered.collectives]
    forward, backward = (torch.float64, 2, 16 * WIDTH), (torch.float32, 2, 8 * WIDTH)
    # The first takes the loss along; the rest is a bucket of the weights' and biases' gradients.
    first = (torch.float32, 3, 8 * WIDTH + 4)
    gradients = 4 * (2 * WIDTH * WIDTH + 3 * WIDTH + 3 * WIDTH)
    assert issued == [forward] * 3 + [first, backward, backward, (torch.float32, 6, gradients)]
    plain = step_of(loss, ftp.AbstractMesh((2,), ("dp",)), P(), bucket=False).lower(*args)
    assert Counter(c.dtype for c in plain.collectives) == {
        torch.float64: 6,  # two sums a layer forward
        torch.float32: 1 + 6 + 6,  # the loss; two sums a layer backward, the gradients of the rest
    }


class Residual(nn.Module):
    """A block of ResNet-18."""

    def __init__(self, inner: int, width: int, stride: int):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inner, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, 1, 1, bias=False),
            nn.BatchNorm2d(width),
        )
        self.short = nn.Sequential()
        if stride > 1:
            conv = nn.Conv2d(inner, width, 1, stride, bias=False)
            self.short = nn.Sequential(conv, nn.BatchNorm2d(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.body(x) + self.short(x))


def resnet18() -> nn.Module:
    sizes = [(64, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1)]
    sizes += [(128, 256, 2), (256, 256, 1), (256, 512, 2), (512, 512, 1)]
    return nn.Sequential(
        nn.Conv2d(3, 64, 7, 2, 3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
        *(Residual(*size) for size in sizes),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(512, 1000),
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("specs", "expected"),
    [
        (P(), {"all_reduce": 49}),
        (P("dp"), {"all_gather": 27, "reduce_scatter": 11, "all_reduce": 38}),
    ],
    ids=["dp", "zero-3"],
)
def test_collectives_of_resnet18(specs: P, expected: dict[str, int]):
    """Batch norm reduced 76 times, where 20 SyncBatchNorms of torch do 40 times; ZeRO-3 issued
    167 collectives.
    """
    with torch.device("meta"):
        fn, params, buffers = ftp.functionalize(resnet18().train(), buffers=True)
        x, y = torch.empty(8, 3, 64, 64), torch.empty(8, dtype=torch.int64)

    def loss(params: Any, buffers: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        out, new = fn(params, buffers, x)
        return F.cross_entropy(out, y), new

    step = ftp.shard(
        loss,
        ftp.AbstractMesh((4,), ("dp",)),
        specs,
        batch_specs=(P(), P("dp"), P("dp")),
        has_aux=True,
        data_axes=("dp",),
    )
    found = step.lower(params, buffers, x, y).collectives
    assert Counter(c.op for c in found) == expected
    of_norms = [
        c
        for c in found
        if c.op == "all_reduce" and any("batch_norm" in member.name for member in c.members)
    ]
    # Both norms of a block that shortens its input are reduced at once, forward.
    assert Counter(c.dtype for c in of_norms) == {torch.float64: 20 - 3, torch.float32: 20}


@pytest.mark.cases_by_default(2)
@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("specs", [P(), P("dp")], ids=["dp", "zero-3"])
def test_values_are_the_same_with_and_without(specs: P, n: int):
    """Images with a mean of many deviations, seven of them."""
    loss, params, buffers, x = normed(2)
    x = x + 1e3
    args = (params, buffers, x)
    mesh = ftp.simulated_mesh((n,), ("dp",))
    found = step_of(loss, mesh, specs)(*args)
    plain = step_of(loss, mesh, specs, bucket=False)(*args)
    torch.testing.assert_close(found, plain, rtol=0, atol=0)
    grads_of = torch.func.grad_and_value(loss, has_aux=True)
    wide = [{k: v.double() if v.is_floating_point() else v for k, v in t.items()} for t in args[:2]]
    wanted, alone = grads_of(*wide, x.double()), grads_of(*args)
    for name, ours, theirs, exact in (
        ("loss", found[0][0], alone[1][0], wanted[1][0]),
        *((name, found[1][name], alone[0][name], wanted[0][name]) for name in params),
        *((name, found[0][1][name], alone[1][1][name], wanted[1][1][name]) for name in buffers),
    ):
        # No further off than one device in float32, but for the rounding of other orders.
        bound = 4 * float((theirs - exact).abs().max()) + 1e-6 * float(exact.abs().max())
        assert float((ours - exact).abs().max()) <= bound, name


@pytest.mark.cases_by_default(1)
@pytest.mark.parametrize("specs", [P(), P("dp")], ids=["dp", "zero-3"])
def test_memory_grows_by_no_more_than_a_bucket(specs: P):
    loss, *args = normed(6, WIDTH)
    mesh = ftp.AbstractMesh((2,), ("dp",))
    found, plain = (step_of(loss, mesh, specs, bucket=b).lower(*args) for b in (True, False))
    largest = max(c.nbytes for c in found.collectives if len(c.members) > 1)
    assert len(found.collectives) < len(plain.collectives)
    assert int(found.memory) <= int(plain.memory) + largest


@pytest.mark.parametrize("remat", [{}, {"*": "nothing"}], ids=["kept", "recomputed"])
def test_a_bucket_holds_its_terms_and_not_what_they_are_computed_from(remat: dict[str, Any]):
    """Terms over dp wait for their bucket while sums over tp go on: activations must not wait."""
    layers = [nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)) for _ in range(6)]
    fn, params = ftp.functionalize(nn.Sequential(*layers), remat=remat)
    cut = {"*.0.weight": P("tp"), "*.0.bias": P("tp"), "*.2.weight": P(None, "tp")}
    mesh, specs = ftp.AbstractMesh((2, 2), ("dp", "tp")), ftp.plan(params, cut)
    found, plain = (
        ftp.shard(
            lambda p, x: fn(p, x).square().mean(), mesh, specs, batch_specs=P("dp"), bucket=bucket
        ).lower(params, torch.empty(2048, 64))
        for bucket in (True, False)
    )
    largest = max(c.nbytes for c in found.collectives if len(c.members) > 1)
    assert len(found.collectives) < len(plain.collectives)
    of_a_layer = 3 * 1024 * 64 * 4  # what a rank's product for a weight may read a while longer
    assert int(found.memory) <= int(plain.memory) + largest + of_a_layer


@pytest.mark.parametrize("n", slow_after(1, [4, 2]))
def test_zero3_gathers_by_layer_and_holds_less_than_data_parallelism(n: int):
    cfg = LlamaConfig(vocab=512, dim=128, layers=4, heads=4, hidden=256)
    fn, params = ftp.functionalize(build(cfg, device="meta"))
    batch = tuple(torch.empty(8, 16, dtype=torch.int64, device="meta") for _ in range(2))
    mesh = ftp.AbstractMesh((n,), ("dp",))
    found, plain = (
        ftp.shard(lm_loss(fn), mesh, specs, batch_specs=P("dp"), bucket=is_packed).lower(
            params, batch
        )
        for specs, is_packed in ((P("dp"), True), (P(), False))
    )
    assert int(found.memory) < int(plain.memory)
    of_layer = [
        {name.split("layers.")[-1].split(".")[0] for m in c.members if "layers" in (name := m.name)}
        for c in found.collectives
        if c.op == "all_gather"
    ]
    assert Counter(layer for found in of_layer for layer in found) == dict.fromkeys("0123", 2)


def test_a_bucketed_gather_of_a_later_dim_is_copied_once():
    def chain(params: Any, x: torch.Tensor) -> torch.Tensor:
        for name in params:
            x = torch.tanh(x @ params[name])
        return x.sum()

    params = {f"w{i}": torch.empty(32, 32, device="meta") for i in range(3)}
    slow = ftp.Hardware(link=ftp.Link(latency=1e-3))
    mesh, specs = ftp.AbstractMesh((4,), ("dp",)), (P(None, "dp"), P("dp"))
    found = ftp.spmd(chain, mesh, specs, hardware=slow).lower(params, torch.empty(8, 32))
    assert [len(c.members) for c in found.collectives] == [3, 1]
    copies = [op for op in found.cost().ops if op.op == "reshape.default" and op.nbytes]
    assert [op.nbytes for op in copies] == [2 * 4 * 32 * 32] * 3


def test_axes_are_merged_where_their_links_are_as_fast():
    w, x = {"w": torch.empty(256, 512)}, torch.empty(16, 256)
    mesh = ftp.AbstractMesh((4, 2), ("dp", "cp"))
    both = P(("dp", "cp"))

    def gathers(**links: ftp.Link) -> list[tuple[str, ...]]:
        step = ftp.shard(
            lambda w, x: (x @ w["w"]).square().sum(),
            mesh,
            both,
            batch_specs=both,
            hardware=ftp.Hardware(links=links),
        )
        issued = step.lower(w, x).collectives
        return [c.axes for c in issued if c.op in ("all_gather", "reduce_scatter")]

    fast, slow = ftp.Link(bandwidth=4e11), ftp.Link(bandwidth=4e8)
    assert gathers(dp=fast, cp=fast) == [("dp", "cp")] * 2
    assert sorted(gathers(dp=slow, cp=fast)) == [("cp",)] * 2 + [("dp",)] * 2


@pytest.mark.parametrize("n", [1, 4, 16])
def test_losses_of_microbatches_are_one_reduction(n: int):
    def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(torch.tanh(x @ p["a"]), x[:, :6])

    p, x = {"a": torch.randn(8, 6)}, torch.randn(64, 8)
    step = ftp.spmd(
        ftp.optim.accumulate(torch.func.grad_and_value(loss), n),
        ftp.simulated_mesh((2,), ("dp",)),
        (P(), P("dp")),
    )
    assert len(step.lower(p, x).collectives) == 1
    torch.testing.assert_close(step(p, x), torch.func.grad_and_value(loss)(p, x))


def test_a_pack_ends_before_a_gather_that_needs_a_member_and_was_moved_ahead():
    """What depends on parameters alone is moved ahead of a sum over the batch; a rank with an empty
    shard may not see that it depends on the pack.
    """

    def fn(params: Any, x: torch.Tensor) -> Any:
        w, u, v = params
        inverse = torch.linalg.inv(w.T @ w + torch.eye(4))
        return (x @ u).softmax(-1).sum(), v.T @ (v @ inverse)

    params, x = tuple(torch.ones(4, 4) for _ in range(3)), torch.ones(2, 4)
    specs = (P("tp"), P(None, "tp"))
    step = ftp.spmd(fn, ftp.AbstractMesh((3,), ("tp",)), specs, (P(), P("tp")))
    lowered = step.lower(params, x)
    issued = [c.op for c in lowered.collectives]
    assert issued == ["all_reduce", "reduce_scatter", "all_reduce"]
    assert all(len(c.members) <= 1 for c in lowered.collectives)


@pytest.mark.parametrize("most", [0, 4096, 3 * 4096])
def test_a_small_prefetch_bounds_the_buckets_of_gathers(most: int):
    """24 matrices of 4 KiB travelled in buckets of 64 KiB."""

    def chain(params: Any, x: torch.Tensor) -> torch.Tensor:
        for name in params:
            x = torch.tanh(x @ params[name])
        return x.sum()

    params = {f"w{i:02}": torch.empty(32, 32, device="meta") for i in range(24)}
    slow = ftp.Hardware(link=ftp.Link(latency=1e-3))
    step = ftp.spmd(
        chain, ftp.AbstractMesh((4,), ("dp",)), (P("dp"), P("dp")), hardware=slow, prefetch=most
    )
    found = step.lower(params, torch.empty(8, 32, device="meta"))
    plain = Lowered(found._program.with_options(bucket=False))
    gathers = [c for c in found.collectives if c.op == "all_gather"]
    assert max(c.nbytes for c in gathers) == max(most, 4096)
    assert len(gathers) == 24 * 4096 / max(most, 4096)
    assert int(found.memory) <= int(plain.memory) + 2 * most  # what arrives, and its copies
