"""On real GPUs: steps on a mesh of one, ranks that share a GPU over gloo, and NCCL's where there
are two; left out where there is none.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import launch
from models import LlamaConfig, build, cuts, lm_batch, lm_loss, sequence_parallel, specs
from seen_ops import SeenOps
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map

import ftp
from ftp import P
from ftp.ops import philox
from ftp.runtime.cuda_graph import WARM_UP, RecordedRun, graphs_of
from ftp.sharding.mesh import mesh_device, resolve
from tests.support.staged_models import Model

DEVICE = "cuda"
pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.filterwarnings(
        "ignore:.torch.jit:DeprecationWarning"
    ),  # inductor's, as it is imported
]
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs")

OPT = ftp.optim.from_torch(torch.optim.AdamW, lr=1e-2, fused=True)
WAYS = [{}, {"compile": True}, {"cuda_graph": True}, {"compile": True, "cuda_graph": True}]
ids = [" ".join(way) or "eager" for way in WAYS]


def perceptron() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.25), nn.Linear(64, 32)).train()


def train_step(fn: Any) -> Callable[..., Any]:
    def step(params: Any, state: Any, x: Tensor, key: Tensor) -> Any:
        def loss_of(params: Any) -> Tensor:
            return F.mse_loss(fn(params, x, rng=key), x)

        grads, loss = torch.func.grad_and_value(loss_of)(params)
        params, state = OPT.update(grads, state, params)
        return params, state, loss

    return step


@contextmanager
def nothing_waits() -> Iterator[None]:
    """Raises where an op makes the host wait for the GPU."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


# One GPU.


@pytest.mark.parametrize("way", WAYS, ids=ids)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["float64", "bfloat16"])
def test_a_train_step_on_one_gpu_equals_one_cpu(way: Any, dtype: torch.dtype):
    """Dropout's masks too, whose bits are the same on every device; nothing in a step waits for
    the GPU.
    """
    fn, full = ftp.functionalize(perceptron().to(dtype))
    step, count = train_step(fn), 6
    data = [(torch.randn(8, 32, dtype=dtype), ftp.random.key(i)) for i in range(count)]
    due, params, state = [], full, OPT.init(full)
    for x, key in data:
        params, state, loss = step(params, state, x, key)
        due.append(loss)
    mesh = ftp.make_mesh((1,), ("dp",), device_type=DEVICE)
    train = ftp.spmd(step, mesh, (P(), P(), P("dp"), P()), donate=(0, 1), **way)
    mine = ftp.device_put(full, mesh, P())
    own, found = OPT.init(mine), []
    batches = [ftp.device_put(one, mesh, (P("dp"), P())) for one in data]
    for i, (x, key) in enumerate(batches):
        with nothing_waits() if i > 2 else nullcontext():
            mine, own, loss = train(mine, own, x, key)
        found.append(loss)
    close: dict[str, Any] = {"rtol": 0.05, "atol": 0.02} if dtype is torch.bfloat16 else {}
    torch.testing.assert_close([loss.cpu() for loss in found], due, **close)
    torch.testing.assert_close({k: p.cpu() for k, p in mine.items()}, dict(params), **close)


def test_bits_are_those_of_a_cpu():
    key = ftp.random.key(7)
    there = key.to(DEVICE)
    for shape in ((5,), (3, 1000), (2, 3, 4)):
        assert torch.equal(ftp.random.bits(there, shape).cpu(), ftp.random.bits(key, shape))
        assert torch.equal(
            ftp.random.bernoulli(there, 0.3, shape).cpu(), ftp.random.bernoulli(key, 0.3, shape)
        )
        assert torch.equal(ftp.random.uniform(there, shape).cpu(), ftp.random.uniform(key, shape))
    assert torch.equal(ftp.random.split(there, 5).cpu(), ftp.random.split(key, 5))
    assert torch.equal(ftp.random.fold_in(there, 3).cpu(), ftp.random.fold_in(key, 3))
    assert torch.equal(ftp.random.permutation(there, 100).cpu(), ftp.random.permutation(key, 100))


def test_compiled_bits_far_apart_are_those_of_a_cpu():
    """Positions beyond int32, in a block that inductor counts in it."""
    key, far = ftp.random.key(7), ((4, 1000), (1 << 30, 1), 7)
    compiled = torch.compile(lambda key: philox.bits_by_index(key, *far))
    assert torch.equal(compiled(key.to(DEVICE)).cpu(), philox.random_bits(key, *far))


