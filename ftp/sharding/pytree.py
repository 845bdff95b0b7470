"""Trees: leaves and their paths, spec trees and prefixes of them, and path patterns that give
specs.
"""

import difflib
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, TypeVar

import optree
import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ftp.errors import SpecError, join_failures
from ftp.sharding.spec import P, check_spec

NAMESPACE = "ftp"

Path = tuple[str, ...]
T = TypeVar("T")


def flatten(tree: Any) -> tuple[list[Any], optree.PyTreeSpec]:
    """The leaves of ``tree`` in optree's order, and its structure; ``None`` is no leaf.

    >>> flatten({"b": [1, None], "a": 2})[0]
    [2, 1]
    """
    return optree.tree_flatten(tree, none_is_leaf=False, namespace=NAMESPACE)


def leaf_names(tree: Any, root: str) -> list[str]:
    """What each leaf is called in messages.

    >>> leaf_names({"mlp": {"up": 1}, "norms": [2]}, "params")
    ["params['mlp']['up']", "params['norms'][0]"]
    """
    accessors = optree.tree_accessors(tree, none_is_leaf=False, namespace=NAMESPACE)
    return [accessor.codify(root) for accessor in accessors]


def leaf_paths(tree: Any) -> list[Path]:
    """The elements that patterns match, per leaf; dots inside a key separate elements.

    >>> leaf_paths({"mlp": {"up": 1}, "norms.first": [2]})
    [('mlp', 'up'), ('norms', 'first', '0')]
    """
    paths = optree.tree_paths(tree, none_is_leaf=False, namespace=NAMESPACE)
    return [tuple(element for key in path for element in str(key).split(".")) for path in paths]


def dotted(path: Path) -> str:
    return ".".join(path)


# A tied weight is one leaf with several paths. The tensor carries them, not the tree, so that any
# copy of the tree knows them too.
_paths_of_tied: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def remember_tied(tensor: torch.Tensor, paths: Sequence[str]) -> None:
    """Notes the dotted paths that ``tensor`` answers to, its own first."""
    _paths_of_tied[tensor] = tuple(tuple(path.split(".")) for path in paths)


