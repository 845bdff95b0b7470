"""Gradients added to those of earlier microbatches inside the backward pass, each as it comes."""

from collections.abc import Collection, Iterator, Set
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from ftp.errors import CertificateError
from ftp.pipeline.check import Numbering
from ftp.pipeline.subgraphs import StageGraph, Stages
from ftp.rules.local_op import RankGraph, as_module
from ftp.rules.op_kinds import VIEWS_AND_COPIES

aten = torch.ops.aten


def with_sums(
    subgraph: StageGraph, gradients: Collection[str], kept: Collection[str]
) -> StageGraph:
    """The subgraph with a further input for each output in ``gradients``, the sum so far, and the
    new sum as output.

    Args:
        kept: gradients that other subgraphs read, which stay outputs.
    """
    names = tuple(name for name in subgraph.outputs if name in gradients)
    if not names:
        return subgraph
    graph, env = RankGraph(), dict[fx.Node, fx.Node]()
    old = subgraph.gm.graph
    returned: Any = old.output_node().args[0]
    outputs: dict[str, fx.Node] = dict(zip(subgraph.outputs, returned, strict=True))
    inputs = [node for node in old.nodes if node.op == "placeholder"]
    before = len(inputs) - len(subgraph.constants)
    for node in inputs[:before]:
        env[node] = _input(graph, node.name)
    sums = {name: _input(graph, f"sum_so_far_{i}") for i, name in enumerate(names)}
    for node in inputs[before:]:
        env[node] = _input(graph, node.name)
    added: dict[str, fx.Node] = {}

    def add(node: fx.Node) -> None:
        env[node].meta = dict(node.meta)
        for name in names:
            if outputs[name] is node:
                sums[name].meta = {"val": node.meta["val"]}
                added[name] = graph.call_function(aten.add.Tensor, (sums[name], env[node]))
                added[name].meta = dict(node.meta)

    for node in inputs:
        add(node)
    for node in old.nodes:
        if node.op == "call_function":
            env[node] = graph.node_copy(node, env.__getitem__)
            add(node)
    others = [name for name in subgraph.outputs if name not in names or name in kept]
    graph.output((*(env[outputs[name]] for name in others), *(added[name] for name in names)))
    made = tuple(f"{name}, summed" for name in names)
    gm = as_module(graph)
    return replace(
        subgraph, gm=gm, values=(*subgraph.values, *made), outputs=(*others, *made), sums=names
    )


def _input(graph: fx.Graph, name: str) -> fx.Node:
    """A placeholder of this name, made unique if another one has it."""
    made = graph.placeholder(name)
    made.target = made.name
    return made


def names_of_gradients(stages: Stages, summed: Collection[StageGraph]) -> set[str]:
    """The names of gradients, of their sums over microbatches, and of values that reach these
    through views and casts only.

    Args:
        summed: the subgraphs, from `with_sums`.
    """
    gradients = {name for own in stages.gradients for name in own.values()}
    found = gradients | {f"{name}, summed" for name in gradients}
    found |= {name for subgraph in summed for name in subgraph.values}
    found -= {name for _, name in stages.results}
    while True:
        others = {
            name
            for subgraph in summed
            for name, is_gradient in _values(subgraph, found)
            if name in found and not is_gradient
        }
        if not others:
            return found
        found -= others


def _values(subgraph: StageGraph, gradients: Set[str]) -> Iterator[tuple[str, bool]]:
    """The values that a subgraph reads, and for each whether it reaches gradients only, through
    views, casts and additions.
    """
    names = dict[fx.Node, set[str]]()
    returned: Any = subgraph.gm.graph.output_node().args[0]
    for name, node in zip(subgraph.outputs, returned, strict=True):
        names.setdefault(node, set()).add(name)

    def ends_in_gradients(node: fx.Node) -> bool:
        return names.get(node, set()) <= gradients and all(
            user.op == "output"
            or (user.target is aten.add.Tensor and names.get(user, {""}) <= gradients)
            or (user.target in VIEWS_AND_COPIES and ends_in_gradients(user))
            for user in node.users
        )

    inputs = [node for node in subgraph.gm.graph.nodes if node.op == "placeholder"]
    values = inputs[len(subgraph.params) + len(subgraph.batch) :]
    for name, node in zip(subgraph.values, values, strict=False):
        yield name, ends_in_gradients(node)


def check_sums(subgraph: StageGraph, summed: StageGraph) -> None:
    """Raise unless ``summed`` returns the outputs of ``subgraph``, or their new sums.

    Raises:
        CertificateError: an output that differs. That is a fault of ftp: please report it.
    """
    numbering = Numbering()
    constants = len(subgraph.constants)
    before = len(subgraph.params) + len(subgraph.batch) + len(subgraph.values)
    given = [numbering.of(("input", i)) for i in range(before)]
    sums = {name: numbering.of(("sum", name)) for name in summed.sums}
    last = [numbering.of(("constant", i)) for i in range(constants)]
    due = dict(
        zip(subgraph.outputs, numbering.run(subgraph.gm.graph, [*given, *last]), strict=True)
    )
    inputs = [*given, *sums.values(), *last]
    found = dict(zip(summed.outputs, numbering.run(summed.gm.graph, inputs), strict=True))
    for name, number in due.items():
        total = found.get(f"{name}, summed")
        is_kept = name in found and found[name] == number
        is_added = total is not None and numbering.terms.get(total) == (sums[name], number)
        if (name in sums and not is_added) or (name not in sums and not is_kept):
            raise CertificateError(
                f"%{name} of {subgraph.kind}{subgraph.stage} is not what is added up."
            )
