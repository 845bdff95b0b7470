"""Inline the code given to ``ftp.local`` into a rank's graph: its nodes copied, its collectives as
reshards.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ftp.dataclass import dataclass
from ftp.ops.axis_collectives import OPS, axis_of
from ftp.ops.exchange_rows import ALL_TO_ALL_ROWS, FIRST_ROWS
from ftp.ops.mapped_arguments import evaluated, mapped_arguments
from ftp.partitioning.collectives import Collective
from ftp.per_rank.planned import AXIS_INDEX, collective_axis
from ftp.per_rank.program import RankCode
from ftp.planning.graph import Node, Reshard, Value
from ftp.rules.call import replaced
from ftp.sharding.layout import R, partial, shard, size_at

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


@dataclass(frozen=True)
class InlineSite:
    """Where a program is inlined: the rank's graph, the rank's position and its process groups.

    Attributes:
        start: gives the int input that holds the rank's position on an axis.
        reshard: emits a reshard of a node's value; takes a name and the user's line too.
        group: gives the name of an axis' process group.
    """

    graph: fx.Graph
    device: torch.device
    start: Callable[[str], Any]
    reshard: Callable[[fx.Node, Reshard, torch.dtype, str, str], fx.Node]
    group: Callable[[str], str]
    axes: Mapping[str, int]
    coordinate: Mapping[str, int]
    cause: str

    def emit(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return self.graph.call_function(target, args, kwargs)


def emit_per_rank(
    site: InlineSite, node: Node, operands: Sequence[fx.Node]
) -> list[fx.Node] | None:
    """Emit per-rank code, or an op of it that only a rank's graph has: a collective, or the rank's
    index. None for any other op.
    """
    if node.kind == "local":
        return inline(site, node.target, operands)
    if node.target is AXIS_INDEX:
        return [_index(site, node.args[0])]
    axis = collective_axis(node.target, node.args)
    if axis is None:
        return None
    given = [site.emit(aten.contiguous.default, x) for x in operands]
    for slot, x in enumerate(given):
        x.meta["takes"] = slot
    feed = iter(given)
    x, *args = replaced(node.args, Value, lambda _: next(feed))
    shape = tuple(size_at(s, site.coordinate) for s in node.operand_shape(0))
    call = CollectiveCall(node.target, args, site.axes[axis], shape)
    return [emit_collective(site, call, x, node.operands[0].meta.dtype, node.name, node.source)]


def _index(site: InlineSite, axis: str) -> fx.Node:
    start = site.start(axis)
    return site.emit(aten.full.default, [], start, dtype=torch.int64, device=site.device)


def inline(site: InlineSite, program: RankCode, operands: Sequence[fx.Node]) -> list[fx.Node]:
    """Emit ``program`` on a rank's shards; returns its results."""
    # The code was traced on contiguous shards, and kernels were chosen for those.
    given = [site.emit(aten.contiguous.default, x) for x in operands]
    for slot, node in enumerate(given):
        node.meta["takes"] = slot
    given += [_index(site, axis) for axis in program.axes]

    def emitted(node: fx.Node, known: Mapping[fx.Node, Any]) -> fx.Node:
        source = node.meta.get("source", "")
        before = len(site.graph.nodes)
        axis = axis_of(node.target, node.args[1:])
        args, kwargs = mapped_arguments(node, known.__getitem__)
        if axis is None:
            target: Any = aten.reshape.default if node.target is aten.view.default else node.target
            made = site.graph.call_function(target, args, kwargs)
        else:
            operand: Any = node.args[0]
            held = operand.meta["val"]
            shape = tuple(held.shape)
            call = CollectiveCall(node.target, args[1:], program.axes[axis], shape)
            made = emit_collective(site, call, args[0], held.dtype, node.name, source)
        _note(site.graph, len(site.graph.nodes) - before, source)
        return made

    return evaluated(program.gm.graph, given, emitted)


@dataclass(frozen=True)
class CollectiveCall:
    """A collective of per-rank code.

    Attributes:
        args: without the tensor that is sent.
        n: the size of its axis.
        shape: of the tensor, on this rank.
    """

    target: Any
    args: Any
    n: int
    shape: tuple[int, ...]

    @property
    def axis(self) -> str:
        axis = axis_of(self.target, self.args)
        assert axis is not None
        return axis


