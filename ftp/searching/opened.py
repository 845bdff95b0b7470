"""A traced loss and its gradient, whose parameters' layouts are open."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor

from ftp.ops.constrain import pin_from_str, pin_to_str
from ftp.planning.graph import Graph, Node, Rewrite, Value
from ftp.planning.layers.repeats import Folded, fold
from ftp.planning.prepare import prepare
from ftp.searching.marks import Along, marked_pattern, marking, pattern_of, pin_along
from ftp.sharding.layout import Layout, nominal
from ftp.sharding.mesh import Mesh, use_mesh
from ftp.sharding.pytree import flatten, leaf_names, leaf_paths
from ftp.sharding.spec import PartitionSpec
from ftp.tracing.gradient import grad_and_value
from ftp.tracing.trace import Traced, trace


@dataclass(frozen=True)
class Opened:
    """A traced loss and its gradient. ``mirrors``: outputs that are sharded like a parameter.
    ``packs``: by axis and pattern, the cuts of tensors packed along a dim, such as q, k and v.
    """

    graph: Graph
    params: list[Node]
    patterns: dict[Node, str]
    batch: dict[Node, PartitionSpec]
    mirrors: dict[int, Node]
    folded: Folded | None
    packs: Mapping[tuple[str, str], Sequence[Layout]] = field(default_factory=dict)

    @cached_property
    def users(self) -> dict[Value, list[tuple[Node, int]]]:
        return self.graph.users()

    @cached_property
    def steps(self) -> dict[tuple[Any, ...], Any]:
        """The networks of axes that were built for this program (``AxisStep``)."""
        return {}

    def constrained(self, along: Along) -> "Opened":
        """The same with its marks as constraints, unless ``along`` is empty."""
        if not along:
            return self
        graph, copies = self.graph.copied()
        for node in graph.nodes:
            if node.kind == "constrain" and marked_pattern(pin_from_str(node.target)):
                node.target = pin_to_str(pin_along(along, node.results[0].shape))
        return self.after((graph, copies))

    def after(self, rewrite: Rewrite) -> "Opened":
        """The program after a pass."""
        graph, copies = rewrite
        return Opened(
            graph,
            [copies[n] for n in self.params],
            {copies[n]: p for n, p in self.patterns.items()},
            {copies[n]: s for n, s in self.batch.items()},
            {i: copies[n] for i, n in self.mirrors.items()},
            self.folded and self.folded.on(copies),
            self.packs,
        )

    def marks(self) -> dict[str, tuple[int, ...]]:
        """Per pattern of marked modules, the shape of their output."""
        nodes = [node for node in self.graph.nodes if node.kind == "constrain"]
        return {
            pattern: n.results[0].shape
            for n in nodes
            if (pattern := marked_pattern(pin_from_str(n.target)))
        }

    def members(self, pattern: str) -> list[Node]:
        return [node for node in self.params if self.patterns[node] == pattern]

    def nbytes(self, pattern: str) -> int:
        """Bytes of the parameters of a pattern, those of layers left out among them."""
        members = self.members(pattern)
        if self.folded is not None:
            of_layer = [n for n in members if self.folded.labels.get(n) == self.folded.stands_for]
            members += of_layer * self.folded.left_out
        return sum(nbytes_of(Value(node)) for node in members)


def nbytes_of(value: Value) -> int:
    """Bytes of a value on a rank."""
    return math.prod(map(nominal, value.shape)) * value.meta.dtype.itemsize


def traced_loss(loss_fn: Any, params: Any, batch: Any, mesh: Mesh) -> Traced:
    """The marked trace of the loss and its gradient."""
    leaves, tree = flatten((params, *batch))
    names = [*leaf_names(params, "params"), *leaf_names(batch, "batch")]
    with use_mesh(mesh), marking():
        return trace(grad_and_value(loss_fn), leaves, tree, mesh.device_type, names=names)


def opened(
    traced: Traced,
    params: Any,
    batch: Any,
    batch_specs: Sequence[PartitionSpec],
    is_folded: bool = True,
) -> Opened:
    leaves, _ = flatten((params, *batch))
    names = [*leaf_names(params, "params"), *leaf_names(batch, "batch")]
    paths = leaf_paths(params)
    tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    prepared = prepare(traced.gm, [names[i] for i in tensors], [i < len(paths) for i in tensors])
    graph, inputs = prepared.graph, dict(zip(tensors, prepared.arguments, strict=True))
    of_params = [inputs[i] for i in range(len(paths))]
    mirrors = dict(zip(traced.out_leaves[1:], of_params, strict=True))
    specs = {
        inputs[i]: spec
        for i, spec in zip(range(len(paths), len(leaves)), batch_specs, strict=True)
        if i in inputs
    }
    patterns = {node: pattern_of(path) for node, path in zip(of_params, paths, strict=True)}
    net = Opened(graph, of_params, patterns, specs, mirrors, None)
    returned = {out: patterns[node] for out, node in mirrors.items()}
    folded = fold(
        graph,
        lambda node: (specs.get(node), patterns.get(node)),
        [returned.get(i) for i in range(len(graph.outputs))],
    )
    if folded is None or not is_folded:
        return net
    few = {node: copy for copy, node in folded.origin.items() if node in specs or node in patterns}
    alike = {patterns[node]: copy for node, copy in few.items() if node in patterns}
    return Opened(
        folded.graph,
        [few[n] for n in of_params if n in few],
        {few[n]: p for n, p in patterns.items() if n in few},
        {few[n]: s for n, s in specs.items()},
        # The gradient of a parameter may be assigned to an adjacent layer: take any parameter with
        # the same sharding.
        {at: alike[patterns[mirrors[i]]] for at, i in enumerate(folded.kept) if i in mirrors},
        folded,
    )
