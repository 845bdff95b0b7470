"""A tree of tensors on a mesh, flattened and checked once: the value that `device_put`,
`device_get`, `reshard`, `save`, `load`, `check_replicas` and `to_dtensor` work on.

`sharded_tree` takes five steps:

1. `flatten_with_specs`: leaves with their names, paths and specs.
2. `check_leaves`: no leaf is a DTensor, donated or sparse.
3. `with_known_shapes`: the global shapes that this rank knows by itself.
4. `check_fit`: every spec fits its leaf's shape and the mesh.
5. `check_placement`: no tensor is placed on another mesh, or with another spec.

If ranks pass shards of unknown global shape, `agree_on_shapes` or `with_agreed_shapes` finds the
shapes from all ranks' shards.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ftp.dataclass import dataclass
from ftp.distributed.calls import calls
from ftp.distributed.shared_errors import all_gather_object
from ftp.errors import InputError, MismatchError, SpecError, raise_all
from ftp.sharding.balance import misfits
from ftp.sharding.check_spec import check_spec
from ftp.sharding.dtensor_placements import check_plain, specs_of_any
from ftp.sharding.mesh import Mesh
from ftp.sharding.patterns import dotted
from ftp.sharding.pytree import broadcast_specs, cut_value, flatten, leaf_names, leaf_paths
from ftp.sharding.spec import PartitionSpec
from ftp.tensors.boxes import Shape
from ftp.tensors.global_shapes import agreed_shapes, describe_held, global_shape
from ftp.tensors.placement import check_alive, check_placed, placement_of

Holds = Literal["shards", "full", "shapes"]


@dataclass(frozen=True)
class Leaf:
    """A leaf of a tree.

    Attributes:
        value: a tensor, a stand-in for one (anything with a shape and a dtype), or another value.
        name: its name in messages, such as ``tree['w']``.
        path: its keys joined by dots, as ``ftp.plan`` matches them.
        spec: of a tensor, without a leading ``...``.
        shape: the global shape of a tensor; None for other values, and for a shard until the ranks
            have agreed on it.
    """

    value: Any
    name: str
    path: str
    spec: PartitionSpec
    shape: Shape | None = None

    @property
    def is_tensor(self) -> bool:
        """Whether the value is a tensor, or stands for one."""
        return isinstance(self.value, Tensor) or (
            hasattr(self.value, "shape") and hasattr(self.value, "dtype")
        )

    @property
    def dtype(self) -> str:
        """The dtype's name without torch's prefix: ``"float32"``."""
        return str(self.value.dtype).removeprefix("torch.")

    @property
    def known_shape(self) -> Shape:
        """The global shape of a tensor, once it is known."""
        assert self.shape is not None, self.name
        return self.shape


@dataclass(frozen=True)
class ShardedTree:
    """Leaves in optree's order, the structure of their tree, and the mesh of their specs."""

    mesh: Mesh
    treedef: Any
    leaves: tuple[Leaf, ...]

    @property
    def values(self) -> list[Any]:
        return [leaf.value for leaf in self.leaves]

    @property
    def names(self) -> list[str]:
        return [leaf.name for leaf in self.leaves]

    @property
    def specs(self) -> list[PartitionSpec]:
        return [leaf.spec for leaf in self.leaves]

    def unflatten(self, values: Iterable[Any]) -> Any:
        """A tree of the same structure with other leaves."""
        return self.treedef.unflatten(list(values))

    def with_shapes(self, shapes: Iterable[Shape | None]) -> "ShardedTree":
        leaves = zip(self.leaves, shapes, strict=True)
        return replace(self, leaves=tuple(replace(leaf, shape=shape) for leaf, shape in leaves))

    def with_specs(self, mesh: Mesh, specs: Any) -> "ShardedTree":
        """The same values on ``mesh`` under other specs, which fit.

        Raises:
            SpecError: specs that do not fit the tree, its shapes or the mesh.
        """
        other = flatten_with_specs(self.unflatten(self.values), mesh, specs, "tree")
        other = other.with_shapes(leaf.shape for leaf in self.leaves)
        check_fit(other)
        return other

    def facts(self) -> list[list[Any]]:
        """Per leaf, the facts that must be equal on all ranks."""
        return [
            [leaf.name, "tensor", str(leaf.value.dtype), str(leaf.spec)]
            if isinstance(leaf.value, Tensor)
            else [leaf.name, "value", type(leaf.value).__name__, repr(leaf.value)]
            for leaf in self.leaves
        ]

    def digest(self) -> str:
        """A digest that is equal on ranks that hold shards of one tree and know the same global
        shapes.
        """
        shapes = [leaf.shape for leaf in self.leaves]
        return hashlib.sha256(json.dumps([self.facts(), shapes]).encode()).hexdigest()