def emit_collective(
    site: InlineSite, call: CollectiveCall, x: fx.Node, dtype: torch.dtype, name: str, source: str
) -> fx.Node:
    """Emit a collective of per-rank code on ``x``."""
    if call.target is OPS.exchange_rows.default:
        return _exchanged(site, call, x, dtype, source)
    if call.n == 1:
        alone = call.target is not OPS.ppermute.default or call.args[2]
        return x if alone else site.emit(aten.zeros_like.default, x)
    if call.target is OPS.ppermute.default:
        return _permuted(site, call, x, dtype, source)
    return site.reshard(x, _as_reshard(call), dtype, name, source)


def axes_by_rank(program: RankCode) -> tuple[set[str], set[str]]:
    """The axes on which the first rank's graph differs from the others', and those on which all
    ranks' graphs differ.
    """
    nodes = [n for n in program.gm.graph.nodes if n.op == "call_function"]
    return axes_of_calls((n.target, n.args) for n in nodes)


def axes_of_calls(calls: Iterable[tuple[Any, Sequence[Any]]]) -> tuple[set[str], set[str]]:
    """As `axes_by_rank`, for calls of ops."""
    first: set[str] = set()
    every: set[str] = set()
    for target, args in calls:
        if target is OPS.contribute.default:
            first.add(args[1])
        elif target is OPS.ppermute.default:
            every.add(args[1])
    return first, every


def _note(graph: fx.Graph, made: int, source: str) -> None:
    at = graph._root.prev
    for _ in range(made):
        at.meta.setdefault("source", source)
        at = at.prev


def _as_reshard(call: CollectiveCall) -> Reshard:
    """The collective as a reshard of the value whose shards or terms the ranks hold."""
    axis, n, shape, args = call.axis, call.n, call.shape, call.args
    match call.target:
        case OPS.all_reduce.default:
            return Reshard(axis, n, partial(args[0]), R, shape)
        case OPS.contribute.default:
            return Reshard(axis, n, R, partial("sum"), shape)
        case OPS.reduce_scatter.default:
            return Reshard(axis, n, partial("sum"), _cut(args[2], shape, n), shape)
        case OPS.own_part.default:
            return Reshard(axis, n, R, _cut(args[2], shape, n), shape)
        case OPS.place_part.default:
            whole = tuple(s * n if d == args[2] else s for d, s in enumerate(shape))
            return Reshard(axis, n, _cut(args[2], whole, n), partial("sum"), whole)
    *_, concat = args
    whole = tuple(s * n if d == concat else s for d, s in enumerate(shape))
    to = R if call.target is OPS.all_gather.default else _cut(args[2], whole, n)
    return Reshard(axis, n, _cut(concat, whole, n), to, whole)


def _cut(dim: Any, shape: tuple[int, ...], n: int) -> Any:
    return shard(dim, 1, shape[dim], 1, n)


def _permuted(
    site: InlineSite, call: CollectiveCall, x: fx.Node, dtype: torch.dtype, source: str
) -> fx.Node:
    """An all-to-all in which each rank has at most one peer."""
    axis, n, flat = call.args
    pairs = list(zip(flat[::2], flat[1::2], strict=True))
    here = site.coordinate[axis]
    size = math.prod(call.shape)
    sent = [size if (here, to) in pairs else 0 for to in range(n)]
    got = [size if (source_rank, here) in pairs else 0 for source_rank in range(n)]
    flat_x = site.emit(aten.reshape.default, site.emit(aten.contiguous.default, x), [size])
    if not any(sent):
        flat_x = site.emit(aten.slice.Tensor, flat_x, 0, 0, 0)
    issued = site.emit(c10d.all_to_all_single.default, flat_x, got, sent, site.group(axis))
    nbytes = size * dtype.itemsize
    wire = nbytes if any(sent) else 0
    issued.meta["collective"] = Collective(
        "ppermute", (axis,), call.shape, dtype, nbytes, call.shape, wire, source, site.cause
    )
    issued.meta["axis"] = axis
    arrived = site.emit(c10d.wait_tensor.default, issued)
    if not any(got):
        return site.emit(aten.full.default, list(call.shape), 0, dtype=dtype, device=site.device)
    return site.emit(aten.reshape.default, arrived, list(call.shape))


def _exchanged(
    site: InlineSite, call: CollectiveCall, x: fx.Node, dtype: torch.dtype, source: str
) -> fx.Node:
    """An all-to-all of rows whose part sizes depend on values."""
    counts, axis, n, bound, back = call.args
    if n == 1:
        return site.emit(FIRST_ROWS, x, counts, bound, back, source)
    issued = site.emit(ALL_TO_ALL_ROWS, x, counts, bound, back, False, source, site.group(axis))
    rows, *row = call.shape
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
