"""``by_owner``: apply a function to whole matrices, each on the rank that owns it."""

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from ftp.axis import is_inside
from ftp.dataclass import dataclass
from ftp.errors import InputError, MeshError, raise_all
from ftp.ops.constrain import constrain
from ftp.ops.map_slices import MAP_SLICES, interned
from ftp.ops.stack import Stack, Unstack
from ftp.optim.base import aligned, natural_order
from ftp.sharding.mesh import Mesh, resolve
from ftp.sharding.pytree import flatten, key_of_static, kind_of, leaf_names, leaf_paths
from ftp.sharding.spec import P, without_stage
from ftp.sharding.traced_arguments import spec_of_argument
from ftp.torch_internals.functorch import (
    is_functorch_wrapped_tensor,
    peek_interpreter_stack,
    temporarily_clear_interpreter_stack,
)
from ftp.torch_internals.modes import disable_current_modes
from ftp.tracing.trace import trace


def by_owner(
    fn: Callable[..., Any], tree: Any, *rest: Any, axes: Sequence[str] | None = None
) -> Any:
    """Apply ``fn`` to each matrix of ``tree``. In a sharded program each whole matrix is computed
    on one rank, its owner.

    Matrices of one shape are stacked, and the stack is cut over all ranks: one all-to-all sends
    each matrix to its owner, another sends the results back. If there are fewer matrices than
    ranks, some ranks own none.

    Args:
        fn: a pure function of a matrix and of its entries in ``rest``. All matrices share the
            tensors that it captures.
        tree: leaves of shape (rows, columns), or (..., rows, columns) for stacks of matrices, such
            as experts.
        rest: trees with a subtree of tensors and static values for each leaf of ``tree``. For a
            stack of matrices, the tensors begin with the stack's leading dims.
        axes: the mesh axes whose ranks own matrices, default all.

    Returns:
        The tree of results; a tuple of trees where ``fn`` returns a tuple. Results for a stack of
        matrices begin with its leading dims.

    Raises:
        InputError: a leaf that is not a tensor of two or more dims; ``rest`` that does not fit; a
            result that is not a tensor; an axis that the mesh lacks.

    >>> grads, moments = {"w": torch.tensor([[3.0, 4.0]])}, {"w": torch.zeros(1, 1)}
    >>> def whiten(grad, moment):
    ...     moment = moment + grad @ grad.T
    ...     return grad / moment.sqrt(), moment
    >>> by_owner(whiten, grads, moments)
    ({'w': tensor([[0.6000, 0.8000]])}, {'w': tensor([[25.]])})
    """
    return apply_by_owner(fn, tree, rest, axes)


def apply_by_owner(
    fn: Callable[..., Any],
    tree: Any,
    rest: Sequence[Any],
    axes: Sequence[str] | None,
    specs: Sequence[P | None] | None = None,
) -> Any:
    """``by_owner``.

    Args:
        specs: per leaf of ``tree``, the spec of its parameter, if known: leaves with equal cuts are
            stacked together. Default: the spec of the step's argument at the leaf.
    """
    if not callable(fn):
        raise InputError(f"by_owner takes a function of a matrix, not {fn!r}, {kind_of(fn)}.")
    leaves, treedef = flatten(tree)
    names = leaf_names(tree, "tree")
    check_matrices(leaves, names)
    columns = [aligned(treedef, other, f"rest[{i}]", "tree") for i, other in enumerate(rest)]
    items = [_item(args) for args in zip(leaves, *columns, strict=True)]
    named = zip(items, names, strict=True)
    raise_all(InputError, (failure for item, name in named for failure in item.unfit(name)))
    mesh = _surrounding_mesh(items)
    if mesh is None:
        results = [_in_turn(fn, item) for item in items]
    else:
        owners = _owners(mesh, axes)
        known = specs or [_spec_of(item) for item in items]
        results: list[Any] = [None] * len(items)
        for key, members in _groups(items, known, leaf_paths(tree)).items():
            spec = None if key[-1] is None else without_stage(key[-1])
            made = _owned(fn, [[items[i] for i in kind] for kind in members], spec, owners)
            for i, result in zip([i for kind in members for i in kind], made, strict=True):
                results[i] = result
    if results and all(type(r) is tuple and len(r) == len(results[0]) for r in results):
        return tuple(treedef.unflatten(list(column)) for column in zip(*results, strict=True))
    return treedef.unflatten(results)


_NO_TENSOR = (
    "A function given to by_owner must return trees of tensors only: results for all matrices"
    " are stacked. Make a number a tensor (torch.tensor(x)), or leave it out."
)


