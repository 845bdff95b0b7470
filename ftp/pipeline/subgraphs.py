"""A pipeline's step as subgraphs: one per stage and action, and the values that cross stages."""

from collections.abc import Iterable, Mapping
from typing import Literal

from torch import fx

from ftp.dataclass import dataclass
from ftp.pipeline.schedule import Kind
from ftp.rules.local_op import RankGraph, as_module


def extracted(
    inputs: Iterable[fx.Node], nodes: Iterable[fx.Node], outputs: Iterable[fx.Node]
) -> fx.GraphModule:
    """The graph that computes ``outputs`` from ``inputs`` by ``nodes``, in this order."""
    graph, env = RankGraph(), dict[fx.Node, fx.Node]()
    for node in inputs:
        env[node] = graph.placeholder(node.name)
        env[node].meta = dict(node.meta)
    for node in nodes:
        env[node] = graph.node_copy(node, env.__getitem__)
    graph.output(tuple(env[node] for node in outputs))
    return as_module(graph)


@dataclass(frozen=True)
class StageGraph:
    """The graph that a stage runs in one action; of kind "R", a rank's reductions after all
    actions.

    Attributes:
        gm: its inputs are ``params``, ``batch``, ``values`` and ``constants``, in this order.
        params, batch, constants: which leaves of the parameters and of the batch, and which
            captured tensors.
        values: that the stage has received or computed before.
        outputs: the names of the results.
        sums: gradients that the graph adds up over microbatches: its last values are the sums so
            far, its last outputs the new sums.
    """

    kind: Kind | Literal["R"]
    stage: int
    gm: fx.GraphModule
    params: tuple[int, ...]
    batch: tuple[int, ...]
    values: tuple[str, ...]
    constants: tuple[int, ...]
    outputs: tuple[str, ...]
    sums: tuple[str, ...] = ()


@dataclass(frozen=True)
class Stages:
    """A step as subgraphs, one per stage and kind of action.

    Attributes:
        subgraphs: per kind and stage; a stage without work of a kind has none.
        forward: per stage, what it sends to the next one after its forward pass.
        backward: per stage, what it sends to the one before, after "B" or "I".
        results: per result other than gradients the stage and the name of its value.
        gradients: per parameter, per stage that contributes, the value's name.
        borrowed: per parameter the stages other than its own that read it.
        passed: values that skip stages, ``(name, from, to)``.
    """

    subgraphs: Mapping[tuple[Kind, int], StageGraph]
    forward: tuple[tuple[str, ...], ...]
    backward: tuple[tuple[str, ...], ...]
    results: tuple[tuple[int, str], ...]
    gradients: tuple[Mapping[int, str], ...]
    borrowed: tuple[tuple[int, ...], ...]
    passed: tuple[tuple[str, int, int], ...]

    def received(self, kind: str, stage: int) -> tuple[str, ...]:
        """The values that a stage receives before an action: before "F" from the stage before,
        before "B" or "I" from the next one.
        """
        if kind == "F" and stage:
            return self.forward[stage - 1]
        if kind in "BI" and stage + 1 < len(self.backward):
            return self.backward[stage + 1]
        return ()

    def sent(self, kind: str, stage: int) -> tuple[str, ...]:
        """The values that a stage sends after an action: after "F" to the next stage, after "B" or
        "I" to the one before.
        """
        if kind == "F":
            return self.forward[stage]
        return self.backward[stage] if kind in "BI" else ()

    def read_later(self, kind: str, stage: int) -> set[str]:
        """The values that a stage's later actions on a microbatch read or send."""
        later = {"F": "BIW", "I": "W"}.get(kind, "")
        names = {
            name
            for (k, at), subgraph in self.subgraphs.items()
            if k in later and at == stage
            for name in subgraph.values
        }
        return names.union(self.backward[stage]) if kind == "F" else names

    def read_after(self, kind: str, stage: int) -> set[str]:
        """The values that a stage holds after an action: what it sends, what its later actions
        read.
        """
        names = self.read_later(kind, stage).union(self.backward[stage])
        if kind == "F":
            names.update(self.forward[stage])
            names.update(name for at, name in self.results if at == stage)
        if kind in "BW":
            names.update(found[stage] for found in self.gradients if stage in found)
        return names
