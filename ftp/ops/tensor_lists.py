"""Ops of lists of tensors, such as `torch._foreach_add`, as ops of one tensor after the other."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

PREFIX = "_foreach_"
_BY_POSITION = {"addcmul": (3, "value"), "addcdiv": (3, "value"), "norm": (2, "dtype")}
_OF_NUMBERS = {"maximum": "clamp_min", "minimum": "clamp_max"}  # the tensor ops take no number

# Names of arguments, in their order in every op. Ops of one tensor have other names for some.
_NAMES = (
    "self", "tensors1", "tensor1", "tensor2", "other", "src", "mat2", "exponent", "weight",
    "weights", "scalar", "scalars",
)  # fmt: skip


def one_by_one(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any] | None:
    """The results of ``_foreach_name``; None where it is in place.

    Args:
        name: without the prefix.
    """
    stem, is_in_place = name.removesuffix("_"), name.endswith("_")
    at, by_name = _BY_POSITION.get(stem, (len(args), ""))
    if args[at:]:  # no operand by position of one tensor's op
        args, kwargs = args[:at], {**kwargs, by_name: args[at]}
    found = []
    (count,) = _lengths(args)
    value = kwargs.get("value")
    if isinstance(value, Tensor) and value.shape != (count,):
        raise RuntimeError(f"Expected {count} scalars, got a tensor of shape {(*value.shape,)}.")
    for i in range(count):
        given = [_element(x, i) for x in args]
        named = {
            k: x[i] if k == "value" and isinstance(x, Tensor) else _element(x, i)
            for k, x in kwargs.items()
        }
        found.append(_call(stem, given, named, is_in_place))
    return None if is_in_place else found


def _lengths(args: Sequence[Any]) -> set[int]:
    return {len(x) for x in args if isinstance(x, list | tuple)}


def _is_refused(args: Sequence[Any]) -> bool:
    """Whether torch refuses the lengths of these lists, or the dims of the tensor beside them."""
    lengths = _lengths(args)
    if len(lengths) != 1 or 0 in lengths:
        return True
    return any(x.dim() > 0 for x in args[:2] if isinstance(x, Tensor))


def _element(x: Any, i: int) -> Any:
    return x[i] if isinstance(x, list | tuple) else x


def _call(stem: str, args: Sequence[Any], kwargs: Mapping[str, Any], is_in_place: bool) -> Any:
    if stem == "norm":
        return aten.linalg_vector_norm(*args, **kwargs)
    if isinstance(value := kwargs.get("value"), Tensor):
        x, first, second = args
        args, kwargs = (x, first * value, second), {}
    if not isinstance(args[-1], Tensor):
        stem = _OF_NUMBERS.get(stem, stem)
    if is_in_place and not hasattr(aten, f"{stem}_"):
        x, made = args[0], getattr(aten, stem)(*args, **kwargs)
        if not torch.can_cast(made.dtype, x.dtype):
            raise RuntimeError(
                f"result type {made.dtype} can't be cast to the desired output type {x.dtype}"
            )
        return x.copy_(made)
    return getattr(aten, f"{stem}_" if is_in_place else stem)(*args, **kwargs)


def _function(function: Callable[..., Any]) -> Callable[..., Any]:
    name = function.__name__.removeprefix(PREFIX)

    def fn(*args: Any, **kwargs: Any) -> Any:
        given = (*args, *(kwargs[key] for key in _NAMES if key in kwargs))
        if _is_refused(given):
            return function(*args, **kwargs)
        options = {key: x for key, x in kwargs.items() if key not in _NAMES}
        found = one_by_one(name, given, options)
        return None if found is None else tuple(found)

    return fn


FUNCTIONS: dict[Any, Callable[..., Any]] = {
    getattr(torch, name): _function(getattr(torch, name))
    for name in dir(torch)
    if name.startswith(PREFIX) and hasattr(aten, name.removeprefix(PREFIX).removesuffix("_"))
}
