"""torch.optim's optimizers as pure functions, and what goes with them in a train step: clipping,
averages, accumulation.

A torch.optim class is driven on clones of the parameters with the state set beforehand, so that its
formulas are torch's own.
"""

from collections.abc import Mapping
from typing import Any

from ftp.errors import InputError, join_failures
from ftp.optim.base import Optimizer
from ftp.optim.slots import Slots
from ftp.optim.torch_optimizer import aligned, matched_patterns
from ftp.sharding.pytree import dotted, flatten, leaf_names, leaf_paths


def by_path(patterns: Mapping[str, Optimizer | None]) -> Optimizer:
    """Another optimizer for the parameters of each pattern; ``None`` leaves them as they are,
    without state.

    Raises:
        InputError: a parameter that no pattern names, a pattern that matches nothing, patterns that
            disagree.

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
                    f"{name} has no optimizer: no pattern names it. Give None to leave it as it is."
                    for name in missing
                )
            )
        paths = [dotted(path) for path in leaf_paths(params)]
        indices: dict[str, list[int]] = {pattern: [] for pattern in patterns}
        for i, match in enumerate(matched):
            assert match is not None
            indices[match[0]].append(i)
        return (
            leaves,
            treedef,
            [(patterns[p], mine, [paths[i] for i in mine]) for p, mine in indices.items()],
        )

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
