"""Train transformers' Llama, as it stands, in two pipeline stages on Python's standard library.

torchrun --nproc-per-node=4 examples/train_pipeline.py --steps 20                # (pp 2, dp 2)
torchrun --nproc-per-node=4 examples/train_pipeline.py --steps 40 --mesh dp,tp   # resumed
"""

import argparse
import os
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import ftp
from ftp import P

SIZES = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 4}
TEXT = b"".join(f.read_bytes() for f in sorted(Path(os.__file__).parent.glob("a*.py")))
ROWS, LENGTH, MICROBATCHES = 16, 64, 4


def main(given: list[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--mesh", default="pp,dp", help="pp,dp or dp,tp")
    parser.add_argument("--out", default="runs/train_pipeline")
    args = parser.parse_args(given)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, num_attention_heads=4, use_cache=False))
    fn, params = ftp.functionalize(model)
    mesh = ftp.make_mesh((2, 2), tuple(args.mesh.split(",")))
    pipe = ftp.Pipeline("pp", MICROBATCHES) if "pp" in args.mesh else None
    specs = pipe.place(params, P(), mesh) if pipe else ftp.from_hf(model)[0]
    opt = ftp.optim.from_torch(torch.optim.AdamW, lr=3e-3)

    def train_step(params, state, tokens):
        grad_fn = torch.func.grad_and_value(lambda p, t: fn(p, input_ids=t, labels=t).loss)
        grads, loss = ftp.optim.accumulate(grad_fn, MICROBATCHES)(params, tokens)
        grads, _ = ftp.optim.clip_by_global_norm(grads, 1.0)
        return *opt.update(grads, state, params), loss

    held, here = (params, opt.init(params)), (specs, opt.specs(params, specs))
    step = ftp.spmd(train_step, mesh, (*here, P("dp")), pipeline=pipe)
    saved = ftp.checkpoints(args.out)  # whatever mesh wrote it
    held = ftp.load(args.out, held, mesh, here) if saved else ftp.device_put(held, mesh, here)
    data, losses = torch.tensor(list(TEXT)), []
    for number in range(saved[-1].step if saved else 0, args.steps):
        starts = torch.arange(number * ROWS, (number + 1) * ROWS)[:, None] * LENGTH
        tokens = ftp.device_put(data[(starts + torch.arange(LENGTH)) % len(data)], mesh, P("dp"))
        *held, loss = step(*held, tokens)
        losses.append(float(loss))
        if os.environ.get("RANK", "0") == "0":
            print(f"step {number + 1}: loss {losses[-1]:.4f}", flush=True)
    ftp.save(args.out, tuple(held), mesh, here, step=args.steps)
    return losses


if __name__ == "__main__":
    main()
    ftp.destroy_process_group()