@dataclass(frozen=True)
class _Item:
    """The arguments of the function for one leaf.

    Attributes:
        leaves, tree: the arguments, flattened.
        lead: the leading dims of all tensors; empty for a single matrix.
    """

    leaves: tuple[Any, ...]
    tree: Any
    lead: tuple[int, ...]

    @property
    def tensors(self) -> list[Tensor]:
        return [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]

    def filled(self, tensors: Sequence[Tensor]) -> tuple[Any, ...]:
        """The function's arguments, with ``tensors`` in place of the item's."""
        feed = iter(tensors)
        return self.tree.unflatten(
            [next(feed) if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]
        )

    def unfit(self, name: str) -> list[str]:
        n = len(self.lead)
        return [
            f"{name} is a stack of matrices, of shape {tuple(self.leaves[0].shape)}; a tensor of"
            f" shape {tuple(x.shape)} beside it does not begin with {self.lead}."
            for x in self.tensors
            if tuple(x.shape[:n]) != self.lead
        ]

    def key(self) -> Any:
        """Items with equal keys can share one program."""
        return (
            self.tree,
            *(
                (tuple(leaf.shape), leaf.dtype, leaf.device)
                if isinstance(leaf, Tensor)
                else key_of_static(leaf)
                for leaf in self.leaves
            ),
        )


def _item(args: tuple[Any, ...]) -> _Item:
    leaves, tree = flatten(args)
    return _Item(tuple(leaves), tree, tuple(args[0].shape[:-2]))


def check_matrices(leaves: Sequence[Any], names: Sequence[str]) -> None:
    failures = [
        f"{name} is {f'of shape {tuple(x.shape)}' if isinstance(x, Tensor) else kind_of(x)}, no"
        " matrix. Give it another optimizer (ftp.optim.by_path)."
        for x, name in zip(leaves, names, strict=True)
        if not isinstance(x, Tensor) or x.ndim < 2
    ]
    raise_all(InputError, failures)


def _surrounding_mesh(items: Sequence[_Item]) -> Mesh | None:
    """The mesh of the step being traced. None on one device, in per-rank code, and under a
    transform of torch.func, which cannot see into the op that the owners run.
    """
    tensors = [x for item in items for x in item.tensors]
    if (
        get_proxy_mode() is None
        or is_inside()
        or peek_interpreter_stack() is not None
        or any(is_functorch_wrapped_tensor(x) or x.requires_grad for x in tensors)
    ):
        return None
    try:
        mesh = resolve(None)
    except MeshError:
        return None
    return mesh if mesh.axes else None  # a mesh with only a pipeline's axis has no axes here


def _in_turn(fn: Callable[..., Any], item: _Item) -> Any:
    """Apply the function to each matrix of an item in turn."""
    if not item.lead:
        result = fn(*item.filled(item.tensors))
        if not all(isinstance(x, Tensor) for x in flatten(result)[0]):
            raise InputError(_NO_TENSOR)
        return result
    n, count = len(item.lead), math.prod(item.lead)
    stacks = [x.reshape(count, *x.shape[n:]) for x in item.tensors]
    if not count:
        raise InputError("by_owner is given a stack without matrices.")
    # Clone: a kernel may round differently on memory of another alignment.
    made = [fn(*item.filled([x[i].clone() for x in stacks])) for i in range(count)]
    flat = [flatten(result) for result in made]
    if any(not isinstance(x, Tensor) for leaves, _ in flat for x in leaves):
        raise InputError(_NO_TENSOR)
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    return flat[0][1].unflatten(
        [torch.stack(x).reshape(*item.lead, *x[0].shape) for x in map(list, columns)]
    )


def _owners(mesh: Mesh, axes: Sequence[str] | None) -> tuple[str, ...]:
    axes = (axes,) if isinstance(axes, str) else axes
    if unknown := [axis for axis in axes or () if axis not in mesh.axes]:
        raise InputError(
            f"by_owner has axes={axes!r}, but the mesh has {', '.join(map(repr, mesh.axes))}: no"
            f" axis {unknown[0]!r}."
        )
    return tuple(axis for axis in mesh.axes if axes is None or axis in axes)


def _spec_of(item: _Item) -> P | None:
    """The spec of the first tensor of the matrix' shape that is an argument of the step."""
    shape = item.leaves[0].shape
    found = (spec_of_argument(x) for x in item.tensors if x.shape == shape)
    return next((spec for spec in found if spec is not None), None)


def _groups(
    items: Sequence[_Item], specs: Sequence[P | None], paths: Sequence[Sequence[Any]]
) -> dict[Any, list[list[int]]]:
    """The leaves to stack together, with equal shapes and cuts, so that one collective sends them.
    Within a group, the same parameter of all layers is one list, so that layers are planned as one.
    """
    found: dict[Any, dict[str, list[int]]] = {}
    for i in sorted(range(len(items)), key=lambda i: natural_order(paths[i])):
        kind = re.sub(r"\d+", "*", ".".join(map(str, paths[i])))
        found.setdefault((items[i].key(), specs[i]), {}).setdefault(kind, []).append(i)
    return {key: list(kinds.values()) for key, kinds in found.items()}


