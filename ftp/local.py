"""``local``: one rank's code inside a global program, as one differentiable op on global values.

The code is traced on local shapes and becomes a ``Program``. The op carries it through the surrounding trace; the partitioner puts its
nodes into each rank's graph. Its gradient is a program too, of the same inputs, of what the forward one left (so that no collective runs
twice) and of the results' gradients.
"""

import hashlib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial, wraps
from itertools import accumulate
from operator import getitem
from types import FunctionType
from typing import Any

import optree
import torch
from torch import Tensor, fx
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import _disable_current_modes

from ftp.arguments import argument_names, argument_specs
from ftp.axis import OPS, Inside, entered, is_inside
from ftp.errors import SpecError, TraceError, join_failures
from ftp.mesh import AnyMesh, resolve
from ftp.notation import Dims
from ftp.refusals import SURROUNDING
from ftp.registry import BoundRule
from ftp.source import user_line
from ftp.spec import PartitionSpec, Units
from ftp.trace import Traced, trace
from ftp.tree import broadcast_specs, check_specs, flatten, leaf_names
from ftp.varying import Axes, cause, infer, without_known_sums

aten = torch.ops.aten
Shape = tuple[int, ...]


def local(
    fn: Callable[..., Any],
    mesh: AnyMesh | None = None,
    in_specs: Any = PartitionSpec(),
    out_specs: Any = PartitionSpec(),
    *,
    check: bool = True,
) -> Callable[..., Any]:
    """``fn`` as every rank runs it on its own parts, as a function of whole tensors.

    Use it in a function given to ``ftp.shard``, ``ftp.spmd`` or ``ftp.lower``, also where that is differentiated. Called elsewhere it
    means the same function of whole tensors, computed on simulated ranks. Inside ``fn`` tensors are a rank's parts, and ``ftp.axis`` has
    collectives by axis name. A tensor that ``fn`` captures is a constant, whole on every rank and without a gradient. ``fn`` is traced
    once for each distinct abstract input.

    Args:
        mesh: default that of the surrounding step or ``ftp.use_mesh``; within a step it must have the same axes.
        in_specs: prefix tree of the tuple of arguments; one ``P`` covers all. The ranks must divide every dim that they cut.
        out_specs: prefix tree of the result. A result's whole dim is its local one times the ranks that the spec names for it; along
            axes that the spec does not name all ranks must hold the same, which is checked.
        check: whether the claims of ``out_specs`` must be provable: from cut arguments and ``axis_index`` on, values vary from rank to
            rank until an ``all_reduce`` or ``all_gather``. Without it they are believed.

    Raises:
        SpecError: specs that do not fit the tensors, and claims that cannot be shown. TraceError: what ``fn`` does cannot be one graph;
            it uses a tensor of the surrounding function that it was not given; a second derivative.

    >>> import ftp
    >>> mesh = ftp.simulated_mesh((2,), ("tp",))
    >>> mlp = ftp.local(lambda x, up, down: ftp.axis.all_reduce((x @ up).relu() @ down, "tp"), mesh,
    ...                 (ftp.P(), ftp.P(None, "tp"), ftp.P("tp")), ftp.P())
    >>> mlp(torch.ones(1, 3), torch.ones(3, 4), torch.ones(4, 2))
    tensor([[12., 12.]])

    Source: JAX, ``jax.shard_map``.
    """
    known: dict[Any, _Local] = {}

    @wraps(fn)
    def call(*args: Any) -> Any:
        if is_inside():
            raise TraceError(f"{_at()}ftp.local is called in one rank's code: all mesh axes are spoken for. Call the function itself.")
        axes = resolve(mesh).axes
        leaves, tree = flatten(args)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if not tensors:
            raise SpecError(f"{_at()}ftp.local takes at least one tensor, whose parts are what a rank computes on.")
        key = (tree, tuple(axes.items()), tensors[0].device.type, *((x.shape, x.dtype) if isinstance(x, Tensor) else x for x in leaves))
        if key not in known:
            known[key] = _prepare(fn, axes, in_specs, out_specs, check, args)
        return known[key](tensors)

    return call


# Programs.


