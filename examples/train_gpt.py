"""Trains a byte-level GPT on the source of Python's own standard library, on a dp x tp mesh.

    python examples/train_gpt.py                                # a simulated 2 x 2 mesh in this process
    torchrun --nproc-per-node=4 examples/train_gpt.py           # the same file on four processes, the same losses

The model is ordinary torch and knows nothing of the mesh; SPECS says where its weights live. Every tenth or so file of the
library is held out for validation. Writes losses.json, loss.png and sample.txt to runs/train_gpt.
"""

import argparse
import json
import math
import os
import sysconfig
import time
import zlib
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn
from torch.nn import functional as F

import ftp
from ftp import P

VOCAB = 256
SPECS = {
    "emb.weight": P("tp", None),
    "layers.*.attn.w[qkv].weight": P("tp", None),
    "layers.*.attn.wo.weight": P(None, "tp"),
    "layers.*.mlp.up.weight": P("tp", None),
    "layers.*.mlp.up.bias": P("tp"),
    "layers.*.mlp.down.weight": P(None, "tp"),
    "head.weight": P("tp", None),
}  # what no pattern names is replicated: positions, norms, the bias after the all-reduce


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.head_dim = dim // heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(dim, dim, bias=False) for _ in range(4))

    def forward(self, x):
        q, k, v = (w(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        return self.wo(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(dim), Attention(dim, heads)
        self.norm2, self.mlp = nn.LayerNorm(dim), MLP(dim)

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """bytes (batch, seq) -> logits (batch, seq, 256)."""

    def __init__(self, dim, layers, heads, context):
        super().__init__()
        self.emb, self.pos = nn.Embedding(VOCAB, dim), nn.Embedding(context, dim)
        self.layers = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, VOCAB, bias=False)
        for name, param in self.named_parameters():
            if param.ndim == 2:
                ends_a_branch = name.endswith(("wo.weight", "down.weight"))
                nn.init.normal_(param, std=0.05 / math.sqrt(2 * layers) if ends_a_branch else 0.05)
            elif name.endswith("bias"):
                nn.init.zeros_(param)

    def forward(self, tokens):
        x = self.emb(tokens) + self.pos(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def read_corpus(max_bytes):
    """(train, held out) as one byte tensor each; which file goes where depends on its name alone, so every rank agrees."""
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    names = sorted(p.relative_to(root).as_posix() for p in root.rglob("*.py"))
    names = [name for name in names if not skipped & set(name.split("/"))]
    splits, sizes = {"train": [], "val": []}, {"train": 0, "val": 0}
    for name in sorted(names, key=lambda name: zlib.crc32(name.encode())):
        split = "val" if zlib.crc32(name.encode()[::-1]) % 10 == 0 else "train"
        if sizes[split] < max_bytes // (10 if split == "val" else 1):
            splits[split].append((root / name).read_bytes() + b"\n\n")
            sizes[split] += len(splits[split][-1])
    if not all(splits.values()):
        raise SystemExit(f"found too few .py files under {root} to train on")
    return tuple(torch.frombuffer(bytearray(b"".join(splits[s])), dtype=torch.uint8) for s in ("train", "val"))


def batch_at(data, step, *, batch, context, seed):
    """(inputs, targets) of (batch, context): a function of (seed, step), whatever the mesh."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts = torch.randint(len(data) - context - 1, (batch, 1), generator=generator)
    rows = data[starts + torch.arange(context + 1)].long()
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def learning_rate(step, steps, peak):
    """Linear warm-up over a twentieth of the steps, then a cosine down to a tenth of the peak."""
    warmup = max(1, steps // 20)
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return peak * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


def sample(logits_fn, params, prompt, *, count, context, seed, temperature=0.8):
    """``count`` bytes after ``prompt``. The window has a fixed, padded size, so the forward pass is traced once."""
    generator = torch.Generator().manual_seed(seed)
    text = list(prompt)
    for _ in range(count):
        window = text[-context:]
        logits = logits_fn(params, torch.tensor([window + [0] * (context - len(window))]))
        logits = logits[0, len(window) - 1].cpu()  # attention is causal: the padding after the last byte has no say
        text.append(int(torch.multinomial(F.softmax(logits / temperature, dim=-1), 1, generator=generator)))
    return bytes(text)


def plot(losses, val, title, path):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    width = max(1, len(losses) // 40)
    smooth = [sum(losses[max(0, i - width + 1) : i + 1]) / len(losses[max(0, i - width + 1) : i + 1]) for i in range(len(losses))]
    figure, axes = plt.subplots(figsize=(7.5, 4.5), layout="constrained")
    axes.plot(losses, color="tab:blue", alpha=0.25, linewidth=0.8)
    axes.plot(smooth, color="tab:blue", linewidth=1.6, label=f"train (mean of {width})")
    axes.plot([step for step, _ in val], [loss for _, loss in val], color="tab:orange", marker="o", markersize=4, label="held-out files")
    axes.set(xlabel="step", ylabel="cross entropy, nats per byte", title=title)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def parse_args(argv):
    world = int(os.environ.get("WORLD_SIZE", 4))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--eval-every", type=int, default=50)
    parser.add_argument("--eval-batches", type=int, default=4)
    parser.add_argument("--sample-bytes", type=int, default=400)
    parser.add_argument("--corpus-bytes", type=int, default=8_000_000, help="training text at most")
    parser.add_argument("--tp", type=int, default=2 if world % 2 == 0 else 1)
    parser.add_argument("--dp", type=int, default=None, help="by default what tp leaves of the processes, or of four simulated ranks")
    parser.add_argument("--device", default=None, help="cpu or cuda; by default what ftp.make_mesh takes")
    parser.add_argument("--threads", type=int, default=1, help="of torch; more gain little on shards this small, and wait for busy cores")
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parents[1] / "runs" / "train_gpt")
    args = parser.parse_args(argv)
    args.dp = args.dp or max(1, world // args.tp)
    return args


def main(argv=None):
    args = parse_args(argv)
    started = time.perf_counter()
    torch.set_num_threads(args.threads)
    is_first = int(os.environ.get("RANK", 0)) == 0
    console = Console(quiet=not is_first, highlight=False)

    mesh = ftp.make_mesh((args.dp, args.tp), ("dp", "tp"), device_type=args.device)
    simulated = not torch.distributed.is_initialized()
    name = f"dp {args.dp} x tp {args.tp}, {'simulated in one process' if simulated else f'{args.dp * args.tp} processes'}"

    torch.manual_seed(args.seed)
    fn, params = ftp.functionalize(GPT(args.dim, args.layers, args.heads, args.context))

    def loss_fn(params, batch):
        tokens, targets = batch
        return F.cross_entropy(fn(params, tokens).flatten(0, 1), targets.flatten())

    specs = ftp.plan(params, SPECS)
    count = sum(p.numel() for p in params.values())
    params = ftp.device_put(params, mesh, specs)
    step_fn = ftp.shard(loss_fn, mesh, specs, batch_specs=P("dp"))
    eval_fn = ftp.spmd(loss_fn, mesh, (specs, P("dp")), P())
    forward = ftp.spmd(fn, mesh, (specs, P()), P())

    # AdamW moves each element by itself: the plain optimizer on local shards is the sharded optimizer, state and all.
    matrices = [p for p in params.values() if p.ndim == 2]
    vectors = [p for p in params.values() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95))

    train_data, val_data = read_corpus(args.corpus_bytes)
    console.print(
        f"{name}\n{count:,} parameters; {len(train_data):,} bytes to train on, {len(val_data):,} held out"
        f"\n{args.steps} steps of {args.batch} x {args.context} bytes"
    )

    def put(data, step, seed):
        return ftp.device_put(batch_at(data, step, batch=args.batch, context=args.context, seed=seed), mesh, P("dp"))

    val_batches = [put(val_data, i, args.seed + 1) for i in range(args.eval_batches)]

    def evaluate():
        return sum(eval_fn(params, batch).item() for batch in val_batches) / len(val_batches)

    columns = [BarColumn(), MofNCompleteColumn(), TextColumn("loss {task.fields[loss]:.3f}  val {task.fields[val]:.3f}")]
    columns += [TextColumn("{task.fields[rate]:,.0f} tokens/s"), TimeRemainingColumn()]
    losses, val, seconds = [], [(0, evaluate())], 0.0
    console.print(f"step {0:4d}   val {val[0][1]:.4f}")
    with Progress(*columns, console=console, disable=not is_first) as progress:
        task = progress.add_task("", total=args.steps, loss=math.nan, val=val[0][1], rate=0.0)
        for step in range(args.steps):
            begin = time.perf_counter()
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, args.steps, args.lr)
            loss, grads = step_fn(params, put(train_data, step, args.seed))
            for path, param in params.items():
                param.grad = grads[path]
            optimizer.step()
            losses.append(loss.item())
            if step > 0:  # the first one traces and plans
                seconds += time.perf_counter() - begin
            rate = step * args.batch * args.context / seconds if step > 0 else 0.0
            if (step + 1) % args.eval_every == 0 or step + 1 == args.steps:
                val.append((step + 1, evaluate()))
                progress.console.print(f"step {step + 1:4d}   val {val[-1][1]:.4f}   train {losses[-1]:.4f}   {rate:,.0f} tokens/s")
            progress.update(task, advance=1, loss=losses[-1], val=val[-1][1], rate=rate)

    def logits_fn(params, tokens):
        return forward(params, ftp.device_put(tokens, mesh, P()))

    text = sample(logits_fn, params, b"def ", count=args.sample_bytes, context=args.context, seed=args.seed)
    text = text.decode("utf-8", errors="replace")
    if is_first:
        args.out.mkdir(parents=True, exist_ok=True)
        record = {"mesh": {"dp": args.dp, "tp": args.tp, "simulated": simulated}, "tokens_per_second": rate, "train": losses, "val": val}
        record["arguments"] = {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()}
        (args.out / "losses.json").write_text(json.dumps(record, indent=1) + "\n")
        (args.out / "sample.txt").write_text(text, encoding="utf-8")
        plot(losses, val, f"byte-level GPT on Python's standard library\n{name}", args.out / "loss.png")
        console.rule("a sample")
        console.print(text, markup=False)
        console.rule()
        console.print(
            f"{time.perf_counter() - started:.0f} s in all; losses.json, loss.png and sample.txt are in {args.out}", soft_wrap=True
        )
    if not simulated:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
