"""Cut one traced step, loss and gradients, into the subgraphs that the stages of a pipeline run.

`value_stages` says at which stage a value is computed. A value that a later stage (of a gradient:
an earlier one) reads is passed from stage to stage. A stage's subgraphs are the nodes that its
results, and what it passes on, need.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from ftp.errors import PlanningError
from ftp.pipeline.schedule import Kind
from ftp.pipeline.subgraphs import StageGraph, Stages
from ftp.pipeline.value_stages import (
    ACTIVATION,
    FREE,
    GRADIENT,
    OF_PARAMETERS,
    StagedValue,
    StepGraph,
    is_in_tuple,
)
from ftp.rules.local_op import RankGraph, as_module
from ftp.torch_internals.op_types import OpOverload

aten = torch.ops.aten


def split(
    gm: fx.GraphModule,
    holders: Sequence[int],
    batch: int,
    results: int,
    leaves: Sequence[int],
    stages: int,
    kinds: Collection[tuple[str, int]],
) -> Stages:
    """The subgraphs of a traced ``grad_and_value``.

    Args:
        gm: a functional graph: parameters, ``batch`` tensors, then constants in; ``results`` values
            and gradients out.
        holders: the stage of each parameter.
        leaves: which parameters the gradients are of, in their order.
        kinds: the kinds of actions, by stage, that the schedule has.

    Raises:
        PlanningError: a gradient that a stage after its own reads.
    """
    return _Split(gm, tuple(holders), batch, results, leaves, stages).run(kinds)


class _Split(StepGraph):
    """Cuts a step whose values have stages: backward passes from the first stage, then forward."""

    def run(self, kinds: Collection[tuple[str, int]]) -> Stages:
        self.place()
        contributions: list[dict[int, fx.Node]] = [
            self._contributions(self.gradients[leaf], leaf) if leaf in self.gradients else {}
            for leaf in range(len(self.leaves))
        ]
        return self._subgraphs(contributions, kinds)

    def _contributions(self, gradient: fx.Node, leaf: int) -> dict[int, fx.Node]:
        """A parameter's gradient as one value a stage, whose sum it is."""
        terms: dict[int, list[fx.Node]] = {}
        pending = [gradient]
        while pending:
            node = pending.pop()
            places = {self._home(x, leaf) for x in node.all_input_nodes}
            if (
                node.target is aten.add.Tensor
                and not node.kwargs
                and len(places) > 1
                and len(node.users) == 1
                and all(
                    isinstance(x, fx.Node) and x.meta["val"].shape == node.meta["val"].shape
                    for x in node.args
                )
            ):
                pending += node.args  # type: ignore[operator]
            else:
                terms.setdefault(self._home(node, leaf), []).append(node)
        found = {}
        for stage, own in terms.items():
            total = own[0]
            for term in own[1:]:
                with self.graph.inserting_after(max(total, term)):
                    both = self.graph.call_function(aten.add.Tensor, (total, term))
                both.meta |= total.meta
                self.of[both] = StagedValue(GRADIENT, stage, stage)
                total = both
            found[stage] = total
        return found

    def _home(self, node: fx.Node, leaf: int) -> int:
        own = self.of[node]
        return own.first if own.kind in (ACTIVATION, GRADIENT) else self.holders[leaf]

    def _subgraphs(
        self, contributions: Sequence[Mapping[int, fx.Node]], kinds: Collection[tuple[str, int]]
    ) -> Stages:
        self.nodes = [n for n in self.graph.nodes if n.op == "call_function"]
        last = self.stages - 1
        results = [(self.of[n].first, n) for n in self.results]
        backward: list[_Needed] = []
        wanted: list[list[fx.Node]] = []  # per stage, the values that it sends to the one before
        asked: list[fx.Node] = []
        for k in range(self.stages):
            own = [found[k] for found in contributions if k in found]
            send = asked if k else []
            roots = [n for n in send if self._is_made_backward(n, k)]
            made = self._needed([*own, *roots], lambda n, k=k: self._backward_rule(n, k))
            through = [n for n in send if n not in roots and not self._is_here(n, k)]
            asked = list(
                dict.fromkeys([*through, *(n for n in made.read if not self._is_here(n, k))])
            )
            if asked and k == last:
                raise PlanningError(
                    f"The value {asked[0].name} of the backward pass is read before it is computed:"
                    f" no stage after {k} computes it."
                )
            wanted.append(send)
            backward.append(made)
        forward, sent, saved = self._forward(results, backward, wanted)
        subgraphs: dict[tuple[Kind, int], StageGraph] = {}
        for k in range(self.stages):
            outputs = list(dict.fromkeys([*(n for s, n in results if s == k), *sent[k], *saved[k]]))
            made_here = [n for n in outputs if n in forward[k].made]
            if made_here:
                subgraphs["F", k] = self._subgraph("F", k, forward[k], made_here)
            own = [found[k] for found in contributions if k in found]
            send = [n for n in wanted[k] if self._is_made_backward(n, k)]
            both = list(dict.fromkeys([*send, *own]))
            if both and ("B", k) in kinds:
                subgraphs["B", k] = self._subgraph("B", k, backward[k], both)
            if ("I", k) not in kinds:
                continue
            inner = self._needed(send, lambda n, k=k: self._backward_rule(n, k))
            outer = self._needed(own, lambda n, k=k, inner=inner: self._outer_rule(n, k, inner))
            kept = [n for n in outer.read if n in inner.made or is_in_tuple(n, inner.made)]
            if kept:
                inner = self._needed([*send, *kept], lambda n, k=k: self._backward_rule(n, k))
            if send:
                subgraphs["I", k] = self._subgraph(
                    "I", k, inner, list(dict.fromkeys([*send, *kept]))
                )
            if own:
                subgraphs["W", k] = self._subgraph("W", k, outer, list(dict.fromkeys(own)))
        borrowed = [
            tuple(
                sorted(
                    {p.stage for p in subgraphs.values() if leaf in p.params and p.stage != holder}
                )
            )
            for leaf, holder in enumerate(self.holders)
        ]
        passed = [
            (n.name, self.of[n].first, self.of[n].last)
            for n in self.nodes
            if n in self.is_forward
            and self.of[n].kind == ACTIVATION
            and self.of[n].last > self.of[n].first + 1
        ]
        return Stages(
            subgraphs,
            tuple(tuple(n.name for n in own) for own in sent),
            tuple(tuple(n.name for n in own) for own in wanted),
            tuple((stage, n.name) for stage, n in results),
            tuple({k: n.name for k, n in sorted(found.items())} for found in contributions),
            tuple(borrowed),
            tuple(passed),
        )

    def _forward(
        self,
        results: Sequence[tuple[int, fx.Node]],
        backward: Sequence["_Needed"],
        wanted: Sequence[Sequence[fx.Node]],
    ) -> tuple[list["_Needed"], list[list[fx.Node]], list[list[fx.Node]]]:
        """Per stage the nodes of its forward pass, the values it sends on, the values it keeps."""
        activations = [
            n for n in self.nodes if n in self.is_forward and self.of[n].kind == ACTIVATION
        ]
        sent: list[list[fx.Node]] = [
            [n for n in activations if self._is_sent(n, k)] for k in range(self.stages)
        ]
        made, saved = [], []
        for k in range(self.stages):
            kept = [
                n
                for n in (*backward[k].read, *wanted[k])
                if n in self.is_forward and self.of[n].kind == ACTIVATION and self._is_here(n, k)
            ]
            roots = [n for s, n in results if s == k] + sent[k] + kept
            made.append(
                self._needed(
                    [n for n in roots if self.of[n].kind != ACTIVATION or self.of[n].first == k],
                    lambda n, k=k: self.of[n].kind != ACTIVATION or self.of[n].first == k,
                )
            )
            saved.append(kept)
        return made, sent, saved

    def _is_sent(self, node: fx.Node, k: int) -> bool:
        own = self.of[node]
        if not own.first <= k < own.last:
            return False
        # A tuple is never sent; its parts are.
        return isinstance(node.meta["val"], torch.Tensor)

    def _is_here(self, node: fx.Node, k: int) -> bool:
        """Whether a value of the forward pass is found at stage ``k`` without the backward pass."""
        own = self.of[node]
        return node in self.is_forward and own.first <= k <= own.last

    def _is_made_backward(self, node: fx.Node, k: int) -> bool:
        own = self.of[node]
        return node not in self.is_forward and own.first <= k <= max(own.last, own.first)

    def _backward_rule(self, node: fx.Node, k: int) -> bool:
        """Whether stage ``k`` computes a value in its backward pass, rather than reading it."""
        own = self.of[node]
        if own.kind in (FREE, OF_PARAMETERS):
            return True
        if node in self.is_forward:
            return own.first == k and _is_view(node)
        return own.first <= k <= own.last

    def _outer_rule(self, node: fx.Node, k: int, inner: "_Needed") -> bool:
        known = node in inner.made or is_in_tuple(node, inner.made)
        if known and not _is_view(node) and self.of[node].kind in (ACTIVATION, GRADIENT):
            return False
        return self._backward_rule(node, k)

    def _needed(self, roots: Iterable[fx.Node], is_made: Callable[[fx.Node], bool]) -> "_Needed":
        needed = set(roots)
        made, read = set(), []
        for node in reversed(self.nodes):
            if node not in needed:
                continue
            if is_made(node):
                made.add(node)
                needed.update(node.all_input_nodes)
            else:
                read.append(node)
        inputs = {n for n in needed if n.op == "placeholder"}
        return _Needed(made, read[::-1], inputs)

    def _subgraph(
        self, kind: Kind, stage: int, needed: "_Needed", outputs: Sequence[fx.Node]
    ) -> StageGraph:
        # Parameters and results in the order of their ops: leaves are in that of their names, in
        # which layer 10 comes before layer 9, and stages of equal layers would not be equal.
        graph, env = RankGraph(), {}
        operands = (x for n in self.nodes if n in needed.made for x in n.all_input_nodes)
        used = dict.fromkeys(x for x in operands if x in self.params)
        used |= dict.fromkeys(n for n in self.params if n in needed.inputs)
        at = {n: i for i, n in enumerate(self.nodes)}
        outputs = sorted(outputs, key=lambda n: at.get(n, -1))
        groups = [list(used), [n for n in self.batch if n in needed.inputs]]
        groups += [needed.read, [n for n in self.constants if n in needed.inputs]]
        for node in (n for group in groups for n in group):
            env[node] = graph.placeholder(node.name)
            env[node].meta = dict(node.meta)
        for node in self.nodes:
            if node in needed.made:
                env[node] = graph.node_copy(node, env.__getitem__)
        graph.output(tuple(env[n] for n in outputs))
        params, batch, values, constants = groups
        return StageGraph(
            kind,
            stage,
            as_module(graph),
            tuple(self.params[n] for n in params),
            tuple(self.batch[n] for n in batch),
            tuple(n.name for n in values),
            tuple(self.constants[n] for n in constants),
            tuple(n.name for n in outputs),
        )


@dataclass(frozen=True)
class _Needed:
    """The nodes that a subgraph computes, the values that it reads, and the graph's inputs among
    its operands.
    """

    made: set[fx.Node]
    read: list[fx.Node]
    inputs: set[fx.Node]


def _is_view(node: fx.Node) -> bool:
    target = node.target
    if not isinstance(target, OpOverload):
        return False
    returns = target._schema.returns
    return len(returns) == 1 and returns[0].alias_info is not None
