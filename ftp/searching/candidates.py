"""The state of a search: candidate plans, each with its seconds and bytes.

The networks find them at a price of memory and in an order of the axes.
"""

from collections.abc import Sequence
from dataclasses import field, replace
from functools import cached_property
from typing import Any

from ftp.dataclass import dataclass
from ftp.planning.cost import Hardware
from ftp.planning.layers.repeats import KEPT, Folded
from ftp.planning.problem import NotAlike
from ftp.report.lowered import Lowered
from ftp.runtime.program import Program
from ftp.searching.axis_networks import Choice, Price, Solved, solve_axes
from ftp.searching.extrapolate import Estimate, estimate
from ftp.searching.loss_programs import LossPrograms
from ftp.searching.marks import Along
from ftp.searching.open_axis import on_primitives
from ftp.searching.opened import Opened, opened
from ftp.searching.prepared_loss import Patterns


@dataclass(frozen=True)
class Candidate:
    patterns: Patterns
    along: Along
    order: tuple[str, ...]
    price: Price
    solved: Solved | None
    estimate: Estimate

    @property
    def key(self) -> tuple[Any, ...]:
        return tuple(self.patterns.items()), tuple(self.along.items())


NODES = 3000  # most nodes, over all programs, to plan when refining a plan


@dataclass(frozen=True)
class Spare:
    """A candidate that was refused for its buckets and fits without them.

    Attributes:
        program: the candidate lowered without buckets.
        gain: its seconds with buckets over those of its estimate.
    """

    candidate: Candidate
    program: Lowered
    gain: float


