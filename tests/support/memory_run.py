"""Measured memory of one rank's program, beside what a report says: ``python memory_run.py NAME
...`` prints a line of JSON for each.

The rank runs on the CPU, alone in a world of torch's fake process group: its collectives allocate
what they would, and move nothing.
"""

import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import optree
import torch
import torch.distributed as dist
from models import (
    CNNConfig,
    GPT2Config,
    LlamaConfig,
    MLPConfig,
    build,
    class_batch,
    cuts,
    lm_batch,
    loss,
    sequence_parallel,
    specs,
)
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore

import ftp
from ftp import P
from ftp.runtime.compile import eager
from ftp.runtime.process_groups import with_product_groups

ODD = LlamaConfig(vocab=511, dim=56, layers=2, heads=4, hidden=157)
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
    "llama tp train": (LLAMA, {"tp": 2}, {"tp": "tp"}, P(), None),
    "llama zero train": (LLAMA, {"dp": 4}, {"zero": "dp"}, P("dp"), None),
    "llama zero uneven train": (ODD, {"dp": 3}, {"zero": "dp"}, P("dp"), None),
    "llama zero unfused": (LLAMA, {"dp": 4}, {"zero": "dp"}, P("dp"), None),
    "llama zero not ahead": (LLAMA, {"dp": 4}, {"zero": "dp"}, P("dp"), None),
    "llama zero kept": (LLAMA, {"dp": 4}, {"zero": "dp"}, P("dp"), None),
    "mlp zero remat": (MLP, {"dp": 4}, {"zero": "dp"}, P("dp"), None),
    "llama sp chunks": (LLAMA, {"tp": 4}, {"tp": "tp"}, P(), sequence_parallel()),
    "gpt2 dropout train": (GPT2, {"dp": 4}, {}, P("dp"), None),
    "cnn dp train": (CNN, {"dp": 4}, {}, P("dp"), None),
}
TRAIN = {"optimizer": "fused", "donate": (0, 1), "bucket": True}
OPTIONS: dict[str, dict[str, Any]] = {
    "llama tp train": TRAIN,
    "llama zero train": TRAIN,
    "llama zero uneven train": TRAIN,
    "llama zero unfused": {"optimizer": "unfused", "bucket": False},
    "llama zero not ahead": {"prefetch": 0, "bucket": True},
    "llama zero kept": {"reshard_after_forward": False, "bucket": False},
    "mlp zero remat": {"remat": True, "bucket": True},
    "llama sp chunks": {"chunks": 2, "bucket": True},
    "gpt2 dropout train": {"dropout": 0.1, **TRAIN},
    "cnn dp train": TRAIN,
}
"""What is beside a loss and its gradients: ``optimizer``, ``remat`` of the blocks, ``dropout``
after them, and the step's own options.
"""


def lowered(name: str, mesh_of: Callable[..., Any], **further: Any) -> ftp.Lowered:
    cfg, axes, cut, batch_spec, pins = PROGRAMS[name]
    options = {**OPTIONS.get(name, {}), **further}
    model = build(cfg)
    if share := options.pop("dropout", 0.0):
        for block in model.layers:  # type: ignore[union-attr]
            block.register_forward_hook(lambda block, args, out: F.dropout(out, share))
    fn, params = ftp.functionalize(model, constraints=pins)
    loss_fn = loss(cfg, partial(fn, rng=ftp.random.key(0)) if share else fn)
    if options.pop("remat", False):
        loss_fn = partial(_recomputed, ftp.remat(ftp.functionalize(model.layers[0])[0]), cfg.layers)
    batch = (
        lm_batch(cfg, 6 if cfg is ODD else 8, 64)
        if isinstance(cfg, LlamaConfig | GPT2Config)
        else class_batch(cfg, 64)
    )
    mesh = mesh_of(tuple(axes.values()), tuple(axes))
    of_params = ftp.plan(params, specs(cuts(cfg), **cut))
    if kind := options.pop("optimizer", None):
        adamw = ftp.optim.from_torch(torch.optim.AdamW, lr=1e-3, fused=kind == "fused")
        of_state = adamw.specs(params, of_params)
        step = ftp.spmd(
            partial(_train, loss_fn, adamw),
            mesh,
            (of_params, of_state, batch_spec),
            (of_params, of_state, P()),
            **options,
        )
        given: tuple[Any, ...] = (params, adamw.init(params), batch)
    else:
        step, given = (
            ftp.shard(loss_fn, mesh, of_params, batch_specs=batch_spec, **options),
            (params, batch),
        )
    if mesh_of is ftp.AbstractMesh:
        return step.lower(*given)
    metas = optree.tree_map(lambda t: torch.empty_like(t, device="meta"), given)
    return step.lower(*metas)


def _recomputed(
    block: Callable[..., Any], layers: int, params: dict[str, Any], batch: Any
) -> torch.Tensor:
    """The MLP's loss, its blocks computed again for the backward pass."""
    x, labels = batch
    for i in range(layers):
        x = block(
            {
                name.removeprefix(f"layers.{i}."): p
                for name, p in params.items()
                if name.startswith(f"layers.{i}.")
            },
            x,
        )
    return F.cross_entropy(F.linear(x, params["head.weight"], params["head.bias"]), labels)


def _train(
    loss_fn: Callable[..., Any], optimizer: Any, params: Any, state: Any, batch: Any
) -> tuple[Any, ...]:
    grads, value = torch.func.grad_and_value(loss_fn)(params, batch)
    return *optimizer.update(grads, state, params), value


def measured(lowered: ftp.Lowered) -> int:
    """Bytes that the CPU's allocator has handed out at most during a run, beside the inputs."""
    inputs = [torch.zeros(shape, dtype=dtype) for shape, dtype in lowered._local_inputs]
    constants = [x.clone() for x in lowered._program.constants]
    inputs[len(inputs) - len(constants) :] = constants
    given = [*inputs, *lowered._local_offsets]
    graph = with_product_groups(lowered.graph.graph, lowered._program.mesh)
    run = eager(graph, given, lowered._program.donated)
    run(given)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        outputs = run(given)
    del outputs
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
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
        inputs = sum(
            program.memory.totals.get(kind, 0)
            for kind in ("parameters", "optimizer", "batch", "constants")
        )
        print(
            json.dumps(
                {
                    "name": name,
                    "predicted": int(program.memory) - inputs,
                    "measured": measured(program),
                    "inputs": inputs,
                }
            ),
            flush=True,
        )
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:] or list(PROGRAMS))
