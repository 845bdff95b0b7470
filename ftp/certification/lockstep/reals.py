"""Floating point as a domain in which recorded programs run; float32 is computed in float64."""

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from ftp.certification.residues.domain import UNINITIALISED
from ftp.ops.exchange import LITERAL
from ftp.torch_internals.pytree import tree_map

FACTORIES = (
    "full",
    "ones",
    "zeros",
    "empty",
    "empty_permuted",
    "scalar_tensor",
    "empty_strided",
)


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float32 else dtype


class Reals:
    def __init__(self, seed: int):
        self.seed = seed
        self._draws = 0

    def call(
        self, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], dtypes: Sequence[Any]
    ) -> Any:
        both: Any = tree_map(
            lambda x: wide(x) if isinstance(x, torch.dtype) else x, (list(args), dict(kwargs))
        )
        args, options = both
        if "device" in options:
            options["device"] = torch.device("cpu")
        if target is LITERAL:
            return torch.tensor(args[0], dtype=args[2]).reshape(tuple(args[1]))
        name = target._schema.name.split("::")[1]
        if dtypes and dtypes[0] is torch.float32 and name in FACTORIES:
            options.setdefault("dtype", torch.float64)
        found = target(*args, **options)
        if name in UNINITIALISED and found.is_floating_point():
            self._draws += 1
            found.copy_(self.draw(found.shape, -self._draws, found.dtype))
        return found

    def draw(self, shape: Sequence[int], key: int, dtype: torch.dtype) -> Tensor:
        generator = torch.Generator().manual_seed(hash((self.seed, key)) & ((1 << 62) - 1))
        return torch.randn(tuple(shape), generator=generator, dtype=torch.float64).to(wide(dtype))

    def laid_out(self, x: Any, strides: Any) -> Any:
        return x

    add = staticmethod(torch.add)
    subtract = staticmethod(torch.sub)
    multiply = staticmethod(torch.mul)
    larger = staticmethod(torch.maximum)
    smaller = staticmethod(torch.minimum)

    def scaled(self, a: Tensor, by: Fraction) -> Tensor:
        return a * float(by)

    def move(self, fn: Callable[..., Tensor], *xs: Tensor) -> Tensor:
        return fn(*xs)

    def separate(self, x: Tensor) -> Tensor:
        return x.clone()

    def write(self, x: Tensor, new: Tensor) -> None:
        x.copy_(new.reshape(x.shape))

    def storage(self, x: Tensor) -> int:
        return x.untyped_storage()._cdata

    def dtype(self, x: Tensor) -> torch.dtype:
        return x.dtype
