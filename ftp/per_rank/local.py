"""``local``: per-rank code inside a global program, as one differentiable op on global tensors.

The code is traced on local shapes into a ``RankCode``. The op ``ftp::local`` carries it through the
surrounding trace; the partitioner inlines its nodes into each rank's graph. Its gradient is a
second program, of the operands, the forward program's residuals and the results' gradients: no
collective runs twice.
"""

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial, wraps
from types import FunctionType
from typing import Any

import optree
import torch
from torch import Tensor, fx
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import _disable_current_modes

from ftp.axis import Inside, entered, is_inside
from ftp.errors import SpecError, TraceError, join_failures
from ftp.ops.axis_collectives import OPS
from ftp.per_rank.gradient import Apply, Pair, constant_ports, contributed, split
from ftp.per_rank.program import Port, RankCode, interned
from ftp.per_rank.varying import Axes, cause, infer
from ftp.sharding.arguments import argument_names, argument_specs
from ftp.sharding.mesh import AnyMesh, resolve
from ftp.sharding.pytree import broadcast_specs, check_specs, flatten, leaf_names
from ftp.sharding.spec import PartitionSpec, Units
from ftp.source import at_line
from ftp.tracing.explain_errors import SURROUNDING
from ftp.tracing.trace import Traced, trace

aten = torch.ops.aten
Shape = tuple[int, ...]


def local(
    fn: Callable[..., Any],
    mesh: AnyMesh | None = None,
    in_specs: Any = PartitionSpec(),
    out_specs: Any = PartitionSpec(),
    axes: Sequence[str] | None = None,
    *,
    check: bool = True,
) -> Callable[..., Any]:
    """Run per-rank code on shards, as a function of global tensors.

    Use it in a function given to ``ftp.shard``, ``ftp.spmd`` or ``ftp.lower``, differentiated or
    not. Called elsewhere it computes the same global result on simulated ranks. ``fn`` is traced
    once for each distinct abstract input.

    Args:
        fn: takes this rank's shards and returns this rank's shards; ``ftp.axis`` has its
            collectives. Tensors that it captures are constants, replicated and without a gradient.
        mesh: default the surrounding step's or ``ftp.use_mesh``'s; within a step it must have the
            same axes.
        in_specs: prefix tree of the tuple of arguments; one ``P`` covers all. Every sharded dim
            must divide by the ranks that shard it: local size = global size / ranks.
        out_specs: prefix tree of the result; global size = local size × the ranks that shard the
            dim. Along an axis that the spec does not name, all ranks must hold equal values.
        axes: the mesh axes along which ``fn`` is one rank's code; default all. Over the others it
            is planned as the program around it: inside, tensors are whole along them, no spec of
            ``local`` names them, and ``ftp.constrain`` may.
        check: prove that they do: values vary over an axis from a sharded argument or
            ``axis_index`` on, until an ``all_reduce`` or ``all_gather``. False trusts
            ``out_specs``.

    Returns:
        A function of global tensors, with ``fn``'s positional arguments.

    Raises:
        SpecError: specs that do not fit the tensors; an ``out_specs`` that cannot be proven.
        TraceError: ``fn`` does not trace to one graph, or captures a tensor that a surrounding
            transform differentiates or maps; forward mode.

    >>> import ftp
    >>> mesh = ftp.simulated_mesh((2,), ("tp",))
    >>> def mlp(x, up, down):  # `up` (3, 2) of (3, 4), `down` (2, 2) of (4, 2)
    ...     return ftp.axis.all_reduce((x @ up).relu() @ down, "tp")
    >>> layer = ftp.local(mlp, mesh, (ftp.P(), ftp.P(None, "tp"), ftp.P("tp")), ftp.P())
    >>> layer(torch.ones(1, 3), torch.ones(3, 4), torch.ones(4, 2))
    tensor([[12., 12.]])

    Over ``ep`` by hand, over ``tp`` as the specs of the weights say:

    >>> mesh = ftp.simulated_mesh((2, 2), ("ep", "tp"))
    >>> mean = ftp.local(
    ...     lambda x, w: ftp.axis.all_reduce((x @ w).sum(0), "ep"),
    ...     mesh, (ftp.P("ep"), ftp.P()), ftp.P(), axes=("ep",),
    ... )
    >>> step = ftp.spmd(mean, mesh, (ftp.P("ep"), ftp.P(None, "tp")), ftp.P("tp"))
    >>> step(torch.ones(4, 3), torch.ones(3, 2))
    tensor([12., 12.])

    Source: JAX, ``jax.shard_map``.
    """
    known: dict[Any, _Local] = {}

    @wraps(fn)
    def call(*args: Any) -> Any:
        if is_inside():
            raise TraceError(
                f"{at_line()}ftp.local is called in one rank's code, where tensors are already"
                " shards. Call the function itself, or name the axes of both in the outer axes=."
            )
        of_mesh = resolve(mesh).axes
        own = _own_axes(axes, of_mesh)
        leaves, tree = flatten(args)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if not tensors:
            raise SpecError(
                f"{at_line()}ftp.local takes at least one tensor: without one there is nothing to"
                " shard."
            )
        key = (
            tree,
            tuple(of_mesh.items()),
            tensors[0].device.type,
            *((x.shape, x.dtype) if isinstance(x, Tensor) else x for x in leaves),
        )
        if key not in known:
            is_planned = len(own) < len(of_mesh)
            known[key] = _prepare(fn, own, is_planned, in_specs, out_specs, check, args)
        return known[key](tensors)

    return call


