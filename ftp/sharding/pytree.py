"""Pytrees: leaves with their names and paths, spec trees and prefixes of them."""

import difflib
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

import numpy as np
import optree
import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ftp.dataclass import dataclass
from ftp.errors import SpecError, raise_all
from ftp.sharding.balance import misfits
from ftp.sharding.check_spec import check_spec
from ftp.sharding.patterns import Path, dotted, listed
from ftp.sharding.spec import P
from ftp.sharding.torch_nodes import adopt_registered

NAMESPACE = "ftp"


def flatten(
    tree: Any, is_leaf: Callable[[Any], bool] | None = None
) -> tuple[list[Any], optree.PyTreeSpec]:
    """The leaves of ``tree`` in optree's order, and its structure. ``None`` is not a leaf; what
    ``is_leaf`` says is one is not entered.

    >>> flatten({"b": [1, None], "a": 2})[0]
    [2, 1]
    """
    adopt_registered(NAMESPACE)
    return optree.tree_flatten(tree, is_leaf, none_is_leaf=False, namespace=NAMESPACE)


class KeyOrders:
    """The keys of each dict of a tree in their order, which a structure keeps and does not compare.

    >>> orders = KeyOrders(({"b": 1, "a": {"d": 2, "c": 3}}, [4]))
    >>> orders.keys
    (('b', 'a'), ('d', 'c'))
    >>> orders.hold(({"b": 5, "a": {"c": 7, "d": 6}}, [8]))
    False
    """

    def __init__(self, tree: Any):
        # Of each dict of several keys, and of each node on the way to one: the number of its
        # parent, how to get it from its parent, and its keys.
        self._nodes: list[tuple[int, Callable[[Any], Any], tuple[Any, ...]]] = []
        self._add(tree, 0, itemgetter(0))
        self.keys = tuple(keys for *_, keys in self._nodes if keys)

    def _add(self, node: Any, parent: int, get: Callable[[Any], Any]) -> None:
        keys = tuple(node) if type(node) in _DICTS and len(node) > 1 else ()
        self._nodes.append((parent, get, keys))
        at = len(self._nodes)
        for get_child, child in _inner_nodes(node):
            self._add(child, at, get_child)
        if not keys and len(self._nodes) == at:
            self._nodes.pop()

    def hold(self, tree: Any) -> bool:
        """Whether a tree of the same structure has the same orders."""
        nodes = [(tree,)]
        for parent, get, keys in self._nodes:
            node = get(nodes[parent])
            if keys and tuple(node) != keys:
                return False
            nodes.append(node)
        return True


def _inner_nodes(node: Any) -> list[tuple[Callable[[Any], Any], Any]]:
    """The children of a node that are no tensors, each with how to get it."""
    if type(node) in _DICTS:
        named = node.items()
    elif type(node) in (list, tuple):
        named = enumerate(node)
    elif isinstance(node, _LEAVES) or _is_leaf(node):
        return []
    else:
        children = _one_level(node).children
        return [(partial(_child, i), child) for i, child in enumerate(children)]
    return [(itemgetter(k), child) for k, child in named if not isinstance(child, torch.Tensor)]


def _child(i: int, node: Any) -> Any:
    return _one_level(node).children[i]


_DICTS = (dict, OrderedDict, defaultdict)
_LEAVES = (torch.Tensor, int, float, str, type(None))


def leaf_names(tree: Any, root: str) -> list[str]:
    """The name of each leaf in messages.

    >>> leaf_names({"mlp": {"up": 1}, "norms": [2]}, "params")
    ["params['mlp']['up']", "params['norms'][0]"]
    """
    accessors = optree.tree_accessors(tree, none_is_leaf=False, namespace=NAMESPACE)
    return [accessor.codify(root) for accessor in accessors]


def leaf_paths(tree: Any) -> list[Path]:
    """The path of each leaf, as patterns match it; dots inside a key separate elements.

    >>> leaf_paths({"mlp": {"up": 1}, "norms.first": [2]})
    [('mlp', 'up'), ('norms', 'first', '0')]
    """
    paths = optree.tree_paths(tree, none_is_leaf=False, namespace=NAMESPACE)
    return [tuple(element for key in path for element in str(key).split(".")) for path in paths]


# The paths of a tied weight are remembered with the tensor, not the tree, so that they hold for
# any copy of the tree.
_paths_of_tied: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def remember_tied(tensor: torch.Tensor, paths: Sequence[str]) -> None:
    """Remember all dotted paths of a tied weight, its own first."""
    _paths_of_tied[tensor] = tuple(tuple(path.split(".")) for path in paths)


