"""Steps recorded as one CUDA graph and replayed, by a stand-in that runs on a CPU; test_cuda.py
records real ones where there is a GPU.
"""

import gc
import os
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from few_or_many import slow_after
from graph_tape import REFUSED, Again, Driver, Spoiled, Tape
from launch import launch
from torch import Tensor, nn
from torch.nn import functional as F

import ftp
from ftp import P
from ftp.runtime.cuda_graph import PATIENCE, WARM_UP, CudaGraphs, RecordedRun

ONE = ftp.simulated_mesh((1,), ("tp",))
OPT = ftp.optim.from_torch(torch.optim.AdamW, lr=1e-2, fused=True)


@pytest.fixture
def stands_in(monkeypatch: pytest.MonkeyPatch) -> Callable[[Tape], Tape]:
    """Has steps on a CPU recorded by a stand-in."""

    def install(graphs: Tape) -> Tape:
        monkeypatch.setattr("ftp.api.options._check_cuda_graph", lambda options, mesh: None)
        monkeypatch.setattr("ftp.runtime.program.check_recordable", lambda graph, device: None)
        monkeypatch.setattr("ftp.runtime.program.graphs_of", lambda device: graphs)
        return graphs

    return install


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Dropout(0.25), nn.Linear(8, 6)).double()


def train_step(fn: Any) -> Any:
    def step(params: Any, state: Any, x: Tensor, key: Tensor) -> Any:
        grads, loss = torch.func.grad_and_value(lambda p: F.mse_loss(fn(p, x, rng=key), x))(params)
        params, state = OPT.update(grads, state, params)
        return params, state, loss

    return step


def batches(count: int, rows: int = 4) -> list[tuple[Tensor, Tensor]]:
    """All alive at once, so that each lies elsewhere."""
    return [(torch.randn(rows, 6, dtype=torch.float64), ftp.random.key(i)) for i in range(count)]


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # inductor's, as it is imported
@pytest.mark.parametrize("compile", slow_after(1, [False, True]))
def test_a_replayed_train_step_equals_one_device(stands_in: Any, compile: bool):
    graphs = stands_in(Again() if compile else Tape())
    fn, full = ftp.functionalize(model().train())
    step, data = train_step(fn), batches(6)
    expected, params, state = [], full, OPT.init(full)
    for x, key in data:
        params, state, loss = step(params, state, x, key)
        expected.append(loss)
    sharded = ftp.spmd(step, ONE, P(), donate=(0, 1), compile=compile, cuda_graph=True)
    mine = ftp.device_put(full, ONE, P())
    own, losses, addresses = OPT.init(mine), [], set()
    for x, key in data:
        mine, own, loss = sharded(mine, own, x, key)
        losses.append(loss)
        addresses.add(tuple(p.data_ptr() for p in mine.values()))
    torch.testing.assert_close(
        losses, expected
    )  # the first ones too: no replay has changed what was returned
    torch.testing.assert_close(mine, params)
    assert graphs.replays == [6 - WARM_UP]
    assert len(addresses) == 1, "donated parameters are updated where they lie"


def test_gradients_that_were_returned_stay_as_they_are(stands_in: Any):
    graphs = stands_in(Tape())
    w, xs = {"w": torch.randn(6, 3, dtype=torch.float64)}, [x for x, _ in batches(6)]

    def loss(params: Any, x: Tensor) -> Tensor:
        return (x @ params["w"]).square().sum()

    step = ftp.shard(loss, ONE, P(), cuda_graph=True)
    found = [step(w, x) for x in xs]
    for x, (value, grads) in zip(xs, found, strict=True):
        torch.testing.assert_close(value, loss(w, x))
        torch.testing.assert_close(grads["w"], 2 * x.mT @ (x @ w["w"]))
    assert graphs.replays == [6 - WARM_UP]


