"""Operands of functions of selected rows if the mask selects no row.

torch then computes on an empty tensor. A program computes on all rows: an inf or nan among them
would reach gradients, because inf and nan times zero are nan.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ftp.tracing.captured_tensors import node_of

aten = torch.ops.aten
_FORMS = {
    *(aten.view.default, aten._unsafe_view.default, aten.t.default, aten.transpose.int),
    *(aten.permute.default, aten.unsqueeze.default, aten.select.int, aten.slice.Tensor),
    *(aten.expand.default, aten._to_copy.default, aten.detach.default, aten.alias.default),
}
# Functions with values or derivatives that are inf or nan at some finite operands.
_DIVISIONS = {"div", "divide", "true_divide"}
_NAMES = """
    floor_divide fmod remainder pow reciprocal sqrt rsqrt log log2 log10 log1p tan asin acos atan2
    acosh atanh erfinv lgamma digamma hypot logit addcdiv xlogy prod cumprod norm
    linalg_vector_norm linalg_norm normalize var std cosine_similarity
"""
_SINGULAR = {*_DIVISIONS, *_NAMES.split()}


def is_singular_call(name: str, args: Sequence[Any]) -> bool:
    """Whether a call may give inf or nan, or have such derivatives, at finite operands. Division by
    a number, and powers of one or more, do not.
    """
    number = args[1] if len(args) > 1 and isinstance(args[1], int | float) else None
    if name in _DIVISIONS:
        return not number
    return name in _SINGULAR and (name != "pow" or number is None or number < 1)


def finite(x: Tensor, is_any: Tensor, is_singular: bool) -> Tensor:
    """An operand of a function of rows, replaced by finite numbers where no row is selected.

    Args:
        is_any: whether the mask selects a row.
        is_singular: of `is_singular_call`. If false, inputs are kept: they are assumed to be
        finite.
    """
    if not (x.is_floating_point() or x.is_complex()):
        return torch.where(is_any, x, torch.ones_like(x)) if is_singular else x
    return unless_none(x, is_any) if is_singular or not _is_given(x) else x


def unless_none(x: Tensor, is_any: Tensor) -> Tensor:
    """``x`` if any row is selected. Otherwise 0.5 for floats, where most functions are smooth, or
    0.
    """
    floats = x.dtype.is_floating_point or x.dtype.is_complex
    spare = torch.full((), 0.5 if floats else 0, dtype=x.dtype, device=x.device)
    return torch.where(is_any, x, spare)


def _is_given(x: Tensor) -> bool:
    """Whether a tensor is an input or a captured tensor, or its elements in another form."""
    node = node_of(x)
    while node is not None and node.target in _FORMS:
        node = node.all_input_nodes[0]
    return node is None or node.op in ("placeholder", "get_attr")
