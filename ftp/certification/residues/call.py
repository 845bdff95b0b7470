"""Calls of ops on values of a residue field, and the table of ops.

``FUNCTIONS`` has a function for each op's name, for all its overloads. The function takes a
``ResidueCall`` and the op's arguments: values, numbers, or plain tensors of integers.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ftp.certification.residues.field import Field
from ftp.certification.residues.value import Planes, embed, move
from ftp.dataclass import dataclass


@dataclass(frozen=True)
class ResidueCall:
    """A call of an op; ``dtype`` is that of its first result."""

    field: Field
    target: Any
    dtype: torch.dtype

    def lift(self, x: Any) -> Planes:
        """``x`` as a value of the field; ``x`` may be a number or a tensor of integers."""
        if isinstance(x, Planes):
            return x
        if isinstance(x, bool | int | float):
            x = torch.tensor(x, dtype=torch.float64 if isinstance(x, float) else torch.int64)
        return embed(self.field, x, self.dtype)


FUNCTIONS: dict[str, Callable[..., Any]] = {}


def op(*names: str):
    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        FUNCTIONS.update(dict.fromkeys(names, function))
        return function

    return register


def reshaped(a: Planes, shape: Sequence[int]) -> Planes:
    return move(lambda x: x.reshape(tuple(shape)), [a])


def dims_of(x: Planes, dim: Any) -> list[int]:
    if dim is None or dim == []:
        return list(range(len(x.shape)))
    return [d % len(x.shape) if x.shape else 0 for d in ([dim] if isinstance(dim, int) else dim)]
