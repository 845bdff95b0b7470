"""Estimate a deep program from one with few layers: each layer left out adds the seconds and bytes
of one layer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True)
class _Place:
    """The layer of an op, if any, and whether the op is part of a backward pass."""

    layer: int | None
    is_backward: bool


def estimate(lowered: Lowered, folded: Folded | None, hardware: Hardware) -> Estimate:
    """The estimate of a whole program from one in which the layers of ``folded`` are left out.

    A layer left out is like the two layers around it: it adds the seconds, and the bytes, between
    the starts of those two.
    """
    memory, cost = lowered.memory, lowered.cost(hardware)
    grads = memory.totals.get("gradients", 0)
    share = min(1.0, memory.parts.get("gradients", 0) / grads) if grads else 1.0
    if folded is None or not folded.left_out:
        return Estimate(float(cost), int(memory), share)
    gone, t = folded.left_out, folded.stands_for
    layers = label(lowered.plan.graph, folded.labels, folded.slices)
    places = {
        node.name: _Place(layers.of.get(node), node.phase % 2 == 1)
        for node in lowered.plan.graph.nodes
    }
    nowhere = _Place(None, False)
    of = {
        node.name: places.get(node.meta.get("origin", ""), nowhere)
        for node in lowered.executed.nodes
    }

    ops = sorted(cost.ops, key=lambda op: op.begin)
    begin = _firsts([of.get(op.name, nowhere) for op in ops], t)
    seconds = float(cost) + gone * _added([op.begin for op in ops], begin)

    moments = memory.timeline
    first = _firsts([of.get(m.op, nowhere) for m in moments], t)
    live = [m.live for m in moments]
    inputs = {node.name for node in lowered.plan.graph.inputs if layers.of.get(node) == t}
    held = sum(nbytes for name, nbytes in lowered.input_bytes.items() if name in inputs)
    kept = _between(live, first, False)
    made = -_between(live, first, True)
    # At any moment a layer left out adds its inputs; from its forward pass on the tensors that it
    # keeps for the backward pass; from its backward pass on the gradients that it makes.
    nbytes = 0
    forward, backward = first(True, False), first(False, True)
    for at, n in enumerate(live):
        is_kept, is_made = (
            forward is not None and at >= forward,
            backward is not None and at >= backward,
        )
        nbytes = max(nbytes, n + gone * (held + is_kept * kept + is_made * made))
    return Estimate(seconds, round(nbytes), share)


_First = Callable[[bool, bool], int | None]


def _firsts(places: Sequence[_Place], t: int) -> _First:
    """The start of the forward and backward pass of the earlier and the later of the two layers."""
    found: dict[tuple[bool, bool], int] = {}
    for at, place in enumerate(places):
        if place.layer in (t, t + 1):
            found.setdefault((place.layer == t + 1, place.is_backward), at)
    return lambda is_later, is_backward: found.get((is_later, is_backward))


def _added(values: Sequence[float], first: _First) -> float:
    """The amount that a layer adds in both passes; in a backward pass the later layer is first."""
    return _between(values, first, False) - _between(values, first, True)


def _between(values: Sequence[float], first: _First, is_backward: bool) -> float:
    """The difference between the starts of the two layers' passes."""
    t, after = first(False, is_backward), first(True, is_backward)
    return 0.0 if t is None or after is None else values[after] - values[t]
