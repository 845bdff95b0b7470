"""Train transformers' Llama, as it stands, in two pipeline stages on Python's standard library.

python examples/train_pipeline.py --steps 20                    # simulated, (pp 2, dp 2)
torchrun --nproc-per-node=4 examples/train_pipeline.py --steps 20
torchrun --nproc-per-node=4 examples/train_pipeline.py --steps 40 --mesh dp,tp   # resumed
"""

import argparse
import os
import sysconfig
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import ftp
from ftp import P

SIZES = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 4}
ROWS, LENGTH, MICROBATCHES = 16, 64, 4
TENSOR_PARALLEL = dict.fromkeys(
    ["**.[qkv]_proj.weight", "**.gate_proj.weight", "**.up_proj.weight"], P("tp")
)
TENSOR_PARALLEL |= dict.fromkeys(["**.o_proj.weight", "**.down_proj.weight"], P(None, "tp"))


def main(given: list[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--mesh", default="pp,dp")
    parser.add_argument("--out", default="runs/train_pipeline")
    args = parser.parse_args(given)
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:40]
    data = torch.tensor(list(b"".join(f.read_bytes() for f in files)))
    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    fn, params = ftp.functionalize(LlamaForCausalLM(LlamaConfig(**SIZES, **heads)))
    mesh = ftp.make_mesh((2, 2), tuple(args.mesh.split(",")))
    pipe = ftp.Pipeline("pp", MICROBATCHES) if "pp" in args.mesh else None
    specs = pipe.place(params, P(), mesh) if pipe else ftp.plan(params, TENSOR_PARALLEL)
    opt = ftp.optim.from_torch(torch.optim.AdamW, lr=3e-3)

    def loss_fn(params, tokens):
        return fn(params, input_ids=tokens, labels=tokens, use_cache=False).loss

    def train_step(params, state, tokens):
        grad_fn = ftp.optim.accumulate(torch.func.grad_and_value(loss_fn), MICROBATCHES)
        grads, loss = grad_fn(params, tokens)
        grads, _ = ftp.optim.clip_by_global_norm(grads, 1.0)
        return *opt.update(grads, state, params), loss

    here = {"params": specs, "state": opt.specs(params, specs)}
    step = ftp.spmd(train_step, mesh, (*here.values(), P("dp")), pipeline=pipe)
    held, first, losses = {"params": params, "state": opt.init(params)}, 0, []
    if saved := ftp.checkpoints(args.out):  # whatever mesh wrote it
        held, first = ftp.load(args.out, held, mesh, here), saved[-1].step
    else:
        held = ftp.device_put(held, mesh, here)
    for number in range(first, args.steps):
        g = torch.Generator().manual_seed(number)
        starts = torch.randint(len(data) - LENGTH, (ROWS, 1), generator=g)
        tokens = ftp.device_put(data[starts + torch.arange(LENGTH)], mesh, P("dp"))
        held["params"], held["state"], loss = step(held["params"], held["state"], tokens)
        losses.append(float(loss))
        if os.environ.get("RANK", "0") == "0":
            print(f"step {number + 1}: loss {losses[-1]:.4f}", flush=True)
    ftp.save(args.out, held, mesh, here, step=args.steps)
    return losses


if __name__ == "__main__":
    main()
    ftp.destroy_process_group()
