"""flex_attention's functions of one score and its position, as graphs.

A graph takes the score (a ``mask_mod`` takes none), the global position ``b, h, q, k``, the local
position, and the tensors that the function captured. The local position is used only to index dims
of captured tensors that are as long as batch, heads, queries or keys: such a dim is cut like the
scores. All other indices are global.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ftp.ops.map_slices import interned, slice_program_of

aten = torch.ops.aten
PLACE = "bhqk"
Letters = tuple[str, ...]  # of a captured tensor's dims: one of `PLACE`, "" for none

_IN_DIMS = (
    (None, None, None, 0),
    (None, None, 0, None),
    (None, 0, None, None),
    (0, None, None, None),
)
_LIKE_POINTWISE = (
    aten._to_copy.default, aten.lift_fresh_copy.default, aten.clone.default, aten.detach.default,
    aten.alias.default, aten.full.default, aten.scalar_tensor.default, aten.ones.default,
    aten.zeros.default,
)  # fmt: skip


def evaluate(
    key: str,
    scores: Tensor | None,
    at: Sequence[Tensor],
    near: Sequence[Tensor],
    captured: Sequence[Tensor],
) -> Tensor:
    """Apply a function to all scores of a tile, or compute the tile's mask, which broadcasts to
    (batch, heads, queries, keys).

    Args:
        scores: None for a mask.
        at, near: per dim of the tile, its global indices, and its indices into captured tensors.
    """
    gm: Any = slice_program_of(key).gm
    given = () if scores is None else (scores,)
    if _broadcasts(key):
        places = [
            x.reshape([-1 if i == dim else 1 for i in range(4)])
            for index in (at, near)
            for dim, x in enumerate(index)
        ]
        return gm(*given, *places, *captured)[0]
    run: Any = lambda *x: gm(*x)[0]  # noqa: E731
    for dims in _IN_DIMS:
        each = (0,) * len(given) + dims * 2 + (None,) * len(captured)
        run = torch.vmap(run, in_dims=each)
    return run(*given, *at, *near, *captured)


@functools.cache
def _broadcasts(key: str) -> bool:
    """Whether the function uses only numbers and lookups, which broadcast."""
    for node in slice_program_of(key).gm.graph.nodes:
        if node.op != "call_function":
            continue
        if node.meta["val"].ndim:
            return False
        if node.target is aten.index.Tensor:
            table, indices = node.args
            whole = all(x is not None and x.meta["val"].dtype != torch.bool for x in indices)
            if table.op != "placeholder" or not whole:
                return False
        elif node.target not in _LIKE_POINTWISE:
            if torch.Tag.pointwise not in node.target.tags:
                return False
            if any(x.meta["val"].ndim for x in node.all_input_nodes):
                return False
    return True


@functools.cache
def letters(key: str, is_mask: bool) -> tuple[Letters, ...]:
    """The letters of each captured tensor."""
    if not key:
        return ()
    nodes = [n for n in slice_program_of(key).gm.graph.nodes if n.op == "placeholder"]
    start = 4 if is_mask else 5
    near = dict(zip(nodes[start : start + 4], PLACE, strict=True))
    found = []
    for node in nodes[start + 4 :]:
        named = [""] * node.meta["val"].ndim
        for user in node.users:
            if user.target is aten.index.Tensor and user.args[0] is node:
                for dim, index in enumerate(user.args[1]):
                    named[dim] = near.get(index, "")
        found.append(tuple(named))
    return tuple(found)


def intern(
    gm: fx.GraphModule, captured: Sequence[Tensor], is_mask: bool, sizes: Sequence[int]
) -> tuple[str, list[Tensor]]:
    """The key of a function, and its captured tensors, with an entry for each way in which one is
    indexed.

    Args:
        gm: takes the score (not for a mask), the global and the local position (unused so far), and
            captured tensors; returns a tuple of one.
        sizes: of batch, heads, queries and keys.
    """
    graph: Any = gm.graph
    nodes = [n for n in graph.nodes if n.op == "placeholder"]
    start = 0 if is_mask else 1
    at, near = nodes[start : start + 4], nodes[start + 4 : start + 8]
    name_of, local = dict(zip(at, PLACE, strict=True)), dict(zip(at, near, strict=True))
    size_of = dict(zip(PLACE, sizes, strict=True))
    last, given = nodes[-1], []
    for node, x in zip(nodes[start + 8 :], captured, strict=True):
        uses: dict[Letters, list[fx.Node]] = {}
        for user in list(node.users):
            named = [""] * x.ndim
            if user.target is aten.index.Tensor and user.args[0] is node:
                for dim, index in enumerate(user.args[1]):
                    letter = name_of.get(index, "")
                    named[dim] = letter if letter and x.shape[dim] == size_of[letter] else ""
            uses.setdefault(tuple(named), []).append(user)
        for named, users in uses.items():
            with graph.inserting_after(last):
                last = graph.placeholder(f"captured_{len(given)}")
            last.meta["val"] = node.meta["val"]
            given.append(x)
            for user in users:
                user.replace_input_with(node, last)
                if any(named):
                    by: Any = user.args[1]
                    indices = [local[i] if of else i for of, i in zip(named, by, strict=False)]
                    user.args = (last, indices)
        graph.erase_node(node)
    gm.recompile()
    inputs = [n.meta["val"] for n in graph.nodes if n.op == "placeholder"]
    return interned(gm, inputs).key, given
