"""Cut one traced step, loss and gradients, into the pieces that the stages of a pipeline run.

1. Every value of the forward pass gets a stage: the largest among the parameters that it is
   computed from. What depends on the batch or on parameters alone is computed where it is read.
2. Every value of the backward pass gets the last stage, not after those of the gradients that it
   is computed from, at which the activations and parameters that it reads are found.
3. A value that a later stage (of a gradient: an earlier one) reads is passed from stage to stage.
4. A stage's pieces are the nodes that its results, and what it passes on, need.
"""

import copy
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import fx
from torch._ops import OpOverload

from ftp.errors import PlanningError
from ftp.pipeline.schedule import Kind

aten = torch.ops.aten


@dataclass(frozen=True)
class StageGraph:
    """What a stage computes in one action; of kind "R", what a rank reduces when all are done.

    Attributes:
        gm: its inputs are ``params``, ``batch``, ``values`` and ``constants``, in this order.
        params, batch, constants: which leaves of the parameters and of the batch, and which
            captured tensors.
        values: received, or computed by this stage before.
        outputs: the names of the results.
    """

    kind: Kind | Literal["R"]
    stage: int
    gm: fx.GraphModule
    params: tuple[int, ...]
    batch: tuple[int, ...]
    values: tuple[str, ...]
    constants: tuple[int, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class Stages:
    """A step in pieces.

    Attributes:
        pieces: per kind and stage; a stage without work of a kind has none.
        forward: per stage, what it sends to the next one after its forward pass.
        backward: per stage, what it sends to the one before, after "B" or "I".
        results: per result other than gradients the stage and the name of its value.
        gradients: per parameter, per stage that contributes, the value's name.
        borrowed: per parameter the stages other than its own that read it.
        passed: values that skip stages, ``(name, from, to)``.
    """

    pieces: Mapping[tuple[Kind, int], StageGraph]
    forward: tuple[tuple[str, ...], ...]
    backward: tuple[tuple[str, ...], ...]
    results: tuple[tuple[int, str], ...]
    gradients: tuple[Mapping[int, str], ...]
    borrowed: tuple[tuple[int, ...], ...]
    passed: tuple[tuple[str, int, int], ...]


FREE, OF_PARAMETERS, ACTIVATION, GRADIENT = range(4)


@dataclass
class _Value:
    """Where a node is computed: an activation or a gradient at stage ``first``; it is found at the
    stages from ``first`` to ``last``. What depends on parameters alone is found at ``uses``.
    """

    kind: int
    first: int = 0
    last: int = 0
    uses: set[int] = field(default_factory=set)


def split(
    gm: fx.GraphModule,
    holders: Sequence[int],
    batch: int,
    results: int,
    leaves: Sequence[int],
    stages: int,
    halves: bool,
) -> Stages:
    """The pieces of a traced ``grad_and_value``.

    Args:
        gm: a functional graph: parameters, ``batch`` tensors, then constants in; ``results`` values
            and gradients out.
        holders: the stage of each parameter.
        leaves: which parameters the gradients are of, in their order.
        halves: whether backward passes are "I" and "W" rather than "B".

    Raises:
        PlanningError: a gradient that a stage after its own reads.
    """
    return _Split(gm, tuple(holders), batch, results, leaves, stages).run(halves)


class _Split:
    def __init__(
        self,
        gm: fx.GraphModule,
        holders: tuple[int, ...],
        batch: int,
        results: int,
        leaves: Sequence[int],
        stages: int,
    ):
        self.graph, self.holders, self.stages = copy.deepcopy(gm.graph), holders, stages
        inputs = [n for n in self.graph.nodes if n.op == "placeholder"]
        n = len(holders)
        self.leaves = inputs[:n]
        self.params = {node: i for i, node in enumerate(self.leaves)}
        self.batch = {node: i for i, node in enumerate(inputs[n : n + batch])}
        self.constants = {node: i for i, node in enumerate(inputs[n + batch :])}
        outputs: Any = self.graph.output_node().args[0]
        self.results: list[fx.Node] = list(outputs[:results])
        self.gradients: dict[int, fx.Node] = dict(zip(leaves, outputs[results:], strict=True))
        self.nodes = [n for n in self.graph.nodes if n.op == "call_function"]
        self.is_forward = _ancestors(self.results)
        self.is_forward |= {n for n in self.nodes if _tuple_in(n, self.is_forward)}
        self.of: dict[fx.Node, _Value] = {}
        self.of_batch = set(self.batch)
        for node in self.nodes:
            if any(x in self.of_batch for x in node.all_input_nodes):
                self.of_batch.add(node)

    def run(self, halves: bool) -> Stages:
        for node in (*self.params, *self.batch, *self.constants):
            holder = self.holders[self.params[node]] if node in self.params else 0
            kind = OF_PARAMETERS if node in self.params else FREE
            self.of[node] = _Value(kind, holder, holder)
        self._place_forward()
        self._place_backward()
        contributions: list[dict[int, fx.Node]] = [
            self._contributions(self.gradients[leaf], leaf) if leaf in self.gradients else {}
            for leaf in range(len(self.leaves))
        ]
        return self._pieces(contributions, halves)

    # 1. Forward.

    def _place_forward(self) -> None:
        for node in self.nodes:
            if node in self.is_forward:
                self.of[node] = self._joined(node)
        self._sink()
        for node in reversed(self.nodes):
            if node in self.is_forward:
                self._extend(node)

    def _joined(self, node: fx.Node) -> _Value:
        operands = [self.of[n] for n in node.all_input_nodes]
        kinds = {v.kind for v in operands} - {FREE}
        first = max((v.first for v in operands), default=0)
        if not kinds:
            return _Value(FREE)
        varies = any(n in self.of_batch for n in node.all_input_nodes)
        if kinds == {OF_PARAMETERS} and not varies:
            return _Value(OF_PARAMETERS, first, first)
        return _Value(ACTIVATION, first, first)

    def _sink(self) -> None:
        """Move ops, whose results later stages alone read, to the first of those stages, where it
        gets their operands anyway: a norm's, of the residual stream.
        """
        target: dict[fx.Node, int] = {}  # of those that later stages alone read
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
        for node in self.nodes:
            if node not in target:
                continue
            to, stays = target[node], False
            for x in node.all_input_nodes:
                of = self.of[x]
                if of.kind == ACTIVATION and of.first < to:
                    stays |= not any(
                        u in self.is_forward and self.of[u].first >= to for u in x.users
                    )
            if stays:
                del target[node]
            else:
                self.of[node] = _Value(ACTIVATION, to, to)

    def _extend(self, node: fx.Node) -> None:
        """Note how far a value of the forward pass is passed on, and where one of parameters is
        read.
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
            # Without a seed, all that reads activations is taken for a gradient.
            is_seeded = not seeds or any(n in seeded for n in node.all_input_nodes)
            if node in seeds or not (gradients or activations or (weights and is_seeded)):
                first = max((v.first for v in weights), default=0)
                found = [v.uses or {v.first} for v in weights]
                uses = set.intersection(*found) if found else set()
                kind = OF_PARAMETERS if weights else FREE
                self.of[node] = _Value(kind, first, first, uses)
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
                    self.of[node] = _Value(GRADIENT, stage, stage)
                else:  # a mask, say: computed by each stage that reads it
                    self.of[node] = _Value(ACTIVATION, min(at, default=stage), stage)
            if is_seeded and node not in seeds:
                seeded.add(node)
        self._give_back()
        self._sink_gradients(backward)

    def _give_back(self) -> None:
        """Move ops that end in a parameter's gradient, and read no activation, to a stage that
        reads the parameter: a bias' sum over the gradient that comes from the next stage.
        """
        for leaf, node in self.gradients.items():
            own, read = self.of[node], self._readers(leaf)
            earlier = [k for k in read if k < own.first]
            is_alone = node.target is not operator.getitem and len(node.users) == 1
            if own.kind == GRADIENT and own.first not in read and earlier and is_alone:
                self.of[node] = _Value(GRADIENT, max(earlier), max(earlier))

    def _readers(self, leaf: int) -> set[int]:
        """The stages that read a parameter, its own among them."""
        return self.of[self.leaves[leaf]].uses | {self.holders[leaf]}

    def _sink_gradients(self, backward: Sequence[fx.Node]) -> None:
        """Move ops on gradients, whose results earlier stages alone read, to the last of those
        stages, where it gets their operands anyway: a view of the residual stream's gradient.
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
        for node in backward:
            if node not in target:
                continue
            to = target[node]
            reaches = (
                self.of[x].kind != GRADIENT
                or self.of[x].first <= to
                or any(u in self.of and self.of[u].first <= to for u in x.users)
                for x in node.all_input_nodes
            )
            if all(reaches):
                self.of[node] = _Value(GRADIENT, to, to)
            else:
                del target[node]

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
                self.of[both] = _Value(GRADIENT, stage, stage)
                total = both
            found[stage] = total
        return found

    def _home(self, node: fx.Node, leaf: int) -> int:
        own = self.of[node]
        return own.first if own.kind in (ACTIVATION, GRADIENT) else self.holders[leaf]

    # 3 and 4. Pieces.

    def _pieces(self, contributions: Sequence[Mapping[int, fx.Node]], halves: bool) -> Stages:
        self.nodes = [n for n in self.graph.nodes if n.op == "call_function"]
        last = self.stages - 1
        results = [(self.of[n].first, n) for n in self.results]
        backward: list[_Needed] = []
        wanted: list[list[fx.Node]] = []  # per stage, what it sends to the one before
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
        pieces: dict[tuple[Kind, int], StageGraph] = {}
        for k in range(self.stages):
            outputs = list(dict.fromkeys([*(n for s, n in results if s == k), *sent[k], *saved[k]]))
            made_here = [n for n in outputs if n in forward[k].made]
            if made_here:
                pieces["F", k] = self._piece("F", k, forward[k], made_here)
            own = [found[k] for found in contributions if k in found]
            send = [n for n in wanted[k] if self._is_made_backward(n, k)]
            if not halves:
                both = list(dict.fromkeys([*send, *own]))
                if both:
                    pieces["B", k] = self._piece("B", k, backward[k], both)
                continue
            inner = self._needed(send, lambda n, k=k: self._backward_rule(n, k))
            outer = self._needed(own, lambda n, k=k, inner=inner: self._outer_rule(n, k, inner))
            kept = [n for n in outer.read if n in inner.made or _tuple_in(n, inner.made)]
            if kept:
                inner = self._needed([*send, *kept], lambda n, k=k: self._backward_rule(n, k))
            if send:
                pieces["I", k] = self._piece("I", k, inner, list(dict.fromkeys([*send, *kept])))
            if own:
                pieces["W", k] = self._piece("W", k, outer, list(dict.fromkeys(own)))
        borrowed = [
            tuple(
                sorted({p.stage for p in pieces.values() if leaf in p.params and p.stage != holder})
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
            pieces,
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
        """Per stage the nodes of its forward pass, what it sends on, what it keeps."""
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
        known = node in inner.made or _tuple_in(node, inner.made)
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

    def _piece(
        self, kind: Kind, stage: int, needed: "_Needed", outputs: Sequence[fx.Node]
    ) -> StageGraph:
        graph, env = fx.Graph(), {}
        groups = [[n for n in group if n in needed.inputs] for group in (self.params, self.batch)]
        groups += [needed.read, [n for n in self.constants if n in needed.inputs]]
        for node in (n for group in groups for n in group):
            env[node] = graph.placeholder(node.name)
            env[node].meta = dict(node.meta)
        for node in self.nodes:
            if node in needed.made:
                env[node] = graph.node_copy(node, env.__getitem__)
                env[node].meta = dict(node.meta)
        graph.output(tuple(env[n] for n in outputs))
        params, batch, values, constants = groups
        return StageGraph(
            kind,
            stage,
            fx.GraphModule({}, graph),
            tuple(self.params[n] for n in params),
            tuple(self.batch[n] for n in batch),
            tuple(n.name for n in values),
            tuple(self.constants[n] for n in constants),
            tuple(n.name for n in outputs),
        )


@dataclass(frozen=True)
class _Needed:
    """The nodes that a piece computes, the values that it reads, and the graph's inputs among its
    operands.
    """

    made: set[fx.Node]
    read: list[fx.Node]
    inputs: set[fx.Node]


_FILLED = (aten.ones_like.default, aten.full.default, aten.full_like.default)


def _is_seed(node: fx.Node, results: Sequence[fx.Node]) -> bool:
    """Whether a node is the gradient of the loss by itself."""
    reads = node.all_input_nodes
    is_scalar = isinstance(v := node.meta.get("val"), torch.Tensor) and not v.ndim
    return node.target in _FILLED and is_scalar and all(x in results[:1] for x in reads)


def _ancestors(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    found, pending = set(), list(nodes)
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending += node.all_input_nodes
    return found


def _tuple_in(node: fx.Node, made: set[fx.Node]) -> bool:
    return node.target is operator.getitem and node.args[0] in made


def _is_view(node: fx.Node) -> bool:
    target = node.target
    if not isinstance(target, OpOverload):
        return False
    returns = target._schema.returns
    return len(returns) == 1 and returns[0].alias_info is not None
