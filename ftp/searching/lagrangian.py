"""A search under way: what the networks find at a price of memory, in an order of the axes, and
what it would take.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from ftp.planning.cost import Hardware
from ftp.planning.from_fx import constraints, decompose
from ftp.planning.graph import Node, Value
from ftp.planning.plan import Specs
from ftp.planning.planner import plan_few
from ftp.planning.problem import NotAlike
from ftp.planning.solver.reduce import Infeasible
from ftp.report.lowered import Lowered
from ftp.runtime.options import Options
from ftp.runtime.program import Program
from ftp.searching.extrapolate import Estimate, estimate
from ftp.searching.open_layouts import (
    Along,
    Choice,
    Opened,
    Price,
    Solved,
    entry_of,
    nbytes_of,
    on_primitives,
    open_layouts,
    opened,
    solve_axes,
    traced_loss,
)
from ftp.sharding.layout import Layout
from ftp.sharding.mesh import Mesh
from ftp.sharding.spec import PartitionSpec, Units
from ftp.tracing.trace import Traced

TRIES = 8000  # nodes of the programs that are planned to refine a plan
STEPS = (
    6  # prices of memory tried between one at which nothing is saved and one at which everything is
)
DEAREST = 1.0  # seconds a byte: more than any program gains by holding one
MOST_AXES = 3  # searched in every order

Patterns = dict[str, PartitionSpec]


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


@dataclass
class Searching:
    """A search under way: what was tried, by plan."""

    loss_fn: Callable[..., Any]
    params: Any
    batch: Any
    batch_specs: Any
    given: Sequence[PartitionSpec]
    mesh: Mesh
    data_axes: tuple[str, ...]
    hardware: Hardware
    memory: int | None
    tried: dict[tuple[Any, ...], Candidate] = field(default_factory=dict)
    refused: set[tuple[Any, ...]] = field(default_factory=set)
    is_folded: bool = True

    @cached_property
    def traced(self) -> Traced:
        return traced_loss(self.loss_fn, self.params, self.batch, self.mesh)

    @property
    def net(self) -> Opened:
        if (known := self._nets.get(self.is_folded)) is None:
            known = self._nets[self.is_folded] = opened(
                self.traced, self.params, self.batch, self.given, self.is_folded
            )
        return known

    @cached_property
    def _nets(self) -> dict[bool, Opened]:
        return {}

    @cached_property
    def _primitives(self) -> dict[tuple[Any, ...], Opened]:
        return {}

    @property
    def axes(self) -> dict[str, int]:
        """Those that cut anything."""
        return {axis: n for axis, n in self.mesh.axes.items() if n > 1}

    def orders(self) -> list[tuple[str, ...]]:
        return (
            list(itertools.permutations(self.axes))
            if len(self.axes) <= MOST_AXES
            else [tuple(self.axes)]
        )

    def alongs(self) -> Iterator[dict[str, int]]:
        """Per axis that does not cut the batch the inner dims of what blocks return."""
        shapes = list(self.net.marks().values())
        for axis, n in self.axes.items():
            if axis not in self.data_axes and shapes:
                for dim in range(1, min(map(len, shapes)) - 1):
                    if all(shape[dim] % n == 0 for shape in shapes):
                        yield {axis: dim}

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
        try:
            return solve_axes(self.primitives(along).copied(), *args)
        except NotAlike:  # layers that an axis left unlike are searched one by one
            if not self.is_folded:
                raise
            self.is_folded = False
            return solve_axes(self.primitives(along).copied(), *args)

    def primitives(self, along: Along) -> Opened:
        key = (self.is_folded, *along.items())
        if key not in self._primitives:
            base = self.primitives({}) if along else self.net
            self._primitives[key] = on_primitives(base.copied(along), self.axes, self.data_axes)
        return self._primitives[key]

    def candidate(
        self, along: Along, order: tuple[str, ...], price: Price, forced: Choice | None = None
    ) -> Candidate:
        solved = self.solve(along, order, price, forced)
        return self.noted(
            Candidate(
                solved.patterns, along, order, price, solved, self._estimate(solved.patterns, along)
            )
        )

    def noted(self, candidate: Candidate) -> Candidate:
        self.tried.setdefault(candidate.key, candidate)
        return candidate

    def fits(self, candidate: Candidate) -> bool:
        return self.memory is None or candidate.estimate.nbytes <= self.memory

    def fitting(self) -> list[Candidate]:
        """Those that were searched for and fit, the fastest first."""
        found = [c for key, c in self.tried.items() if key not in self.refused and self.fits(c)]
        return sorted(found, key=lambda c: c.estimate.seconds)

    def choice_of(self, patterns: Patterns) -> Choice:
        """The layouts that specs ask for, per axis."""
        found: dict[str, dict[str, Layout | None]] = {
            axis: dict.fromkeys(patterns) for axis in self.axes
        }
        for pattern, spec in patterns.items():
            for dim in range(len(spec)):
                for cut in spec.cuts(dim):
                    packs = cut.pack if isinstance(cut.pack, int) else len(cut.pack)
                    found[cut.axis][pattern] = Layout("S", dim, packs, cut.size, zigzag=cut.zigzag)
        return found

    def kind_of(self, candidate: Candidate) -> str:
        """What people call such a plan."""
        cut = {axis for spec in candidate.patterns.values() for axis in spec.axes}
        names = []
        for axis, n in self.axes.items():
            if axis in self.data_axes:
                could = sum(bool(open_layouts(self.net, p, n, True)) for p in candidate.patterns)
                does = sum(axis in spec.axes for spec in candidate.patterns.values())
                names.append(
                    f"data parallel over {axis}"
                    if not does
                    else f"ZeRO-3 over {axis}{'' if does >= could else ', in part'}"
                )
            else:
                names.append(
                    f"tensor parallel over {axis}" if axis in cut else f"replicated over {axis}"
                )
        names += [f"sequence parallel over {axis}" for axis in candidate.along]
        return ", ".join(names)

    def explore(self) -> None:
        """Try what there is at no price of memory and, where that does not fit, with
        constraints, and at prices.
        """
        self.name_plans()
        free = [
            min(
                (self.candidate({}, order, Price(0.0)) for order in self.orders()),
                key=lambda c: c.estimate.seconds,
            )
        ]
        self.cut_heads(free[0])
        if not self.fits(free[0]):
            free += [self.candidate(along, free[0].order, Price(0.0)) for along in self.alongs()]
        for low in sorted(free, key=lambda c: c.estimate.seconds):
            if not self.fits(low):
                self._raise_price(low)
        best = min(self.tried.values(), key=self._rank)
        if not self.fits(best) or best.estimate.seconds > min(c.estimate.seconds for c in free):
            self.refined(self.improved(best))

    def cut_heads(self, low: Candidate) -> None:
        """Try heads that do not divide cut whole, all of them: the networks, where each could
        stay behind, leave them.
        """
        patterns = dict(low.patterns)
        for axis, n in self.axes.items():
            for pattern, spec in low.patterns.items() if axis not in self.data_axes else ():
                layouts = [c for c in open_layouts(self.net, pattern, n, False) if c.inner != 1]
                if layouts and axis not in spec.axes and spec[layouts[0].dim] is None:
                    entries = list(spec)
                    entries[layouts[0].dim] = entry_of(axis, layouts[0])
                    patterns[pattern] = PartitionSpec(*entries)
        if patterns != low.patterns:
            self.noted(
                replace(
                    low,
                    patterns=patterns,
                    solved=None,
                    estimate=self._estimate(patterns, low.along),
                )
            )

    def _raise_price(self, low: Candidate) -> None:
        """Raise the price of memory until the program fits, and then find the least price at
        which it does.
        """
        along = low.along
        if self._is_best(low):
            return
        share, scale = low.estimate.share, low.estimate.seconds / low.estimate.nbytes
        high = self.candidate(along, low.order, Price(DEAREST, share))
        if not self.fits(high):
            return
        for _ in range(STEPS):
            if self._is_best(low):
                return
            least, most = low.price.seconds, min(high.price.seconds, scale * 100)
            # At this price the two are even, and what it finds is better than both, if there is
            # such a plan.
            even = (high.estimate.seconds - low.estimate.seconds) / (
                low.estimate.nbytes - high.estimate.nbytes
            )
            is_between = least * 1.001 < even < high.price.seconds * 0.999
            price = even if is_between else (least * most) ** 0.5 if least else most / 100
            middle = self.candidate(along, low.order, Price(price, share))
            if middle.key in (low.key, high.key) and is_between:
                return
            low, high = (low, middle) if self.fits(middle) else (middle, high)

    def _is_best(self, low: Candidate) -> bool:
        """Whether something that fits is as fast as what does not."""
        fitting = self.fitting()
        return bool(fitting) and fitting[0].estimate.seconds <= low.estimate.seconds

    def improved(self, best: Candidate) -> Candidate:
        """Search each axis again, the others as they are, until nothing is gained."""
        is_better = best.solved is not None and len(self.axes) > 1 and self.fits(best)
        while is_better:
            is_better = False
            for axis in self.axes:
                assert best.solved is not None
                if axis == best.order[-1]:
                    continue  # which was searched with the others as they are
                others = tuple(a for a in best.order if a != axis)
                forced = {a: best.solved.choice[a] for a in others}
                try:
                    found = self.candidate(best.along, (*others, axis), best.price, forced)
                except Infeasible:
                    continue
                if (
                    self.fits(found)
                    and found.key not in self.refused
                    and found.estimate.seconds < best.estimate.seconds * (1 - 1e-6)
                ):
                    best, is_better = found, True
        return best

    def refined(self, best: Candidate) -> Candidate:
        """Change one pattern's spec at a time while that makes the program fit, or a program that
        fits faster.

        What a limit leaves free no price may find a use for. The largest parameters come first; how
        many plans are tried depends on the size of the program.
        """
        budget = TRIES // len(self.net.graph.nodes)
        is_better = budget > 0
        while is_better:
            is_better = False
            sizes = {
                p: sum(nbytes_of(Value(node)) for node in self.net.members(p))
                for p in best.patterns
            }
            for pattern in sorted(sizes, key=lambda p: -sizes[p]):
                for spec in self._other_specs(pattern, best.patterns[pattern]):
                    patterns = {**best.patterns, pattern: spec}
                    key = tuple(patterns.items()), tuple(best.along.items())
                    if key in self.tried or budget == 0:
                        continue
                    budget -= 1
                    found = self.noted(
                        replace(
                            best,
                            patterns=patterns,
                            solved=None,
                            estimate=self._estimate(patterns, best.along),
                        )
                    )
                    if self._rank(found) < self._rank(best):
                        best, is_better = found, True
        return best

    def _rank(self, candidate: Candidate) -> tuple[bool, float]:
        """Less is better."""
        fits = self.fits(candidate) and candidate.key not in self.refused
        return not fits, candidate.estimate.seconds if fits else candidate.estimate.nbytes

    def _other_specs(self, pattern: str, own: PartitionSpec) -> list[PartitionSpec]:
        """Every way to cut a pattern by the axes, with fewest cuts first."""
        choices: list[list[Layout | None]] = []
        for axis, n in self.axes.items():
            layouts = open_layouts(self.net, pattern, n, False)
            if axis in self.data_axes:
                layouts = [*open_layouts(self.net, pattern, n, True), *layouts]
            choices.append([None, *dict.fromkeys(layouts)])
        found: dict[PartitionSpec, None] = {}
        for chosen in itertools.product(*choices):
            for order in itertools.permutations(range(len(chosen))):
                entries: list[tuple[str | Units, ...]] = [()] * self.net.members(pattern)[
                    0
                ].results[0].ndim
                for at in order:
                    if (layout := chosen[at]) is not None:
                        entries[layout.dim] += (entry_of(list(self.axes)[at], layout),)
                found[PartitionSpec(*[e or None for e in entries])] = None
        return sorted(
            (s for s in found if s != own and self._divides(pattern, s)), key=lambda s: len(s.axes)
        )

    def _divides(self, pattern: str, spec: PartitionSpec) -> bool:
        shapes = [node.results[0].shape for node in self.net.members(pattern)]
        parts = [math.prod(self.axes[c.axis] for c in spec.cuts(d)) for d in range(len(spec))]
        whole = [math.prod(c.size for c in spec.cuts(d)) for d in range(len(spec))]
        return all(
            u > 1 or shape[d] % n == 0
            for shape in shapes
            for d, (n, u) in enumerate(zip(parts, whole, strict=True))
        )

    def name_plans(self) -> None:
        """Try the plans that everyone knows: whole parameters, and all that can be cut on the
        data axes cut.
        """
        patterns = dict.fromkeys(self.net.patterns.values())
        whole = {
            p: PartitionSpec(*[None] * self.net.members(p)[0].results[0].ndim) for p in patterns
        }
        cuts = [a for a in self.axes if a in self.data_axes]
        known = [whole]
        if cuts:
            n = math.prod(self.axes[axis] for axis in cuts)
            known.append({p: cut_first(self.net, p, cuts, n) for p in patterns})
        order = tuple(self.axes)
        for found in known:
            self.noted(Candidate(found, {}, order, Price(0.0), None, self._estimate(found, {})))

    def alternatives(
        self, best: Candidate, solved: Solved
    ) -> dict[tuple[str, str], dict[str, float]]:
        """Per axis and pattern what the axis' network costs more with each other layout of it,
        the axes folded before as they are.
        """
        found: dict[tuple[str, str], dict[str, float]] = {}
        for at, axis in enumerate(best.order):
            before: Choice = {a: solved.choice[a] for a in best.order[:at]}
            for pattern, chosen in solved.choice[axis].items():
                layouts = open_layouts(self.net, pattern, self.axes[axis], axis in self.data_axes)
                for layout in dict.fromkeys((None, *layouts)):
                    if layout == chosen:
                        continue
                    try:
                        other = self.solve(
                            best.along,
                            best.order[: at + 1],
                            best.price,
                            {**before, axis: {pattern: layout}},
                        )
                        is_kept = other.axes[axis].kept_rules or not solved.axes[axis].kept_rules
                        seconds = (
                            other.axes[axis].solution.cost - solved.axes[axis].solution.cost
                            if is_kept
                            else math.inf
                        )
                    except (Infeasible, NotAlike):
                        seconds = math.inf
                    found.setdefault((axis, pattern), {})[described(layout)] = seconds
        return found

    def gaps(self, best: Candidate, solved: Solved) -> dict[str, float]:
        """Per axis by how many seconds at most its network has a cheaper plan, the axes folded
        before as they are.

        With a limit also what the bytes that are still free are worth at the price paid: a plan
        that holds more could cost so much less.
        """
        free = best.price.seconds * max(0, (self.memory or 0) - best.estimate.nbytes)
        found = {}
        for at, axis in enumerate(best.order):
            optimum = self.solve(
                best.along,
                best.order[: at + 1],
                best.price,
                {a: solved.choice[a] for a in best.order[:at]},
            )
            found[axis] = (
                max(0.0, solved.axes[axis].solution.cost - optimum.axes[axis].solution.bound) + free
            )
        return found

    def bound(self, price: Price) -> float:
        """Seconds that no plan takes less than, as the networks count them, of those that keep the
        rules of conduct and fit.

        Each axis alone is a relaxation: the others cut all there is for nothing, and the ops' time
        is shared out evenly. With memory at a price its minimum less the price of the limit is a
        bound still (Lagrange). Constraints that were tried are other programs: the least of them
        all.
        """
        alongs = dict.fromkeys(tuple(c.along.items()) for c in self.tried.values())
        prices = {0.0, price.seconds} - {DEAREST}
        return max(
            min(self._bound_of(dict(along), replace(price, seconds=p)) for along in alongs)
            for p in sorted(prices)
        )

    def _bound_of(self, along: Along, price: Price) -> float:
        axes = self.axes
        total = -price.seconds * (self.memory or 0)
        for axis, n in axes.items():
            others = math.prod(axes.values()) // n
            each = len(axes) * others
            h = self.hardware
            links = {
                a: replace(link, bandwidth=link.bandwidth * others) for a, link in h.links.items()
            }
            link = replace(h.link, bandwidth=h.link.bandwidth * others)
            rates = {dtype: rate * each for dtype, rate in h.rates.items()}
            fast = replace(
                h, flops=h.flops * each, memory=h.memory * each, rates=rates, link=link, links=links
            )
            share = replace(price, seconds=price.seconds / each)
            found = self.solve(along, (axis,), share, hardware=fast, is_bare=True).axes[axis]
            total += found.solution.bound if found.kept_rules else 0.0
        return total

    def _estimate(self, patterns: Patterns, along: Along) -> Estimate:
        known = self.tried.get((tuple(patterns.items()), tuple(along.items())))
        return known.estimate if known else self._measured(patterns, along)

    def _measured(self, patterns: Patterns, along: Along) -> Estimate:
        net = self.net.copied(along)
        inputs = {node: patterns[net.patterns[node]] for node in net.params} | net.batch
        outputs = [
            inputs[net.mirrors[i]] if i in net.mirrors else PartitionSpec()
            for i in range(len(net.graph.outputs))
        ]
        specs = Specs(inputs, constraints(net.graph), outputs)
        ties = net.folded.ties if net.folded else None
        found = plan_few(
            net.graph,
            self.mesh.axes,
            specs,
            ties=ties,
            batch_inputs=list(net.batch),
            data_axes=self.data_axes,
            hardware=self.hardware,
            decompose=decompose,
        )
        if found is None:
            self.is_folded = False
            return self._measured(patterns, along)
        program = Program(
            mesh=self.mesh,
            traced=self.traced.gm,
            plan=found,
            tensor_leaves=tuple(range(len(found.graph.inputs))),
            in_specs=tuple(inputs.get(node, PartitionSpec()) for node in found.graph.inputs),
            out_tree=self.traced.out_tree,
            roles=tuple(_role(net, node) for node in found.graph.inputs),
            # What a bucket of several layers adds is not so much a layer.
            options=Options(bucket=False),
            hardware=self.hardware,
        )
        return estimate(Lowered(program), net.folded, self.hardware)


def _role(net: Opened, node: Node) -> str:
    return "parameters" if node in net.patterns else "batch" if node in net.batch else "constants"


def cut_first(net: Opened, pattern: str, axes: Sequence[str], n: int) -> PartitionSpec:
    """A pattern's first dim that divides cut over all the axes, as ZeRO-3 does."""
    spec: list[Any] = [None] * net.members(pattern)[0].results[0].ndim
    for layout in open_layouts(net, pattern, n, True)[:1]:
        spec[layout.dim] = tuple(axes)
    return PartitionSpec(*spec)


def described(layout: Layout | None) -> str:
    """
    >>> described(None), described(Layout("S", 1))
    ('whole', 'dim 1')
    """
    if layout is None:
        return "whole"
    units = "" if layout.inner == 1 else f" in units of {layout.inner}"
    packs = "" if layout.outer == 1 else f" in {layout.outer} packs"
    return f"dim {layout.dim}{units}{packs}"
