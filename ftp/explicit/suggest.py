"""Find constraints to write for collectives that no line asks for.

They are tried on a trace with probes, identity ops at every place where the user can write a
constraint: a constraint replaces a probe.
"""

import math
import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import product
from typing import Any

from torch import fx

from ftp.dataclass import dataclass
from ftp.explicit.asked import (
    collectives_of,
    keeps_value,
    makers,
    passes_on,
    unasked,
    users_in_phase,
)
from ftp.ops.constrain import CONSTRAIN, MARK, Pin, pin_from_str, pin_to_str
from ftp.planning.graph import Node, Value
from ftp.planning.plan import Plan
from ftp.report.disagreement import spec_of, without_axis
from ftp.rules.op_kinds import VIEWS
from ftp.sharding.spec import PartitionSpec
from ftp.tracing.calls import Line, Operand, Probe, Site, TorchCalls

ROUNDS = 4  # plans tried, as a constraint may make further reshards necessary
Plans = Callable[[fx.GraphModule], Plan]


@dataclass(frozen=True)
class Wanted:
    """A constraint to write.

    Attributes:
        grad: whether it fixes the gradient too.
        reshards: names of the reshards, in the plan with probes, that it asks for.
    """

    site: Site
    pin: Pin
    grad: bool
    reshards: tuple[str, ...] = ()


@dataclass(frozen=True)
class Suggestion:
    """Constraints to write.

    Attributes:
        plan: of the trace with probes; it has the reshards that constraints ask for.
        without: reshards for which there is no place.
        is_proven: whether a plan with the constraints asks for all its collectives, and has the
            same collectives as the plan without them.
    """

    plan: Plan
    wanted: tuple[Wanted, ...]
    without: tuple[Node, ...]
    is_proven: bool


@dataclass(frozen=True)
class Probed:
    """A trace with probes.

    Attributes:
        calls: the places of the probes.
        plans: plans a graph like ``gm``.
        out_specs: the given spec of each output, or None.
        names: of the arguments.
    """

    gm: fx.GraphModule
    calls: TorchCalls
    plans: Plans
    out_specs: Sequence[PartitionSpec | None]
    names: Sequence[str]

    def planned(self, wanted: Mapping[Site, Wanted]) -> Plan:
        """The plan with constraints in place of the probes at their sites, and without the other
        probes.
        """
        graph = fx.Graph()
        graph.output(graph.graph_copy(self.gm.graph, {}))
        for node in list(graph.nodes):
            if (number := _probe_of(node)) is None:
                continue
            given = wanted.get(self.calls.sites[number].site)
            if given is None:
                node.replace_all_uses_with(node.args[0])
                graph.erase_node(node)
            else:
                is_gradient = node.meta.get("phase", 0) % 2
                entries = pin_to_str(given.pin) if given.grad or not is_gradient else MARK
                node.args = (node.args[0], entries)
        return self.plans(fx.GraphModule({}, graph))

    def unasked(self, plan: Plan, without: Collection[str] = ()) -> list[Node]:
        """The plan's reshards that no line asks for; ``without``: constraints to ignore."""
        return unasked(plan, self.out_specs, without)

    @cached_property
    def of_inputs(self) -> dict[str, list[int]]:
        """Per argument, the probes of its value."""
        inputs = self.gm.graph.find_nodes(op="placeholder")
        named = dict(zip(inputs, self.names, strict=False))
        found: dict[str, list[int]] = {}
        for node, number in self._probes:
            if (base := _base(node)[0]) in named:
                found.setdefault(named[base], []).append(number)
        return found

    @cached_property
    def _probes(self) -> list[tuple[fx.Node, int]]:
        """The probes, forward and backward, with their numbers."""
        nodes = [(node, _probe_of(node)) for node in self.gm.graph.nodes]
        return [(node, number) for node, number in nodes if number is not None]

    @cached_property
    def metas(self) -> dict[int, Any]:
        """Per probe, a fake tensor of its value's shape and dtype."""
        return {number: node.meta["val"] for node, number in self._probes}

    def nodes_at(self, site: Site) -> set[str]:
        """The names of a place's probes in the graph, forward and backward."""
        return {n.name for n, number in self._probes if self.calls.sites[number].site == site}

    @property
    def ndims(self) -> dict[Site, int]:
        """Per place the number of dims of its value."""
        return {self.calls.sites[number].site: x.ndim for number, x in self.metas.items()}


def tagged(gm: fx.GraphModule) -> fx.GraphModule:
    """Record in each node's line the probes that its results pass through."""
    for node in gm.graph.nodes:
        if (number := _probe_of(node)) is None:
            continue
        base, index = _base(node)
        if isinstance(line := base.meta.get("source"), str) and base.op != "placeholder":
            call, probes = (line.call, line.probes) if isinstance(line, Line) else (-1, ())
            base.meta["source"] = Line(str(line), call, (*probes, (index, number)))
    return gm


