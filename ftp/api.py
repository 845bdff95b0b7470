"""shard() and spmd(): from a pure function, a mesh and specs to a step function."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import optree
import torch

import ftp.rules  # noqa: F401  (registers the rules)
from ftp.agreement import calls
from ftp.errors import DonationError, FtpError, InputError, MismatchError, SpecError, join_failures
from ftp.graph import BATCH, PARAMETER, Graph, Node, live, mark_dependencies, merge_common
from ftp.ingest import constraints, decompose, from_fx
from ftp.mesh import START_TIMEOUT, AnyMesh, Mesh, require_coordinate, resolve
from ftp.placement import Placement, check_alive, check_placed, content_hash, device_get, device_put, mark_donated, placement_of, remember
from ftp.planner import Plan, Specs, make_plan
from ftp.program import Lowered, Program
from ftp.spec import PartitionSpec, local_shape
from ftp.trace import grad_and_value, trace
from ftp.tree import broadcast_specs, check_specs, flatten, leaf_names
from ftp.version import __version__


def shard(
    loss_fn: Callable[..., Any],
    mesh: AnyMesh | None = None,
    specs: Any = None,
    *,
    batch_specs: Any = PartitionSpec(),
    data_axes: Sequence[str] | None = None,
    has_aux: bool = False,
    reshard_after_forward: bool = True,
    donate: Sequence[int] = (),
    compile: bool = False,
    strict: bool = False,
    certify: bool = False,
) -> "Step":
    """The step function ``step(params, *batch) -> (loss, grads)`` of a loss, as every rank of ``mesh`` runs it.

    Args:
        loss_fn: pure function ``(params, *batch)`` to a scalar, with ``has_aux`` to ``(scalar, aux)``.
        mesh: a torch DeviceMesh, or an ftp mesh; default that of the surrounding ``ftp.use_mesh``.
        specs: spec tree of the parameters, or a prefix of one; gradients come back sharded as it says.
        batch_specs: prefix tree of the tuple of batch arguments; one ``P`` covers all. With one batch argument it may be that
            argument's own tree.
        data_axes: the axes on which parameters move rather than activations; default those that cut a batch argument.
        reshard_after_forward: drop a parameter's gathered copy after the forward pass and gather it again for the backward pass.
        donate: positions of arguments whose memory the step may reuse; they must not be used afterwards.
        compile: compile each rank's graph with torch.compile (the simulator runs it as it is).
        strict: an op without a sharding rule is an error, rather than replicated with a warning.

    Returns:
        A ``Step``: call it, or ``step.lower(params, *batch)`` to read the program first.

    Raises:
        FtpError: for everything that is wrong with the mesh or the specs alone; the rest when the step is first called.

    >>> import ftp
    >>> step = ftp.shard(lambda p, x: (x @ p["w"]).sum(), ftp.simulated_mesh((2,), ("tp",)), {"w": ftp.P(None, "tp")})
    >>> loss, grads = step({"w": torch.ones(3, 4)}, torch.ones(2, 3))
    >>> float(loss), grads["w"].shape
    (24.0, torch.Size([3, 4]))
    """
    if not callable(loss_fn):
        raise InputError(f"loss_fn is {loss_fn!r}, a {type(loss_fn).__name__}; give a pure function (params, *batch) -> scalar.")

    def in_specs(args: tuple[Any, ...]) -> list[PartitionSpec]:
        params, *batch = args
        return broadcast_specs(PartitionSpec() if specs is None else specs, params, "params") + _batch_specs(batch_specs, tuple(batch))

    def out_specs(result: Any, given: Sequence[PartitionSpec], args: tuple[Any, ...]) -> list[PartitionSpec | None]:
        value, _ = result
        free = optree.tree_leaves(value, namespace="ftp")
        return [PartitionSpec()] * len(free) + list(given[: len(flatten(args[0])[0])])

    return Step(
        grad_and_value(loss_fn, has_aux=has_aux),
        resolve(mesh),
        in_specs,
        out_specs,
        arguments=("params", *_argument_names(loss_fn)[1:]),
        is_shard=True,
        state=(0,),
        options=_Options(_checked_axes(data_axes, resolve(mesh)), reshard_after_forward, tuple(donate), compile, strict),
    )


def spmd(
    fn: Callable[..., Any],
    mesh: AnyMesh | None = None,
    in_specs: Any = None,
    out_specs: Any = None,
    *,
    donate: Sequence[int] = (),
    data_axes: Sequence[str] | None = None,
    reshard_after_forward: bool = True,
    compile: bool = False,
    strict: bool = False,
    certify: bool = False,
) -> "Step":
    """Any pure function as every rank of ``mesh`` runs it; a whole train step, optimizer state included.

    Args:
        in_specs: prefix tree of the tuple of arguments; one ``P`` covers all.
        out_specs: prefix tree of the result; None leaves the choice to propagation.
        data_axes: default the axes that cut an argument that is no state. State: the first argument, donated ones.

    The other arguments are those of ``shard``.

    >>> import ftp
    >>> double = ftp.spmd(lambda x: 2 * x, ftp.simulated_mesh((2,), ("dp",)), ftp.P("dp"))
    >>> double(torch.ones(3))
    tensor([2., 2., 2.])
    """
    if not callable(fn):
        raise InputError(f"fn is {fn!r}, a {type(fn).__name__}; give a pure function.")
    names = _argument_names(fn)

    def input_specs(args: tuple[Any, ...]) -> list[PartitionSpec]:
        return _batch_specs(PartitionSpec() if in_specs is None else in_specs, args, names)

    def output_specs(result: Any, given: Sequence[PartitionSpec], args: tuple[Any, ...]) -> list[PartitionSpec | None]:
        n = len(flatten(result)[0])
        return [None] * n if out_specs is None else list(broadcast_specs(out_specs, result, "the result"))

    return Step(
        fn,
        resolve(mesh),
        input_specs,
        output_specs,
        arguments=names,
        is_shard=False,
        state=(0, *donate),
        options=_Options(_checked_axes(data_axes, resolve(mesh)), reshard_after_forward, tuple(donate), compile, strict),
    )


def lower(fn: Callable[..., Any], mesh: AnyMesh | None, in_specs: Any, *args: Any, out_specs: Any = None) -> Lowered:
    """The program of ``spmd(fn, mesh, in_specs)`` for ``args`` (real, fake or meta), before it runs.

    >>> import ftp
    >>> mesh = ftp.AbstractMesh((4,), ("tp",))
    >>> lowered = ftp.lower(lambda x, w: x @ w, mesh, (ftp.P(None, "tp"), ftp.P("tp")), torch.ones(2, 8), torch.ones(8, 3), out_specs=ftp.P())
    >>> [c.op for c in lowered.collectives]
    ['all_reduce']
    """
    return spmd(fn, mesh, in_specs, out_specs).lower(*args)


def reshard(tree: Any, mesh: AnyMesh | None, old: Any, new: Any) -> Any:
    """Placed tensors from specs ``old`` to specs ``new``, by the cheapest collectives.

    >>> import ftp
    >>> mesh = ftp.simulated_mesh((2,), ("tp",))
    >>> w = ftp.device_put(torch.arange(4), mesh, ftp.P("tp"))
    >>> ftp.reshard(w, mesh, ftp.P("tp"), ftp.P())
    tensor([0, 1, 2, 3])
    """
    m = resolve(mesh)
    old_specs, new_specs = broadcast_specs(old, tree, "tree"), broadcast_specs(new, tree, "tree")
    leaves, treedef = flatten(tree)
    tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    names = leaf_names(tree, "tree")
    check_specs(new_specs, leaves, names, m.axes)
    check_placed(leaves, old_specs, names, m)
    out = list(leaves)
    for i in tensors:
        # A leaf at a time: each finds its own order of the axes, and no more than one is in flight.
        try:
            moved = spmd(lambda x: x.clone(), m, (old_specs[i],), new_specs[i])(leaves[i])
        except FtpError as e:
            if "No order of the mesh axes" not in str(e):
                raise
            moved = device_put(device_get(leaves[i], m, old_specs[i]), m, new_specs[i])
        out[i] = moved
    return treedef.unflatten(out)


@dataclass(frozen=True)
class _Options:
    data_axes: tuple[str, ...] | None
    reshard_after_forward: bool
    donate: tuple[int, ...]
    compile: bool
    strict: bool


class Step:
    """A function sharded over a mesh; planned once for each distinct abstract input, as ``jit`` does."""

    def __init__(
        self,
        fn: Callable[..., Any],
        mesh: Mesh,
        in_specs: Callable[[tuple[Any, ...]], list[PartitionSpec]],
        out_specs: Callable[[Any, Sequence[PartitionSpec], tuple[Any, ...]], list[PartitionSpec | None]],
        *,
        arguments: Sequence[str],
        is_shard: bool,
        state: Sequence[int],
        options: _Options,
    ):
        self.mesh = mesh
        self._fn, self._in_specs, self._out_specs = fn, in_specs, out_specs
        self._arguments, self._is_shard, self._state, self._options = tuple(arguments), is_shard, frozenset(state), options
        self._programs: dict[Any, Program] = {}

    def __call__(self, *args: Any) -> Any:
        call = _Arguments(args)
        program = self._programs.get(self._key(call))
        if program is None:
            program = self._plan_for_call(call)
        check_alive(call.leaves, call)
        check_placed(call.leaves, program.leaf_specs, call, self.mesh)
        inputs = [call.leaves[i] for i in program.tensor_leaves]
        outputs = self._run(program, inputs)
        if self._options.donate:
            self._mark_donated(args)
        for tensor, spec, shape in zip(outputs, program.out_specs, program.out_shapes, strict=True):
            remember(tensor, Placement(self.mesh, spec, shape))
        leaves = [leaf if static else outputs[leaf] for leaf, static in zip(program.out_leaves, program.is_static, strict=True)]
        return program.out_tree.unflatten(leaves)

    def lower(self, *args: Any) -> Lowered:
        """The program for these arguments (real, fake or meta), without running it or talking to other ranks."""
        call = _Arguments(args, self._arguments)
        specs = self._specs(call)
        return Lowered(self._build(call, specs, [_global_shape(leaf, spec, self.mesh) for leaf, spec in zip(call.leaves, specs, strict=True)]))

    def _run(self, program: Program, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        if self.mesh.kind != "process":
            return program.run(inputs)
        record = calls(self.mesh)
        record.begin(record.next(), program.fingerprint)
        try:
            return program.run(inputs)
        except RuntimeError as e:
            explained = record.explain(e)
            if explained is None:
                raise
            raise explained from e

    def _key(self, call: "_Arguments") -> Any:
        leaves = []
        for leaf in call.leaves:
            if isinstance(leaf, torch.Tensor):
                placed = placement_of(leaf) if self.mesh.kind == "process" else None
                leaves.append((leaf.shape, leaf.dtype, None if placed is None else placed.shape))
            else:
                leaves.append((type(leaf), leaf))
        key = (call.treedef, tuple(leaves))
        try:
            hash(key)
        except TypeError:
            named = _Arguments(call.args, self._arguments)
            bad = [f"{name} is a {type(leaf).__name__}" for name, leaf in zip(named, call.leaves, strict=True) if not _is_hashable(leaf)]
            raise InputError(
                f"{'; '.join(bad)}: neither a tensor, nor a container that optree knows, nor a hashable static value."
                "\n  Register the class with optree.register_pytree_node(..., namespace='ftp'), or pass its tensors in a dict."
            ) from None
        return key

    def _specs(self, call: "_Arguments") -> list[PartitionSpec]:
        specs = self._in_specs(call.args)
        check_alive(call.leaves, list(call))
        return specs

    def _plan_for_call(self, call: "_Arguments") -> Program:
        call = _Arguments(call.args, self._arguments)
        if self.mesh.kind != "process":
            specs = self._specs(call)
            check_placed(call.leaves, specs, list(call), self.mesh)
            program = self._build(call, specs, [_global_shape(leaf, spec, self.mesh) for leaf, spec in zip(call.leaves, specs, strict=True)])
        else:
            program = self._agree_on_program(call)
        self._programs[self._key(call)] = program
        return program

    def _agree_on_program(self, call: "_Arguments") -> Program:
        require_coordinate(self.mesh)
        record = calls(self.mesh)
        number = record.next()
        try:
            specs = self._specs(call)
            check_specs(specs, [_rank_only(leaf) for leaf in call.leaves], list(call), self.mesh.axes)
            check_placed(call.leaves, specs, list(call), self.mesh)
            held = json.dumps([_describe_leaf(leaf, spec) for leaf, spec in zip(call.leaves, specs, strict=True)])
        except Exception as e:
            record.agree(number, e, START_TIMEOUT)
            raise
        record.agree(number, {"library version": f"ftp {__version__}, torch {torch.__version__}", "argument tree": str(call.treedef), "specs": str(specs)}, START_TIMEOUT)
        everyone = [json.loads(text) for text in record.exchange("arguments", held, START_TIMEOUT)]
        shapes = _agree_on_shapes(everyone, specs, list(call), self.mesh)
        try:
            program = self._build(call, specs, shapes)
        except Exception as e:
            record.agree(number, e, START_TIMEOUT)
            raise
        record.agree(number, {"program": program.fingerprint}, START_TIMEOUT)
        return program

    def _build(self, call: "_Arguments", specs: Sequence[PartitionSpec], shapes: Sequence[tuple[int, ...] | None]) -> Program:
        names = list(call)
        leaves = [_abstract(leaf, shape) for leaf, shape in zip(call.leaves, shapes, strict=True)]
        check_specs(specs, leaves, names, self.mesh.axes)
        _check_devices(call.leaves, names, self.mesh)
        _check_donated(call.args, self._options.donate, self._arguments)
        traced = trace(self._fn, leaves, call.treedef, self.mesh.device_type, names=names)
        graph = from_fx(traced.gm, strict=self._options.strict)
        tensor_leaves = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        inputs = graph.inputs
        in_specs = {node: specs[i] for node, i in zip(inputs, tensor_leaves, strict=False)}
        argument_of = call.argument_of()
        batch = []
        for node, i in zip(inputs, tensor_leaves, strict=False):
            is_state = argument_of[i] in self._state
            node.depends = PARAMETER if is_state else BATCH
            if not is_state:
                batch.append(node)
        result = traced.out_tree.unflatten(traced.out_leaves)
        leaf_specs = self._out_specs(result, specs, call.args)
        out_specs: list[PartitionSpec | None] = [None] * len(graph.outputs)
        for leaf, static, spec in zip(traced.out_leaves, traced.is_static, leaf_specs, strict=True):
            if not static:
                out_specs[leaf] = spec
            elif spec:
                raise SpecError(f"The result has a leaf {leaf!r}, a {type(leaf).__name__}, with spec {spec}; only a tensor can be cut. Give P().")
        self._check_out_specs(graph, out_specs)
        graph = merge_common(live(graph))
        forward = graph.outputs if not self._is_shard else [v for v, spec in zip(graph.outputs, _is_forward(traced, result), strict=True) if spec]
        mark_dependencies(graph, forward)
        constrained = constraints(graph)
        _check_constraints(constrained, self.mesh)
        data_axes = self._options.data_axes
        if data_axes is None:
            data_axes = tuple(dict.fromkeys(a for node in batch for a in in_specs[node].axes))
        plan = make_plan(
            graph,
            self.mesh.axes,
            Specs(in_specs, constrained, out_specs),
            batch_inputs=batch,
            data_axes=data_axes,
            reshard_after_forward=self._options.reshard_after_forward,
            decompose=lambda g, nodes: decompose(g, nodes, strict=self._options.strict),
        )
        constants = traced.constants
        return Program(
            self.mesh,
            plan,
            tuple(tensor_leaves),
            tuple(specs[i] for i in tensor_leaves),
            tuple(constants),
            traced.out_tree,
            tuple(traced.out_leaves),
            tuple(traced.is_static),
            tuple(specs),
            self._options.compile,
        )

    def _check_out_specs(self, graph: Graph, out_specs: Sequence[PartitionSpec | None]) -> None:
        pairs = [(spec, torch.empty(v.meta.shape, device="meta"), f"output {i}") for i, (spec, v) in enumerate(zip(out_specs, graph.outputs, strict=True)) if spec]
        if pairs:
            check_specs(*map(list, zip(*pairs, strict=True)), self.mesh.axes)  # type: ignore[arg-type]

    def _mark_donated(self, args: tuple[Any, ...]) -> None:
        for position in self._options.donate:
            mark_donated((leaf for leaf in flatten(args[position])[0] if isinstance(leaf, torch.Tensor)), f"argument {position} of an earlier call")


class _Arguments:
    """Arguments, flat; iterating gives each leaf's name, which is worked out only when it is needed."""

    def __init__(self, args: tuple[Any, ...], names: Sequence[str] = ()):
        self.args = args
        self.leaves, self.treedef = flatten(args)
        self._roots = names

    def __iter__(self):
        for i, arg in enumerate(self.args):
            root = self._roots[i] if i < len(self._roots) else f"args[{i}]"
            yield from leaf_names(arg, root)

    def argument_of(self) -> list[int]:
        """Per leaf the position of its argument."""
        return [i for i, arg in enumerate(self.args) for _ in flatten(arg)[0]]


