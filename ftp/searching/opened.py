"""A loss and its gradient, whose parameters' layouts are open."""

from collections.abc import Mapping, Sequence
from dataclasses import field
from functools import cached_property
from typing import Any

from ftp.dataclass import dataclass
from ftp.planning.graph import Graph, Node, Rewrite, Value
from ftp.planning.layers.repeats import Folded, Ties
from ftp.planning.problem import NotAlike
from ftp.searching.prepared_loss import PreparedLoss
from ftp.sharding.layout import Layout, nominal
from ftp.sharding.spec import PartitionSpec


@dataclass(frozen=True)
class Opened:
    """A loss and its gradient. ``mirrors``: outputs that are sharded like a parameter.
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
    def ties(self) -> Ties | None:
        """The tied layers; None if no layers are left out.

        Raises:
            NotAlike: an axis gave the two layers different layouts.
        """
        ties = self.folded and self.folded.ties(self.graph)
        if self.folded and ties is None:
            raise NotAlike
        return ties

    @cached_property
    def steps(self) -> dict[tuple[Any, ...], Any]:
        """The networks of axes that were built for this program (``AxisStep``)."""
        return {}

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

    def members(self, pattern: str) -> list[Node]:
        return [node for node in self.params if self.patterns[node] == pattern]

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Bytes of the parameters of each pattern, those of layers left out among them; the largest
        first.
        """
        found, few = dict.fromkeys(self.patterns.values(), 0), self.folded
        for node, pattern in self.patterns.items():
            count = 1
            if few is not None and few.labels.get(node) == few.stands_for:
                count += few.left_out
            found[pattern] += Value(node).nbytes(nominal) * count
        return dict(sorted(found.items(), key=lambda item: -item[1]))


def opened(loss: PreparedLoss, kept: int) -> Opened:
    """The program of a loss, with ``kept`` layers at each end of a run of equal ones; 0: all."""
    folded, patterns = loss.folded(kept), loss.patterns
    if folded is None:
        graph = loss.prepared.graph
        return Opened(graph, [*patterns], patterns, loss.batch, loss.mirrors, None)
    few = {node: copy for copy, node in folded.origin.items()}
    alike = {p: few[node] for node, p in patterns.items() if node in few}
    return Opened(
        folded.graph,
        [few[node] for node in patterns if node in few],
        {few[node]: p for node, p in patterns.items() if node in few},
        {few[node]: spec for node, spec in loss.batch.items()},
        # The gradient of a parameter may be assigned to an adjacent layer: take any parameter with
        # the same sharding.
        {
            at: alike[patterns[loss.mirrors[i]]]
            for at, i in enumerate(folded.kept)
            if i in loss.mirrors
        },
        folded,
    )