def _base(node: fx.Node) -> tuple[fx.Node, int]:
    """The node that a probe is on, and the index of its result."""
    x: Any = node
    while _probe_of(x) is not None:
        x = x.args[0]
    return (x.args[0], x.args[1]) if x.target is operator.getitem else (x, 0)


def suggest(plan: Plan, probed: Probed) -> Suggestion:
    """The constraints that ask for the unasked collectives of ``plan``, of the plain trace.

    Constraints are tried in four forms: with or without the gradient, on all mesh axes or only on
    those of the reshards.
    """
    sent = _sent_by(plan)
    places = Places(probed.planned({}), probed)
    found, without = places.all_wanted()
    first = Suggestion(places.plan, tuple(found.values()), without, is_proven=False)
    for on_fewer_axes, is_free in product((False, True), repeat=2):
        tried = found
        if on_fewer_axes:
            tried = {site: _on_resharded_axes(w, places) for site, w in tried.items()}
        if is_free:
            tried = {site: replace(w, grad=False) for site, w in tried.items()}
        for _ in range(ROUNDS):
            then = probed.planned(tried)
            if not probed.unasked(then):
                if _sent_by(then) != sent:
                    break
                return _needed(tried, then, probed, sent)
            more, _ = Places(then, probed).all_wanted()
            if not more.keys() - tried.keys():
                break
            tried = {**more, **tried}
    return first


def _needed(
    wanted: Mapping[Site, Wanted], plan: Plan, probed: Probed, sent: Counter[Any]
) -> Suggestion:
    """The constraints that are not redundant, each with the reshards that it asks for."""
    kept = dict(wanted)
    for site in list(kept):
        less = {other: w for other, w in kept.items() if other != site}
        if not less or probed.unasked(plan, probed.nodes_at(site)):
            continue
        then = probed.planned(less)
        if not probed.unasked(then) and _sent_by(then) == sent:
            kept, plan = less, then
    names, without = set[str](), set[str]()
    for site in kept:
        without |= probed.nodes_at(site)
        found = {m.name for m in probed.unasked(plan, without)}
        kept[site] = replace(kept[site], reshards=tuple(sorted(found - names)))
        names |= found
    return Suggestion(plan, tuple(kept.values()), (), is_proven=True)


def _sent_by(plan: Plan) -> Counter[Any]:
    """The collectives of a plan with their counts; a value and its views count as the same."""
    return Counter(
        (n.target.op, n.target.axes, math.prod(n.results[0].shape), n.results[0].dtype, n.phase % 2)
        for n in collectives_of(plan.graph)
    )


def _probe_of(node: fx.Node) -> int | None:
    if node.target is not CONSTRAIN:
        return None
    return pin_from_str(node.args[1]).probe  # type: ignore[arg-type]


def _on_resharded_axes(wanted: Wanted, places: "Places") -> Wanted:
    axes, spec = places.axes_of(wanted.reshards), wanted.pin.spec
    for axis in spec.axes:
        spec = spec if axis in axes else without_axis(spec, axis)
    return replace(wanted, pin=Pin(spec, axes))


