"""Arguments of a call, nested in dicts, lists and tuples."""

from collections.abc import Callable
from typing import Any


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
