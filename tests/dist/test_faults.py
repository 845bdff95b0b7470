"""What happens to the others when a rank is killed, stops, comes late, ends, differs or drifts
apart; on gloo processes.
"""

import contextlib
import os
import re
import signal
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from few_or_many import slow_after
from launch import launch

import ftp
from ftp import P
from ftp.distributed.calls import calls
from ftp.errors import CollectiveError, MismatchError
from ftp.sharding.mesh import resolve

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
    return (
        ftp.shard(_loss, mesh, specs, batch_specs=data, **options),
        ftp.device_put(params, mesh, specs),
        batch,
    )


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
        assert re.match(
            r"CollectiveError: Call [34] on the mesh \(dp 2, tp 2\) on cpu failed in all_reduce"
            r" over (dp|tp) of float32",
            error,
        )
        assert " at tests/dist/test_faults.py:" in error
        assert re.search(
            r": Rank 3 has been killed, or has ended without a word: its process, \d+ on .*, is"
            r" gone\.\n  Restart from",
            error,
        )
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
    assert (
        "Rank 2 does not answer: killed, stopped, or cut off. Rank 1 has not come to it: its last"
        " call is number 1."
        " Rank 0 waited 2 s for it, as long as step_timeout= of ftp.init_process_group says.\n"
    ) in error
    assert 2.0 < seconds < 15.0  # the timeout, 3 s for an answer, and a busy machine
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
    """One rank after another difference; none of them harms the process groups, so each may be
    mended.
    """
    mesh = _mesh((2,), ("tp",))
    odd = dist.get_rank() == 1
    found = {}
    module = __import__("ftp.api.step", fromlist=["Step"])
    version = module.__version__
    module.__version__ = "0.0.9" if odd else version
    step, params, batch = _step(mesh)
    found["library version"] = _caught(step, params, batch)
    module.__version__ = version
    whole = {"up": torch.ones(4, 6), "down": torch.ones(6, 4)}
    found["specs"] = _caught(
        ftp.shard(_loss, mesh, {"up": P(), "down": P("tp") if odd else P()}), whole, batch
    )

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
            assert found[name][0].startswith(
                f"MismatchError: Ranks disagree on the {name} of call 1: rank 1 differs from rank 0"
            ), found
        assert (
            "MismatchError: x, of spec P(), is not the shards of one tensor: rank 0 holds (4, 4),"
            " rank 1 (3, 4)." in found["batch shape"][0]
        )
        assert "MismatchError: x is float32 on rank 0, but float64 on rank 1." in found["dtype"][0]
        assert found["right again"][0] is None
        assert max(seconds for _, seconds in found.values()) < 15  # planning included


def _drifting():
    mesh = _mesh((2, 2), ("dp", "tp"))
    rank = dist.get_rank()
    specs = {"norm": P(), "w": P("tp"), "both": P("tp", "dp"), "n": P()}
    tree = {
        "norm": torch.ones(6),
        "w": torch.arange(10.0).reshape(5, 2),
        "both": torch.ones(4, 4),
        "n": 3,
    }
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
    scaled = ftp.shard(
        lambda params, x: _loss(params, x) * scale.sum(),
        mesh,
        P(),
        batch_specs=P("dp"),
        check_inputs=True,
    )
    whole = {"up": torch.ones(4, 6), "down": torch.ones(6, 4)}
    found["constant"] = _caught(scaled, whole, batch)
    source = {"w": torch.full((4, 4), float(rank == 0))}
    found["source"] = _caught(lambda: ftp.device_put(source, mesh, P("tp"), check_inputs=True))
    counted = []
    plain = dist.all_reduce
    unchecked = _step(mesh)[0]
    unchecked(params, batch)
    dist.all_reduce = lambda *args, **kwargs: counted.append(1) or plain(*args, **kwargs)
    unchecked(params, other)
    dist.all_reduce = plain
    found["off"] = (len(counted), 0.0)
    ftp.destroy_process_group()
    return found


SAME = "Give the ranks that share a value one copy: ftp.device_put(tree, mesh, specs, src=0)."


