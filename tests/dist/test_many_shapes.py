"""Steps called with ever new shapes on processes: ranks drop the same programs, and memory stays
flat.
"""

import gc
import warnings

import pytest
import torch
from launch import launch

import ftp
from ftp import P
from ftp.errors import MismatchError

pytestmark = pytest.mark.dist
SPECS = {"up": P(None, "tp"), "down": P("tp")}


def _loss(params, x):
    hidden = torch.nn.functional.layer_norm(x @ params["up"], (8,))
    return (torch.softmax(hidden, -1) @ params["down"]).square().mean()


def _start(programs):
    ftp.init_process_group(device_type="cpu")
    mesh = ftp.make_mesh((2,), ("tp",), device_type="cpu")
    generator = torch.Generator().manual_seed(0)
    full = {
        "up": torch.randn(4, 8, generator=generator),
        "down": torch.randn(8, 4, generator=generator),
    }
    full = {name: x.double() for name, x in full.items()}
    return (
        ftp.shard(_loss, mesh, SPECS, programs=programs, dynamic_shapes={}),
        full,
        ftp.device_put(full, mesh, SPECS),
    )


def _batch(rows):
    return torch.arange(4.0 * rows, dtype=torch.float64).sin().view(rows, 4)


def _in_turn() -> tuple[list[int], str]:
    step, full, params = _start(2)
    wrong, error = [], ""
    for call, rows in enumerate([1, 2, 1, 3, 1, 2, 0, 2, 3, 3, 1, 4, 2, 1]):
        if not rows:
            try:
                step(params, _batch(5 + torch.distributed.get_rank()))
            except MismatchError as e:
                error = str(e)
            continue
        loss, _ = step(params, _batch(rows))
        if not torch.allclose(loss, _loss(full, _batch(rows)), rtol=1e-12):
            wrong.append(call)
    ftp.destroy_process_group()
    return wrong, error


def test_ranks_drop_the_same_programs():
    for rank in launch(_in_turn, 2):
        assert rank.exit == 0, rank
        wrong, error = rank.value
        assert wrong == []
        assert "rank 0 holds (5, 4), rank 1 (6, 4)" in error


def _memory() -> list[float]:
    """MiB of this process after each 100 shapes."""
    warnings.simplefilter("ignore")
    step, full, params = _start(16)
    found = []
    for shape in range(1000):
        x = _batch(shape + 1)
        losses = [step(params, x)[0] for _ in range(10)]
        assert torch.allclose(losses[-1], _loss(full, x), rtol=1e-12)
        if shape % 100 == 99:
            gc.collect()
            with open("/proc/self/statm") as file:
                found.append(int(file.read().split()[1]) * 4096 / 2**20)
    ftp.destroy_process_group()
    return found


@pytest.mark.slow
def test_memory_is_flat_over_ten_thousand_steps_and_a_thousand_shapes():
    for rank in launch(_memory, 2, timeout=3600.0):
        assert rank.exit == 0, rank
        print(rank.value)
        # The caches of planning and tracing, which are bounded, are full by then.
        assert max(rank.value[3:]) - rank.value[3] < 16, rank.value
