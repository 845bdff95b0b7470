"""A planned program as text: a line per op, with repeated lines, such as those of a model's layers,
folded.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from ftp.ops.constrain import pin_from_str
from ftp.partitioning.collectives import Collective
from ftp.planning.graph import Graph, Node, Value
from ftp.report.flops import op_name
from ftp.report.names import dtype_name, without_numbers

LOCAL = ("slice", "contribute", "pad")  # reshards that send nothing
LONGEST_PERIOD = 4096  # lines of a repeated block


def program_lines(
    graph: Graph, issued: Mapping[str, Sequence[Collective]], why: Callable[[Node], str]
) -> list[str]:
    """The single-device program, a line per op; a collective's begins with ``>>``."""
    lines = []
    shown: dict[tuple[int, ...], str] = {}  # copies of a planned node share its results' text
    for node in graph.nodes:
        key = id(node.results), id(node.rule), id(node.cuts), id(node.pending)
        if key not in shown:
            shown[key] = ", ".join(map(typed, node.values))
        lines += _lines(node, shown[key], issued.get(node.name, ()), why(node))
    return lines + [f"  return %{v.node.name}: {typed(v)}" for v in graph.outputs]


def _lines(node: Node, result: str, issued: Sequence[Collective], why: str) -> list[str]:
    operands = ", ".join(f"%{v.node.name}" for v in node.operands)
    if node.kind == "reshard":
        if not issued:
            how = "local" if node.target.op in LOCAL else "with the next axis"
            return [
                f"  %{node.name}: {result} = {node.target.op} over {node.target.axis} of"
                f" {operands}, {how}"
            ]
        where = f"{issued[0].op} over {', '.join(issued[0].axes)}"
        others = len(issued[0].members) - 1
        bucket = f", in a bucket with {others} more" if others > 0 else ""
        return [
            f"  >> %{node.name}: {result} = {where} of {operands}, {issued[0].nbytes:,} bytes,"
            f" {why}{bucket}"
        ]
    if node.kind == "input":
        return [f"  %{node.name}: {result}"]
    name = (
        f"constrain[{pin_from_str(node.target)}]"
        if node.kind == "constrain"
        else op_name(node.target)
    )
    comment = f"    # {node.source}" if node.source else ""
    inside = [
        f"  >>   {c.op} over {', '.join(c.axes)}, {c.nbytes:,} bytes    # {c.source}"
        for c in issued
    ]
    return [f"  %{node.name}: {result} = {name}({operands}){comment}", *inside]


def typed(value: Value) -> str:
    """A value's dtype, global shape and the axes that cut each dim, as ``f32[512@dp, 256]``,
    followed by its pending sums.
    """
    sizes = zip(value.meta.shape, value.axes, strict=True)
    dims = [f"{size}@{','.join(axes)}" if axes else str(size) for size, axes in sizes]
    pending = "".join(
        f" {{{op} over {axis}}}" for axis, op in value.node.pending.get(value.index, ())
    )
    return f"{dtype_name(value.meta.dtype)}[{', '.join(dims)}]{pending}"


def folded(lines: Sequence[str], least: int = 3) -> list[str]:
    """Fold each run of equal blocks of lines into one, under a line with the count.

    Blocks are equal if they differ only in numbers in names. A block has at least ``least``
    lines.

    >>> print("\\n".join(folded(["a = f(x)", *[f"  %h_{i} = g" for i in range(9)], "b"], least=1)))
    a = f(x)
      block x 9:
      %h_0 = g
      end of block x 9
    b
    """
    numbers: dict[str, int] = {}
    alike = [numbers.setdefault(without_numbers(line), len(numbers)) for line in lines]
    found: list[str] = []
    fewest = np.min_scalar_type(len(numbers))  # of few bytes: quick to compare
    for start, period, count in _repeats(np.array(alike, dtype=fewest), least):
        if count == 1:
            found += lines[start : start + period]
        else:
            found += [
                f"  block x {count}:",
                *lines[start : start + period],
                f"  end of block x {count}",
            ]
    return found


def _repeats(alike: np.ndarray, least: int) -> list[tuple[int, int, int]]:
    """The sequence as consecutive blocks (start, length, count); the largest savings are folded
    first.
    """
    done: list[tuple[int, int, int]] = []
    todo = [(0, len(alike))]
    while todo:
        begin, end = todo.pop()
        best = (0, 0, 0, 0)  # lines saved, -period, start, count
        part = alike[begin:end]
        for period in range(least, min(len(part) // 2, LONGEST_PERIOD) + 1):
            if len(part) - period <= best[0]:
                break
            same = part[period:] == part[:-period]
            if np.count_nonzero(same) <= best[0]:
                continue
            edges = np.flatnonzero(np.diff(np.concatenate(([0], same.view(np.int8), [0]))))
            starts, lengths = edges[::2], edges[1::2] - edges[::2]
            longest = int(lengths.argmax()) if len(lengths) else 0
            count = int(lengths[longest]) // period if len(lengths) else 0
            best = max(
                best,
                (count * period, -period, int(starts[longest]) if len(lengths) else 0, count + 1),
            )
        saved, period, start, count = best
        if not saved:
            if begin < end:
                done.append((begin, end - begin, 1))
            continue
        length = -period
        done.append((begin + start, length, count))
        todo += [(begin, begin + start), (begin + start + count * length, end)]
    return sorted(done)