@dataclass(frozen=True)
class Port:
    """An operand or a result of a program.

    Attributes:
        shape: local.
        pending: axes over which the ranks' values are terms of a sum.
    """

    spec: PartitionSpec
    shape: Shape
    dtype: torch.dtype
    pending: tuple[str, ...] = ()

    def global_shape(self, axes: Mapping[str, int]) -> Shape:
        return tuple(s * math.prod(axes[c.axis] for c in self.spec.cuts(d)) for d, s in enumerate(self.shape))


@dataclass(frozen=True, eq=False)
class Program:
    """One rank's code.

    Attributes:
        gm: takes the operands' parts, then the rank's position on each axis as 0-d int64 tensors.
        key: tells programs apart, the same on all ranks.
    """

    gm: fx.GraphModule
    axes: Mapping[str, int]
    operands: tuple[Port, ...]
    results: tuple[Port, ...]

    @cached_property
    def key(self) -> str:
        lines = [f"{node.format_node()} {node.meta.get('source', '')}" for node in self.gm.graph.nodes]
        text = "\n".join([*lines, repr((dict(self.axes), self.operands, self.results))])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @cached_property
    def rule(self) -> BoundRule:
        """One factor for each mesh axis, of its size, in every dim that it cuts; what is left of a dim stays whole."""
        sizes = {factor(axis): n for axis, n in self.axes.items()}

        def dims(port: Port, name: str) -> Dims:
            found: list[tuple[str, ...]] = []
            for d, size in enumerate(port.shape):
                cuts, rest = port.spec.cuts(d), f"{name}{d}"
                pack = _packs(cuts)
                sizes[rest] = size // pack
                before = ()
                if pack > 1:
                    sizes[f"{rest}p"], before = pack, (f"{rest}p",)
                found.append((*before, *(factor(c.axis) for c in cuts), rest))
            return tuple(found)

        operands = tuple(dims(p, f"x{i}_") for i, p in enumerate(self.operands))
        results = tuple(dims(p, f"y{i}_") for i, p in enumerate(self.results))
        whole = frozenset(f for f in sizes if f not in {factor(a) for a in self.axes})
        pending = tuple({factor(a): "sum" for a in p.pending} for p in self.results)
        return BoundRule(operands, results, whole, pending, (), sizes, None, False)

    def giving(self, results: Sequence[int]) -> tuple["Program", list[int]]:
        """The program of some of the results, and which operands it takes."""
        output = next(reversed(self.gm.graph.nodes))
        wanted = [output.args[0][i] for i in results]  # type: ignore[index]
        needed = _needed(wanted)
        placeholders = [n for n in self.gm.graph.nodes if n.op == "placeholder"]
        taken = [i for i in range(len(self.operands)) if placeholders[i] in needed] or [0]
        inputs = [*(placeholders[i] for i in taken), *placeholders[len(self.operands) :]]
        graph = fx.Graph()
        env = {node: _copied(graph, node) for node in inputs}
        for node in self.gm.graph.nodes:
            if node in needed and node.op == "call_function":
                env[node] = graph.node_copy(node, env.__getitem__)
        graph.output(tuple(env[n] for n in wanted))
        gm = fx.GraphModule({}, graph)
        return _known(gm, self.axes, [self.operands[i] for i in taken], [self.results[i] for i in results]), taken

    def __str__(self) -> str:
        return f"local[{self.key}]"


def _packs(cuts: Sequence[Units]) -> int:
    """How many equal packs along a dim a lone cut goes through."""
    (pack,) = {c.pack for c in cuts} or {1}
    assert isinstance(pack, int)
    return pack


def factor(axis: str) -> str:
    """The factor that a mesh axis cuts in a program's rule."""
    return f"@{axis}"


_programs: dict[str, Program] = {}


def program_of(key: str) -> Program:
    return _programs[key]


def _known(gm: fx.GraphModule, axes: Mapping[str, int], operands: Sequence[Port], results: Sequence[Port]) -> Program:
    """The one program of this content: tracing the same code again does not make another."""
    made = Program(gm, axes, tuple(operands), tuple(results))
    return _programs.setdefault(made.key, made)


# From a function to a program.


