"""``local``: per-rank code inside a global program, as one differentiable op on global tensors.

The code is traced on local shapes into a ``RankCode``. The op ``ftp::local`` carries it through the
surrounding trace; the partitioner inlines its nodes into each rank's graph. Its gradient is a
second program, of the operands, the forward program's residuals and the results' gradients: no
collective runs twice.
"""

from collections.abc import Callable, Sequence
from functools import cached_property, partial, wraps
from itertools import pairwise
from typing import Any

import optree
import torch
from torch import Tensor, fx

from ftp.axis import is_inside
from ftp.dataclass import dataclass
from ftp.dynamic_int import Sizes
from ftp.errors import SpecError, TraceError, join_failures
from ftp.ops.axis_collectives import OPS
from ftp.per_rank.autograd import Apply
from ftp.per_rank.gradient import Pair, constant_ports, with_gradient
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
from ftp.per_rank.sizes import at_hand, shape_of, sizes_in
from ftp.per_rank.trace_locally import check_captured, index_of, run_inside, trace_apart
from ftp.per_rank.uneven import UnevenCut, check_result, uneven_cut, with_own_rows
from ftp.per_rank.varying import check_claims, infer
from ftp.rules.call import formula_of
from ftp.sharding.arguments import argument_names, argument_specs, padded_names
from ftp.sharding.mesh import AnyMesh, resolve
from ftp.sharding.pytree import (
    KeyOrders,
    abbreviated,
    broadcast_specs,
    check_specs,
    flatten,
    key_of_static,
    kind_of,
    leaf_names,
)
from ftp.sharding.spec import PartitionSpec
from ftp.source import at_line
from ftp.torch_internals.functorch import peek_interpreter_stack
from ftp.tracing.captured import have_changed
from ftp.tracing.recorder import note_read
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
            ``fn`` may use their rows like rows that a mask selects (docs/values.md).
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
    if not callable(fn):
        raise SpecError(f"local takes a function of shards, not {abbreviated(fn)}, {kind_of(fn)}.")
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
        sizes = sizes_in(map(shape_of, tensors))
        key = (
            tree,
            tuple(of_mesh.items()),
            tensors[0].device.type,
            settings(),
            KeyOrders(args).keys,
            *(
                (shape_of(x), x.dtype) if isinstance(x, Tensor) else key_of_static(x)
                for x in leaves
            ),
        )
        of_sizes = known if sizes is None else sizes.memo.setdefault(("local", call), {})
        found = of_sizes.get(key)
        if found is None or have_changed(found.traced.read):
            is_planned = len(own) < len(of_mesh)
            found = _prepare(fn, own, is_planned, in_specs, out_specs, check, args, sizes)
            of_sizes[key] = found
        note_read(each.tensor for each in found.traced.read)
        return found(tensors)

    return call


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

    def __call__(self, given: Sequence[Tensor]) -> Any:
        tensors = [
            self.cuts[i].filled_up(x) if i in self.cuts else x
            for i, x in zip(self._at, given, strict=True)
        ]
        if _may_be_differentiated(tensors) and self._has_gradient:
            outputs = Apply.apply(self._pair, *tensors, *self._pair.constants)
        else:
            outputs = OPS.local.default([*tensors, *self.traced.constants], self.program.key)
        leaves = [
            leaf if static else outputs[leaf]
            for leaf, static in zip(self.traced.out_leaves, self.traced.is_static, strict=True)
        ]
        sizes = {formula_of(s): s for x in given for s in x.shape if self.uneven_results}
        for i, cut in self.uneven_results.items():
            leaves[i] = cut.cut_off(leaves[i], sizes[cut.size])
        return self.traced.out_tree.unflatten(leaves)

    @cached_property
    def _at(self) -> list[int]:
        """The positions of tensors among the leaves."""
        return [i for i, leaf in enumerate(self.leaves) if isinstance(leaf, Tensor)]

    @cached_property
    def _has_gradient(self) -> bool:
        operands, results = self.program.operands[: len(self._at)], self.program.results
        return any(p.has_gradient for p in operands) and any(p.has_gradient for p in results)

    @cached_property
    def _pair(self) -> Pair:
        """The program that also returns residuals, and the backward program."""

        def run(operands: list[Tensor], index: list[Tensor]) -> list[Tensor]:
            leaves = list(self.leaves)
            for i, x in zip(self._at, operands, strict=True):
                leaves[i] = x
            result = run_inside(self.fn, self.tree, self.program.axes, leaves, index)
            return [x for x in flatten(result)[0] if isinstance(x, Tensor)]

        names = [self.names[i] for i in self._at]
        return with_gradient(self.program, run, names, self.device_type)


