"""Work done twice: matmuls' floating-point operations of all ranks over those of one device."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ftp.dataclass import dataclass
from ftp.planning.graph import Graph, Node, Value
from ftp.report.causes import Origins, describe
from ftp.report.disagreement import reshard_of
from ftp.report.flops import flops_of_call, is_counted
from ftp.report.lint import Finding
from ftp.report.names import Reported
from ftp.rules.call import replaced
from ftp.sharding.spec import PartitionSpec

REPEATED = 1.1  # times one device's work, above which it is a finding


@dataclass(frozen=True)
class Matmul:
    """A matmul, attention or convolution of a plan.

    Attributes:
        node: the planned op. layer: the op's layer, "" for none.
        flops: on one device.
        whole_on: the axes that do not cut the op; all their ranks compute it.
        times: all ranks' operations over one device's.
    """

    node: Node
    layer: str
    flops: float
    whole_on: tuple[str, ...]
    times: int


class Work(Reported, float):
    """Matmul operations of all ranks over one device's, a float; prints by layer.

    Shards of a cut op add up to the op, uneven ones too; an op that an axis does not cut is done on
    each of its ranks. Of attention every pair of a query and a key counts, masked or not. Per-rank
    code (``ftp.local``) is not counted.

    Attributes:
        flops: of all ranks. one_device: of one device that runs the whole program.
        by_layer: the ratio of each layer, ``layers.0`` first; ``""`` holds ops of no layer.
        matmuls: every matmul, attention and convolution, in order.
    """

    flops: float
    one_device: float
    by_layer: dict[str, float]
    matmuls: tuple[Matmul, ...]

    def __new__(cls, matmuls: Sequence[Matmul]) -> "Work":
        one, all_ranks = _sums(matmuls)
        made = super().__new__(cls, all_ranks / one if one else 1.0)
        made.flops, made.one_device, made.matmuls = all_ranks, one, tuple(matmuls)
        layers = dict.fromkeys(m.layer for m in matmuls if m.layer)
        made.by_layer = {}
        for layer in (*layers, ""):
            one, all_ranks = _sums([m for m in matmuls if m.layer == layer])
            if one:
                made.by_layer[layer] = all_ranks / one
        return made

    def __getnewargs__(self) -> tuple[Any, ...]:
        return (self.matmuls,)

    def report(self, most: int = 8) -> str:
        """The ratio, in all and by layer, and the ops with the most repeated work."""
        lines = [
            f"work: {self:.4g} x one device's, {self.flops:.4g} of {self.one_device:.4g} matmul"
            " FLOP"
        ]
        by_ratio: dict[str, list[str]] = {}
        for layer, ratio in self.by_layer.items():
            by_ratio.setdefault(f"{ratio:.4g}", []).append(layer or "no layer")
        for ratio, layers in by_ratio.items():
            shown = layers if len(layers) < 4 else [layers[0], "...", layers[-1]]
            lines.append(f"  {ratio:>6} x  {', '.join(shown)}")
        repeated = sorted((m for m in self.matmuls if m.times > 1), key=_excess)[::-1]
        for m in repeated[:most]:
            at = f" at {m.node.source}" if m.node.source else ""
            lines.append(f"  on {m.times} ranks: %{m.node.name}{at}, {m.flops:.4g} FLOP each")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.report()

    def __format__(self, spec: str) -> str:
        return format(float(self), spec)


def work_of(
    graph: Graph, axes: Mapping[str, int], layers: Mapping[Node, str] | None = None
) -> Work:
    """The work of a plan's graph on a mesh of ``axes``."""
    found = []
    for node in graph.nodes:
        if node.kind != "op" or node.rank_axes or not is_counted(node.target):
            continue
        if not (flops := _flops(node)):
            continue
        cut = {c.axis for c in node.cuts}
        whole = tuple(axis for axis, n in axes.items() if n > 1 and axis not in cut)
        times = math.prod(axes[axis] for axis in whole)
        found.append(Matmul(node, (layers or {}).get(node, ""), flops, whole, times))
    return Work(found)


def repeated_work(
    graph: Graph,
    axes: Mapping[str, int],
    used: Sequence[str],
    found: Origins,
    specs: dict[Node, PartitionSpec],
) -> list[Finding]:
    """Findings on work done more than ``REPEATED`` times, and on axes that cut no matmul.

    Args:
        used: the axes that a spec or a constraint names. Ranks along other axes repeat everything
            on purpose.
    """
    work = work_of(graph, {axis: axes[axis] for axis in used})
    findings = []
    if not work.matmuls:
        return findings
    for axis in used:
        whole = [m for m in work.matmuls if axis in m.whole_on]
        if axes[axis] > 1 and len(whole) == len(work.matmuls):
            text = (
                f"cuts no matmul: its {axes[axis]} ranks all do the whole work, though specs or"
                " constraints name it. Cut the batch or a matmul's weight over it."
            )
            findings.append(Finding("no matmul cut", "warning", f"mesh axis {axis!r}", text))
    if work > REPEATED:
        worst = max(work.matmuls, key=_excess)
        idle = "; ".join(_cause(worst.node, axis, found, specs) for axis in worst.whole_on)
        at = f" at {worst.node.source}" if worst.node.source else ""
        text = (
            f"matmuls of all ranks are {work:.3g} times one device's. Most of it is"
            f" %{worst.node.name} ({worst.node.target}){at}, done {worst.times} times: {idle}."
            " print(lowered.work) has the others."
        )
        findings.append(Finding("repeated work", "note", f"%{worst.node.name}", text))
    return findings


def _cause(node: Node, axis: str, found: Origins, specs: dict[Node, PartitionSpec]) -> str:
    """Why an axis does not cut a matmul."""
    for value in node.operands:
        resharded = reshard_of(value)
        if resharded is None or resharded.target.axis != axis or resharded.target.src.kind != "S":
            continue
        home = resharded.operands[0]
        by = f", cut by {describe(found[home, axis], specs)}," if (home, axis) in found else ""
        return f"its input %{home.node.name}{by} is gathered over {axis!r} for {resharded.cause}"
    return f"its inputs are whole over {axis!r}"


def _flops(node: Node) -> float:
    args, kwargs = replaced((node.args, dict(node.kwargs)), Value, lambda v: v.meta.shape)
    results = tuple(meta.shape for meta in node.results)
    return flops_of_call(node.target, args, kwargs, results)


def _sums(matmuls: Sequence[Matmul]) -> tuple[float, float]:
    return sum(m.flops for m in matmuls), sum(m.flops * m.times for m in matmuls)


def _excess(matmul: Matmul) -> float:
    return matmul.flops * (matmul.times - 1)
