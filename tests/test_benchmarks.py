"""The benchmark of GPUs runs, on a CPU with a tiny model; what it says of plain torch and of ftp
agrees.
"""

import importlib.util
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from launch import launch

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
CASE = {"model": "tiny", "device": "cpu", "steps": 2, "ranks": 1, "backend": ""}


def script(name: str) -> Any:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        spec = importlib.util.spec_from_file_location(
            f"benchmarks_{name.replace('/', '_')}", BENCHMARKS / f"{name}.py"
        )
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(BENCHMARKS))


@pytest.mark.slow
def test_the_benchmark_of_gpus_runs_on_a_cpu():
    gpu = script("gpu")
    plain, ours = (gpu.measure({**CASE, "peer": peer}) for peer in ("torch", "ftp"))
    assert ours["loss"] == pytest.approx(plain["loss"], rel=1e-9)
    assert all(
        found["ms"] > 0 and found["MFU"] is None and found["gaps"] is None
        for found in (plain, ours)
    )
    assert ours["report ms"] > 0 and ours["report GiB"] > 0 and "report ms" not in plain
    config, _, seq = gpu.MODELS["tiny"]
    data = gpu._batches(config["vocab"], 2, seq)
    assert gpu._flops(config, gpu.torch.float32, data) == pytest.approx(
        2 * gpu._flops(config, gpu.torch.float32, data, 2), rel=0.01
    )
    ranks = launch(_on_ranks, 2, ours["loss"], timeout=180)
    assert all(rank.exit == 0 and rank.value for rank in ranks), [rank.error for rank in ranks]


def _on_ranks(loss: float) -> bool:
    found = script("gpu").on_ranks({**CASE, "peer": "ftp", "ranks": 2, "backend": "gloo"})
    return found["loss"] == pytest.approx(loss, rel=1e-9)


@pytest.mark.parametrize(("name", "sent"), [("W1", 400), ("W2", 9_443_328), ("W3", 40_900_608)])
def test_the_floor_sends_what_the_program_by_hand_sends(name: str, sent: int):
    """As torch's profiler counted it in P4 (docs/speed.md)."""
    assert script("peers/workloads").WORKLOADS[name].nbytes == sent


def test_torch_compiles_its_loss_too(monkeypatch: pytest.MonkeyPatch):
    gpu = script("gpu")
    seen: list[int] = []

    def compiled(run: Any, mode: Any = None) -> Any:
        def call(*args: Any) -> Any:
            out = run(*args)
            seen.append(out.ndim)
            return out

        return call

    monkeypatch.setattr(gpu.torch, "compile", compiled)
    gpu.measure({**CASE, "peer": "torch compiled"})
    assert set(seen) == {0}


def test_steps_are_timed_in_blocks(monkeypatch: pytest.MonkeyPatch):
    gpu = script("gpu")
    ran: list[str] = []
    monkeypatch.setattr(
        gpu, "_of_torch", lambda *given: (lambda: ran.append("step") or 1.0, 0.0, dict)
    )
    monkeypatch.setattr(gpu, "_wait", lambda device: ran.append("wait"))
    gpu.measure({**CASE, "peer": "torch", "steps": 2 * gpu.BLOCK})
    assert ran[-2 * (gpu.BLOCK + 1) :] == [*["step"] * gpu.BLOCK, "wait"] * 2


