"""``plan``: a spec for every leaf of a tree, from patterns over its paths."""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import optree
import torch

from ftp.errors import SpecError, raise_all
from ftp.sharding.patterns import Path, dotted, match_patterns, several
from ftp.sharding.pytree import (
    SpecRow,
    Specs,
    abbreviated,
    flatten,
    kind_of,
    leaf_names,
    leaf_paths,
    suggested_spec,
    tied_paths,
)
from ftp.sharding.spec import P


def plan(
    params: Any, patterns: Mapping[str, P] | Callable[[str, Any], P], *, strict: bool = False
) -> Any:
    """Give every leaf of a tree a spec, from patterns over its paths.

    Args:
        params: parameters, buffers or any other tree of tensors (meta ones too), whose leaves have
            paths such as ``layers.0.attn.wq.weight``.
        patterns: ``{pattern: P}``. A pattern is path elements joined by ".": ``*`` is any one
            element or a part of one, ``**`` any number of elements, ``w[qkv]`` is wq, wk or wv.
            Dots inside a key separate elements. If two patterns match, the more specific one
            applies: the other one matches every path that it can match. Or a function
            ``(path, leaf) -> P``.
        strict: raise for a leaf that no pattern matches. Otherwise the leaf is replicated, and the
            printed table says so.

    Returns:
        A tree of ``P`` with the structure of ``params``; a dict prints as a table.

    Raises:
        SpecError: all patterns that match nothing, or disagree for one path and neither is the more
            specific; values that are no ``P``, specs longer than the tensor, and specs that cut a
            leaf which is no tensor.

    >>> params = {
    ...     "emb.weight": torch.ones(8, 4),
    ...     "layers.0.wq.weight": torch.ones(4, 4),
    ...     "norm.weight": torch.ones(4),
    ... }
    >>> specs = plan(params, {"emb.weight": P("tp"), "layers.*.w[qkv].weight": P("tp", None)})
    >>> specs["layers.0.wq.weight"]
    P('tp', None)
    >>> print(specs)
    path                spec           shape   given by
    emb.weight          P('tp')        (8, 4)  'emb.weight'
    layers.0.wq.weight  P('tp', None)  (4, 4)  'layers.*.w[qkv].weight'
    norm.weight         P()            (4,)    no pattern: replicated
    >>> everywhere_but = {"**": P("dp"), "norm.**": P()}
    >>> plan(params, everywhere_but)["norm.weight"], plan(params, everywhere_but)["emb.weight"]
    (P(), P('dp'))
    """
    if isinstance(params, torch.nn.Module):
        raise SpecError(
            f"params is a module, {type(params).__name__}. Give its parameters: fn, params ="
            " ftp.functionalize(module)."
        )
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
    rows: dict[str, SpecRow] = {}
    for leaf, name, match in zip(leaves, names, found, strict=True):
        given_by, spec = match or ("no pattern: replicated", P())
        if match and (problem := unfit(leaf, name, spec, given_by)):
            failures.append(problem)
        rows[name] = SpecRow(
            spec, tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else None, given_by
        )
    unmatched = [name for name, match in zip(names, found, strict=True) if match is None]
    if strict and unmatched:
        failures.append(
            f"strict=True, and no pattern matches {several(unmatched)}. Give a pattern for each;"
            " P() replicates."
        )
    raise_all(SpecError, failures)
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
                    f" P.{suggested_spec(spec)}"
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
    return (
        f"patterns[{pattern!r}] is {spec!r}, {kind_of(spec)}; it must be a P.{suggested_spec(spec)}"
    )


def unfit(leaf: Any, name: str, spec: P, given_by: str) -> str | None:
    """Why the spec fits on no mesh."""
    if not isinstance(leaf, torch.Tensor):
        what = f"{name} is {abbreviated(leaf)}, {kind_of(leaf)}"
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
