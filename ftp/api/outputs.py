"""The specs and the memory of a step's outputs."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import optree
import torch

from ftp.sharding.arguments import Shape
from ftp.sharding.pytree import flatten
from ftp.sharding.spec import PartitionSpec
from ftp.tracing.trace import Traced


def returned_trees(
    tree: optree.PyTreeSpec,
    shapes: Sequence[Shape | None],
    specs: Sequence[PartitionSpec],
    traced: Traced,
    out_specs: Sequence[PartitionSpec | None],
) -> dict[int, list[list[int]]]:
    """The arguments that the result returns, such as an optimizer's state: a subtree of the result
    has the argument's tree and shapes, and no other specs than the argument.

    Returns:
        Per position of such an argument, for each equal tree of the result, the indices of its
        leaves in the result.
    """
    returned = [
        (None, None) if static else (traced.out_shapes[leaf], out_specs[leaf])
        for leaf, static in zip(traced.out_leaves, traced.is_static, strict=True)
    ]
    subtrees = [flatten(sub) for sub in _subtrees(traced.out_tree.unflatten(range(len(returned))))]
    found: dict[int, list[list[int]]] = {}
    start = 0
    for position, child in enumerate(tree.children()):
        end = start + child.num_leaves
        given = list(zip(shapes[start:end], specs[start:end], strict=True))
        alike = [
            indices
            for indices, other in subtrees
            if other == child
            and all(
                shape == returned[i][0] and returned[i][1] in (spec, None)
                for (shape, spec), i in zip(given, indices, strict=True)
            )
        ]
        if not child.is_leaf() and given and alike:
            found[position] = alike
        start = end
    return found


def with_given(
    out_specs: Sequence[PartitionSpec | None],
    trees: Mapping[int, Sequence[Sequence[int]]],
    given: Mapping[int, Sequence[PartitionSpec]],
    traced: Traced,
) -> list[PartitionSpec | None]:
    """``out_specs``, with the argument's spec for an output without a spec that returns an
    argument, so that the next call can take it.

    Several equal arguments are matched to the result's equal trees in order; if their numbers
    differ, the planner chooses.
    """
    found = list(out_specs)
    alike: dict[tuple[int, ...], list[tuple[int, ...]]] = defaultdict(list)
    every = {tuple(indices) for of in trees.values() for indices in of}
    for indices in sorted(every, key=lambda own: (own[0], -len(own))):
        positions = tuple(p for p, of in trees.items() if list(indices) in of)
        alike[positions].append(indices)
    for positions, subtrees in alike.items():
        specs = [given[position] for position in positions]
        if all(of == specs[0] for of in specs):
            specs = specs[:1] * len(subtrees)
        if len(subtrees) != len(specs):
            continue
        for indices, of in zip(subtrees, specs, strict=True):
            for i, spec in zip(indices, of, strict=True):
                if not traced.is_static[i] and found[leaf := traced.out_leaves[i]] is None:
                    found[leaf] = spec
    return found


def _subtrees(tree: Any) -> list[Any]:
    if tree is None or optree.tree_is_leaf(tree, none_is_leaf=False, namespace="ftp"):
        return []
    level = optree.tree_flatten_one_level(tree, none_is_leaf=False, namespace="ftp")
    return [tree, *(sub for child in level.children for sub in _subtrees(child))]


def _dense(x: torch.Tensor) -> torch.Tensor:
    return x.clone(memory_format=torch.contiguous_format)


RENEWALS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "clone": torch.clone,
    "dense": _dense,
    "detach": torch.Tensor.detach,
}
"""How outputs are copied that share memory (``Program.renewed``), by name."""
