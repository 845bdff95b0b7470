"""Estimated time of a rank's program: a roofline per op, latency and bytes per collective,
overlapped as scheduled.
"""

import functools
import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from ftp.ops.fused_optimizer import COUNT_UP
from ftp.ops.written import writes
from ftp.partitioning.collectives import Collective
from ftp.partitioning.partition import WAIT
from ftp.passes.branch_order import branches
from ftp.planning.cost import Hardware, measured_seconds, on_curve
from ftp.report.flops import PIPELINED, flops_of, is_attention, op_name
from ftp.report.names import Reported
from ftp.report.rank_shapes import with_equal_loads
from ftp.rules.op_kinds import NARROW_MATMULS
from ftp.runtime.local_shapes import LocalShapes, LocalTensor

aten = torch.ops.aten


class TimedOp(NamedTuple):
    """One op or collective.

    Attributes:
        begin, seconds: when the op begins in the estimated step, and its duration.
        flops: floating-point operations, counted for matmuls, attention and convolutions.
        nbytes: bytes read and written; of a collective this rank's buffer on the larger side.
        limit: ``compute``, ``memory``, ``overhead`` or ``link``.
    """

    name: str
    op: str
    source: str
    begin: float
    seconds: float
    flops: float
    nbytes: int
    limit: str


class Cost(Reported, float):
    """Estimated seconds of a step on each rank, a float; prints the ops that take longest.

    Attributes:
        ops: every op that takes time, in order; ``collectives`` every collective.
        hardware: the rates.
        flops: of all matmuls, on this rank.
        waiting: seconds in which the rank only waits for a collective's result.
        mfu: ``flops`` over the flops that the hardware could do in the time, at the peak rate of
            each op's dtype.
        worst: seconds of the step if every exchange of rows, whose counts are values, sends as many
            as it can, and as many rows are computed. The estimate itself assumes equal parts.
    """

    ops: tuple[TimedOp, ...]
    collectives: tuple[TimedOp, ...]
    hardware: Hardware
    flops: float
    waiting: float
    mfu: float
    worst: float

    def __new__(
        cls,
        seconds: float,
        ops: Sequence[TimedOp],
        collectives: Sequence[TimedOp],
        hardware: Hardware,
        waiting: float,
        ideal: float,
        worst: float | None = None,
    ) -> "Cost":
        made = super().__new__(cls, seconds)
        made.ops, made.collectives, made.hardware, made.waiting = (
            tuple(ops),
            tuple(collectives),
            hardware,
            waiting,
        )
        made.flops = sum(o.flops for o in ops)
        made.mfu = ideal / seconds if seconds else 0.0
        made._ideal = ideal
        made.worst = seconds if worst is None else worst
        return made

    _ideal: float

    def __getnewargs__(self) -> tuple[Any, ...]:
        return (
            float(self), self.ops, self.collectives, self.hardware, self.waiting, self._ideal,
            self.worst,
        )  # fmt: skip

    @property
    def computing(self) -> float:
        """Seconds of all ops."""
        return sum(o.seconds for o in self.ops)

    @property
    def communicating(self) -> float:
        """Seconds of all collectives, hidden behind computation or not."""
        return sum(c.seconds for c in self.collectives)

    def by_op(self) -> dict[str, tuple[int, float]]:
        """Count and seconds per kind of op or collective, the longest first."""
        found: dict[str, tuple[int, float]] = {}
        for one in (*self.ops, *self.collectives):
            count, seconds = found.get(one.op, (0, 0.0))
            found[one.op] = count + 1, seconds + one.seconds
        return dict(sorted(found.items(), key=lambda item: -item[1][1]))

    def report(self, most: int = 12) -> str:
        """The total, its parts, and the ops that take longest."""
        head = (
            f"cost on {self.hardware.name}: {in_seconds(self)} a step,"
            f" {in_seconds(self.computing)} computing,"
            f" {in_seconds(self.communicating)} communicating ({in_seconds(self.waiting)} waited"
            f" for), MFU {self.mfu:.1%}"
        )
        if self.worst > self:
            head += f"; {in_seconds(self.worst)} where unequal parts are as unequal as they can be"
        lines = [
            f"  {in_seconds(seconds):>10} "
            f" {seconds / max(self.computing + self.communicating, 1e-30):6.1%}  {count:5d} x {op}"
            for op, (count, seconds) in list(self.by_op().items())[:most]
        ]
        return "\n".join([head, *lines])

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        kinds = {
            op: {"count": count, "seconds": seconds}
            for op, (count, seconds) in self.by_op().items()
        }
        return {
            "hardware": self.hardware.name,
            "seconds": float(self),
            "computing": self.computing,
            "communicating": self.communicating,
            "waiting": self.waiting,
            "flops": self.flops,
            "mfu": self.mfu,
            "worst": self.worst,
            "by_op": kinds,
        }


