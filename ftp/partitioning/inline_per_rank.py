"""Inline the code given to ``ftp.local`` into a rank's graph: its nodes copied, its collectives as
reshards.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ftp.axis import OPS, axis_of
from ftp.ops.exchange_rows import ALL_TO_ALL_ROWS, FIRST_ROWS
from ftp.partitioning.collectives import Collective
from ftp.per_rank.program import Program
from ftp.planning.graph import Move
from ftp.sharding.layout import R, partial, shard

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


@dataclass(frozen=True)
class InlineSite:
    """Where a program is inlined: the rank's graph, and the facts of the rank that it may read.

    Attributes:
        start: gives the input that holds the rank's position on an axis, as an int.
        move: emits a move of a node's value; its further arguments are a name and the user's line.
        group: gives the name of an axis' process group.
    """

    graph: fx.Graph
    device: torch.device
    start: Callable[[str], Any]
    move: Callable[[fx.Node, Move, torch.dtype, str, str], fx.Node]
    group: Callable[[str], str]
    coordinate: Mapping[str, int]
    cause: str

    def emit(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return self.graph.call_function(target, args, kwargs)


def inline(site: InlineSite, program: Program, operands: list[fx.Node]) -> list[fx.Node]:
    """Emit ``program`` on a rank's shards; returns its results."""
    # The code was traced on contiguous shards, and kernels were chosen for those.
    given = [site.emit(aten.contiguous.default, x) for x in operands]
    for slot, node in enumerate(given):
        node.meta["takes"] = slot
    for axis in program.axes:
        given.append(
            site.emit(
                aten.full.default, [], site.start(axis), dtype=torch.int64, device=site.device
            )
        )
    env: dict[fx.Node, Any] = {}
    feed = iter(given)
    for node in program.gm.graph.nodes:
        if node.op == "placeholder":
            env[node] = next(feed)
        elif node.op == "output":
            return [env[n] for n in node.args[0]]
        else:
            source = node.meta.get("source", "")
            before = len(site.graph.nodes)
            axis = axis_of(node.target, node.args[1:])
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), env.__getitem__)  # type: ignore[misc]
            if axis is None:
                target = aten.reshape.default if node.target is aten.view.default else node.target
                env[node] = site.graph.call_function(target, args, kwargs)  # type: ignore[arg-type]
            elif node.target is OPS.exchange_rows.default:
                env[node] = _exchanged(site, node, args, program.axes[axis], source)  # type: ignore[arg-type]
            elif program.axes[axis] == 1:
                alone = node.target is not OPS.ppermute.default or args[3]  # type: ignore[index]
                env[node] = args[0] if alone else site.emit(aten.zeros_like.default, args[0])  # type: ignore[index]
            elif node.target is OPS.ppermute.default:
                env[node] = _permuted(site, node, args[0], axis, source)  # type: ignore[index]
            else:
                env[node] = site.move(
                    args[0],
                    _as_move(node, axis, program.axes[axis]),
                    node.meta["val"].dtype,
                    node.name,
                    source,
                )  # type: ignore[index]
            _note(site.graph, len(site.graph.nodes) - before, source)
    raise AssertionError(program)


def axes_by_rank(program: Program) -> tuple[set[str], set[str]]:
    """The axes on which the first rank's graph differs, and those on which every rank's does."""
    nodes = [n for n in program.gm.graph.nodes if n.op == "call_function"]
    return (
        {n.args[1] for n in nodes if n.target is OPS.contribute.default},
        {n.args[1] for n in nodes if n.target is OPS.ppermute.default},
    )


def _note(graph: fx.Graph, made: int, source: str) -> None:
    at = graph._root.prev
    for _ in range(made):
        at.meta.setdefault("source", source)
        at = at.prev


def _as_move(node: fx.Node, axis: str, n: int) -> Move:
    """The collective as a reshard of the value whose shards or terms the ranks hold."""
    shape = tuple(map(int, node.args[0].meta["val"].shape))  # type: ignore[union-attr]
    match node.target:
        case OPS.all_reduce.default:
            return Move(axis, n, partial(node.args[1]), R, shape)  # type: ignore[arg-type]
        case OPS.contribute.default:
            return Move(axis, n, R, partial("sum"), shape)
        case OPS.reduce_scatter.default:
            return Move(axis, n, partial("sum"), _cut(node.args[3], shape, n), shape)
        case OPS.own_part.default:
            return Move(axis, n, R, _cut(node.args[3], shape, n), shape)
    *_, concat = node.args
    assert isinstance(concat, int)
    whole = tuple(s * n if d == concat else s for d, s in enumerate(shape))
    to = R if node.target is OPS.all_gather.default else _cut(node.args[3], whole, n)
    return Move(axis, n, _cut(concat, whole, n), to, whole)


def _cut(dim: Any, shape: tuple[int, ...], n: int) -> Any:
    return shard(dim, 1, shape[dim], 1, n)


def _permuted(site: InlineSite, node: fx.Node, x: fx.Node, axis: str, source: str) -> fx.Node:
    """An all-to-all in which each rank has at most one peer."""
    n, flat = node.args[2], node.args[3]
    assert isinstance(n, int) and isinstance(flat, list | tuple)
    pairs = list(zip(flat[::2], flat[1::2], strict=True))
    here = site.coordinate[axis]
    val = node.meta["val"]
    size = int(val.numel())
    sent = [size if (here, to) in pairs else 0 for to in range(n)]
    got = [size if (source_rank, here) in pairs else 0 for source_rank in range(n)]
    flat_x = site.emit(aten.reshape.default, site.emit(aten.contiguous.default, x), [size])
    if not any(sent):
        flat_x = site.emit(aten.slice.Tensor, flat_x, 0, 0, 0)
    issued = site.emit(c10d.all_to_all_single.default, flat_x, got, sent, site.group(axis))
    nbytes, shape = size * val.dtype.itemsize, tuple(map(int, val.shape))
    wire = nbytes if any(sent) else 0
    issued.meta["collective"] = Collective(
        "ppermute", (axis,), shape, val.dtype, nbytes, shape, wire, source, site.cause
    )
    issued.meta["axis"] = axis
    arrived = site.emit(c10d.wait_tensor.default, issued)
    if not any(got):
        return site.emit(aten.full.default, list(val.shape), 0, dtype=val.dtype, device=site.device)
    return site.emit(aten.reshape.default, arrived, list(val.shape))


def _exchanged(
    site: InlineSite, node: fx.Node, args: tuple[Any, ...], n: int, source: str
) -> fx.Node:
    """An all-to-all of rows whose part sizes are values."""
    x, counts, axis, _, bound, back = args
    if n == 1:
        return site.emit(FIRST_ROWS, x, counts, bound, back, source)
    issued = site.emit(ALL_TO_ALL_ROWS, x, counts, bound, back, source, site.group(axis))
    rows, *row = map(int, node.args[0].meta["val"].shape)  # type: ignore[union-attr]
    dtype = node.meta["val"].dtype
    each = math.prod(row) * dtype.itemsize
    expected = min(rows, bound)  # the larger buffer has room for the worst case
    shape = (expected, *row)
    issued.meta["collective"] = Collective(
        "all_to_all",
        (axis,),
        shape,
        dtype,
        expected * each,
        shape,
        expected * each * (n - 1) // n,
        source,
        site.cause,
        max(rows, bound) * each,
    )
    issued.meta["axis"] = axis
    return issued
