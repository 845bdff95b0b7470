"""Gradient of per-rank code: trace results and gradients together, and split the trace into a
forward and a backward program.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx

from ftp.dataclass import dataclass
from ftp.ops.ancestors import ancestors
from ftp.ops.axis_collectives import OPS
from ftp.per_rank.program import Port, RankCode, Shape, copied
from ftp.per_rank.sizes import held
from ftp.per_rank.trace_locally import index_of, trace_apart
from ftp.per_rank.varying import AxisSet, infer, without_known_sums
from ftp.sharding.spec import PartitionSpec
from ftp.tracing.trace import Traced

aten = torch.ops.aten


@dataclass(frozen=True, eq=False)
class Pair:
    """A forward program and its backward program.

    Attributes:
        forward: operands and constants to results and residuals, the values that ``backward``
            reads.
        backward: to the gradients of the operands ``wrt``.
        constants: operands of ``forward`` after the function's own.
        given: per operand of ``backward``, its source: ``("operand", i)``, ``("result", i)`` or
            ``("cotangent", i)``.
        wrt: the operands that have a gradient.
        differentiable: the results that have a cotangent.
    """

    forward: RankCode
    backward: RankCode
    constants: tuple[Tensor, ...]
    given: tuple[tuple[str, int], ...]
    wrt: tuple[int, ...]
    differentiable: tuple[int, ...]


def with_gradient(
    program: RankCode,
    run: Callable[[list[Tensor], list[Tensor]], list[Tensor]],
    names: Sequence[str],
    device_type: str,
) -> Pair:
    """A program with its backward program.

    Args:
        run: the function that the program was traced from, of its operands without constants and
            of the axis indices.
        names: of these operands, for errors.
    """
    operands = program.operands[: len(names)]
    wrt = [i for i, port in enumerate(operands) if port.has_gradient]
    differentiable = [i for i, port in enumerate(program.results) if port.has_gradient]

    def joint(leaves: list[Tensor], index: list[Tensor], cotangents: list[Tensor]) -> Any:
        def primal(*values: Tensor) -> Any:
            filled = list(leaves)
            for i, value in zip(wrt, values, strict=True):
                filled[i] = value
            outputs = run(filled, index)
            return [outputs[i] for i in differentiable], outputs

        vjp: Any = torch.func.vjp
        _, pull, primals = vjp(primal, *(leaves[i] for i in wrt), has_aux=True)
        return primals, pull(_contributed(program, differentiable, cotangents))

    cotangents = [program.results[i].meta for i in differentiable]
    args = [port.meta for port in operands], index_of(program.axes), cotangents
    traced = trace_apart(joint, args, device_type, names, program.sizes)
    return _split(program, len(names), traced, wrt, differentiable)


def _contributed(
    program: RankCode, differentiable: Sequence[int], cotangents: Sequence[Tensor]
) -> list[Tensor]:
    """Cotangents of the results as this rank's terms. Gradients are summed over ranks, so only one
    rank contributes the cotangent of a replicated result. Every term of a pending sum has the sum's
    cotangent.
    """
    terms = list(cotangents)
    for i, result in enumerate(differentiable):
        port = program.results[result]
        for axis in program.axes:
            if axis not in port.spec.axes and axis not in port.pending:
                terms[i] = OPS.contribute.default(terms[i], axis)
    return terms


def _split(
    program: RankCode,
    n_tensors: int,
    traced: Traced,
    wrt: Sequence[int],
    differentiable: Sequence[int],
) -> Pair:
    """Split a trace of results and gradients into a forward and a backward program.

    Args:
        program: the function without its gradient; its results are the trace's first outputs.
        n_tensors: number of the function's operands, without its constants.
        traced: from operands, axis indices, cotangents and constants to results and gradients.
        wrt: the operands whose gradients the trace returns.
        differentiable: the results whose cotangents the trace takes.
    """
    joint = _joint(program, n_tensors, traced, differentiable)
    reduced = _drop_known_sums(joint, len(wrt))
    saved, recomputed = _saved(joint)
    residuals = [v for v in joint.graph.nodes if v in saved and v.op != "placeholder"]
    types = joint.types()
    residual_ports = [_stacked(v, types[v], program.axes) for v in residuals]
    reread = [v for v in joint.operands if v in saved]

    n = len(program.results)
    given = [("operand", joint.operands.index(v)) for v in reread]
    given += [("result", n + i) for i in range(len(residuals))]
    given += [("cotangent", i) for i in differentiable]
    taken = [joint.ports[joint.operands.index(v)] for v in reread] + residual_ports
    taken += [program.results[i] for i in differentiable]
    forward = _forward_graph(joint, residuals, residual_ports)
    backward = _backward_graph(joint, reread, residuals, residual_ports, recomputed)
    return Pair(
        program.like(forward, joint.ports, (*program.results, *residual_ports)),
        program.like(backward, taken, _gradient_ports(joint, wrt, reduced)),
        traced.constants,
        tuple(given),
        tuple(wrt),
        tuple(differentiable),
    )


@dataclass(frozen=True, eq=False)
class _JointTrace:
    """A trace of results and gradients, with its placeholders by role.

    Attributes:
        operands: the function's tensors, then its constants; ``ports`` describes them.
        index: the rank's position on each mesh axis.
        cotangents: gradients of the results ``differentiable``.
    """

    program: RankCode
    graph: fx.Graph
    operands: list[fx.Node]
    ports: list[Port]
    index: list[fx.Node]
    cotangents: list[fx.Node]
    differentiable: Sequence[int]

    @property
    def results(self) -> Sequence[fx.Node]:
        outputs: Any = self.graph.output_node().args[0]
        return outputs[: len(self.program.results)]

    @property
    def gradients(self) -> Sequence[fx.Node]:
        outputs: Any = self.graph.output_node().args[0]
        return outputs[len(self.program.results) :]

    def types(self) -> dict[fx.Node, AxisSet]:
        """The axes along which each node's value varies."""
        ports = [*self.ports, *(self.program.results[i] for i in self.differentiable)]
        vary = [*(port.spec.axes for port in ports), *([axis] for axis in self.program.axes)]
        nodes = (*self.operands, *self.cotangents, *self.index)
        known = dict(zip(nodes, map(frozenset, vary), strict=True))
        return infer(self.graph, [known[n] for n in self.graph.find_nodes(op="placeholder")])


