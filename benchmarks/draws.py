"""Eager draws from a key beside torch's own: dropout forward and with its gradient, uniform,
normal; on one thread.

python benchmarks/draws.py [--save]
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import record  # type: ignore[import-not-found]
import torch
import torch.nn.functional as F

from ftp import random
from ftp.ops import philox

SHAPES = [(8, 512, 1024), (1024, 1024), (64, 1024), (64, 64)]
KEY = random.key(0)


def seconds(
    first: Callable[[], Any], second: Callable[[], Any], rounds: int
) -> tuple[float, float]:
    """Medians of two functions timed in turn, so that what else the machine does weighs on both."""
    times: tuple[list[float], list[float]] = ([], [])
    for i in range(rounds + 1):
        for f, found in zip((first, second), times, strict=True):
            start = time.perf_counter()
            f()
            if i:
                found.append(time.perf_counter() - start)
    return statistics.median(times[0]), statistics.median(times[1])


def gradient(dropout: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> Callable[[], Any]:
    leaf = x.clone().requires_grad_()
    return lambda: torch.autograd.grad(dropout(leaf).sum(), leaf)


def cases(shape: tuple[int, ...]) -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
    x = torch.randn(shape)
    part = [shape[0] // 2, *shape[1:-1], shape[-1] // 2]
    strides = philox.contiguous_strides(shape)
    return {
        "dropout": (lambda: random.dropout(KEY, x, 0.1), lambda: F.dropout(x, 0.1)),
        "dropout and gradient": (
            gradient(lambda x: random.dropout(KEY, x, 0.1), x),
            gradient(lambda x: F.dropout(x, 0.1), x),
        ),
        "uniform": (lambda: random.uniform(KEY, shape), lambda: torch.rand(shape)),
        "normal": (lambda: random.normal(KEY, shape), lambda: torch.randn(shape)),
        "a quarter's words": (
            lambda: philox.random_bits(KEY, part, strides, shape[-1] // 2),
            lambda: philox.random_bits(KEY, list(shape), strides, 0),
        ),
    }


def rows(rounds: int) -> list[dict[str, Any]]:
    out = []
    for shape in SHAPES:
        for name, (ours, theirs) in cases(shape).items():
            mine, other = seconds(ours, theirs, rounds)
            beside = "all words" if "quarter" in name else "torch"
            out.append(
                {
                    "case": name,
                    "shape": str(shape),
                    "ms": mine * 1e3,
                    "beside": beside,
                    "its ms": other * 1e3,
                    "ratio": mine / other,
                }
            )
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/draws.json")
    parser.add_argument("--rounds", type=int, default=15)
    given = parser.parse_args()
    torch.set_num_threads(1)
    table = rows(given.rounds)
    record.show(table, list(table[0]))
    if given.save:
        record.save("draws", {"rounds": given.rounds, "threads": 1, "rows": table})


if __name__ == "__main__":
    main()
