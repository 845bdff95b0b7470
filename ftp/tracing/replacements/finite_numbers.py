"""``math.isfinite``, ``isinf`` and ``isnan`` of values of the program, as in checks of a loss."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from ftp.torch_internals.fake_tensors import is_fake
from ftp.torch_internals.functorch import unwrapped
from ftp.tracing.data_dependent.traced_number import TracedNumber
from ftp.tracing.replacements.replaced import replaced


def finite_numbers() -> AbstractContextManager[None]:
    """Within the block they take traced numbers and tensors of one element."""
    return replaced(math, {name: _of_values(name) for name in ("isfinite", "isinf", "isnan")})


def _of_values(name: str) -> Callable[[Any], Any]:
    plain, of_tensors = getattr(math, name), getattr(torch, name)

    def of(x: Any, /) -> Any:
        value = x.value if isinstance(x, TracedNumber) else x
        if not (isinstance(value, Tensor) and value.numel() == 1 and is_fake(unwrapped(value))):
            return plain(x)
        return TracedNumber(of_tensors(value.detach()).reshape(()))

    return of