def test_another_shape_is_recorded_by_itself(stands_in: Any):
    graphs = stands_in(Tape())
    step = ftp.spmd(lambda x: x.square(), ONE, P(), cuda_graph=True)
    for x in [torch.randn(rows, 2) for rows in (2, 3) * 4]:  # all held: no two at one address
        torch.testing.assert_close(step(x), x.square())
    assert graphs.replays == [4 - WARM_UP] * 2


@pytest.mark.parametrize("compile", slow_after(1, [False, True]))
def test_each_size_of_one_plan_is_recorded_by_itself(stands_in: Any, compile: bool):
    graphs = stands_in(Again() if compile else Tape())
    dims = {0: torch.export.Dim("B", min=1, max=64)}
    step = ftp.spmd(
        lambda x: x.square() / x.shape[0] + torch.arange(x.shape[0])[:, None],
        ONE,
        P(),
        cuda_graph=True,
        compile=compile,
        dynamic_shapes=dims,
        programs=2,
    )
    for x in [torch.randn(rows, 2) for rows in (2, 3) * 4]:  # all held: no two at one address
        want = x.square() / x.shape[0] + torch.arange(x.shape[0])[:, None]
        torch.testing.assert_close(step(x), want)
    assert graphs.replays == [4 - WARM_UP] * 2
    assert (step.shapes.traces, step.shapes.plans, step.shapes.one_by_one) == (1, 1, ())
    for rows in (5, 6, 7):
        step(torch.randn(rows, 2))
    assert len(step._cache.used) == 2


def test_ranks_replay_their_collectives():
    for rank in launch(_two_ranks, 2):
        assert rank.exit == 0, rank.error
        assert rank.value == [5 - WARM_UP]


def _two_ranks() -> list[int]:
    import ftp.api.shard
    import ftp.runtime.program

    graphs = Tape()
    ftp.api.options._check_cuda_graph = lambda options, mesh: None
    ftp.runtime.program.check_recordable = lambda graph, device: None
    ftp.runtime.program.graphs_of = lambda device: graphs
    os.environ["FTP_SHM"] = "0"  # collectives that are torch's
    mesh = ftp.make_mesh((2,), ("tp",), device_type="cpu")
    fn, full = ftp.functionalize(model().train())
    step, data = train_step(fn), batches(5)
    specs = ftp.plan(full, {"0.*": P("tp"), "3.weight": P(None, "tp")})
    of_state = OPT.specs(full, specs)
    train = ftp.spmd(step, mesh, (specs, of_state, P(), P()), donate=(0, 1), cuda_graph=True)
    params, state = (
        ftp.device_put(full, mesh, specs),
        ftp.device_put(OPT.init(full), mesh, of_state),
    )
    expected, whole = full, OPT.init(full)
    for x, key in data:
        x = ftp.device_put(x, mesh, P(), src=0)
        params, state, loss = train(params, state, x, key)
        expected, whole, due = step(expected, whole, x, key)
        torch.testing.assert_close(loss, due)
    torch.testing.assert_close(ftp.device_get(params, mesh, specs), expected)
    ftp.destroy_process_group()
    return graphs.replays


# What lies where.


def recorded(graphs: Tape, run: Any, donated: Sequence[int] = ()) -> RecordedRun:
    return RecordedRun(run, donated, ["a", "b"], graphs, lambda error: "")


def add_in_place(given: Sequence[Any]) -> list[Tensor]:
    a, b = given
    a.add_(b)
    return [a.detach(), b * 2]


def test_state_from_elsewhere_is_recorded_anew_and_changes_nothing_else():
    graphs = Tape()
    run = recorded(graphs, add_in_place, [0])
    first, second, b = torch.zeros(3), torch.full((3,), 10.0), torch.ones(3)
    kept = []
    for _ in range(4):
        first, twice = run([first, b])
        kept.append(twice)
    assert first.tolist() == [4.0] * 3
    second, _ = run([second, b])
    assert (first.tolist(), second.tolist()) == ([4.0] * 3, [11.0] * 3)
    first, _ = run([first, b])
    assert (first.tolist(), second.tolist()) == ([5.0] * 3, [11.0] * 3)
    assert graphs.replays == [3, 1]
    assert all(twice.tolist() == [2.0] * 3 for twice in kept)


