"""Find the first value of a rank program that the reference does not have."""

import math
import secrets
from collections.abc import Sequence
from contextlib import suppress
from fractions import Fraction
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, fx

from ftp.certification.certificate import Certificate
from ftp.certification.lockstep.check import WrongOutput, compare, depth_of, inputs_for
from ftp.certification.lockstep.program import coordinates, total
from ftp.certification.lockstep.run import Rank
from ftp.certification.residues.domain import Residues
from ftp.certification.residues.value import Blind, Degenerate, Planes, separate
from ftp.certification.residues.words import words
from ftp.dataclass import dataclass
from ftp.ops.exchange import EXCHANGE

ATTEMPTS = 16
LARGEST = 4_000_000  # most elements of the reference that are remembered
MOST_SCALED = 8  # most reductions that are scaled to see whether that corrects the program


@dataclass(frozen=True)
class BlamedLine:
    """A line of a rank program, and the error there."""

    line: str
    why: str


@dataclass
class _Event:
    """A result on one rank at the time when it was made.

    Attributes:
        storage: id of its memory.
        reads: the events that made the values that it reads.
        axes: mesh axes over which the ranks' results sum to a value of the reference; None if they
            match no value of the reference.
    """

    node: fx.Node
    value: Planes
    storage: int
    reads: tuple["_Event", ...]
    axes: tuple[str, ...] | None = None


def blame(certificate: Certificate, seen: WrongOutput) -> BlamedLine:
    """The line of the rank's program where an output that differs goes wrong."""
    found = None
    for _ in range(ATTEMPTS):
        try:
            found, is_final = _Search(certificate, seen).place()
            if is_final:
                break
        except Degenerate:
            continue
        except Blind:
            break
    return found or _at_output(certificate, seen)


def _at_output(certificate: Certificate, seen: WrongOutput) -> BlamedLine:
    graph = _graph(certificate, seen.rank)
    (output,) = (n for n in graph.nodes if n.op == "output")
    node = output.args[0][seen.output]
    line = _maker(node).meta.get("source", "") if isinstance(node, fx.Node) else ""
    return BlamedLine(line, "this line makes it.")


def _graph(certificate: Certificate, rank: int) -> fx.Graph:
    at = certificate.ranks.at
    return certificate.ranks.graphs[at[sorted(at)[rank]][0]]


def _maker(node: fx.Node) -> fx.Node:
    """The op that made the elements of a view."""
    while node.op == "call_function" and node.args and isinstance(node.args[0], fx.Node):
        name = getattr(getattr(node.target, "_schema", None), "name", "")
        if name.split("::")[-1] not in _VIEWS:
            break
        node = node.args[0]
    return node


_VIEWS = words(
    """
    alias detach view _unsafe_view reshape expand permute transpose t squeeze unsqueeze
    clone contiguous
    """
)