@dataclass
class _Local:
    """A function prepared for one kind of arguments: its program, and how its results are made of the program's."""

    fn: Callable[..., Any]
    leaves: list[Any]  # local tensors on meta, and static values
    tree: optree.PyTreeSpec
    names: list[str]
    device_type: str
    program: Program
    traced: Traced
    _pair: "_Pair | None" = field(default=None, init=False)

    def __call__(self, tensors: Sequence[Tensor]) -> Any:
        if _may_be_differentiated(tensors) and self._moving and self._smooth:
            self._pair = self._pair or self._differentiate()
            outputs = _Apply.apply(self._pair, *tensors, *self._pair.constants)
        else:
            outputs = OPS.local.default([*tensors, *self.traced.constants], self.program.key)
        leaves = [leaf if static else outputs[leaf] for leaf, static in zip(self.traced.out_leaves, self.traced.is_static, strict=True)]
        return self.traced.out_tree.unflatten(leaves)

    @cached_property
    def _moving(self) -> list[int]:
        """The leaves that have a gradient."""
        return [i for i, leaf in enumerate(self.leaves) if isinstance(leaf, Tensor) and _has_gradient(leaf.dtype)]

    @cached_property
    def _smooth(self) -> list[int]:
        """The results that have one."""
        return [i for i, port in enumerate(self.program.results) if _has_gradient(port.dtype)]

    def _differentiate(self) -> "_Pair":
        """The program that also leaves what its gradient needs, and the program of the gradient."""
        program, axes, moving, smooth = self.program, self.program.axes, self._moving, self._smooth

        def joint(leaves: list[Any], index: list[Tensor], cotangents: list[Tensor]) -> Any:
            def primal(*values: Tensor) -> Any:
                filled = list(leaves)
                for i, value in zip(moving, values, strict=True):
                    filled[i] = value
                outputs = [leaf for leaf in flatten(_run(self.fn, self.tree, axes, filled, index))[0] if isinstance(leaf, Tensor)]
                return [outputs[i] for i in smooth], outputs

            _, pull, primals = torch.func.vjp(primal, *(leaves[i] for i in moving), has_aux=True)  # pyright: ignore[reportAssignmentType]
            # Every rank's gradient is a term of a sum: what all ranks hold comes from one of them.
            terms = list(cotangents)
            for i, result in enumerate(smooth):
                for axis in axes:
                    if axis not in program.results[result].spec.axes:
                        terms[i] = OPS.contribute.default(terms[i], axis)
            return primals, pull(terms)

        cotangents = [_meta(program.results[i].shape, program.results[i].dtype) for i in smooth]
        traced = _trace(joint, (self.leaves, _index(axes), cotangents), self.device_type, self.names)
        at = [i for i, leaf in enumerate(self.leaves) if isinstance(leaf, Tensor)]
        return _split(program, len(at), traced, [at.index(i) for i in moving], smooth)


def _run(fn: Callable[..., Any], tree: optree.PyTreeSpec, axes: Mapping[str, int], leaves: Sequence[Any], index: Sequence[Tensor]) -> Any:
    with entered(Inside(axes, dict(zip(axes, index, strict=True)))):
        return fn(*tree.unflatten(leaves))


def _prepare(fn: Callable[..., Any], axes: dict[str, int], in_specs: Any, out_specs: Any, check: bool, args: tuple[Any, ...]) -> _Local:
    _check_captured(fn)
    roots = argument_names(fn)
    roots = [roots[i] if i < len(roots) else f"args[{i}]" for i in range(len(args))]
    leaves, tree = flatten(args)
    names = [name for arg, root in zip(args, roots, strict=True) for name in leaf_names(arg, root)]
    specs = argument_specs(in_specs, args, roots, "in_specs")
    check_specs(specs, leaves, names, axes)
    if failures := [f for leaf, spec, name in zip(leaves, specs, names, strict=True) for f in _uneven(leaf, spec, axes, name)]:
        raise SpecError(_at() + join_failures(failures))
    parts = [_part(leaf, spec, axes) if isinstance(leaf, Tensor) else leaf for leaf, spec in zip(leaves, specs, strict=True)]
    device_type = next(leaf.device.type for leaf in leaves if isinstance(leaf, Tensor))

    traced = _trace(lambda given, index: _run(fn, tree, axes, given, index), (parts, _index(axes)), device_type, names)
    at = [i for i, leaf in enumerate(parts) if isinstance(leaf, Tensor)]
    operands = [Port(specs[i], tuple(parts[i].shape), parts[i].dtype) for i in at]
    operands += _constant_ports(traced)
    results = _results(traced, out_specs, axes)
    placeholders = [n for n in traced.gm.graph.nodes if n.op == "placeholder"]
    n = len(at)
    inputs = [*placeholders[:n], *placeholders[n + len(axes) :], *placeholders[n : n + len(axes)]]
    _reorder(traced.gm.graph, inputs)
    called = {node: _origin(names[i], specs[i]) for node, i in zip(inputs, at, strict=False)}
    called.update({node: f"ftp.axis.axis_index({axis!r})" for node, axis in zip(inputs[-len(axes) :], axes, strict=True)})
    types = infer(traced.gm.graph, [*(frozenset(p.spec.axes) for p in operands), *(frozenset({a}) for a in axes)])
    if check:
        _check_claims(traced, results, types, called)
    program = _known(traced.gm, axes, operands, results)
    return _Local(fn, parts, tree, names, device_type, program, traced)


