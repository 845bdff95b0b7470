"""Assumptions of one trace: claims about values, each with the bool of the graph that is True if it
holds.
"""

from typing import Any

from torch import Tensor

from ftp.axis import is_inside
from ftp.errors import TraceError
from ftp.ops.assume import Condition, assumptions_to
from ftp.source import user_line
from ftp.torch_internals.functorch import unwrapped
from ftp.tracing.data_dependent.known_values import KnownValues
from ftp.tracing.data_dependent.paths import where_taken


class Assumptions:
    """The claims that a trace takes as true.

    Attributes:
        found: per (claim with the user's line, number among equal claims) a bool of the graph;
            None where claims are not checked.
    """

    def __init__(self, recorder: Any, checked: bool, known: KnownValues):
        self._recorder, self._checked, self._values = recorder, checked, known
        self.found: dict[tuple[str, int], Tensor | None] = {}

    def note(self, condition: Condition, claim: str) -> None:
        if is_inside():
            return  # each rank has values of its own
        line = user_line()
        claim = f"{line}: {claim}" if line else claim
        condition, claim = where_taken(condition, claim)
        if isinstance(condition, Tensor) and self._values.all_of(condition) is False:
            raise TraceError(f"{claim}: this does not hold.")
        key = claim, sum(text == claim for text, _ in self.found)
        self.found[key] = None
        if not self._checked:
            return
        if not isinstance(condition, Tensor):
            with assumptions_to(lambda *_: None):  # the claim's own ops note no assumptions
                condition = condition()
        whole = unwrapped(unwrapped(condition).all())
        self.found[key] = self._recorder.known(whole)