def tied_paths(leaf: Any, path: Path) -> tuple[Path, ...]:
    """All paths of a leaf: ``path``, and those of a tied weight that it is.

    >>> weight = torch.ones(2)
    >>> remember_tied(weight, ["emb.weight", "head.weight"])
    >>> tied_paths(weight, ("model", "emb", "weight"))
    (('model', 'emb', 'weight'), ('model', 'head', 'weight'))
    """
    known: tuple[Path, ...] = (
        (_paths_of_tied.get(leaf) or ()) if isinstance(leaf, torch.Tensor) else ()
    )
    own = next((p for p in known if path[-len(p) :] == p), None)
    if own is None:
        return (path,)
    root = path[: len(path) - len(own)]
    return (path, *(root + other for other in known if other != own))


class Specs(dict):
    """The result of ``plan``: a dict of specs that prints as a table of paths, specs, and the
    patterns that gave them.
    """

    rows: "Mapping[str, SpecRow]"
    note: str

    def __init__(self, specs: Mapping, rows: "Mapping[str, SpecRow]", note: str = ""):
        super().__init__(specs)
        self.rows, self.note = rows, note

    def __reduce__(self):
        return (Specs, (dict(self), self.rows, self.note))

    def __str__(self) -> str:
        lines = [("path", "spec", "shape", "given by")]
        for path, name, spec in zip(
            leaf_paths(self), leaf_names(self, "params"), flatten(self)[0], strict=True
        ):
            row = self.rows.get(name)
            given_by = row.given_by if row and row.spec == spec else "set by hand"
            lines.append(
                (
                    dotted(path),
                    str(spec),
                    str(row.shape) if row and row.shape is not None else "",
                    given_by,
                )
            )
        widths = [max(len(line[column]) for line in lines) for column in range(4)]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in lines
        ) + (f"\n{self.note}" if self.note else "")


@dataclass(frozen=True)
class SpecRow:
    spec: P
    shape: tuple[int, ...] | None
    given_by: str


def _flatten_specs(specs: Any) -> tuple[list[Any], tuple, tuple]:
    level = _one_level(dict(specs))
    return level.children, tuple(level.entries), tuple(level.entries)


def _unflatten_specs(keys: Any, children: Any) -> dict:
    return dict(zip(keys, children, strict=True))


def _one_level(tree: Any) -> Any:
    return optree.tree_flatten_one_level(tree, none_is_leaf=False, namespace=NAMESPACE)


# Registered globally, so that optree.tree_map without a namespace works; it returns a plain dict.
optree.register_pytree_node(
    Specs,
    _flatten_specs,
    _unflatten_specs,
    path_entry_type=optree.MappingEntry,
    namespace=optree.registry.__GLOBAL_NAMESPACE,  # pyright: ignore[reportAttributeAccessIssue]
)


def broadcast_specs(specs: Any, tree: Any, where: str) -> list[P]:
    """One spec for each leaf of ``tree``, from a tree of specs or a prefix of one: a ``P`` covers
    the leaves below it.

    Args:
        where: what messages call ``tree``.

    Raises:
        SpecError: keys that only one of the two has, and values that are no ``P``.

    >>> broadcast_specs({"a": P("dp"), "b": P()}, {"a": {"x": 1, "y": 2}, "b": 3}, "params")
    [P('dp'), P('dp'), P()]
    """
    adopt_registered(NAMESPACE)
    found: list[P] = []
    failures: list[str] = []
    _broadcast(specs, tree, where, found, failures)
    raise_all(SpecError, failures)
    return found


class PartlyCovered(dict):
    """A dict that a spec given for all of it cuts in part: some leaves take it, others are
    replicated.
    """

    def covered(self, spec: Any, whole: Any) -> list[Any]:
        """For each leaf, ``spec`` or ``whole``."""
        raise NotImplementedError


def _is_dict(kind: type) -> bool:
    return kind in (*_DICTS, Specs) or issubclass(kind, PartlyCovered)


def _covering(spec: P, tree: Any) -> list[P]:
    nodes = optree.tree_leaves(
        tree,
        is_leaf=lambda node: isinstance(node, PartlyCovered),
        none_is_leaf=False,
        namespace=NAMESPACE,
    )
    return [
        s
        for node in nodes
        for s in (node.covered(spec, P()) if isinstance(node, PartlyCovered) else [spec])
    ]