@torch.library.custom_op("test_cuda::waits", mutates_args=())
def waits(x: Tensor) -> Tensor:
    return x * x.sum().item()


waits.register_fake(torch.empty_like)
ftp.pointwise(torch.ops.test_cuda.waits.default)


def test_a_recording_that_fails_is_named_and_spoils_no_later_one():
    mesh, x = ftp.make_mesh((1,), ("dp",), device_type=DEVICE), torch.ones(4, device=DEVICE)
    bad = ftp.spmd(lambda x: waits(x), mesh, P(), cuda_graph=True)
    for _ in range(WARM_UP):
        bad(x)
    for _ in range(2):
        named = r"cannot be recorded as a CUDA graph, for test_cuda\.waits\.default"
        with pytest.raises(ftp.errors.InputError, match=named):
            bad(x)
    good = ftp.spmd(lambda x: x.square() + 1, mesh, P(), cuda_graph=True)
    for i in range(WARM_UP + 3):
        torch.testing.assert_close(good(x * i).cpu(), torch.full((4,), i * i + 1.0))


def decoder(
    mesh: Any, dtype: torch.dtype, how: str = "", **options: Any
) -> tuple[ftp.Step, Any, Any, Any]:
    """Cut as Megatron cuts it, with ``how="sequence"`` along the sequence too, with
    ``how="fsdp"`` as ZeRO-3 does.
    """
    cfg = LlamaConfig(vocab=64, dim=128, heads=4, hidden=96, layers=2)
    constraints = sequence_parallel() if how == "sequence" or options.get("async_tp") else None
    fn, full = ftp.functionalize(build(cfg, dtype=dtype), constraints=constraints)
    of_params = ftp.plan(full, {"**": P("tp")} if how == "fsdp" else specs(cuts(cfg), tp="tp"))
    step = ftp.shard(
        lm_loss(fn), mesh, of_params, batch_specs=P("tp") if how == "fsdp" else P(), **options
    )
    return step, full, lm_batch(cfg, 4, 16), (lm_loss(fn), of_params)


def test_attention_runs_a_fused_kernel():
    mesh = ftp.simulated_mesh((1,), ("tp",), device_type=DEVICE)
    step, full, batch, (loss_fn, of_params) = decoder(mesh, torch.bfloat16)
    params, batch = ftp.device_put((full, batch), mesh, (of_params, P()))
    step(params, batch)
    with SeenOps() as seen:
        loss, _ = step(params, batch)
    assert any("_scaled_dot_product" in op and "backward" in op for op in seen.ops)
    torch.testing.assert_close(loss, loss_fn(params, batch), rtol=0.02, atol=0.02)


def test_simulated_ranks_on_one_gpu_equal_it():
    mesh = ftp.simulated_mesh((2,), ("tp",), device_type=DEVICE)
    step, full, batch, (loss_fn, of_params) = decoder(mesh, torch.float64)
    params, batch = ftp.device_put((full, batch), mesh, (of_params, P()))
    grads, loss = torch.func.grad_and_value(loss_fn)(params, batch)
    torch.testing.assert_close(step(params, batch), (loss, grads))


def test_shards_on_a_gpu_are_saved_and_loaded(tmp_path: Path):
    mesh = ftp.simulated_mesh((2,), ("tp",), device_type=DEVICE)
    tree = ftp.device_put(
        {"w": torch.randn(6, 4), "n": torch.arange(3)}, mesh, {"w": P("tp"), "n": P()}
    )
    saving = ftp.save(tmp_path, tree, mesh, {"w": P("tp"), "n": P()}, wait=False)
    before = {k: v.clone() for k, v in tree.items()}
    tree["w"].zero_()  # what is saved was copied
    saving.result()
    found = ftp.load(
        tmp_path, {k: torch.empty_like(v, device="meta") for k, v in tree.items()}, mesh
    )
    assert all(v.device.type == DEVICE for v in found.values())
    torch.testing.assert_close(found, before)


def test_pinned_batches_are_placed_without_waiting():
    mesh = ftp.simulated_mesh((1,), ("dp",), device_type=DEVICE)
    batch = torch.randn(64, 32).pin_memory()
    with nothing_waits():
        placed = ftp.device_put(batch, mesh, P("dp"), non_blocking=True)
    torch.testing.assert_close(placed.cpu(), batch)


