"""``scan``: apply one block over layers with stacked parameters, as JAX's ``lax.scan`` does."""

from collections.abc import Callable, Sequence
from typing import Any

import optree
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from ftp.errors import InputError, raise_all
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
    """Apply ``block`` layer after layer: ``for i in range(n): x = block(stacked[i], x)``, with leaf
    i of ``stacked`` indexed along dim 0.

    Works under every transform of torch.func, on one device and in sharded programs. There the
    layers are planned as one; each layer's slice is gathered, and its gradient reduced, separately:
    a rank holds one layer's gathered parameters at a time, not the stack's.

    Args:
        block: pure, ``block(layer, x) -> x``. ``layer`` is ``stacked`` without dim 0; the result
            has the structure, shapes and dtypes of ``x``.
        stacked: tree of tensors of shape (n, ...): parameters, and other inputs of a layer, such as
            random keys. Specs leave dim 0 whole: ``P(None, None, "tp")``.
        x: tree of tensors, the input of the first layer.
        has_outputs: ``block`` returns ``(x, outputs)``.
        remat: a policy of ``ftp.remat``, to recompute each block in the backward pass.

    Returns:
        The last layer's ``x``; with ``has_outputs``, ``(x, outputs)``, the layers' outputs stacked
        along dim 0.

    Raises:
        InputError: leaves of different sizes along dim 0, or not tensors; a block whose result
            differs from ``x`` in structure, shape or dtype.

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
    """The number of layers: the size of dim 0."""
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
    raise_all(InputError, failures)
    (n,) = sizes
    if not n and has_outputs:
        raise InputError(
            "has_outputs=True with no layers: nothing says what the outputs are. Leave has_outputs"
            " out."
        )
    return n


def _unstacked(leaf: Tensor) -> Sequence[Tensor]:
    # Views where nothing is traced: an op that survives tracing must copy.
    if get_proxy_mode() is None or not leaf.shape[0]:
        return leaf.unbind(0)
    slices: Any = Unstack.apply(leaf)
    return slices


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
    """Raise where ``x`` changes its structure, shape or dtype from layer to layer."""
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
    raise_all(InputError, failures)


def _structure(treedef: optree.PyTreeSpec) -> str:
    return "one tensor" if treedef.is_leaf() else str(treedef.unflatten(["*"] * treedef.num_leaves))


def _meta(leaf: Any) -> str:
    return (
        f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"
        if isinstance(leaf, Tensor)
        else repr(leaf)
    )