def sharded_tree(
    tree: Any,
    mesh: Mesh,
    specs: Any,
    *,
    holds: Holds = "shards",
    takes_sums: bool = False,
) -> ShardedTree:
    """`fitted_tree`, with step 5: no tensor in it has another placement.

    >>> from ftp.sharding.make_mesh import simulated_mesh
    >>> from ftp.sharding.mesh import resolve
    >>> from ftp.sharding.spec import P
    >>> mesh = resolve(simulated_mesh((2,), ("tp",)))
    >>> found = sharded_tree({"w": torch.ones(4), "n": 3}, mesh, {"w": P("tp"), "n": P()})
    >>> [(leaf.name, leaf.spec, leaf.shape) for leaf in found.leaves]
    [("tree['n']", P(), None), ("tree['w']", P('tp'), (4,))]
    """
    found = fitted_tree(tree, mesh, specs, holds=holds, takes_sums=takes_sums)
    if holds != "shapes":
        check_placement(found)
    return found


def fitted_tree(
    tree: Any,
    mesh: Mesh,
    specs: Any,
    *,
    holds: Holds = "shards",
    takes_sums: bool = False,
) -> ShardedTree:
    """A tree with specs that fit it, as far as this rank can tell: steps 1 to 4.

    Args:
        specs: a spec tree, a prefix of one, or one ``P`` for all; None is ``P()``. DTensor
            placements, one for each axis of the mesh, may stand where a spec may.
        holds: the kind of the tensors: this rank's ``"shards"``, ``"full"`` tensors that may not be
            placed yet, or only global ``"shapes"``.
        takes_sums: whether a spec may have unreduced axes.

    Raises:
        SpecError, InputError, DonationError: every leaf that fails a step.
    """
    flat = flatten_with_specs(tree, mesh, specs)
    if holds != "shapes":
        check_leaves(flat)
    found = with_known_shapes(flat, holds)
    check_fit(found, takes_sums)
    return found


def flatten_with_specs(tree: Any, mesh: Mesh, specs: Any, root: str = "tree") -> ShardedTree:
    """Step 1: the leaves of a tree and a spec for each, unchecked."""
    values, treedef = flatten(tree)
    given = specs_of_any(PartitionSpec() if specs is None else specs, tree, mesh, root)
    leaves = [
        Leaf(value, name, dotted(path) or root, _at_rank(spec, value))
        for value, name, path, spec in zip(
            values,
            leaf_names(tree, root),
            leaf_paths(tree),
            broadcast_specs(given, tree, root),
            strict=True,
        )
    ]
    return ShardedTree(mesh, treedef, tuple(leaves))


def _at_rank(spec: PartitionSpec, value: Any) -> PartitionSpec:
    return spec.at_rank(value.ndim) if isinstance(value, Tensor) else spec


def check_leaves(tree: ShardedTree) -> None:
    """Step 2: raises for DTensors, donated tensors, sparse tensors, and specs of numpy arrays."""
    check_plain(tree.values, tree.names)
    check_alive(tree.values, tree.names)
    arrays = [
        cut_value(leaf.name, leaf.value, leaf.spec)
        for leaf in tree.leaves
        if leaf.spec and isinstance(leaf.value, np.ndarray)
    ]
    raise_all(SpecError, arrays)
    failures = [
        f"{leaf.name} is of layout {leaf.value.layout}; only strided tensors can be cut. Give"
        " .to_dense()."
        for leaf in tree.leaves
        if isinstance(leaf.value, Tensor) and leaf.value.layout is not torch.strided
    ]
    raise_all(InputError, failures)


def with_known_shapes(tree: ShardedTree, holds: Holds = "shards") -> ShardedTree:
    """Step 3: add the global shapes of placed and full tensors; without processes, of all."""

    def known(leaf: Leaf) -> Shape | None:
        where = placement_of(leaf.value)
        if where is not None and holds != "shapes":
            return where.shape
        is_global = holds != "shards" or tree.mesh.kind != "process"
        return tuple(leaf.value.shape) if leaf.is_tensor and is_global else None

    return tree.with_shapes(map(known, tree.leaves))


