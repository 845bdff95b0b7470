"""Assumptions of one trace: claims about values, and the values of the graph that say whether they
hold.
"""

from typing import Any

import torch
from torch import Tensor

from ftp.axis import is_inside
from ftp.source import user_line


class Assumptions:
    """What a function takes as true while it is traced.

    Attributes:
        claims: each with the user's line.
        conditions: a bool of the graph for each.
    """

    def __init__(self, recorder: Any):
        self._recorder = recorder
        self.claims: list[str] = []
        self.conditions: list[Tensor] = []

    def note(self, condition: Tensor, claim: str) -> None:
        if is_inside():
            return  # each rank has values of its own
        line = user_line()
        whole = _unwrapped(_unwrapped(condition).all())
        self.claims.append(f"{line}: {claim}" if line else claim)
        self.conditions.append(self._recorder.known(whole))


def _unwrapped(tensor: Tensor) -> Tensor:
    """The tensor below all transforms of torch.func; under vmap it has their dims."""
    functorch: Any = torch._C._functorch  # type: ignore[attr-defined]
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor
