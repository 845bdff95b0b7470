"""An optimizer per path pattern."""

from collections.abc import Mapping
from typing import Any

from ftp.errors import InputError, raise_all
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
            that matches no parameter; patterns that disagree; two parameters with one path.

    >>> import torch, ftp
    >>> sgd = ftp.optim.from_torch(torch.optim.SGD, lr=0.5)
    >>> opt = by_path({"head.*": sgd, "body.*": None})
    >>> params = {"head.w": torch.ones(1), "body.w": torch.ones(1)}
    >>> opt.update(params, opt.init(params), params)[0]
    {'head.w': tensor([0.5000]), 'body.w': tensor([1.])}
    """

    raise_all(
        InputError,
        (
            f"by_path has {value!r} for {pattern!r}; give an optimizer, such as"
            " ftp.optim.from_torch(torch.optim.AdamW), or None."
            for pattern, value in patterns.items()
            if value is not None and not isinstance(value, Optimizer)
        ),
    )

    def parts(params: Any) -> tuple[list[Any], Any, list[tuple[Optimizer, dict[str, int]]]]:
        """The leaves, their treedef, and per optimizer ``{path: index}`` of its parameters."""
        leaves, treedef = flatten(params)
        matched = matched_patterns(patterns, params)
        raise_all(
            InputError,
            (
                f"{name} has no optimizer: no pattern names it. Add one; None freezes it."
                for name, match in zip(leaf_names(params, "params"), matched, strict=True)
                if match is None
            ),
        )
        # An optimizer of several patterns runs once, so that it stacks all matrices of a shape.
        chosen: dict[int, tuple[Optimizer, dict[str, int]]] = {}
        for i, (path, match) in enumerate(zip(distinct_paths(params), matched, strict=True)):
            if match is not None and (opt := match[1]) is not None:
                chosen.setdefault(id(opt), (opt, {}))[1][path] = i
        return leaves, treedef, list(chosen.values())

    def init(params: Any) -> Any:
        leaves, treedef, chosen = parts(params)
        found = [Slots({})] * len(leaves)
        for opt, mine in chosen:
            state = opt.init({path: leaves[i] for path, i in mine.items()})
            for path, i in mine.items():
                found[i] = state[path]
        return treedef.unflatten(found)

    def update(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        leaves, treedef, chosen = parts(params)
        grad_leaves, slots = aligned(treedef, grads, "grads"), aligned(treedef, state, "state")
        for opt, mine in chosen:
            given = [
                {path: of[i] for path, i in mine.items()} for of in (grad_leaves, slots, leaves)
            ]
            new, new_state = opt.update(*given)
            for path, i in mine.items():
                leaves[i], slots[i] = new[path], new_state[path]
        return treedef.unflatten(leaves), treedef.unflatten(slots)

    return Optimizer(init, update)
