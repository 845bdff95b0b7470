"""Python's operators on rows that a mask selects."""

from typing import Any

import torch
from torch import Tensor

from ftp.tracing.selected_rows.selected import Selected, apply


def _binary(name: str, swapped: bool = False) -> Any:
    function = getattr(torch, name)
    if swapped:
        return lambda self, other: apply(function, (other, self), {})
    return lambda self, *others: apply(function, (self, *others), {})


def _in_place(name: str) -> Any:
    """``rows += other`` as a write, seen under other names of the rows and by a slice's base."""
    method = getattr(Tensor, f"{name}_")

    def of(self: Selected, other: Any) -> Any:
        is_read_only = self.upper_bound is not None or (self.row_dim and self.base is None)
        return NotImplemented if is_read_only else apply(method, (self, other), {})

    return of


for _sign, _name in {
    "add": "add", "sub": "sub", "mul": "mul", "truediv": "div", "pow": "pow", "matmul": "matmul",
    "floordiv": "floor_divide", "mod": "remainder",
}.items():  # fmt: skip
    setattr(Selected, f"__{_sign}__", _binary(_name))
    setattr(Selected, f"__r{_sign}__", _binary(_name, swapped=True))
    if _name != "matmul":
        setattr(Selected, f"__i{_sign}__", _in_place(_name))
for _sign, _name in {
    "eq": "eq", "ne": "ne", "lt": "lt", "le": "le", "gt": "gt", "ge": "ge", "neg": "neg",
    "abs": "abs", "invert": "bitwise_not", "and": "bitwise_and", "or": "bitwise_or",
}.items():  # fmt: skip
    setattr(Selected, f"__{_sign}__", _binary(_name))
Selected.__hash__ = object.__hash__