def _prepare(
    fn: Callable[..., Any],
    axes: dict[str, int],
    is_planned: bool,
    in_specs: Any,
    out_specs: Any,
    check: bool,
    args: tuple[Any, ...],
    sizes: Sizes | None,
) -> _Local:
    check_captured(fn)
    roots = padded_names(argument_names(fn), len(args))
    leaves, tree = flatten(args)
    names = [name for arg, root in zip(args, roots, strict=True) for name in leaf_names(arg, root)]
    specs = argument_specs(in_specs, args, roots, "in_specs")
    if is_planned:
        check_own(specs, names, axes)
    check_specs(specs, list(map(at_hand, leaves)), names, axes)
    at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    if failures := [f for i in at for f in uneven(leaves[i], specs[i], axes, names[i])]:
        raise SpecError(at_line() + join_failures(failures))
    parts, cuts, uneven_results = list(leaves), {}, {}
    for i in at:
        parts[i] = local_part(leaves[i], specs[i], axes)
        if (cut := uneven_cut(shape_of(leaves[i]), specs[i], axes)) is not None:
            cuts[i] = cut
    fn = with_own_rows(fn, cuts, names, uneven_results) if cuts else fn
    device_type = leaves[at[0]].device.type

    run = partial(run_inside, fn, tree, axes)
    traced = trace_apart(run, (parts, index_of(axes)), device_type, names, sizes)
    operands = [Port(specs[i], shape_of(parts[i]), parts[i].dtype) for i in at]
    operands += constant_ports(traced)
    results = _results(traced, out_specs, axes, is_planned, uneven_results)
    inputs = _indices_last(traced.gm.graph, len(at), len(axes))
    traced.gm.graph.eliminate_dead_code()
    if check:
        origins = [f"{names[i]}, which in_specs cut as {specs[i]}" for i in at]
        masked = {cuts[i].axis: f"{origins[k]}, or from " for k, i in enumerate(at) if i in cuts}
        called = dict(zip(inputs, origins, strict=False))
        for node, axis in zip(inputs[-len(axes) :], axes, strict=True):
            called[node] = f"{masked.get(axis, '')}ftp.axis.axis_index({axis!r})"
        vary = [*(p.spec.axes for p in operands), *([axis] for axis in axes)]
        types = infer(traced.gm.graph, [frozenset(over) for over in vary])
        check_claims(traced, results, types, called)
    program = interned(traced.gm, axes, operands, results, is_planned, sizes)
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
    outputs: Any = traced.gm.graph.output_node().args[0]
    leaves = [
        leaf if static else outputs[leaf].meta["val"]
        for leaf, static in zip(traced.out_leaves, traced.is_static, strict=True)
    ]
    named = list(zip(specs, names, strict=True))
    if failures := [f for s, name in named for d in range(len(s)) for f in packed(s, d, name)]:
        raise SpecError(at_line() + join_failures(failures))
    check_specs([whole_units(s) for s in specs], list(map(at_hand, leaves)), names, axes)
    return [
        Port(of_one(spec), tuple(leaf.shape), leaf.dtype)
        for leaf, spec, static in zip(leaves, specs, traced.is_static, strict=True)
        if not static
    ]


def _indices_last(graph: fx.Graph, n_tensors: int, n_axes: int) -> list[fx.Node]:
    """Move the axis indices, which stand before the constants, behind them. Returns the inputs."""
    inputs, end = list(graph.find_nodes(op="placeholder")), n_tensors + n_axes
    inputs = [*inputs[:n_tensors], *inputs[end:], *inputs[n_tensors:end]]
    for before, node in pairwise(inputs):
        if before.next is not node:
            before.append(node)
    return inputs


def _may_be_differentiated(tensors: Sequence[Tensor]) -> bool:
    if peek_interpreter_stack() is not None:
        return True
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
