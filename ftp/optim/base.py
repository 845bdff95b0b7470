"""The ``Optimizer`` type, and checks of trees of parameters, gradients and state."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ftp.dataclass import dataclass
from ftp.errors import InputError, SpecError, raise_all
from ftp.optim.slots import Slots
from ftp.sharding.patterns import dotted, match_patterns
from ftp.sharding.pytree import broadcast_specs, flatten, kind_of, leaf_names, leaf_paths
from ftp.sharding.spec import P


@dataclass(frozen=True)
class Optimizer:
    """An optimizer as two pure functions.

    Attributes:
        init: ``params -> state``: the tree of ``params`` with ``{slot: tensor}`` (a ``Slots``) for
            each parameter. For placed shards it makes this rank's shards of the state.
        update: ``(grads, state, params) -> (params, state)``, one step.

    >>> import ftp
    >>> opt = ftp.optim.from_torch(torch.optim.SGD, lr=0.5)
    >>> params = {"w": torch.ones(2)}
    >>> params, state = opt.update({"w": torch.ones(2)}, opt.init(params), params)
    >>> params
    {'w': tensor([0.5000, 0.5000])}
    """

    init: Callable[[Any], Any]
    update: Callable[[Any, Any, Any], tuple[Any, Any]]

    def specs(self, params: Any, specs: Any, patterns: Mapping[str, P] | None = None) -> Any:
        """The spec tree of the state.

        A slot of the parameter's shape has the parameter's spec; other slots are replicated.

        Args:
            params: the parameters, or meta tensors of their shapes.
            specs: their spec tree, or a prefix of one.
            patterns: ``{pattern: P}`` over paths of the state, such as ``"**.exp_avg*"``: specs of
                the slots that a pattern matches.

        Raises:
            SpecError: specs that do not fit ``params``; a pattern that matches no slot; patterns
                that disagree.

        >>> import ftp
        >>> opt = ftp.optim.from_torch(torch.optim.SGD, lr=0.1, momentum=0.9)
        >>> opt.specs({"w": torch.ones(4, 2)}, P("tp"), {"**.momentum_buffer": P("dp")})
        {'w': {'momentum_buffer': P('dp')}}
        """
        leaves, treedef = flatten(params)
        given = broadcast_specs(specs, params, "params")
        meta = treedef.unflatten(
            [torch.empty_like(x, device="meta") if isinstance(x, Tensor) else x for x in leaves]
        )
        slots: Any = treedef.flatten_up_to(self.init(meta))
        found = treedef.unflatten(
            [
                Slots(dict(zip(sorted(s), s.covered(spec, P()), strict=True)), s.like)
                for s, spec in zip(slots, given, strict=True)
            ]
        )
        failures: list[str] = []
        names, paths = leaf_names(found, "state"), leaf_paths(found)
        own = match_patterns(
            patterns or {}, [(path,) for path in paths], names, "state", failures, check_spec_given
        )
        raise_all(SpecError, failures)
        flat, state_tree = flatten(found)
        return state_tree.unflatten(
            [match[1] if match else spec for match, spec in zip(own, flat, strict=True)]
        )


def check_spec_given(pattern: str, spec: object) -> str | None:
    if isinstance(spec, P):
        return None
    return f"patterns[{pattern!r}] is {spec!r}, {kind_of(spec)}; it must be a P."


def distinct_paths(params: Any) -> list[str]:
    """The leaves' paths, joined by dots.

    Raises:
        InputError: leaves that have the same path.
    """
    first: dict[str, str] = {}
    failures = []
    paths = [dotted(path) for path in leaf_paths(params)]
    for path, name in zip(paths, leaf_names(params, "params"), strict=True):
        if first.setdefault(path, name) != name:
            failures.append(f"{first[path]} and {name} have one path, {path!r}. Rename one.")
    raise_all(InputError, failures)
    return paths


def check_tensors(leaves: Sequence[Any], names: Sequence[str]) -> None:
    failures = [
        f"{name} is {leaf!r}, {kind_of(leaf)}: it has no state."
        for leaf, name in zip(leaves, names, strict=True)
        if not isinstance(leaf, Tensor)
    ]
    raise_all(InputError, failures)


def check_gradients(grads: Sequence[Any], params: Sequence[Any], names: Sequence[str]) -> None:
    failures = []
    for grad, param, name in zip(grads, params, names, strict=True):
        if not isinstance(grad, Tensor):
            failures.append(
                f"{name} is {grad!r}, {kind_of(grad)}; it must be a gradient, a tensor of shape"
                f" {tuple(param.shape)}."
            )
        elif grad.shape != param.shape:
            failures.append(
                f"{name} has shape {tuple(grad.shape)}, not its parameter's, {tuple(param.shape)}."
            )
    raise_all(InputError, failures)


def matched_patterns(patterns: Mapping[str, Any], params: Any) -> list[tuple[str, Any] | None]:
    """Per parameter the pattern that matches it, with the pattern's value; None without a match."""
    failures: list[str] = []
    answers = [(path,) for path in leaf_paths(params)]
    found = match_patterns(patterns, answers, leaf_names(params, "params"), "params", failures)
    raise_all(InputError, failures)
    return found


def aligned(treedef: Any, tree: Any, name: str, like: str = "params") -> list[Any]:
    """The subtree of ``tree`` at each leaf of ``treedef``."""
    try:
        return treedef.flatten_up_to(tree)
    except ValueError as error:
        # optree's text ends with the tree itself, which prints every tensor.
        why = str(error).partition("; dict: ")[0].removesuffix(".")
        raise InputError(
            f"{name} and {like} are trees of different structures: {why[:300]}."
        ) from None


def natural_order(path: Sequence[Any]) -> list[tuple[int, str]]:
    """A key that sorts layer 2 before layer 10."""
    parts = re.split(r"(\d+)", ".".join(map(str, path)))
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]
