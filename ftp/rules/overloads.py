"""Aten ops by name, on any torch: one that this torch lacks is skipped by the registries.

``aten`` stands for ``torch.ops.aten``. ``aten.mm.default`` is torch's own overload. The name of an
op that torch lacks gives a ``MissingOp``, which registries skip.
"""

from typing import Any

import torch

from ftp.dataclass import dataclass
from ftp.torch_internals.op_types import OpOverloadPacket


@dataclass(frozen=True)
class MissingOp:
    """An op overload that this torch does not have."""

    name: str


class _Packet:
    """An op's overloads, as ``torch.ops.aten.add`` has them, missing ones as ``MissingOp``."""

    def __init__(self, namespace: str, name: str, packet: OpOverloadPacket | None):
        self._name, self._packet = f"{namespace}.{name}", packet

    def overloads(self) -> list[str]:
        return [] if self._packet is None else self._packet.overloads()

    def __getattr__(self, overload: str) -> Any:
        if overload in self.overloads():
            found = getattr(self._packet, overload)
        else:
            found = MissingOp(f"{self._name}.{overload}")
            MISSING.add(found.name)
        setattr(self, overload, found)
        return found


class Namespace:
    """A namespace of ops, such as ``torch.ops.aten``, in which every op can be named.

    >>> Namespace("aten").mm.default is torch.ops.aten.mm.default
    True
    >>> Namespace("aten").no_such_op.default
    MissingOp(name='aten.no_such_op.default')
    """

    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, op: str) -> Any:
        found = _Packet(self._name, op, getattr(getattr(torch.ops, self._name), op, None))
        setattr(self, op, found)
        return found


MISSING: set[str] = set()  # the names asked for that this torch lacks
aten: Any = Namespace("aten")
prims: Any = Namespace("prims")