# From a function to a program.


@dataclass
class _Local:
    """A function traced for one abstract input.

    Attributes:
        leaves: local tensors on meta, and static values.
    """

    fn: Callable[..., Any]
    leaves: list[Any]
    tree: optree.PyTreeSpec
    names: list[str]
    device_type: str
    program: RankCode
    traced: Traced
    _pair: "Pair | None" = field(default=None, init=False)

    def __call__(self, tensors: Sequence[Tensor]) -> Any:
        if _may_be_differentiated(tensors) and self._wrt and self._differentiable:
            self._pair = self._pair or self._differentiate()
            outputs = Apply.apply(self._pair, *tensors, *self._pair.constants)
        else:
            outputs = OPS.local.default([*tensors, *self.traced.constants], self.program.key)
        leaves = [
            leaf if static else outputs[leaf]
            for leaf, static in zip(self.traced.out_leaves, self.traced.is_static, strict=True)
        ]
        return self.traced.out_tree.unflatten(leaves)

    @cached_property
    def _wrt(self) -> list[int]:
        """The leaves that have a gradient."""
        return [
            i
            for i, leaf in enumerate(self.leaves)
            if isinstance(leaf, Tensor) and _has_gradient(leaf.dtype)
        ]

    @cached_property
    def _differentiable(self) -> list[int]:
        """The results that have a gradient."""
        return [i for i, port in enumerate(self.program.results) if _has_gradient(port.dtype)]

    def _differentiate(self) -> "Pair":
        """The program that also returns residuals, and the backward program."""
        program, axes = self.program, self.program.axes
        wrt, differentiable = self._wrt, self._differentiable

        def joint(leaves: list[Any], index: list[Tensor], cotangents: list[Tensor]) -> Any:
            def primal(*values: Tensor) -> Any:
                filled = list(leaves)
                for i, value in zip(wrt, values, strict=True):
                    filled[i] = value
                outputs = [
                    leaf
                    for leaf in flatten(_run(self.fn, self.tree, axes, filled, index))[0]
                    if isinstance(leaf, Tensor)
                ]
                return [outputs[i] for i in differentiable], outputs

            vjp: Any = torch.func.vjp
            _, pull, primals = vjp(primal, *(leaves[i] for i in wrt), has_aux=True)
            return primals, pull(contributed(program, differentiable, cotangents))

        cotangents = [
            _meta(program.results[i].shape, program.results[i].dtype) for i in differentiable
        ]
        traced = _trace(
            joint, (self.leaves, _index(axes), cotangents), self.device_type, self.names
        )
        at = [i for i, leaf in enumerate(self.leaves) if isinstance(leaf, Tensor)]
        return split(program, len(at), traced, [at.index(i) for i in wrt], differentiable)