class Places:
    """The places where values of a plan, of the trace with constraints or without, can be
    constrained.
    """

    def __init__(self, plan: Plan, probed: Probed):
        self.plan, self.calls = plan, probed.calls
        self.users, self.returned = plan.graph.users, set(plan.graph.outputs)
        self.reshards = probed.unasked(plan)
        self.numbers = self._numbers(probed)
        self.values: dict[Site, list[Value]] = defaultdict(list)
        for value, numbers in self.numbers.items():
            for number in numbers:
                self.values[self.calls.sites[number].site].append(value)

    def _numbers(self, probed: Probed) -> Mapping[Value, list[int]]:
        """Per value the probes that it passes through."""
        found: dict[Value, list[int]] = defaultdict(list)
        parts: dict[int, Value] = {}
        for node in self.plan.graph.nodes:
            if node.kind == "input":
                found[Value(node)] = probed.of_inputs.get(node.name, [])
            elif node.kind != "reshard" and isinstance(line := node.source, Line):
                for index, number in line.probes:
                    for value in self._results(node, index, probed.metas[number].shape):
                        if "." in node.name:
                            parts[number] = value
                        else:
                            found[value].append(number)
        for number, value in parts.items():
            found[value].append(number)
        return found

    def _results(self, node: Node, index: int, shape: Sequence[int]) -> list[Value]:
        """The n-th result of a node, or values of its decomposition that other calls read."""
        if "." not in node.name:
            return [*node.values[index : index + 1]]
        return [
            v for v in node.values if v.meta.shape == tuple(shape) and self._leaves(v, node.source)
        ]

    def _leaves(self, value: Value, line: str) -> bool:
        """Whether a value is read by other calls, or returned."""
        return value in self.returned or any(
            self._leaves(Value(user), line) if user.kind == "reshard" else user.source is not line
            for user, _ in self.users.get(value, ())
        )

    def all_wanted(self) -> tuple[dict[Site, Wanted], tuple[Node, ...]]:
        """A constraint for each place, which asks for reshards, and the reshards without a place.
        The constraint on a value asks for the reshard of its gradient too, if possible.
        """
        sites: dict[Site, list[Node]] = {}
        without = []
        for reshard in self.reshards:
            fit = [s for s in self._candidates(reshard) if self._layout(s) is not None]
            known = [s for s in fit if s in sites and reshard.phase % 2]
            if (site := next(iter([*known, *fit]), None)) is None:
                without.append(reshard)
            else:
                sites.setdefault(site, []).append(reshard)
        return {s: self._wanted(s, reshards) for s, reshards in sites.items()}, tuple(without)

    def axes_of(self, names: Iterable[str]) -> tuple[str, ...]:
        """The mesh axes of the reshards with these names, or of all reshards if there are none."""
        names = set(names)
        nodes = [n for n in collectives_of(self.plan.graph) if not names or n.name in names]
        resharded = {axis for node in nodes for axis in node.target.axes}
        return tuple(axis for axis in self.plan.axes if axis in resharded)

    def _wanted(self, site: Site, reshards: Sequence[Node]) -> Wanted:
        spec = self._layout(site)
        assert spec is not None
        gradients = [v for v in self.values[site] if v.node.phase % 2]
        pending = [v for v in gradients if v.node.pending.get(v.index)]
        users = [user for v in pending for user, _ in self.users.get(v, ())]
        read_before_sum = any(user.kind != "reshard" for user in users)
        grad = not read_before_sum and all(self._used_as(v, site) == spec for v in gradients)
        return Wanted(site, Pin(spec), grad, tuple(m.name for m in reshards))

    def _layout(self, site: Site) -> PartitionSpec | None:
        """The layout in which the values at a place are used; None if it differs between calls."""
        values = self.values[site]
        values = [v for v in values if not v.node.phase % 2] or values
        found = {self._used_as(v, site) for v in values}
        return found.pop() if len(found) == 1 else None

    def _candidates(self, reshard: Node) -> Iterable[Site]:
        """The places where a constraint asks for a reshard, the best first: places of its value, of
        values computed from it element by element, of the result of the call that it is in.
        """
        sites = [site for v in makers(reshard.operands[0]) for site in self._at(v, reshard)]
        sites += self._from_users(reshard)
        call = getattr(reshard.operands[0].node.source, "call", None)
        for site, values in self.values.items() if call is not None else ():
            made = [v.node for v in values if not v.node.phase % 2]
            if any(getattr(node.source, "call", None) == call for node in made):
                sites += [] if isinstance(site, Operand) else [site]
        return [site for site in dict.fromkeys(sites) if site in self.values]

    def _at(self, value: Value, reshard: Node) -> list[Site]:
        """The places of a value, those nearest to a reshard first: a sum is reduced where it is
        computed, a shard gathered where it is used.
        """
        readers = self._readers(Value(reshard))
        probes = [self.calls.sites[number] for number in self.numbers.get(value, ())]
        if reshard.target.src.kind == "S":
            probes.reverse()
        readers.add(None)
        fit = [p for p in probes if _is_result(p) or reshard.phase % 2 or p.call in readers]
        return [p.site for p in sorted(fit, key=lambda p: not _is_result(p))]

    def _readers(self, value: Value) -> set[int | None]:
        """The calls that read a value."""
        found, queue = set[int | None](), [value]
        for at in queue:
            for user, _ in self.users.get(at, ()):
                if isinstance(user.source, Line):
                    found.add(user.source.call)
                if keeps_value(user):
                    queue += user.values
        return found

    def _from_users(self, reshard: Node) -> list[Site]:
        queue, seen, found = [Value(reshard)], {reshard}, list[Site]()
        for value in queue:
            for user, slot in users_in_phase(self.users, value, reshard.phase):
                is_next = keeps_value(user) or passes_on(user, slot)
                if user not in seen and not found and is_next:
                    seen.add(user)
                    found += [site for result in user.values for site in self._at(result, reshard)]
                    queue += user.values
        return found

    def _used_as(self, value: Value, site: Site) -> PartitionSpec:
        """The layout in which a value is used, or in which a call reads it."""
        of_operand = isinstance(site, Operand) and not value.node.phase % 2
        calls = {p.call for p in self.calls.sites if of_operand and p.site == site} - {None}
        spec = spec_of(value)
        queue = [value]
        for at in queue:
            for user, _ in self.users.get(at, ()):
                if user.kind == "reshard" and (not calls or calls & self._readers(Value(user))):
                    if at.node is value.node or at.node.kind == "reshard":
                        return self._used_as(Value(user), site)
                    if user.target.dst.kind == "R":
                        spec = without_axis(spec, user.target.axis)
                elif user.target in VIEWS:
                    queue += user.values
        return spec


def _is_result(probe: Probe) -> bool:
    return not isinstance(probe.site, Operand)
