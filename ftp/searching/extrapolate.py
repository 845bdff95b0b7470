"""Estimate a deep program from one with few layers: each layer left out adds the seconds and bytes
of one layer.
"""

import math
from collections import Counter
from collections.abc import Sequence
from statistics import median_low
from typing import NamedTuple

from ftp.dataclass import dataclass
from ftp.planning.cost import Hardware
from ftp.planning.layers.labels import label
from ftp.planning.layers.repeats import Folded
from ftp.report.lowered import Lowered


@dataclass(frozen=True)
class Estimate:
    """Seconds of a step, a rank's bytes at the peak, and the share of the gradients that exist
    then.
    """

    seconds: float
    nbytes: int
    share: float


class _OpOfLayer(NamedTuple):
    """An op of a layer, among those that run: its layer, whether it is part of a backward pass, the
    place of its node in the layer, and its number among the ops made from that node.
    """

    layer: int
    is_backward: bool
    at: int
    number: int


def estimate(lowered: Lowered, folded: Folded | None, hardware: Hardware) -> Estimate:
    """The estimate of a whole program from one in which the layers of ``folded`` are left out.

    A layer left out is like the two layers around it: it adds the seconds, and the bytes, that each
    op of the second has more than its twin in the first.
    """
    memory, cost = lowered.memory, lowered.cost(hardware)
    grads = memory.totals.get("gradients", 0)
    share = min(1.0, memory.parts.get("gradients", 0) / grads) if grads else 1.0
    if folded is None or not folded.left_out:
        return Estimate(float(cost), int(memory), share)
    gone, t = folded.left_out, folded.stands_for
    layers = label(lowered.plan.graph, folded.labels, folded.slices)
    of = {
        node.name: (layers.of[node], node.phase % 2 == 1, layers.at[node])
        for node in lowered.plan.graph.nodes
        if node in layers.of
    }
    origins = {node.name: of.get(node.meta.get("origin", "")) for node in lowered.executed.nodes}

    ops = sorted(cost.ops, key=lambda op: op.begin)
    begin = Twins([origins.get(op.name) for op in ops], t)
    begins = [op.begin for op in ops]
    inputs = {node.name for node in lowered.plan.graph.inputs if layers.of.get(node) == t}
    outputs = sum(layers.of.get(value.node) == t for value in lowered.plan.graph.outputs)
    seconds = begin.added(begins, False) + begin.added(begins, True)
    if not hardware.hides_overhead:  # each input and output is checked
        seconds += hardware.overhead * (len(inputs) + outputs)
    seconds = float(cost) + gone * seconds

    moments = memory.timeline
    twins = Twins([origins.get(m.op) for m in moments], t)
    live = [m.live for m in moments]
    held = sum(nbytes for name, nbytes in lowered.input_bytes.items() if name in inputs)
    kept, made = twins.added(live, False), twins.added(live, True)
    begins_keeping, begins_making = twins.begin(False), twins.begin(True)
    # At any moment a layer left out adds its inputs; from its forward pass on the tensors that it
    # keeps for the backward pass; from its backward pass on the gradients that it makes.
    nbytes = 0
    for at, n in enumerate(live):
        is_kept, is_made = at >= begins_keeping, at >= begins_making
        nbytes = max(nbytes, n + gone * (held + is_kept * kept + is_made * made))
    return Estimate(seconds, round(nbytes), share)


class Twins:
    """Where the ops of two adjacent equal layers run in a program."""

    def __init__(self, ops: Sequence[tuple[int, bool, int] | None], t: int):
        self._t = t
        self._places: dict[_OpOfLayer, int] = {}
        seen: Counter[tuple[int, bool, int]] = Counter()
        for place, op in enumerate(ops):
            if op is not None and op[0] in (t, t + 1):
                self._places[_OpOfLayer(*op, seen[op])] = place
                seen[op] += 1

    def begin(self, is_backward: bool) -> float:
        """Where the second of the two layers begins in a pass: in a backward pass, the earlier."""
        second = self._t if is_backward else self._t + 1
        of_pass = (
            place
            for op, place in self._places.items()
            if (op.layer, op.is_backward) == (second, is_backward)
        )
        return min(of_pass, default=math.inf)

    def added(self, values: Sequence[float], is_backward: bool) -> float:
        """The amount that the second layer adds in a pass: the median of what its ops have more
        than their twins. A schedule moves some ops, such as gathers of parameters, out of their
        layer: the starts of two layers may differ in more than the layer.
        """
        sign = -1 if is_backward else 1
        differences = [
            sign * (values[later] - values[place])
            for op, place in self._places.items()
            if (op.layer, op.is_backward) == (self._t, is_backward)
            and (later := self._places.get(op._replace(layer=self._t + 1))) is not None
        ]
        return median_low(differences) if differences else 0.0