def _run(
    fn: Callable[..., Any],
    tree: optree.PyTreeSpec,
    axes: Mapping[str, int],
    leaves: Sequence[Any],
    index: Sequence[Tensor],
) -> Any:
    with entered(Inside(axes, dict(zip(axes, index, strict=True)))):
        return fn(*tree.unflatten(leaves))


def traced_locally(
    fn: Callable[..., Any],
    axes: Mapping[str, int],
    leaves: Sequence[Any],
    device_type: str,
    names: Sequence[str],
) -> Traced:
    """Trace one rank's code apart from the surrounding trace, to look at what it does."""
    leaves, tree = flatten(tuple(leaves))
    parts = [_meta(x.shape, x.dtype) if isinstance(x, Tensor) else x for x in leaves]
    return _trace(
        lambda given, index: _run(fn, tree, axes, given, index),
        (parts, _index(axes)),
        device_type,
        names,
    )


def _own_axes(names: Sequence[str] | None, axes: Mapping[str, int]) -> dict[str, int]:
    """The axes along which the code is one rank's, in mesh order."""
    if names is None:
        return dict(axes)
    names = (names,) if isinstance(names, str) else tuple(names)
    known = ", ".join(f"{a!r} (size {n})" for a, n in axes.items())
    if not names:
        raise SpecError(f"{at_line()}ftp.local has axes=(): name at least one of {known}.")
    if unknown := [a for a in names if a not in axes]:
        raise SpecError(
            f"{at_line()}ftp.local has axes={names!r}, but the mesh has {known}: no axis"
            f" {unknown[0]!r}."
        )
    return {a: n for a, n in axes.items() if a in names}


def _check_own(
    specs: Sequence[PartitionSpec], names: Sequence[str], axes: Mapping[str, int]
) -> None:
    """Refuse specs of an axis along which the code is not one rank's."""
    if failures := [
        f"{name} has spec {spec}, but axes={tuple(axes)!r} leaves {axis!r} to the planner. Specs of"
        f" ftp.local name the axes of its own code; put {axis!r} in the specs of the step, or in"
        " ftp.constrain."
        for name, spec in zip(names, specs, strict=True)
        for axis in spec.axes
        if axis not in axes
    ]:
        raise SpecError(at_line() + join_failures(failures))


def _prepare(
    fn: Callable[..., Any],
    axes: dict[str, int],
    is_planned: bool,
    in_specs: Any,
    out_specs: Any,
    check: bool,
    args: tuple[Any, ...],
) -> _Local:
    _check_captured(fn)
    roots = argument_names(fn)
    roots = [roots[i] if i < len(roots) else f"args[{i}]" for i in range(len(args))]
    leaves, tree = flatten(args)
    names = [name for arg, root in zip(args, roots, strict=True) for name in leaf_names(arg, root)]
    specs = argument_specs(in_specs, args, roots, "in_specs")
    if is_planned:
        _check_own(specs, names, axes)
    check_specs(specs, leaves, names, axes)
    if failures := [
        f
        for leaf, spec, name in zip(leaves, specs, names, strict=True)
        for f in _uneven(leaf, spec, axes, name)
    ]:
        raise SpecError(at_line() + join_failures(failures))
    parts = [
        _part(leaf, spec, axes) if isinstance(leaf, Tensor) else leaf
        for leaf, spec in zip(leaves, specs, strict=True)
    ]
    device_type = next(leaf.device.type for leaf in leaves if isinstance(leaf, Tensor))

    traced = _trace(
        lambda given, index: _run(fn, tree, axes, given, index),
        (parts, _index(axes)),
        device_type,
        names,
    )
    at = [i for i, leaf in enumerate(parts) if isinstance(leaf, Tensor)]
    operands = [Port(specs[i], tuple(parts[i].shape), parts[i].dtype) for i in at]
    operands += constant_ports(traced)
    results = _results(traced, out_specs, axes, is_planned)
    placeholders = [n for n in traced.gm.graph.nodes if n.op == "placeholder"]
    n = len(at)
    inputs = [*placeholders[:n], *placeholders[n + len(axes) :], *placeholders[n : n + len(axes)]]
    _reorder(traced.gm.graph, inputs)
    traced.gm.graph.eliminate_dead_code()
    called = {node: _origin(names[i], specs[i]) for node, i in zip(inputs, at, strict=False)}
    called.update(
        {
            node: f"ftp.axis.axis_index({axis!r})"
            for node, axis in zip(inputs[-len(axes) :], axes, strict=True)
        }
    )
    types = infer(
        traced.gm.graph,
        [*(frozenset(p.spec.axes) for p in operands), *(frozenset({a}) for a in axes)],
    )
    if check:
        _check_claims(traced, results, types, called)
    program = interned(traced.gm, axes, operands, results, is_planned)
    return _Local(fn, parts, tree, names, device_type, program, traced)


