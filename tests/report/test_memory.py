"""What a report says of memory, against a measured run of the rank's program and against sums
done by hand.
"""

import json
import os
import pickle
from functools import partial
from pathlib import Path

import pytest
import torch
from memory_run import PROGRAMS, lowered
from models import LlamaConfig, build, cuts, lm_batch, lm_loss, specs
from own_process import run_file  # type: ignore[import-not-found]

import ftp
from ftp import P
from ftp.sharding.pytree import flatten

ROOT = Path(__file__).resolve().parents[2]


def run(arguments: list[str], script: str = "memory_run.py") -> list[dict]:
    environment = {k: v for k, v in os.environ.items() if k not in {"RANK", "WORLD_SIZE"}}
    environment |= {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests/support")]),
    }
    done = run_file(ROOT / "tests/support" / script, *arguments, env=environment)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


FEW = ["mlp zero remat", "gpt2 dropout train"]


@pytest.mark.dist
@pytest.mark.parametrize(
    "names", [FEW, pytest.param([n for n in PROGRAMS if n not in FEW], marks=pytest.mark.slow)]
)
def test_the_peak_is_what_the_allocator_measures(names: list[str]):
    found = run(names)
    assert [row["name"] for row in found] == names
    for row in found:
        # oneDNN's convolutions need memory of their own, in layouts that differ from one CPU to the
        # next.
        assert row["predicted"] == pytest.approx(
            row["measured"], rel=0.1 if row["name"].startswith("cnn") else 0
        ), row


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize(
    ("length", "ranks"),
    [
        (2048, 2),
        (4096, 2),
        (8192, 4),
        (16384, 4),
    ],
)
def test_the_peak_of_attention_is_what_the_allocator_measures(length: int, ranks: int):
    found = run([str(length), str(ranks)], "attention_memory_run.py")
    assert len(found) == 14
    for row in found:
        is_ring = row["name"].endswith("ring")
        assert ("ring" in row["ops"]) == is_ring != ("all_gather" in row["ops"]), row
        # Buffers of the kernels differ a little from one CPU to the next.
        assert row["predicted"] == pytest.approx(row["measured"], rel=0.03), row


@pytest.mark.parametrize("name", ["llama tp", "llama zero × tp", "mlp tp uneven"])
def test_bytes_of_parameters_and_gradients_are_exact(name: str):
    cfg, axes, cut, _, _ = PROGRAMS[name]
    _, params = ftp.functionalize(build(cfg))
    spec_of = ftp.plan(params, specs(cuts(cfg), **cut))
    held = 0
    for path, tensor in params.items():
        for dim in range(tensor.ndim):
            for axis in spec_of[path].cuts(dim):
                tensor = tensor.chunk(axes[axis.axis], dim)[0]
        held += tensor.numel() * tensor.element_size()
    # In a bucket the number that the backward pass begins with would be made ahead of time.
    memory = lowered(name, ftp.AbstractMesh, bucket=False).memory
    assert (memory.parameters, memory.gradients) == (held, held)
    assert sum(memory.parts.values()) == memory == max(m.live for m in memory.timeline)


def test_a_train_step_tells_optimizer_and_gradients_from_the_rest():
    cfg = LlamaConfig(vocab=64, layers=2)
    fn, params = ftp.functionalize(build(cfg))
    adamw = ftp.optim.from_torch(torch.optim.AdamW, lr=1e-3)
    state = adamw.init(params)

    def train(loss_fn, params, state, batch):
        grads, loss = torch.func.grad_and_value(loss_fn)(params, batch)
        return *adamw.update(grads, state, params), loss

    lowered = ftp.lower(
        partial(train, lm_loss(fn)),
        ftp.AbstractMesh((1,), ("dp",)),
        P(),
        params,
        state,
        lm_batch(cfg),
    )
    size = sum(p.numel() * p.element_size() for p in params.values())
    memory = lowered.memory
    assert memory.parameters == memory.gradients == size
    leaves = [leaf for leaf in flatten(state)[0] if isinstance(leaf, torch.Tensor)]
    assert memory.optimizer == sum(leaf.numel() * leaf.element_size() for leaf in leaves) > 2 * size


def test_memory_is_an_int_that_shows_itself():
    memory = lowered("llama tp", ftp.AbstractMesh).memory
    assert isinstance(memory, int) and memory > 0 and f"{memory:,}" == f"{int(memory):,}"
    assert (
        memory.activations > 0
        and "activations" in memory.report()
        and memory.peak_op in memory.report()
    )
    assert len(memory.picture(40, 5).splitlines()) == 6
    assert "<pre>" in memory._repr_html_()
    assert json.loads(json.dumps(memory.to_dict()))["peak"] == memory
    again = pickle.loads(pickle.dumps(memory))
    assert again == memory and again.parts == memory.parts and again.peak_op == memory.peak_op


def test_sequence_parallelism_and_remat_keep_less():
    whole, cut = (lowered(name, ftp.AbstractMesh).memory for name in ("llama tp", "llama sp"))
    assert cut.parts["activations"] < whole.parts["activations"]


def test_a_mesh_of_gpus_needs_no_gpu():
    mesh = ftp.AbstractMesh((64, 8), ("dp", "tp"), device_type="cuda")
    w = {"w": torch.empty(1024, 4096, device="meta")}
    step = ftp.shard(
        lambda p, x: (x @ p["w"]).square().mean(), mesh, {"w": P(None, "tp")}, batch_specs=P("dp")
    )
    lowered = step.lower(w, torch.empty(512, 1024, device="meta"))
    assert lowered.memory.parameters == 1024 * 512 * 4
    assert 0 < lowered.cost(ftp.Hardware.h100()).mfu < 1