# Several ranks.


def test_ranks_share_a_gpu_over_gloo():
    for way in (
        {},
        {"compile": True},
        {"how": "sequence"},
        {"how": "fsdp"},
        {"how": "fsdp", "compile": True},
    ):
        for rank in launch(_ranks, 2, "gloo", way, timeout=240):
            assert rank.exit == 0, rank.error or rank.stderr[-2000:]
    refused = launch(_ranks, 2, "gloo", {"cuda_graph": True}, timeout=120)
    assert all(
        "go through gloo, which works on the host and cannot be recorded" in (rank.error or "")
        for rank in refused
    )


def test_one_rank_over_nccl_is_recorded_and_ends():
    """NCCL waits with its end for graphs that hold its collectives."""
    (rank,) = launch(_one_rank, 1, timeout=120)
    assert rank.exit == 0, rank.error or rank.stderr[-2000:] or "the process group did not end"


def _one_rank() -> None:
    mesh = resolve(ftp.make_mesh((1,), ("tp",), device_type=DEVICE))
    c10d = torch.ops._c10d_functional

    def run(given: Any) -> list[Tensor]:
        summed = c10d.all_reduce(given[0] + 1, "sum", mesh.group_name("tp"))
        return [c10d.wait_tensor(summed)]

    recorded = RecordedRun(run, [], ["x"], graphs_of(mesh_device(mesh)), str)
    x = torch.ones(1000, device=DEVICE)
    for i in range(WARM_UP + 3):
        torch.testing.assert_close(recorded([x * i])[0], x * i + 1)
    ftp.destroy_process_group()


@two_gpus
@pytest.mark.parametrize(
    "way",
    [
        *WAYS,
        {"async_tp": True},
        {"async_tp": True, "cuda_graph": True},
        {"bucket": True, "cuda_graph": True},
    ],
)
def test_gpus_over_nccl_equal_one(way: Any):
    for rank in launch(_ranks, 2, "nccl", way, timeout=300):
        assert rank.exit == 0, rank.error or rank.stderr[-2000:]


def _ranks(backend: str, way: dict[str, Any]) -> None:
    os.environ["NCCL_DEBUG"] = "WARN"
    if backend == "gloo":
        torch.distributed.init_process_group("gloo")
    mesh = ftp.make_mesh((2,), ("tp",), device_type=DEVICE)
    step, full, batch, (loss_fn, of_params) = decoder(mesh, torch.float64, **way)
    of_batch = P("tp") if way.get("how") == "fsdp" else P()
    params, data = ftp.device_put(full, mesh, of_params), ftp.device_put(batch, mesh, of_batch)
    grads, loss = torch.func.grad_and_value(loss_fn)(full, batch)
    for _ in range(5):
        found, sharded = step(params, data)
        torch.testing.assert_close(found.cpu(), loss)
        whole = ftp.device_get(sharded, mesh, of_params)
        torch.testing.assert_close({k: g.cpu() for k, g in whole.items()}, dict(grads))
    ftp.destroy_process_group()


@two_gpus
@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_stages_over_nccl_equal_one_gpu(schedule: str, compile: bool):
    for rank in launch(_stages, 2, schedule, compile, timeout=300):
        assert rank.exit == 0, rank.error or rank.stderr[-2000:]


def _stages(schedule: str, compile: bool) -> None:
    model, pipe = Model(4, tied=True, scaled=True, skips=True), ftp.Pipeline("pp", 4, schedule)
    mesh, full, batch = ftp.make_mesh((2,), ("pp",)), model.params(), model.batch(8)
    specs = pipe.place(full, P(), mesh)
    step = ftp.shard(model.loss, mesh, specs, pipeline=pipe, compile=compile)
    params, rows = ftp.device_put(full, mesh, specs), ftp.device_put(batch, mesh, P())
    due = model.on_one_device(4, 8)
    for _ in range(3):
        loss, grads = step(params, *rows)
        found = loss.cpu(), tree_map(Tensor.cpu, ftp.device_get(grads, mesh, specs))
        torch.testing.assert_close(found, due)
    lowered: Any = step.lower(params, *rows)
    assert all(t.end > t.start >= 0 for t in lowered.timeline.measured)
    ftp.destroy_process_group()
