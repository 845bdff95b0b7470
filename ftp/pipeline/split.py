"""Cut one traced step, loss and gradients, into the subgraphs that the stages of a pipeline run.

`value_stages` says at which stage each value is computed. A forward value that a later stage reads,
and a gradient that an earlier stage reads, is sent from stage to stage. A stage's subgraph consists
of the nodes that compute its results and the values that it sends.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain

import torch
from torch import fx

from ftp.dataclass import dataclass
from ftp.errors import PlanningError
from ftp.ops.ancestors import ancestors
from ftp.pipeline.schedule import Kind
from ftp.pipeline.subgraphs import StageGraph, Stages, extracted
from ftp.pipeline.value_stages import (
    ACTIVATION,
    FREE,
    GRADIENT,
    OF_PARAMETERS,
    StagedValue,
    StepGraph,
    is_in_tuple,
)
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
    """Cuts a step: the backward passes from the first stage on, since each asks the next stage for
    gradients, then the forward passes.

    Attributes:
        terms: per parameter, the term of its gradient that each stage computes.
    """

    def run(self, kinds: Collection[tuple[str, int]]) -> Stages:
        self.place()
        self.terms: list[dict[int, fx.Node]] = [
            self._terms_by_stage(self.gradients[leaf], leaf) if leaf in self.gradients else {}
            for leaf in range(len(self.leaves))
        ]
        return self._stages(kinds)

    def _terms_by_stage(self, gradient: fx.Node, leaf: int) -> dict[int, fx.Node]:
        """A parameter's gradient as a sum of values, one per stage that computes a term of it."""
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
        """The stage of a term of a parameter's gradient."""
        own = self.of[node]
        return own.first if own.kind in (ACTIVATION, GRADIENT) else self.holders[leaf]

    def _stages(self, kinds: Collection[tuple[str, int]]) -> Stages:
        self.nodes = [n for n in self.graph.nodes if n.op == "call_function"]
        results = [(self.of[n].first, n) for n in self.results]
        backward, returned = self._backward()
        forward, sent, saved = self._forward(results, backward, returned)
        subgraphs: dict[tuple[Kind, int], StageGraph] = {}
        for k in range(self.stages):
            outputs = dict.fromkeys([*(n for s, n in results if s == k), *sent[k], *saved[k]])
            gradients = [n for n in returned[k] if self._is_made_backward(n, k)]
            found: dict[Kind, tuple[_Needed, list[fx.Node]]] = {
                "F": (forward[k], [n for n in outputs if n in forward[k].made])
            }
            if ("B", k) in kinds:
                found["B"] = backward[k], [*gradients, *self._terms_of(k)]
            if ("I", k) in kinds:
                found |= self._backward_halves(k, gradients)
            for kind, (needed, values) in found.items():
                if values:
                    unique = list(dict.fromkeys(values))
                    subgraphs[kind, k] = self._subgraph(kind, k, needed, unique)
        return Stages(
            subgraphs,
            tuple(tuple(n.name for n in own) for own in sent),
            tuple(tuple(n.name for n in own) for own in returned),
            tuple((stage, n.name) for stage, n in results),
            tuple({k: n.name for k, n in sorted(terms.items())} for terms in self.terms),
            self._borrowed(subgraphs),
            self._skipping(),
        )

    def _terms_of(self, k: int) -> list[fx.Node]:
        """The terms of parameters' gradients that stage ``k`` computes."""
        return [terms[k] for terms in self.terms if k in terms]

    def _backward(self) -> tuple[list["_Needed"], list[list[fx.Node]]]:
        """Per stage the nodes of its backward pass, and the values that it sends to the stage
        before.

        Raises:
            PlanningError: a value that the last stage reads and no stage computes.
        """
        backward: list[_Needed] = []
        returned: list[list[fx.Node]] = []
        asked: list[fx.Node] = []  # the values that stage ``k`` reads from the next stage
        for k in range(self.stages):
            sent = asked if k else []
            roots = [n for n in sent if self._is_made_backward(n, k)]
            needed = self._needed([*self._terms_of(k), *roots], partial(self._is_in_backward, k=k))
            through = [n for n in sent if n not in roots and not self._is_here(n, k)]
            received = [n for n in needed.read if not self._is_here(n, k)]
            asked = list(dict.fromkeys([*through, *received]))
            if asked and k == self.stages - 1:
                raise PlanningError(
                    f"The value {asked[0].name} of the backward pass is read before it is computed:"
                    f" no stage after {k} computes it."
                )
            returned.append(sent)
            backward.append(needed)
        return backward, returned

    def _backward_halves(
        self, k: int, gradients: Sequence[fx.Node]
    ) -> dict[Kind, tuple["_Needed", list[fx.Node]]]:
        """Stage ``k``'s backward pass in halves, each its nodes and its outputs: "I" computes the
        ``gradients`` for the stage before, "W" those of parameters, from values that "I" keeps.
        """
        terms = self._terms_of(k)
        is_made = partial(self._is_in_backward, k=k)
        inner = self._needed(gradients, is_made)
        outer = self._needed(terms, lambda node: self._is_in_second_half(node, k, inner))
        kept = [n for n in outer.read if n in inner.made or is_in_tuple(n, inner.made)]
        if kept:
            inner = self._needed([*gradients, *kept], is_made)
        return {"I": (inner, [*gradients, *kept] if gradients else []), "W": (outer, terms)}

    def _borrowed(
        self, subgraphs: Mapping[tuple[Kind, int], StageGraph]
    ) -> tuple[tuple[int, ...], ...]:
        """Per parameter, the stages other than its own that read it."""
        readers: list[set[int]] = [set() for _ in self.holders]
        for subgraph in subgraphs.values():
            for leaf in subgraph.params:
                readers[leaf].add(subgraph.stage)
        return tuple(
            tuple(sorted(stages - {holder}))
            for stages, holder in zip(readers, self.holders, strict=True)
        )

    def _skipping(self) -> tuple[tuple[str, int, int], ...]:
        """The activations that skip stages: name, first and last stage."""
        return tuple(
            (n.name, self.of[n].first, self.of[n].last)
            for n in self.nodes
            if n in self.is_forward
            and self.of[n].kind == ACTIVATION
            and self.of[n].last > self.of[n].first + 1
        )

    def _forward(
        self,
        results: Sequence[tuple[int, fx.Node]],
        backward: Sequence["_Needed"],
        returned: Sequence[Sequence[fx.Node]],
    ) -> tuple[list["_Needed"], list[list[fx.Node]], list[list[fx.Node]]]:
        """Per stage the nodes of its forward pass, the values that it sends to the next stage, and
        those that it saves for its backward pass.
        """
        activations = [
            n for n in self.nodes if n in self.is_forward and self.of[n].kind == ACTIVATION
        ]
        sent: list[list[fx.Node]] = [
            [n for n in activations if self._is_sent(n, k)] for k in range(self.stages)
        ]
        needed, saved = [], []
        for k in range(self.stages):
            read = (*backward[k].read, *returned[k])
            kept = [n for n in read if self.of[n].kind == ACTIVATION and self._is_here(n, k)]
            roots = [n for s, n in results if s == k] + sent[k] + kept
            is_made = partial(self._is_in_forward, k=k)
            needed.append(self._needed(filter(is_made, roots), is_made))
            saved.append(kept)
        return needed, sent, saved

    def _is_in_forward(self, node: fx.Node, k: int) -> bool:
        """Whether stage ``k`` computes a value in its forward pass, rather than reading it."""
        return self.of[node].kind != ACTIVATION or self.of[node].first == k

    def _is_sent(self, node: fx.Node, k: int) -> bool:
        """Whether stage ``k`` sends a value to the next stage. Of a tuple, the items are sent."""
        own = self.of[node]
        return own.first <= k < own.last and isinstance(node.meta["val"], torch.Tensor)

    def _is_here(self, node: fx.Node, k: int) -> bool:
        """Whether stage ``k`` has a value after its forward pass."""
        own = self.of[node]
        return node in self.is_forward and own.first <= k <= own.last

    def _is_made_backward(self, node: fx.Node, k: int) -> bool:
        own = self.of[node]
        return node not in self.is_forward and own.first <= k <= max(own.last, own.first)

    def _is_in_backward(self, node: fx.Node, k: int) -> bool:
        """Whether stage ``k`` computes a value in its backward pass, rather than reading it."""
        own = self.of[node]
        if own.kind in (FREE, OF_PARAMETERS):
            return True
        if node in self.is_forward:
            return own.first == k and _is_view(node)
        return own.first <= k <= own.last

    def _is_in_second_half(self, node: fx.Node, k: int, inner: "_Needed") -> bool:
        """Whether "W" computes a value of stage ``k``'s backward pass; ``inner`` are the nodes of
        "I". Cheap values are computed in both.
        """
        known = node in inner.made or is_in_tuple(node, inner.made)
        if known and not _is_view(node) and self.of[node].kind in (ACTIVATION, GRADIENT):
            return False
        return self._is_in_backward(node, k)

    def _needed(self, roots: Iterable[fx.Node], is_made: Callable[[fx.Node], bool]) -> "_Needed":
        """What computes ``roots``, back to the values that are not ``is_made`` and are read."""
        not_made = {n for n in self.nodes if not is_made(n)}
        needed = ancestors(roots, stop=not_made)
        read = [n for n in self.nodes if n in needed and n in not_made]
        inputs = {n for n in needed if n.op == "placeholder"}
        return _Needed(needed - not_made - inputs, read, inputs)

    def _subgraph(
        self, kind: Kind, stage: int, needed: "_Needed", outputs: Sequence[fx.Node]
    ) -> StageGraph:
        # Parameters and results are in the order of the ops that use them, so that stages of equal
        # layers have equal graphs. By name, layer 10 would come before layer 9.
        operands = (x for n in self.nodes if n in needed.made for x in n.all_input_nodes)
        used = dict.fromkeys(x for x in operands if x in self.params)
        used |= dict.fromkeys(n for n in self.params if n in needed.inputs)
        at = {n: i for i, n in enumerate(self.nodes)}
        outputs = sorted(outputs, key=lambda n: at.get(n, -1))
        groups = [list(used), [n for n in self.batch if n in needed.inputs]]
        groups += [needed.read, [n for n in self.constants if n in needed.inputs]]
        params, batch, values, constants = groups
        made = [n for n in self.nodes if n in needed.made]
        return StageGraph(
            kind,
            stage,
            extracted(chain(*groups), made, outputs),
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