def test_what_is_not_donated_is_never_written():
    graphs = Tape()
    run = recorded(graphs, lambda given: [given[0] + given[1]])
    a, bs = torch.ones(2), [torch.full((2,), float(i)) for i in range(6)]
    for b in [*bs[:1] * 3, *bs]:  # at one address until it is recorded, then at others
        assert run([a, b])[0].tolist() == (a + b).tolist()
    assert [b.tolist() for b in bs] == [[float(i)] * 2 for i in range(6)]
    assert graphs.replays == [2, 5], "recorded anew once, with memory of its own for what moves"


def test_other_strides_are_another_place():
    run = recorded(Tape(), lambda given: [given[0] - given[1]])
    a = torch.arange(4.0).view(2, 2)
    for b in (a, a, a, a.t(), a):
        assert run([a, b])[0].tolist() == (a - b).tolist()


def test_views_of_donated_memory_come_back_as_such():
    memory = torch.zeros(8)

    def run(given: Sequence[Any]) -> list[Tensor]:
        given[0].add_(1)
        return [given[0].detach(), given[0][1:3]]

    step = recorded(Tape(), run, [0])
    for count in range(1, 6):
        whole, part = step([memory[2:6]])
        assert (whole.tolist(), part.tolist()) == ([count] * 4, [count] * 2)
    assert part.data_ptr() == memory[3:].data_ptr()


def test_state_that_never_comes_back_is_told():
    run = recorded(Tape(), add_in_place, [0])
    *others, last = [torch.full((3,), float(i)) for i in range(WARM_UP + PATIENCE)]
    for i, a in enumerate(others):
        assert run([a, torch.ones(3)])[0].tolist() == [i + 1.0] * 3
    with pytest.warns(
        UserWarning,
        match=r"recorded 8 times as a CUDA graph, as donated arguments \(a, ...\) have new",
    ):
        assert run([last, torch.ones(3)])[0].tolist() == [WARM_UP + PATIENCE + 0.0] * 3


# What cannot be recorded.


def test_a_mesh_without_gpus_is_refused():
    with pytest.raises(ftp.errors.MeshError) as error:
        ftp.shard(lambda p, x: x.sum(), ONE, P(), cuda_graph=True)
    assert str(error.value) == (
        "cuda_graph=True, but the mesh (tp 1) on cpu has no GPUs whose work could be recorded."
        " Leave it out, or give cuda_graph=mesh.device_type == 'cuda'."
    )


def test_checks_at_every_call_are_refused():
    mesh = ftp.AbstractMesh((2,), ("tp",), device_type="cuda")
    with pytest.raises(
        ftp.errors.InputError,
        match=r"cuda_graph=True and check_inputs=True: the check reads digests on the host",
    ):
        ftp.spmd(lambda x: x, mesh, P(), cuda_graph=True, check_inputs=True)


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_collectives_of_the_host_are_refused(monkeypatch: pytest.MonkeyPatch, backend: str):
    from ftp.runtime.process_groups import check_recordable

    group = SimpleNamespace(_get_backend=lambda device: SimpleNamespace(name=lambda: backend))
    monkeypatch.setattr("ftp.runtime.process_groups.resolve_process_group", lambda name: group)
    mesh = ftp.AbstractMesh((2,), ("tp",), device_type="cuda")
    lowered = ftp.lower(
        lambda x: x.sum(), mesh, P("tp"), torch.empty(4, device="meta"), out_specs=P()
    )
    if backend == "nccl":
        check_recordable(lowered.graph.graph, torch.device("cuda"))
        return
    with pytest.raises(ftp.errors.MeshError) as error:
        check_recordable(lowered.graph.graph, torch.device("cuda"))
    assert str(error.value) == (
        "cuda_graph=True, but of the step's collectives those over tp go through gloo, which works"
        " on the host and cannot be recorded."
        " Initialise the process group with NCCL, as ftp.make_mesh does where every process has a"
        " GPU of its own, or leave cuda_graph out."
    )


