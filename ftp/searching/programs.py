"""The programs of candidates: without most of their repeated layers for estimates, and in full."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, wraps
from typing import Any

from torch import Tensor

from ftp.api.arguments import Arguments
from ftp.api.shard import shard
from ftp.functional.module_constraints import outputs_through
from ftp.ops.constrain import constrain
from ftp.planning.cost import Hardware
from ftp.planning.from_fx import decompose
from ftp.planning.graph import Node
from ftp.planning.known_passes import KnownPasses
from ftp.planning.layers.repeats import Folded, fold
from ftp.planning.plan import FixedLayouts
from ftp.planning.planner import plan_few
from ftp.planning.prepare import Prepared, prepared_once
from ftp.report.lowered import Lowered
from ftp.runtime.program import Program
from ftp.searching.marks import Along, is_markable, pattern_of, spec_along, with_marks
from ftp.searching.opened import traced_loss
from ftp.sharding.arguments import argument_names
from ftp.sharding.mesh import Mesh
from ftp.sharding.plan import plan
from ftp.sharding.pytree import leaf_paths
from ftp.sharding.spec import PartitionSpec
from ftp.tracing.trace import Traced

Patterns = dict[str, PartitionSpec]


@dataclass
class Programs:
    """The programs of a loss on a mesh. What does not depend on specs is done once for all, and
    passes are not repeated for specs that differ on other axes only.

    Attributes:
        given: a spec for each leaf of the batch.
    """

    loss_fn: Callable[..., Any]
    params: Any
    batch: Any
    batch_specs: Any
    given: Sequence[PartitionSpec]
    mesh: Mesh
    data_axes: tuple[str, ...]
    hardware: Hardware

    @cached_property
    def traced(self) -> Traced:
        return traced_loss(self.loss_fn, self.params, self.batch, self.mesh)

    def few(
        self, patterns: Patterns, along: Along, is_folded: bool
    ) -> tuple[Program, Folded | None] | None:
        """The program without its repeated layers, unless they are not to be folded, and the fold;
        None if the layers get different plans.
        """
        source = self._source(along)
        specs = source.specs(patterns)
        folded = source.folded if is_folded else None
        found = plan_few(
            source.prepared.graph,
            self.mesh.axes,
            specs,
            folded=folded,
            batch_inputs=source.prepared.batch,
            data_axes=self.data_axes,
            hardware=self.hardware,
            decompose=decompose,
            known=self._known,
        )
        if found is None:
            return None
        inputs = (source.prepared.graph if folded is None else folded.graph).inputs
        of = [node if folded is None else folded.origin[node] for node in inputs]
        program = Program(
            mesh=self.mesh,
            traced=source.traced.gm,
            plan=found,
            tensor_leaves=tuple(range(len(inputs))),
            in_specs=tuple(specs.inputs.get(node, PartitionSpec()) for node in of),
            out_tree=source.traced.out_tree,
            roles=tuple(map(source.role, of)),
            hardware=self.hardware,
        )
        return program, folded and folded.on(dict(zip(inputs, found.graph.inputs, strict=True)))

    def whole(self, patterns: Patterns, along: Along, bucket: bool) -> Lowered:
        """The program of all layers, as ``shard`` makes it."""
        step = shard(
            self.loss(along),
            self.mesh,
            plan(self.params, patterns),
            batch_specs=self.batch_specs,
            data_axes=self.data_axes,
            hardware=self.hardware,
            bucket=bucket,
        )
        traced = self._source(along).traced
        return step.lower_traced(traced, self.params, *self.batch, known=self._known)

    def loss(self, along: Along) -> Callable[..., Any]:
        """The loss with the outputs of numbered modules cut ``along``, as by ``functionalize(model,
        constraints=...)``; the loss itself if ``along`` is empty.
        """
        return _constrained(self.loss_fn, along) if along else self.loss_fn

    @cached_property
    def _known(self) -> KnownPasses:
        return KnownPasses()

    @cached_property
    def _sources(self) -> dict[tuple[tuple[str, int], ...], "_Source"]:
        return {}

    def _source(self, along: Along) -> "_Source":
        key = tuple(along.items())
        if key not in self._sources:
            traced = with_marks(self.traced, along)
            roots = ("params", *argument_names(self.loss_fn)[1:])  # the names that `shard` gives
            call = Arguments((self.params, *self.batch), roots)
            paths = leaf_paths(self.params)
            tensors = [i for i, leaf in enumerate(call.leaves) if isinstance(leaf, Tensor)]
            names, is_state = [call.names[i] for i in tensors], [i < len(paths) for i in tensors]
            prepared = prepared_once(self._known, traced.gm, names, is_state)
            state = prepared.arguments[: len(paths)]
            self._sources[key] = _Source(
                traced,
                prepared,
                dict(zip(state, map(pattern_of, paths), strict=True)),
                {
                    node: self.given[i - len(paths)]
                    for i, node in zip(tensors, prepared.arguments, strict=True)
                    if i >= len(paths)
                },
                dict(zip(traced.out_leaves[1:], state, strict=True)),
                self._known,
            )
        return self._sources[key]


@dataclass(frozen=True)
class _Source:
    """A traced loss and its gradient, ready to be planned under specs.

    Attributes:
        patterns: of the parameters.
        batch: the specs of the batch.
        mirrors: outputs that are sharded as a parameter is.
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

    @cached_property
    def folded(self) -> Folded | None:
        """The program without most layers of equal patterns, which have equal specs."""
        returned = {i: self.patterns[node] for i, node in self.mirrors.items()}
        return fold(
            self.prepared.graph,
            lambda node: (
                self.batch.get(node),
                self.patterns.get(node),
                self.prepared.constraints.get(node),
            ),
            [returned.get(i) for i in range(len(self.prepared.graph.outputs))],
            self.known,
        )

    def role(self, node: Node) -> str:
        return (
            "parameters"
            if node in self.patterns
            else "batch"
            if node in self.batch
            else "constants"
        )


def _constrained(loss_fn: Callable[..., Any], along: Along) -> Callable[..., Any]:
    def pinned(path: str, out: Tensor) -> Tensor:
        return constrain(out, spec_along(along), axes=tuple(along)) if is_markable(out) else out

    @wraps(loss_fn)
    def with_constraints(*args: Any) -> Any:
        with outputs_through(pinned):
            return loss_fn(*args)

    return with_constraints
