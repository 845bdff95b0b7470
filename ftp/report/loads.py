"""Load balance: the rows that ranks exchange for a given batch, per rank and per expert."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ftp.dataclass import dataclass
from ftp.ops.ancestors import ancestors
from ftp.ops.exchange_rows import ALL_TO_ALL_ROWS, FIRST_ROWS
from ftp.ops.grouped_mm import GROUPED_MM
from ftp.partitioning.local_program import LocalProgram
from ftp.rules.local_op import as_module
from ftp.runtime.mesh_groups import groups_of
from ftp.runtime.program import Program, shard_of
from ftp.runtime.simulate import simulate

aten = torch.ops.aten


@dataclass(frozen=True)
class Load:
    """The rows that one dispatch sends for a batch, such as those of tokens to their experts.

    Attributes:
        source: the user's line; empty where it is a library's.
        parameter: the input that the grouped matmul of these rows reads as its matrices, such as
            ``params['layers.0.experts.up']``; empty where none does.
        rows: per rank, in mesh order, the number of rows that arrive.
        experts: per rank, the rows of each of its experts, which are the groups of the grouped
            matmul that reads the rows; empty where none does.
        room: the number of rows that a rank has room for.

    >>> load = Load("moe.py:8", "p['up']", ({"ep": 0}, {"ep": 1}), (6, 2), ((1, 5), (2, 0)), 8)
    >>> load.most
    1.5
    """

    source: str
    parameter: str
    ranks: tuple[dict[str, int], ...]
    rows: tuple[int, ...]
    experts: tuple[tuple[int, ...], ...]
    room: int

    @property
    def equal(self) -> float:
        """Rows per rank under an equal load."""
        return sum(self.rows) / len(self.rows)

    @property
    def most(self) -> float:
        """Rows of the busiest rank over those of an equal load: the least capacity factor."""
        return max(self.rows) / self.equal if any(self.rows) else 1.0

    def __str__(self) -> str:
        at = f" at {self.source}" if self.source else ""
        to = f" to {self.parameter}" if self.parameter else ""
        lines = [
            f"rows sent{to}{at}: {self.equal:.4g} a rank if equal, {max(self.rows)} at most"
            f" ({self.most:.3g} x), room for {self.room}"
        ]
        for rank, rows, experts in zip(self.ranks, self.rows, self.experts, strict=True):
            at = " ".join(f"{axis}={i}" for axis, i in rank.items())
            of = f", by expert {' '.join(map(str, experts))}" if experts else ""
            lines.append(f"  {at}: {rows}{of}")
        return "\n".join(lines)


class Loads(tuple[Load, ...]):
    """The loads of a program, in order; printed one after another.

    >>> print(Loads())
    no exchange of rows whose number depends on values
    """

    def __str__(self) -> str:
        return "\n".join(map(str, self)) or "no exchange of rows whose number depends on values"


def loads_of(program: Program, args: Sequence[torch.Tensor]) -> Loads:
    """Run all ranks in this process on whole tensors, and read the counts that they exchange."""
    mesh, coordinates = program.mesh, program.mesh.coordinates()
    programs, given, sites = [], [], []
    for coordinate in coordinates:
        local = program.local(coordinate)
        sites = _sites(local.gm.graph)
        watched = [x for counts, reader, _ in sites for x in (counts, *_ends(reader))]
        programs.append(LocalProgram(as_module(_watching(local.gm.graph, watched)), (), ()))
        shards = [
            shard_of(x, spec, mesh.axes, coordinate)
            for x, spec in zip(args, program.in_specs, strict=True)
        ]
        given.append([*shards, *program.constants, *local.offsets_at(coordinate)])
    feeds = [iter(values) for values in simulate(programs, given, groups_of(mesh))]
    found = []
    for _, reader, node in sites:
        counts = [next(feed) for feed in feeds]
        ends = [next(feed) for feed in feeds] if reader else []
        axis = node.meta.get("axis")  # none where a rank is alone
        arrived = [
            sent[:, coordinate[axis] if axis else 0].sum(0)
            for sent, coordinate in zip(counts, coordinates, strict=True)
        ]
        rows = tuple(int(a.sum()) for a in arrived)
        experts = tuple(tuple(e.diff(prepend=e.new_zeros(1)).tolist()) for e in ends)
        ranks, room = tuple(map(dict, coordinates)), int(node.args[2])  # type: ignore[arg-type]
        source = node.meta.get("source", "")
        name = _parameter(reader, program) if reader else ""
        found.append(Load(source, name, ranks, rows, experts or ((),) * len(rows), room))
    return Loads(found)


def _sites(graph: fx.Graph) -> list[tuple[fx.Node, fx.Node | None, fx.Node]]:
    """Per dispatch its counts, the first grouped matmul of its rows, and its exchange. The
    exchanges of results and gradients have the same counts and are left out.
    """
    found: dict[fx.Node, tuple[fx.Node, fx.Node | None, fx.Node]] = {}
    for node in graph.nodes:
        if node.target in (ALL_TO_ALL_ROWS, FIRST_ROWS) and not node.args[3]:
            counts: Any = node.args[1]
            found.setdefault(source_of_counts(counts), (counts, _reader(node), node))
    return list(found.values())


def source_of_counts(node: Any) -> fx.Node:
    """The node that makes an exchange's counts, which exchanges of one dispatch share."""
    while node.target in (aten.contiguous.default, aten.reshape.default):
        node = node.args[0]
    return node


def _reader(exchange: fx.Node) -> fx.Node | None:
    comes_from = {exchange}
    for node in _after(exchange):
        if comes_from.isdisjoint(node.all_input_nodes):
            continue
        if node.target is GROUPED_MM and node.args[0] in comes_from:
            return node
        comes_from.add(node)
    return None


def _ends(reader: fx.Node | None) -> list[fx.Node]:
    return [] if reader is None else [reader.args[2]]  # type: ignore[list-item]


def _parameter(reader: fx.Node, program: Program) -> str:
    """The first input that the matrices of a grouped matmul are computed from."""
    inputs = [node for node in reader.graph.nodes if node.op == "placeholder"]
    needed = ancestors([reader.args[1]])  # type: ignore[list-item]
    names = program.plan.graph.inputs
    return next((of.name for node, of in zip(inputs, names, strict=False) if node in needed), "")


def _after(node: fx.Node):
    while (node := node.next).op != "root":
        yield node


def _watching(graph: fx.Graph, watched: Sequence[fx.Node]) -> fx.Graph:
    """A copy of the graph that returns some of its values."""
    made, env = fx.Graph(), {}
    for node in graph.nodes:
        if node.op != "output":
            env[node] = made.node_copy(node, env.__getitem__)
    made.output(tuple(env[x] for x in watched))
    return made


def whole_tensors(program: Program, leaves: Sequence[Any]) -> list[torch.Tensor]:
    """The leaves of a call that the program takes, on its device."""
    return [leaves[i].to(program.mesh.device_type) for i in program.tensor_leaves]