def test_copies_that_differ_are_named():
    ranks = launch(_drifting, 4)
    assert [r.exit for r in ranks] == [0] * 4, ranks
    assert all(
        {k: v[0] for k, v in r.value.items()} == {k: v[0] for k, v in ranks[0].value.items()}
        for r in ranks
    )
    found = {k: v[0] for k, v in ranks[0].value.items()}
    assert found["good"] is None and found["good inputs"] is None and found["off"] == 0
    assert found["bad"] == (
        "ReplicaError: tree['norm'] is not the same at step 200 on ranks that share it: rank 3"
        " differs from ranks 0, 1, 2.\n"
        "tree['w'], of spec P('tp'), is not the same at step 200 on ranks that share it: rank 2"
        f" differs from rank 0.\n{SAME}"
    )
    assert found["batch"] == (
        "ReplicaError: x, of spec P('dp'), is not the same at call 4 on ranks that share it: rank"
        f" 1 differs from rank 0.\n{SAME}"
    )
    assert found["constant"].startswith("ReplicaError: 'scale', which <lambda> (tests/dist/")
    assert "reads, a tensor of shape (2,), is not the same" in found["constant"]
    assert "ranks 2, 3 differ from ranks 0, 1" in found["constant"]
    assert found["source"] == (
        "ReplicaError: tree['w'], a source of device_put is not the same on ranks that share it:"
        " rank 0 differs from ranks 1, 2, 3.\n" + SAME
    )


def _unseeded():
    """What a first call says where each rank has drawn from a seed of its own."""
    mesh = _mesh((2, 2), ("dp", "tp"), timeout=20.0)
    torch.manual_seed(dist.get_rank())
    drawn = {"w": torch.randn(4, 6), "norm": torch.randn(6)}
    specs = {"w": P("tp"), "norm": P()}
    batch = torch.randn(8, 4)

    def loss(params, x):
        return (x @ params["w"] * params["norm"]).square().mean()

    step = ftp.shard(loss, mesh, specs, batch_specs=P("dp"))
    mine, alike = ftp.device_put(drawn, mesh, specs), ftp.device_put(drawn, mesh, specs, src=0)
    found = [
        _caught(step, mine, ftp.device_put(batch, mesh, P("dp"), src=0))[0],
        _caught(step, alike, batch[:4])[0],
    ]
    scale = torch.randn(5000)
    scaled = ftp.shard(lambda params, x: loss(params, x) * scale.sum(), mesh, specs)
    found.append(_caught(scaled, alike, torch.ones(8, 4))[0])
    scale.fill_(2.0 + dist.get_rank() / 1000)  # a difference that rounding may make
    found.append(_caught(scaled, alike, torch.ones(8, 4))[0])
    # Terms of a pending sum are no copies.
    terms = ftp.device_put(torch.ones(4, 4), mesh, P(unreduced="dp"))
    found.append(_caught(lambda: ftp.check_replicas(terms, mesh, P(unreduced="dp")))[0])
    ftp.destroy_process_group()
    return found


def test_ranks_that_draw_from_seeds_of_their_own_are_named_at_the_first_call():
    ranks = launch(_unseeded, 4)
    assert [r.exit for r in ranks] == [0] * 4, ranks
    assert all(r.value == ranks[0].value for r in ranks)
    found = [v and re.sub(r"at call \d+", "at call n", v) for v in ranks[0].value]
    params, batch, scale, filled, terms = found
    seeds = f"{SAME}\nWhere ranks draw a value, seed them alike: torch.manual_seed."
    assert params == (
        "ReplicaError: params['norm'] is not the same at call n on ranks that share it: ranks 1, 2,"
        " 3 differ from rank 0.\n"
        "params['w'], of spec P('tp'), is not the same at call n on ranks that share it: rank 2"
        " differs from rank 0.\n"
        "params['w'], of spec P('tp'), is not the same at call n on ranks that share it: rank 3"
        f" differs from rank 1.\n{seeds}"
    )
    assert batch == (
        "ReplicaError: x, of spec P('dp'), is not the same at call n on ranks that share it: rank 1"
        " differs from rank 0.\n"
        "x, of spec P('dp'), is not the same at call n on ranks that share it: rank 3 differs from"
        f" rank 2.\n{seeds}"
    )
    assert scale.startswith("ReplicaError: 'scale', which") and scale.endswith(seeds)
    assert filled is None and terms is None


def _tokens(turn):
    return torch.randint(50, (4, 8), generator=torch.Generator().manual_seed(turn))


def _lookup(params, tokens):
    return (torch.nn.functional.embedding(tokens, params["table"]) @ params["w"]).square().mean()