def _owned(
    fn: Callable[..., Any],
    kinds: Sequence[Sequence[_Item]],
    spec: P | None,
    owners: tuple[str, ...],
) -> list[Any]:
    """The results of items of one group, computed by the owners of their matrices."""
    first = kinds[0][0]
    order, owners = _order(first, spec, owners)
    stacks = [
        constrain(
            _stacked([[item.tensors[at] for item in kind] for kind in kinds], order), P(owners)
        )
        for at in range(len(first.tensors))
    ]
    program, constants, out_tree = _program(fn, first, stacks)
    made = MAP_SLICES(stacks, constants, program)
    if spec and any(map(spec.cuts, range(len(first.lead)))):
        made = [_back(x, first, spec, order) for x in made]
    counts = [len(kind) for kind in kinds]
    columns = [_apart(x, counts, first.lead, order) for x in made]
    return [out_tree.unflatten(list(row)) for row in zip(*columns, strict=True)]


def _order(
    item: _Item, spec: P | None, owners: tuple[str, ...]
) -> tuple[list[int], tuple[str, ...]]:
    """The order of an item's leading dims in the stack, and of the axes that cut the stack.

    The dims and axes that cut the item already come first, so that its matrices stay on their
    ranks. Axes that cut one dim together keep their order.
    """
    n, cuts = len(item.lead), [spec.cuts(d) for d in range(len(spec))] if spec else []
    cut = [d for d, found in enumerate(cuts[:n]) if found]
    order = [*cut, *(d for d in range(n) if d not in cut)]
    nested = [found for found in cuts[n:] if len(found) > 1]
    first = [c.axis for found in (*(cuts[d] for d in cut), *nested) for c in found]
    return order, tuple(dict.fromkeys(a for a in (*first, *owners) if a in owners))


def _back(x: Tensor, item: _Item, spec: P, order: Sequence[int]) -> Tensor:
    """Shard a stack of results like the parameters, if it has the matrices' shape. Otherwise later
    ops would be cut over the owners, and their results gathered one by one.
    """
    n = len(item.lead)
    if x.shape[1:] != item.leaves[0].shape[n:]:
        return x
    axes = [c.axis for d in order for c in (spec.cuts(d) if d < len(spec) else ())]
    return constrain(x, P(tuple(axes), *list(spec)[n:]))


def _stacked(kinds: Sequence[Sequence[Tensor]], order: Sequence[int]) -> Tensor:
    """All matrices along dim 0: leading dims in ``order``, then tensors."""
    n = len(order)
    of_kinds: list[Any] = [Stack.apply(*xs) for xs in kinds]
    together = of_kinds[0] if len(of_kinds) == 1 else torch.cat(of_kinds)
    if not n:
        return together
    turned = together.permute(*(d + 1 for d in order), 0, *range(n + 1, together.ndim))
    return turned.flatten(0, n)


def _apart(
    x: Tensor, counts: Sequence[int], lead: Sequence[int], order: Sequence[int]
) -> list[Tensor]:
    """The inverse of ``_stacked``."""
    n, total = len(order), sum(counts)
    if n:
        turned = x.unflatten(0, (*(lead[d] for d in order), total))
        back = [order.index(d) for d in range(n)]
        x = turned.permute(n, *back, *range(n + 1, turned.ndim))
    parts = [x] if len(counts) == 1 else x.split(list(counts))
    return [one for part in parts for one in Unstack.apply(part)]  # type: ignore[union-attr]


def _program(
    fn: Callable[..., Any], item: _Item, stacks: Sequence[Tensor]
) -> tuple[str, list[Tensor], Any]:
    """Trace the function on the shapes of one matrix. Returns the program's key, the tensors that
    the function captures, and the tree of its results.
    """
    slices = [torch.empty(x.shape[1:], dtype=x.dtype, device="meta") for x in stacks]
    args = item.filled(slices)
    leaves, names = flatten(args)[0], leaf_names(args, "args")
    # Hide the surrounding trace, whose tensors are stacks.
    with disable_current_modes(), temporarily_clear_interpreter_stack():
        device_type = stacks[0].device.type
        traced = trace(fn, leaves, item.tree, device_type, names=names, within=True)
    if any(traced.is_static):
        raise InputError(_NO_TENSOR)
    assert list(traced.out_leaves) == list(range(len(traced.out_leaves)))
    constants = list(traced.constants)
    return interned(traced.gm, [*slices, *constants]).key, constants, traced.out_tree
