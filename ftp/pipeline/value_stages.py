"""The stage of a pipeline that computes each value of a traced step, loss and gradients.

1. A value of the forward pass is computed at the last stage among the stages of the parameters
   that it depends on. A value that depends only on the batch, or only on parameters, is computed
   at each stage that reads it.
2. A value of the backward pass is computed at the last stage that has the activations and
   parameters that it reads, and that is not after any stage whose gradient it reads.
"""

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field
from typing import Any

import torch
from torch import fx

from ftp.dataclass import dataclass
from ftp.ops.ancestors import ancestors
from ftp.rules.local_op import as_module, copied

aten = torch.ops.aten

FREE, OF_PARAMETERS, ACTIVATION, GRADIENT = range(4)


@dataclass
class StagedValue:
    """The stages that compute a node. An activation or a gradient is computed at stage ``first``
    and sent as far as stage ``last``. A value that depends only on parameters is computed at each
    stage of ``uses``.
    """

    kind: int
    first: int = 0
    last: int = 0
    uses: set[int] = field(default_factory=set)


class StepGraph:
    """A traced ``grad_and_value``, and in ``of`` the stages of each node.

    Args:
        gm, holders, batch, results, leaves, stages: as of ``split``.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        holders: tuple[int, ...],
        batch: int,
        results: int,
        leaves: Sequence[int],
        stages: int,
    ):
        self.graph, self.holders, self.stages = copied(gm.graph), holders, stages
        inputs = list(self.graph.find_nodes(op="placeholder"))
        n = len(holders)
        self.leaves = inputs[:n]
        self.params = {node: i for i, node in enumerate(self.leaves)}
        self.batch = {node: i for i, node in enumerate(inputs[n : n + batch])}
        self.constants = {node: i for i, node in enumerate(inputs[n + batch :])}
        outputs: Any = self.graph.output_node().args[0]
        self.results: list[fx.Node] = list(outputs[:results])
        self.gradients: dict[int, fx.Node] = dict(zip(leaves, outputs[results:], strict=True))
        self.nodes = [n for n in self.graph.nodes if n.op == "call_function"]
        self.is_forward = ancestors(self.results)
        self.is_forward |= {n for n in self.nodes if is_in_tuple(n, self.is_forward)}
        self.of: dict[fx.Node, StagedValue] = {}
        self.of_batch = set(self.batch)
        for node in self.nodes:
            if any(x in self.of_batch for x in node.all_input_nodes):
                self.of_batch.add(node)

    def place(self) -> None:
        """Find the stages that compute each value."""
        for node in (*self.params, *self.batch, *self.constants):
            holder = self.holders[self.params[node]] if node in self.params else 0
            kind = OF_PARAMETERS if node in self.params else FREE
            self.of[node] = StagedValue(kind, holder, holder)
        self._place_forward()
        self._place_backward()

    # 1. Forward.

    def _place_forward(self) -> None:
        for node in self.nodes:
            if node in self.is_forward:
                self.of[node] = self._joined(node)
        self._sink()
        for node in reversed(self.nodes):
            if node in self.is_forward:
                self._extend(node)

    def _joined(self, node: fx.Node) -> StagedValue:
        operands = [self.of[n] for n in node.all_input_nodes]
        kinds = {v.kind for v in operands} - {FREE}
        first = max((v.first for v in operands), default=0)
        if not kinds:
            return StagedValue(FREE)
        varies = any(n in self.of_batch for n in node.all_input_nodes)
        if kinds == {OF_PARAMETERS} and not varies and not _is_sum_over(node):
            return StagedValue(OF_PARAMETERS, first, first)
        return StagedValue(ACTIVATION, first, first)

    def _sink(self) -> None:
        """Move each op whose result only later stages read to the first of these stages, if that
        stage receives the op's operands anyway, such as a norm of the residual stream.
        """
        target: dict[fx.Node, int] = {}  # the stage to move a node to
        for node in reversed(self.nodes):
            own = self.of.get(node)
            if node not in self.is_forward or node in self.results or own is None:
                continue
            users = [target.get(u, self.of[u].first) for u in node.users if u in self.is_forward]
            is_weighted = any(self.of[x].kind == OF_PARAMETERS for x in node.all_input_nodes)
            if own.kind != ACTIVATION or is_weighted or not users:
                continue
            if min(users) > own.first:
                target[node] = min(users)

        def is_received(x: fx.Node, stage: int, moves: Mapping[fx.Node, int]) -> bool:
            return self.of[x].kind != ACTIVATION or any(
                u in self.is_forward and moves.get(u, self.of[u].first) >= stage
                for u in (x, *x.users)
            )

        for node, stage in self._possible_moves(target, min, is_received).items():
            self.of[node] = StagedValue(ACTIVATION, stage, stage)

    def _possible_moves(
        self,
        moves: Mapping[fx.Node, int],
        first_reader: Callable[[Iterable[int]], int],
        is_received: Callable[[fx.Node, int, Mapping[fx.Node, int]], bool],
    ) -> Mapping[fx.Node, int]:
        """The moves that are possible together. A node cannot move to a stage that does not receive
        all its operands. Dropping a move may make others impossible, so repeat until none is
        dropped.

        Args:
            moves: per node the stage to move to.
            first_reader: of the stages of a node's users, the one that runs first.
            is_received: whether a stage computes or receives an operand after the given moves.
        """
        while True:
            possible: dict[fx.Node, int] = {}
            for node in (n for n in self.nodes if n in moves):
                users = [u for u in node.users if u in self.of]
                stage = first_reader(moves.get(u, self.of[u].first) for u in users)
                if stage != self.of[node].first and all(
                    is_received(x, stage, possible) for x in node.all_input_nodes
                ):
                    possible[node] = stage
            if possible == moves:
                return possible
            moves = possible

    def _extend(self, node: fx.Node) -> None:
        """Record the last stage that each operand of a node must be sent to, and the stages that
        read operands which depend only on parameters.
        """
        own = self.of[node]
        at = {own.first} if own.kind == ACTIVATION else own.uses
        if node in self.results and own.kind != ACTIVATION:
            at = own.uses = {own.first}
        for operand in node.all_input_nodes:
            of = self.of[operand]
            if of.kind == ACTIVATION:
                of.last = max(of.last, *at, of.first)
            else:
                of.uses |= at

    # 2. Backward.

    def _place_backward(self) -> None:
        backward = [node for node in self.nodes if node not in self.is_forward]
        seeds = {node for node in backward if _is_seed(node, self.results)}
        seeded = set(seeds)
        for node in backward:
            operands = [self.of[n] for n in node.all_input_nodes]
            gradients = [v.first for v in operands if v.kind == GRADIENT]
            activations = [v for v in operands if v.kind == ACTIVATION]
            weights = [v for v in operands if v.kind == OF_PARAMETERS]
            # Without a seed, every node that reads activations counts as a gradient.
            is_seeded = not seeds or any(n in seeded for n in node.all_input_nodes)
            if node in seeds or not (gradients or activations or (weights and is_seeded)):
                first = max((v.first for v in weights), default=0)
                found = [v.uses or {v.first} for v in weights]
                uses = set.intersection(*found) if found else set()
                kind = OF_PARAMETERS if weights else FREE
                self.of[node] = StagedValue(kind, first, first, uses)
            else:
                latest = min(gradients, default=self.stages - 1)
                at = [
                    k
                    for k in range(latest + 1)
                    if all(v.first <= k <= v.last for v in activations)
                    and all(k in (v.uses or {v.first}) for v in weights)
                ]
                stage = max(at) if at else min([latest, *(v.first for v in activations)])
                if gradients or is_seeded:
                    self.of[node] = StagedValue(GRADIENT, stage, stage)
                else:  # a mask, say: computed by each stage that reads it
                    self.of[node] = StagedValue(ACTIVATION, min(at, default=stage), stage)
            if is_seeded and node not in seeds:
                seeded.add(node)
        self._move_parameter_gradients()
        self._sink_gradients(backward)

    def _move_parameter_gradients(self) -> None:
        """Move the op that gives a parameter's gradient to a stage that reads the parameter and has
        the op's activations, such as a bias' sum over a gradient that comes from the next stage.
        """
        for leaf, node in self.gradients.items():
            own = self.of[node]
            read = self.of[self.leaves[leaf]].uses | {self.holders[leaf]}
            activations = [v for x in node.all_input_nodes if (v := self.of[x]).kind == ACTIVATION]
            earlier = [
                k
                for k in read
                if k < own.first and all(v.first <= k <= v.last for v in activations)
            ]
            is_alone = node.target is not operator.getitem and len(node.users) == 1
            if own.kind == GRADIENT and own.first not in read and earlier and is_alone:
                self.of[node] = StagedValue(GRADIENT, max(earlier), max(earlier))

    def _sink_gradients(self, backward: Sequence[fx.Node]) -> None:
        """Move each op on gradients whose result only earlier stages read to the last of these
        stages, if that stage receives the op's operands anyway, such as a view of the residual
        stream's gradient.
        """
        target: dict[fx.Node, int] = {}
        wanted = set(self.gradients.values())
        for node in reversed(backward):
            own = self.of[node]
            if own.kind != GRADIENT or node in wanted or not node.users:
                continue
            to = max(target.get(u, self.of[u].first) for u in node.users if u in self.of)
            is_free = all(
                self.of[x].kind in (FREE, GRADIENT)
                or (self.of[x].kind == ACTIVATION and self.of[x].first <= to)
                for x in node.all_input_nodes
            )
            if to < own.first and is_free:
                target[node] = to

        def is_received(x: fx.Node, stage: int, moves: Mapping[fx.Node, int]) -> bool:
            return self.of[x].kind != GRADIENT or any(
                u in self.of and moves.get(u, self.of[u].first) <= stage for u in (x, *x.users)
            )

        for node, stage in self._possible_moves(target, max, is_received).items():
            self.of[node] = StagedValue(GRADIENT, stage, stage)


def with_constant_seeds(gm: fx.GraphModule) -> fx.GraphModule:
    """The graph with the seed of the backward pass, the gradient of the loss by itself, as a
    constant 1. If the seed read the loss, ranks that hold terms of the loss would wait for its sum.
    """
    graph = copied(gm.graph)
    for node in graph.nodes:
        val = node.meta.get("val")
        if node.target is aten.ones_like.default and isinstance(val, torch.Tensor) and not val.ndim:
            node.target, node.args = aten.full.default, ([], 1)
            node.kwargs = {"dtype": val.dtype, "device": val.device}
    return as_module(graph)


def with_computed_outputs(gm: fx.GraphModule) -> fx.GraphModule:
    """The graph with inputs that are also outputs copied, so that a stage computes the output."""
    outputs: Any = gm.graph.output_node().args[0]
    if not any(node.op == "placeholder" for node in outputs):
        return gm
    graph = copied(gm.graph)
    end = graph.output_node()
    given = [x for x in dict.fromkeys(end.all_input_nodes) if x.op == "placeholder"]
    with graph.inserting_before(end):
        copies = {x: graph.call_function(aten.clone.default, (x,)) for x in given}
    for x, copy in copies.items():
        copy.meta = dict(x.meta)
        end.replace_input_with(x, copy)
    return as_module(graph)


_FILLED = (aten.ones_like.default, aten.full.default, aten.full_like.default)


def _is_seed(node: fx.Node, results: Sequence[fx.Node]) -> bool:
    """Whether a node is the seed of the backward pass: the gradient of the loss by itself."""
    reads = node.all_input_nodes
    is_scalar = isinstance(v := node.meta.get("val"), torch.Tensor) and not v.ndim
    return node.target in _FILLED and is_scalar and all(x in results[:1] for x in reads)


def _is_sum_over(node: fx.Node) -> bool:
    """Whether a node reduces a tensor to one number. A later stage that needs such a number of a
    parameter receives the number, not the parameter.
    """
    return _ndim(node) == 0 and any(_ndim(x) for x in node.all_input_nodes)


def _ndim(node: fx.Node) -> int | None:
    val = node.meta.get("val")
    return val.ndim if isinstance(val, torch.Tensor) else None


def is_in_tuple(node: fx.Node, made: set[fx.Node]) -> bool:
    return node.target is operator.getitem and node.args[0] in made
