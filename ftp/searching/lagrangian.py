"""The state of a search: candidate plans, each with its seconds and bytes.

The networks find them at a price of memory and in an order of the axes.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from ftp.planning.cost import Hardware
from ftp.planning.cost_network import VIOLATION, open_costs
from ftp.planning.from_fx import constraints, decompose
from ftp.planning.graph import Node, Value
from ftp.planning.layers.repeats import Folded
from ftp.planning.plan import Specs
from ftp.planning.planner import plan_few
from ftp.planning.problem import NotAlike
from ftp.planning.solver.reduce import Infeasible
from ftp.report.lowered import Lowered
from ftp.runtime.program import Program
from ftp.searching.extrapolate import Estimate, estimate
from ftp.searching.open_layouts import (
    Along,
    Choice,
    Opened,
    Price,
    Solved,
    axis_problem,
    entry_of,
    nbytes_of,
    on_primitives,
    open_layouts,
    opened,
    planned_seconds,
    shared_heads,
    solve_axes,
    traced_loss,
)
from ftp.sharding.layout import Layout, R
from ftp.sharding.mesh import Mesh
from ftp.sharding.spec import PartitionSpec, Units
from ftp.tracing.trace import Traced

TRIES = 3000  # nodes of the programs that are planned to refine a plan
STEPS = (
    4  # prices of memory tried between one at which nothing is saved and one at which everything is
)
# Times a program's seconds a byte: to hold less is worth more than what moves for it. Much more,
# and the differences in time drown in the rounding of the sum.
DEAREST = 1e4
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
    """The state of a search: candidates by plan."""

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
    excess: int = 0  # bytes by which a program took more than its estimate: buckets of all layers
    is_folded: bool = True
    free: list[Candidate] = field(default_factory=list)  # found at no price of memory
    bucket: bool = True  # as in ``shard``
    spare: Candidate | None = None  # refused for what buckets hold; it fits without them

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
            return solve_axes(self.primitives(along), *args)
        except NotAlike:  # layers that an axis left unlike are searched one by one
            if not self.is_folded:
                raise
            self.is_folded = False
            return solve_axes(self.primitives(along), *args)

    def primitives(self, along: Along) -> Opened:
        key = (self.is_folded, *along.items())
        if key not in self._primitives:
            base = self.primitives({}) if along else self.net
            self._primitives[key] = on_primitives(
                base.constrained(along), self.axes, self.data_axes
            )
        return self._primitives[key]

    def candidate(
        self, along: Along, order: tuple[str, ...], price: Price, forced: Choice | None = None
    ) -> Candidate:
        fixed = tuple((axis, tuple(of.items())) for axis, of in (forced or {}).items())
        key = tuple(along.items()), order, price, fixed
        if (solved := self._solved.get(key)) is None:
            solved = self._solved[key] = self.solve(along, order, price, forced)
        return self.noted(
            Candidate(
                solved.patterns, along, order, price, solved, self._estimate(solved.patterns, along)
            )
        )

    def noted(self, candidate: Candidate) -> Candidate:
        self.tried.setdefault(candidate.key, candidate)
        return candidate

    def fits(self, candidate: Candidate) -> bool:
        return self.memory is None or candidate.estimate.nbytes + self.excess <= self.memory

    def refuse(self, candidate: Candidate, nbytes: int) -> None:
        """Note that a candidate that was to fit takes ``nbytes`` when it is lowered in full."""
        self.refused.add(candidate.key)
        self.excess = max(self.excess, nbytes - candidate.estimate.nbytes)

    def spared(self) -> list[Candidate]:
        """The candidate that fits without buckets, if there is one; then the search is without."""
        if self.spare is None or not self.bucket:
            return []
        self.leave_buckets()
        return [self.tried[self.spare.key]]

    def fitting(self) -> list[Candidate]:
        """The candidates that fit, fastest first."""
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
                    shared = shared_heads(self.net, pattern, self.axes[cut.axis])
                    if shared and (shared.dim, shared.inner) == (dim, cut.size):
                        continue  # held so, and used as if it were whole
                    found[cut.axis][pattern] = Layout("S", dim, packs, cut.size, zigzag=cut.zigzag)
        return found

    def kind_of(self, candidate: Candidate) -> str:
        """The common name of a plan, such as plain data parallelism."""
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
        least = min(
            (self.candidate({}, order, Price(0.0)) for order in self.orders()),
            key=lambda c: c.estimate.seconds,
        )
        self.cut_heads(least)
        self.free = [least]
        self.fit()

    def fit(self) -> None:
        """Try what takes less memory, where the plans that are free to take any do not fit."""
        least = self.free[0]
        if not self.fits(least) and len(self.free) == 1:
            self.free += [self.candidate(along, least.order, Price(0.0)) for along in self.alongs()]
        for low in sorted(self.free, key=lambda c: c.estimate.seconds):
            if not self.fits(low):
                self._raise_price(low)
        best = min(self.tried.values(), key=self._rank)
        if not self.fits(best) and self.bucket:
            self.leave_buckets()
            self.fit()
        elif not self.fits(best) or best.estimate.seconds > min(
            c.estimate.seconds for c in self.free
        ):
            self.refined(self.improved(best))

    def leave_buckets(self) -> None:
        """Go on without buckets: they hold copies, for which a limit may leave no room."""
        self.bucket, self.excess = False, 0
        self.refused.clear()
        if self.net.folded is not None:  # estimates of repeated layers are without as it is
            return
        known = list(self.tried.values())
        self.tried.clear()
        for one in known:
            self.noted(replace(one, estimate=self._measured(one.patterns, one.along)))
        self.free = [self.tried[one.key] for one in self.free]

    def cut_heads(self, low: Candidate) -> None:
        """Try heads that do not divide cut whole, and packed tensors cut in packs, all of them: the
        networks, where each could stay behind, leave them. Under a limit also heads that neighbours
        share.
        """
        patterns = dict(low.patterns)
        for axis, n in self.axes.items():
            for pattern, spec in low.patterns.items() if axis not in self.data_axes else ():
                layouts = [c for c in open_layouts(self.net, pattern, n, False) if c.inner != 1]
                shared = shared_heads(self.net, pattern, n)
                layouts += [shared] if shared and self.memory is not None else []
                layouts += self.primitives(low.along).packs.get((axis, pattern), ())
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
        high = self.candidate(along, low.order, Price(DEAREST * scale, share))
        if not self.fits(high):
            self.cut_heads(high)
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
        """Whether a candidate that fits is as fast as every one that does not."""
        fitting = self.fitting()
        return bool(fitting) and fitting[0].estimate.seconds <= low.estimate.seconds

    def improved(self, best: Candidate) -> Candidate:
        """Search one axis after another again, the others fixed, until no step is faster."""
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
                for spec in self._promising_specs(pattern, best):
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
        """Sort key of candidates: lower is better."""
        fits = self.fits(candidate) and candidate.key not in self.refused
        return not fits, candidate.estimate.seconds if fits else candidate.estimate.nbytes

    def _promising_specs(self, pattern: str, best: Candidate) -> list[PartitionSpec]:
        """Of a plan that fits those that hold as much or more, of one that does not those that
        hold as much or less.
        """
        sizes = [nbytes_of(Value(node)) for node in self.net.members(pattern)]

        def held(spec: PartitionSpec) -> int:
            return sum(sizes) // math.prod(self.axes.get(axis, 1) for axis in spec.axes)

        own, sign = best.patterns[pattern], 1 if self.fits(best) else -1
        specs = self._other_specs(pattern, own)
        return [spec for spec in specs if sign * (held(spec) - held(own)) >= 0]

    def _other_specs(self, pattern: str, own: PartitionSpec) -> list[PartitionSpec]:
        """Every way to cut a pattern by the axes, with fewest cuts first."""
        choices: list[list[Layout | None]] = []
        for axis, n in self.axes.items():
            layouts = open_layouts(self.net, pattern, n, False)
            shared = shared_heads(self.net, pattern, n)
            layouts += [shared] if shared and axis not in self.data_axes else []
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

    def paid(self, best: Candidate, planned: float) -> Price:
        """What a byte is worth: the price at which a plan was found, or less where fitting has
        cost less than that, in seconds for each byte that the plan without a limit held more.

        Args:
            planned: seconds of the plan, as the networks count them.
        """
        free = min(self.free, key=lambda c: c.estimate.seconds)
        saved = free.estimate.nbytes - best.estimate.nbytes
        if self.memory is None or self.fits(free) or saved <= 0 or free.solved is None:
            return replace(best.price, seconds=0.0)
        lost = max(0.0, planned - planned_seconds(free.solved, self.hardware))
        return replace(best.price, seconds=min(best.price.seconds or math.inf, lost / saved))

    def alternatives(
        self, best: Candidate, solved: Solved
    ) -> dict[tuple[str, str], dict[str, float]]:
        """Per axis and pattern what the axis' network costs more with each other layout of it,
        the axes folded before as they are.
        """
        found: dict[tuple[str, str], dict[str, float]] = {}
        for at, axis in enumerate(best.order):
            net = self.solve(best.along, best.order[:at], best.price, solved.choice).net
            problem = axis_problem(
                net,
                axis,
                best.order[:at],
                self.axes,
                self.data_axes,
                self.hardware,
                best.price,
            )
            _, costs = open_costs(problem)
            of_pattern = {net.patterns[first]: each for first, each in costs.items()}
            for pattern, chosen in solved.choice[axis].items():
                layouts = open_layouts(self.net, pattern, self.axes[axis], axis in self.data_axes)
                others = {
                    described(layout): in_seconds_of(of_pattern[pattern].get(layout or R, math.inf))
                    - in_seconds_of(solved.axes[axis].solution.cost)
                    for layout in dict.fromkeys((None, *layouts))
                    if layout != chosen
                }
                if others:
                    found[axis, pattern] = others
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
                max(
                    0.0,
                    in_seconds_of(solved.axes[axis].solution.cost)
                    - in_seconds_of(optimum.axes[axis].solution.bound),
                )
                + free
            )
        return found

    def bound(self, price: Price) -> float:
        """A lower bound, in the networks' seconds, of all plans that keep the placement constraints
        and fit.

        Each axis alone is a relaxation: the other axes cut everything at no cost, and share the
        ops' time evenly. With a price of memory, the minimum less the price of the limit is still a
        bound (Lagrange). Every set of constraints that was tried is a program of its own: the bound
        is the least of theirs.
        """
        alongs = dict.fromkeys(tuple(c.along.items()) for c in self.tried.values())
        return max(
            min(self._bound_of(dict(along), replace(price, seconds=p)) for along in alongs)
            for p in sorted({0.0, price.seconds})
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
        key = (tuple(patterns.items()), tuple(along.items()))
        while (known := self._programs.get((self.is_folded, *key))) is None:
            made = self._program(patterns, along)
            if made is None:
                assert self.is_folded
                self.is_folded = False
            else:
                self._programs[self.is_folded, *key] = made
        program, folded = known
        # What a bucket of several layers adds is not so much a layer.
        program = program.with_options(bucket=self.bucket and folded is None)
        return estimate(Lowered(program), folded, self.hardware)

    def _program(self, patterns: Patterns, along: Along) -> tuple[Program, Folded | None] | None:
        """The planned program without its repeated layers, and which they are; None where they
        come out different.
        """
        net = self.net.constrained(along)
        inputs = {node: patterns[net.patterns[node]] for node in net.params} | net.batch
        outputs = [
            inputs[net.mirrors[i]] if i in net.mirrors else PartitionSpec()
            for i in range(len(net.graph.outputs))
        ]
        specs = Specs(inputs, constraints(net.graph), outputs)
        found = plan_few(
            net.graph,
            self.mesh.axes,
            specs,
            folded=net.folded,
            batch_inputs=list(net.batch),
            data_axes=self.data_axes,
            hardware=self.hardware,
            decompose=decompose,
        )
        if found is None:
            return None
        planned = dict(zip(net.graph.inputs, found.graph.inputs, strict=True))
        program = Program(
            mesh=self.mesh,
            traced=self.traced.gm,
            plan=found,
            tensor_leaves=tuple(range(len(found.graph.inputs))),
            in_specs=tuple(inputs.get(node, PartitionSpec()) for node in planned),
            out_tree=self.traced.out_tree,
            roles=tuple(_role(net, node) for node in planned),
            hardware=self.hardware,
        )
        return program, net.folded and net.folded.on(planned)


def in_seconds_of(cost: float) -> float:
    """A network's cost without its prices of violations, for a plan that breaks placement
    constraints.

    >>> in_seconds_of(0.25), in_seconds_of(2000.25)
    (0.25, 0.25)
    """
    return cost if cost == math.inf else cost % VIOLATION


def _role(net: Opened, node: Node) -> str:
    return "parameters" if node in net.patterns else "batch" if node in net.batch else "constants"


def cut_first(net: Opened, pattern: str, axes: Sequence[str], n: int) -> PartitionSpec:
    """A spec that cuts the first dim which divides over all the axes, as ZeRO-3 does."""
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