@dataclass
class Searching(LossPrograms):
    """The state of a search: candidates by plan."""

    memory: int | None
    tried: dict[tuple[Any, ...], Candidate] = field(default_factory=dict)
    refused: set[tuple[Any, ...]] = field(default_factory=set)
    excess: int = 0  # bytes by which a program exceeded its estimate, by buckets of all layers
    kept: int = 1  # layers at each end of a run of equal ones; 0: all
    free: list[Candidate] = field(default_factory=list)  # found at no price of memory
    bucket: bool = True  # as in ``shard``
    spare: Spare | None = None

    @property
    def tries(self) -> int:
        """The number of plans to try when refining one."""
        return NODES // len(self.net.graph.nodes)

    @property
    def is_small(self) -> bool:
        return self.tries >= 20

    @property
    def net(self) -> Opened:
        if (known := self._nets.get(self.kept)) is None:
            known = self._nets[self.kept] = opened(self.prepared({}), self.kept)
        return known

    @cached_property
    def _nets(self) -> dict[int, Opened]:
        return {}

    @cached_property
    def _solved(self) -> dict[tuple[Any, ...], Solved]:
        return {}

    @cached_property
    def _programs(self) -> dict[tuple[Any, ...], tuple[Program, Folded | None]]:
        return {}

    @cached_property
    def _primitives(self) -> dict[tuple[Any, ...], Opened]:
        return {}

    @property
    def axes(self) -> dict[str, int]:
        """The axes that cut some parameter."""
        return {axis: n for axis, n in self.mesh.axes.items() if n > 1}

    def solve(
        self,
        along: Along,
        order: Sequence[str],
        price: Price,
        forced: Choice | None = None,
        hardware: Hardware | None = None,
        is_bare: bool = False,
    ) -> Solved:
        args = self.axes, order, self.data_axes, hardware or self.hardware, price, forced, is_bare
        while True:
            try:
                return solve_axes(self.primitives(along), *args)
            except NotAlike:
                self.keep_more()

    def keep_more(self) -> None:
        """Keep more layers, after equal ones got different layouts."""
        assert self.kept
        self.kept = KEPT if self.kept < KEPT else 0

    def primitives(self, along: Along) -> Opened:
        key = (self.kept, *along.items())
        if key not in self._primitives:
            net = opened(self.prepared(along), self.kept) if along else self.net
            self._primitives[key] = on_primitives(net, self.axes, self.data_axes)
        return self._primitives[key]

    def candidate(
        self, along: Along, order: tuple[str, ...], price: Price, forced: Choice | None = None
    ) -> Candidate:
        fixed = tuple((axis, tuple(of.items())) for axis, of in (forced or {}).items())
        key = tuple(along.items()), order, price, fixed
        if (solved := self._solved.get(key)) is None:
            solved = self._solved[key] = self.solve(along, order, price, forced)
        found = self.estimate_of(solved.patterns, along)
        return self.noted(Candidate(solved.patterns, along, order, price, solved, found))

    def noted(self, candidate: Candidate) -> Candidate:
        known = self.tried.get(candidate.key)
        if known is None or known.solved is None:
            self.tried[candidate.key] = candidate
        return candidate

    def with_patterns(self, candidate: Candidate, patterns: Patterns) -> Candidate:
        """The candidate with other specs than a network chose, planned in the same order."""
        found = self.estimate_of(patterns, candidate.along, self.order_of(candidate))
        return self.noted(replace(candidate, patterns=patterns, solved=None, estimate=found))

    def fits(self, candidate: Candidate) -> bool:
        return self.memory is None or candidate.estimate.nbytes + self.excess <= self.memory

    def refuse(self, candidate: Candidate, nbytes: int) -> None:
        """Record that a candidate, estimated to fit, takes ``nbytes`` when lowered in full."""
        self.refused.add(candidate.key)
        self.excess = max(self.excess, nbytes - candidate.estimate.nbytes)

    def spared(self) -> list[Candidate]:
        """The candidates that fit without buckets, if one is known to fit; then the search drops
        buckets.
        """
        if self.spare is None or not self.bucket:
            return []
        self.leave_buckets()
        return self.fitting() or [self.tried[self.spare.candidate.key]]

    def promising(self) -> list[Candidate]:
        """The candidates that fit, fastest first, without those that are expected to be slower with
        buckets than the `Spare` candidate is without.
        """
        found = self.fitting()
        if self.spare is None or not self.bucket:
            return found
        most = float(self.spare.program.cost()) / self.spare.gain
        return [one for one in found if one.estimate.seconds < most]

    def fitting(self) -> list[Candidate]:
        """The candidates that fit, fastest first."""
        found = [c for key, c in self.tried.items() if key not in self.refused and self.fits(c)]
        return sorted(found, key=lambda c: c.estimate.seconds)

    def leave_buckets(self) -> None:
        """Search without buckets: a limit may leave no room for the copies that they hold."""
        self.bucket, self.excess = False, 0
        self.refused.clear()
        if self.net.folded is not None:  # estimates of repeated layers have no buckets anyway
            return
        known = list(self.tried.values())
        self.tried.clear()
        for one in known:
            self.noted(replace(one, estimate=self._measured(one.patterns, one.along)))
        self.free = [self.tried[one.key] for one in self.free]

    def order_of(self, candidate: Candidate) -> tuple[str, ...] | None:
        """The order in which the axes of a candidate's program were planned, if it is known."""
        known = self._programs.get((self.kept, *candidate.key))
        return known and tuple(known[0].plan.axes)

    def estimate_of(
        self, patterns: Patterns, along: Along, order: Sequence[str] | None = None
    ) -> Estimate:
        """The estimate of a plan, with its axes in the order that takes least time or, of a plan
        not met before, in the given one.
        """
        known = self.tried.get((tuple(patterns.items()), tuple(along.items())))
        return known.estimate if known else self._measured(patterns, along, order)

    def _measured(
        self, patterns: Patterns, along: Along, order: Sequence[str] | None = None
    ) -> Estimate:
        key = (tuple(patterns.items()), tuple(along.items()))
        while (known := self._programs.get((self.kept, *key))) is None:
            made = self.few(patterns, along, self.kept, order)
            if made is None:
                self.keep_more()
            else:
                self._programs[self.kept, *key] = made
        program, folded = known
        # A bucket over several layers does not add the same number of bytes per layer.
        program = program.with_options(bucket=self.bucket and folded is None)
        return estimate(Lowered(program), folded, self.hardware)