def _joint(
    program: RankCode, n_tensors: int, traced: Traced, differentiable: Sequence[int]
) -> _JointTrace:
    graph = traced.gm.graph
    placeholders = list(graph.find_nodes(op="placeholder"))
    counts = (n_tensors, len(program.axes), len(differentiable), len(traced.constants))
    tensors, index, cotangents, constants = (
        placeholders[end - count : end]
        for end, count in zip(accumulate(counts), counts, strict=True)
    )
    ports = [*program.operands[:n_tensors], *constant_ports(traced)]
    return _JointTrace(
        program, graph, [*tensors, *constants], ports, index, cotangents, differentiable
    )


def _drop_known_sums(joint: _JointTrace, n_gradients: int) -> list[set[str]]:
    """Drop sums that need no collective. Returns per gradient the axes over which it is reduced."""
    first = len(joint.program.results)
    known = {
        axis: without_known_sums(joint.graph, axis, joint.types()) for axis in joint.program.axes
    }
    return [
        {axis for axis, outputs in known.items() if first + i in outputs}
        for i in range(n_gradients)
    ]


def _saved(joint: _JointTrace) -> tuple[set[fx.Node], set[fx.Node]]:
    """The values that the backward program reads from the forward one, and those that it
    recomputes: found from the gradients backwards.
    """
    forward, late = _forward_nodes(joint), _dependent(joint.graph, joint.cotangents)
    saved: set[fx.Node] = set()
    recomputed: set[fx.Node] = set()
    stack = list(joint.gradients)
    while stack:
        node = stack.pop()
        if node in saved or node in recomputed:
            continue
        is_available = node in forward and node not in late
        if node.op == "placeholder" or (is_available and not _is_recomputed(node)):
            saved.add(node)
        else:
            recomputed.add(node)
            stack += node.all_input_nodes
    return saved, recomputed


def _forward_nodes(joint: _JointTrace) -> set[fx.Node]:
    forward = ancestors(joint.results)
    parts = {n for n in joint.graph.nodes if n.target is getitem and n.args[0] in forward}
    return forward | parts


