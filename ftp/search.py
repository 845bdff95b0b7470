"""``search``: specs for parameters, found by the planner's own network with their layouts left open."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ftp.api import shard
from ftp.arguments import argument_names, argument_specs
from ftp.collection import collection_paused
from ftp.cost import DEFAULT, VIEWS, Hardware, is_product
from ftp.eliminate import Infeasible
from ftp.errors import InputError, PlanningError
from ftp.graph import BATCH, PARAMETER, Graph, Node, Value, live, mark_dependencies, merge_common
from ftp.ingest import constraints, decompose, from_fx, prune
from ftp.layout import Layout, R, is_even, nominal
from ftp.lowered import Lowered
from ftp.mesh import AnyMesh, Mesh, resolve, use_mesh
from ftp.network import AxisPlan, NotAlike, Open, Problem, solve
from ftp.placement import placement_of
from ftp.planner import apply, planned_latency, spec_layout
from ftp.reach import Reach, factor_of, layout_of, reach
from ftp.repeats import Folded, fold
from ftp.spec import PartitionSpec
from ftp.trace import grad_and_value, trace
from ftp.tree import flatten, kind_of, leaf_names, leaf_paths, plan

STEPS = 8  # prices of memory tried on the way up, and as many between the last that was too low and the first that was not
LEAST_PRICE = 1e-15  # seconds a byte


def search(
    loss_fn: Callable[..., Any],
    params: Any,
    mesh: AnyMesh | None,
    batch_specs: Any,
    *batch: Any,
    memory: int | None = None,
    hardware: Hardware = DEFAULT,
    data_axes: Sequence[str] | None = None,
) -> "Found":
    """Specs for the parameters of a loss, by least estimated time within ``memory`` bytes a rank.

    The layouts of the parameters are left open in the network that plans programs, one mesh axis after another; parameters whose paths
    differ in numbers alone lie alike, and on axes that do not cut the batch what norms scale stays whole.
    Memory has a price in seconds a byte, raised until the lowered program fits.

    Args:
        params: the parameters, real or meta.
        batch_specs, batch: specs of the batch arguments, as in ``shard``, and the arguments, real or meta. Or in place of the specs the
            batch itself, placed by ``device_put`` (meta tensors will do), which knows its shapes and its specs.
        memory: bytes that ``lowered.memory`` may not exceed; None sets no limit.
        data_axes: as in ``shard``; on these, what is cut is gathered where it is used.

    Returns:
        A ``Found``: ``specs(params)`` are to be given to ``shard``, and ``print`` says what else would cost.

    Raises:
        PlanningError: nothing found fits in ``memory``. InputError: specs alone, without the shapes of a batch.

    >>> import ftp
    >>> params = {"up": torch.empty(1024, 4096, device="meta"), "down": torch.empty(4096, 1024, device="meta")}
    >>> def loss_fn(p, x):
    ...     return torch.relu(x @ p["up"] @ p["down"]).sum()
    >>> found = search(loss_fn, params, ftp.AbstractMesh((4,), ("tp",)), ftp.P(), torch.empty(64, 1024, device="meta"))
    >>> found.patterns
    {'down': P('tp', None), 'up': P(None, 'tp')}

    Source: Everett (1963), Generalized Lagrange multiplier method.
    """
    m = resolve(mesh)
    if not batch:
        batch_specs, batch = _placed_batch(batch_specs, len(argument_names(loss_fn)) - 1)
    abstract = _meta(params), _meta(batch)
    given = argument_specs(batch_specs, batch, argument_names(loss_fn)[1:], "batch_specs")
    on_data = tuple(dict.fromkeys(axis for spec in given for axis in spec.axes)) if data_axes is None else tuple(data_axes)

    def traced(is_folded: bool) -> _Open:
        return _on_primitives(_traced(loss_fn, *abstract, given, m, is_folded), m.axes, on_data)

    net = traced(True)
    pins = [f"{pin} at {node.source}" for node, pin in constraints(net.graph).items()]

    def lowered(patterns: Mapping[str, PartitionSpec]) -> Lowered:
        step = shard(loss_fn, m, plan(abstract[0], dict(patterns)), batch_specs=batch_specs, data_axes=on_data)
        return step.lower(abstract[0], *abstract[1])

    tried: dict[tuple[Any, ...], Found] = {}

    def at(price: float) -> Found:
        nonlocal net
        try:
            patterns, axes = _solve(net.copied(), m.axes, on_data, hardware, price)
        except NotAlike:  # layers that an axis left unlike are searched one by one
            net = traced(False)
            patterns, axes = _solve(net.copied(), m.axes, on_data, hardware, price)
        key = tuple(patterns.items())
        if key not in tried:
            program = lowered(patterns)
            tried[key] = Found(patterns, pins, program, hardware, memory, price, axes, net, m.axes, on_data)
        return replace(tried[key], price=price, _axes=axes, _net=net)  # costs are at the price that they were found at

    def fits(found: Found) -> bool:
        return memory is None or int(found.lowered.memory) <= memory

    found = at(0.0)
    if fits(found):
        return found
    low, high = 0.0, LEAST_PRICE
    while not fits(found := at(high)):
        if high > 1.0:
            least = min(int(f.lowered.memory) for f in tried.values())
            raise PlanningError(
                f"No plan found fits in {memory:,} bytes a rank; the smallest takes {least:,}. Cut the batch over more"
                " ranks, recompute blocks (ftp.remat), or give more ranks."
            )
        low, high = high, high * 30
    for _ in range(STEPS):
        middle = (low * high) ** 0.5 if low else high / 30
        candidate = at(middle)
        if fits(candidate):
            high, found = middle, candidate
        else:
            low = middle
    return found


def _placed_batch(batch: Any, count: int) -> tuple[Any, tuple[Any, ...]]:
    """Specs and arguments of a batch of placed tensors, for a loss that takes ``count`` of them."""
    arguments = batch if count != 1 and isinstance(batch, tuple) else (batch,)
    leaves, treedef = flatten(arguments)
    places = [placement_of(leaf) if isinstance(leaf, Tensor) else None for leaf in leaves]
    wrong = [
        f"{name} is {leaf if isinstance(leaf, PartitionSpec) else kind_of(leaf)}"
        for leaf, place, name in zip(leaves, places, leaf_names(arguments, "batch"), strict=True)
        if place is None and (isinstance(leaf, Tensor | PartitionSpec))
    ]
    if wrong or not any(places):
        raise InputError(
            f"search needs the shapes of a batch beside its specs, and {wrong[0] if wrong else 'there is no tensor'}."
            " Give the arguments after the specs, search(loss_fn, params, mesh, P('dp'), batch), or in their place a batch that knows its"
            " specs: ftp.device_put(batch, mesh, P('dp')), where meta tensors will do."
        )
    return treedef.unflatten([PartitionSpec() if place is None else place.spec for place in places]), arguments


@dataclass(frozen=True)
class Found:
    """A plan that was searched for.

    Attributes:
        patterns: path pattern to spec, as ``ftp.plan`` takes it.
        constraints: the constraints that the program was given; the search adds none.
        lowered: the program under it.
        price: seconds that a byte of parameters was priced with.
    """

    patterns: dict[str, PartitionSpec]
    constraints: list[str]
    lowered: Lowered
    hardware: Hardware
    limit: int | None
    price: float
    _axes: Mapping[str, AxisPlan]
    _net: "_Open"
    _sizes: Mapping[str, int]
    _data_axes: Sequence[str]

    def specs(self, params: Any) -> Any:
        """The spec tree for ``shard``."""
        return plan(params, dict(self.patterns))

    @property
    def cost(self) -> float:
        """Estimated seconds of a step, ``lowered.cost(hardware)``."""
        return float(self.lowered.cost(self.hardware))

    @property
    def memory(self) -> int:
        """Bytes at a rank's peak."""
        return int(self.lowered.memory)

    @property
    def gap(self) -> dict[str, float]:
        """Per axis by how many seconds at most the network has a cheaper plan, given the axes before it.

        Elimination's own gap, and what the bytes still free are worth at the price paid: a plan that holds more could cost so much less.
        """
        free = self.price * max(0, (self.limit or 0) - self.memory) if self.price else 0.0
        return {axis: found.solution.cost - found.solution.bound + free for axis, found in self._axes.items()}

    @cached_property
    def alternatives(self) -> dict[tuple[str, str], dict[str, float]]:
        """Per axis and pattern what the axis' network would cost more, in seconds, with each other layout of it (infinity: no program)."""
        return _alternatives(self)

    def __str__(self) -> str:
        limit = "" if self.limit is None else f" of {self.limit:,}"
        lines = [f"{self.cost:.3g} s a step, {self.memory:,}{limit} bytes a rank"]
        width = max(map(len, self.patterns))
        for pattern, spec in self.patterns.items():
            others = [
                f"{name} over {axis} {seconds:+.2g} s"
                for (axis, p), found in self.alternatives.items()
                if p == pattern
                for name, seconds in found.items()
            ]
            lines.append(f"  {pattern:{width}}  {spec!s:20}  {'; '.join(others)}".rstrip())
        lines += [f"  {c}" for c in self.constraints]
        for axis, seconds in self.gap.items():
            n = len(self._axes)
            given = "" if n == 1 else ", the axes before it as they are"
            lines.append(f"  over {axis}: at most {seconds:.2g} s above the network's optimum{given}")
        return "\n".join(lines)


