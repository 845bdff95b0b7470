"""Keep the buckets that make the estimated step shorter."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from ftp.passes.bucket_collectives import Buckets
from ftp.passes.planned_timeline import PlannedTimeline, timelines
from ftp.passes.prefetch_parameters import largest_gathered
from ftp.planning.cost import Hardware, measured_seconds
from ftp.planning.graph import Graph

LESS = 1e-9  # a smaller part of the step is rounding
# The least part of the step that buckets save, together: less may be an error of the estimate.
WORTH = 1e-2
ROUNDS = 2  # in which each bucket is tried


def faster_buckets(
    graph: Graph, buckets: Buckets, hardware: Hardware, limit: int | None = None
) -> Buckets:
    """The buckets that are worth their copies and what waits for them, by the estimated step.

    A bucket saves the latencies of collectives. It copies its members, which takes the time of
    computation, and a member that is ready, or needed, early waits for the others. So it makes a
    step shorter where collectives are waited for, and longer where they are hidden.

    It starts with all buckets or none, what is shorter, and keeps or leaves out those of equal
    members together, then one by one.

    Args:
        limit: of `prefetch`.
    """
    if not (buckets.groups or buckets.seeds):
        return buckets
    limit = largest_gathered(graph) if limit is None else limit
    plain, made = timelines(graph, buckets.groups, buckets.seeds, hardware, limit)
    step = _TimedStep(made, hardware, len(buckets.groups))
    kinds: dict[Sequence[object], list[int]] = {}
    for bucket, kind in enumerate(_kinds(graph, buckets)):
        kinds.setdefault(kind, []).append(bucket)
    alike = [together for together in kinds.values() if len(together) > 1]
    changes = [*alike, *([bucket] for bucket in range(len(buckets.groups)))]
    for _ in range(ROUNDS):
        changed = [step.try_change(change) for change in changes]
        if not any(changed):
            break
    if step.seconds > _TimedStep(plain(), hardware, 0).seconds * (1 - WORTH):
        return Buckets((), {})
    groups = (group for group, is_kept in zip(buckets.groups, step.kept, strict=True) if is_kept)
    return replace(buckets, groups=tuple(groups))


def _kinds(graph: Graph, buckets: Buckets) -> Iterable[Sequence[object]]:
    """Per bucket what its members are."""
    members = {name for group in buckets.groups for name in group}
    named = {node.name: node for node in graph.nodes if node.name in members}
    for group in buckets.groups:
        members = [named[name] for name in group]
        yield tuple((m.target, m.phase % 2, m.results[0].dtype) for m in members)


class _TimedStep:
    """A step with some buckets kept, timed as by ``lowered.cost``.

    Attributes:
        kept: per bucket whether it is.
        seconds: of the step.
    """

    def __init__(self, made: PlannedTimeline, hardware: Hardware, count: int):
        self._events, self._transfers, self._hardware = made.events, made.transfers, hardware
        links = [hardware.link_of(transfer.axes) for transfer in made.transfers]
        self._links, self._is_measured = links, any(link.measured for link in links)
        self._alone = [self._transferring(number, 0.0) for number in range(len(links))]
        self._span = [(len(made.events), 0)] * count  # of each bucket: its first and last event
        for i, event in enumerate(made.events):
            for bucket in (event.bucket, event.unless):
                if bucket is not None:
                    self._span[bucket] = min(self._span[bucket][0], i), i
        self._record([True] * count)
        together = self.seconds
        self._record([False] * count)
        if count and together <= self.seconds:
            self._record([True] * count)

    def try_change(self, buckets: Sequence[int]) -> bool:
        """Keep buckets that are left out, and leave out those that are kept, if the step is shorter
        then.
        """
        kept = list(self.kept)
        for bucket in buckets:
            kept[bucket] = not kept[bucket]
        first = min(self._span[bucket][0] for bucket in buckets)
        last = max(self._span[bucket][1] for bucket in buckets)
        is_shorter = self._play(kept, first, last) < self.seconds * (1 - LESS)
        if is_shorter:
            self._record(kept)
        return is_shorter

    def _record(self, kept: list[bool]) -> None:
        self.kept = kept
        self._states: list[tuple[float, float, float]] = []  # before each event, and at the end
        self._done = [0.0] * len(self._transfers)
        self.seconds = self._play(kept, 0, len(self._events))

    def _play(self, kept: Sequence[bool], first: int, last: int) -> float:
        """Seconds of the step with other buckets kept, whose first and last events are these.

        Later events take as long as they did, once no transfer is under way.
        """
        states, is_recorded = self._states, first > 0 or bool(self._states)
        done = list(self._done) if is_recorded else self._done
        # The time, the time at which the link is free, and the time of the last wait.
        now, free, met = states[first] if is_recorded else (0.0, 0.0, 0.0)
        for i in range(first, len(self._events)):
            if i > last:
                then = states[i]
                is_idle = free <= now and then[1] <= then[0]
                if is_idle and (not self._is_measured or (now == met and then[0] == then[2])):
                    return self.seconds + now - then[0]
            elif not is_recorded:
                states.append((now, free, met))
            bucket, is_kept, unless, awaits, seconds, starts = self._events[i]
            if unless is not None and kept[unless]:
                continue
            if bucket is not None and kept[bucket] is not is_kept:
                continue
            if awaits is not None:
                now = met = max(now, done[awaits])
            now += seconds
            if starts is not None:
                taken = (
                    self._transferring(starts, now - met)
                    if self._is_measured
                    else self._alone[starts]
                )
                free = done[starts] = max(now, free) + taken
                now += (1 - self._links[starts].hidden) * taken
        if not is_recorded:
            states.append((now, free, met))
        return max(now, free)

    def _transferring(self, number: int, computed: float) -> float:
        op, nbytes, n, _ = self._transfers[number]
        return measured_seconds(op, nbytes, n, self._links[number], computed)