def _skipping(spec, bad_ranks):
    """Losses by turn, and what leaving says; batch 2 has an id out of range on some ranks, and
    the loop goes on after the error.
    """
    mesh = _mesh((2,), ("dp",), timeout=20.0, step_timeout=10.0)
    table = torch.arange(200, dtype=torch.float64).reshape(50, 4) / 100
    whole = {"table": table, "w": torch.ones(4, 3, dtype=torch.float64)}
    step, params = (
        ftp.shard(_lookup, mesh, spec, batch_specs=P("dp")),
        ftp.device_put(whole, mesh, spec),
    )
    seen = []
    for turn in range(5):
        tokens = _tokens(turn)
        if turn == 2:
            tokens[[2 * rank for rank in bad_ranks], 0] = 1000
        try:
            loss = step(params, ftp.device_put(tokens, mesh, P("dp")))[0].item()
            assert abs(loss - _lookup(whole, _tokens(turn)).item()) < 1e-9, (turn, loss)
            seen.append("right")
        except (IndexError, CollectiveError, MismatchError) as e:
            seen.append(f"{type(e).__name__}: {e}")
    return seen, _caught(ftp.destroy_process_group)[0], dist.is_initialized()


@pytest.mark.parametrize("spec", [P(), P("dp")])
def test_a_rank_that_skips_a_call_after_an_error_of_its_own_stops_all(spec):
    ranks = launch(_skipping, 2, spec, [0])
    assert [r.exit for r in ranks] == [0, 0], ranks
    (first, *left), (second, *there) = (r.value for r in ranks)
    assert left == there == [None, False]
    assert first[:2] == second[:2] == ["right"] * 2
    assert first[2].startswith("IndexError: index out of range")
    midst = (
        "Rank 0 left call 3 on the mesh (dp 2) on cpu in its midst, with IndexError: index out of"
    )
    why = f"{midst} range in self." if spec else (
        "Rank 0 failed in call 3 before its first collective, with IndexError: index out of range"
        " in self, and makes it anew, but rank 1"
    )  # fmt: skip
    kind = "CollectiveError" if spec else "MismatchError"
    for error in (*first[3:], *second[2:]):
        assert error.startswith(f"{kind}: ") and why in error, (first, second)


def test_an_error_that_all_ranks_have_before_the_first_collective_stops_nothing():
    for rank in launch(_skipping, 2, P(), [0, 1]):
        assert rank.exit == 0, rank
        seen, *left = rank.value
        assert ["right"] * 2 == seen[:2] == seen[3:] and seen[2].startswith("IndexError"), rank
        assert left == [None, False]


def _leaving_after(how):
    """What `destroy_process_group` says of a peer that ended after the last call, without it."""
    mesh = _mesh((2,), ("tp",), timeout=20.0, step_timeout=10.0)
    step, params, batch = _step(mesh)
    step(params, batch)
    if dist.get_rank() == 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        return dist.destroy_process_group()
    return _caught(ftp.destroy_process_group)[0], dist.is_initialized()


@pytest.mark.parametrize("how", ["killed", "left"])
def test_leaving_tells_what_no_call_has_told(how):
    rank, _ = launch(_leaving_after, 2, how)
    assert rank.exit == 0, rank
    error, is_initialized = rank.value
    # The end of the peer's connections may be seen before the end of its process.
    why = "Rank 1 has been killed, or has ended without a word|A rank has ended, or has destroyed"
    assert re.match(f"CollectiveError: ({why})", error) and not is_initialized, error


_interrupts: list[int] = []


@torch.library.custom_op("test_faults::interrupted", mutates_args=())
def interrupted(x: torch.Tensor) -> torch.Tensor:
    """The place in a call at which Ctrl-C comes."""
    if _interrupts:
        raise KeyboardInterrupt
    return x.clone()


interrupted.register_fake(torch.empty_like)
ftp.pointwise(torch.ops.test_faults.interrupted.default, linear=[(0,)])


def _interrupted_in_a_call(folder):
    mesh = _mesh((2,), ("dp",), timeout=20.0, step_timeout=10.0)
    step = ftp.spmd(
        lambda w, x: w + interrupted(w * x.sum()).sum(), mesh, (P("dp"), P("dp")), P("dp")
    )
    w, x = (
        ftp.device_put(torch.zeros(4), mesh, P("dp")),
        ftp.device_put(torch.ones(4), mesh, P("dp")),
    )
    w = step(w, x)
    if dist.get_rank() == 0:
        _interrupts.append(1)
    seen = []
    for _ in range(2):
        try:
            w = step(w, x)
        except (KeyboardInterrupt, CollectiveError) as e:
            seen.append(f"{type(e).__name__}: {e}")
    number = calls(resolve(mesh)).call
    ftp.save(folder, w, mesh, P("dp"), timeout=10.0)
    return seen, number