def in_seconds(seconds: float) -> str:
    """
    >>> in_seconds(0.00123), in_seconds(2.5)
    ('1.23 ms', '2.5 s')
    """
    for factor, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if abs(seconds) >= factor:
            return f"{seconds / factor:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def estimate(
    graph: fx.Graph, shapes: LocalShapes, hardware: Hardware, axes: Mapping[str, int]
) -> Cost:
    """Time a rank's program: one stream computes, one communicates, and a wait blocks the first. A
    cond runs its slower branch.
    """
    now = link_free = waiting = ideal = met = unequal = 0.0
    moved = 0
    done: dict[fx.Node, float] = {}
    ops: list[TimedOp] = []
    collectives: list[TimedOp] = []
    if not hardware.hides_overhead:  # each input and output is checked
        checked = len(shapes.inputs) + len(graph.output_node().args[0])  # type: ignore[arg-type]
        now = hardware.overhead * checked
        ops.append(TimedOp("call", "call of the step", "", 0.0, now, 0.0, 0, "overhead"))
    left_out = _cheaper(graph, shapes, hardware, axes)
    most_shapes, shapes = shapes, with_equal_loads(graph, shapes)
    timed_ops = _TimedOps(shapes, hardware)
    for node in graph.nodes:
        if node.op in ("placeholder", "output") or node in left_out:
            continue
        source = node.meta.get("source", "")
        if "collective" in node.meta:
            record: Collective = node.meta["collective"]
            n = math.prod(axes[a] for a in record.axes)
            link = hardware.link_of(record.axes)
            seconds = measured_seconds(record.op, record.nbytes, n, link, now - met)
            if record.worst_nbytes is not None:
                most = measured_seconds(record.op, record.worst_nbytes, n, link, now - met)
                unequal += most - seconds
            begin = max(now, link_free)
            link_free = done[node] = begin + seconds
            held_up = (1 - link.hidden) * seconds
            now, waiting = now + held_up, waiting + held_up
            collectives.append(
                TimedOp(node.name, record.op, source, begin, seconds, 0.0, record.nbytes, "link")
            )
            if node.target in PIPELINED:  # the longer of matmul, transfer
                timed = _op(node, shapes, hardware, now, 0)
                ideal += timed.flops / hardware.flops_of(_multiplied(node, shapes))
                ops.append(timed)
                waiting += max(0.0, link_free - now - timed.seconds)
                now = max(now + timed.seconds, link_free)
        elif node.target is WAIT:
            arrived = done.get(node.args[0], now)
            waiting += max(0.0, arrived - now)
            now = met = max(now, arrived)
        elif node.target is not operator.getitem and node in shapes.values:
            timed = timed_ops.at(node, now, moved)
            if shapes is not most_shapes and _has_arrived(node):
                unequal += _op(node, most_shapes, hardware, now, moved).seconds - timed.seconds
            moved = timed.nbytes if timed.flops else 0
            if timed.flops:
                ideal += timed.flops / hardware.flops_of(_multiplied(node, shapes))
            now += timed.seconds
            ops.append(timed)
    end, waiting = max(now, link_free), waiting + max(0.0, link_free - now)
    return Cost(end, ops, collectives, hardware, waiting, ideal, end + unequal)


def _has_arrived(node: fx.Node) -> bool:
    """Whether how many rows an op gives or reads depends on values."""
    return any("arrived" in n.meta for n in (node, *node.all_input_nodes))


def _cheaper(
    graph: fx.Graph, shapes: LocalShapes, hardware: Hardware, axes: Mapping[str, int]
) -> set[fx.Node]:
    """The nodes of each cond's faster branch, by the sum of its nodes' times."""
    found = branches(graph)
    seconds: dict[tuple[int, bool], float] = {}
    for node, branch in found.items():
        if "collective" in node.meta:
            record: Collective = node.meta["collective"]
            n = math.prod(axes[a] for a in record.axes)
            link = hardware.link_of(record.axes)
            alone = measured_seconds(record.op, record.nbytes, n, link, 0.0)
        elif branch and node.target not in (WAIT, operator.getitem) and node in shapes.values:
            alone = _op(node, shapes, hardware, 0.0, 0).seconds
        else:
            continue
        for step in branch:
            seconds[step] = seconds.get(step, 0.0) + alone

    def is_cheaper(number: int, side: bool) -> bool:
        mine, other = seconds.get((number, side), 0.0), seconds.get((number, not side), 0.0)
        return mine < other or (mine == other and not side)

    return {node for node, branch in found.items() if any(is_cheaper(*step) for step in branch)}


class _TimedOps:
    """Times ops; equal calls, as of repeated layers, once."""

    def __init__(self, shapes: LocalShapes, hardware: Hardware):
        self.shapes, self.hardware = shapes, hardware
        self.known: dict[tuple[int, int], TimedOp] = {}

    def at(self, node: fx.Node, now: float, moved: int) -> TimedOp:
        """As `_op`."""
        call = self.shapes.calls.get(node)
        if call is None:
            return _op(node, self.shapes, self.hardware, now, moved)
        key = id(call), moved
        if key not in self.known:
            self.known[key] = _op(node, self.shapes, self.hardware, now, moved)
        alike = self.known[key]
        return TimedOp(node.name, alike.op, node.meta.get("source", ""), now, *alike[4:])