def tied_paths(leaf: Any, path: Path) -> tuple[Path, ...]:
    """Every path that a leaf found at ``path`` answers to, ``path`` first.

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
    """A dict of specs that ``plan`` made; printing it gives a table of every path, its spec and
    the pattern that gave it.
    """

    rows: "Mapping[str, Row]"

    def __init__(self, specs: Mapping, rows: "Mapping[str, Row]"):
        super().__init__(specs)
        self.rows = rows

    def __reduce__(self):
        return (Specs, (dict(self), self.rows))

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
        )


@dataclass(frozen=True)
class Row:
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


# Globally, so that optree.tree_map without a namespace sees a tree too; what comes out of it is a
# plain dict.
optree.register_pytree_node(
    Specs,
    _flatten_specs,
    _unflatten_specs,
    path_entry_type=optree.MappingEntry,
    namespace=optree.registry.__GLOBAL_NAMESPACE,  # pyright: ignore[reportAttributeAccessIssue]
)


def plan(
    params: Any, patterns: Mapping[str, P] | Callable[[str, Any], P], *, strict: bool = False
) -> Any:
    """A spec for every leaf of ``params``, from patterns over its paths; also for buffers or any
    other tree.

    Args:
        params: a tree of tensors (meta ones do) whose leaves have paths such as
            ``layers.0.attn.wq.weight``.
        patterns: ``{pattern: P}``. A pattern is path elements joined by ".": ``*`` stands for one
            element or a part of one, ``**`` for any number of elements, ``w[qkv]`` for wq, wk or
            wv; dots inside a key separate elements. Or a function of a path and its leaf that
            returns a ``P``.
        strict: a leaf that no pattern names is an error. Otherwise it is replicated, and so marked
            in the printed table.

    Returns:
        A tree of ``P`` with the structure of ``params``; where that is a dict, printing it gives a
        table.

    Raises:
        SpecError: a pattern that matches nothing, patterns that disagree for one path, a value that
            is no ``P``, a spec longer than the tensor, a spec for a leaf that is not a tensor; all
            of them at once.

    >>> params = {"emb.weight": torch.ones(8, 4), "layers.0.wq.weight": torch.ones(4, 4), "norm.weight": torch.ones(4)}
    >>> specs = plan(params, {"emb.weight": P("tp"), "layers.*.w[qkv].weight": P("tp", None)})
    >>> specs["layers.0.wq.weight"]
    P('tp', None)
    >>> print(specs)
    path                spec           shape   given by
    emb.weight          P('tp')        (8, 4)  'emb.weight'
    layers.0.wq.weight  P('tp', None)  (4, 4)  'layers.*.w[qkv].weight'
    norm.weight         P()            (4,)    no pattern: replicated
    """
    leaves, treedef = flatten(params)
    names = leaf_names(params, "params")
    answers = [
        tied_paths(leaf, path) for leaf, path in zip(leaves, leaf_paths(params), strict=True)
    ]
    failures: list[str] = []
    if isinstance(patterns, Mapping):
        matched = match_patterns(patterns, answers, names, "params", failures, _check_value)
        found = [match and (repr(match[0]), match[1]) for match in matched]
    elif callable(patterns):
        found = _ask(patterns, leaves, answers, names, failures)
    else:
        hint = (
            f" For one spec everywhere give {{'**': {patterns}}}."
            if isinstance(patterns, P)
            else ""
        )
        raise SpecError(
            f"plan(params, patterns) takes a dict of patterns or a function, not {patterns!r},"
            f" {kind_of(patterns)}.{hint}"
        )
    rows: dict[str, Row] = {}
    for leaf, name, match in zip(leaves, names, found, strict=True):
        given_by, spec = match or ("no pattern: replicated", P())
        if match and (problem := _unfit(leaf, name, spec, given_by)):
            failures.append(problem)
        rows[name] = Row(
            spec, tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else None, given_by
        )
    unmatched = [name for name, match in zip(names, found, strict=True) if match is None]
    if strict and unmatched:
        failures.append(
            f"strict=True, and no pattern matches {_several(unmatched)}. Give a pattern for each;"
            " P() replicates."
        )
    if failures:
        raise SpecError(join_failures(failures))
    specs: Any = optree.tree_unflatten(treedef, [row.spec for row in rows.values()])
    return Specs(specs, rows) if type(specs) in (dict, OrderedDict) else specs


def _ask(
    function: Callable[[str, Any], P],
    leaves: list,
    answers: Sequence[tuple[Path, ...]],
    names: list[str],
    failures: list[str],
):
    label = f"{getattr(function, '__name__', type(function).__name__)}()"
    found = []
    for leaf, paths, name in zip(leaves, answers, names, strict=True):
        given = {dotted(path): function(dotted(path), leaf) for path in paths}
        first, *_ = given.values()
        for path, spec in given.items():
            if not isinstance(spec, P):
                failures.append(
                    f"{label} gives {spec!r}, {kind_of(spec)}, for path {path!r}; it must give a"
                    f" P.{_as_spec(spec)}"
                )
        if all(isinstance(spec, P) for spec in given.values()) and len(set(given.values())) > 1:
            gives = " and ".join(f"{spec} for {path!r}" for path, spec in given.items())
            failures.append(
                f"{name} is one tied weight, and {label} gives {gives}. Give the same spec for"
                " each of its paths."
            )
        found.append((label, first) if isinstance(first, P) else None)
    return found


def _check_value(pattern: str, spec: object) -> str | None:
    if isinstance(spec, P):
        return None
    return f"patterns[{pattern!r}] is {spec!r}, {kind_of(spec)}; it must be a P.{_as_spec(spec)}"


def _unfit(leaf: Any, name: str, spec: P, given_by: str) -> str | None:
    """Why no mesh could make the spec fit."""
    if not isinstance(leaf, torch.Tensor):
        what = f"{name} is {_short(leaf)}, {kind_of(leaf)}"
        return (
            f"{what}, and gets {spec} from {given_by}; only a tensor can be cut. Give P()."
            if spec
            else None
        )
    if len(spec) > leaf.ndim:
        what = f"{name} gets {spec} of {len(spec)} entries from {given_by}"
        return (
            f"{what}, but its shape {tuple(leaf.shape)} has {leaf.ndim} dims. Give at most"
            f" {leaf.ndim}."
        )
    return None


def match_patterns(
    patterns: Mapping[str, T],
    answers: Sequence[tuple[Path, ...]],
    names: Sequence[str],
    where: str,
    failures: list[str],
    check: Callable[[str, Any], str | None] = lambda pattern, value: None,
) -> list[tuple[str, T] | None]:
    """Per thing that answers to one or more paths, the first pattern that matches it with its
    value, or ``None``.

    Each pattern that matches nothing of ``where``, each pair that disagrees and each value that
    ``check`` refuses is added to ``failures``.
    """
    found: list[list[tuple[str, T]]] = [[] for _ in answers]
    for pattern, value in patterns.items():
        if not isinstance(pattern, str):
            failures.append(
                f"{pattern!r} is no pattern; a pattern is a str of path elements joined by '.'."
            )
            continue
        if problem := check(pattern, value):
            failures.append(problem)
            continue
        matched = [
            i for i, paths in enumerate(answers) if any(matches(pattern, path) for path in paths)
        ]
        if not matched:
            failures.append(_matches_nothing(pattern, answers, where))
        for i in matched:
            found[i].append((pattern, value))
    disagreements: dict[tuple[str, str], list[int]] = {}
    for i, given in enumerate(found):
        for other, value in given[1:]:
            if value != given[0][1]:
                disagreements.setdefault((given[0][0], other), []).append(i)
    for (first, second), where_both in disagreements.items():
        i = where_both[0]
        named = _several([names[i] for i in where_both])
        tied = (
            f", a tied weight with paths {_listed([dotted(p) for p in answers[i]])}"
            if len(answers[i]) > 1
            else ""
        )
        failures.append(
            f"patterns {first!r} and {second!r} disagree for {named}{tied}:"
            f" {patterns[first]} and {patterns[second]}. Give both the same value, or narrow one."
        )
    return [given[0] if given else None for given in found]


def matches(pattern: str, path: Path) -> bool:
    """Whether a pattern matches all elements of ``path``; the empty one matches the root, and every
    path matches itself.

    >>> matches("layers.*.w[qkv]", ("layers", "0", "wq")), matches("**.weight", ("weight",)), matches("*", ("a", "b"))
    (True, True, False)
    >>> matches("w[0]", ("w[0]",))
    True
    """
    return _matches(tuple(pattern.split(".")) if pattern else (), path)


def _matches(pattern: Path, path: Path) -> bool:
    if not pattern:
        return not path
    head, rest = pattern[0], pattern[1:]
    if head == "**":
        return any(_matches(rest, path[i:]) for i in range(len(path) + 1))
    return (
        bool(path) and (path[0] == head or fnmatchcase(path[0], head)) and _matches(rest, path[1:])
    )


def _matches_nothing(pattern: str, answers: Sequence[tuple[Path, ...]], where: str) -> str:
    paths = [path for paths in answers for path in paths]
    if not paths:
        return f"pattern {pattern!r} matches nothing: {where} is empty."
    message = f"pattern {pattern!r} matches no path of {where}"
    for wider in (f"{pattern}.**", f"**.{pattern}"):
        if n := sum(matches(wider, path) for path in paths):
            return f"{message}; {wider!r} matches {n}."
    return (
        f"{message}; the nearest are {_listed(nearest(pattern, [dotted(path) for path in paths]))}."
    )


def nearest(name: str, candidates: Sequence[str], n: int = 3) -> list[str]:
    """The candidates most like ``name``, one of each family that differs in numbers only; "A" is
    like "a".

    >>> nearest("layers.*.atn", ["layers.0.attn", "layers.1.attn", "head"], n=2)
    ['layers.0.attn', 'head']
    """
    families: dict[str, str] = {}
    for candidate in candidates:
        families.setdefault(
            ".".join("*" if e.isdigit() else e for e in candidate.split(".")), candidate
        )
    likeness = difflib.SequenceMatcher(b=name.lower())

    def like(family: str) -> tuple[float, str]:
        likeness.set_seq1(family.lower())
        return likeness.ratio(), family

    return [families[family] for family in sorted(families, key=like, reverse=True)[:n]]


def broadcast_specs(specs: Any, tree: Any, where: str) -> list[P]:
    """One spec per leaf of ``tree``, in optree's order, from a tree of specs or a prefix of one: a
    ``P`` covers all that is below it.

    ``where`` names ``tree`` in messages. Keys that only one of them has, and anything else that is
    no ``P``, are a SpecError.

    >>> broadcast_specs({"a": P("dp"), "b": P()}, {"a": {"x": 1, "y": 2}, "b": 3}, "params")
    [P('dp'), P('dp'), P()]
    """
    found: list[P] = []
    failures: list[str] = []
    _broadcast(specs, tree, where, found, failures)
    if failures:
        raise SpecError(join_failures(failures))
    return found


class PartlyCovered(dict):
    """A dict of leaves of which a spec given for all of it is meant for some, and the others are
    replicated.
    """

    def covered(self, spec: Any, whole: Any) -> list[Any]:
        """Per leaf, in optree's order, ``spec`` or ``whole``."""
        raise NotImplementedError


