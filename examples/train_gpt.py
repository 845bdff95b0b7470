"""Train a byte-level GPT on the source of Python's standard library, on a dp x tp mesh.

On a simulated 2 x 2 mesh in this process:

    python examples/train_gpt.py

On four processes, with the same losses:

    torchrun --nproc-per-node=4 examples/train_gpt.py

The same, resumed from the last checkpoint when a process dies:

    torchrun --nproc-per-node=4 --max-restarts=3 examples/train_gpt.py

A loop to copy. The model is ordinary torch without a mesh; SPECS shards its weights; the train step
is one pure function of state and batch. A step depends on the seed and its number only: to resume a
run that was stopped or killed, on any number of processes, run the same command again.

About every tenth file is held out for validation. Writes metrics.jsonl, checkpoints, loss.png and
sample.txt to runs/train_gpt, and to TensorBoard if that is installed.
"""

import argparse
import json
import math
import os
import shutil
import signal
import sysconfig
import time
import zlib
from contextlib import closing, contextmanager
from pathlib import Path

import torch
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
}  # replicated: positions, norms, the bias after the all-reduce
# Keys and values when sampling, (batch, heads, context, head_dim): sharded by heads and sequence.
CACHE_SPEC = P(None, "tp", "dp")


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.head_dim = dim // heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(dim, dim, bias=False) for _ in range(4))

    def forward(self, x, cache=None, positions=None):
        q, k, v = (
            w(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for w in (self.wq, self.wk, self.wv)
        )
        if cache is None or positions is None:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:  # write k and v to the cache, and attend to positions up to each byte's own
            k, v = (
                old.index_copy(2, positions, new) for old, new in zip(cache, (k, v), strict=True)
            )
            seen = torch.arange(k.shape[2], device=x.device) <= positions[:, None]
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        return self.wo(y.transpose(1, 2).flatten(2)), (k, v)


class MLP(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, dim, heads, dropout):
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(dim), Attention(dim, heads)
        self.norm2, self.mlp = nn.LayerNorm(dim), MLP(dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x, cache=None, positions=None):
        y, cache = self.attn(self.norm1(x), cache, positions)
        x = x + self.dropout(y)
        return x + self.dropout(self.mlp(self.norm2(x))), cache


class GPT(nn.Module):
    """bytes (batch, seq) -> logits (batch, seq, 256); with a cache, bytes at ``positions`` ->
    (logits, cache).
    """

    def __init__(self, dim, layers, heads, context, dropout):
        super().__init__()
        self.emb, self.pos = nn.Embedding(VOCAB, dim), nn.Embedding(context, dim)
        self.layers = nn.ModuleList(Block(dim, heads, dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, VOCAB, bias=False)
        for name, param in self.named_parameters():
            if param.ndim == 2:
                ends_a_branch = name.endswith(("wo.weight", "down.weight"))
                nn.init.normal_(param, std=0.05 / math.sqrt(2 * layers) if ends_a_branch else 0.05)
            elif name.endswith("bias"):
                nn.init.zeros_(param)

    def forward(self, tokens, cache=None, positions=None):
        x = self.emb(tokens) + self.pos(
            torch.arange(tokens.shape[1], device=tokens.device) if positions is None else positions
        )
        kept = []
        for i, layer in enumerate(self.layers):
            x, layer_cache = layer(x, None if cache is None else cache[i], positions)
            kept.append(layer_cache)
        logits = self.head(self.norm(x))
        return logits if cache is None else (logits, kept)


def read_corpus(max_bytes):
    """(train, held out), one byte tensor each. A file's name decides where it goes, so that all
    ranks agree.
    """
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
    return tuple(
        torch.frombuffer(bytearray(b"".join(splits[s])), dtype=torch.uint8)
        for s in ("train", "val")
    )


def batch_at(data, key, *, batch, context):
    """(inputs, targets), (batch, context) each, drawn from ``key``: the same on any number of
    processes.
    """
    starts = ftp.random.randint(key, 0, len(data) - context - 1, (batch, 1))
    rows = data[starts + torch.arange(context + 1)].long()
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def make_train_step(fn, opt, schedule, max_norm):
    """One pure function: ``(state, batch, stops) -> (state, metrics)``."""

    def loss_fn(params, batch, key):
        tokens, targets = batch
        return F.cross_entropy(fn(params, tokens, rng=key).flatten(0, 1), targets.flatten())

    def train_step(state, batch, stops):
        # Dropout depends on the step's number only.
        key = ftp.random.fold_in(state["key"], state["step"])
        grads, loss = torch.func.grad_and_value(loss_fn)(state["params"], batch, key)
        nonfinite = ftp.optim.count_nonfinite((loss, grads))
        grads, norm = ftp.optim.clip_by_global_norm(grads, max_norm)
        updated = opt.update(grads, state["opt"], state["params"])
        params, opt_state = ftp.optim.select(
            nonfinite == 0, updated, (state["params"], state["opt"])
        )
        # A signal reaches processes at different times: if one has it, all stop after this step.
        metrics = {
            "loss": loss,
            "norm": norm,
            "lr": schedule(state["step"]),
            "nonfinite": nonfinite,
            "stop": stops.amax(),
        }
        return {
            "params": params,
            "opt": opt_state,
            "step": state["step"] + 1,
            "key": state["key"],
        }, metrics

    return train_step


def make_generate_step(fn, temperature):
    """One pure function: ``(params, cache, tokens, first, used, key) -> (cache, token)``, the byte
    after the first ``used`` tokens.

    ``tokens`` are at the positions from ``first`` on: a padded window of (1, context), or one byte
    of (1, 1). It is traced for these two shapes, whatever the length of the text.
    """

    def generate_step(params, cache, tokens, first, used, key):
        logits, cache = fn(
            params, tokens, cache, first + torch.arange(tokens.shape[1], device=tokens.device)
        )
        # Attention is causal: padding after the last byte has no effect, and its keys and values in
        # the cache are overwritten before they are read.
        return cache, ftp.random.categorical(
            key, logits.index_select(1, used - 1)[:, 0] / temperature
        )

    return generate_step


def sample(step, params, cache, prompt, *, count, context, seed, device):
    """``prompt`` and ``count`` more bytes. The model reads a window at first and whenever the cache
    is full, else the last byte alone.
    """
    key = ftp.random.key(seed, device=device)
    text, start = list(prompt), None  # the cache holds text[start:]
    for i in range(count):
        if start is None or len(text) - start > context:
            start = max(0, len(text) - (context if start is None else context // 2))
            first, tokens = 0, text[start:]
        else:
            first, tokens = len(text) - 1 - start, text[-1:]
        used = len(tokens)
        tokens = tokens if used == 1 and first else tokens + [0] * (context - used)
        numbers = (torch.tensor(value, device=device) for value in ([tokens], first, [used]))
        cache, token = step(params, cache, *numbers, ftp.random.fold_in(key, i))
        text.append(int(token))
    return bytes(text)


class Metrics:
    """Metrics of a run: a JSON line per step in metrics.jsonl, and TensorBoard if installed. The
    first rank writes.
    """

    def __init__(self, folder, first_step, is_writer):
        self.file = self.board = None
        self.path = folder / "metrics.jsonl"
        if not is_writer:
            return
        folder.mkdir(parents=True, exist_ok=True)
        # Steps after the checkpoint that the run resumes from will be written again.
        kept = (
            [line for line in self.lines() if json.loads(line)["step"] <= first_step]
            if first_step
            else []
        )
        self.path.write_text("".join(kept))
        self.file = self.path.open("a", buffering=1)
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            return
        self.board = SummaryWriter(folder / "tensorboard", purge_step=first_step + 1)

    def lines(self):
        """Complete lines: a killed run may leave half of one."""
        return (
            [
                line
                for line in self.path.read_text().splitlines(keepends=True)
                if line.endswith("\n")
            ]
            if self.path.exists()
            else []
        )

    def records(self):
        return [json.loads(line) for line in self.lines()]

    def write(self, step, **values):
        if self.file is not None:
            self.file.write(json.dumps({"step": step, **values}) + "\n")
        if self.board is not None:
            for name, value in values.items():
                self.board.add_scalar(name, value, step)

    def close(self):
        for sink in (self.file, self.board):
            if sink is not None:
                sink.close()


@contextmanager
def progress_bar(total, done, is_shown):
    """``(say, update)``: print a line above the progress bar, advance the bar; without rich only
    lines.
    """
    try:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )
    except ImportError:
        yield (print if is_shown else lambda text: None), lambda **fields: None
        return
    columns = [
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}  {task.fields[rate]:,.0f} tokens/s"),
    ]
    console = Console(quiet=not is_shown, highlight=False)
    with Progress(
        *columns, TimeRemainingColumn(), console=console, disable=not is_shown
    ) as progress:
        task = progress.add_task("", total=total, completed=done, loss=math.nan, rate=0.0)
        yield (
            lambda text: console.print(text, markup=False, soft_wrap=True),
            lambda **fields: progress.update(task, advance=1, **fields),
        )


def plot(records, title, path):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    losses = [r["loss"] for r in records if "loss" in r]
    val = [(r["step"], r["val_loss"]) for r in records if "val_loss" in r]
    width = max(1, len(losses) // 40)
    smooth = [
        sum(losses[max(0, i - width + 1) : i + 1]) / len(losses[max(0, i - width + 1) : i + 1])
        for i in range(len(losses))
    ]
    figure, axes = plt.subplots(figsize=(7.5, 4.5), layout="constrained")
    axes.plot(losses, color="tab:blue", alpha=0.25, linewidth=0.8)
    axes.plot(smooth, color="tab:blue", linewidth=1.6, label=f"train (mean of {width})")
    axes.plot(
        *zip(*val, strict=True),
        color="tab:orange",
        marker="o",
        markersize=4,
        label="held-out files",
    )
    axes.set(xlabel="step", ylabel="cross entropy, nats per byte", title=title)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def parse_args(argv):
    world = int(os.environ.get("WORLD_SIZE", 4))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument(
        "--dropout",
        type=float,
        default=0.0,
        help="the default run sees little text twice and needs none",
    )
    parser.add_argument(
        "--lr",
        type=float,
        default=3e-3,
        help="peak, after a warm-up of a twentieth of the steps; then a cosine to a tenth",
    )
    parser.add_argument("--max-norm", type=float, default=1.0, help="gradients are clipped to it")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--eval-every", type=int, default=50)
    parser.add_argument("--eval-batches", type=int, default=4)
    parser.add_argument("--save-every", type=int, default=100)
    parser.add_argument("--keep", type=int, default=2, help="checkpoints to keep")
    parser.add_argument(
        "--fresh", action="store_true", help="start anew where there are checkpoints to go on from"
    )
    parser.add_argument("--sample-bytes", type=int, default=400)
    parser.add_argument("--temperature", type=float, default=0.8, help="of the sample")
    parser.add_argument("--corpus-bytes", type=int, default=8_000_000, help="training text at most")
    parser.add_argument("--tp", type=int, default=2 if world % 2 == 0 else 1)
    parser.add_argument(
        "--dp",
        type=int,
        default=None,
        help="by default what tp leaves of the processes, or of four simulated ranks",
    )
    parser.add_argument(
        "--device", default=None, help="cpu or cuda; by default what ftp.make_mesh takes"
    )
    parser.add_argument(
        "--threads",
        type=int,
        default=1,
        help="of torch; more gain little on shards this small, and wait for busy cores",
    )
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).resolve().parents[1] / "runs" / "train_gpt"
    )
    args = parser.parse_args(argv)
    args.dp = args.dp or max(1, world // args.tp)
    return args


@contextmanager
def noted(number):
    """A list to which each signal of this number is appended."""
    come = []
    old = signal.signal(number, lambda number, frame: come.append(number))
    try:
        yield come
    finally:
        signal.signal(number, old)


def run(args, stop_signals):
    started = time.perf_counter()
    torch.set_num_threads(args.threads)
    is_first = int(os.environ.get("RANK", 0)) == 0
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))

    mesh = ftp.make_mesh((args.dp, args.tp), ("dp", "tp"), device_type=args.device)
    ranks = args.dp * args.tp
    simulated = not torch.distributed.is_initialized()
    name = (
        f"dp {args.dp} x tp {args.tp},"
        f" {'simulated in one process' if simulated else f'{ranks} processes'}"
    )

    # The model, and functions of it: a train step and the forward pass.
    torch.manual_seed(args.seed)
    model = GPT(args.dim, args.layers, args.heads, args.context, args.dropout)
    fn, params = ftp.functionalize(model)
    eval_fn, _ = ftp.functionalize(model.eval())

    def eval_loss(params, batch):
        tokens, targets = batch
        return F.cross_entropy(eval_fn(params, tokens).flatten(0, 1), targets.flatten())

    warmup = max(1, args.steps // 20)
    rise, fall = (
        ftp.optim.schedules.linear(args.lr, warmup, start=1 / warmup),
        ftp.optim.schedules.cosine(args.lr, args.steps, end=args.lr / 10),
    )
    schedule = ftp.optim.schedules.sequence([rise, fall], [warmup])
    vectors = {name: {"weight_decay": 0.0} for name, p in params.items() if p.ndim < 2}
    opt = ftp.optim.from_torch(
        torch.optim.AdamW, lr=schedule, betas=(0.9, 0.95), weight_decay=0.1, groups=vectors
    )

    # A checkpoint is this tree: all that the next step depends on.
    state = {
        "params": params,
        "opt": opt.init(params),
        "step": torch.tensor(0),
        "key": ftp.random.key(args.seed),
    }
    specs = ftp.plan(params, SPECS)
    specs = {"params": specs, "opt": specs, "step": P(), "key": P()}
    checkpoints = args.out / "checkpoints"
    if args.fresh and attempt == 0 and is_first:
        shutil.rmtree(checkpoints, ignore_errors=True)
    if ftp.checkpoints(checkpoints) and not (args.fresh and attempt == 0):
        state = ftp.load(checkpoints, state, mesh, specs)
    else:
        state = ftp.device_put(state, mesh, specs)
    first_step = int(state["step"])

    train_step = make_train_step(fn, opt, schedule, args.max_norm)
    each_rank = P(("dp", "tp"))
    # Each rank has its own signal, an argument sharded over tp too: only dp is a data axis.
    train_step = ftp.spmd(
        train_step, mesh, (specs, P("dp"), each_rank), (specs, P()), donate=(0,), data_axes=("dp",)
    )
    eval_step = ftp.spmd(eval_loss, mesh, (specs["params"], P("dp")), P())
    generate_step = make_generate_step(eval_fn, args.temperature)
    generate_step = ftp.spmd(
        generate_step,
        mesh,
        (specs["params"], CACHE_SPEC, *[P()] * 4),
        (CACHE_SPEC, P()),
        donate=(1,),
    )

    # The data. Step n draws its batch from the n-th key. In a real loader ftp.local_slice tells the
    # rows of this rank.
    train_data, val_data = read_corpus(args.corpus_bytes)
    train_key, val_key = ftp.random.split(ftp.random.key(args.seed + 1))

    def batch(data, key, step):
        rows = batch_at(data, ftp.random.fold_in(key, step), batch=args.batch, context=args.context)
        return ftp.device_put(rows, mesh, P("dp"))

    val_batches = [batch(val_data, val_key, i) for i in range(args.eval_batches)]

    def evaluate(params):
        return sum(eval_step(params, rows).item() for rows in val_batches) / len(val_batches)

    # The loop.
    seconds, timed, rate = 0.0, 0, 0.0
    with (
        closing(Metrics(args.out, first_step, is_first)) as metrics,
        progress_bar(args.steps, first_step, is_first) as (say, update),
    ):
        count = sum(p.numel() for p in params.values())
        say(
            f"{name}\n{count:,} parameters; {len(train_data):,} bytes to train on,"
            f" {len(val_data):,} held out"
        )
        say(
            f"{args.steps} steps of {args.batch} x {args.context} bytes"
            + (f", from step {first_step} on" if first_step else "")
        )
        if first_step == 0:
            val = evaluate(state["params"])
            metrics.write(0, val_loss=val)
            say(f"step {0:4d}   val {val:.4f}")
        for step in range(first_step, args.steps):
            begin = time.perf_counter()
            rows = batch(train_data, train_key, step)
            stops = torch.full(
                (ranks if simulated else 1,),
                len(stop_signals),
                dtype=torch.float32,
                device=mesh.device_type,
            )
            state, report = train_step(state, rows, stops)
            report = {key: value.item() for key, value in report.items()}
            if step > first_step:  # the first step traces and plans
                seconds, timed = seconds + time.perf_counter() - begin, timed + 1
                rate = timed * args.batch * args.context / seconds
            is_stopped = report.pop("stop") > 0
            done = step + 1
            metrics.write(done, **report)
            update(loss=report["loss"], rate=rate)
            if report["nonfinite"]:
                say(
                    f"step {done:4d}   {report['nonfinite']} elements of the loss and its"
                    " gradients are not finite; the update is skipped"
                )
            if done % args.eval_every == 0 or done == args.steps:
                val = evaluate(state["params"])
                metrics.write(done, val_loss=val)
                say(
                    f"step {done:4d}   val {val:.4f}   train {report['loss']:.4f}   {rate:,.0f}"
                    " tokens/s"
                )
            if done % args.save_every == 0 or done == args.steps or is_stopped:
                ftp.check_replicas(state, mesh, specs, step=done)  # do not save drifted replicas
                ftp.save(checkpoints, state, mesh, specs, step=done, keep=args.keep)
            if is_stopped:
                say(
                    f"stopped after step {done}, as a signal asked; the same command goes on from"
                    " there"
                )
                break

    if int(state["step"]) == args.steps:
        shape = (1, args.heads, args.context, args.dim // args.heads)
        cache = ftp.device_put(
            [(torch.zeros(shape), torch.zeros(shape)) for _ in range(args.layers)], mesh, CACHE_SPEC
        )
        options = {
            "count": args.sample_bytes,
            "context": args.context,
            "seed": args.seed,
            "device": mesh.device_type,
        }
        text = sample(generate_step, state["params"], cache, b"def ", **options).decode(
            "utf-8", errors="replace"
        )
        if is_first:
            (args.out / "sample.txt").write_text(text, encoding="utf-8")
            plot(
                metrics.records(),
                f"byte-level GPT on Python's standard library\n{name}",
                args.out / "loss.png",
            )
            rule = "-" * 40
            print(f"{rule} a sample\n{text}\n{rule}")
            print(
                f"{time.perf_counter() - started:.0f} s in all; metrics.jsonl, loss.png,"
                f" sample.txt and checkpoints are in {args.out}"
            )
    ftp.destroy_process_group()


def main(argv=None):
    with noted(signal.SIGTERM) as stop_signals:
        run(parse_args(argv), stop_signals)


if __name__ == "__main__":
    main()
