"""Arguments of a call: nested in dicts, lists and tuples; by place or by name."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

_LATER = (torch.where, torch.polygamma)  # whose first argument is not ``input``


def flat(tree: Any) -> list[Any]:
    if isinstance(tree, dict):
        return [leaf for value in tree.values() for leaf in flat(value)]
    if isinstance(tree, list | tuple):
        return [leaf for value in tree for leaf in flat(value)]
    return [tree]


def map_leaves(fn: Callable[[Any], Any], tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: map_leaves(fn, value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(map_leaves(fn, value) for value in tree)
    return fn(tree)


def is_of_a_tensor(func: Any) -> bool:
    """Whether the first argument of a function is a tensor, never a size."""
    return func is F.pad or hasattr(Tensor, getattr(func, "__name__", ""))


def input_first(func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Arguments of a function of torch, with ``input`` given by its place.

    >>> input_first(torch.relu, (), {"input": 1}), input_first(torch.relu, (1,), {})
    (((1,), {}), ((1,), {}))
    """
    if args or "input" not in kwargs or func in _LATER or not is_of_a_tensor(func):
        return args, kwargs
    return (kwargs["input"],), {name: x for name, x in kwargs.items() if name != "input"}