def _trace(fn: Callable[..., Any], args: Any, device_type: str, names: Sequence[str]) -> Traced:
    leaves, tree = flatten(args)
    names = [*names, *(f"input {i}" for i in range(len(names), len(leaves)))]
    # Hide the surrounding trace and transforms: they see global tensors, this trace local ones.
    with _disable_current_modes(), temporarily_clear_interpreter_stack(), _without_saved_hooks():
        return trace(fn, leaves, tree, device_type, names=names)


@contextmanager
def _without_saved_hooks() -> Iterator[None]:
    """Take off hooks of saved tensors, as of torch.utils.checkpoint."""
    hooks = []
    while (pair := torch._C._autograd._top_saved_tensors_default_hooks(True)) is not None:  # type: ignore[attr-defined]
        hooks.append(pair)
        torch._C._autograd._pop_saved_tensors_default_hooks()  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for pack, unpack in reversed(hooks):
            torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)  # type: ignore[attr-defined]


def _check_captured(fn: Callable[..., Any]) -> None:
    """Refuse captured tensors that a surrounding torch.func transform differentiates or maps: they
    must be arguments.
    """
    seen: set[int] = set()
    waiting: list[tuple[str, Any]] = [("", fn)]
    while waiting:
        name, value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Tensor) and is_functorch_wrapped_tensor(value):
            raise TraceError(
                f"{at_line()}The function given to ftp.local uses {name}, {SURROUNDING}"
            )
        if isinstance(value, partial):
            waiting += [(name, v) for v in (value.func, *value.args, *value.keywords.values())]
        elif isinstance(value, FunctionType):
            waiting += list(inspect.getclosurevars(value).nonlocals.items())
            waiting += [(name, v) for v in value.__defaults__ or ()]
        elif isinstance(value, dict | list | tuple):
            waiting += [(name, v) for v in flatten(value)[0]]


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
                f"{name} of shape {tuple(leaf.shape)} has spec {spec}, which cuts dim {d} of size"
                f" {size} in {n}{units}: the parts are not equal. In ftp.local they must be: pad"
                " the dim, or leave it whole."
            )
    return failures


def _packed(spec: PartitionSpec, dim: int, name: str) -> list[str]:
    cuts = spec.cuts(dim)
    if any(c.zigzag for c in cuts):
        return [
            f"{name} has spec {spec}; per-rank code takes one chunk of a dim, and a zigzag is two."
            " Cut it by the axis alone."
        ]
    if all(c.pack == 1 for c in cuts) or (len(cuts) == 1 and isinstance(cuts[0].pack, int)):
        return []
    return [
        f"{name} has spec {spec}; in ftp.local a dim of packs is sharded over one axis, and its"
        " packs are equal. Split it before."
    ]