def _alternatives(found: Found) -> dict[tuple[str, str], dict[str, float]]:
    net, axes = found._net, list(found._axes)
    dims = {axis: {p: _cut_dim(spec, axis) for p, spec in found.patterns.items()} for axis in axes}
    result: dict[tuple[str, str], dict[str, float]] = {}
    for at, axis in enumerate(axes):
        before = {a: dims[a] for a in axes[:at]}
        for pattern in found.patterns:
            for dim in (None, *_open_dims(net, pattern, found._sizes[axis], axis in found._data_axes)):
                if dim == dims[axis][pattern]:
                    continue
                forced = {**before, axis: {pattern: dim}}
                try:
                    _, solved = _solve(
                        net.copied(), {a: found._sizes[a] for a in axes[: at + 1]}, found._data_axes, found.hardware, found.price, forced
                    )
                    kept = solved[axis].kept_rules or not found._axes[axis].kept_rules
                    seconds = solved[axis].solution.cost - found._axes[axis].solution.cost if kept else math.inf
                except (Infeasible, NotAlike):
                    seconds = math.inf
                result.setdefault((axis, pattern), {})["whole" if dim is None else f"dim {dim}"] = seconds
    return result


def _cut_dim(spec: PartitionSpec, axis: str) -> int | None:
    return next((d for d in range(len(spec)) if any(cut.axis == axis for cut in spec.cuts(d))), None)


