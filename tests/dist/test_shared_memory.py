"""Collectives through shared memory equal gloo's; what a rank that ends, or that cannot, is to
the others.
"""

import os
import re
import resource
import signal
import socket
import tempfile
import time
import warnings

import pytest
import torch
import torch.distributed as dist
from few_or_many import slow_after
from launch import launch

import ftp
from ftp import P
from ftp.errors import CollectiveError, MeshError, MismatchError
from ftp.runtime import shared_memory, shared_pages
from ftp.runtime.process_groups import memory_of
from ftp.runtime.shared_memory import SLOT_BYTES
from ftp.sharding.mesh import resolve

pytestmark = pytest.mark.dist
ASKED = {"FTP_SHM": "1"}


def _mesh():
    return ftp.make_mesh((int(os.environ["WORLD_SIZE"]),), ("tp",), device_type="cpu")


def _collectives() -> list[str]:
    (group,) = memory_of(resolve(_mesh())).values()
    bad = []
    for dtype in (torch.float32, torch.float64, torch.int64):
        for n in (1, 7, 1000, SLOT_BYTES // 4 * 2 + 3, 0):
            for op, of_torch in (
                ("sum", dist.ReduceOp.SUM),
                ("max", dist.ReduceOp.MAX),
                ("min", dist.ReduceOp.MIN),
            ):
                x = ((torch.arange(n) * (dist.get_rank() + 3)) % 17 - 8).to(dtype)
                expected, kept = x.clone(), x.clone()
                dist.all_reduce(expected, of_torch)
                if not torch.equal(group.all_reduce(x, op), expected) or not torch.equal(x, kept):
                    bad.append(f"{op} of {n} {dtype}")
    n_ranks = dist.get_world_size()
    for dtype in (torch.float32, torch.float64, torch.int64, torch.bfloat16, torch.bool):
        for rows in (1, 5, SLOT_BYTES // 8 + 3, 0):
            part = ((torch.arange(rows * 3).reshape(rows, 3) * (dist.get_rank() + 3)) % 17 - 8).to(
                dtype
            )
            expected = part.new_empty(n_ranks * rows, 3)
            dist.all_gather_into_tensor(expected, part)
            if not torch.equal(group.all_gather(part), expected):
                bad.append(f"all_gather of {rows} rows of {dtype}")
            whole = torch.cat(
                [part + r if dtype is not torch.bool else part for r in range(n_ranks)]
            )
            expected = torch.empty_like(whole)
            dist.all_to_all_single(expected, whole)
            if not torch.equal(group.all_to_all(whole), expected):
                bad.append(f"all_to_all of {rows} rows of {dtype}")
            if dtype in (torch.float32, torch.float64, torch.int64):
                total = whole.clone()
                dist.all_reduce(total)
                if not torch.equal(
                    group.reduce_scatter(whole, "sum"),
                    total.chunk(n_ranks)[dist.get_rank()] if rows else part,
                ):
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


@pytest.mark.parametrize("n", slow_after(1, [3, 2]))
def test_collectives_equal_gloos(n: int):
    ranks = launch(_collectives, n, env=ASKED)
    assert [r.value for r in ranks] == [[]] * n, [r.error or r.stderr[-2000:] for r in ranks]


def _loss(params, x):
    return (x @ params["a"] @ params["b"]).square().sum()


def _step(dies: bool):
    mesh = _mesh()
    specs = {"a": P(None, "tp"), "b": P("tp")}
    full = {
        "a": torch.arange(15.0, dtype=torch.float64).reshape(3, 5) / 7,
        "b": torch.ones(5, 2, dtype=torch.float64),
    }
    x = torch.ones(4, 3, dtype=torch.float64)
    zero = ftp.shard(_loss, mesh, {"a": P("tp"), "b": P("tp")}, batch_specs=P("tp"))
    cut = ftp.device_put(full, mesh, P("tp"))
    rows = ftp.device_put(x, mesh, P("tp"))
    loss, grads = zero(cut, rows)
    expected = torch.func.grad(_loss)(full, x)
    assert torch.allclose(loss, _loss(full, x), rtol=1e-12)
    grads = ftp.device_get(grads, mesh, P("tp"))
    assert all(torch.allclose(grads[k], expected[k], rtol=1e-12) for k in full)
    assert {"all_gather_in_memory", "reduce_scatter_in_memory"} <= set(
        _kinds(lambda: zero(cut, rows)).replace("ftp::", "").split()
    )
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
    except CollectiveError as e:
        return str(e), time.monotonic() - start
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
    w, x = (
        torch.arange(6.0, dtype=torch.float64).reshape(3, 2),
        torch.arange(24.0, dtype=torch.float64).reshape(8, 3) / 7,
    )
    step = ftp.shard(lambda w, x: (x @ w).square().sum(), mesh, P(), batch_specs=cut, bucket=True)
    mine = ftp.device_put(x, mesh, cut)
    loss, grads = step(w, mine)
    assert torch.allclose(loss, (x @ w).square().sum(), rtol=1e-12) and torch.allclose(
        grads, 2 * x.t() @ x @ w, rtol=1e-12
    )
    kinds = _kinds(lambda: step(w, mine))
    dist.barrier()
    dist.destroy_process_group()
    return kinds.count("all_reduce_in_memory") == 1 and "gloo" not in kinds


def test_collectives_over_a_product_of_axes_go_through_memory():
    assert [r.value for r in launch(_over_two_axes, 4, env=ASKED)] == [True] * 4


def test_a_rank_that_ends_makes_the_others_raise():
    *others, last = launch(_step, 2, True, env=ASKED)
    assert last.exit == 9
    for rank in others:
        error, seconds = rank.value
        at = r"\S*test_shared_memory.py:\d+  return \(x @ params"
        where = rf"all_reduce over tp of float64\[(4, 2)?\] at {at}"
        assert re.match(rf"Call \d+ on the mesh \(tp 2\) on cpu failed in {where}", error), error
        assert re.search("Rank 1 (does not answer|has ended|has been killed)", error), error
        assert seconds < 10


def _small(**options):
    """A step of a perceptron, its arguments and its loss on one device."""
    if not dist.is_initialized():
        ftp.init_process_group(device_type="cpu", **options)
    mesh = _mesh()
    params, x = {"a": torch.ones(3, 4), "b": torch.ones(4, 2)}, torch.ones(4, 3)
    specs = {"a": P(None, "tp"), "b": P("tp")}
    return ftp.shard(_loss, mesh, specs), ftp.device_put(params, mesh, specs), x, _loss(params, x)


def _without_room() -> tuple[bool, str, list[str]]:
    step, params, x, expected = _small()
    if dist.get_rank() == 0:
        # Shared memory is a file to the system.
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        losses = [step(params, x)[0] for _ in range(2)]
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    kinds = _kinds(lambda: step(params, x))
    ftp.destroy_process_group()
    return (
        all(torch.equal(loss, expected) for loss in losses),
        kinds,
        [str(w.message) for w in caught],
    )


def test_where_one_rank_has_no_room_all_stay_with_gloo_and_say_so():
    for rank in launch(_without_room, 2, env=ASKED):
        assert rank.exit == 0, rank
        right, kinds, said = rank.value
        assert right and "in_memory" not in kinds
        assert said == [
            "FTP_SHM=1, but the collectives of the mesh (tp 2) on cpu stay with gloo:"
            " rank 0 has no memory to share ([Errno 27] File too large)."
        ]


def _asked_by_one() -> tuple[str, float, bool]:
    os.environ["FTP_SHM"] = "1" if os.environ["RANK"] == "0" else "0"
    step, params, x, expected = _small()
    start, error = time.monotonic(), ""
    try:
        step(params, x)
    except MismatchError as e:
        error = str(e)
    seconds = time.monotonic() - start
    os.environ["FTP_SHM"] = "1"
    right = torch.equal(step(params, x)[0], expected)
    ftp.destroy_process_group()
    return error, seconds, right


def test_ranks_that_do_not_all_ask_for_it_are_told_at_once():
    for rank in launch(_asked_by_one, 2):
        assert rank.exit == 0, rank
        error, seconds, right = rank.value
        assert error.startswith(
            "Ranks disagree on the environment of call 1: rank 1 differs from rank 0,"
        ), error
        assert "\n  rank 0: FTP_SHM=1\n  rank 1: FTP_SHM=0\n" in error
        assert seconds < 10 and right


def _killed_while_it_starts() -> tuple[str, float]:
    ftp.init_process_group(device_type="cpu", timeout=3.0)
    mesh = ftp.make_mesh((2, 2), ("dp", "tp"), device_type="cpu")
    specs = {"a": P(None, "tp"), "b": P("tp")}
    step = ftp.shard(_loss, mesh, specs, batch_specs=P("dp"))
    params = ftp.device_put({"a": torch.ones(3, 4), "b": torch.ones(4, 2)}, mesh, specs)
    x = ftp.device_put(torch.ones(4, 3), mesh, P("dp"))
    if dist.get_rank() == 2:  # the first of its group, which has made the memory by then
        exchange = shared_pages.exchange
        shared_pages.exchange = lambda mesh, key, value: (
            os.kill(os.getpid(), signal.SIGKILL)
            if key == "shared memory"
            else exchange(mesh, key, value)
        )
    start = time.monotonic()
    try:
        step(params, x)
    except (MismatchError, CollectiveError) as e:
        return str(e), time.monotonic() - start
    return "", 0.0


def test_a_rank_killed_while_it_starts_leaves_nothing_and_is_named_in_time():
    folders = [folder for folder in ("/dev/shm", tempfile.gettempdir()) if os.path.isdir(folder)]
    before = {os.path.join(folder, name) for folder in folders for name in os.listdir(folder)}
    ranks = launch(_killed_while_it_starts, 4, env=ASKED)
    assert ranks.pop(2).exit == -signal.SIGKILL
    for rank in ranks:
        error, seconds = rank.value
        # Its end is noticed, by one rank or by two at once, or in a process namespace of its own
        # its absence.
        assert re.search(
            "Rank 2 (has been killed|has ended: its process|never came to exchange"
            " 'shared memory')",
            error,
        ), rank
        assert seconds < 8
    now = {os.path.join(folder, name) for folder in folders for name in os.listdir(folder)}
    assert not [name for name in now - before if "ftp-" in name and os.path.isfile(name)]


def _begun_again() -> tuple[list[bool], str, int]:
    right, error, old = [], "", None
    for port in os.environ["PORTS"].split():
        os.environ["MASTER_PORT"] = port
        step, params, x, expected = _small()
        right += [torch.equal(step(params, x)[0], expected) for _ in range(2)]
        if old is not None:
            error = _refused(old, params, x)
        ftp.destroy_process_group()
        old = step
    return right, f"{error}\n{_refused(old, params, x)}", len(shared_memory._groups)


def _refused(step, *args) -> str:
    try:
        step(*args)
    except MeshError as e:
        return str(e)
    return "it ran"


@pytest.mark.parametrize("asked", ["0", "1"])
def test_a_step_of_a_group_that_is_destroyed_is_refused(asked: str):
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    ports = " ".join(str(s.getsockname()[1]) for s in sockets)
    for s in sockets:
        s.close()
    text = (
        "The process group of the mesh (tp 2) on cpu is destroyed."
        " Make the mesh, and the steps on it, anew after init_process_group."
    )
    for rank in launch(_begun_again, 2, env={"FTP_SHM": asked, "PORTS": ports}):
        assert rank.exit == 0, rank
        assert rank.value == ([True] * 4, f"{text}\n{text}", 0)
