"""Ranks that agree and ranks that do not, on gloo processes."""

import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from launch import launch
from torch.distributed.device_mesh import DeviceMesh

import ftp
from ftp.distributed.calls import calls, exchange
from ftp.sharding.make_mesh import make_mesh
from ftp.sharding.mesh import resolve

pytestmark = pytest.mark.dist


def _mesh(shape=None, names=("tp",)):
    return resolve(make_mesh(shape or (int(os.environ["WORLD_SIZE"]),), names, device_type="cpu"))


def _all_reduce(mesh, axis="tp"):
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.all_reduce(torch.ones(4), "sum", mesh.group_name(axis)))


def _run(mesh, program, payload=None, timeout=20.0):
    """A step as the engine makes it."""
    record = calls(mesh)
    call = record.next()
    if payload is not None:
        record.agree(call, payload, timeout)
    with record.running(program, timeout=timeout):
        return _all_reduce(mesh)


def _seconds(fn, *args):
    start = time.monotonic()
    fn(*args)
    return time.monotonic() - start


def _agreeing():
    mesh = _mesh()
    _run(mesh, "a", {"program": "a", "specs": "s"})
    replanning = min(_seconds(_run, mesh, f"p{i}", {"program": f"p{i}"}) for i in range(10))
    switching = min(_seconds(_run, mesh, f"p{8 + i % 2}") for i in range(20))
    record = calls(mesh)
    start = time.monotonic()
    for _ in range(10000):
        with record.running("p9"):
            pass
    noting = (time.monotonic() - start) / 10000
    values = [exchange(mesh, "sum", f"{mesh.rank} {turn}", 20.0) for turn in range(2)]
    dist.barrier()
    dist.destroy_process_group()
    return replanning, switching, noting, values


def test_ranks_that_agree():
    ranks = launch(_agreeing, 3)
    assert [r.exit for r in ranks] == [0, 0, 0], ranks
    assert [r.stderr for r in ranks] == [""] * 3
    for rank in ranks:
        replanning, switching, noting, values = rank.value
        assert replanning < 0.1
        assert switching < 0.1
        assert noting < 1e-4
        assert values == [["0 0", "1 0", "2 0"], ["0 1", "1 1", "2 1"]]


def _differing():
    mesh = _mesh()
    batch = 6 if mesh.rank == 1 else 8
    _run(
        mesh,
        f"p{batch}",
        {
            "library version": "1",
            "input shapes": f"{'params ' * 50}batch[0]: ({batch}, 32)",
            "program": f"p{batch}",
        },
    )


def test_ranks_that_differ_are_named():
    ranks = launch(_differing, 3)
    assert [r.exit for r in ranks] == [1, 1, 1]
    assert len({r.error for r in ranks}) == 1
    error = ranks[0].error or ""
    assert error.startswith(
        "MismatchError: Ranks disagree on the input shapes of call 1: rank 1 differs from rank 0,"
        " so no rank runs it.\n"
    )
    assert "params batch[0]: (8, 32)\n  rank 1: ..." in error
    assert "params batch[0]: (6, 32)\n" in error
    assert max(r.seconds for r in ranks) < 10


def _failing():
    mesh = _mesh()
    with pytest.raises(Exception, match="no plan") as failure:
        _run(mesh, "p", ValueError("no plan\nfor this") if mesh.rank == 1 else {"program": "p"})
    # The groups are whole, and ranks go on in step.
    first, value = f"{failure.type.__name__}: {failure.value}", _run(mesh, "q", {"program": "q"})
    dist.barrier()
    dist.destroy_process_group()
    return first, value.tolist()


def test_a_rank_that_fails_to_plan():
    ranks = launch(_failing, 3)
    assert [r.exit for r in ranks] == [0, 0, 0], ranks
    theirs = (
        "MismatchError: Rank 1 failed to plan call 1, so no rank runs it. Its error:\n "
        " ValueError: no plan\n  for this"
    )
    assert [r.value[0] for r in ranks] == [theirs, "ValueError: no plan\nfor this", theirs]
    assert all(r.value[1] == [3.0] * 4 for r in ranks)


def _absent():
    mesh = _mesh()
    _run(mesh, "p", {"program": "p"})
    if mesh.rank == 1:
        time.sleep(4)
        dist.destroy_process_group()
    else:
        _run(mesh, "q", {"program": "q"}, timeout=1.5)


def test_a_rank_that_never_arrives_is_named():
    ranks = launch(_absent, 2)
    assert [r.exit for r in ranks] == [1, 0], ranks
    assert (ranks[0].error or "").startswith(
        "MismatchError: Rank 1 never arrived: rank 0 waited 1.5 s to agree on the program of call"
        " 2.\n"
        "  Rank 1 has not come to it: its last call is number 1, of program p.\n"
    )


def _absent_from_a_save(folder):
    dist.init_process_group("gloo", timeout=timedelta(seconds=1.5))
    mesh = _mesh()
    if dist.get_rank() == 1:
        time.sleep(4)
        dist.destroy_process_group()
    else:
        ftp.save(folder, {"w": torch.ones(2)}, mesh)


def test_a_save_waits_as_long_as_the_users_process_group(tmp_path):
    ranks = launch(_absent_from_a_save, 2, str(tmp_path))
    assert [r.exit for r in ranks] == [1, 0], ranks
    assert "Rank 1 never came to exchange 'save', in 1.5 s" in (ranks[0].error or "")


