"""The structure of a program's result as plain data. A container of a registered class is written
as a reference to an argument, or a part of one, of that structure: no class is looked up by name.
"""

from collections import OrderedDict
from typing import Any

import optree

from ftp.errors import ProgramFileError
from ftp.sharding.counted_rows import CountedRows
from ftp.sharding.pytree import NAMESPACE, flatten, kind_of

_PLAIN = {
    tuple: "tuple",
    list: "list",
    dict: "dict",
    OrderedDict: "ordered",
    CountedRows: "counted rows",
}
_MAKE = {"tuple": tuple, "list": list, "counted rows": CountedRows._make}


def write_tree(tree: optree.PyTreeSpec, given: optree.PyTreeSpec) -> Any:
    """Plain data of a result's structure.

    Args:
        given: the structure of the arguments.

    Raises:
        ProgramFileError: a container of a class that no argument holds.
    """
    return _written(_example(tree), _parts(given))


def read_tree(data: Any, given: optree.PyTreeSpec) -> optree.PyTreeSpec:
    """The structure that `write_tree` was given, for arguments of the structure ``given``."""
    parts = list(_parts(given).values())
    return flatten(_made(data, parts))[1]


def _example(tree: optree.PyTreeSpec) -> Any:
    return tree.unflatten(range(tree.num_leaves))


def _parts(given: optree.PyTreeSpec) -> dict[optree.PyTreeSpec, Any]:
    """The containers in the arguments, by structure, each with an example."""
    found: dict[optree.PyTreeSpec, Any] = {}
    stack = [_example(given)]
    while stack:
        tree = stack.pop()
        if tree is None or optree.tree_is_leaf(tree, none_is_leaf=False, namespace=NAMESPACE):
            continue
        found.setdefault(flatten(tree)[1], tree)
        stack += optree.tree_flatten_one_level(
            tree, none_is_leaf=False, namespace=NAMESPACE
        ).children
    return found


def _written(tree: Any, parts: dict[optree.PyTreeSpec, Any]) -> Any:
    if tree is None:
        return None
    if optree.tree_is_leaf(tree, none_is_leaf=False, namespace=NAMESPACE):
        return 0
    kind = _PLAIN.get(type(tree))
    if kind is None or (kind in ("dict", "ordered") and not _are_plain(tree)):
        spec = flatten(tree)[1]
        if spec not in parts:
            raise ProgramFileError(
                f"The result holds {kind_of(tree)}, a structure that no argument has. A saved"
                " program returns tuples, lists and dicts of text and numbers, and containers that"
                " it is given: return one of these."
            )
        return ["given", list(parts).index(spec)]
    if kind in ("dict", "ordered"):
        return [kind, [[key, _written(child, parts)] for key, child in tree.items()]]
    return [kind, [_written(child, parts) for child in tree]]


def _are_plain(tree: Any) -> bool:
    return all(type(key) in (str, int, bool) for key in tree)


def _made(data: Any, parts: list[Any]) -> Any:
    if data is None or data == 0:
        return data
    kind, rest = data
    if kind == "given":
        return parts[rest]
    if kind in ("dict", "ordered"):
        pairs = [(key, _made(child, parts)) for key, child in rest]
        return OrderedDict(pairs) if kind == "ordered" else dict(pairs)
    return _MAKE[kind](_made(child, parts) for child in rest)
