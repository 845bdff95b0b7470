"""Train transformers' Llama, as it stands, in two pipeline stages on Python's standard library.

    python examples/train_pipeline.py --steps 20                    # simulated, (pp 2, dp 2)
    torchrun --nproc-per-node=4 examples/train_pipeline.py --steps 20
    torchrun --nproc-per-node=4 examples/train_pipeline.py --steps 40 --mesh dp,tp   # resumed

Every run goes on from the last checkpoint in ``--out``, whatever mesh wrote it.
"""

import argparse
import os
import sysconfig
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import ftp
from ftp import P

CONFIG = LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=176,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
)
ROWS, LENGTH, MICROBATCHES = 16, 64, 4
TENSOR_PARALLEL = {
    "**.[qkv]_proj.weight": P("tp"),
    "**.o_proj.weight": P(None, "tp"),
    "**.gate_proj.weight": P("tp"),
    "**.up_proj.weight": P("tp"),
    "**.down_proj.weight": P(None, "tp"),
}


def text() -> torch.Tensor:
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:40]
    return torch.frombuffer(bytearray(b"".join(f.read_bytes() for f in files)), dtype=torch.uint8)


def batch(data: torch.Tensor, step: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(step)
    starts = torch.randint(len(data) - LENGTH, (ROWS, 1), generator=g)
    return data[starts + torch.arange(LENGTH)].long()


def main(given: list[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--mesh", default="pp,dp")
    parser.add_argument("--out", default="runs/train_pipeline")
    args = parser.parse_args(given)
    torch.manual_seed(0)
    fn, params = ftp.functionalize(LlamaForCausalLM(CONFIG))

    def loss_fn(params, tokens):
        return fn(params, input_ids=tokens, labels=tokens, use_cache=False).loss

    mesh, pipe = ftp.make_mesh((2, 2), tuple(args.mesh.split(","))), None
    specs = ftp.plan(params, TENSOR_PARALLEL) if "tp" in args.mesh else P()
    if "pp" in args.mesh:
        pipe = ftp.Pipeline("pp", MICROBATCHES)
        specs = pipe.place(params, specs, mesh)
    opt = ftp.optim.from_torch(torch.optim.AdamW, lr=3e-3)
    state, state_specs = opt.init(params), opt.specs(params, specs)

    def update(params, grads, state):
        grads, norm = ftp.optim.clip_by_global_norm(grads, 1.0)
        return *opt.update(grads, state, params), norm

    step = ftp.shard(loss_fn, mesh, specs, batch_specs=P("dp"), pipeline=pipe)
    update_step = ftp.spmd(update, mesh, (specs, specs, state_specs))
    saved, first = ftp.checkpoints(args.out), 0
    here = {"params": specs, "state": state_specs}
    held = {"params": params, "state": state}
    if saved:
        first = saved[-1].step
        held = ftp.load(args.out, held, mesh, here)
    else:
        held = ftp.device_put(held, mesh, here)
    params, state, data, losses = held["params"], held["state"], text(), []
    for number in range(first, args.steps):
        loss, grads = step(params, ftp.device_put(batch(data, number), mesh, P("dp")))
        params, state, _ = update_step(params, grads, state)
        losses.append(float(loss))
        if os.environ.get("RANK", "0") == "0":
            print(f"step {number + 1}: loss {losses[-1]:.4f}", flush=True)
    ftp.save(args.out, {"params": params, "state": state}, mesh, here, step=args.steps)
    return losses


if __name__ == "__main__":
    main()
    ftp.destroy_process_group()
