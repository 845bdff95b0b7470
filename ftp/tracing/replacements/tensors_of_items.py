"""``torch.tensor([x.sum(), 1.0])``: a new tensor of numbers and of values of the program, which
torch would read.
"""

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any

import torch
from torch import SymFloat, SymInt, Tensor

from ftp.torch_internals.fake_tensors import is_fake
from ftp.torch_internals.functorch import is_batched, unwrapped
from ftp.tracing.data_dependent.traced_number import TracedNumber

# Each with the position of its data.
OF_ITEMS = {torch.tensor: 0, torch.as_tensor: 0, torch.asarray: 0, Tensor.new_tensor: 1}
_OPTIONS = {"dtype", "device"}
_OF_SIZES = (SymInt, SymFloat)


def tensor_of_items(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """The tensor that one of `OF_ITEMS` makes of lists that hold values of the program, without a
    gradient; None of other data, and of lists that torch refuses.
    """
    data = args[OF_ITEMS[func]] if len(args) == OF_ITEMS[func] + 1 else None
    options = {name: value for name, value in kwargs.items() if value not in (None, False)}
    is_made = isinstance(data, list | tuple) or type(data) in (TracedNumber, *_OF_SIZES)
    if not is_made or not options.keys() <= _OPTIONS:
        return None
    shape, items = _shape(data), _items(data)
    if shape is None or not any(map(_is_of_program, items)):
        return None
    if not all(isinstance(x, (int, float, *_OF_SIZES)) or _is_number(x) for x in items):
        return None
    dtypes = (args[0].dtype,) if func is Tensor.new_tensor else map(_dtype, items)
    dtype = options.get("dtype") or reduce(torch.promote_types, dtypes)
    if not dtype.is_floating_point and SymFloat in map(type, items):
        return None
    values = [_value(x, dtype) for x in items]
    device = options.get("device")
    if device is None:
        first = next(x for x, item in zip(values, items, strict=True) if _is_of_program(item))
        device = (args[0] if func is Tensor.new_tensor else first).device
    return torch.stack([x.to(device, dtype) for x in values]).reshape(shape)


def _shape(data: Any) -> tuple[int, ...] | None:
    """The shape of nested lists; None if they are ragged."""
    if not isinstance(data, list | tuple):
        return ()
    inner = {_shape(one) for one in data}
    within = inner.pop() if len(inner) == 1 else None
    return None if within is None else (len(data), *within)


def _items(data: Any) -> list[Any]:
    if not isinstance(data, list | tuple):
        return [data]
    return [x for one in data for x in _items(one)]


def _is_of_program(x: Any) -> bool:
    if not isinstance(x, Tensor):
        return type(x) in (TracedNumber, *_OF_SIZES)
    return is_fake(of := unwrapped(x)) and getattr(of, "constant", None) is None


def _is_number(x: Any) -> bool:
    return isinstance(x, Tensor) and not x.ndim and not x.is_complex() and not is_batched(x)


def _value(x: Any, dtype: torch.dtype) -> Tensor:
    found = x.value if type(x) is TracedNumber else x
    if isinstance(found, Tensor):
        return found.detach()
    is_of_size = type(found) in _OF_SIZES
    return torch.full((), found, dtype=dtype) if is_of_size else torch.tensor(found, dtype=dtype)


def _dtype(x: Any) -> torch.dtype:
    """The dtype that torch finds for an item."""
    if isinstance(x, Tensor):
        return x.dtype
    if isinstance(x, bool):
        return torch.bool
    return torch.int64 if isinstance(x, int | SymInt) else torch.get_default_dtype()