def _argument_names(fn: Callable[..., Any]) -> tuple[str, ...]:
    import inspect

    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return ()
    return tuple(p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))


def _batch_specs(specs: Any, batch: tuple[Any, ...], names: Sequence[str] = ()) -> list[PartitionSpec]:
    if isinstance(specs, PartitionSpec):
        return broadcast_specs(specs, batch, "batch")
    if len(batch) == 1 and not (isinstance(specs, tuple) and len(specs) == 1):
        return broadcast_specs(specs, batch[0], names[0] if names else "batch")
    return broadcast_specs(tuple(specs) if isinstance(specs, list) else specs, batch, "batch")


def _checked_axes(data_axes: Sequence[str] | None, mesh: Mesh) -> tuple[str, ...] | None:
    if data_axes is None:
        return None
    unknown = [a for a in data_axes if a not in mesh.axes]
    if unknown:
        raise SpecError(f"data_axes names {unknown}, but the mesh has axes {list(mesh.axes)}.")
    return tuple(data_axes)


def _is_hashable(leaf: Any) -> bool:
    try:
        hash(leaf)
    except TypeError:
        return False
    return True


def _rank_only(leaf: Any) -> Any:
    return leaf


def _abstract(leaf: Any, shape: tuple[int, ...] | None) -> Any:
    """A leaf as the tracer takes it: of global shape, without storage where that differs from what it is."""
    if not isinstance(leaf, torch.Tensor) or shape is None or tuple(leaf.shape) == tuple(shape):
        return leaf
    return torch.empty(shape, dtype=leaf.dtype, device="meta")


