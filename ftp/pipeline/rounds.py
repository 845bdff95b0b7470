"""Cut a traced function whose inputs belong to stages, such as an optimizer's update, into rounds.

A value is computed on the rank that holds its operands. If several ranks hold them, as for a norm
over all gradients, ranks send each other their operands and every rank computes the value, in the
next round. A round is one subgraph for each rank, then one exchange.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ftp.dataclass import dataclass
from ftp.errors import CertificateError
from ftp.pipeline.check import Numbering
from ftp.pipeline.subgraphs import StageGraph, extracted

ANY, ALL = -1, -2  # computed where it is read; on every rank


@dataclass(frozen=True)
class Rounds:
    """A function in subgraphs.

    Attributes:
        subgraphs: per round, per rank of the axis its subgraph.
        shared: per round, the values sent to all ranks after the subgraphs: ``(name, rank)``.
        results: per output the name of its value.
    """

    subgraphs: tuple[Mapping[int, StageGraph], ...]
    shared: tuple[tuple[tuple[str, int], ...], ...]
    results: tuple[str, ...]


def split_in_rounds(
    gm: fx.GraphModule, holders: Sequence[int], due: Sequence[int], ranks: int
) -> Rounds:
    """The subgraphs of a functional graph.

    Args:
        holders: per input, constants too, the rank that holds it, or `ALL`.
        due: per output the rank that returns it, or `ALL`.
        ranks: of the axis.
    """
    graph = gm.graph
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    nodes = [n for n in graph.nodes if n.op == "call_function"]
    outputs: list[fx.Node] = list(graph.output_node().args[0])  # type: ignore[arg-type]
    home = {n: (ANY if at == ALL else at) for n, at in zip(inputs, holders, strict=True)}
    level = dict.fromkeys(inputs, 0)
    shared: dict[fx.Node, int] = {}  # values sent to all ranks, and after which round
    for node in nodes:
        reads = node.all_input_nodes
        at = {home[x] for x in reads} - {ANY}
        own = at - {ALL}
        level[node] = max((level[x] for x in reads), default=0)
        if not at:
            home[node] = ANY
        elif len(own) == 1 and (ALL not in at or not _is_scalar(node)):
            home[node] = own.pop()
        else:
            home[node] = ALL
        if home[node] == ALL:
            for x in reads:
                if home[x] not in (ANY, ALL):
                    shared.setdefault(x, level[x])
                    level[node] = max(level[node], level[x] + 1)
    for node, at in zip(outputs, due, strict=True):
        if home[node] not in (ANY, ALL, at):
            shared.setdefault(node, level[node])
    count = max([0, *(level[n] for n in nodes), *(at + 1 for at in shared.values())]) + 1
    made: list[dict[int, StageGraph]] = [{} for _ in range(count)]
    for rank in range(ranks):
        own = [n for n in nodes if home[n] in (ANY, ALL, rank)]
        _subgraphs_of(rank, own, inputs, outputs, due, home, level, shared, made)
    order = {n: i for i, n in enumerate([*inputs, *nodes])}
    handed = [
        tuple(
            (n.name, home[n])
            for n, at in sorted(shared.items(), key=lambda s: order[s[0]])
            if at == r
        )
        for r in range(count)
    ]
    return Rounds(tuple(made), tuple(handed), tuple(n.name for n in outputs))


def _is_scalar(node: fx.Node) -> bool:
    val = node.meta.get("val")
    return isinstance(val, torch.Tensor) and not val.ndim


def _subgraphs_of(
    rank: int,
    nodes: Sequence[fx.Node],
    inputs: Sequence[fx.Node],
    outputs: Sequence[fx.Node],
    due: Sequence[int],
    home: Mapping[fx.Node, int],
    level: Mapping[fx.Node, int],
    shared: Mapping[fx.Node, int],
    made: list[dict[int, StageGraph]],
) -> None:
    """Add a rank's subgraphs, the last round first: a round reads results of earlier ones.

    Args:
        nodes: that the rank may compute.
    """
    number, mine = {n: i for i, n in enumerate(inputs)}, set(nodes)
    own = [
        n
        for n, at in zip(outputs, due, strict=True)
        if n not in number and at in (ALL, rank) and home[n] in (ANY, ALL, rank)
    ]
    wanted = {*own, *(n for n in shared if home[n] == rank and n not in number)}
    asked: dict[fx.Node, int] = {}  # read only by later rounds of this rank, in their order
    for at in reversed(range(len(made))):
        roots = [n for n in nodes if n in wanted and level[n] == at]
        needed, here = set(roots), set()
        for node in reversed(nodes):
            if node in needed and level[node] == at:
                here.add(node)
                needed.update(node.all_input_nodes)
        # A tuple stays in its round; its parts are read by later ones.
        wanted.update(n for n in needed if n not in here and n not in number and n in mine)
        if not here:
            continue
        # Values that this rank returns or reads later come first, in the order in which later
        # rounds read them or their operands: ranks with equal layers have equal subgraphs.
        first_read = {
            n: min(asked.get(x, len(asked)) for x in _in_order([n], here))
            for n in (roots if asked else ())
        }
        roots.sort(key=lambda n: (home[n] != rank, asked.get(n, len(asked)), first_read.get(n, 0)))
        count = sum(home[n] == rank or n in asked for n in roots)
        known = {n: i for i, n in enumerate(_in_order(roots[:count], here))}
        roots[count:] = sorted(roots[count:], key=lambda n: known.get(n, len(known)))
        order = _in_order(roots, here)
        reads = [n for n in order if n not in here]
        foreign = [n for n in reads if n in number and home[n] not in (ANY, rank)]
        given = [n for n in reads if n in number and home[n] in (ANY, rank)]
        read = [n for n in reads if n not in number]
        later = [n for n in (*read, *given) if n not in shared]
        asked |= {n: i for i, n in enumerate(later, len(asked))}
        gm = extracted((*given, *foreign, *read), [n for n in order if n in here], roots)
        made[at][rank] = StageGraph(
            "F",
            rank,
            gm,
            tuple(number[n] for n in given),
            (),
            tuple(n.name for n in (*foreign, *read)),
            (),
            tuple(n.name for n in roots),
        )


def _in_order(roots: Sequence[fx.Node], here: Collection[fx.Node]) -> list[fx.Node]:
    """The nodes that are computed ``here`` and their operands, operands first. The order depends on
    no other nodes of the graph.
    """
    order: dict[fx.Node, None] = {}
    for root in roots:
        pending = [root]
        while pending:
            node = pending[-1]
            left = [n for n in node.all_input_nodes if n not in order] if node in here else []
            if left:
                pending += reversed(left)
            else:
                order[node] = None
                pending.pop()
    return list(order)


def check_rounds(traced: fx.Graph, rounds: Rounds, due: Sequence[int], ranks: int) -> None:
    """Raise unless every rank's results are those of the traced function.

    Raises:
        CertificateError: a value that is missing or differs. That is a fault of ftp: please
            report it.
    """
    numbering = Numbering()
    inputs = [node for node in traced.nodes if node.op == "placeholder"]
    roots = [numbering.of(("input", i)) for i in range(len(inputs))]
    wanted = numbering.run(traced, roots)
    names = {node.name: number for node, number in zip(inputs, roots, strict=True)}
    held: list[dict[str, int]] = [dict[str, int]() for _ in range(ranks)]
    for subgraphs, shared in zip(rounds.subgraphs, rounds.shared, strict=True):
        for rank, subgraph in subgraphs.items():
            if missing := [name for name in subgraph.values if name not in held[rank]]:
                raise CertificateError(f"Rank {rank} reads %{missing[0]}, which it does not hold.")
            given = [
                *(roots[i] for i in subgraph.params),
                *(held[rank][n] for n in subgraph.values),
            ]
            found = numbering.run(subgraph.gm.graph, given)
            held[rank].update(zip(subgraph.outputs, found, strict=True))
        for name, owner in shared:
            number = held[owner].get(name, names.get(name))
            if number is None:
                raise CertificateError(f"Rank {owner} hands on %{name}, which it does not hold.")
            for own in held:
                own[name] = number
    for name, number, at in zip(rounds.results, wanted, due, strict=True):
        for rank in range(ranks) if at == ALL else (at,):
            if held[rank].get(name, names.get(name)) != number:
                raise CertificateError(f"Rank {rank} returns %{name}, whose value differs.")


def text_of(rounds: Rounds) -> str:
    """The rounds as text that is equal on all ranks."""
    parts: list[Any] = [
        (r, rank, subgraph.params, subgraph.values, subgraph.outputs)
        for r, subgraphs in enumerate(rounds.subgraphs)
        for rank, subgraph in sorted(subgraphs.items())
    ]
    return f"{parts} {rounds.shared} {rounds.results}"
