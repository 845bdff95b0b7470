"""An optimizer per path pattern."""

from collections.abc import Mapping
from typing import Any

from ftp.errors import InputError, join_failures
from ftp.optim.base import Optimizer, aligned, distinct_paths, matched_patterns
from ftp.optim.slots import Slots
from ftp.sharding.pytree import flatten, leaf_names


def by_path(patterns: Mapping[str, Optimizer | None]) -> Optimizer:
    """Give each parameter the optimizer of its path pattern.

    Args:
        patterns: ``{pattern: optimizer}``, patterns as in ``ftp.plan``; None freezes: no update and
            no state.

    Raises:
        InputError: from ``init`` and ``update``: a parameter that no pattern matches; a pattern
            that matches none; patterns that disagree; two parameters of one path.

    >>> import torch, ftp
    >>> sgd = ftp.optim.from_torch(torch.optim.SGD, lr=0.5)
    >>> opt = by_path({"head.*": sgd, "body.*": None})
    >>> params = {"head.w": torch.ones(1), "body.w": torch.ones(1)}
    >>> opt.update(params, opt.init(params), params)[0]
    {'head.w': tensor([0.5000]), 'body.w': tensor([1.])}
    """

    def parts(
        params: Any,
    ) -> tuple[list[Any], Any, list[tuple[Optimizer | None, list[int], list[str]]]]:
        leaves, treedef = flatten(params)
        matched = matched_patterns(patterns, params)
        missing = [
            name
            for name, match in zip(leaf_names(params, "params"), matched, strict=True)
            if match is None
        ]
        if missing:
            raise InputError(
                join_failures(
                    f"{name} has no optimizer: no pattern names it. Add one; None freezes it."
                    for name in missing
                )
            )
        paths = distinct_paths(params)
        # An optimizer of several patterns runs once: what it does for all matrices of a shape it
        # does together.
        chosen: dict[int, tuple[Optimizer | None, list[int], list[str]]] = {}
        for i, match in enumerate(matched):
            assert match is not None
            opt = match[1]
            _, mine, of = chosen.setdefault(id(opt), (opt, [], []))
            mine.append(i)
            of.append(paths[i])
        return leaves, treedef, list(chosen.values())

    def init(params: Any) -> Any:
        leaves, treedef, chosen = parts(params)
        found = [Slots({})] * len(leaves)
        for opt, mine, paths in chosen:
            if opt is not None and mine:
                state = opt.init({path: leaves[i] for path, i in zip(paths, mine, strict=True)})
                for path, i in zip(paths, mine, strict=True):
                    found[i] = state[path]
        return treedef.unflatten(found)

    def update(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        leaves, treedef, chosen = parts(params)
        grad_leaves, slots = aligned(treedef, grads, "grads"), aligned(treedef, state, "state")
        for opt, mine, paths in chosen:
            if opt is not None and mine:
                named = [
                    {path: of[i] for path, i in zip(paths, mine, strict=True)}
                    for of in (grad_leaves, slots, leaves)
                ]
                new, new_state = opt.update(*named)
                for path, i in zip(paths, mine, strict=True):
                    leaves[i], slots[i] = new[path], new_state[path]
        return treedef.unflatten(leaves), treedef.unflatten(slots)

    return Optimizer(init, update)