def _global_shape(leaf: Any, spec: PartitionSpec, mesh: Mesh) -> tuple[int, ...] | None:
    """The global shape of a leaf as far as one rank can tell: as placed, else as if all shards were equal."""
    if not isinstance(leaf, torch.Tensor):
        return None
    known = placement_of(leaf)
    if known is not None:
        return known.shape
    if mesh.kind != "process" or leaf.device.type == "meta" or isinstance(leaf, torch._subclasses.FakeTensor):
        return tuple(leaf.shape)
    shape = list(leaf.shape)
    for dim in range(min(len(spec), leaf.ndim)):
        for cut in spec.cuts(dim):
            shape[dim] *= mesh.axes[cut.axis]
    return tuple(shape)


def _describe_leaf(leaf: Any, spec: PartitionSpec) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return repr(leaf)
    known = placement_of(leaf)
    is_open = known is None and bool(spec)
    return {
        "local": list(leaf.shape),
        "dtype": str(leaf.dtype),
        "global": None if known is None else list(known.shape),
        "hash": content_hash(leaf) if is_open else None,
    }


def _agree_on_shapes(everyone: Sequence[Sequence[Any]], specs: Sequence[PartitionSpec], names: Sequence[str], mesh: Mesh) -> list[tuple[int, ...] | None]:
    """The global shape of every leaf, from what all ranks hold; the same, or the same error, on every rank."""
    coordinates = mesh.coordinates()
    shapes: list[tuple[int, ...] | None] = []
    failures = []
    for i, (spec, name) in enumerate(zip(specs, names, strict=True)):
        held = [rank[i] for rank in everyone]
        if not all(isinstance(h, dict) for h in held):
            if any(h != held[0] for h in held):
                odd = next(r for r, h in enumerate(held) if h != held[0])
                failures.append(f"{name} is {held[0]} on rank {mesh.ranks[0]} and {held[odd]} on rank {mesh.ranks[odd]}. Static values must be equal on all ranks.")
            shapes.append(None)
            continue
        if (odd := next((r for r, h in enumerate(held) if h["dtype"] != held[0]["dtype"]), None)) is not None:
            failures.append(f"{name} is {held[0]['dtype']} on rank {mesh.ranks[0]} and {held[odd]['dtype']} on rank {mesh.ranks[odd]}.")
        known = next((h["global"] for h in held if h["global"] is not None), None)
        shape = known if known is not None else _assemble([h["local"] for h in held], spec, mesh)
        for rank, (h, coordinate) in enumerate(zip(held, coordinates, strict=True)):
            due = local_shape(spec, shape, mesh.axes, coordinate) if len(shape) == len(h["local"]) else None
            if due != tuple(h["local"]):
                given = f"rank {mesh.ranks[0]} holds {tuple(held[0]['local'])}, rank {mesh.ranks[rank]} holds {tuple(h['local'])}"
                right = f"; of global shape {tuple(shape)}, rank {mesh.ranks[rank]} should hold {due}" if due else ""
                failures.append(f"{name} with spec {spec} does not have shards of one tensor: {given}{right}. Shards follow torch.chunk.")
                break
        else:
            failures += _full_tensors(held, spec, name, mesh)
        shapes.append(tuple(shape))
    if failures:
        raise MismatchError(join_failures(failures))
    return shapes


