"""Measured memory of one rank's program, beside what a report says: ``python memory_run.py NAME ...`` prints a line of JSON for each.

The rank runs on the CPU, alone in a world of torch's fake process group: its collectives allocate what they would, and move nothing.
"""

import json
import sys
from collections.abc import Callable
from typing import Any

import optree
import torch
import torch.distributed as dist
from models import CNNConfig, GPT2Config, LlamaConfig, MLPConfig, build, class_batch, cuts, lm_batch, loss, sequence_parallel, specs
from torch.testing._internal.distributed.fake_pg import FakeStore

import ftp
from ftp import P
from ftp.compile import eager

LLAMA = LlamaConfig(vocab=512, dim=64, layers=3, heads=4, hidden=160)
GPT2 = GPT2Config(vocab=512, dim=64, layers=3, heads=4, context=64)
CNN = CNNConfig(channels=16, blocks=3, size=16)
MLP = MLPConfig(dim=64, hidden=256, layers=3)
PROGRAMS: dict[str, tuple[Any, dict[str, int], dict[str, Any], P, dict[str, P] | None]] = {
    "llama on one": (LLAMA, {"dp": 1}, {}, P("dp"), None),
    "llama tp": (LLAMA, {"tp": 4}, {"tp": "tp"}, P(), None),
    "llama sp": (LLAMA, {"tp": 4}, {"tp": "tp"}, P(), sequence_parallel()),
    "llama zero": (LLAMA, {"dp": 4}, {"zero": "dp"}, P("dp"), None),
    "llama cp": (LLAMA, {"cp": 4}, {}, P(None, "cp"), None),
    "llama zero × tp": (LLAMA, {"dp": 2, "tp": 2}, {"tp": "tp", "zero": "dp"}, P("dp"), None),
    "gpt2 dp × tp": (GPT2, {"dp": 2, "tp": 2}, {"tp": "tp"}, P("dp"), None),
    "cnn dp": (CNN, {"dp": 4}, {}, P("dp"), None),
    "mlp tp uneven": (MLP, {"tp": 3}, {"tp": "tp"}, P(), None),
}


def lowered(name: str, mesh_of: Callable[..., Any]) -> ftp.Lowered:
    cfg, axes, cut, batch_spec, pins = PROGRAMS[name]
    fn, params = ftp.functionalize(build(cfg), constraints=pins)
    batch = lm_batch(cfg, 8, 64) if isinstance(cfg, LlamaConfig | GPT2Config) else class_batch(cfg, 64)
    mesh = mesh_of(tuple(axes.values()), tuple(axes))
    step = ftp.shard(loss(cfg, fn), mesh, ftp.plan(params, specs(cuts(cfg), **cut)), batch_specs=batch_spec)
    if mesh_of is ftp.AbstractMesh:
        return step.lower(params, batch)
    metas = optree.tree_map(lambda t: torch.empty_like(t, device="meta"), (params, batch))  # type: ignore[arg-type]
    return step.lower(*metas)


def measured(lowered: ftp.Lowered) -> int:
    """Bytes that the CPU's allocator has handed out at most during a run, beside the inputs."""
    inputs = [torch.zeros(shape, dtype=dtype) for shape, dtype in lowered._local_inputs]
    given = [*inputs, *lowered._local_offsets]
    run = eager(lowered.graph.graph, given, lowered._program.donated)
    run(given)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        outputs = run(given)
    del outputs
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]  # type: ignore[union-attr]
    live = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()  # type: ignore[attr-defined]
        peak = max(peak, live)
    return peak


def main(names: list[str]) -> None:
    for name in names:
        world = 1
        for size in PROGRAMS[name][1].values():
            world *= size
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
        program = lowered(name, lambda shape, names: ftp.make_mesh(shape, names))
        inputs = sum(program.memory.totals.get(kind, 0) for kind in ("parameters", "optimizer", "batch", "constants"))
        print(
            json.dumps({"name": name, "predicted": int(program.memory) - inputs, "measured": measured(program), "inputs": inputs}),
            flush=True,
        )
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:] or list(PROGRAMS))
