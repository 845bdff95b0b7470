"""The gradient of one rank's code: a program that also leaves what its gradient needs, and the
program of the gradient.

The op ``ftp::local`` carries either through a surrounding trace.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx

from ftp.axis import OPS
from ftp.errors import TraceError
from ftp.per_rank.program import Port, Program, Shape, copied, interned, needed
from ftp.per_rank.varying import Axes, infer, without_known_sums
from ftp.sharding.spec import PartitionSpec
from ftp.source import at_line
from ftp.tracing.trace import Traced

aten = torch.ops.aten


@dataclass(frozen=True, eq=False)
class Pair:
    """A program with what it leaves for its gradient, and the gradient.

    Attributes:
        constants: operands of ``forward`` after the function's own.
        given: per operand of ``backward`` what it is: ``("operand", i)``, ``("result", i)`` or
            ``("cotangent", i)``.
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
    aten.view.default, aten.reshape.default, aten.t.default, aten.transpose.int,
    aten.permute.default, aten.expand.default, aten.unsqueeze.default, aten.squeeze.dim,
    aten.squeeze.dims, aten.slice.Tensor, aten.select.int, aten.full.default,
    aten.full_like.default, aten.zeros_like.default, aten.ones_like.default, aten.arange.start_step,
    aten.arange.default, getitem,
}  # fmt: skip


def split(
    program: Program, n_tensors: int, traced: Traced, moving: Sequence[int], smooth: Sequence[int]
) -> Pair:
    """The trace of results and gradients as the program that gives the results and the one that
    gives the gradients.
    """
    axes, graph = program.axes, traced.gm.graph
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    counts = (n_tensors, len(axes), len(smooth), len(traced.constants))
    ends = list(accumulate(counts))
    tensors, index, cotangents, constants = (
        placeholders[end - count : end] for end, count in zip(ends, counts, strict=True)
    )
    operands = [*tensors, *constants]
    ports = [*program.operands[:n_tensors], *constant_ports(traced)]
    output = next(reversed(graph.nodes))
    n = len(program.results)

    def typed() -> dict[fx.Node, Axes]:
        known = {
            node: frozenset(port.spec.axes) for node, port in zip(operands, ports, strict=True)
        }
        known |= {node: frozenset({axis}) for node, axis in zip(index, axes, strict=True)}
        known |= {
            node: frozenset(program.results[i].spec.axes)
            for node, i in zip(cotangents, smooth, strict=True)
        }
        return infer(graph, [known[node] for node in placeholders])

    held: dict[int, set[str]] = {i: set() for i in range(n, n + len(moving))}
    for axis in axes:
        known = without_known_sums(graph, axis, typed())
        for i in held:
            if i in known:
                held[i].add(axis)
    types = typed()
    outputs: list[fx.Node] = list(output.args[0])  # type: ignore[arg-type]
    forward = needed(outputs[:n])
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
    env = {node: copied(ahead, node) for node in (*operands, *index)}
    for node in graph.nodes:
        if node in forward and node.op == "call_function":
            env[node] = ahead.node_copy(node, env.__getitem__)
    shaped = [
        _reshaped(ahead, env[v], _shape(v), port.shape)
        for v, port in zip(left, left_ports, strict=True)
    ]
    ahead.output((*(env[v] for v in outputs[:n]), *shaped))

    again = [v for v in operands if v in kept]
    behind = fx.Graph()
    env = {node: copied(behind, node) for node in again}
    stacked = [behind.placeholder(f"kept_{v.name}") for v in left]
    env |= {node: copied(behind, node) for node in (*cotangents, *index)}
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
    taken = (
        [ports[i] for kind, i in given if kind == "operand"]
        + left_ports
        + [program.results[i] for i in smooth]
    )
    return Pair(
        interned(fx.GraphModule({}, ahead), axes, ports, (*program.results, *left_ports)),
        interned(fx.GraphModule({}, behind), axes, taken, grads),
        traced.constants,
        tuple(given),
        tuple(moving),
        tuple(smooth),
    )


def constant_ports(traced: Traced) -> list[Port]:
    return [Port(PartitionSpec(), tuple(c.shape), c.dtype) for c in traced.constants]


def _is_repeated(node: fx.Node) -> bool:
    if node.target is getitem:
        return node.args[0].target in (
            aten.split.Tensor,
            aten.split_with_sizes.default,
            aten.unbind.int,
        )  # type: ignore[union-attr]
    return node.target in _REPEATED or isinstance(node.meta["val"], list | tuple)


def _dependent(graph: fx.Graph, sources: Sequence[fx.Node]) -> set[fx.Node]:
    found = set(sources)
    for node in graph.nodes:
        if any(v in found for v in node.all_input_nodes):
            found.add(node)
    return found


def _shape(node: fx.Node) -> Shape:
    return tuple(map(int, node.meta["val"].shape))


def _stacked(node: fx.Node, varies: Axes, axes: Mapping[str, int]) -> Port:
    """A rank's value as a part of a whole one: the ranks' values along each axis on which they
    differ, one after another.
    """
    names = [axis for axis in axes if axis in varies]
    return Port(PartitionSpec(*names), (*(1 for _ in names), *_shape(node)), node.meta["val"].dtype)


def _reshaped(graph: fx.Graph, node: fx.Node, old: Shape, new: Shape) -> fx.Node:
    return node if old == new else graph.call_function(aten.reshape.default, (node, list(new)))


def _refuse_vmap(*_: Any) -> Any:
    raise TraceError(
        f"{at_line()}ftp.local is called under torch.vmap. Map the function that it is given, or"
        " give it the whole batch."
    )


torch.library.register_vmap("ftp::local", _refuse_vmap)


class Apply(torch.autograd.Function):
    """Carries the op through autograd and torch.func, with its gradient."""

    @staticmethod
    def forward(pair: Pair, *xs: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        return tuple(OPS.local.default(list(xs), pair.forward.key))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pair: Pair = inputs[0]
        ctx.pair = pair
        ctx.set_materialize_grads(False)
        rough = [y for i, y in enumerate(output) if i not in pair.smooth]
        ctx.mark_non_differentiable(*rough)
        ctx.shapes = [(y.shape, y.dtype, y.device) for y in output]
        ctx.save_for_backward(
            *(
                (inputs[1 + i] if kind == "operand" else output[i])
                for kind, i in pair.given
                if kind != "cotangent"
            )
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:  # type: ignore[override]
        pair: Pair = ctx.pair
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
        raise TraceError(
            f"{at_line()}ftp.local is differentiated in forward mode (jvp, jacfwd); it has reverse"
            " mode only."
        )


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