@dataclass
class _Open:
    """A traced loss and its gradient, with parameters that may lie in several ways; ``mirrors`` are the outputs that lie as they do."""

    graph: Graph
    params: list[Node]
    patterns: dict[Node, str]
    batch: dict[Node, PartitionSpec]
    mirrors: dict[int, Node]
    folded: Folded | None

    def copied(self) -> "_Open":
        """With nodes of its own, for a plan to be made on."""
        copies: dict[Node, Node] = {}
        for node in self.graph.nodes:
            copy = copies[node] = replace(node, sizes=dict(node.sizes), cuts=list(node.cuts), pending=dict(node.pending))
            copy.replace_operands([Value(copies[v.node], v.index) for v in node.operands])
        return _Open(
            Graph(list(copies.values()), [Value(copies[v.node], v.index) for v in self.graph.outputs]),
            [copies[n] for n in self.params],
            {copies[n]: p for n, p in self.patterns.items()},
            {copies[n]: s for n, s in self.batch.items()},
            {i: copies[n] for i, n in self.mirrors.items()},
            self.folded and replace(self.folded, labels={copies[n]: r for n, r in self.folded.labels.items()}),
        )


def _traced(loss_fn: Any, params: Any, batch: Any, batch_specs: Sequence[PartitionSpec], mesh: Mesh, is_folded: bool) -> _Open:
    leaves, tree = flatten((params, *batch))
    names = [*leaf_names(params, "params"), *leaf_names(batch, "batch")]
    paths = leaf_paths(params)
    tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    with use_mesh(mesh):
        traced = trace(grad_and_value(loss_fn), leaves, tree, mesh.device_type, names=names)
    graph = from_fx(traced.gm, [names[i] for i in tensors])
    inputs = dict(zip(tensors, graph.inputs, strict=False))
    for i, node in inputs.items():
        node.depends = PARAMETER if i < len(paths) else BATCH
    of_params = [inputs[i] for i in range(len(paths))]
    mirrors = dict(zip(traced.out_leaves[1:], of_params, strict=True))
    graph = merge_common(prune(live(graph)))
    mark_dependencies(graph)
    specs = {inputs[i]: spec for i, spec in zip(range(len(paths), len(leaves)), batch_specs, strict=True) if i in inputs}
    patterns = {node: _pattern(path) for node, path in zip(of_params, paths, strict=True)}
    net = _Open(graph, of_params, patterns, specs, mirrors, None)
    returned = {out: patterns[node] for out, node in mirrors.items()}
    folded = fold(graph, lambda node: (specs.get(node), patterns.get(node)), [returned.get(i) for i in range(len(graph.outputs))])
    if folded is None or not is_folded:
        return net
    few = {node: copy for copy, node in folded.origin.items() if node in specs or node in patterns}
    alike = {patterns[node]: copy for node, copy in few.items() if node in patterns}
    return _Open(
        folded.graph,
        [few[n] for n in of_params if n in few],
        {few[n]: p for n, p in patterns.items() if n in few},
        {few[n]: s for n, s in specs.items()},
        # The gradient of a parameter may count to the layer beside it: any parameter that lies alike will do.
        {at: alike[patterns[mirrors[i]]] for at, i in enumerate(folded.kept) if i in mirrors},
        folded,
    )