def _going_on(planner, linger, switch):
    mesh = _mesh()
    _run(mesh, "old", {"program": "old"})
    _run(mesh, "old")
    start = time.monotonic()
    try:
        _run(
            mesh, "new", {"program": "new"} if not switch else None
        ) if mesh.rank == planner else _run(mesh, "old")
    except Exception as error:
        seconds = time.monotonic() - start
        time.sleep(linger)
        again = None
        try:
            _run(mesh, "old")
        except Exception as e:
            again = type(e).__name__
        return type(error).__name__, str(error), seconds, again


@pytest.mark.parametrize(("planner", "switch"), [(0, False), (1, True)])
def test_a_rank_that_plans_anew_while_others_go_on(planner, switch):
    ranks = launch(_going_on, 3, planner, 1.0, switch)
    assert [r.exit for r in ranks] == [0, 0, 0], ranks
    for rank in ranks:
        kind, message, seconds, again = rank.value
        assert kind == again == "MismatchError"
        assert f"Rank {planner} changes its program at call 3, but rank " in message
        assert "goes on with the program of its last call (old) at call 3" in message
        assert seconds < 15  # it waits 20 s where nobody tells


def _ending_at_once(planner):
    mesh = _mesh()
    _run(mesh, "old", {"program": "old"})
    _run(
        mesh,
        "new" if mesh.rank == planner else "old",
        {"program": "new"} if mesh.rank == planner else None,
    )


@pytest.mark.parametrize("planner", [0, 1])
def test_processes_that_end_at_the_error(planner):
    ranks = launch(_ending_at_once, 2, planner)
    assert [r.exit for r in ranks] == [1, 1], ranks
    assert all(
        (r.error or "").startswith(f"MismatchError: Rank {planner} changes its program at call 2")
        for r in ranks
    ), ranks


def _failing_while_others_go_on():
    mesh = _mesh()
    _run(mesh, "old", {"program": "old"})
    _run(mesh, "old", ValueError("bad batch") if mesh.rank == 0 else None)


def test_a_rank_that_fails_while_others_go_on():
    ranks = launch(_failing_while_others_go_on, 2)
    assert ranks[0].error == "ValueError: bad batch"
    assert ranks[1].error == (
        "MismatchError: Rank 0 failed to plan call 2, so no rank runs it. Its"
        " error:\n  ValueError: bad batch"
    )


def _axes():
    mesh = make_mesh((2, 2), ("dp", "tp"), device_type="cpu")
    assert isinstance(mesh, DeviceMesh)
    whole, line = resolve(mesh), resolve(mesh["tp"])
    found = []
    for view, axis in ((whole, "dp"), (whole, "tp"), (line, "tp")):
        ops = torch.ops._c10d_functional
        ranks = ops.wait_tensor(
            ops.all_gather_into_tensor(torch.tensor([whole.rank]), 2, view.group_name(axis))
        )
        found.append(ranks.tolist())
    # Agreements of a submesh are its own.
    calls(line).agree(1, {"program": f"of line {line.ranks}"}, 20.0)
    calls(whole).agree(1, {"program": "of all"}, 20.0)
    dist.barrier()
    dist.destroy_process_group()
    return whole.coordinate, line.ranks, found


def test_groups_hold_the_ranks_along_their_axis():
    ranks = launch(_axes, 4)
    assert [r.exit for r in ranks] == [0] * 4, ranks
    for rank, result in enumerate(ranks):
        dp, tp = divmod(rank, 2)
        line = [2 * dp, 2 * dp + 1]
        assert result.value == ({"dp": dp, "tp": tp}, tuple(line), [[tp, 2 + tp], line, line])


def _other_program():
    mesh = make_mesh((2,), ("tp",), device_type="cpu")
    scale = 1 + dist.get_rank()
    ftp.spmd(lambda x: x.sum() * scale if scale > 1 else x.sum(), mesh)(torch.ones(3))


def test_the_first_difference_of_two_programs_is_shown():
    ranks = launch(_other_program, 2)
    for rank in ranks:
        assert rank.exit and "MismatchError: Ranks disagree on the program of call 1" in str(
            rank
        ), rank
        assert "aten.mul" in str(rank).split("rank 1: ")[-1], rank


def test_launch_reports_hangs_and_deaths():
    ranks = launch(
        "import os, time\nprint('rank', os.environ['RANK'])\nos.abort() if os.environ['RANK'] =="
        " '0' else time.sleep(60)",
        2,
        timeout=1.0,
    )
    assert [r.exit for r in ranks] == [-6, None]


def _planned_on(each_its_own: bool):
    """A step on ranks that torchrun would have put on a host each."""
    rank = int(os.environ["RANK"])
    os.environ["GROUP_RANK"] = str(rank)
    mesh = make_mesh((2,), ("tp",), device_type="cpu")
    own = ftp.Hardware(flops=1e12 * (1 + rank))
    step = ftp.spmd(
        lambda x: x.sum(), mesh, ftp.P("tp"), ftp.P(), hardware=own if each_its_own else None
    )
    x = torch.ones(2)
    before = step.lower(x).cost().hardware.links
    return float(step(x)), before, step.lower(x).cost().hardware.links["tp"].bandwidth


def test_ranks_agree_on_the_hardware_and_learn_their_hosts():
    for rank in launch(_planned_on, 2, False):
        assert rank.value == (4.0, {}, ftp.Hardware().network.bandwidth), rank
    for rank in launch(_planned_on, 2, True):
        assert rank.error is not None and rank.error.startswith("MismatchError"), rank
        assert "disagree on the hardware" in rank.error, rank.error
