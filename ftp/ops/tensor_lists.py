"""Ops of lists of tensors, such as `torch._foreach_add`, as ops of one tensor after the other."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

PREFIX = "_foreach_"
_BY_POSITION = {"addcmul": (3, "value"), "addcdiv": (3, "value"), "norm": (2, "dtype")}
_OF_NUMBERS = {"maximum": "clamp_min", "minimum": "clamp_max"}  # the tensor ops take no number

_OWN_NAMES = {"self", "scalar", "scalars", "tensors1", "weights"}


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
        return args[0].copy_(getattr(aten, stem)(*args, **kwargs))
    return getattr(aten, f"{stem}_" if is_in_place else stem)(*args, **kwargs)


def _function(function: Callable[..., Any]) -> Callable[..., Any]:
    name = function.__name__.removeprefix(PREFIX)

    def fn(*args: Any, **kwargs: Any) -> Any:
        if len(_lengths(args)) != 1 or 0 in _lengths(args) or _OWN_NAMES & kwargs.keys():
            return function(*args, **kwargs)
        found = one_by_one(name, args, kwargs)
        return None if found is None else tuple(found)

    return fn


FUNCTIONS: dict[Any, Callable[..., Any]] = {
    getattr(torch, name): _function(getattr(torch, name))
    for name in dir(torch)
    if name.startswith(PREFIX) and hasattr(aten, name.removeprefix(PREFIX).removesuffix("_"))
}