def _pattern(path: Sequence[Any]) -> str:
    """A parameter's path with ``*`` for what is a number."""
    return ".".join("*" if part.isdigit() else part for element in path for part in str(element).split("."))


def _meta(tree: Any) -> Any:
    leaves, treedef = flatten(tree)
    return treedef.unflatten([torch.empty(x.shape, dtype=x.dtype, device="meta") if isinstance(x, Tensor) else x for x in leaves])


def _open_dims(net: _Open, pattern: str, n: int, is_data: bool) -> list[int]:
    """The dims that an axis may cut of the parameters of a pattern: those that divide, by heads too; of a lone vector none.

    On a data axis shards are gathered whole before they are used, and the first dim will do.
    """
    members = [node for node in net.params if net.patterns[node] == pattern]
    ndim = members[0].results[0].ndim
    dims = [d for d in range(ndim) if all(m.results[0].ndim == ndim and is_even(m.shape()[d], n) for m in members)]
    if is_data:
        return dims[:1]
    if _is_scale(net, members[0]):
        return []
    users = net.graph.users()
    return [d for d in dims if not any(_is_split_apart(Value(m), Layout("S", d), n, users) for m in members)]


def _is_split_apart(
    value: Value, layout: Layout, n: int, users: Mapping[Value, Sequence[tuple[Node, int]]], is_product_done: bool = False
) -> bool:
    """Whether a parameter's product, cut as the parameter, runs into a view that has no such cut: of fewer heads than ranks."""
    for user, slot in users.get(value, ()):
        is_next = not is_product_done and is_product(user.target)
        if not is_next and user.target not in VIEWS:
            continue
        cut = factor_of(user.rule.operands[slot], user.sizes, layout, n)
        if cut is None:
            return True
        there = layout_of(user.rule.results[0], user.sizes, cut, n)
        if there.kind == "S" and _is_split_apart(Value(user), there, n, users, is_product_done or is_next):
            return True
    return False


def _is_scale(net: _Open, node: Node) -> bool:
    """Whether a parameter is a vector that goes with no matrix, as that of a norm."""
    module = net.patterns[node].rpartition(".")[0]
    return node.results[0].ndim == 1 and not any(
        other.results[0].ndim > 1 and net.patterns[other].rpartition(".")[0] == module for other in net.params
    )


