"""Optimizer state of one parameter: named tensors, some sharded like the parameter."""

from collections.abc import Iterable, Mapping
from typing import Any

import optree

from ftp.sharding.pytree import PartlyCovered
from ftp.torch_internals import pytree


class Slots(PartlyCovered):
    """``{slot: tensor}`` of one parameter.

    One spec for all slots applies to the slots of the parameter's shape (``like``). Others, such as
    step counters and factored moments, are replicated.

    >>> slots = Slots({"step": 0, "exp_avg": 1}, like=["exp_avg"])
    >>> slots.covered("tp", "whole")
    ['tp', 'whole']
    """

    __slots__ = ("_metadata",)
    _metadata: tuple[tuple[str, ...], tuple[str, ...]]  # slots in order, and ``like``

    def __init__(self, items: Mapping[str, Any], like: Iterable[str] = ()):
        super().__init__(items)
        self._metadata = tuple(sorted(items)), tuple(sorted(like))

    @property
    def like(self) -> tuple[str, ...]:
        return self._metadata[1]

    def __reduce__(self):
        return Slots, (dict(self), self.like)

    def covered(self, spec: Any, whole: Any) -> list[Any]:
        """Per leaf, in optree's order, ``spec`` or ``whole``."""
        return [spec if name in self.like else whole for name in sorted(self)]


# These functions run for every parameter at every step.
def _flatten(slots: Any) -> tuple[Iterable[Any], tuple, tuple]:
    names, like = metadata = slots._metadata
    if tuple(slots) == names:
        return slots.values(), metadata, names
    names = tuple(sorted(slots))
    return [slots[name] for name in names], (names, like), names


def _flatten_to_list(slots: Any) -> tuple[list[Any], tuple]:
    children, metadata, _ = _flatten(slots)
    return list(children), metadata


def _unflatten(metadata: Any, children: Any) -> Slots:
    made = Slots.__new__(Slots)  # not ``Slots(...)``, which sorts
    made.update(zip(metadata[0], children))  # noqa: B905  strict takes a third of this function
    made._metadata = metadata
    return made


# In optree's global namespace, so that calls without a namespace flatten it too.
optree.register_pytree_node(
    Slots,
    _flatten,
    _unflatten,
    path_entry_type=optree.MappingEntry,
    namespace=optree.registry.__GLOBAL_NAMESPACE,  # pyright: ignore[reportAttributeAccessIssue]
)
# torch.vmap and torch.func use torch's pytree.
pytree.register_pytree_node(
    Slots,
    _flatten_to_list,
    lambda children, metadata: _unflatten(metadata, children),
    serialized_type_name="ftp.optim.slots.Slots",
)
