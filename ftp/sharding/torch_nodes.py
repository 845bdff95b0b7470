"""Containers that torch's pytree knows, known to optree too: dataclasses of
``torch.export.register_dataclass``, the outputs of transformers' models.
"""

import dataclasses
from collections.abc import Mapping
from contextlib import suppress
from operator import is_
from typing import Any

import optree
from torch import Tensor

from ftp.dataclass import dataclass
from ftp.torch_internals import pytree


def how_to_give(value: Any) -> str:
    """What to do with a container that optree does not know, as a sentence of messages.

    >>> how_to_give(slice(1))
    "Register the class with optree.register_pytree_node(..., namespace='ftp'), or use a dict."
    """
    if dataclasses.is_dataclass(value):
        name = type(value).__name__
        return f"Register the class, torch.export.register_dataclass({name}), or use a dict."
    if isinstance(value, Mapping):
        return "Give a plain dict, as dict(...) makes of it."
    return (
        "Register the class with optree.register_pytree_node(..., namespace='ftp'), or use a dict."
    )


@dataclass(frozen=True, eq=False)
class NodeContext:
    """What torch keeps of a container beside its children, with a hash, as it may be a list; and
    the names of its children.
    """

    value: Any
    entries: Any = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NodeContext) and self.value == other.value

    def __hash__(self) -> int:
        return 0  # containers of one class differ in their children


_seen: set[Any] = set()
# The attribute with the parts of a container of other leaves than tensors, such as specs, that its
# class cannot hold.
_KEPT = "_ftp_parts"


def adopt_registered(namespace: str) -> None:
    """Registers with optree each class that was registered with torch since the last call."""
    if next(reversed(pytree.SUPPORTED_NODES)) in _seen:
        return
    for kind, node in [*pytree.SUPPORTED_NODES.items()]:
        if kind not in _seen:
            _seen.add(kind)
            if isinstance(kind, type) and not _is_known(kind, namespace):
                _register(kind, node, namespace)


def _is_known(kind: type, namespace: str) -> bool:
    """Whether optree knows the class, or it is torch's own, such as torch.Size."""
    own = kind.__module__.partition(".")[0] == "torch"
    return own or optree.register_pytree_node.get(kind, namespace=namespace) is not None


def _register(kind: type, node: Any, namespace: str) -> None:
    def flatten(tree: Any) -> tuple[Any, NodeContext, Any]:
        if (kept := getattr(tree, "__dict__", {}).get(_KEPT)) is not None:
            return kept
        children, context = node.flatten_fn(tree)
        names = entries(tree)
        kept = optree.tree_map(lambda x: x, context)  # the caller may change its lists and dicts
        return children, NodeContext(kept, names), names

    def entries(tree: Any) -> list[Any] | None:
        if node.flatten_with_keys_fn is None:
            return None
        return [_entry(key) for key, _ in node.flatten_with_keys_fn(tree)[0]]

    def unflatten(context: Any, children: Any) -> Any:
        children = [*children]
        leaves = optree.tree_leaves(children, namespace=namespace)
        if leaves and all(isinstance(leaf, Tensor) for leaf in leaves):
            return node.unflatten_fn(children, context.value)
        with suppress(Exception):  # the class may take tensors only
            made = node.unflatten_fn(children, context.value)
            kept = optree.tree_leaves(made, namespace=namespace)
            if len(kept) == len(leaves) and all(map(is_, kept, leaves)):
                return made
        made = kind.__new__(kind)  # pyright: ignore[reportCallIssue]
        vars(made)[_KEPT] = children, context, context.entries
        return made

    of_keys = optree.GetAttrEntry if node.flatten_with_keys_fn else optree.AutoEntry
    entry_type = optree.MappingEntry if issubclass(kind, Mapping) else of_keys
    optree.register_pytree_node(
        kind, flatten, unflatten, path_entry_type=entry_type, namespace=namespace
    )


def _entry(key: Any) -> Any:
    if isinstance(key, pytree.MappingKey):
        return key.key
    return key.name if isinstance(key, pytree.GetAttrKey) else str(key)
