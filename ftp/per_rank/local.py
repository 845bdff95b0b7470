"""``local``: per-rank code inside a global program, as one differentiable op on global tensors.

The code is traced on local shapes into a ``RankCode``. The op ``ftp::local`` carries it through the
surrounding trace; the partitioner inlines its nodes into each rank's graph. Its gradient is a
second program, of the operands, the forward program's residuals and the results' gradients: no
collective runs twice.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, wraps
from typing import Any

import optree
import torch
from torch import Tensor, fx

from ftp.axis import is_inside
from ftp.errors import SpecError, TraceError, join_failures
from ftp.ops.axis_collectives import OPS
from ftp.per_rank.autograd import Apply
from ftp.per_rank.gradient import Pair, constant_ports, contributed, has_gradient, split
from ftp.per_rank.local_specs import (
    check_own,
    local_part,
    of_one,
    own_axes,
    packed,
    uneven,
    whole_units,
)
from ftp.per_rank.program import Port, RankCode, interned
from ftp.per_rank.trace_locally import check_captured, index_of, meta, run_inside, trace_apart
from ftp.per_rank.uneven import UnevenCut, check_result, uneven_cut, with_own_rows
from ftp.per_rank.varying import check_claims, infer
from ftp.sharding.arguments import argument_names, argument_specs
from ftp.sharding.mesh import AnyMesh, resolve
from ftp.sharding.pytree import (
    broadcast_specs,
    check_specs,
    flatten,
    key_of_static,
    leaf_names,
)
from ftp.sharding.spec import PartitionSpec
from ftp.source import at_line
from ftp.torch_internals.functorch import peek_interpreter_stack
from ftp.tracing.settings import settings
from ftp.tracing.trace import Traced


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
            must divide by the ranks that shard it: local size = global size / ranks. One dim of a
            tensor that a single axis cuts need not: the parts are those of ``torch.chunk``, and
            their rows may go where rows go that a mask selects (docs/values.md).
        out_specs: prefix tree of the result; global size = local size × the ranks that shard the
            dim. Along an axis that the spec does not name, all ranks must hold equal values.
        axes: the mesh axes along which ``fn`` is one rank's code; default all. Over other axes it
            is planned like the program around it: inside, tensors are whole along them; the specs
            of ``local`` may not name them, ``ftp.constrain`` may.
        check: prove that results are equal along axes that ``out_specs`` do not name. A value
            varies over an axis if it is computed from a sharded argument or ``axis_index``, until
            an ``all_reduce`` or ``all_gather``. False trusts ``out_specs``.

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

    Over ``ep`` by hand, over ``tp`` by the specs of the weights:

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
        own = own_axes(axes, of_mesh)
        leaves, tree = flatten(args)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if not tensors:
            raise SpecError(
                f"{at_line()}ftp.local takes at least one tensor: without one there is nothing to"
                " shard."
            )
        _refuse_dynamic(tensors)
        key = (
            tree,
            tuple(of_mesh.items()),
            tensors[0].device.type,
            settings(),
            *((x.shape, x.dtype) if isinstance(x, Tensor) else key_of_static(x) for x in leaves),
        )
        if key not in known:
            is_planned = len(own) < len(of_mesh)
            known[key] = _prepare(fn, own, is_planned, in_specs, out_specs, check, args)
        return known[key](tensors)

    return call


def _refuse_dynamic(tensors: Sequence[Tensor]) -> None:
    """Raise in a trace for all sizes, where a tensor has some: each size is traced for itself."""
    if any(isinstance(size, torch.SymInt) for x in tensors for size in x.shape):
        from ftp.tracing.symbolic import NotSymbolic  # which takes long to import

        raise NotSymbolic(
            f"{at_line()}ftp.local traces one rank's code for shards of one size, and is given a"
            " tensor of a dynamic size."
        )


@dataclass
class _Local:
    """A function traced for one abstract input.

    Attributes:
        leaves: local tensors on meta, and static values.
        cuts, uneven_results: the uneven dims of leaves, and of results.
    """

    fn: Callable[..., Any]
    leaves: list[Any]
    tree: optree.PyTreeSpec
    names: list[str]
    device_type: str
    program: RankCode
    traced: Traced
    cuts: dict[int, UnevenCut]
    uneven_results: dict[int, UnevenCut]
    _pair: "Pair | None" = field(default=None, init=False)

    def __call__(self, tensors: Sequence[Tensor]) -> Any:
        at = [i for i, leaf in enumerate(self.leaves) if isinstance(leaf, Tensor)]
        tensors = [
            self.cuts[i].filled_up(x) if i in self.cuts else x
            for i, x in zip(at, tensors, strict=True)
        ]
        if _may_be_differentiated(tensors) and self._wrt and self._differentiable:
            self._pair = self._pair or self._differentiate()
            outputs = Apply.apply(self._pair, *tensors, *self._pair.constants)
        else:
            outputs = OPS.local.default([*tensors, *self.traced.constants], self.program.key)
        leaves = [
            leaf if static else outputs[leaf]
            for leaf, static in zip(self.traced.out_leaves, self.traced.is_static, strict=True)
        ]
        for i, cut in self.uneven_results.items():
            leaves[i] = cut.cut_off(leaves[i])
        return self.traced.out_tree.unflatten(leaves)

    @cached_property
    def _wrt(self) -> list[int]:
        """The leaves that have a gradient."""
        return [
            i
            for i, leaf in enumerate(self.leaves)
            if isinstance(leaf, Tensor) and has_gradient(leaf.dtype)
        ]

    @cached_property
    def _differentiable(self) -> list[int]:
        """The results that have a gradient."""
        return [i for i, port in enumerate(self.program.results) if has_gradient(port.dtype)]

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
                    for leaf in flatten(run_inside(self.fn, self.tree, axes, filled, index))[0]
                    if isinstance(leaf, Tensor)
                ]
                return [outputs[i] for i in differentiable], outputs

            vjp: Any = torch.func.vjp
            _, pull, primals = vjp(primal, *(leaves[i] for i in wrt), has_aux=True)
            return primals, pull(contributed(program, differentiable, cotangents))

        cotangents = [
            meta(program.results[i].shape, program.results[i].dtype) for i in differentiable
        ]
        traced = trace_apart(
            joint, (self.leaves, index_of(axes), cotangents), self.device_type, self.names
        )
        at = [i for i, leaf in enumerate(self.leaves) if isinstance(leaf, Tensor)]
        return split(program, len(at), traced, [at.index(i) for i in wrt], differentiable)


def _prepare(
    fn: Callable[..., Any],
    axes: dict[str, int],
    is_planned: bool,
    in_specs: Any,
    out_specs: Any,
    check: bool,
    args: tuple[Any, ...],
) -> _Local:
    check_captured(fn)
    roots = argument_names(fn)
    roots = [roots[i] if i < len(roots) else f"args[{i}]" for i in range(len(args))]
    leaves, tree = flatten(args)
    names = [name for arg, root in zip(args, roots, strict=True) for name in leaf_names(arg, root)]
    specs = argument_specs(in_specs, args, roots, "in_specs")
    if is_planned:
        check_own(specs, names, axes)
    check_specs(specs, leaves, names, axes)
    if failures := [
        f
        for leaf, spec, name in zip(leaves, specs, names, strict=True)
        for f in uneven(leaf, spec, axes, name)
    ]:
        raise SpecError(at_line() + join_failures(failures))
    parts = [
        local_part(leaf, spec, axes) if isinstance(leaf, Tensor) else leaf
        for leaf, spec in zip(leaves, specs, strict=True)
    ]
    found = [
        (i, uneven_cut(leaf.shape, spec, axes))
        for i, (leaf, spec) in enumerate(zip(leaves, specs, strict=True))
        if isinstance(leaf, Tensor)
    ]
    cuts, uneven_results = {i: cut for i, cut in found if cut is not None}, {}
    fn = with_own_rows(fn, cuts, names, uneven_results) if cuts else fn
    device_type = next(leaf.device.type for leaf in leaves if isinstance(leaf, Tensor))

    traced = trace_apart(
        lambda given, index: run_inside(fn, tree, axes, given, index),
        (parts, index_of(axes)),
        device_type,
        names,
    )
    at = [i for i, leaf in enumerate(parts) if isinstance(leaf, Tensor)]
    operands = [Port(specs[i], tuple(parts[i].shape), parts[i].dtype) for i in at]
    operands += constant_ports(traced)
    results = _results(traced, out_specs, axes, is_planned, uneven_results)
    placeholders = [n for n in traced.gm.graph.nodes if n.op == "placeholder"]
    n = len(at)
    inputs = [*placeholders[:n], *placeholders[n + len(axes) :], *placeholders[n : n + len(axes)]]
    _reorder(traced.gm.graph, inputs)
    traced.gm.graph.eliminate_dead_code()
    called = {node: _origin(names[i], specs[i]) for node, i in zip(inputs, at, strict=False)}
    masked = {cut.axis: f"{_origin(names[i], specs[i])}, or from " for i, cut in cuts.items()}
    called.update(
        {
            node: f"{masked.get(axis, '')}ftp.axis.axis_index({axis!r})"
            for node, axis in zip(inputs[-len(axes) :], axes, strict=True)
        }
    )
    types = infer(
        traced.gm.graph,
        [*(frozenset(p.spec.axes) for p in operands), *(frozenset({a}) for a in axes)],
    )
    if check:
        check_claims(traced, results, types, called)
    program = interned(traced.gm, axes, operands, results, is_planned)
    return _Local(fn, parts, tree, names, device_type, program, traced, cuts, uneven_results)


def _results(
    traced: Traced,
    out_specs: Any,
    axes: dict[str, int],
    is_planned: bool,
    uneven_results: dict[int, UnevenCut],
) -> list[Port]:
    tree = traced.out_tree.unflatten(traced.out_leaves)
    specs, names = broadcast_specs(out_specs, tree, "the result"), leaf_names(tree, "the result")
    if is_planned:
        check_own(specs, names, axes)
    for i, cut in uneven_results.items():
        check_result(cut, specs[i], names[i])
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
        for f in packed(s, d, name)
    ]:
        raise SpecError(at_line() + join_failures(failures))
    check_specs([whole_units(s) for s in specs], leaves, names, axes)
    return [
        Port(of_one(spec), tuple(map(int, leaf.shape)), leaf.dtype)
        for leaf, spec, static in zip(leaves, specs, traced.is_static, strict=True)
        if not static
    ]


def _origin(name: str, spec: PartitionSpec) -> str:
    return f"{name}, which in_specs cut as {spec}"


def _reorder(graph: fx.Graph, placeholders: Sequence[fx.Node]) -> None:
    for node in reversed(placeholders):
        first = next(iter(graph.nodes))
        if node is not first:
            first.prepend(node)


def _may_be_differentiated(tensors: Sequence[Tensor]) -> bool:
    if peek_interpreter_stack() is not None:
        return True
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
