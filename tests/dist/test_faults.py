"""What happens to the others when a rank is killed, stops, comes late, ends, differs or drifts apart; on gloo processes."""

import os
import re
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dist.launch import launch  # type: ignore[import-not-found]

import ftp
from ftp import P

pytestmark = pytest.mark.dist


def _mesh(shape, names, **options):
    ftp.init_process_group(device_type="cpu", **options)
    return ftp.make_mesh(shape, names, device_type="cpu")


_strike = []


@torch.library.custom_op("test_faults::strike", mutates_args=())
def strike(x: torch.Tensor) -> torch.Tensor:
    """The place in a step at which a rank is killed."""
    if _strike:
        os.kill(os.getpid(), signal.SIGKILL)
    return x.clone()


strike.register_fake(torch.empty_like)
ftp.pointwise(torch.ops.test_faults.strike.default, linear=[(0,)])


class _Strike(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return strike(x)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *grads):
        return grads[0]


def _loss(params, x):
    hidden = torch.tanh(x @ params["up"])
    return _Strike.apply(torch.tanh(hidden @ params["down"])).square().mean()


def _step(mesh, **options):
    specs = {"up": P(None, "tp"), "down": P("tp")}
    params = {"up": torch.ones(4, 6), "down": torch.ones(6, 4)}
    data = P("dp") if "dp" in (mesh.mesh_dim_names or ()) else P()
    batch = ftp.device_put(torch.arange(16.0).reshape(4, 4), mesh, data)
    return ftp.shard(_loss, mesh, specs, batch_specs=data, **options), ftp.device_put(params, mesh, specs), batch


def _caught(fn, *args):
    """The error as text and the seconds it took to come."""
    start = time.monotonic()
    try:
        fn(*args)
    except Exception as e:
        return f"{type(e).__name__}: {e}", time.monotonic() - start
    return None, time.monotonic() - start


def _killed():
    mesh = _mesh((2, 2), ("dp", "tp"))
    step, params, batch = _step(mesh)
    for _ in range(2):
        step(params, batch)
    if dist.get_rank() == 3:
        _strike.append(1)
    # The ranks that share no collective of this step with it get to the next one.
    return _caught(lambda: [step(params, batch) for _ in range(3)])


def test_a_rank_killed_in_mid_step_is_named_by_all_others():
    *others, killed = launch(_killed, 4)
    assert killed.exit == -signal.SIGKILL
    for rank in others:
        assert rank.exit == 0, rank
        error, seconds = rank.value
        assert re.match(r"CollectiveError: Call [34] on the mesh \(dp 2, tp 2\) on cpu failed in all_reduce over (dp|tp) of float32", error)
        assert " at dist/test_faults.py:" in error
        assert ": Rank 3 does not answer: killed, stopped, or cut off.\n  Restart from the last checkpoint" in error
        assert seconds < 15


def _late_and_stopped():
    mesh = _mesh((3,), ("tp",), timeout=60.0, step_timeout=2.0)
    pids: list[Any] = [None] * 3
    dist.all_gather_object(pids, os.getpid())
    step, params, batch = _step(mesh)
    step(params, batch)
    if dist.get_rank() == 1:
        time.sleep(7.0)
    if dist.get_rank() == 2:
        os.kill(os.getpid(), signal.SIGSTOP)
    error = _caught(step, params, batch)
    if dist.get_rank() == 0:
        os.kill(pids[2], signal.SIGCONT)
        time.sleep(2.0)  # it holds the store that the others read the verdict from
    return error


def test_a_rank_that_hangs_is_told_from_one_that_is_late():
    ranks = launch(_late_and_stopped, 3)
    assert [r.exit for r in ranks] == [0, 0, 0], ranks
    error, seconds = ranks[0].value
    assert "Rank 2 does not answer: killed, stopped, or cut off. Rank 1 has not come to it: its last call is number 1.\n" in error
    assert 2.0 < seconds < 10.0
    for rank in ranks[1:]:
        assert "Rank 2 does not answer" in (rank.value[0] or ""), rank
        assert rank.value[1] < 10.0


def _ended():
    mesh = _mesh((2,), ("tp",))
    step, params, batch = _step(mesh)
    step(params, batch)
    if dist.get_rank() == 1:
        raise ValueError("a bad file")
    return _caught(step, params, batch)


def test_a_rank_that_ended_is_named():
    first, second = launch(_ended, 2)
    assert second.error == "ValueError: a bad file"
    error, seconds = first.value
    assert "failed in all_reduce over tp" in error and "Rank 1 has ended after call 1" in error
    assert seconds < 10


