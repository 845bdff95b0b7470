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
from ftp.ops.mapped_arguments import mapped_arguments
from ftp.pipeline.schedule import Actions
from ftp.pipeline.subgraphs import Stages

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
        env: dict[fx.Node, Number] = {}
        given = iter(inputs)
        for node in graph.nodes:
            if node.op == "placeholder":
                env[node] = next(given)
            elif node.op == "output":
                return [env[n] for n in node.args[0]]
            else:
                read = [env[n] for n in node.all_input_nodes]
                order = {n: f"%{env[n]}" for n in node.all_input_nodes}
                args = mapped_arguments(node, order.__getitem__)
                env[node] = self.of(name_of_one(node) or (str(node.target), str(args)))
                if node.target is torch.ops.aten.add.Tensor and not node.kwargs:
                    sides = [env[a] if isinstance(a, fx.Node) else None for a in node.args]
                    if None not in sides and len(read) in (1, 2):
                        self.terms[env[node]] = sides[0], sides[1]  # type: ignore[assignment]
        raise AssertionError("a graph ends with its output")

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


def name_of_one(node: fx.Node) -> Any:
    """A name for a 0-d 1 in any form, the gradient of a loss by itself; None for other values."""
    aten, val = torch.ops.aten, node.meta.get("val")
    if not isinstance(val, torch.Tensor) or val.ndim:
        return None
    is_one = node.target is aten.ones_like.default or (
        node.target is aten.full.default and tuple(node.args) == ([], 1)
    )
    return ("one", str(val.dtype), str(val.device)) if is_one else None


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
    ranks = len(actions)
    held: dict[tuple[int, int], set[str]] = {}
    posted: dict[tuple[str, int, int], tuple[str, ...]] = {}
    at = [0] * ranks
    counted: Counter[tuple[str, int]] = Counter()
    moved = True
    while moved:
        moved = False
        for rank, own in enumerate(actions):
            while at[rank] < len(own):
                kind, stage, i = own[at[rank]]
                key = None
                if kind == "F" and stage:
                    key = ("F", stage - 1, i)
                elif kind in "BI" and stage + 1 < len(stages.backward):
                    key = ("B", stage + 1, i)
                if key is not None and key not in posted:
                    break
                here = held.setdefault((stage, i), set())
                if key is not None:
                    here.update(posted.pop(key))
                subgraph = stages.subgraphs.get((kind, stage))
                if subgraph is not None:
                    if missing := [name for name in subgraph.values if name not in here]:
                        raise CertificateError(
                            f"{own[at[rank]]!r} reads %{missing[0]}, which stage {stage} does not"
                            " hold by then."
                        )
                    here.update(subgraph.outputs)
                sent = {"F": stages.forward, "B": stages.backward, "I": stages.backward}.get(kind)
                last = stage + 1 == len(stages.forward) if kind == "F" else stage == 0
                if sent is not None and not last:
                    if missing := [name for name in sent[stage] if name not in here]:
                        raise CertificateError(
                            f"{own[at[rank]]!r} sends %{missing[0]}, which stage {stage} does not"
                            " hold by then."
                        )
                    posted["F" if kind == "F" else "B", stage, i] = sent[stage]
                if kind == "F":
                    counted.update(
                        ("result", n) for n, (k, _) in enumerate(stages.results) if k == stage
                    )
                if kind in "BW":
                    counted.update(
                        (f"gradient {leaf}", stage)
                        for leaf, found in enumerate(stages.gradients)
                        if stage in found and found[stage] in here
                    )
                at[rank] += 1
                moved = True
    stuck = [own[i] for own, i in zip(actions, at, strict=True) if i < len(own)]
    if stuck:
        raise CertificateError(f"{stuck[0]!r} waits for a message that nobody sends.")
    if posted:
        raise CertificateError(f"The message {next(iter(posted))} is sent and never read.")
    microbatches = len({i for own in actions for _, _, i in own})
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
