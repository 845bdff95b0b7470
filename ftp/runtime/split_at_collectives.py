"""Split a rank's graph into subgraphs at its collectives, so that equal subgraphs, such as those of
repeated layers, are compiled once. Little fusion is lost: an op before a collective cannot be fused
with an op that reads its result.
"""

import cmath
import hashlib
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from ftp.dataclass import dataclass
from ftp.ops.choose import BranchPath
from ftp.ops.fused_optimizer import COUNT_UP, UPDATES
from ftp.ops.mapped_arguments import mapped_arguments
from ftp.ops.philox import AS_TENSOR_OPS
from ftp.passes.aliasing import WAIT, is_view, read_until
from ftp.passes.onednn_matmuls import BY_ONEDNN
from ftp.torch_internals.op_types import OpOverload

aten = torch.ops.aten
_KERNELS = {update.kernel for update in UPDATES.values()} | {COUNT_UP}
_MATMULS = (aten.mm.default, aten.bmm.default, BY_ONEDNN)


@dataclass(frozen=True)
class Subgraph:
    """A subgraph whose ops are compiled together.

    Attributes:
        nodes: of the whole graph, in its order.
        graph: takes ``inputs``, returns ``outputs`` and then the values of ``writes``.
        inputs, outputs: nodes of the whole graph.
        writes: pairs (value, input) of nodes of the whole graph: the value is written to the
            input's memory.
        numbers: nodes of the whole graph whose numbers are constants of ``graph``.
    """

    nodes: Sequence[fx.Node]
    graph: fx.Graph = field(default_factory=fx.Graph)
    inputs: list[fx.Node] = field(default_factory=list)
    outputs: list[fx.Node] = field(default_factory=list)
    writes: list[tuple[fx.Node, fx.Node]] = field(default_factory=list)
    numbers: list[fx.Node] = field(default_factory=list)

    def values(self) -> list[Any]:
        """Fake tensors of the inputs, and symbolic numbers."""
        return [node.meta["val"] for node in self.inputs]

    @property
    def is_symbolic(self) -> bool:
        """Whether its inputs have symbolic sizes."""
        return any(map(_is_symbolic, self.inputs))

    def key(self) -> str:
        """A hash that is equal for subgraphs that one compilation serves."""
        at = {node: f"%{i}" for i, node in enumerate(self.graph.nodes)}
        lines = [
            f"{tuple(v.shape)} {v.stride()} {v.dtype} {v.device}"
            if isinstance(v, torch.Tensor)
            else str(v)
            for v in self.values()
        ]
        lines += [
            f"{n.op} {n.target} {map_arg((n.args, n.kwargs), at.__getitem__)}"
            for n in self.graph.nodes
            if n.op != "placeholder"
        ]
        lines += [f"to {self.inputs.index(old)}" for _, old in self.writes]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32]


def split(
    graph: fx.Graph,
    numbers: Mapping[fx.Node, Any],
    writes: Mapping[fx.Node, fx.Node],
    symbols: Sequence[fx.Node] = (),
) -> list[Subgraph]:
    """The subgraphs of a graph from `with_values`. Nodes in no subgraph, collectives and single
    matmuls, run eagerly. A view is recomputed in every subgraph that uses it, so that no two inputs
    of a subgraph share memory.

    Args:
        numbers: the values of inputs that are numbers, which become constants.
        symbols: inputs that are the numbers from which symbolic shapes are computed; inputs of
            every subgraph with symbolic shapes.
        writes: value -> the input that it should be written to; ignored where a later subgraph
            still reads the input.
    """
    for node in list(graph.nodes):
        for item in reversed(node.users):
            if item.target is operator.getitem:
                node.append(item)  # a subgraph returns tensors, not tuples of them
    nodes = list(graph.nodes)
    position = {node: at for at, node in enumerate(nodes)}
    last = _last_reads(nodes, position)
    runs: list[list[fx.Node]] = [[]]
    branch: BranchPath = ()
    for node in nodes:
        if node.meta.get("branch", ()) != branch:
            branch = node.meta.get("branch", ())
            runs.append([])
        if node.op != "call_function" or _stands_alone(node):
            runs.append([])
        else:
            runs[-1].append(node)
    runs = [
        run
        for run in runs
        if any(
            not is_view(node)
            and node.target not in _MATMULS
            and node.target is not aten.detach.default
            for node in run
        )
    ]
    inside = {node for run in runs for node in run}
    wholes = [
        sorted(
            {*run, *(view for node in run for view in _views_behind(node))},
            key=position.__getitem__,
        )
        for run in runs
    ]
    needed = {x for node in nodes if node not in inside for x in node.all_input_nodes}
    needed |= {
        x for whole in wholes for node in whole for x in node.all_input_nodes if x not in whole
    }
    found = []
    for run, whole in zip(runs, wholes, strict=True):
        mine = set(run)
        pairs = [
            (new, old)
            for new, old in writes.items()
            if new in mine and last[old] <= position[run[-1]]
        ]
        outputs = [node for node in run if node in needed]
        found.append(_piece(run, whole, outputs, pairs, numbers, symbols))
    return found


