"""The guards of a symbolic trace: what was asked of sizes, with the user's lines."""

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from sympy.logic.boolalg import Boolean
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._sympy import functions as sizes_functions

if TYPE_CHECKING:
    from ftp.tracing.symbolic import Symbolic

_TORCH = str(torch.__file__)


class Guards(ShapeEnv):
    """Notes the user's line of every guard, and questions of Python code that earlier guards
    answer.
    """

    symbolic: "Symbolic"
    line: Callable[[], str] = staticmethod(lambda: "")

    def __init__(self) -> None:
        super().__init__(specialize_zero_one=False, duck_shape=False)
        self.lines: list[str] = []
        self.is_pythons: list[bool] = []
        self.answered: dict[Any, bool] = {}

    def evaluate_expr(self, orig_expr: Any, *args: Any, **kwargs: Any) -> Any:
        found = super().evaluate_expr(orig_expr, *args, **kwargs)
        is_new = len(self.lines) < len(self.guards)
        while len(self.lines) < len(self.guards):
            self.lines.append(self.line())
            self.is_pythons.append(_is_pythons())
        is_question = isinstance(orig_expr, Boolean) and bool(orig_expr.free_symbols)
        if not is_new and is_question and orig_expr not in self.answered and _is_pythons():
            self.answered[orig_expr] = bool(found)
        return found


def _is_pythons() -> bool:
    """Whether Python code, rather than C++, evaluates the ``SymBool`` or ``SymInt``."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != _TORCH:
        if frame.f_code.co_name == "__torch_dispatch__":
            return False
        frame = frame.f_back
    return frame is not None and frame.f_code.co_name in ("__bool__", "__int__", "__index__")


def says_one(condition: Any) -> bool:
    """Whether a condition says that a size is one or zero; not that a number divides it."""
    if type(condition).__name__ != "Equality":
        return False
    is_of_remainder = condition.has(sizes_functions.Mod, sizes_functions.PythonMod)
    return not is_of_remainder and not {0, 1}.isdisjoint(condition.args)


def is_number(condition: Any) -> bool:
    """Whether a condition says that a formula of sums and products has one value."""
    return type(condition).__name__ == "Equality" and not condition.has(
        sizes_functions.Mod, sizes_functions.PythonMod, sizes_functions.FloorDiv
    )
