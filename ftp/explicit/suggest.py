"""Find constraints that ask for the collectives that nobody asked for. They are tried on a trace
with probes: a constraint in place of a probe is one that the user can write there.
"""

import math
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import fx

from ftp.explicit.asked import collectives_of, passes_on, unasked
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
    without: tuple[Node, ...] = ()
    is_proven: bool = False


@dataclass(frozen=True)
class Probed:
    """A trace with probes: the graph, the probes' places (in ``calls``), a function that plans such
    a graph, the given spec of each output, and the arguments' names.
    """

    gm: fx.GraphModule
    calls: TorchCalls
    plans: Plans
    out_specs: Sequence[PartitionSpec | None]
    names: Sequence[str]

    def planned(self, wanted: Mapping[Site, Wanted]) -> Plan:
        """The plan with constraints in place of the probes at their sites."""
        return self.plans(with_constraints(self.gm, self.calls, wanted))

    def unasked(self, plan: Plan) -> list[Node]:
        return unasked(plan, self.out_specs)

    @cached_property
    def of_inputs(self) -> dict[str, list[int]]:
        """Per argument, the probes of its value."""
        inputs = [n for n in self.gm.graph.nodes if n.op == "placeholder"]
        named = dict(zip(inputs, self.names, strict=False))
        found: dict[str, list[int]] = {}
        for node in self.gm.graph.nodes:
            if (number := _probe_of(node)) is not None and (base := _base(node)[0]) in named:
                found.setdefault(named[base], []).append(number)
        return found

    @cached_property
    def metas(self) -> dict[int, Any]:
        """Per probe, a fake tensor of its value's shape and dtype."""
        return {
            number: node.meta["val"]
            for node in self.gm.graph.nodes
            if (number := _probe_of(node)) is not None
        }

    def nodes_at(self, site: Site) -> set[str]:
        """The names of a place's probes in the graph, forward and backward."""
        return {
            node.name
            for node in self.gm.graph.nodes
            if (number := _probe_of(node)) is not None and self.calls.sites[number].site == site
        }

    @property
    def ndims(self) -> dict[Site, int]:
        """Per place the number of dims of its value."""
        return {self.calls.sites[number].site: x.ndim for number, x in self.metas.items()}


def tagged(gm: fx.GraphModule) -> fx.GraphModule:
    """The trace with the probes that results pass through recorded in the nodes' lines."""
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
    """The constraints that ask for the unasked collectives of ``plan``, of the plain trace."""
    sent = sent_by(plan)
    places = Places(probed.planned({}), probed)
    found, without = places.all_wanted()
    first = Suggestion(places.plan, tuple(found.values()), without)
    for vary in (_as_is, _free, _on_resharded_axes, _free_on_resharded_axes):
        tried = {site: vary(wanted, places) for site, wanted in found.items()}
        for _ in range(ROUNDS):
            then = probed.planned(tried)
            if not probed.unasked(then):
                if sent_by(then) != sent:
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
        if not less or unasked(plan, probed.out_specs, probed.nodes_at(site)):
            continue
        then = probed.planned(less)
        if not probed.unasked(then) and sent_by(then) == sent:
            kept, plan = less, then
    names, without = set[str](), set[str]()
    for site in kept:
        without |= probed.nodes_at(site)
        found = {m.name for m in unasked(plan, probed.out_specs, without)}
        kept[site] = replace(kept[site], reshards=tuple(sorted(found - names)))
        names |= found
    return Suggestion(plan, tuple(kept.values()), (), True)


def with_constraints(
    gm: fx.GraphModule, calls: TorchCalls, wanted: Mapping[Site, Wanted]
) -> fx.GraphModule:
    """A copy of the trace with constraints in place of the probes at their sites, and without the
    other probes.
    """
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    for node in list(graph.nodes):
        if (number := _probe_of(node)) is None:
            continue
        given = wanted.get(calls.sites[number].site)
        if given is None:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        else:
            is_gradient = node.meta.get("phase", 0) % 2
            entries = pin_to_str(given.pin) if given.grad or not is_gradient else MARK
            node.args = (node.args[0], entries)
    return fx.GraphModule({}, graph)


def sent_by(plan: Plan) -> Counter[Any]:
    """The collectives of a plan with their counts; a value and its views count as the same."""
    return Counter(
        (n.target.op, n.target.axes, math.prod(n.results[0].shape), n.results[0].dtype, n.phase % 2)
        for n in collectives_of(plan.graph)
    )


def _probe_of(node: fx.Node) -> int | None:
    if node.target is not CONSTRAIN:
        return None
    return pin_from_str(node.args[1]).probe  # type: ignore[arg-type]


def _as_is(wanted: Wanted, places: "Places") -> Wanted:
    return wanted


def _free(wanted: Wanted, places: "Places") -> Wanted:
    return replace(wanted, grad=False)


