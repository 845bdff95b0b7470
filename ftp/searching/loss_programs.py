"""The programs of candidates: without most of their repeated layers for estimates, and in full."""

from collections.abc import Callable, Sequence
from functools import cached_property, wraps
from typing import Any

from ftp.api.shard import shard
from ftp.dataclass import dataclass
from ftp.functional.module_constraints import outputs_through
from ftp.ops.constrain import constrain
from ftp.planning.cost import Hardware
from ftp.planning.from_fx import decompose
from ftp.planning.known_passes import KnownPasses
from ftp.planning.layers.repeats import Folded
from ftp.planning.planner import plan_few
from ftp.report.lowered import Lowered
from ftp.runtime.program import Program
from ftp.searching.marks import Along, BlockOutput, is_markable, spec_along, with_marks
from ftp.searching.prepared_loss import Patterns, PreparedLoss, prepared_loss, traced_loss
from ftp.sharding.mesh import Mesh
from ftp.sharding.plan import plan
from ftp.sharding.spec import PartitionSpec
from ftp.tracing.trace import Traced


@dataclass
class LossPrograms:
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

    @property
    def traced(self) -> Traced:
        return self._marked[0]

    @property
    def returned(self) -> dict[str, set[BlockOutput]]:
        """What numbered modules return, by path."""
        return self._marked[1]

    @cached_property
    def _marked(self) -> tuple[Traced, dict[str, set[BlockOutput]]]:
        return traced_loss(self.loss_fn, self.params, self.batch, self.mesh)

    def few(
        self, patterns: Patterns, along: Along, kept: int, order: Sequence[str] | None
    ) -> tuple[Program, Folded | None] | None:
        """The program with ``kept`` layers at each end of a run of equal ones (0: all), and the
        fold; None if the layers get different plans.

        Args:
            order: plan the axes in this order alone.
        """
        loss = self.prepared(along)
        specs = loss.specs(patterns)
        folded = loss.folded(kept)
        found = plan_few(
            loss.prepared.graph,
            self.mesh.axes,
            specs,
            folded=folded,
            batch_inputs=loss.prepared.batch,
            data_axes=self.data_axes,
            hardware=self.hardware,
            decompose=decompose,
            known=self._known,
            order=order,
        )
        if found is None:
            return None
        inputs = (loss.prepared.graph if folded is None else folded.graph).inputs
        of = [node if folded is None else folded.origin[node] for node in inputs]
        program = Program(
            mesh=self.mesh,
            traced=loss.traced.gm,
            plan=found,
            tensor_leaves=tuple(range(len(inputs))),
            in_specs=tuple(specs.inputs.get(node, PartitionSpec()) for node in of),
            out_tree=loss.traced.out_tree,
            roles=tuple(map(loss.role, of)),
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
        traced = self.prepared(along).traced
        return step.lower_traced(traced, self.params, *self.batch, known=self._known)

    def loss(self, along: Along) -> Callable[..., Any]:
        """The loss with the outputs of numbered modules cut ``along``, as by ``functionalize(model,
        constraints=...)``; the loss itself if ``along`` is empty.
        """
        return _constrained(self.loss_fn, along) if along else self.loss_fn

    def prepared(self, along: Along) -> PreparedLoss:
        """What the programs are planned from, with the marks as constraints ``along``."""
        key = tuple(along.items())
        if key not in self._losses:
            traced = with_marks(self.traced, along)
            facts = self.params, self.batch, self.given, self._known
            self._losses[key] = prepared_loss(self.loss_fn, traced, *facts)
        return self._losses[key]

    @cached_property
    def _known(self) -> KnownPasses:
        return KnownPasses()

    @cached_property
    def _losses(self) -> dict[tuple[tuple[str, int], ...], PreparedLoss]:
        return {}


def _constrained(loss_fn: Callable[..., Any], along: Along) -> Callable[..., Any]:
    def pinned(path: str, out: Any, is_first: bool) -> Any:
        return constrain(out, spec_along(along), axes=tuple(along)) if is_markable(out) else out

    @wraps(loss_fn)
    def with_constraints(*args: Any) -> Any:
        with outputs_through(pinned):
            return loss_fn(*args)

    return with_constraints
