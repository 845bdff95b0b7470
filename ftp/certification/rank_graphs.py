"""The ranks' graphs without writes to memory, and the op that each node belongs to."""

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import fx

from ftp.certification.branches import branch_of
from ftp.certification.cells import Cell
from ftp.certification.certificate import Certificate, Operation
from ftp.certification.collective_semantics import COLLECTIVES
from ftp.certification.op_matching import COPIES
from ftp.certification.progression import Index
from ftp.certification.purify import without_writes
from ftp.certification.ranks import MeshIndex, shrunk
from ftp.certification.unsound import Refused


class RankGraphs:
    def __init__(self, certificate: Certificate, operations: Mapping[str, Operation]):
        self.certificate, self.operations = certificate, operations
        self._pure: dict[int, fx.Graph] = {}
        self._offsets: dict[Cell, dict[fx.Node, Index]] = {}

    @cached_property
    def pure(self) -> list[fx.Graph]:
        """The graphs without writes to memory."""
        return [self.without_writes(graph) for graph in range(len(self.certificate.ranks.graphs))]

    def without_writes(self, graph: int) -> fx.Graph:
        """A graph without writes to memory.

        Raises:
            Unsound: a write to memory that must not change.
        """
        if graph not in self._pure:
            given = self.certificate.ranks.graphs[graph]
            self._pure[graph] = without_writes(given, self.certificate.donated)
        return self._pure[graph]

    def first(self, graph: int) -> MeshIndex:
        return self.certificate.ranks.first(graph)

    @cached_property
    def local_ops(self) -> list[dict[str, list[fx.Node]]]:
        """Per graph ``{op's name: nodes}``, by the nodes' ``meta["origin"]``."""
        found: list[dict[str, list[fx.Node]]] = []
        for graph in self.pure:
            found.append({})
            for node in graph.nodes:
                if node.op == "call_function" and self.is_operation(node):
                    found[-1].setdefault(node.meta["origin"], []).append(node)
        return found

    def is_operation(self, node: fx.Node) -> bool:
        found = self.operations.get(node.meta.get("origin", ""))
        return found is not None and found.target is not None and found.target not in COPIES

    @cached_property
    def collectives(self) -> list[list[fx.Node]]:
        return [[n for n in g.nodes if n.target in COLLECTIVES] for g in self.pure]

    @cached_property
    def position(self) -> dict[fx.Node, int]:
        return {n: i for nodes in self.collectives for i, n in enumerate(nodes)}

    @cached_property
    def placeholders(self) -> list[dict[fx.Node, int]]:
        return [{n: i for i, n in enumerate(g.nodes) if n.op == "placeholder"} for g in self.pure]

    def offsets(self, cell: Cell) -> dict[fx.Node, Index]:
        """``{offset input: values on the ranks of a cell}``, arrays with a dim for each axis."""
        if cell not in self._offsets:
            of_ranks = self.certificate.ranks.offsets[cell.graph]
            nodes = list(self.placeholders[cell.graph])[self.inputs :]
            if len(of_ranks) != len(nodes):
                raise Refused(
                    f"{len(of_ranks)} offsets are given to a program that takes {len(nodes)}"
                )
            self._offsets[cell] = {
                node: shrunk(_within(values, cell))
                for node, values in zip(nodes, of_ranks, strict=True)
            }
        return self._offsets[cell]

    def signature(self, node: fx.Node) -> str:
        """A collective as text that must be equal on all ranks. It leaves out sizes: only the
        collective's peers must agree on them.
        """
        group: Any = node.args[-1]
        given = [a for a in node.args[1:-1] if not isinstance(a, list | tuple | fx.Node)]
        options = ", ".join(map(str, given))
        axes = self.certificate.groups.get(group, group)
        called = f"{node.target.__name__}({options}) over {axes!r}"  # type: ignore[union-attr]
        branch = branch_of(node)
        return f"{called} in branch {branch}" if branch else called

    @cached_property
    def device(self) -> torch.device:
        for graph in self.certificate.ranks.graphs:
            for node in graph.nodes:
                if isinstance(found := node.kwargs.get("device"), torch.device):
                    return found
        return torch.device("cpu")

    @cached_property
    def inputs(self) -> int:
        """Number of tensor inputs; the placeholders after them are offsets."""
        return sum(o.target is None for o in self.operations.values())


def _within(of_ranks: Index, cell: Cell) -> Index:
    """The values on the ranks of a cell."""
    at = [at if n > 1 else (0,) for n, at in zip(of_ranks.shape, cell.at, strict=True)]
    return of_ranks[np.ix_(*at)]
