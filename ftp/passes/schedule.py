"""The order of a rank's graph: collectives early, what they give late, and outputs as soon as nothing they wait for is under way."""

from collections.abc import Iterable

from torch import fx
from torch.fx.node import map_arg

from ftp.localize import RankGraph


def schedule(graph: fx.Graph) -> fx.Graph:
    """The same nodes in an order that hides communication; collectives keep theirs, on every rank alike.

    Everything is computed when it is first needed: by a collective, in the order of these, or by an output. Between the start of a
    collective and the first use of its result stand the outputs that depend on earlier collectives only. In a train step these are the
    products for the weights' gradients and the weights' updates; after an update its gradient is needed no more.
    """
    nodes = list(graph.nodes)
    position = {node: i for i, node in enumerate(nodes)}
    collectives = [node for node in nodes if "collective" in node.meta]
    number = {node: i for i, node in enumerate(collectives)}
    latest = _latest_collective(nodes, number)
    returned = graph.output_node().all_input_nodes
    pending = sorted(dict.fromkeys(returned), key=lambda node: (latest[node], position[node]))
    new = RankGraph()
    env: dict[fx.Node, fx.Node] = {}

    def emit(wanted: Iterable[fx.Node]) -> None:
        missing, stack = set(), [node for node in wanted if node not in env]
        while stack:
            node = stack.pop()
            if node not in missing:
                missing.add(node)
                stack += [operand for operand in node.all_input_nodes if operand not in env]
        for node in sorted(missing, key=position.__getitem__):
            env[node] = new.node_copy(node, env.__getitem__)

    emit(node for node in nodes if node.op == "placeholder")
    at = 0
    for i, collective in enumerate(collectives):
        emit([collective])
        while at < len(pending) and latest[pending[at]] < i:
            emit([pending[at]])
            at += 1
    emit(node for node in nodes if node.op != "output")
    new.output(map_arg(graph.output_node().args[0], env.__getitem__))
    new.output_node().meta.update(graph.output_node().meta)
    return new


def _latest_collective(nodes: Iterable[fx.Node], number: dict[fx.Node, int]) -> dict[fx.Node, int]:
    """Per node the number of the last collective that it depends on, itself included; -1 for none."""
    latest: dict[fx.Node, int] = {}
    for node in nodes:
        latest[node] = max([number.get(node, -1), *(latest[operand] for operand in node.all_input_nodes)])
    return latest