def _op(node: fx.Node, shapes: LocalShapes, hardware: Hardware, now: float, moved: int) -> TimedOp:
    """The time of one op at ``now``; ``moved``: bytes of the last op if it is a matmul, or 0."""
    results = shapes.values[node]
    operands = [shapes.values[n][0] for n in node.all_input_nodes if n in shapes.values]
    reads, written = {o.storage for o in operands}, writes(node)
    is_view = not written and all(r.storage in reads for r in results)
    flops, nbytes, seconds, limit = 0.0, 0, 0.0, "overhead"
    if not is_view:
        nbytes = sum(r.nbytes for r in results)
        nbytes += 0 if _makes_like(node.target) else sum(o.nbytes for o in operands)
        if node.target in _FROM_INDEX:  # reads as many rows as it gives
            nbytes = 2 * sum(r.nbytes for r in results)
        given = {r.storage for r in results}
        nbytes += sum(
            held.nbytes for n in written if (held := shapes.values[n][0]).storage not in given
        )
        flops = flops_of(node, shapes)
        work = {"compute": _arithmetic(node, shapes, operands, flops, hardware)}
        work["memory"] = nbytes / (
            hardware.cache if hardware.cache and nbytes <= hardware.cache_size else hardware.memory
        )
        limit = max(work, key=work.__getitem__)
        seconds = hardware.matmul(*work.values()) if flops else work[limit]
        if hardware.fresh:
            made = [
                r.storage_nbytes for r in results if r.storage not in reads and r.storage_nbytes
            ]
            seconds += sum(size / on_curve(hardware.fresh, size) for size in made)
    if hardware.hides_overhead:
        total = 0.0 if is_view else hardware.issued(seconds)
    else:
        issued = hardware.overhead * _calls(node)
        if hardware.cold and moved:
            issued += on_curve(hardware.cold, moved)
        total = seconds + issued
    limit = limit if 2 * seconds > total else "overhead"
    return TimedOp(
        node.name,
        op_name(node.target),
        node.meta.get("source", ""),
        now,
        total,
        flops,
        nbytes,
        limit,
    )


def _multiplied(node: fx.Node, shapes: LocalShapes) -> torch.dtype:
    """The dtype that a matmul's rate is of."""
    is_narrow = node.target in NARROW_MATMULS
    return shapes.values[node.all_input_nodes[0] if is_narrow else node][0].dtype


def _arithmetic(
    node: fx.Node,
    shapes: LocalShapes,
    operands: Sequence[LocalTensor],
    flops: float,
    hardware: Hardware,
) -> float:
    """Seconds of an op's arithmetic, without its memory traffic."""
    if not (flops or hardware.elements):
        return 0.0
    if flops:
        name = op_name(node.target)
        reached = (
            hardware.attention
            if is_attention(node.target)
            else hardware.convolution
            if "convolution" in name
            else 1.0
        )
        return flops / (reached * hardware.flops_of(_multiplied(node, shapes)))
    name = getattr(getattr(node.target, "overloadpacket", None), "__name__", "").rstrip("_")
    rate = hardware.elements.get(_LIKE.get(name, name), math.inf)
    if not all(map(_is_dense, operands)):
        rate = min(rate, hardware.elements.get("strided", math.inf))
    return max((math.prod(t.shape) for t in (*operands, *shapes.values[node])), default=0) / rate


_LIKE = {
    like: name
    for name, others in {
        "exp": "exp2 expm1 softplus elu celu selu logsumexp",
        "log": "log2 log10 log1p logsigmoid",
        "tanh": "sin cos tan sinh cosh asin acos atan mish",
        "erf": "erfc",
        "sigmoid": "sigmoid_backward",
        "silu": "silu_backward hardswish",
        "gelu": "gelu_backward",
        "_softmax": "_safe_softmax _softmax_backward_data",
        "_log_softmax": "_log_softmax_backward_data",
        "sum": "mean amax amin max min prod var std var_mean linalg_vector_norm cumsum any all"
        " argmax argmin",
        "native_layer_norm": "native_layer_norm_backward native_group_norm"
        " native_group_norm_backward native_batch_norm"
        " native_batch_norm_backward _native_batch_norm_legit",
    }.items()
    for like in others.split()
}
"""For an op that was not measured, a measured one with about the same time per element."""


def _is_dense(held: LocalTensor) -> bool:
    """Whether a tensor's elements fill a range of memory, in any order."""
    expected = 1
    for stride, size in sorted(
        (stride, size) for stride, size in zip(held.stride, held.shape, strict=True) if size != 1
    ):
        if stride != expected:
            return False
        expected *= size
    return True


@functools.cache
def _makes_like(target: Any) -> bool:
    """Whether an op makes a tensor of an operand's shape or dtype, and does not read it."""
    name = getattr(getattr(target, "overloadpacket", None), "__name__", "")
    return name.startswith("new_") or name.endswith("_like")


def _calls(node: fx.Node) -> int:
    """How many kernels an op starts on a CPU."""
    return len(node.args[0]) if node.target is COUNT_UP else 1  # type: ignore[arg-type]


_FROM_INDEX = {aten.embedding.default, aten.gather.default, aten.index_select.default}