def _is_dict(kind: type) -> bool:
    return kind in (dict, OrderedDict, defaultdict, Specs) or issubclass(kind, PartlyCovered)


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
        what = "None" if specs is None else f"{_short(specs)}, {kind_of(specs)}"
        failures.append(
            f"the spec for {where} is {what}; it must be a"
            f" P.{_as_spec(specs) or ' P() replicates.'}"
        )
        return
    if tree is None or _is_leaf(tree):
        what = "None" if tree is None else f"a leaf, {kind_of(tree)}"
        failures.append(
            f"the specs go deeper than the tree: {where} is {what}, its spec is"
            f" {kind_of(specs)}.{_as_spec(specs) or ' Give a P.'}"
        )
        return
    if type(specs) is not type(tree) and not (_is_dict(type(specs)) and _is_dict(type(tree))):
        failures.append(
            f"{where} is {kind_of(tree)}, its specs are {kind_of(specs)}; give {kind_of(tree)} of"
            " specs, or one P for all of it."
        )
        return
    wanted, given = _children(tree, where), _children(specs, where)
    for entry, (name, _) in given.items():
        if entry not in wanted:
            keys = [str(e) for e in wanted]
            close = difflib.get_close_matches(str(entry), keys, n=1)
            failures.append(
                f"the specs name {name}, which does not exist;"
                f" {f'the nearest is {close[0]!r}' if close else _has(keys, where)}."
            )
    for entry, (name, child) in wanted.items():
        if entry in given:
            _broadcast(given[entry][1], child, name, found, failures)
        else:
            failures.append(f"no spec is given for {name}. Give one; P() replicates.")


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
    specs: Sequence[P], leaves: Sequence[Any], names: Sequence[str], axes: dict[str, int]
) -> None:
    """Raises a SpecError for every leaf whose spec does not fit its global shape or the mesh axes
    {name: size}.

    A leaf that is no tensor passes through a program as it is, so only ``P()`` fits it.

    >>> check_specs([P("tp"), P()], [torch.ones(4), 3], ["params['w']", "params['n']"], {"tp": 2})
    """
    failures = []
    for spec, leaf, name in zip(specs, leaves, names, strict=True):
        if isinstance(leaf, torch.Tensor):
            failures += check_spec(spec, tuple(leaf.shape), axes, name)
        elif spec:
            failures.append(cut_value(name, leaf, spec))
    if failures:
        raise SpecError(join_failures(failures))


def cut_value(name: str, value: Any, spec: P) -> str:
    """What is wrong with a spec that cuts a value which is no tensor."""
    what = f"{_short(value)}, {kind_of(value)}"
    return f"{name} has spec {spec}, but is {what}; only a tensor can be cut. Give P()."


def kind_of(value: object) -> str:
    """What a value is called in messages.

    >>> kind_of(3), kind_of({})
    ('an int', 'a dict')
    """
    kind = "dict" if isinstance(value, Specs | PartlyCovered) else type(value).__name__
    return f"an {kind}" if kind[0] in "aeiouAEIOU" else f"a {kind}"


def _short(value: Any) -> str:
    text = f"of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _as_spec(value: object) -> str:
    """A suggestion, where the value would do as a spec's entries."""
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
    return (
        f"{where} has {_listed(keys[:6])}{' and more' if len(keys) > 6 else ''}"
        if keys
        else f"{where} is empty"
    )


def _listed(items: Sequence[str]) -> str:
    return ", ".join(map(repr, items))


def _several(names: Sequence[str], shown: int = 8) -> str:
    return ", ".join(names[:shown]) + (
        f" and {len(names) - shown} more" if len(names) > shown else ""
    )
