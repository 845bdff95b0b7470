"""Cost of a new sequence length: the first step at it, beside a step at a length seen before.

    python benchmarks/new_shapes.py

A 4-layer decoder, loss and gradients, on two simulated ranks; CPU seconds of this process, medians
over the lengths.
"""

import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

import ftp
from ftp import P

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.support.models import LlamaConfig, build, cuts, lm_loss, specs

LENGTHS = (17, 24, 9, 40, 31, 12, 50, 22, 35, 48)


def measured(mesh: Any, batch_spec: P, *, is_dynamic: bool) -> tuple[float, float, float]:
    """Seconds of the first two steps, of the first at each further length, and of the next."""
    cfg = LlamaConfig(layers=4, dim=64, hidden=128)
    fn, params = ftp.functionalize(build(cfg))
    tp = "tp" if batch_spec == P() else None
    dims = {1: torch.export.Dim("S", min=1, max=64)} if is_dynamic else None
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


if __name__ == "__main__":
    main()
