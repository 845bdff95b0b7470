"""A plan's step as a timeline of computation and collectives, with each bucket and without it.

It is an estimate from the plan, which is equal on all ranks, where ``lowered.cost`` times the graph
that one rank runs. Events are in the order of ``schedule``.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ftp.passes.prefetch_parameters import (
    LOCAL_STEPS,
    collective_bytes,
    held_bytes,
    turns,
)
from ftp.planning.cost import Hardware
from ftp.planning.graph import Graph, Node
from ftp.rules.op_kinds import (
    ATTENTION,
    CONVOLUTIONS,
    NARROW_MATMULS,
    STACKS,
    VIEWS,
    is_matmul,
    multiplications,
)
from ftp.sharding.layout import estimated

AT_END = 1 << 60


class PlannedEvent(NamedTuple):
    """The wait for a transfer, then computation, then the start of a transfer.

    Attributes:
        bucket, is_kept: it takes place where this bucket is kept, or where it is not; always if
            ``bucket`` is None.
        unless: it does not take place where this bucket is kept.
        awaits, starts: numbers of transfers, or None.
        seconds: of computation.
    """

    bucket: int | None
    is_kept: bool
    unless: int | None
    awaits: int | None
    seconds: float
    starts: int | None

    def can_join(self, other: "PlannedEvent") -> bool:
        """Whether both are one event if ``other`` follows."""
        return self[:3] == other[:3] and self.starts is None and other.awaits is None


class PlannedTransfer(NamedTuple):
    """A collective of one tensor, or of a bucket."""

    op: str
    nbytes: int
    n: int
    axes: tuple[str, ...]


class PlannedTimeline(NamedTuple):
    """Events in their order, and the transfers that they start."""

    events: Sequence[PlannedEvent]
    transfers: Sequence[PlannedTransfer]


class _When(NamedTuple):
    """When an event takes place: before the collective issued at place ``at``, or, at an odd
    number, after it; and with or without which bucket.
    """

    at: int
    bucket: int | None
    is_kept: bool


class _IssueOrder(NamedTuple):
    """The order with all buckets, or with none.

    Attributes:
        issued: the place at which each collective is issued.
        turns: per node the place of the collective before which it runs, or after which if the
            number is odd; of a collective the turn of its wait.
        moved_by: per node the bucket that may move it.
    """

    issued: Mapping[int, int]
    turns: Sequence[int]
    moved_by: Sequence[int | None]


class _NodeNeeds(NamedTuple):
    """What reads what, by the numbers of nodes in a graph.

    Attributes:
        operands: of each node.
        readers: nodes that read gathered parameters.
        outputs: of the graph.
        ahead: gathers of parameters.
    """

    operands: Sequence[Sequence[int]]
    readers: Sequence[int]
    outputs: Sequence[int]
    ahead: Collection[int]

    def without(self, freed: Iterable[int]) -> "_NodeNeeds":
        """The same where some nodes do not need their operands."""
        operands = list(self.operands)
        for i in freed:
            operands[i] = ()
        return self._replace(operands=operands)


def timelines(
    graph: Graph,
    groups: Sequence[Sequence[str]],
    seeds: Collection[str],
    hardware: Hardware,
    limit: int | None = None,
) -> tuple[Callable[[], PlannedTimeline], PlannedTimeline]:
    """A function that makes the timeline of a plan as it is, and the timeline in which buckets may
    be kept and the nodes in ``seeds`` do not wait for their operands.

    Args:
        groups: names of the reshards of each bucket.
        limit: of `prefetch`.
    """
    bucket_named = {name: bucket for bucket, group in enumerate(groups) for name in group}
    issued = [i for i, node in graph.reshards.items() if _is_issued(node)]
    names = {i: graph.nodes[i].name for i in issued}
    bucket_of = {i: bucket_named[name] for i, name in names.items() if name in bucket_named}
    last = {bucket: i for i, bucket in bucket_of.items()}
    apart, together = turns(graph, (), limit), turns(graph, groups, limit)
    alone = {i: 2 * apart.get(i, i) for i in issued}
    in_buckets = {
        i: 2 * (together[i] if i in together else last[bucket_of[i]] if i in bucket_of else i)
        for i in issued
    }
    needs, moved_by = _needs(graph, apart), _moved_by(issued, bucket_of, apart)
    freed = needs.without(i for i, node in enumerate(graph.nodes) if node.name in seeds)
    prices = list(map(_NodePrices(hardware), graph.nodes))
    orders = (
        _order(freed, alone, moved_by),
        _order(freed, in_buckets, moved_by, _terms(graph, bucket_of, needs)),
    )

    def plain() -> PlannedTimeline:
        order = _order(needs, alone, {})
        return _EventsOfPlan(graph.nodes, prices, hardware, order, order, {}, {}).made()

    return plain, _EventsOfPlan(graph.nodes, prices, hardware, *orders, bucket_of, moved_by).made()


def _is_issued(node: Node) -> bool:
    return node.kind == "reshard" and node.target.op not in LOCAL_STEPS


def _moved_by(
    issued: Iterable[int], bucket_of: Mapping[int, int], ahead: Collection[int]
) -> dict[int, int | None]:
    """The bucket that may move each collective: its own; of a gather that is in none, the one that
    the gather before is in, or is moved by.
    """
    found: dict[int, int | None] = {}
    near: int | None = None
    for i in issued:
        found[i] = bucket_of.get(i, near if i in ahead else None)
        near = found[i] if i in ahead else near
    return found


def _needs(graph: Graph, ahead: Collection[int]) -> _NodeNeeds:
    number = {node: i for i, node in enumerate(graph.nodes)}
    operands: list[list[int]] = []
    gathered, readers = set(ahead), []
    for i, node in enumerate(graph.nodes):
        read = [number[value.node] for value in node.operands]
        operands.append(read)
        if not gathered.isdisjoint(read):
            if node.target in VIEWS:
                gathered.add(i)
            elif not _is_issued(node):
                readers.append(i)
    return _NodeNeeds(operands, readers, [number[value.node] for value in graph.outputs], ahead)


def _terms(graph: Graph, members: Iterable[int], needs: _NodeNeeds) -> list[int]:
    """What the sums in buckets add."""
    found = []
    for i in members:
        if i not in needs.ahead:
            i = needs.operands[i][0]
            while graph.nodes[i].target in VIEWS:
                i = needs.operands[i][0]
            found.append(i)
    return found


def _order(
    needs: _NodeNeeds,
    issued: Mapping[int, int],
    moved: Mapping[int, int | None],
    terms: Iterable[int] = (),
) -> _IssueOrder:
    """The order of `schedule`: a node runs before the first collective that needs it. What only
    outputs need runs after the collective that follows the last one that they depend on; what
    ``terms`` need, the terms of buckets of sums, after the one that follows them. A reader
    of gathered parameters runs before the next gather starts.
    """
    moved_at = {at: moved.get(i) for i, at in reversed(list(issued.items()))}
    ahead = sorted({issued[i] for i in needs.ahead})
    fixed = sorted({at for i, at in issued.items() if i not in needs.ahead})
    found = [AT_END] * len(needs.operands)
    moved_by: list[int | None] = [None] * len(needs.operands)
    for i in needs.readers:
        if (next_ := bisect_right(ahead, 2 * i)) < len(ahead):
            found[i], moved_by[i] = ahead[next_], moved_at[ahead[next_]]
    latest: list[int] = []
    for i, operands in enumerate(needs.operands):
        until = issued.get(i, -1)
        for operand in operands:
            if latest[operand] > until:
                until = latest[operand]
        latest.append(until)
    for i, until in [*((i, latest[i]) for i in needs.outputs), *((i, 2 * i) for i in terms)]:
        next_ = bisect_right(fixed, until)
        after = fixed[next_] if next_ < len(fixed) else AT_END
        if after + 1 < found[i]:
            found[i], moved_by[i] = after + 1, moved_at.get(until)
            if moved_by[i] is None:
                moved_by[i] = moved_at.get(after)
    for i in range(len(found) - 1, -1, -1):
        turn, bucket = found[i], moved_by[i]
        if i in issued:
            turn, bucket = issued[i], moved.get(i)
        for operand in needs.operands[i]:
            if turn < found[operand]:
                found[operand], moved_by[operand] = turn, bucket
    return _IssueOrder(issued, found, moved_by)


class _EventsOfPlan:
    """The events of a plan, from its order without buckets and its order with all of them."""

    def __init__(
        self,
        nodes: Sequence[Node],
        prices: Sequence[float],
        hardware: Hardware,
        apart: _IssueOrder,
        together: _IssueOrder,
        bucket_of: Mapping[int, int],
        moved_by: Mapping[int, int | None],
    ):
        self._nodes, self._prices, self._hardware = nodes, prices, hardware
        self._apart, self._together = apart, together
        self._bucket_of, self._moved_by = bucket_of, moved_by
        self._placed: list[tuple[tuple[int, bool, int], PlannedEvent]] = []
        self._transfers: list[PlannedTransfer] = []

    def made(self) -> PlannedTimeline:
        self._compute()
        self._communicate()
        self._placed.sort(key=lambda placed: placed[0])
        return PlannedTimeline(_joined([event for _, event in self._placed]), self._transfers)

    def _compute(self) -> None:
        """Add what is computed; nodes that follow one another and have one turn are one event."""
        seconds, since, own = 0.0, 0, None
        turns = zip(self._apart.turns, self._together.turns, self._apart.moved_by, strict=True)
        for i, (turn, price) in enumerate(zip(turns, self._prices, strict=True)):
            if not price:
                continue
            if turn != own:
                if own is not None:
                    self._add(_when(*own), False, since, seconds)
                own, since, seconds = turn, 2 * i, 0.0
            seconds += price
        if own is not None:
            self._add(_when(*own), False, since, seconds)

    def _communicate(self) -> None:
        apart, together = self._apart, self._together
        members: dict[int, list[int]] = {}
        for i, at in apart.issued.items():
            own, moved_by = self._bucket_of.get(i), apart.moved_by[i]
            if own is not None:
                members.setdefault(own, []).append(i)
            starts = _when(
                at, together.issued[i], None if own is not None else self._moved_by.get(i)
            )
            ends = _when(apart.turns[i], together.turns[i], None if moved_by == own else moved_by)
            self._transfer([i], starts, [ends], unless=own)
        for bucket, held in members.items():
            starts = [_When(together.issued[held[0]], bucket, True)]
            self._transfer(held, starts, [[_When(together.turns[i], bucket, True)] for i in held])

    def _transfer(
        self,
        members: Sequence[int],
        starts: Sequence[_When],
        ends: Sequence[Sequence[_When]],
        unless: int | None = None,
    ) -> None:
        """Add the collective of some reshards, with copies before it and after its waits."""
        number, nodes = len(self._transfers), [self._nodes[i] for i in members]
        first, sizes = nodes[0], list(map(collective_bytes, nodes))
        op, n, total, is_bucket = first.target.op, first.target.n, sum(sizes), len(nodes) > 1
        self._transfers.append(PlannedTransfer(op, total, n, first.target.axes))
        before = self._copy(total // n if op == "all_gather" else total) if is_bucket else 0.0
        if op == "reduce_scatter":
            inner = [size for size, m in zip(sizes, nodes, strict=True) if m.target.dst.dim > 0]
            before += sum(map(self._copy, inner))
        self._add(starts, True, 2 * members[0], before, unless, starts=number)
        began = min(start.at for start in starts)
        for size, node, end in zip(sizes, nodes, ends, strict=True):
            copies = is_bucket + (node.target.src.dim > 0) if op == "all_gather" else 0
            after = copies * self._copy(size) if copies else 0.0
            self._add(end, False, began, after, unless, awaits=number)

    def _add(
        self,
        times: Iterable[_When],
        is_start: bool,
        place: int,
        seconds: float,
        unless: int | None = None,
        *,
        starts: int | None = None,
        awaits: int | None = None,
    ) -> None:
        for at, bucket, is_kept in times:
            event = PlannedEvent(bucket, is_kept, unless, awaits, seconds, starts)
            self._placed.append(((at, is_start, place), event))

    def _copy(self, nbytes: int) -> float:
        """Seconds to copy a value."""
        return self._hardware.issued(2 * nbytes / self._hardware.memory)


class _NodePrices:
    """Seconds of computation of a node, on a rank's shards."""

    def __init__(self, hardware: Hardware):
        self._hardware = hardware
        self._known: dict[Any, float] = {}

    def __call__(self, node: Node) -> float:
        if node.kind in ("input", "constrain"):
            return 0.0
        if node.kind == "reshard":
            if _is_issued(node) or node.target.op == "slice":
                return 0.0
            return self._hardware.issued(2 * held_bytes(node) / self._hardware.memory)
        dtype = node.results[0].dtype if node.results else torch.float32
        what = node.target if node.kind == "op" else node.name
        key = what, dtype, id(node.rule), id(node.sizes)  # which equal nodes share
        if (known := self._known.get(key)) is None:
            known = self._known[key] = self._priced(node, dtype)
        return known

    def _priced(self, node: Node, dtype: torch.dtype) -> float:
        if node.target in VIEWS or node.target in STACKS:
            return 0.0
        return self._hardware.issued(self._work(node, dtype))

    def _work(self, node: Node, dtype: torch.dtype) -> float:
        sizes = {factor: estimated(size) for factor, size in node.sizes.items()}
        elements = sum(math.prod(sizes[f] for dim in dims for f in dim) for dims in node.rule.dims)
        moving = elements * dtype.itemsize / self._hardware.memory
        if node.kind != "op" or not is_matmul(node.target):
            return moving
        wanted = [len(dims) > 0 for dims in node.rule.results]
        operations = 2 * multiplications(node.target, sizes, wanted)
        reached = 1.0
        if node.target in ATTENTION:
            reached = self._hardware.attention
        elif node.target in CONVOLUTIONS:
            reached = self._hardware.convolution
        if node.target in NARROW_MATMULS and node.rule.call is not None:
            dtype = node.rule.call.operands[0].dtype
        computing = operations / (reached * self._hardware.flops_of(dtype))
        return self._hardware.matmul(computing, moving)


def _when(apart: int, together: int, bucket: int | None) -> list[_When]:
    """When an event takes place that a bucket may move."""
    if bucket is None or apart == together:
        return [_When(apart, None, True)]
    return [_When(apart, bucket, False), _When(together, bucket, True)]


def _joined(events: Iterable[PlannedEvent]) -> list[PlannedEvent]:
    """The events, those joined that nothing can come between."""
    found: list[PlannedEvent] = []
    for event in events:
        if found and found[-1].can_join(event):
            last = found[-1]
            seconds = last.seconds + event.seconds
            found[-1] = PlannedEvent(*last[:4], seconds, event.starts)
        else:
            found.append(event)
    return found
