"""Check that a pipeline's subgraphs, run in the order of its schedule, compute the traced step.

It shares no code with `split`, only the type of its result. Values are numbered: two nodes have one
number if they are the same op on operands of equal numbers.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ftp.errors import CertificateError
from ftp.ops.mapped_arguments import evaluated, mapped_arguments
from ftp.pipeline.schedule import Action, Actions, run_in_order
from ftp.pipeline.subgraphs import Stages

aten = torch.ops.aten

Number = int


class Numbering:
    """Numbers of values, equal for equal computations."""

    def __init__(self):
        self.known: dict[Any, Number] = {}
        self.terms: dict[Number, tuple[Number, Number]] = {}  # the two sides of a sum

    def of(self, key: Any) -> Number:
        return self.known.setdefault(key, len(self.known))

    def run(self, graph: fx.Graph, inputs: Sequence[Number]) -> list[Number]:
        """The numbers of a graph's outputs."""
        return evaluated(graph, inputs, self._call)

    def _call(self, node: fx.Node, known: Mapping[fx.Node, Number]) -> Number:
        order = {n: f"%{known[n]}" for n in node.all_input_nodes}
        args = mapped_arguments(node, order.__getitem__)
        number = self.of(name_of_one(node) or called(node.target, args))
        if node.target is aten.add.Tensor and not node.kwargs:
            sides = [known[a] if isinstance(a, fx.Node) else None for a in node.args]
            if None not in sides and len(order) in (1, 2):
                self.terms[number] = sides[0], sides[1]  # type: ignore[assignment]
        return number

    def leaves(self, number: Number) -> Counter[Number]:
        """The terms of a sum of sums, each with how often it is added."""
        found: Counter[Number] = Counter()
        pending = {number: 1}
        while pending:
            n = max(pending)  # a sum's number is above those of its terms
            count = pending.pop(n)
            if n not in self.terms:
                found[n] += count
                continue
            for term in self.terms[n]:
                pending[term] = pending.get(term, 0) + count
        return found


def called(target: Any, args: Any) -> Any:
    """A name for a call. The graphs, which hold the targets, outlive the numbering."""
    return id(target), str(args)


def name_of_one(node: fx.Node) -> Any:
    """A name for a 0-d 1 in any form, the gradient of a loss by itself; None for other values."""
    is_one = node.target is aten.ones_like.default or (
        node.target is aten.full.default and tuple(node.args) == ([], 1)
    )
    val = node.meta.get("val") if is_one else None
    if not isinstance(val, torch.Tensor) or val.ndim:
        return None
    return "one", str(val.dtype), str(val.device)


def check_stages(
    traced: fx.Graph,
    params: int,
    batch: int,
    leaves: Sequence[int],
    stages: Stages,
    actions: Actions,
) -> None:
    """Raise unless every result and gradient of every microbatch is that of the traced step.

    When a subgraph runs, its rank must have computed or received all inputs; every message must be
    read, or passed on; every action's results must be used once.

    Args:
        traced: the step, before it was split: ``params`` inputs, ``batch`` inputs, constants.
        leaves: the parameters whose gradients follow its other results.

    Raises:
        CertificateError: the first value that is wrong or missing. That is a fault of ftp: please
            report it.
    """
    numbering = Numbering()
    inputs = sum(node.op == "placeholder" for node in traced.nodes)
    roots = [numbering.of(("input", i)) for i in range(inputs)]
    due = numbering.run(traced, roots)
    numbers: dict[str, Number] = {}
    _number_pieces(stages, params, batch, roots, numbering, numbers)
    results = len(stages.results)
    for i, (_, name) in enumerate(stages.results):
        if numbers.get(name) != due[i]:
            raise CertificateError(f"Result {i} of the step is not what %{name} holds.")
    wanted = dict(zip(leaves, due[results:], strict=True))
    for leaf, found in enumerate(stages.gradients):
        have: Counter[Number] = Counter()
        for name in found.values():
            have += numbering.leaves(numbers[name])
        if have != (numbering.leaves(wanted[leaf]) if leaf in wanted else Counter()):
            raise CertificateError(
                f"The gradient of parameter {leaf} is not the sum of what the stages"
                f" {', '.join(map(str, found))} compute."
            )
    _check_order(stages, actions)


