"""The benchmark of GPUs runs, on a CPU with a tiny model; what it says of plain torch and of ftp agrees."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
from dist.launch import launch  # type: ignore[import-not-found]

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
CASE = {"model": "tiny", "device": "cpu", "steps": 2, "ranks": 1, "backend": ""}


def script(name: str) -> Any:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", BENCHMARKS / f"{name}.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(BENCHMARKS))


def test_the_benchmark_of_gpus_runs_on_a_cpu():
    gpu = script("gpu")
    plain, ours = (gpu.measure({**CASE, "peer": peer}) for peer in ("torch", "ftp"))
    assert ours["loss"] == pytest.approx(plain["loss"], rel=1e-5)
    assert all(found["ms"] > 0 and found["MFU"] is None and found["gaps"] is None for found in (plain, ours))
    config, _, seq = gpu.MODELS["tiny"]
    data = gpu._batches(config["vocab"], 2, seq)
    assert gpu._flops(config, gpu.torch.float32, data) == pytest.approx(2 * gpu._flops(config, gpu.torch.float32, data, 2), rel=0.01)
    ranks = launch(_on_ranks, 2, ours["loss"], timeout=180)
    assert all(rank.exit == 0 and rank.value for rank in ranks), [rank.error for rank in ranks]


def _on_ranks(loss: float) -> bool:
    found = script("gpu").on_ranks({**CASE, "peer": "ftp", "ranks": 2, "backend": "gloo"})
    return found["loss"] == pytest.approx(loss, rel=1e-5)


def test_idle_shares_of_overlapping_kernels():
    gpu = script("gpu")
    assert gpu.idle_share([]) == 0.0
    assert gpu.idle_share([(0, 4), (1, 2), (4, 5)]) == 0.0
    assert gpu.idle_share([(0, 1), (0.5, 2), (3, 4)]) == 0.25