def _assemble(locals_: Sequence[Sequence[int]], spec: PartitionSpec, mesh: Mesh) -> list[int]:
    """What the shards along each cut dim add up to."""
    shape = list(locals_[0])
    coordinates = mesh.coordinates()
    for dim in range(min(len(spec), len(shape))):
        axes = {cut.axis for cut in spec.cuts(dim)}
        if axes:
            along = [l for l, c in zip(locals_, coordinates, strict=True) if all(at == 0 for a, at in c.items() if a not in axes)]
            shape[dim] = sum(l[dim] for l in along if len(l) == len(shape))
    return shape


def _full_tensors(held: Sequence[Mapping[str, Any]], spec: PartitionSpec, name: str, mesh: Mesh) -> list[str]:
    hashes = {h["hash"] for h in held}
    cut_over = [a for a in spec.axes if mesh.axes[a] > 1]
    if not cut_over or len(hashes) != 1 or None in hashes:
        return []
    return [
        f"{name} has the same contents, of shape {tuple(held[0]['local'])}, on all ranks, though spec {spec} cuts it:"
        f" it looks like a full tensor where a shard is due. Place it with ftp.device_put(tree, mesh, specs)."
    ]


def _check_devices(leaves: Sequence[Any], names: Sequence[str], mesh: Mesh) -> None:
    allowed = {mesh.device_type, "meta"}
    failures = [
        f"{name} is on {leaf.device}, the mesh on {mesh.device_type}. Move it with .to({mesh.device_type!r}), or place it with ftp.device_put."
        for leaf, name in zip(leaves, names, strict=True)
        if isinstance(leaf, torch.Tensor) and leaf.device.type not in allowed and mesh.kind != "abstract"
    ]
    if failures:
        raise InputError(join_failures(failures))