def test_an_interrupt_in_a_call_stops_calls_but_no_saves(tmp_path):
    first, second = launch(_interrupted_in_a_call, 2, str(tmp_path))
    assert [first.exit, second.exit] == [0, 0], (first, second)
    why = (
        "Rank 0 left call 2 on the mesh (dp 2) on cpu in its midst, with KeyboardInterrupt."
        " Later calls would pair"
    )
    (one, again), number = first.value
    assert (one, number) == ("KeyboardInterrupt: ", 1) and again.startswith(
        f"CollectiveError: {why}"
    )
    seen, number = second.value
    assert len(seen) == 2 and number == 1 and all(why in error for error in seen), second


def _others_end(folder, how):
    """Rank 0 saves, or plans, when rank 1 has ended: after Ctrl-C on rank 0, or by itself."""
    mesh = _mesh((2,), ("dp",), timeout=40.0, step_timeout=10.0)
    step = ftp.spmd(
        lambda w, x: w + interrupted(w * x.sum()).sum(), mesh, (P("dp"), P("dp")), P("dp")
    )
    w, x = (
        ftp.device_put(torch.zeros(4), mesh, P("dp")),
        ftp.device_put(torch.ones(4), mesh, P("dp")),
    )
    w = step(w, x)
    if how == "interrupted":
        if dist.get_rank() == 0:
            _interrupts.append(1)
        with contextlib.suppress(KeyboardInterrupt):
            step(w, x)  # on rank 1 a CollectiveError, with which it ends
    elif dist.get_rank() == 1:
        raise ValueError("a bad file")
    begun = time.monotonic()

    def call():
        if how == "plans":
            step(w[:1], x[:1])
        else:
            ftp.save(folder, w, mesh, P("dp"))

    with pytest.raises(ftp.FtpError) as error:
        call()
    return f"{type(error.value).__name__}: {error.value}", time.monotonic() - begun


@pytest.mark.parametrize("how", ["interrupted", "saves", "plans"])
def test_a_rank_that_has_ended_is_not_waited_for(tmp_path, how: str):
    first, second = launch(_others_end, 2, str(tmp_path), how)
    assert first.exit == 0 and second.error is not None, (first, second)
    error, seconds = first.value
    assert "Rank 1 has ended" in error and "is gone" in error and seconds < 15.0, first
    assert not list(tmp_path.glob("0*"))


def _two_threads(how):
    """What the calls of two threads saw of one step; they call at once, or in turn, in one order
    on all ranks or not.
    """
    mesh = _mesh((2,), ("tp",), timeout=20.0, step_timeout=10.0)
    step, _, x = _step(mesh)
    whole = {
        name: torch.ones(n, 10 - n, dtype=torch.float64) for name, n in (("up", 4), ("down", 6))
    }
    params, x = ftp.device_put(whole, mesh, {"up": P(None, "tp"), "down": P("tp")}), x.double()
    step(params, x)
    seen: list[str] = []
    may_start, has_called, may_end = ([threading.Event(), threading.Event()] for _ in range(3))

    def work(k):
        x = torch.full((4, 4), 0.1 * (k + 1), dtype=torch.float64)
        may_start[k].wait()
        for _ in range(1 if "order" in how else 50):
            try:
                seen.append(
                    "right"
                    if abs(step(params, x)[0].item() - _loss(whole, x).item()) < 1e-9
                    else "WRONG"
                )
            except (MismatchError, CollectiveError) as e:
                seen.append(f"{type(e).__name__}: {e}")
        has_called[k].set()
        may_end[k].wait()

    threads = [threading.Thread(target=work, args=(k,)) for k in range(2)]
    for thread in threads:
        thread.start()
    for k in (1, 0) if how == "another order" and dist.get_rank() else (0, 1):
        may_start[k].set()
        if "order" in how:
            has_called[k].wait()
    for k, thread in enumerate(threads):
        may_end[k].set()
        thread.join()
    return seen


def test_two_threads_at_once_are_refused():
    for rank in launch(_two_threads, 2, "at once"):
        assert rank.exit == 0, rank
        refused = [text for text in rank.value if text != "right"]
        assert refused and "WRONG" not in refused and all("hread" in text for text in refused), rank


