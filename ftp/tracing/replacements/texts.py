"""Texts of tensors with one value, as in the message of a check: a trace knows few of them."""

from torch import Tensor

from ftp.torch_internals.fake_tensors import is_fake
from ftp.torch_internals.functorch import unwrapped
from ftp.tracing.data_dependent.texts import UNKNOWN, decides
from ftp.tracing.data_dependent.values_read import captured_value
from ftp.tracing.selected_rows.refused import number_refused


def text_of(x: Tensor, spec: str) -> str:
    """``f"{x:spec}"``; the text of a value that is not known says so."""
    if x.ndim or not is_fake(unwrapped(x)):
        return Tensor.__format__(x, spec)
    value = captured_value(Tensor.item, x)
    if value is None and decides():
        raise number_refused(is_of_rows=False)
    return UNKNOWN if value is None else format(value, spec)