def _forward_graph(
    joint: _JointTrace, residuals: Sequence[fx.Node], ports: Sequence[Port]
) -> fx.Graph:
    graph, nodes = fx.Graph(), _forward_nodes(joint)
    env = {node: copied(graph, node) for node in (*joint.operands, *joint.index)}
    for node in joint.graph.nodes:
        if node in nodes and node.op == "call_function":
            env[node] = graph.node_copy(node, env.__getitem__)
    shaped = [
        _reshaped(graph, env[v], _shape(v), port.shape, port.dtype)
        for v, port in zip(residuals, ports, strict=True)
    ]
    graph.output((*(env[v] for v in joint.results), *shaped))
    return graph


def _backward_graph(
    joint: _JointTrace,
    reread: Sequence[fx.Node],
    residuals: Sequence[fx.Node],
    ports: Sequence[Port],
    recomputed: set[fx.Node],
) -> fx.Graph:
    graph = fx.Graph()
    env = {node: copied(graph, node) for node in reread}
    stacked = [graph.placeholder(f"kept_{v.name}") for v in residuals]
    env |= {node: copied(graph, node) for node in (*joint.cotangents, *joint.index)}
    for node, port, placeholder in zip(residuals, ports, stacked, strict=True):
        env[node] = _reshaped(graph, placeholder, port.shape, _shape(node), port.dtype)
    for node in joint.graph.nodes:
        if node in recomputed:
            env[node] = graph.node_copy(node, env.__getitem__)
    graph.output(tuple(env[v] for v in joint.gradients))
    return graph


def _gradient_ports(
    joint: _JointTrace, wrt: Sequence[int], reduced: Sequence[set[str]]
) -> list[Port]:
    """A gradient is cut like its operand; over other axes it is a pending sum unless reduced."""
    found = []
    for i, axes in zip(wrt, reduced, strict=True):
        port = joint.ports[i]
        pending = [a for a in joint.program.axes if a not in port.spec.axes and a not in axes]
        found.append(Port(port.spec, port.shape, port.dtype, tuple(pending)))
    return found


def constant_ports(traced: Traced) -> list[Port]:
    return [Port(PartitionSpec(), tuple(c.shape), c.dtype) for c in traced.constants]


# Cheaper to recompute than to save.
_RECOMPUTED = {
    aten.view.default, aten.reshape.default, aten.t.default, aten.transpose.int,
    aten.permute.default, aten.expand.default, aten.unsqueeze.default, aten.squeeze.dim,
    aten.squeeze.dims, aten.slice.Tensor, aten.select.int, aten.full.default,
    aten.full_like.default, aten.zeros_like.default, aten.ones_like.default, aten.arange.start_step,
    aten.arange.default, getitem,
}  # fmt: skip
_VIEWS_IN_PARTS = {aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int}


def _is_recomputed(node: fx.Node) -> bool:
    if node.target is getitem:
        return node.args[0].target in _VIEWS_IN_PARTS  # type: ignore[union-attr]
    return node.target in _RECOMPUTED or isinstance(node.meta["val"], list | tuple)


def _dependent(graph: fx.Graph, sources: Sequence[fx.Node]) -> set[fx.Node]:
    """The sources and all nodes computed from them."""
    found = set(sources)
    for node in graph.nodes:
        if not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def _shape(node: fx.Node) -> Shape:
    return tuple(node.meta["val"].shape)


def _stacked(node: fx.Node, varies: AxisSet, axes: Mapping[str, int]) -> Port:
    """A residual as a shard of a global value: ranks' values stacked along a new dim for each axis
    on which they differ.
    """
    names = [axis for axis in axes if axis in varies]
    return Port(PartitionSpec(*names), (*(1 for _ in names), *_shape(node)), node.meta["val"].dtype)


def _reshaped(
    graph: fx.Graph, node: fx.Node, old: Shape, new: Shape, dtype: torch.dtype
) -> fx.Node:
    if old == new:
        return node
    made = graph.call_function(aten.reshape.default, (node, list(new)))
    made.meta["val"] = held(new, dtype)
    return made