def _number_pieces(
    stages: Stages,
    params: int,
    batch: int,
    roots: Sequence[Number],
    numbering: Numbering,
    numbers: dict[str, Number],
) -> None:
    left = dict(stages.subgraphs)
    while left:
        ready = [key for key, p in left.items() if all(name in numbers for name in p.values)]
        if not ready:
            lacking = next(name for p in left.values() for name in p.values if name not in numbers)
            raise CertificateError(f"No subgraph computes %{lacking}, which another one reads.")
        for key in ready:
            subgraph = left.pop(key)
            given = [
                *(roots[i] for i in subgraph.params),
                *(roots[params + i] for i in subgraph.batch),
                *(numbers[name] for name in subgraph.values),
                *(roots[params + batch + i] for i in subgraph.constants),
            ]
            for name, number in zip(
                subgraph.outputs, numbering.run(subgraph.gm.graph, given), strict=True
            ):
                if numbers.setdefault(name, number) != number:
                    raise CertificateError(f"%{name} is two different values.")


def _check_order(stages: Stages, actions: Actions) -> None:
    """Run the schedule on names instead of tensors."""
    run = _NameRun(stages)
    at = run_in_order(actions, lambda _, action: run.act(action))
    stuck = [own[i] for own, i in zip(actions, at, strict=True) if i < len(own)]
    if stuck:
        raise CertificateError(f"{stuck[0]!r} waits for a message that nobody sends.")
    if run.posted:
        raise CertificateError(f"The message {next(iter(run.posted))} is sent and never read.")
    _check_counts(stages, run.counted, len({i for own in actions for _, _, i in own}))


class _NameRun:
    """A schedule as it runs on names.

    Attributes:
        held: by stage and microbatch, the names that the stage holds.
        posted: messages that are sent and not yet read, by kind, stage and microbatch.
        counted: how often each result, and each gradient of a stage, was computed.
    """

    def __init__(self, stages: Stages):
        self._stages = stages
        self.held: dict[tuple[int, int], set[str]] = {}
        self.posted: dict[tuple[str, int, int], tuple[str, ...]] = {}
        self.counted: Counter[tuple[str, int]] = Counter()

    def act(self, action: Action) -> bool:
        """Run an action; False if its message has not been sent yet.

        Raises:
            CertificateError: it reads or sends a name that its stage does not hold.
        """
        kind, stage, i = action
        awaited = self._awaited(action)
        if awaited is not None and awaited not in self.posted:
            return False
        here = self.held.setdefault((stage, i), set())
        if awaited is not None:
            here.update(self.posted.pop(awaited))
        subgraph = self._stages.subgraphs.get((kind, stage))
        if subgraph is not None:
            _require_held(action, "reads", subgraph.values, here)
            here.update(subgraph.outputs)
        self._send(action, here)
        self._count(action, here)
        return True

    def _awaited(self, action: Action) -> tuple[str, int, int] | None:
        kind, stage, i = action
        if kind == "F" and stage:
            return "F", stage - 1, i
        if kind in "BI" and stage + 1 < len(self._stages.backward):
            return "B", stage + 1, i
        return None

    def _send(self, action: Action, here: set[str]) -> None:
        kind, stage, i = action
        if kind == "F" and stage + 1 < len(self._stages.forward):
            names, key = self._stages.forward[stage], "F"
        elif kind in "BI" and stage:
            names, key = self._stages.backward[stage], "B"
        else:
            return
        _require_held(action, "sends", names, here)
        self.posted[key, stage, i] = names

    def _count(self, action: Action, here: set[str]) -> None:
        kind, stage, _ = action
        if kind == "F":
            self.counted.update(
                ("result", n) for n, (k, _) in enumerate(self._stages.results) if k == stage
            )
        if kind in "BW":
            self.counted.update(
                (f"gradient {leaf}", stage)
                for leaf, found in enumerate(self._stages.gradients)
                if stage in found and found[stage] in here
            )


def _require_held(action: Action, does: str, names: Sequence[str], here: set[str]) -> None:
    if missing := [name for name in names if name not in here]:
        raise CertificateError(
            f"{action!r} {does} %{missing[0]}, which stage {action.stage} does not hold by then."
        )


def _check_counts(stages: Stages, counted: Counter[tuple[str, int]], microbatches: int) -> None:
    due: Mapping[tuple[str, int], int] = {
        **{("result", n): microbatches for n in range(len(stages.results))},
        **{
            (f"gradient {leaf}", stage): microbatches
            for leaf, found in enumerate(stages.gradients)
            for stage in found
        },
    }
    for what, count in due.items():
        if counted[what] != count:
            raise CertificateError(
                f"{what[0]} of stage {what[1]} is computed {counted[what]} times in"
                f" {microbatches} microbatches."
            )