def test_threads_that_take_turns_keep_to_one_order():
    for rank in launch(_two_threads, 2, "one order"):
        assert (rank.exit, rank.value) == (0, ["right", "right"]), rank
    for rank in launch(_two_threads, 2, "another order"):
        assert rank.exit == 0, rank
        assert rank.value[0].startswith(
            "MismatchError: Ranks disagree on the calling thread of"
            " call 2: rank 1 differs from rank 0"
        ), rank
        assert "WRONG" not in rank.value, rank


def _pids():
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, os.getpid())
    return found


def _store_holder_stopped(what, folder):
    mesh = _mesh((2,), ("tp",), timeout=3.0, step_timeout=2.0)
    pids = _pids()
    step, params, batch = _step(mesh)
    step(params, batch)
    if dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
        return None
    time.sleep(0.5)
    calls = {
        "step": lambda: step(params, batch),
        "plan": lambda: step(params, torch.ones(5, 4)),
        "save": lambda: ftp.save(folder, params, mesh, {"up": P(None, "tp"), "down": P("tp")}),
    }
    error = _caught(calls[what])
    os.kill(pids[0], signal.SIGCONT)
    return error


@pytest.mark.cases_by_default(1)
@pytest.mark.parametrize("what", slow_after(2, ["step", "save", "plan"]))
def test_the_rank_that_holds_the_store_is_stopped(what, tmp_path):
    error, seconds = launch(_store_holder_stopped, 2, what, str(tmp_path))[1].value
    assert re.search(
        r"rank 0, which holds the store that ranks talk through, did not answer for"
        r" [23](\.\d+)? s: it is stopped",
        error,
    )
    assert error.startswith("CheckpointError" if what == "save" else "CollectiveError")
    assert seconds < 3.0 + 12.0  # a busy machine


def _killed_beside_a_worker(what, folder):
    """A process that the killed rank forked, as a DataLoader does, keeps its connections open."""
    mesh = _mesh((3,), ("tp",), timeout=60.0, step_timeout=30.0)
    step, params, batch = _step(mesh)
    step(params, batch)
    if dist.get_rank() == 1:
        if os.fork() == 0:
            time.sleep(8)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    call = {
        "step": lambda: step(params, batch),
        "save": lambda: ftp.save(folder, params, mesh, {"up": P(None, "tp"), "down": P("tp")}),
    }
    error = _caught(call[what])
    if dist.get_rank() == 0:
        time.sleep(1.0)  # it holds the store
    return error


@pytest.mark.parametrize("what", slow_after(1, ["step", "save"]))
def test_a_killed_rank_is_noticed_though_its_children_hold_its_connections(what, tmp_path):
    first, _, last = launch(_killed_beside_a_worker, 3, what, str(tmp_path))
    for rank in (first, last):
        assert rank.exit == 0, rank
        error, seconds = rank.value
        assert "Rank 1 has been killed, or has ended without a word: its process, " in error, rank
        assert error.startswith("CheckpointError" if what == "save" else "CollectiveError"), rank
        assert seconds < 20  # far less than step_timeout


def _keys(folder):
    """How many keys the store holds after each of several things done again and again."""
    mesh = _mesh((2,), ("tp",))
    store = dist.distributed_c10d._get_default_store()
    step, params, batch = _step(mesh)
    specs = {"up": P(None, "tp"), "down": P("tp")}
    other = ftp.spmd(lambda p, x: _loss(p, x) * 2, mesh, (specs, P()), P())
    rows = iter(range(5, 100))
    kinds = {
        "steps": lambda: step(params, batch),
        "turns of two steps": lambda: (step(params, batch), other(params, batch)),
        "new shapes": lambda: step(params, torch.ones(next(rows), 4)),
        "failures to plan": lambda: _caught(step, params, torch.ones(4, 5)),
        "saves": lambda: ftp.save(folder, params, mesh, specs, keep=1),
    }
    found = {}
    for name, act in kinds.items():
        counts = []
        for _ in range(3):
            act()
            step(params, batch)
            dist.barrier()
            late = (
                time.monotonic() + 5.0
            )  # threads that were woken delete their bells in their own time
            while counts and store.num_keys() > counts[0] and time.monotonic() < late:
                time.sleep(0.05)
            counts.append(store.num_keys())
            dist.barrier()
        found[name] = counts
    ftp.destroy_process_group()
    return found


def test_keys_of_past_agreements_are_deleted(tmp_path):
    ranks = launch(_keys, 2, str(tmp_path))
    for rank in ranks:
        assert rank.exit == 0, rank
        for name, counts in rank.value.items():
            assert max(counts) == counts[0] < 12, (name, rank.value)