def check_fit(tree: ShardedTree, takes_sums: bool = False) -> None:
    """Step 4: raises for specs that do not fit the global shapes, or the mesh.

    A shard of unknown global shape is checked after the ranks have agreed on its shape: under
    uneven specs this rank cannot know it.
    """
    failures: list[str] = []
    for leaf in tree.leaves:
        if leaf.is_tensor:
            shape = leaf.shape
            if shape is None and len(leaf.spec) > leaf.value.ndim:
                shape = tuple(leaf.value.shape)  # the number of dims is wrong at any sizes
            failures += check_spec(
                leaf.spec, shape, tree.mesh.axes, leaf.name, takes_sums=takes_sums
            )
            failures += misfits(leaf.value, leaf.spec, tree.mesh.axes, leaf.name)
        elif leaf.spec:
            failures.append(cut_value(leaf.name, leaf.value, leaf.spec))
    raise_all(SpecError, failures)


def check_placement(tree: ShardedTree) -> None:
    """Step 5: raises for tensors that are placed on another mesh, or with another spec."""
    check_placed(tree.values, tree.specs, tree.names, tree.mesh)


# Agreement on shapes.


def agree_on_shapes(tree: ShardedTree, what: str) -> ShardedTree:
    """The tree with all global shapes, from the shards of all ranks. Every rank calls it, after the
    steps above have passed or failed within `raise_on_all_ranks`.

    Raises:
        MismatchError: ranks that call something else, or shards that do not belong to one tensor.
    """
    record = calls(tree.mesh)
    specs = {leaf.name: leaf.spec for leaf in tree.leaves}
    record.agree(record.next(), {f"specs of {what}": str(specs)})
    held = [describe_held(leaf.value, leaf.spec, hashed=False) for leaf in tree.leaves]
    everyone = [json.loads(text) for text in record.exchange(what, json.dumps(held))]
    return _with_shapes_of(tree, everyone)


def with_agreed_shapes(
    tree: ShardedTree, key: str, digests: Sequence[str], timeout: float | None
) -> ShardedTree:
    """The tree with all global shapes. If all ranks' ``digests`` are equal and the shapes known,
    nothing is exchanged.

    Raises:
        MismatchError: on every rank: the first leaf in which ranks differ, or shards that do not
            belong to one tensor.
    """
    is_known = all(
        leaf.shape is not None or not isinstance(leaf.value, Tensor) for leaf in tree.leaves
    )
    if is_known and len(set(digests)) == 1:
        return tree
    ranks = tree.mesh.ranks
    held = [describe_held(leaf.value, leaf.spec) for leaf in tree.leaves]
    everyone = all_gather_object(tree.mesh, f"{key}/held", [tree.facts(), held], timeout)
    for rank, (facts, _) in zip(ranks, everyone, strict=False):
        if facts != everyone[0][0]:
            raise MismatchError(_difference(everyone[0][0], facts, ranks[0], rank))
    return _with_shapes_of(tree, [held for _, held in everyone])


def _with_shapes_of(tree: ShardedTree, everyone: Sequence[Sequence[Any]]) -> ShardedTree:
    """The tree with global shapes from ``everyone``: `describe_held` of each leaf, per rank."""
    if len(everyone) < tree.mesh.size():  # the "fake" backend has no other ranks
        shapes = [global_shape(leaf.value, leaf.spec, tree.mesh) for leaf in tree.leaves]
    else:
        shapes = agreed_shapes(everyone, tree.specs, tree.names, tree.mesh)
    found = tree.with_shapes(shapes)
    check_fit(found, takes_sums=True)
    return found


def _difference(first: list[list[str]], other: list[list[str]], a: int, b: int) -> str:
    for x, y in zip(first, other, strict=False):
        if x != y:
            what = [
                f"{name} is a tensor of {rest[0]}, spec {rest[1]}"
                if kind == "tensor"
                else f"{name} is {rest[1]}"
                for name, kind, *rest in (x, y)
            ]
            return (
                f"Ranks hold different trees: on rank {a} {what[0]}; on rank {b} {what[1]}."
                " Give every rank the same tree and specs."
            )
    longer = first if len(first) > len(other) else other
    return (
        f"Ranks hold different trees: {longer[min(len(first), len(other))][0]} is on rank"
        f" {a if longer is first else b} only."
    )
