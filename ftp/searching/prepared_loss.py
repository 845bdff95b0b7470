"""A loss and its gradient, traced and ready to be planned."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ftp.api.arguments import Arguments
from ftp.dataclass import dataclass
from ftp.planning.graph import Node
from ftp.planning.known_passes import KnownPasses
from ftp.planning.layers.repeats import Folded, fold
from ftp.planning.plan import FixedLayouts
from ftp.planning.prepare import Prepared, prepared_once
from ftp.searching.marks import BlockOutput, marking, patterns_of
from ftp.sharding.arguments import argument_names
from ftp.sharding.mesh import Mesh, use_mesh
from ftp.sharding.pytree import flatten, leaf_names, leaf_paths
from ftp.sharding.spec import PartitionSpec
from ftp.tracing.gradient import grad_and_value
from ftp.tracing.trace import Traced, trace

Patterns = dict[str, PartitionSpec]


@dataclass(frozen=True)
class PreparedLoss:
    """A traced loss and its gradient, ready to be planned.

    Attributes:
        patterns: of the parameters.
        batch: the specs of the batch.
        mirrors: outputs that are sharded as a parameter is.
        known: results of passes that plans share.
    """

    traced: Traced
    prepared: Prepared
    patterns: dict[Node, str]
    batch: dict[Node, PartitionSpec]
    mirrors: dict[int, Node]
    known: KnownPasses

    def specs(self, patterns: Patterns) -> FixedLayouts:
        """The layouts that specs of patterns fix."""
        inputs = {node: patterns[p] for node, p in self.patterns.items()} | self.batch
        outputs = [
            inputs[self.mirrors[i]] if i in self.mirrors else PartitionSpec()
            for i in range(len(self.prepared.graph.outputs))
        ]
        return FixedLayouts(inputs, self.prepared.constraints, outputs)

    def folded(self, kept: int) -> Folded | None:
        """The program without most of its layers of equal patterns, which have equal specs; None if
        no layers repeat.

        Args:
            kept: layers kept at each end of a run of equal ones; 0: all.
        """
        graph, batch, patterns = self.prepared.graph, self.batch, self.patterns
        pins = self.prepared.constraints
        returned = {i: patterns[node] for i, node in self.mirrors.items()}

        def made() -> Folded | None:
            return fold(
                graph,
                lambda node: (batch.get(node), patterns.get(node), pins.get(node)),
                [returned.get(i) for i in range(len(graph.outputs))],
                self.known,
                kept,
            )

        return self.known.once(graph, "folded", kept, make=made) if kept else None

    def role(self, node: Node) -> str:
        """The role of an input, for reports."""
        if node in self.patterns:
            return "parameters"
        return "batch" if node in self.batch else "constants"


def prepared_loss(
    loss_fn: Callable[..., Any],
    traced: Traced,
    params: Any,
    batch: Any,
    given: Sequence[PartitionSpec],
    known: KnownPasses,
) -> PreparedLoss:
    """What plans of a loss' trace start from.

    Args:
        given: a spec for each leaf of the batch.
    """
    roots = ("params", *argument_names(loss_fn)[1:])  # the names that `shard` gives
    call, paths = Arguments((params, *batch), roots), leaf_paths(params)
    tensors = [i for i, leaf in enumerate(call.leaves) if isinstance(leaf, Tensor)]
    names, is_state = [call.names[i] for i in tensors], [i < len(paths) for i in tensors]
    prepared = prepared_once(known, traced.gm, names, is_state)
    inputs = dict(zip(tensors, prepared.arguments, strict=True))
    of_params = prepared.arguments[: len(paths)]
    return PreparedLoss(
        traced,
        prepared,
        dict(
            zip(of_params, patterns_of(paths, [n.results[0].ndim for n in of_params]), strict=True)
        ),
        {inputs[i]: s for i, s in enumerate(given, len(paths)) if i in inputs},
        dict(zip(traced.out_leaves[1:], of_params, strict=True)),
        known,
    )


def traced_loss(
    loss_fn: Any, params: Any, batch: Any, mesh: Mesh
) -> tuple[Traced, dict[str, set[BlockOutput]]]:
    """The marked trace of the loss and its gradient, and what numbered modules return."""
    leaves, tree = flatten((params, *batch))
    names = [*leaf_names(params, "params"), *leaf_names(batch, "batch")]
    with use_mesh(mesh), marking() as returned:
        traced = trace(grad_and_value(loss_fn), leaves, tree, mesh.device_type, names=names)
    return traced, returned