def _differing():
    """One rank after another difference; none of them harms the process groups, so each may be mended."""
    mesh = _mesh((2,), ("tp",))
    odd = dist.get_rank() == 1
    found = {}
    module = __import__("ftp.step", fromlist=["step"])
    version = module.__version__
    module.__version__ = "0.0.9" if odd else version
    step, params, batch = _step(mesh)
    found["library version"] = _caught(step, params, batch)
    module.__version__ = version
    whole = {"up": torch.ones(4, 6), "down": torch.ones(6, 4)}
    found["specs"] = _caught(ftp.shard(_loss, mesh, {"up": P(), "down": P("tp") if odd else P()}), whole, batch)

    def constrained(params, x):
        hidden = x @ params["up"]
        return (ftp.constrain(hidden, P(None, "tp")) if odd else hidden).square().mean()

    found["program"] = _caught(ftp.shard(constrained, mesh, P()), whole, batch)
    found["batch shape"] = _caught(step, params, batch[: 3 if odd else 4])
    found["dtype"] = _caught(step, params, batch.double() if odd else batch)
    found["right again"] = _caught(step, params, batch)
    ftp.destroy_process_group()
    return found


def test_a_rank_that_differs_is_refused_on_all_ranks():
    ranks = launch(_differing, 2)
    assert [r.exit for r in ranks] == [0, 0], ranks
    for rank in ranks:
        found = rank.value
        for name in ("library version", "specs", "program"):
            assert found[name][0].startswith(f"MismatchError: Ranks disagree on the {name} of call 1: rank 1 differs from rank 0"), found
        assert (
            "MismatchError: x, of spec P(), is not the shards of one tensor: rank 0 holds (4, 4), rank 1 (3, 4)." in found["batch shape"][0]
        )
        assert "MismatchError: x is float32 on rank 0, but float64 on rank 1." in found["dtype"][0]
        assert found["right again"][0] is None
        assert max(seconds for _, seconds in found.values()) < 15  # planning included


def _drifting():
    mesh = _mesh((2, 2), ("dp", "tp"))
    rank = dist.get_rank()
    specs = {"norm": P(), "w": P("tp"), "both": P("tp", "dp"), "n": P()}
    tree = {"norm": torch.ones(6), "w": torch.arange(10.0).reshape(5, 2), "both": torch.ones(4, 4), "n": 3}
    tree = ftp.device_put(tree, mesh, specs)
    found: dict[str, Any] = {"good": _caught(lambda: ftp.check_replicas(tree, mesh, specs, step=1))}
    if rank == 3:
        tree["norm"] *= 1 + 1e-6
        tree["both"] += 1.0  # no other rank holds this part
    if rank == 2:
        tree["w"][-1, -1] = -7.0
    found["bad"] = _caught(lambda: ftp.check_replicas(tree, mesh, specs, step=200))

    step, params, batch = _step(mesh, check_inputs=True)
    found["good inputs"] = _caught(step, params, batch)
    other = batch + 1 if rank == 1 else batch
    found["batch"] = _caught(step, params, other)
    scale = torch.tensor([1.0, 2.0 + rank // 2])
    scaled = ftp.shard(lambda params, x: _loss(params, x) * scale.sum(), mesh, P(), batch_specs=P("dp"), check_inputs=True)
    whole = {"up": torch.ones(4, 6), "down": torch.ones(6, 4)}
    found["constant"] = _caught(scaled, whole, batch)
    source = {"w": torch.full((4, 4), float(rank == 0))}
    found["source"] = _caught(lambda: ftp.device_put(source, mesh, P("tp"), check_inputs=True))
    counted = []
    plain = dist.all_reduce
    dist.all_reduce = lambda *args, **kwargs: counted.append(1) or plain(*args, **kwargs)
    _step(mesh)[0](params, other)
    dist.all_reduce = plain
    found["off"] = (len(counted), 0.0)
    ftp.destroy_process_group()
    return found


SAME = "Give the ranks that share a value one copy: ftp.device_put(tree, mesh, specs, src=0)."


def test_copies_that_differ_are_named():
    ranks = launch(_drifting, 4)
    assert [r.exit for r in ranks] == [0] * 4, ranks
    assert all({k: v[0] for k, v in r.value.items()} == {k: v[0] for k, v in ranks[0].value.items()} for r in ranks)
    found = {k: v[0] for k, v in ranks[0].value.items()}
    assert found["good"] is None and found["good inputs"] is None and found["off"] == 0
    assert found["bad"] == (
        "ReplicaError: tree['norm'] is not the same at step 200 on ranks that share it: rank 3 differs from ranks 0, 1, 2.\n"
        f"tree['w'], of spec P('tp'), is not the same at step 200 on ranks that share it: rank 2 differs from rank 0.\n{SAME}"
    )
    assert found["batch"] == (
        f"ReplicaError: x, of spec P('dp'), is not the same at call 4 on ranks that share it: rank 1 differs from rank 0.\n{SAME}"
    )
    assert found["constant"].startswith("ReplicaError: closure constant 0, a tensor of shape (2,), is not the same"), found
    assert "ranks 2, 3 differ from ranks 0, 1" in found["constant"]
    assert found["source"] == (
        "ReplicaError: tree['w'], a source of device_put is not the same on ranks that share it: rank 0 differs from ranks 1, 2, 3.\n"
        + SAME
    )