class _Search:
    """Runs both programs once and compares the ranks' values with the reference's."""

    def __init__(self, certificate: Certificate, seen: WrongOutput):
        self.certificate, self.seen = certificate, seen
        self.field = depth_of(certificate).field(secrets.randbits(60))
        self.domain = Residues(self.field)
        ranks = len(coordinates(certificate))
        self.events: list[list[_Event]] = [[] for _ in range(ranks)]
        self.last: list[dict[int, _Event]] = [{} for _ in range(ranks)]
        self.known: list[list[Tensor]] = [[] for _ in range(self.domain.field.levels)]
        self.count = 0

    def place(self) -> tuple[BlamedLine, bool]:
        """The place, and whether it is final: another draw may show a better one, because a draw
        can turn elements of a ReLU off, whose zeros then pass for values of the reference.
        """
        inputs = inputs_for(self.domain, self.certificate, 0)
        for x in inputs:
            self._remember(None, x)
        with suppress(Blind):  # what ran until then may suffice
            found = compare(self.domain, self.certificate, inputs, self._watch, self._remember)
            if found is None:
                raise Degenerate  # this draw orders the numbers so that nothing differs
            self.seen = found
        self.sets = [
            torch.cat([*known, torch.tensor([0, 1, p - 1])]).unique()
            for known, p in zip(self.known, self.domain.field.primes, strict=True)
        ]
        self._explain()
        return self._first()

    def _remember(self, _: Any, found: Any) -> None:
        for x in _planes(found):
            if self.count < LARGEST:
                self.count += x.planes[0].numel()
                for level in range(x.window.low, x.window.high + 1):
                    self.known[level].append(x.planes[level].reshape(-1))

    def _watch(self, rank: Rank, node: fx.Node, found: Any) -> None:
        last = self.last[rank.number]
        reads = []
        operands: Any = node.args[1] if node.target is EXCHANGE else node.all_input_nodes
        for operand in operands:
            for x in _planes(rank.values.get(operand)):
                if self.domain.storage(x) in last:
                    reads.append(last[self.domain.storage(x)])
        for x in _planes(found):
            event = _Event(node, separate(x), self.domain.storage(x), tuple(reads))
            self.events[rank.number].append(event)
            last[event.storage] = event

    @property
    def are_alike(self) -> bool:
        return len({tuple(str(e.node.target) for e in rank) for rank in self.events}) == 1

    # Match the ranks' values with the reference's.

    def _explain(self) -> None:
        axes = list(self.certificate.axes)
        events = self.events
        are_alike = self.are_alike
        subsets = [s for n in range(len(axes) + 1) for s in combinations(axes, n)]
        for rank, own in enumerate(events):
            for i, event in enumerate(own):
                if self._trivial(event.value).all():
                    if all(r.axes == () for r in event.reads):
                        event.axes = ()
                    continue
                for subset in subsets if are_alike else [()]:
                    held = event.value
                    if subset:
                        parts = [e[i].value for e in events]
                        if any(p.shape != held.shape for p in parts):
                            continue
                        held = total(self.domain, parts, subset, self.certificate, rank)
                    if self._is_known(held):
                        event.axes = subset
                        break

    def _is_known(self, x: Planes) -> bool:
        if x.window.low > x.window.high:
            return False
        level = x.window.high
        return bool(torch.isin(x.planes[level], self.sets[level]).all())

    def _trivial(self, x: Planes) -> Tensor:
        """Whether each element is one, minus one or zero, which match too many values."""
        level = min(x.window.high, self.domain.field.levels - 1)
        p = self.domain.field.primes[level]
        return torch.isin(x.planes[level], torch.tensor([0, 1, p - 1]))

    # The first value without a match.

    def _first(self) -> tuple[BlamedLine, bool]:
        graph = _graph(self.certificate, self.seen.rank)
        (output,) = (n for n in graph.nodes if n.op == "output")
        node: Any = output.args[0][self.seen.output]
        own = self.events[self.seen.rank]
        final = self._event_of(own, node)
        if final is None:
            return _at_output(self.certificate, self.seen), True
        if final.axes is not None:
            pending = self._stays_pending(final)
            if pending:
                begun = _line(self._begun(final))
                why = f"a sum that is still pending over {', '.join(pending)}."
                return BlamedLine(begun, why), True
            why = "it is another value of the reference than is due here."
            return BlamedLine(_line(self._maker(final)), why), not self._trivial(final.value).any()
        region: list[_Event] = []
        todo = [final]
        while todo:
            event = todo.pop()
            if event in region:
                continue
            region.append(event)
            todo += [e for e in event.reads if e.axes is None]
        order = {id(e): i for i, e in enumerate(own)}
        first = [e for e in region if all(r.axes is not None for r in e.reads)] or region
        culprit = min(first, key=lambda e: order.get(id(e), len(own)))
        for read in culprit.reads:
            if read.axes:
                begun, there = _line(self._begun(read)), _line(culprit)
                line = begun if begun == there else f"{begun}, read at {there}"
                why = f"a sum that is still pending over {', '.join(read.axes)}."
                return BlamedLine(line, why), True
        return self._mended(region) or BlamedLine(
            _line(culprit), "the first value that the reference does not hold."
        ), True

    # A program that arranges a formula differently has values that the reference lacks before
    # anything is wrong. A reduction is to blame if scaling its result alone corrects the output; of
    # several, the one that corrects most outputs.

    def _mended(self, region: Sequence[_Event]) -> BlamedLine | None:
        if not self.are_alike:
            return None
        own = self.events[self.seen.rank]
        exchanges = [e for e in own if e.node.target is EXCHANGE and any(e is r for r in region)]
        sizes = list(self.certificate.axes.values())
        counts = {math.prod(s) for n in range(len(sizes)) for s in combinations(sizes, n + 1)}
        outputs = len(self.certificate.outputs)
        best, blamed = self.seen.output, None
        for event in reversed(exchanges[-MOST_SCALED:]):
            at = next(i for i, e in enumerate(own) if e is event)
            for count in sorted(counts - {1}):
                for by, how in ((Fraction(1, count), "divided by"), (Fraction(count), "times")):
                    right = self._right_with(at, by)
                    if right > best:
                        why = f"{how} {count}, its result would be right."
                        best, blamed = right, BlamedLine(_line(event), why)
                    if best == outputs:
                        return blamed
        return blamed

    def _right_with(self, at: int, by: Fraction) -> int:
        """The number of outputs that are right, up to the first wrong one, if every rank's result
        number ``at`` is scaled.
        """
        domain = Residues(self.field)
        made = [0] * len(self.events)

        def scale(rank: Rank, _: fx.Node, found: Any) -> None:
            for x in _planes(found):
                if made[rank.number] == at:
                    domain.write(x, domain.scaled(x, by))
                made[rank.number] += 1

        try:
            inputs = inputs_for(domain, self.certificate, 0)
            found = compare(domain, self.certificate, inputs, scale)
            return len(self.certificate.outputs) if found is None else found.output
        except (Blind, Degenerate):
            return 0

    def _event_of(self, own: Sequence[_Event], node: Any) -> _Event | None:
        if not isinstance(node, fx.Node):
            return None
        found = [e for e in own if e.node is node]
        if not found:
            return None
        later = [e for e in own if e.storage == found[-1].storage]
        return later[-1]

    def _maker(self, event: _Event) -> _Event:
        """The event that made the elements of a view."""
        while len(event.reads) == 1 and _maker(event.node) is not event.node:
            if not _line(event.reads[0]):
                break
            event = event.reads[0]
        return event

    @staticmethod
    def _begun(event: _Event) -> _Event:
        """The event at which a pending sum begins."""
        while before := [e for e in event.reads if e.axes]:
            event = before[0]
        return event

    def _stays_pending(self, event: _Event) -> tuple[str, ...]:
        assert event.axes is not None
        pending = self.certificate.unreduced.outputs[self.seen.output]
        return tuple(a for a in event.axes if a not in pending)


def _planes(found: Any) -> list[Planes]:
    """The values among an op's results."""
    results = found if isinstance(found, list | tuple) else [found]
    return [x for x in results if isinstance(x, Planes)]


def _line(event: _Event) -> str:
    return event.node.meta.get("source", "")