def _trace(fn: Callable[..., Any], args: Any, device_type: str, names: Sequence[str]) -> Traced:
    leaves, tree = flatten(args)
    names = [*names, *(f"input {i}" for i in range(len(names), len(leaves)))]
    # The surrounding trace and its transforms know nothing of one rank's tensors.
    with _disable_current_modes(), temporarily_clear_interpreter_stack():
        return trace(fn, leaves, tree, device_type, names=names)


def _check_captured(fn: Callable[..., Any]) -> None:
    """A tensor that a surrounding transform of torch.func differentiates or maps must be an argument: inside, it is a plain one."""
    seen: set[int] = set()
    waiting: list[tuple[str, Any]] = [("", fn)]
    while waiting:
        name, value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Tensor) and is_functorch_wrapped_tensor(value):
            raise TraceError(f"{_at()}The function given to ftp.local uses {name}, {SURROUNDING}")
        if isinstance(value, partial):
            waiting += [(name, v) for v in (value.func, *value.args, *value.keywords.values())]
        elif isinstance(value, FunctionType):
            waiting += list(inspect.getclosurevars(value).nonlocals.items())
            waiting += [(name, v) for v in value.__defaults__ or ()]
        elif isinstance(value, dict | list | tuple):
            waiting += [(name, v) for v in flatten(value)[0]]


def _constant_ports(traced: Traced) -> list[Port]:
    return [Port(PartitionSpec(), tuple(c.shape), c.dtype) for c in traced.constants]


def _index(axes: Mapping[str, int]) -> list[Tensor]:
    return [_meta((), torch.int64) for _ in axes]