def _part(leaf: Tensor, spec: PartitionSpec, axes: Mapping[str, int]) -> Tensor:
    return _meta(
        [s // math.prod(axes[c.axis] for c in spec.cuts(d)) for d, s in enumerate(leaf.shape)],
        leaf.dtype,
    )


def _results(traced: Traced, out_specs: Any, axes: dict[str, int], is_planned: bool) -> list[Port]:
    tree = traced.out_tree.unflatten(traced.out_leaves)
    specs, names = broadcast_specs(out_specs, tree, "the result"), leaf_names(tree, "the result")
    if is_planned:
        _check_own(specs, names, axes)
    output = next(reversed(traced.gm.graph.nodes))
    vals = [n.meta["val"] for n in output.args[0]]
    leaves = [
        leaf if static else vals[leaf]
        for leaf, static in zip(traced.out_leaves, traced.is_static, strict=True)
    ]
    if failures := [
        f
        for s, name in zip(specs, names, strict=True)
        for d in range(len(s))
        for f in _packed(s, d, name)
    ]:
        raise SpecError(at_line() + join_failures(failures))
    check_specs([_whole_units(s) for s in specs], leaves, names, axes)
    return [
        Port(_of_one(spec), tuple(map(int, leaf.shape)), leaf.dtype)
        for leaf, spec, static in zip(leaves, specs, traced.is_static, strict=True)
        if not static
    ]


def _of_one(spec: PartitionSpec) -> PartitionSpec:
    """The spec without unit sizes, which change nothing where shards are equal."""
    return PartitionSpec(
        *(
            tuple(Units(c.axis, 1, c.pack) if c.pack != 1 else c.axis for c in spec.cuts(d)) or None
            for d in range(len(spec))
        )
    )


def _whole_units(spec: PartitionSpec) -> PartitionSpec:
    """The spec without units, to check against a local shape."""
    if spec.entries[:1] == (...,):
        return spec
    return PartitionSpec(*(tuple(c.axis for c in spec.cuts(d)) or None for d in range(len(spec))))


def _origin(name: str, spec: PartitionSpec) -> str:
    return f"{name}, which in_specs cut as {spec}"


def _check_claims(
    traced: Traced,
    results: Sequence[Port],
    types: Mapping[fx.Node, Axes],
    called: Mapping[fx.Node, str],
) -> None:
    tree = traced.out_tree.unflatten(traced.out_leaves)
    named = [
        name
        for name, static in zip(leaf_names(tree, "the result"), traced.is_static, strict=True)
        if not static
    ]
    output = next(reversed(traced.gm.graph.nodes))
    failures = []
    for name, port, node in zip(named, results, output.args[0], strict=True):
        for axis in sorted(types[node] - set(port.spec.axes)):
            line, origin = cause(node, axis, types, called)
            cut = _cut_too(port, axis)
            or_cut = f" or cut it by the axis in out_specs, as {cut}," if cut else ""
            at = f", at {line}" if line else ""
            failures.append(
                f"{name} has out spec {port.spec}, which says that all ranks along {axis!r} hold"
                f" the same, but it varies there: it comes from {origin}{at}.\n  Reduce it with"
                f" ftp.axis.all_reduce(x, {axis!r}),{or_cut} or pass check=False if you know that"
                " the ranks agree."
            )
    if failures:
        raise SpecError(at_line() + join_failures(failures))


def _cut_too(port: Port, axis: str) -> PartitionSpec | None:
    """The result's spec with its first whole dim sharded over ``axis``; None if it has none."""
    entries = [port.spec[d] if d < len(port.spec) else None for d in range(len(port.shape))]
    if None not in entries:
        return None
    entries[entries.index(None)] = axis
    return PartitionSpec(*entries)


def _reorder(graph: fx.Graph, placeholders: Sequence[fx.Node]) -> None:
    for node in reversed(placeholders):
        first = next(iter(graph.nodes))
        if node is not first:
            first.prepend(node)


def _may_be_differentiated(tensors: Sequence[Tensor]) -> bool:
    if torch._C._functorch.peek_interpreter_stack() is not None:  # type: ignore[attr-defined]
        return True
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