def _check_donated(args: tuple[Any, ...], donate: Sequence[int], names: Sequence[str]) -> None:
    seen: dict[int, str] = {}
    for position in donate:
        if not 0 <= position < len(args):
            raise DonationError(f"donate names argument {position}, but the step has {len(args)} arguments.")
    everything = _Arguments(args, names)
    argument_of = everything.argument_of()
    for name, leaf, position in zip(everything, everything.leaves, argument_of, strict=True):
        if not isinstance(leaf, torch.Tensor):
            continue
        if id(leaf) in seen and (position in donate or seen[id(leaf)][1]):
            raise DonationError(f"{seen[id(leaf)][0]} and {name} are one tensor, and it is donated: it would be reused twice. Clone one of them.")
        seen.setdefault(id(leaf), (name, position in donate))  # type: ignore[arg-type]


def _check_constraints(constrained: Mapping[Node, PartitionSpec], mesh: Mesh) -> None:
    failures = check_specs_of(constrained, mesh)
    if failures:
        raise SpecError(join_failures(failures))


def check_specs_of(constrained: Mapping[Node, PartitionSpec], mesh: Mesh) -> list[str]:
    from ftp.spec import check_spec

    found: dict[str, None] = {}
    for node, spec in constrained.items():
        where = f"the constraint at {node.source}" if node.source else "a constraint"
        found.update(dict.fromkeys(check_spec(spec, node.results[0].shape, mesh.axes, where)))
    return list(found)


def _is_forward(traced: Any, result: Any) -> list[bool]:
    """Per output of the graph whether it is the loss or aux, rather than a gradient."""
    value, _ = result
    n = len(optree.tree_leaves(value, namespace="ftp"))
    forward: list[bool] = [False] * sum(not s for s in traced.is_static)
    for leaf, static in list(zip(traced.out_leaves, traced.is_static, strict=True))[:n]:
        if not static:
            forward[leaf] = True
    return forward
