"""Assumptions of one trace: claims about values, and the bools of the graph that say whether they
hold.
"""

from typing import Any

from torch import Tensor

from ftp.axis import is_inside
from ftp.errors import TraceError
from ftp.ops.assume import Condition, assumptions_to
from ftp.source import user_line
from ftp.torch_internals.functorch import unwrapped
from ftp.tracing.known_values import KnownValues


class Assumptions:
    """What a function takes as true while it is traced.

    Attributes:
        claims: each with the user's line.
        conditions: a bool of the graph for each, where they are checked.
    """

    def __init__(self, recorder: Any, checked: bool):
        self._recorder, self._checked = recorder, checked
        self._values = KnownValues()
        self.claims: list[str] = []
        self.conditions: list[Tensor] = []

    def note(self, condition: Condition, claim: str) -> None:
        if is_inside():
            return  # each rank has values of its own
        line = user_line()
        self.claims.append(f"{line}: {claim}" if line else claim)
        if isinstance(condition, Tensor) and self._values.all_of(condition) is False:
            raise TraceError(f"{self.claims[-1]}: this does not hold.")
        if not self._checked:
            return
        if not isinstance(condition, Tensor):
            with assumptions_to(lambda *_: None):  # the claim's own ops note no assumptions
                condition = condition()
        whole = unwrapped(unwrapped(condition).all())
        self.conditions.append(self._recorder.known(whole))
