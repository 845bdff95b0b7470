"""Collectives through shared memory equal gloo's; a rank that ends makes the others raise."""

import os
import time

import pytest
import torch
import torch.distributed as dist
from dist.launch import launch  # type: ignore[import-not-found]

import ftp
from ftp import P
from ftp.mesh import resolve
from ftp.program import memory_of
from ftp.shared_memory import SLOT_BYTES

pytestmark = pytest.mark.dist
ASKED = {"FTP_SHM": "1"}


def _mesh():
    return ftp.make_mesh((int(os.environ["WORLD_SIZE"]),), ("tp",), device_type="cpu")


def _collectives() -> list[str]:
    (group,) = memory_of(resolve(_mesh())).values()
    bad = []
    for dtype in (torch.float32, torch.float64, torch.int64):
        for n in (1, 7, 1000, SLOT_BYTES // 4 * 2 + 3, 0):
            for op, of_torch in (("sum", dist.ReduceOp.SUM), ("max", dist.ReduceOp.MAX), ("min", dist.ReduceOp.MIN)):
                x = ((torch.arange(n) * (dist.get_rank() + 3)) % 17 - 8).to(dtype)
                expected, kept = x.clone(), x.clone()
                dist.all_reduce(expected, of_torch)
                if not torch.equal(group.all_reduce(x, op), expected) or not torch.equal(x, kept):
                    bad.append(f"{op} of {n} {dtype}")
    n_ranks = dist.get_world_size()
    for dtype in (torch.float32, torch.float64, torch.int64, torch.bfloat16, torch.bool):
        for rows in (1, 5, SLOT_BYTES // 8 + 3, 0):
            part = ((torch.arange(rows * 3).reshape(rows, 3) * (dist.get_rank() + 3)) % 17 - 8).to(dtype)
            expected = part.new_empty(n_ranks * rows, 3)
            dist.all_gather_into_tensor(expected, part)
            if not torch.equal(group.all_gather(part), expected):
                bad.append(f"all_gather of {rows} rows of {dtype}")
            whole = torch.cat([part + r if dtype is not torch.bool else part for r in range(n_ranks)])
            expected = torch.empty_like(whole)
            dist.all_to_all_single(expected, whole)
            if not torch.equal(group.all_to_all(whole), expected):
                bad.append(f"all_to_all of {rows} rows of {dtype}")
            if dtype in (torch.float32, torch.float64, torch.int64):
                total = whole.clone()
                dist.all_reduce(total)
                if not torch.equal(group.reduce_scatter(whole, "sum"), total.chunk(n_ranks)[dist.get_rank()] if rows else part):
                    bad.append(f"reduce_scatter to {rows} rows of {dtype}")
    strided = torch.arange(6.0).reshape(2, 3).t() + dist.get_rank()
    expected = strided.contiguous()
    dist.all_reduce(expected)
    if not torch.equal(group.all_reduce(strided, "sum"), expected):
        bad.append("strided")
    time.sleep(0.3 * dist.get_rank())  # the others sleep by the time that this rank comes
    if not torch.equal(group.all_reduce(torch.ones(2), "sum"), torch.full((2,), float(n_ranks))):
        bad.append("late")
    dist.barrier()
    dist.destroy_process_group()
    return bad


@pytest.mark.parametrize("n", [2, 3])
def test_collectives_equal_gloos(n: int):
    ranks = launch(_collectives, n, env=ASKED)
    assert [r.value for r in ranks] == [[]] * n, [r.error or r.stderr[-2000:] for r in ranks]


def _loss(params, x):
    return (x @ params["a"] @ params["b"]).square().sum()


def _step(dies: bool):
    mesh = _mesh()
    specs = {"a": P(None, "tp"), "b": P("tp")}
    full = {"a": torch.arange(15.0, dtype=torch.float64).reshape(3, 5) / 7, "b": torch.ones(5, 2, dtype=torch.float64)}
    x = torch.ones(4, 3, dtype=torch.float64)
    zero = ftp.shard(_loss, mesh, {"a": P("tp"), "b": P("tp")}, batch_specs=P("tp"))
    cut = ftp.device_put(full, mesh, P("tp"))
    rows = ftp.device_put(x, mesh, P("tp"))
    loss, grads = zero(cut, rows)
    expected = torch.func.grad(_loss)(full, x)
    assert torch.allclose(loss, _loss(full, x), rtol=1e-12)
    grads = ftp.device_get(grads, mesh, P("tp"))
    assert all(torch.allclose(grads[k], expected[k], rtol=1e-12) for k in full)
    assert {"all_gather_in_memory", "reduce_scatter_in_memory"} <= set(_kinds(lambda: zero(cut, rows)).replace("ftp::", "").split())
    step = ftp.shard(_loss, mesh, specs)
    params = ftp.device_put(full, mesh, specs)
    loss, _ = step(params, x)
    assert torch.allclose(loss, _loss(full, x), rtol=1e-12)
    assert "all_reduce_in_memory" in _kinds(lambda: step(params, x))
    if dies and dist.get_rank() == 1:
        os._exit(9)
    start = time.monotonic()
    try:
        step(params, x)
    except RuntimeError as e:
        return f"{e} {time.monotonic() - start < 10}"
    dist.barrier()
    dist.destroy_process_group()
    return "done"


def _kinds(run) -> str:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        run()
    return " ".join(event.name for event in seen.events())  # type: ignore[union-attr]


def test_a_step_goes_through_memory_and_equals_one_device():
    ranks = launch(_step, 2, False, env=ASKED)
    assert [r.value for r in ranks] == ["done"] * 2, [r.error or r.stderr[-2000:] for r in ranks]


def _over_two_axes() -> bool:
    mesh = ftp.make_mesh((2, 2), ("dp", "cp"), device_type="cpu")
    cut = P(("dp", "cp"))
    w, x = torch.arange(6.0, dtype=torch.float64).reshape(3, 2), torch.arange(24.0, dtype=torch.float64).reshape(8, 3) / 7
    step = ftp.shard(lambda w, x: (x @ w).square().sum(), mesh, P(), batch_specs=cut, pack=True)
    mine = ftp.device_put(x, mesh, cut)
    loss, grads = step(w, mine)
    assert torch.allclose(loss, (x @ w).square().sum(), rtol=1e-12) and torch.allclose(grads, 2 * x.t() @ x @ w, rtol=1e-12)
    kinds = _kinds(lambda: step(w, mine))
    dist.barrier()
    dist.destroy_process_group()
    return kinds.count("all_reduce_in_memory") == 1 and "gloo" not in kinds


def test_collectives_over_a_product_of_axes_go_through_memory():
    assert [r.value for r in launch(_over_two_axes, 4, env=ASKED)] == [True] * 4


def test_a_rank_that_ends_makes_the_others_raise():
    ranks = launch(_step, 2, True, env=ASKED)
    assert ranks[1].exit == 9
    assert ranks[0].value == "An all-reduce through shared memory failed: rank 1 of the group has ended. True", ranks[0]


def test_no_file_is_left():
    folder = "/dev/shm" if os.path.isdir("/dev/shm") else "/tmp"
    before = set(os.listdir(folder))
    launch(_step, 2, True, env=ASKED)
    assert not [name for name in set(os.listdir(folder)) - before if name.startswith("ftp-")]