def _meta(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(tuple(shape), dtype=dtype, device="meta")


def _has_gradient(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _uneven(leaf: Any, spec: PartitionSpec, axes: Mapping[str, int], name: str) -> list[str]:
    if not isinstance(leaf, Tensor):
        return []
    failures = []
    for d, size in enumerate(leaf.shape):
        cuts = spec.cuts(d)
        unit = math.lcm(*(c.size * (c.pack if isinstance(c.pack, int) else 1) for c in cuts))
        n = math.prod(axes[c.axis] for c in cuts)
        failures += _packed(spec, d, name)
        if size % (n * unit):
            units = f" in units of {unit}" if unit > 1 else ""
            failures.append(
                f"{name} of shape {tuple(leaf.shape)} has spec {spec}, which cuts dim {d} of size {size} in {n}{units}: the parts are not"
                " equal. In ftp.local they must be: pad the dim, or leave it whole."
            )
    return failures


def _packed(spec: PartitionSpec, dim: int, name: str) -> list[str]:
    cuts = spec.cuts(dim)
    if all(c.pack == 1 for c in cuts) or (len(cuts) == 1 and isinstance(cuts[0].pack, int)):
        return []
    return [f"{name} has spec {spec}; in ftp.local a dim of packs is cut by one axis, and its packs are equal. Split it before."]


def _part(leaf: Tensor, spec: PartitionSpec, axes: Mapping[str, int]) -> Tensor:
    return _meta([s // math.prod(axes[c.axis] for c in spec.cuts(d)) for d, s in enumerate(leaf.shape)], leaf.dtype)


def _results(traced: Traced, out_specs: Any, axes: dict[str, int]) -> list[Port]:
    tree = traced.out_tree.unflatten(traced.out_leaves)
    specs, names = broadcast_specs(out_specs, tree, "the result"), leaf_names(tree, "the result")
    output = next(reversed(traced.gm.graph.nodes))
    vals = [n.meta["val"] for n in output.args[0]]
    leaves = [leaf if static else vals[leaf] for leaf, static in zip(traced.out_leaves, traced.is_static, strict=True)]
    if failures := [f for s, name in zip(specs, names, strict=True) for d in range(len(s)) for f in _packed(s, d, name)]:
        raise SpecError(_at() + join_failures(failures))
    check_specs([_whole_units(s) for s in specs], leaves, names, axes)
    return [
        Port(_of_one(spec), tuple(map(int, leaf.shape)), leaf.dtype)
        for leaf, spec, static in zip(leaves, specs, traced.is_static, strict=True)
        if not static
    ]


def _of_one(spec: PartitionSpec) -> PartitionSpec:
    """Equal parts are cut the same in units and without."""
    return PartitionSpec(
        *(tuple(Units(c.axis, 1, c.pack) if c.pack != 1 else c.axis for c in spec.cuts(d)) or None for d in range(len(spec)))
    )


def _whole_units(spec: PartitionSpec) -> PartitionSpec:
    """The spec as far as it can be held against a local shape."""
    if spec.entries[:1] == (...,):
        return spec
    return PartitionSpec(*(tuple(c.axis for c in spec.cuts(d)) or None for d in range(len(spec))))


def _origin(name: str, spec: PartitionSpec) -> str:
    return f"{name}, which in_specs cut as {spec}"


def _check_claims(traced: Traced, results: Sequence[Port], types: Mapping[fx.Node, Axes], called: Mapping[fx.Node, str]) -> None:
    tree = traced.out_tree.unflatten(traced.out_leaves)
    named = [name for name, static in zip(leaf_names(tree, "the result"), traced.is_static, strict=True) if not static]
    output = next(reversed(traced.gm.graph.nodes))
    failures = []
    for name, port, node in zip(named, results, output.args[0], strict=True):
        for axis in sorted(types[node] - set(port.spec.axes)):
            line, origin = cause(node, axis, types, called)
            cut = _cut_too(port, axis)
            or_cut = f" or cut it by the axis in out_specs, as {cut}," if cut else ""
            at = f", at {line}" if line else ""
            failures.append(
                f"{name} has out spec {port.spec}, which says that all ranks along {axis!r} hold the same, but it varies there: it comes"
                f" from {origin}{at}.\n  Reduce it with ftp.axis.all_reduce(x, {axis!r}),{or_cut} or pass check=False if you know that the"
                " ranks agree."
            )
    if failures:
        raise SpecError(_at() + join_failures(failures))


def _cut_too(port: Port, axis: str) -> PartitionSpec | None:
    """The spec of a result that is cut by ``axis`` too, in its first whole dim."""
    entries = [port.spec[d] if d < len(port.spec) else None for d in range(len(port.shape))]
    if None not in entries:
        return None
    entries[entries.index(None)] = axis
    return PartitionSpec(*entries)


def _at() -> str:
    line = user_line()
    return f"{line}\n  " if line else ""


def _reorder(graph: fx.Graph, placeholders: Sequence[fx.Node]) -> None:
    for node in reversed(placeholders):
        first = next(iter(graph.nodes))
        if node is not first:
            first.prepend(node)


# The gradient.


@dataclass(frozen=True, eq=False)
class _Pair:
    """A program with what it leaves for its gradient, and the gradient.

    Attributes:
        constants: operands of ``forward`` after the function's own.
        given: per operand of ``backward`` what it is: ``("operand", i)``, ``("result", i)`` or ``("cotangent", i)``.
        moving: the operands whose gradients ``backward`` gives.
        smooth: the results that have a cotangent.
    """

    forward: Program
    backward: Program
    constants: tuple[Tensor, ...]
    given: tuple[tuple[str, int], ...]
    moving: tuple[int, ...]
    smooth: tuple[int, ...]


# Cheaper to do again than to keep.
_REPEATED = {
    aten.view.default, aten.reshape.default, aten.t.default, aten.transpose.int, aten.permute.default, aten.expand.default,
    aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.slice.Tensor, aten.select.int, aten.full.default,
    aten.full_like.default, aten.zeros_like.default, aten.ones_like.default, aten.arange.start_step, aten.arange.default,
    getitem,
}  # fmt: skip


def _split(program: Program, n_tensors: int, traced: Traced, moving: Sequence[int], smooth: Sequence[int]) -> _Pair:
    """The trace of results and gradients as the program that gives the results and the one that gives the gradients."""
    axes, graph = program.axes, traced.gm.graph
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    counts = (n_tensors, len(axes), len(smooth), len(traced.constants))
    ends = list(accumulate(counts))
    tensors, index, cotangents, constants = (placeholders[end - count : end] for end, count in zip(ends, counts, strict=True))
    operands = [*tensors, *constants]
    ports = [*program.operands[:n_tensors], *_constant_ports(traced)]
    output = next(reversed(graph.nodes))
    n = len(program.results)

    def typed() -> dict[fx.Node, Axes]:
        known = {node: frozenset(port.spec.axes) for node, port in zip(operands, ports, strict=True)}
        known |= {node: frozenset({axis}) for node, axis in zip(index, axes, strict=True)}
        known |= {node: frozenset(program.results[i].spec.axes) for node, i in zip(cotangents, smooth, strict=True)}
        return infer(graph, [known[node] for node in placeholders])

    held: dict[int, set[str]] = {i: set() for i in range(n, n + len(moving))}
    for axis in axes:
        known = without_known_sums(graph, axis, typed())
        for i in held:
            if i in known:
                held[i].add(axis)
    types = typed()
    outputs: list[fx.Node] = list(output.args[0])  # type: ignore[arg-type]
    forward = _needed(outputs[:n])
    forward |= {node for node in graph.nodes if node.target is getitem and node.args[0] in forward}
    late = _dependent(graph, cotangents)

    # What the backward pass takes: from its results back to what the forward pass has.
    kept: dict[fx.Node, None] = {}
    repeated: dict[fx.Node, None] = {}

    def want(node: fx.Node) -> None:
        stack = [node]
        while stack:
            node = stack.pop()
            if node in kept or node in repeated:
                continue
            leave = node in forward and node not in late
            if node.op == "placeholder" or (leave and not _is_repeated(node)):
                kept[node] = None
            else:
                repeated[node] = None
                stack += node.all_input_nodes

    for node in outputs[n:]:
        want(node)
    order = {node: i for i, node in enumerate(graph.nodes)}
    left = sorted((v for v in kept if v.op != "placeholder"), key=order.__getitem__)
    left_ports = [_stacked(v, types[v], axes) for v in left]

    ahead = fx.Graph()
    env = {node: _copied(ahead, node) for node in (*operands, *index)}
    for node in graph.nodes:
        if node in forward and node.op == "call_function":
            env[node] = ahead.node_copy(node, env.__getitem__)
    shaped = [_reshaped(ahead, env[v], _shape(v), port.shape) for v, port in zip(left, left_ports, strict=True)]
    ahead.output((*(env[v] for v in outputs[:n]), *shaped))

    again = [v for v in operands if v in kept]
    behind = fx.Graph()
    env = {node: _copied(behind, node) for node in again}
    stacked = [behind.placeholder(f"kept_{v.name}") for v in left]
    env |= {node: _copied(behind, node) for node in (*cotangents, *index)}
    for node, port, placeholder in zip(left, left_ports, stacked, strict=True):
        env[node] = _reshaped(behind, placeholder, port.shape, _shape(node))
    for node in graph.nodes:
        if node in repeated:
            env[node] = behind.node_copy(node, env.__getitem__)
    behind.output(tuple(env[v] for v in outputs[n:]))

    grads = []
    for at, i in enumerate(moving):
        port = ports[i]
        pending = tuple(a for a in axes if a not in port.spec.axes and a not in held[n + at])
        grads.append(Port(port.spec, port.shape, port.dtype, pending))
    given = [("operand", operands.index(v)) for v in again]
    given += [("result", n + i) for i in range(len(left))] + [("cotangent", i) for i in smooth]
    taken = [ports[i] for kind, i in given if kind == "operand"] + left_ports + [program.results[i] for i in smooth]
    return _Pair(
        _known(fx.GraphModule({}, ahead), axes, ports, (*program.results, *left_ports)),
        _known(fx.GraphModule({}, behind), axes, taken, grads),
        traced.constants,
        tuple(given),
        tuple(moving),
        tuple(smooth),
    )


def _is_repeated(node: fx.Node) -> bool:
    if node.target is getitem:
        return node.args[0].target in (aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int)  # type: ignore[union-attr]
    return node.target in _REPEATED or isinstance(node.meta["val"], list | tuple)


def _needed(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack += node.all_input_nodes
    return found


def _dependent(graph: fx.Graph, sources: Sequence[fx.Node]) -> set[fx.Node]:
    found = set(sources)
    for node in graph.nodes:
        if any(v in found for v in node.all_input_nodes):
            found.add(node)
    return found


def _shape(node: fx.Node) -> Shape:
    return tuple(map(int, node.meta["val"].shape))


def _stacked(node: fx.Node, varies: Axes, axes: Mapping[str, int]) -> Port:
    """A rank's value as a part of a whole one: the ranks' values along each axis on which they differ, one after another."""
    names = [axis for axis in axes if axis in varies]
    return Port(PartitionSpec(*names), (*(1 for _ in names), *_shape(node)), node.meta["val"].dtype)


def _copied(graph: fx.Graph, placeholder: fx.Node) -> fx.Node:
    made = graph.placeholder(placeholder.name)
    made.meta = dict(placeholder.meta)
    return made


def _reshaped(graph: fx.Graph, node: fx.Node, old: Shape, new: Shape) -> fx.Node:
    return node if old == new else graph.call_function(aten.reshape.default, (node, list(new)))


# The op.


def _may_be_differentiated(tensors: Sequence[Tensor]) -> bool:
    if torch._C._functorch.peek_interpreter_stack() is not None:  # type: ignore[attr-defined]
        return True
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


torch.library.define("ftp::local", "(Tensor[] xs, str program) -> Tensor[]", tags=(torch.Tag.pt2_compliant_tag,))


@torch.library.register_fake("ftp::local")
def _shapes(xs: list[Tensor], program: str) -> list[Tensor]:
    known = program_of(program)
    return [xs[0].new_empty(port.global_shape(known.axes), dtype=port.dtype) for port in known.results]


def _refuse_vmap(*_: Any) -> Any:
    raise TraceError(f"{_at()}ftp.local is called under torch.vmap. Map the function that it is given, or give it the whole batch.")


torch.library.register_vmap("ftp::local", _refuse_vmap)


class _Apply(torch.autograd.Function):
    """Carries the op through autograd and torch.func, with its gradient."""

    @staticmethod
    def forward(pair: _Pair, *xs: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        return tuple(OPS.local.default(list(xs), pair.forward.key))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pair: _Pair = inputs[0]
        ctx.pair = pair
        ctx.set_materialize_grads(False)
        rough = [y for i, y in enumerate(output) if i not in pair.smooth]
        ctx.mark_non_differentiable(*rough)
        ctx.shapes = [(y.shape, y.dtype, y.device) for y in output]
        ctx.save_for_backward(*((inputs[1 + i] if kind == "operand" else output[i]) for kind, i in pair.given if kind != "cotangent"))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:  # type: ignore[override]
        pair: _Pair = ctx.pair
        if all(g is None for g in grads):
            return (None,) * (1 + len(pair.forward.operands))
        saved = iter(ctx.saved_tensors)
        taken = []
        for kind, i in pair.given:
            if kind != "cotangent":
                taken.append(next(saved))
            elif (grad := grads[i]) is not None:
                taken.append(grad)
            else:
                shape, dtype, device = ctx.shapes[i]
                taken.append(torch.zeros(shape, dtype=dtype, device=device))
        found = _Backward.apply(pair.backward, *taken)
        by_operand = dict(zip(pair.moving, found, strict=True))  # type: ignore[arg-type]
        return (None, *(by_operand.get(i) for i in range(len(pair.forward.operands))))

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        return _refuse_vmap()

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:  # type: ignore[override]
        raise TraceError(f"{_at()}ftp.local is differentiated in forward mode (jvp, jacfwd); it has reverse mode only.")


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(program: Program, *xs: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        return tuple(OPS.local.default(list(xs), program.key))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:  # type: ignore[override]
        raise TraceError("A second derivative goes through ftp.local, which has first ones only.")

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        return _refuse_vmap()