def _on_resharded_axes(wanted: Wanted, places: "Places") -> Wanted:
    axes, spec = places.axes_of(wanted.reshards), wanted.pin.spec
    for axis in spec.axes:
        spec = spec if axis in axes else without_axis(spec, axis)
    return replace(wanted, pin=Pin(spec, axes))


def _free_on_resharded_axes(wanted: Wanted, places: "Places") -> Wanted:
    return replace(_on_resharded_axes(wanted, places), grad=False)


class Places:
    """The places where values of a plan can be constrained; the plan is of the trace with other
    constraints, or none.
    """

    def __init__(self, plan: Plan, probed: Probed):
        self.plan, self.calls = plan, probed.calls
        self.users, self.returned = plan.graph.users(), set(plan.graph.outputs)
        self.reshards = probed.unasked(plan)
        self.numbers = self._numbers(probed)
        self.values: dict[Site, list[Value]] = {}
        for value, numbers in self.numbers.items():
            for number in numbers:
                self.values.setdefault(self.calls.sites[number].site, []).append(value)

    def _numbers(self, probed: Probed) -> dict[Value, list[int]]:
        """Per value the probes that it passes through."""
        found: dict[Value, list[int]] = {}
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
                            found.setdefault(value, []).append(number)
        for number, value in parts.items():
            found.setdefault(value, []).append(number)
        return found

    def _results(self, node: Node, index: int, shape: Sequence[int]) -> list[Value]:
        """The n-th result of a node, or values of its decomposition that other calls read."""
        values = [Value(node, i) for i in range(len(node.results))]
        if "." not in node.name:
            return values[index : index + 1]
        return [v for v in values if v.meta.shape == tuple(shape) and self._leaves(v, node.source)]

    def _leaves(self, value: Value, line: str) -> bool:
        """Whether a value is read by other calls, or returned."""
        return value in self.returned or any(
            self._leaves(Value(user), line) if user.kind == "reshard" else user.source is not line
            for user, _ in self.users.get(value, ())
        )

    def all_wanted(self) -> tuple[dict[Site, Wanted], tuple[Node, ...]]:
        """A constraint per place that asks for unasked reshards, and the reshards without a place.
        A gradient's reshard is asked for where the value is constrained already, if possible.
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
        grad = all(self._used_as(v, site) == spec and not self._stays_pending(v) for v in gradients)
        return Wanted(site, Pin(spec), grad, tuple(m.name for m in reshards))

    def _stays_pending(self, value: Value) -> bool:
        """Whether a gradient is read before it is summed."""
        readers = [user for user, _ in self.users.get(value, ())]
        return bool(value.node.pending.get(value.index)) and any(
            u.kind != "reshard" for u in readers
        )

    def _layout(self, site: Site) -> PartitionSpec | None:
        """The layout in which the values at a place are used; None if it differs between calls."""
        values = self.values[site]
        values = [v for v in values if not v.node.phase % 2] or values
        found = {self._used_as(v, site) for v in values}
        return found.pop() if len(found) == 1 else None

    def _candidates(self, reshard: Node) -> Iterable[Site]:
        """The places at which a constraint asks for a reshard, the best first: of its value, of
        values computed from it element by element, of the result of the call that it is in.
        """
        call = getattr(reshard.operands[0].node.source, "call", None)
        within = [
            site
            for site, values in self.values.items()
            if not isinstance(site, Operand)
            and any(
                getattr(v.node.source, "call", None) == call and not v.node.phase % 2
                for v in values
            )
        ]
        sites = [
            *self._from_makers(reshard),
            *self._from_users(reshard),
            *(within if call is not None else ()),
        ]
        return [site for site in dict.fromkeys(sites) if site in self.values]

    def _at(self, value: Value, reshard: Node) -> list[Site]:
        """The places of a value, those nearest to a reshard first: sums are reduced where they are
        made, shards gathered where they are used.
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
                if user.kind in ("reshard", "constrain") or user.target in VIEWS:
                    queue += [Value(user, i) for i in range(len(user.results))]
        return found

    def _from_makers(self, reshard: Node) -> list[Site]:
        value, found = reshard.operands[0], list[Site]()
        while True:
            found += self._at(value, reshard)
            if value.node.kind not in ("reshard", "constrain") and value.node.target not in VIEWS:
                return found
            value = value.node.operands[0]

    def _from_users(self, reshard: Node) -> list[Site]:
        queue, seen, found = [Value(reshard)], {reshard}, list[Site]()
        for value in queue:
            users = self.users.get(value, ())
            for user, slot in [u for u in users if u[0].phase == reshard.phase] or users:
                is_same = user.kind in ("reshard", "constrain") or user.target in VIEWS
                if user not in seen and not found and (is_same or passes_on(user, slot)):
                    seen.add(user)
                    results = [Value(user, i) for i in range(len(user.results))]
                    found += [site for result in results for site in self._at(result, reshard)]
                    queue += results
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
                    queue += [Value(user, i) for i in range(len(user.results))]
        return spec


def _is_result(probe: Probe) -> bool:
    return not isinstance(probe.site, Operand)
