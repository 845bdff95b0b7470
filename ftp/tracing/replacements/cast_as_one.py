"""Functions whose arguments ``torch.autocast`` casts, and that torch.func takes apart before it
does: in a gradient their ops were cast one by one, to dtypes that do not go together or are narrow.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def _cast_as_one(fn: Callable[..., Any], to: torch.dtype | None = None) -> Callable[..., Any]:
    """``fn`` of arguments that autocast casts to ``to``, or else to its own dtype."""

    @wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        device = next(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)).device.type
        if not torch.is_autocast_enabled(device):
            return fn(*args, **kwargs)
        dtype = to or torch.get_autocast_dtype(device)

        def cast(x: Any) -> Any:
            is_cast = isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64
            return x.to(dtype) if is_cast else x

        with torch.autocast(device, enabled=False):
            return fn(*map(cast, args), **{name: cast(x) for name, x in kwargs.items()})

    return call


CAST_AS_ONE: dict[Any, Callable[..., Any]] = {
    F.scaled_dot_product_attention: _cast_as_one(F.scaled_dot_product_attention),
    F.binary_cross_entropy_with_logits: _cast_as_one(
        F.binary_cross_entropy_with_logits, torch.float32
    ),
}