def _broadcast(specs: Any, tree: Any, where: str, found: list[P], failures: list[str]) -> None:
    if isinstance(specs, P):
        found.extend(_covering(specs, tree))
        return
    if specs is None and tree is None:
        return
    if specs is None or _is_leaf(specs):
        what = "None" if specs is None else f"{abbreviated(specs)}, {kind_of(specs)}"
        failures.append(
            f"the spec for {where} is {what}; it must be a"
            f" P.{suggested_spec(specs) or ' P() replicates.'}"
        )
        return
    if tree is None or _is_leaf(tree):
        what = "None" if tree is None else f"a leaf, {kind_of(tree)}"
        failures.append(
            f"the specs go deeper than the tree: {where} is {what}, its spec is"
            f" {kind_of(specs)}.{suggested_spec(specs) or ' Give a P.'}"
        )
        return
    if type(specs) is not type(tree) and not (_is_dict(type(specs)) and _is_dict(type(tree))):
        failures.append(
            f"{where} is {kind_of(tree)}, its specs are {kind_of(specs)}; give {kind_of(tree)} of"
            " specs, or one P for all of it."
        )
        return
    wanted, given = _children(tree, where), _children(specs, where)
    failures += [
        f"the specs name {name}, which {_missing(str(entry), wanted, where)}."
        for entry, (name, _) in given.items()
        if entry not in wanted
    ]
    for entry, (name, child) in wanted.items():
        if entry in given:
            _broadcast(given[entry][1], child, name, found, failures)
        else:
            failures.append(f"no spec is given for {name}. Give one; P() replicates.")


def _missing(entry: str, wanted: Mapping[Any, tuple[str, Any]], where: str) -> str:
    """What to say of an entry that a tree does not have, and its specs have."""
    path, keys = tuple(entry.split(".")), [str(key) for key in wanted]
    for key, (_, child) in zip(keys, wanted.values(), strict=True):
        if path in tied_paths(child, tuple(key.split("."))):
            return f"is tied to {key!r}; give its spec under that name"
    close = difflib.get_close_matches(entry, keys, n=1)
    return f"does not exist; {f'the nearest is {close[0]!r}' if close else _has(keys, where)}"


def _children(tree: Any, where: str) -> dict[Any, tuple[str, Any]]:
    level = _one_level(tree)
    accessors = (level.path_entry_type(entry, level.type, level.kind) for entry in level.entries)
    return {
        a.entry: (a.codify(where), child)
        for a, child in zip(accessors, level.children, strict=True)
    }


def _is_leaf(tree: Any) -> bool:
    return optree.tree_is_leaf(tree, none_is_leaf=False, namespace=NAMESPACE)


def check_specs(
    specs: Sequence[P],
    leaves: Sequence[Any],
    names: Sequence[str],
    axes: dict[str, int],
    *,
    takes_sums: bool = False,
) -> None:
    """Raises a SpecError for every leaf whose spec does not fit its global shape or the mesh axes
    {name: size}. Only ``P()`` fits a leaf that is no tensor.

    >>> check_specs([P("tp"), P()], [torch.ones(4), 3], ["params['w']", "params['n']"], {"tp": 2})
    """
    failures = []
    for spec, leaf, name in zip(specs, leaves, names, strict=True):
        if isinstance(leaf, torch.Tensor):
            failures += check_spec(spec, tuple(leaf.shape), axes, name, takes_sums=takes_sums)
            failures += misfits(leaf, spec, axes, name)
            if spec.unreduced and leaf.dtype == torch.bool:
                failures.append(f"{name} has spec {spec}, but is a bool, which is no sum.")
        elif spec:
            failures.append(cut_value(name, leaf, spec))
    raise_all(SpecError, failures)


def cut_value(name: str, value: Any, spec: P) -> str:
    """The error message of a spec that cuts a value which is no tensor."""
    if isinstance(value, np.ndarray):
        what, advice = f"a numpy array of shape {value.shape}", "Give torch.from_numpy(array)."
    else:
        what, advice = f"{abbreviated(value)}, {kind_of(value)}", "Give P()."
    return f"{name} has spec {spec}, but is {what}; only a tensor can be cut. {advice}"


def key_of_static(leaf: Any) -> tuple[Any, ...]:
    """A leaf that is no tensor, as part of a cache's key: 1 equals True, and 0.0 equals -0.0."""
    return type(leaf), repr(leaf) if isinstance(leaf, float | complex) else leaf


def kind_of(value: object) -> str:
    """The type of a value, in the words of messages.

    >>> kind_of(3), kind_of({})
    ('an int', 'a dict')
    """
    kind = "dict" if isinstance(value, Specs | PartlyCovered) else type(value).__name__
    kind = "Tensor" if kind == "FakeTensor" else kind  # of a trace, which the caller does not see
    return f"an {kind}" if kind[0] in "aeiouAEIOU" else f"a {kind}"


def abbreviated(value: Any) -> str:
    text = f"of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def suggested_spec(value: object) -> str:
    """A suggestion for a message, if the value would do as a spec's entries; else ""."""
    entries = (value,) if isinstance(value, str) else value
    if not isinstance(entries, tuple | list) or not all(
        e is None or isinstance(e, str | tuple | list) for e in entries
    ):
        return ""
    try:
        return f" Try {P(*entries)}."
    except SpecError:
        return ""


def _has(keys: list[str], where: str) -> str:
    if not keys:
        return f"{where} is empty"
    return f"{where} has {listed(keys[:6])}{' and more' if len(keys) > 6 else ''}"
