"""Choose the faster of torch's two CPU kernels for each matmul: MKL's (``aten::mm``) or oneDNN's.
Which one is faster depends on machine and shape.
"""

import contextlib
import json
import math
import os
import platform
import re
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import torch
from torch import fx

from ftp.ops.define import define, register_fake
from ftp.ops.native import read_own
from ftp.passes.copy_elimination import copied

aten = torch.ops.aten
LEAST = 1 << 20  # multiplications; below, overhead of the call outweighs the kernel
MARGIN = 0.98  # oneDNN is chosen if it takes less than this share of aten::mm's time
_TURNS = 30
_LONGEST = 0.05  # seconds to time one kernel on one matmul, unless two runs take longer

Matmul = str
Choose = Callable[[Collection[Matmul]], Collection[Matmul]]


def matmuls(graph: fx.Graph) -> list[Matmul]:
    """The distinct large float32 matmuls of a graph of `with_values`, each as text: shapes and
    strides of both operands, with a symbolic number as its value in brackets.
    """
    return sorted({p for node in graph.nodes if (p := _matmul(node))})


def at_one_size(matmul: Matmul, factor: float = 1) -> Matmul:
    """A matmul with the values of its symbolic numbers, times ``factor``.

    >>> at_one_size("[[[34], 64, 64, 1], [64, 8, 8, 1]]")
    '[[34, 64, 64, 1], [64, 8, 8, 1]]'
    """
    return re.sub(r"\[(\d+)\]", lambda found: str(max(1, int(factor * int(found[1])))), matmul)


def at_any_size(matmul: Matmul) -> Matmul:
    """A matmul without the values of its symbolic numbers."""
    return re.sub(r"\[\d+\]", "?", matmul)


def by_onednn(graph: fx.Graph, chosen: Collection[Matmul]) -> fx.Graph:
    """The graph with the chosen matmuls as calls of oneDNN."""
    new, env = copied(graph)
    for node in graph.nodes:
        if _matmul(node) in chosen:
            env[node].target = BY_ONEDNN
    return new


def measured(wanted: Sequence[Matmul], folder: Path) -> list[Matmul]:
    """The matmuls that oneDNN computes faster on this machine; timed once, and stored in a file in
    ``folder``.
    """
    file = folder / "matmuls.json"
    machine = (
        f"{platform.processor() or platform.machine()}"
        f" {torch.backends.cpu.get_cpu_capability()} {torch.__version__}"
    )
    key = f"{machine} {os.cpu_count()} cores, {torch.get_num_threads()} threads"
    known: dict[str, dict[Matmul, bool]] = {}
    with contextlib.suppress(OSError, ValueError):  # none, or not one of ours: timed anew
        read = json.loads(read_own(file))
        if isinstance(read, dict):
            known = {k: v for k, v in read.items() if isinstance(v, dict)}
    here: dict[Matmul, bool] = known.setdefault(key, {})
    if missing := [p for p in wanted if p not in here]:
        here |= {p: _is_faster(p) for p in missing}
        # Other ranks wait for the result, so a failed write is no error.
        with contextlib.suppress(OSError):
            handle, name = tempfile.mkstemp(dir=folder)
            with open(handle, "w") as out:
                json.dump(known, out)
            os.replace(name, file)
    return [p for p in wanted if here[p]]


def _matmul(node: fx.Node) -> Matmul | None:
    if node.target is not aten.mm.default:
        return None
    a, b = (operand.meta["val"] for operand in node.args)  # type: ignore[union-attr]
    if a.dtype is not torch.float32 or a.device.type != "cpu":
        return None
    if math.prod(map(_hint, (*a.shape, b.shape[1]))) < LEAST:
        return None
    return json.dumps([[*map(_written, (*x.shape, *x.stride()))] for x in (a, b)])


def _hint(x: int | torch.SymInt) -> int:
    """The number at the current size, without a guard: both kernels are right at any size."""
    if not isinstance(x, torch.SymInt):
        return x
    from torch.fx.experimental.symbolic_shapes import optimization_hint  # loads sympy

    return optimization_hint(x)


def _written(x: int | torch.SymInt) -> int | list[int]:
    return [_hint(x)] if isinstance(x, torch.SymInt) else x


def _is_faster(matmul: Matmul) -> bool:
    a, b = (_operand(*described) for described in json.loads(matmul))
    kernels = aten.mm.default, _mm_by_onednn
    best = [float("inf")] * 2
    spent = 0.0
    # With one thread, its CPU time does not depend on the machine's other work.
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    for turn in range(_TURNS):
        for i, kernel in enumerate(kernels):
            start = clock()
            kernel(a, b)
            took = clock() - start
            best[i], spent = min(best[i], took), spent + took
        if turn and spent > 2 * _LONGEST:
            break
    return best[1] < MARGIN * best[0]


def _operand(rows: int, columns: int, down: int, right: int) -> torch.Tensor:
    return torch.randn((rows - 1) * down + (columns - 1) * right + 1).as_strided(
        (rows, columns), (down, right)
    )


def _mm_by_onednn(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise.default(a, b.t(), None, "none", [], "")


BY_ONEDNN = define("mm_by_onednn(Tensor a, Tensor b) -> Tensor")
torch.library.impl("ftp::mm_by_onednn", "CPU", _mm_by_onednn)


@register_fake("ftp::mm_by_onednn")
def _(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.new_empty(a.shape[0], b.shape[1])
