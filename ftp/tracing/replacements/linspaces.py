"""Functions of torch whose C++ asks for a size as a number."""

from typing import Any

import torch
from torch import SymInt, Tensor

from ftp.tracing.replacements.pools import max_pool1d

_linspace = torch.linspace


def linspace(start: Any, end: Any, steps: Any, **kwargs: Any) -> Tensor:
    """As `torch.linspace`, from both ends as its kernels count, by `torch.arange` of the size."""
    count: Any = steps  # torch's stubs have no symbolic numbers
    dtype = kwargs.get("dtype") or torch.get_default_dtype()
    ends_are_numbers = not any(isinstance(x, Tensor | complex) for x in (start, end))
    is_plain = not isinstance(steps, SymInt) or "out" in kwargs
    if is_plain or not ends_are_numbers or not dtype.is_floating_point:
        return _linspace(start, end, count, **kwargs)
    kwargs.pop("dtype", None)
    if count == 1:
        return torch.full((1,), start, dtype=dtype, **kwargs)
    needs_gradient = kwargs.pop("requires_grad", False)
    at: Any = torch.arange(count, dtype=torch.float64, **kwargs)
    step = (end - start) / (count - 1)
    found = torch.where(at < count // 2, start + at * step, end - (count - 1 - at) * step)
    return found.to(dtype).requires_grad_(needs_gradient)


OF_SIZES = {"linspace": linspace, "max_pool1d": max_pool1d}
"""Functions of torch that take symbolic sizes in these forms."""