def _reaches(
    net: _Open, axis: str, folded: Sequence[str], axes: Mapping[str, int], is_data: bool, forced: Mapping[str, int | None]
) -> tuple[Reach, Reach, dict[Node, Layout]]:
    """What an axis may cut, what the batch alone reaches, and the layouts that are fixed."""
    n = axes[axis]
    pinned = {node: spec_layout(spec, node.shape(), axis, axes, folded) or R for node, spec in net.batch.items()}
    for node in net.params:
        if net.patterns[node] in forced:
            dim = forced[net.patterns[node]]
            pinned[node] = R if dim is None else Layout("S", dim)
    for node, pin in constraints(net.graph).items():
        if pin.holds(axis):
            pinned[node] = spec_layout(pin.spec, node.shape(), axis, axes, folded) or R
    pinned |= {node: R for node in net.graph.inputs if node not in pinned and node not in net.patterns}
    constrained = [(v, pinned[node]) for node in pinned if node.kind == "constrain" for v in (Value(node), node.operands[0])]
    of_batch = [(Value(node), pinned[node]) for node in net.batch] + constrained
    fixed = [(Value(node), layout) for node, layout in pinned.items()]
    opened = [
        (Value(node), Layout("S", d)) for node in net.params if node not in pinned for d in _open_dims(net, net.patterns[node], n, is_data)
    ]
    found = reach(net.graph, n, fixed + constrained + opened, pinned)
    if not is_data:
        # What norms scale, the features between blocks, stays whole: to cut it is a plan of another kind, dearer in collectives.
        scales = [node for node in net.params if _is_scale(net, node) and node not in pinned]
        whole = reach(net.graph, n, [(Value(node), Layout("S", 0)) for node in scales], pinned).cuts
        found.cuts = {node: [cut for cut in cuts if cut not in whole.get(node, ())] for node, cuts in found.cuts.items()}
    return found, reach(net.graph, n, of_batch, pinned) if is_data else Reach(), pinned


def _solve(
    net: _Open,
    axes: Mapping[str, int],
    data_axes: Sequence[str],
    hardware: Hardware,
    price: float,
    forced: Mapping[str, Mapping[str, int | None]] | None = None,
) -> tuple[dict[str, PartitionSpec], dict[str, AxisPlan]]:
    """Per pattern its spec, and what each axis' network found; ``net`` is used up.

    Args:
        price: seconds for each byte of a parameter, and as much for its gradient's.
        forced: per axis the dims, or None, of patterns that are not open there.
    """
    entries: dict[str, list[tuple[str, ...]]] = {net.patterns[n]: [()] * n.results[0].ndim for n in net.params}
    found: dict[str, AxisPlan] = {}
    with collection_paused():
        for at, (axis, n) in enumerate(axes.items()):
            if n == 1:
                continue
            is_data = axis in data_axes
            given, from_batch, pinned = _reaches(net, axis, list(axes)[:at], axes, is_data, (forced or {}).get(axis, {}))
            first: dict[str, Node] = {}
            groups = {node: first.setdefault(net.patterns[node], node) for node in net.params if node not in pinned}
            outputs: list[Layout | None] = [R] * len(net.graph.outputs)
            for i, node in net.mirrors.items():
                outputs[i] = pinned.get(node)
            ties = net.folded.ties(net.graph) if net.folded else None
            if net.folded and ties is None:
                raise NotAlike
            link = hardware.link_of((axis,))
            priced = replace(hardware, link=replace(link, latency=planned_latency(net.graph, replace(hardware, link=link), ties)))
            held = {node: 2 * price * math.prod(map(nominal, node.shape())) * node.results[0].dtype.itemsize for node in net.params}
            dims = {node: _open_dims(net, net.patterns[node], n, is_data) for node in groups}
            opened = Open(groups, {i: node for i, node in net.mirrors.items() if node in groups}, held, dims)
            chosen = found[axis] = solve(Problem(net.graph, axis, n, priced, given, pinned, outputs, is_data, from_batch, ties, opened))
            of = {node: chosen.strategies[node].results[0] for node in net.params}
            for node in {net.patterns[node]: node for node in net.params}.values():
                if of[node].kind == "S":
                    entries[net.patterns[node]][of[node].dim] += (axis,)
            net.graph = apply(net.graph, chosen, [of[net.mirrors[i]] if i in net.mirrors else R for i in range(len(outputs))])
    return {pattern: PartitionSpec(*[e or None for e in dims]) for pattern, dims in entries.items()}, found


def _on_primitives(net: _Open, axes: Mapping[str, int], data_axes: Sequence[str]) -> _Open:
    while True:
        blocked: dict[Node, None] = {}
        for at, axis in enumerate(axes):
            if axes[axis] > 1:
                found, from_batch, _ = _reaches(net, axis, list(axes)[:at], axes, axis in data_axes, {})
                reached = from_batch if axis in data_axes else found
                blocked.update(dict.fromkeys(node for node in reached.blocked if node.kind == "op" and node.rule.decompose))
        smaller = decompose(net.graph, blocked) if blocked else net.graph
        if smaller is net.graph:
            return net
        net = replace(net, graph=smaller)
