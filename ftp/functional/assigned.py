"""Attributes that a model assigns while it runs, which a block of `remat` takes and gives."""

from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ftp.functional.attributes import CONSTANTS, OF_MODULES, join

FormerAttributes = Iterable[
    tuple[str, nn.Module, Mapping[str, Any]]
]  # by path, with former attributes
# Attributes that hold hooks and slots, and that a call of a program changes.
OWN_BY_CALL = OF_MODULES - {"training"} | {"forward", "flatten_parameters"}
CONTAINERS = (dict, OrderedDict, list, tuple, set)
_PLAIN = CONSTANTS | {complex, torch.Size}


def items_of(value: Any) -> Collection[Any]:
    """The items of a plain container; of another attribute, itself."""
    kind = type(value)
    if kind is dict or kind is OrderedDict:
        return value.values()
    return value if kind in CONTAINERS else (value,)


def assigned_before(modules: FormerAttributes, known: Collection[Any]) -> dict[str, Tensor]:
    """The tensors that were assigned before a block, themselves or in a container: its arguments,
    as what it captures has no gradient. Those of ``known`` are its arguments already.
    """
    ids = set(map(id, known))
    return {
        f"attribute {join(path, name)}[{i}]": item
        for path, module, former in modules
        for name, value in module.__dict__.items()
        if name not in OWN_BY_CALL
        for i, item in enumerate(items_of(value))
        if isinstance(item, Tensor)
        and id(item) not in ids
        and not any(item is was for was in items_of(former.get(name)))
    }


def attributes_now(module: nn.Module) -> dict[str, tuple[Any, Any]]:
    """A module's attributes, each with a copy of the container that it is."""
    return {name: (value, _copy(value)) for name, value in module.__dict__.items()}


def assigned_since(modules: FormerAttributes) -> dict[str, dict[str, tuple[Any, bool]]]:
    """The tensors and plain values that a block has assigned, and tuples, lists and dicts of them,
    by the paths of its modules; each with whether it is a container that the block has written to.
    Other objects are left out: they may hold tensors that end with it.

    Args:
        modules: with ``attributes_now`` of before the block.
    """
    missing = object()
    changed = {
        path: [
            (name, value, value is was and type(value) is not tuple)
            for name, value in module.__dict__.items()
            for was, copied in [former.get(name, (missing, missing))]
            if name not in OWN_BY_CALL and _stays(value) and not _is_same(copied, value)
        ]
        for path, module, former in modules
    }
    return {path: {n: (v, is_same) for n, v, is_same in each} for path, each in changed.items()}


def assign(module: nn.Module, assigned: Mapping[str, tuple[Any, bool]]) -> None:
    """Give a module what ``assigned_since`` found. Who shares a container sees what is written."""
    for name, (value, is_written) in assigned.items():
        if is_written:
            held = module.__dict__[name]
            held.clear()
            (held.update if isinstance(held, dict) else held.extend)(value)
        else:
            module.__dict__[name] = value


def _stays(value: Any) -> bool:
    if type(value) in (dict, OrderedDict):
        return all(type(key) is str and _stays(item) for key, item in value.items())
    if type(value) in (tuple, list):
        return all(map(_stays, value))
    return isinstance(value, Tensor | bool | int | float | str) or type(value) in _PLAIN


def _copy(value: Any) -> Any:
    if type(value) in (dict, OrderedDict):
        return type(value)((key, _copy(item)) for key, item in value.items())
    return type(value)(map(_copy, value)) if type(value) in (tuple, list) else value


def _is_same(former: Any, now: Any) -> bool:
    kind = type(now)
    if type(former) is not kind or kind not in (tuple, list, dict, OrderedDict):
        return former is now
    if isinstance(now, dict):
        return [*former] == [*now] and all(_is_same(former[key], now[key]) for key in now)
    return len(former) == len(now) and all(map(_is_same, former, now))
