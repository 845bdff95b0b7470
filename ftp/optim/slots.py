"""What an optimizer keeps for one parameter: named tensors, and which of them lie as the
parameter does.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import optree
from torch.utils import _pytree as pytree

from ftp.sharding.pytree import PartlyCovered


class Slots(PartlyCovered):
    """``{slot: tensor}`` of one parameter; a spec given for all of it is the parameter's.

    It holds for the slots that are shaped as the parameter is (``like``); counters and factored
    moments are replicated.

    >>> slots = Slots({"step": 0, "exp_avg": 1}, like=["exp_avg"])
    >>> slots.covered("tp", "whole")
    ['tp', 'whole']
    """

    __slots__ = ("like",)

    def __init__(self, items: Mapping[str, Any], like: Iterable[str] = ()):
        super().__init__(items)
        self.like = tuple(sorted(like))

    def __reduce__(self):
        return Slots, (dict(self), self.like)

    def covered(self, spec: Any, whole: Any) -> list[Any]:
        """Per leaf, in optree's order, ``spec`` or ``whole``."""
        return [spec if name in self.like else whole for name in sorted(self)]


def _flatten(slots: Any) -> tuple[list[Any], tuple, tuple]:
    names = tuple(sorted(slots))
    return [slots[name] for name in names], (names, slots.like), names


def _unflatten(metadata: Any, children: Any) -> Slots:
    names, like = metadata
    made = Slots.__new__(
        Slots
    )  # of every parameter at every step: what is known to be sorted is not sorted again
    made.update(zip(names, children, strict=True))
    made.like = like
    return made


# Globally, so that optree without a namespace sees through it too.
optree.register_pytree_node(
    Slots,
    _flatten,
    _unflatten,
    path_entry_type=optree.MappingEntry,
    namespace=optree.registry.__GLOBAL_NAMESPACE,  # pyright: ignore[reportAttributeAccessIssue]
)
# And with torch's, which torch.vmap and torch.func look with.
pytree.register_pytree_node(
    Slots,
    lambda slots: _flatten(slots)[:2],
    lambda children, metadata: _unflatten(metadata, children),
    serialized_type_name="ftp.optim.slots.Slots",
)
