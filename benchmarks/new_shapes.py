"""Cost of a new sequence length: the first step at it, beside a step at a length seen before; and a
compiled step of all lengths beside the steps compiled for one length each.

    python benchmarks/new_shapes.py

A 4-layer decoder, loss and gradients, on two simulated ranks; CPU seconds of this process, medians
over the lengths. The same decoder on a part of the tokens: a share of the length, and a
number of its text, which no formula gives. Compiled: an
MLP, two sequences, loss and gradients, first at S = 200, on one rank; CPU time in turns, beside two
steps of the same program for that length alone, of which the second shows the noise.
"""

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import ftp
from ftp import P

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.support.models import LlamaConfig, build, cuts, lm_loss, specs

LENGTHS = (17, 24, 9, 40, 31, 12, 50, 22, 35, 48)
ROUNDS = 100


def measured(mesh: Any, batch_spec: P, *, is_dynamic: bool) -> tuple[float, float, float]:
    """Seconds of the first two steps, of the first at each further length, and of the next."""
    cfg = LlamaConfig(layers=4, dim=64, hidden=128)
    fn, params = ftp.functionalize(build(cfg))
    tp = "tp" if batch_spec == P() else None
    dims = {1: torch.export.Dim("S", min=1, max=64)} if is_dynamic else {}
    step = ftp.shard(
        lm_loss(fn),
        mesh,
        ftp.plan(params, specs(cuts(cfg), tp=tp)),
        batch_specs=batch_spec,
        dynamic_shapes=dims,
    )

    def seconds(length: int) -> float:
        tokens = torch.zeros(2, length, dtype=torch.int64)
        start = time.process_time()
        step(params, (tokens, tokens))
        return time.process_time() - start

    first = sum(
        seconds(length) for length in (16, 15)
    )  # a length that the axis divides, and another
    new, again = [], []
    for length in LENGTHS:
        new.append(seconds(length))
        again.append(min(seconds(length) for _ in range(3)))
    return first, statistics.median(new), statistics.median(again)


def numbers_read(number: Callable[[int], int]) -> tuple[float, float]:
    """Median seconds of the first step at a length of which the function makes a ``number``, and of
    the next one. Eight lengths come first: their plan serves the others.
    """
    cfg = LlamaConfig(layers=4, dim=64, hidden=128)
    fn, params = ftp.functionalize(build(cfg))
    loss_of = lm_loss(fn)

    def loss(p: Any, batch: Any) -> torch.Tensor:
        keep = number(batch[0].shape[1])
        return loss_of(p, tuple(x[:, :keep] for x in batch))

    mesh = ftp.simulated_mesh((2,), ("tp",))
    step = ftp.shard(loss, mesh, ftp.plan(params, specs(cuts(cfg), tp="tp")), batch_specs=P())

    def seconds(length: int) -> float:
        tokens = torch.zeros(2, length, dtype=torch.int64)
        start = time.process_time()
        step(params, (tokens, tokens))
        return time.process_time() - start

    for length in (16, 15, 17, 24, 9, 40, 31, 12):
        seconds(length)
    found = [(seconds(length), seconds(length)) for length in (50, 21, 37, 48, 43, 46, 11, 13, 28)]
    new, again = zip(*found, strict=True)
    return statistics.median(new), statistics.median(again)


def compiled(width: int, lengths: Sequence[int]) -> None:
    """Print the time of the step of all lengths, as shares of the time of a length's own step."""
    generator = torch.Generator().manual_seed(0)
    params = {
        "up": torch.randn(width, 4 * width, generator=generator) / width**0.5,
        "down": torch.randn(4 * width, width, generator=generator) / (4 * width) ** 0.5,
    }

    def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        return ((x @ p["up"]).relu() @ p["down"] - x).square().mean()

    mesh = ftp.simulated_mesh((1,), ("tp",))
    dims = {1: torch.export.Dim("S", max=4096)}
    dynamic = ftp.shard(loss, mesh, compile=True, dynamic_shapes=dims)
    dynamic(params, torch.randn(2, 200, width, generator=generator))
    own, other = (ftp.shard(loss, mesh, compile=True, dynamic_shapes={}) for _ in range(2))
    for length in lengths:
        x = torch.randn(2, length, width, generator=generator)

        def seconds(step: Any, x: torch.Tensor = x) -> float:
            start = time.process_time()
            step(params, x)
            return time.process_time() - start

        steps = [own, dynamic, other]
        for step in steps * 3:
            seconds(step)
        took: dict[Any, list[float]] = {step: [] for step in steps}
        for _ in range(ROUNDS):
            steps.append(steps.pop(0))
            for step in steps:
                took[step].append(seconds(step))
        shares = [
            statistics.quantiles([a / b for a, b in zip(took[step], took[own], strict=True)], n=4)
            for step in (dynamic, other)
        ]
        texts = ["/".join(f"{q:.3f}" for q in quartiles) for quartiles in shares]
        print(f"{width}, {length}: {1e3 * statistics.median(took[own]):.2f}, {', '.join(texts)}")


def main() -> None:
    torch.set_num_threads(1)
    print(
        "mesh, batch spec, dynamic_shapes: first two lengths (s), a new length (ms), again (ms),"
        " cost of a new one (ms)"
    )
    for axis, spec in (("tp", P()), ("cp", P(None, "cp"))):
        for is_dynamic in (False, True):
            mesh = ftp.simulated_mesh((2,), (axis,))
            first, new, again = measured(mesh, spec, is_dynamic=is_dynamic)
            print(
                f"{axis} 2, {spec}, {is_dynamic}: {first:.2f}, {1e3 * new:.1f}, {1e3 * again:.1f},"
                f" {1e3 * (new - again):.1f}"
            )
    numbers = {
        "int(0.75 * S)": lambda size: int(0.75 * size),
        "int(str(S)) - 2": lambda size: int(str(size)) - 2,
    }
    for name, number in numbers.items():
        new, again = numbers_read(number)
        print(f"tp 2, {name}: a new length {1e3 * new:.1f}, again {1e3 * again:.1f} (ms)")
    print(
        "compiled, width, S: own step (ms), quartiles of the dynamic step's share, of another own"
        " step's"
    )
    compiled(256, (20, 100, 300, 700))
    compiled(8, (20,))  # the cost of a call


if __name__ == "__main__":
    main()