def test_peaks_leave_out_the_set_up_and_hold_the_pools_of_recordings(
    monkeypatch: pytest.MonkeyPatch,
):
    gpu = script("gpu")
    ran: list[str] = []
    monkeypatch.setattr(
        gpu, "_of_torch", lambda *given: (lambda: ran.append("step") or 1.0, 0.0, dict)
    )
    monkeypatch.setattr(gpu, "_wait", lambda device: None)
    monkeypatch.setattr(gpu, "_rate", lambda device, dtype: None)
    monkeypatch.setattr(gpu, "_gaps", lambda run, is_recorded: None)
    for name, value in {
        "empty_cache": None,
        "reset_peak_memory_stats": None,
        "max_memory_allocated": 2**30,
        "max_memory_reserved": 3 * 2**30,
    }.items():
        monkeypatch.setattr(
            f"torch.cuda.{name}", lambda name=name, value=value: ran.append(name) or value
        )
    found = gpu.measure({**CASE, "device": "cuda", "peer": "torch", "steps": gpu.BLOCK})
    before, after = ran.index("empty_cache"), ran.index("reset_peak_memory_stats") + 1
    assert ran[:before] == ["step"] * 5 and ran[after : after + gpu.BLOCK] == ["step"] * gpu.BLOCK
    assert ran.index("max_memory_allocated") >= after + gpu.BLOCK
    assert (found["peak GiB"], found["reserved GiB"]) == (1.0, 3.0)


def test_a_trace_without_a_graphs_kernels_says_nothing_of_gaps(monkeypatch: pytest.MonkeyPatch):
    gpu = script("gpu")
    copies = [
        SimpleNamespace(
            time_range=SimpleNamespace(start=i, end=i + 0.01),
            device_type=SimpleNamespace(name="CUDA"),
        )
        for i in range(3)
    ]

    @contextmanager
    def profile(activities: Any) -> Any:
        yield SimpleNamespace(events=lambda: copies)

    monkeypatch.setattr("torch.profiler.profile", profile)
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    assert gpu._gaps(lambda: None, is_recorded=True) is None
    assert gpu._gaps(lambda: None, is_recorded=False) > 0.9


def test_peers_that_disagree_or_find_no_time_are_failures(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
):
    gpu = script("gpu")
    losses = iter([4.0, 4.1])
    monkeypatch.setattr(
        gpu.record, "run_case", lambda script, case, limit: {"loss": next(losses), "ms": 1.0}
    )
    monkeypatch.setattr(gpu, "launched", lambda case, limit: {"loss": 4.0})
    command = ["gpu.py", "--model", "tiny", "--device", "cpu", "--peers", "torch", "ftp"]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit):
        gpu.main()
    assert "its first loss is 4.1, that of torch 4" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", [*command, "--limit", "0"])
    with pytest.raises(SystemExit):
        gpu.main()
    assert "no time was left" in capsys.readouterr().out


def test_idle_shares_of_overlapping_kernels():
    gpu = script("gpu")
    assert gpu.idle_share([]) is None, "nothing was traced"
    assert gpu.idle_share([(0, 4), (1, 2), (4, 5)]) == 0.0
    assert gpu.idle_share([(0, 1), (0.5, 2), (3, 4)]) == 0.25


@pytest.mark.slow
def test_the_first_hour_on_a_gpu_runs_dry():
    done = subprocess.run(
        [str(BENCHMARKS / "first_gpu.sh"), "--dry"],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=900,
    )
    said = done.stdout
    assert done.returncode == 0 and said.endswith("all steps are through, dry\n"), (
        said + done.stderr
    )
    assert said.count(". ok, ") == 11


def _memory_of_pipelines(schedule: str) -> dict[str, int]:
    pipelines = script("pipelines")
    pipelines.ROUNDS = 0  # memory alone
    return pipelines.job(schedule)[-1]


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved", "zero bubble"])
def test_a_pipeline_holds_no_more_than_torchs(schedule: str):
    for rank in launch(_memory_of_pipelines, 2, schedule, timeout=180):
        assert rank.error is None, rank.error
        assert 0 < rank.value["ours"] <= rank.value["torch"], rank.value


@pytest.mark.slow
def test_a_pipeline_of_405b_is_reported_within_a_minute(monkeypatch: pytest.MonkeyPatch):
    """Processor time, for the clock depends on what else runs."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    found = script("pipelines").of_405b(False)
    assert found["processor seconds"] < 60
    assert found["ideal bubble"] == round(7 / 39, 4) <= found["bubble"] < 0.2
    peaks = found["GiB by rank"]
    assert len(peaks) == 8 and peaks == sorted(peaks, reverse=True)
    assert sum(line.startswith("rank ") for line in found["report"]) == 8
