"""Texts of tensors with one value, as in the message of a check: a trace knows few of them."""

from torch import Tensor

from ftp.torch_internals.fake_tensors import is_fake
from ftp.torch_internals.functorch import unwrapped
from ftp.tracing.data_dependent.traced_number import Text
from ftp.tracing.data_dependent.values_read import captured_value


def text_of(x: Tensor, spec: str) -> str:
    """``f"{x:spec}"``; the text of a value that is not known says so."""
    if x.ndim or not is_fake(unwrapped(x)):
        return Tensor.__format__(x, spec)
    value = captured_value(Tensor.item, x)
    return Text("a value of the program") if value is None else format(value, spec)