@pytest.mark.parametrize("tape", [Tape, Spoiled])
def test_an_op_that_waits_for_the_gpu_is_named(stands_in: Any, tape: type[Tape]):
    stands_in(tape(waiting=[torch.ops.aten.linalg_inv_ex.default]))
    step = ftp.spmd(lambda x: torch.linalg.inv(x), ONE, P(), cuda_graph=True)
    for _ in range(WARM_UP):
        step(torch.eye(2))
    with pytest.raises(ftp.errors.InputError) as error:
        step(torch.eye(2))
    first, second = str(error.value).splitlines()
    assert first.startswith(
        "The step cannot be recorded as a CUDA graph, for aten.linalg_inv_ex.default at"
        " tests/runtime/test_cuda_graph.py:"
    )
    assert first.endswith(f": {REFUSED}")
    assert (
        second == "  Recorded ops may not wait for the GPU, nor copy from or to the host. Leave out"
        " cuda_graph=True, or the op."
    )


# Recordings that fail, and the end of a process group.


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    made.install(monkeypatch)
    return made


@pytest.mark.cases_by_default(1)
@pytest.mark.parametrize("spoils", [True, False], ids=["CUDA's error", "Python's error"])
def test_a_failed_recording_leaves_the_next_ones_alone(driver: Driver, spoils: bool):
    graphs, driver.spoils = CudaGraphs(torch.device("cuda", 0)), spoils
    stream = driver._stream

    def fails(given: Sequence[Any]) -> list[Tensor]:
        raise RuntimeError(REFUSED)

    with pytest.raises(RuntimeError):
        graphs.record(fails, [])
    assert not driver.pools, "the allocator still records"
    assert driver._stream is stream
    gc.collect()
    if spoils:
        assert driver.graphs[0]() is not None, "the allocator of pinned memory still asks it"
    replay, outputs = graphs.record(lambda given: given, [torch.ones(2)])
    replay()
    assert driver.done[-1] == "replay" and len(outputs) == 1 and not driver.pools


def test_recordings_end_before_their_process_group(driver: Driver, monkeypatch: pytest.MonkeyPatch):
    """NCCL waits for them for ever."""
    graphs = CudaGraphs(torch.device("cuda", 0))
    monkeypatch.setattr(graphs, "aside", lambda run, given: run(given))
    run = RecordedRun(lambda given: [given[0] * 2], [], ["x"], graphs, lambda error: "")
    x = torch.ones(2)
    for _ in range(WARM_UP + 1):
        run([x])
    recorded = driver.graphs[-1]
    assert recorded() is not None
    end = ftp.destroy_process_group  # loaded before there seem to be processes
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("ftp.sharding.process_group.talks_nccl", lambda: False)
    monkeypatch.setattr("ftp.sharding.process_group.failed", [])
    monkeypatch.setattr(
        "torch.distributed.barrier", lambda device_ids: driver.done.append("barrier")
    )
    monkeypatch.setattr(
        "torch.distributed.destroy_process_group",
        lambda: driver.done.append("alive" if recorded() else "destroyed"),
    )
    driver.done.clear()
    end()
    assert driver.done == ["synchronize", "barrier", "destroyed"]
    run([x])
    assert driver.graphs[-1]() is not None, "recorded anew where the step is called again"


def test_garbage_is_not_collected_inside_a_recording():
    seen = []

    class Seen(Tape):
        def record(self, run: Any, given: Sequence[Any]) -> Any:
            seen.append(gc.isenabled())
            return super().record(run, given)

    run = recorded(Seen(), lambda given: [given[0] + given[1]])
    for _ in range(WARM_UP + 1):
        run([torch.ones(2), torch.ones(2)])
    assert seen and not any(seen) and gc.isenabled()
