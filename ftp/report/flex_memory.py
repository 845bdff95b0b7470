"""Bytes that flex_attention needs while it runs, without its operands and results."""

import functools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from ftp.ops import attention, attention_flex
from ftp.ops.attention import blocks, pieces_of, sum_dtype
from ftp.ops.attention_flex import FLEX, FLEX_BACKWARD
from ftp.ops.attention_flex_ring import FLEX_RING, FLEX_RING_BACKWARD
from ftp.ops.key_ring import Steps
from ftp.ops.listed_blocks import known_blocks, listed_tiles
from ftp.ops.map_slices import slice_program_of
from ftp.ops.rings import RINGS
from ftp.ops.score_functions import PLACE
from ftp.report.attention_memory import is_copied, longest_block, rank_of, travelling
from ftp.runtime.local_shapes import LocalShapes

aten = torch.ops.aten
_INDEX = 8  # bytes of an index
_DRAWN = 6  # bytes per pair of random bits and of their comparison
_LISTED = 18  # bytes per block while listed blocks are searched: an index, two numbers, two bools


def of_flex(node: fx.Node, shapes: LocalShapes) -> int:
    """The most bytes at a time: copies of a tile, its scores, what their functions compute, its
    results, and sums in a wider dtype.
    """
    target: Any = node.target
    ring = RINGS.get(target)
    if target not in (FLEX, FLEX_BACKWARD, FLEX_RING, FLEX_RING_BACKWARD):
        return 0
    is_forward = target in (FLEX, FLEX_RING)
    at = 0 if is_forward else 1
    q, k, v = (shapes.values[x][0] for x in node.args[at : at + 3])  # type: ignore[index]
    if 0 in (*q.shape, *k.shape):
        return 0
    rest: Any = map_arg(node.args[at + 3 + (0 if is_forward else 2) :], lambda n: n)
    tables, drop_keys, score, mask = rest[0], rest[3], rest[10], rest[11]
    size, wide = q.dtype.itemsize, sum_dtype(q.dtype).itemsize
    given: Any = map_arg(node.args, lambda n: shapes.numbers.get(n, 0))
    cast = wide if wide != size else 0
    placed = given[at + 3 + (0 if is_forward else 2) :]
    part = tuple(placed[6]), q.shape[2]
    # Keys that are computed with at a time, with their parts and the bytes that travel meanwhile.
    near = [(k.shape[2], tuple(placed[7]), 0)]
    if ring is not None:
        needs = ring.needs(given)
        steps = Steps(needs, rank_of(needs, ring.argument(given, "rows"), q.shape[2], k.shape[2]))
        pair = k.shape[0] * k.shape[1] * (k.shape[3] + v.shape[3])
        sizes = pair * size, pair * wide
        is_part = is_copied(k, needs.ring.width)
        near = list(_in_turn(steps, travelling(steps, sizes, ring.returns, is_part)))
    of_mask = max((math.prod(shapes.values[x][0].shape) for x in tables[1::2]), default=0)
    if of_mask:  # of the blocks of a tile's queries
        block_rows = shapes.values[tables[1]][0].shape[2]
        most_rows = min(attention.TILE, q.shape[2])
        of_mask = min(of_mask, -(-of_mask // block_rows) * (most_rows // rest[8][0] + 2))
    copied = wide if drop_keys else 0  # the tile after dropout
    draws = max(_DRAWN, 1 + copied) if drop_keys else 0

    def of_tile(held: int, queries: int, keys: int) -> int:
        batch, heads, of_keys = _group(q.shape, (*k.shape[:2], held, k.shape[3]))
        repeated = wide if heads != of_keys else 0
        sizes = dict(zip(PLACE, (batch, heads, queries, keys), strict=True))
        pairs = math.prod(sizes.values())
        rows, columns = batch * heads * queries, batch * heads * keys
        copies = rows * q.shape[3] * cast + columns * k.shape[3] * max(cast, repeated)
        scores, of_score = pairs * wide, _peak(score, sizes)
        hidden = _peak(mask, sizes)
        sees = _result(mask, sizes) if mask else queries * keys * bool(tables)
        of_values = columns * v.shape[3] * max(cast, repeated)
        if is_forward:
            made = rows * v.shape[3] * wide
            weighted = pairs * copied + of_values + made
            most = max(copies, of_score, hidden, scores + sees, pairs * draws, weighted)
            return scores + most + rows * 3 * wide
        products = 2 * scores + sees + max(of_values, pairs * draws)
        most = max(scores + max(copies, hidden), products)
        if score:  # the function's argument and result are kept for its derivative
            kept = 2 * scores + _kept(score, sizes)
            most = max(scores + of_score, kept + hidden, kept + most)
        return most

    known, most = rest[12], 0
    for held, columns, travels in near:
        tiles = [(longest_block(*part), longest_block(columns, held))]
        if known:
            tiles = _tiles(*part, columns, held, tuple(rest[8]), known)
        largest = max((of_tile(held, *x) for x in tiles), default=0) if held else 0
        most = max(most, travels + _INDEX * held + largest)
    most += _LISTED * of_mask + _INDEX * q.shape[2]
    batch, heads, _ = _group(q.shape, (*k.shape[:2], max(x[0] for x in near), k.shape[3]))
    rows = batch * heads * longest_block(*part)
    if is_forward:
        most += rows * v.shape[3] * (0 if ring else cast)
        summed = math.prod((*q.shape[:3], v.shape[3])) if ring else 0
    else:
        most += rows * (v.shape[3] + 2) * cast + math.prod(q.shape[:3]) * wide
        summed = sum(math.prod(x.shape) for x in ((q,) if ring else (q, k, v)))
    # Sums of a wider dtype than the results are held from the begin, results from the end.
    return max(summed * cast, summed * max(cast - size, 0) + most)


def _in_turn(steps: Steps, travels: Iterator[int]) -> Iterator[tuple[int, tuple[int, ...], int]]:
    """Per step of a ring: the number of a rank's keys, their part, and the bytes that travel."""
    for (piece, step), held in zip(steps.all, travels, strict=True):
        of = (steps.rank - step) % steps.ring.n, piece
        yield steps.needs.length(steps.rank, *of), tuple(steps.columns(*of)), held


@functools.lru_cache(1024)
def _tiles(
    part: tuple[int, ...],
    queries: int,
    columns: tuple[int, ...],
    keys: int,
    block: tuple[int, int],
    known: str,
) -> set[tuple[int, int]]:
    """The numbers of queries and keys of the tiles that the mask lists, as far as a trace knows.

    Args:
        part, columns: of queries and keys, as in `ftp.ops.attention`.
        known: which blocks are listed.
    """
    most, found, seen = attention.TILE, set(), known_blocks(known)
    for row in blocks(part, queries, most):
        rows = row.first, row.first + row.length
        near = seen[rows[0] // block[0] : -(-rows[1] // block[0])]
        for at, length in pieces_of(columns, keys):
            run = at, at + length
            for (first, stop), (begin, end), _ in listed_tiles(near, near, block, rows, run):
                for low in range(begin - (begin - at) % most, end, most):
                    found.add((stop - first, min(end, low + most) - max(begin, low)))
    return found


def _group(q: tuple[int, ...], k: tuple[int, ...]) -> tuple[int, int, int]:
    """The numbers of batches, query heads and key heads that are computed at a time."""
    count = k[1]
    repeats = q[1] // count
    pairs = min(attention.TILE, q[2]) * min(attention.TILE, k[2]) * repeats
    heads = max(1, min(count, attention_flex.PAIRS // pairs))
    batch = max(1, attention_flex.PAIRS // (pairs * heads)) if heads == count else 1
    return min(batch, q[0]), heads * repeats, heads


@functools.cache
def _depends(key: str) -> dict[str, tuple[str, int]]:
    """Per node of a function, the letters that its value depends on, and its bytes per element."""
    found: dict[str, tuple[str, int]] = {}
    nodes = list(slice_program_of(key).gm.graph.nodes)
    places = [n for n in nodes if n.op == "placeholder"]
    # A ``mask_mod`` has no score: its first inputs are the two positions.
    start = 1 if places[0].meta["val"].dtype.is_floating_point else 0
    own = {n: PLACE[i % 4] for i, n in enumerate(places[start : start + 8])}
    for node in nodes:
        if node.op == "placeholder":
            found[node.name] = (PLACE if node in places[:start] else own.get(node, ""), 0)
        elif node.op == "call_function":
            of = {c for x in node.all_input_nodes for c in found[x.name][0]}
            width = node.meta["val"].dtype.itemsize
            found[node.name] = ("".join(c for c in PLACE if c in of), width)
    return found


def _bytes(key: str, name: str, sizes: dict[str, int]) -> int:
    of, width = _depends(key)[name]
    return math.prod(sizes[c] for c in of) * width


def _result(key: str, sizes: dict[str, int]) -> int:
    """Bytes of a function's result."""
    output: Any = next(reversed(slice_program_of(key).gm.graph.nodes))
    return _bytes(key, output.args[0][0].name, sizes)


def _peak(key: str, sizes: dict[str, int]) -> int:
    """The most bytes that a function holds at a time, without its inputs."""
    if not key:
        return 0
    nodes = list(slice_program_of(key).gm.graph.nodes)
    last = {x: at for at, node in enumerate(nodes) for x in node.all_input_nodes}
    held = most = 0
    for at, node in enumerate(nodes):
        if node.op == "call_function":
            held += _bytes(key, node.name, sizes)
            most = max(most, held + _cast(key, node, sizes))
        for x in node.all_input_nodes:
            if last[x] == at and x.op == "call_function":
                held -= _bytes(key, x.name, sizes)
    return most


def _cast(key: str, node: fx.Node, sizes: dict[str, int]) -> int:
    """Copies of operands in the dtype in which a pointwise op computes."""
    if torch.Tag.pointwise not in getattr(node.target, "tags", ()):
        return 0
    tensors = [x for x in node.all_input_nodes if _depends(key)[x.name][0]]
    dtypes = [x.meta["val"].dtype for x in tensors if x.meta["val"].dtype != torch.bool]
    made = node.meta["val"].dtype
    common = made if made.is_floating_point else functools.reduce(torch.promote_types, dtypes, made)
    return sum(
        _bytes(key, x.name, sizes) // x.meta["val"].dtype.itemsize * common.itemsize
        for x in tensors
        if x.meta["val"].dtype not in (common, torch.bool)
    )


def _kept(key: str, sizes: dict[str, int]) -> int:
    """Bytes of a function's values that its derivative needs: those that depend on the scores and
    are not only operands of sums.
    """
    nodes = slice_program_of(key).gm.graph.nodes
    linear = (aten.add.Tensor, aten.sub.Tensor, aten.neg.default)
    return sum(
        _bytes(key, node.name, sizes)
        for node in nodes
        if node.op == "call_function"
        and set(_depends(key)[node.name][0]) == set(PLACE)
        and node.target not in linear
        and not any(user.op == "output" for user in node.users)
    )