def _last_reads(nodes: Sequence[fx.Node], position: Mapping[fx.Node, int]) -> dict[fx.Node, int]:
    """Per input, the position of the last use of it or a view of it, outputs aside."""
    last: dict[fx.Node, int] = {}
    for node in nodes:
        for operand in node.all_input_nodes if node.op != "output" else ():
            while operand.op == "call_function" and is_view(operand):
                operand = operand.all_input_nodes[0]
            last[operand] = max(last.get(operand, 0), read_until(node, position))
    return last


def _stands_alone(node: fx.Node) -> bool:
    if "collective" in node.meta or node.target is WAIT or node.target in _KERNELS:
        return True
    if node.target is operator.getitem:
        return _stands_alone(node.all_input_nodes[0])
    if node.target in AS_TENSOR_OPS:
        return is_drawn_by_itself(node)
    if any(map(_has_no_text, (*node.args, *node.kwargs.values()))):
        return True
    return node.target not in _MATMULS and (
        not isinstance(node.target, OpOverload) or node.target.namespace != "aten"
    )


def _has_no_text(x: Any) -> bool:
    """Whether an argument is a complex number that inductor writes as ``1-infj``, a name."""
    return isinstance(x, complex) and not cmath.isfinite(x)


def is_drawn_by_itself(node: fx.Node) -> bool:
    """Whether a node draws random words by ftp's compiled C, which is faster on a CPU than
    inductor's kernel.
    """
    return node.meta["val"].device.type == "cpu"


def _views_behind(node: fx.Node) -> list[fx.Node]:
    """The views among a node's operands, and their operands that are views, and so on."""
    found, stack = [], list(node.all_input_nodes)
    while stack:
        view = stack.pop()
        if (
            view.op == "call_function"
            and not _stands_alone(view)
            and is_view(view)
            and view.target is not operator.getitem
        ):
            (base, *_) = view.all_input_nodes
            if _storage(view) == _storage(base):
                found.append(view)
                stack.append(base)
    return found


def _is_symbolic(node: fx.Node) -> bool:
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return value._has_symbolic_sizes_strides
    return isinstance(value, torch.SymInt | torch.SymFloat)


def _storage(node: fx.Node) -> int | None:
    value = node.meta.get("val")
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None


def _piece(
    run: list[fx.Node],
    whole: list[fx.Node],
    outputs: list[fx.Node],
    writes: list[tuple[fx.Node, fx.Node]],
    numbers: Mapping[fx.Node, Any],
    symbols: Sequence[fx.Node],
) -> Subgraph:
    written = {new for new, _ in writes}  # readers get them from the input's memory
    subgraph, mine = (
        Subgraph(run, outputs=[node for node in outputs if node not in written], writes=writes),
        set(whole),
    )
    env: dict[fx.Node, Any] = {}
    operands = [x for node in whole for x in node.all_input_nodes if x not in mine]
    known = dict.fromkeys([*operands, *(old for _, old in writes)])
    for x in dict.fromkeys([*symbols, *known]) if any(map(_is_symbolic, known)) else known:
        if x in numbers:
            subgraph.numbers.append(x)
            env[x] = numbers[x]
        else:
            subgraph.inputs.append(x)
            env[x] = subgraph.graph.placeholder(f"x{len(subgraph.inputs)}")
    for node in whole:
        args, kwargs = mapped_arguments(node, env.__getitem__)
        target: Any = node.target
        env[node] = subgraph.graph.call_function(target, args, kwargs)
    subgraph.graph.output(
        tuple(env[node] for node in (*subgraph.outputs, *(new for new, _ in writes)))
    )
    return subgraph


def with_subgraphs(
    graph: fx.Graph,
    subgraphs: Sequence[Subgraph],
    runs: Sequence[Callable[[list[Any]], Sequence[Any]]],
) -> fx.Graph:
    """The graph with each subgraph as one call from a list of its inputs to its outputs."""
    place = {node: at for at, subgraph in enumerate(subgraphs) for node in subgraph.nodes}
    new: fx.Graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    done: set[int] = set()
    for node in graph.nodes:
        at = place.get(node)
        if at is None:
            env[node] = new.node_copy(node, env.__getitem__)
        elif at not in done:
            done.add(at)
            subgraph = subgraphs[at]
            # Make the list by a call of its own: then only the list holds values whose last use is
            # here, and the subgraph frees them as it runs.
            before = new._root.prev
            given = new.call_function(_listed, tuple(env[x] for x in subgraph.inputs))
            call = new.call_function(runs[at], (given,))
            env.update(
                {
                    output: new.call_function(operator.getitem, (call, i))
                    for i, output in enumerate(subgraph.outputs)
                }
            )
            env.update(
                {
                    value: new.call_function(aten.detach.default, (env[old],))
                    for value, old in subgraph.writes
                }
            )
            while before is not new._root.prev:
                before = before.next
                before.meta["branch"] = node.meta.get("branch", ())
    return new


def _listed(*values: Any) -> list[Any]:
    return list(values)
