"""``scan``: one block over layers whose parameters are stacked, as JAX's ``lax.scan``."""

from collections.abc import Callable, Sequence
from typing import Any

import optree
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from ftp.errors import InputError, join_failures
from ftp.functional.remat import Policy, policy_problem
from ftp.functional.remat import remat as recomputed
from ftp.ops.stack import Stack, Unstack
from ftp.sharding.pytree import flatten, kind_of, leaf_names


def scan(
    block: Callable[..., Any],
    stacked: Any,
    x: Any,
    *,
    has_outputs: bool = False,
    remat: Policy | None = None,
) -> Any:
    """``x`` through ``block`` once per layer: ``for i in range(n): x = block(layer_i, x)``, where
    ``layer_i`` is ``stacked[..., i]``.

    Works under every transform of torch.func, on one device and inside ``ftp.shard`` and
    ``ftp.spmd``. There the layers are planned as one, and a slice of a stack is gathered or reduced
    by itself: a rank holds at once what one layer needs, not the stack.

    Args:
        block: ``block(layer, x) -> x``, pure; ``layer`` is a tree like ``stacked`` with dim 0 gone.
            What it gives has ``x``'s structure, shapes and dtypes.
        stacked: a tree of tensors of one size along dim 0: parameters, and whatever else each layer
            has of its own, such as random keys. Specs leave dim 0 whole: ``P(None, None, "tp")``.
        x: a tree of tensors, what the first layer takes.
        has_outputs: ``block`` gives ``(x, outputs)``, and so does this, with the layers' outputs
            stacked along dim 0.
        remat: a policy of ``ftp.remat``, to compute each block again for the backward pass.

    Raises:
        InputError: leaves that differ in size along dim 0, or are no tensors; a block that gives
            other than it takes.

    >>> weights = torch.tensor([[2.0], [3.0]])
    >>> scan(lambda w, x: w * x, weights, torch.ones(1))
    tensor([6.])
    >>> scan(lambda w, x: (w * x, x.sum()), weights, torch.ones(1), has_outputs=True)
    (tensor([6.]), tensor([1., 2.]))

    Source: JAX, ``jax.lax.scan``.
    """
    if not callable(block):
        raise InputError(
            f"scan takes a function of a layer's parameters and x, not {block!r}, {kind_of(block)}."
        )
    leaves, treedef = flatten(stacked)
    n = _steps(leaves, leaf_names(stacked, "stacked"), has_outputs)
    if remat is not None:
        if problem := policy_problem(remat, "remat"):
            raise InputError(problem)
        block = recomputed(block, remat)
    name = getattr(block, "__name__", type(block).__name__)
    slices = [_unstacked(leaf) for leaf in leaves]
    found = []
    for i in range(n):
        out = block(treedef.unflatten([parts[i] for parts in slices]), x)
        if has_outputs:
            if not isinstance(out, tuple | list) or len(out) != 2:
                raise InputError(
                    f"has_outputs=True, so {name} must return a pair (x, outputs), not"
                    f" {kind_of(out)}."
                )
            out, outputs = out
            found.append(outputs)
        _check_same(x, out, name)
        x = out
    return (x, _together(found, name)) if has_outputs else x


def _steps(leaves: Sequence[Any], names: Sequence[str], has_outputs: bool) -> int:
    """The size of dim 0 that all leaves have."""
    failures = [
        f"{name} is {leaf!r}, {kind_of(leaf)}: it has no slices. Close over it."
        for leaf, name in zip(leaves, names, strict=True)
        if not isinstance(leaf, Tensor)
    ]
    sizes: dict[int, list[str]] = {}
    for leaf, name in zip(leaves, names, strict=True):
        if isinstance(leaf, Tensor) and not leaf.ndim:
            failures.append(
                f"{name} is a 0-d tensor: it has no dim along which layers are stacked. Expand it,"
                " or close over it."
            )
        elif isinstance(leaf, Tensor):
            sizes.setdefault(leaf.shape[0], []).append(f"{name} of shape {tuple(leaf.shape)}")
    if len(sizes) > 1:
        most = max(sizes, key=lambda size: len(sizes[size]))
        others = [what for size, found in sizes.items() if size != most for what in found]
        failures.append(
            f"Dim 0 counts the layers, and is of size {most} in {sizes[most][0]}, but other in"
            f" {', '.join(others)}."
        )
    if not leaves:
        failures.append(
            "stacked has no tensors, so nothing says how many layers there are. Stack something,"
            " such as torch.arange(n)."
        )
    if failures:
        raise InputError(join_failures(failures))
    (n,) = sizes
    if not n and has_outputs:
        raise InputError(
            "has_outputs=True with no layers: nothing says what the outputs are. Leave has_outputs"
            " out."
        )
    return n


def _unstacked(leaf: Tensor) -> Sequence[Tensor]:
    # Views where nothing is traced: an op that survives tracing must copy.
    return leaf.unbind(0) if get_proxy_mode() is None or not leaf.shape[0] else Unstack.apply(leaf)  # type: ignore[return-value]


def _together(found: Sequence[Any], name: str) -> Any:
    leaves, trees = zip(*map(flatten, found), strict=True)
    if any(tree != trees[0] for tree in trees) or any(
        _described(some) != _described(leaves[0]) for some in leaves
    ):
        raise InputError(
            f"{name} gives outputs of one structure, shape and dtype in one layer and of others in"
            " another; they cannot be stacked."
        )
    stack: Any = torch.stack if get_proxy_mode() is None else lambda xs: Stack.apply(*xs)
    return trees[0].unflatten(
        [stack(xs) if isinstance(xs[0], Tensor) else xs[0] for xs in zip(*leaves, strict=True)]
    )


def _described(leaves: Sequence[Any]) -> list[Any]:
    return [
        (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in leaves
    ]


def _check_same(given: Any, found: Any, name: str) -> None:
    """What goes from layer to layer keeps its structure, shapes and dtypes."""
    (before, old), (after, new) = flatten(given), flatten(found)
    if old != new:
        raise InputError(
            f"{name} takes x as {_structure(old)} and gives {_structure(new)}; the next layer"
            " takes what this one gives."
        )
    failures = [
        f"{name} takes {leaf} as {_meta(a)} and gives {_meta(b)}; the next layer takes what this"
        " one gives."
        for a, b, leaf in zip(before, after, leaf_names(given, "x"), strict=True)
        if isinstance(a, Tensor) != isinstance(b, Tensor)
        or (isinstance(a, Tensor) and (a.shape, a.dtype) != (b.shape, b.dtype))
    ]
    if failures:
        raise InputError(join_failures(failures))


def _structure(treedef: optree.PyTreeSpec) -> str:
    return "one tensor" if treedef.is_leaf() else str(treedef.unflatten(["*"] * treedef.num_leaves))


def _meta(leaf: Any) -> str:
    return (
        f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"
        if isinstance(leaf, Tensor)
        else repr(leaf)
    )
