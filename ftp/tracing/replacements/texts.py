"""Texts of tensors, as in the message of a check: a trace knows few of them."""

from typing import Any

from torch import Tensor

from ftp.torch_internals.fake_tensors import is_fake
from ftp.torch_internals.functorch import unwrapped
from ftp.tracing.data_dependent.texts import UNKNOWN, decides
from ftp.tracing.data_dependent.values_read import captured_value
from ftp.tracing.selected_rows.refused import number_refused


def text_of(x: Tensor, spec: str) -> str:
    """``f"{x:spec}"``; the text of a value that is not known says so."""
    if x.ndim or not is_fake(unwrapped(x)):
        _check_unread(x)
        return Tensor.__format__(x, spec)
    if (value := captured_value(Tensor.item, x)) is not None:
        return format(value, spec)
    _check_unread(x)
    return UNKNOWN


def repr_of(x: Tensor, **options: Any) -> str:
    """``repr(x)``, which is also ``str(x)``; of a traced tensor without its values."""
    _check_unread(x)
    return Tensor.__repr__(x, **options)


def _check_unread(x: Tensor) -> None:
    if is_fake(unwrapped(x)) and decides():
        raise number_refused(is_of_rows=False)
