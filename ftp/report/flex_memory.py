"""Peak memory of a flex_attention call, beside its operands and results."""

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
    """The most bytes that a flex_attention call holds at a time: copies of a tile's operands, the
    tile's scores and what their functions compute, its results, and sums in a wider dtype. 0 for
    any other op.
    """
    if node.target not in (FLEX, FLEX_BACKWARD, FLEX_RING, FLEX_RING_BACKWARD):
        return 0
    call = _FlexCall(node, shapes)
    return 0 if 0 in (*call.q.shape, *call.k.shape) else call.peak()


class _FlexCall:
    """One call: its tensors, its other arguments, and bytes per element.

    Attributes:
        size, wide: bytes of an element of the tensors, and in the dtype of sums.
        cast: bytes of an element that is copied into the dtype of sums; 0 if it is not copied.
        queries: the queries of the largest tile.
    """

    def __init__(self, node: fx.Node, shapes: LocalShapes):
        target: Any = node.target
        self.ring, self.is_forward = RINGS.get(target), target in (FLEX, FLEX_RING)
        names = [a.name for a in target._schema.arguments]
        given: Any = dict(zip(names, node.args, strict=False))
        self.args: Any = map_arg(node.args, lambda n: shapes.numbers.get(n, 0))
        numbers = dict(zip(names, self.args, strict=False))
        self.q, self.k, self.v = (shapes.values[given[name]][0] for name in "qkv")
        self.size, self.wide = self.q.dtype.itemsize, sum_dtype(self.q.dtype).itemsize
        self.cast = self.wide if self.wide != self.size else 0
        self.score, self.mask, self.known = given["score"], given["mask"], given["known"]
        self.block, self.has_dropout = tuple(given["block"]), bool(given["drop_keys"])
        self.tables = [shapes.values[x][0].shape for x in given["tables"][1::2]]
        self.rows, self.columns = tuple(numbers["rows"]), tuple(numbers["columns"])
        self.queries = longest_block(self.rows, self.q.shape[2])

    def peak(self) -> int:
        """The most bytes at a time, over all tiles and all steps of a ring."""
        most = longest = 0
        for keys, columns, travels in self._keys_in_turn():
            tiles = {(self.queries, longest_block(columns, keys))}
            if self.known:
                queries = self.q.shape[2]
                tiles = _tiles(self.rows, queries, columns, keys, self.block, self.known)
            largest = max((self._tile(keys, *x) for x in tiles), default=0) if keys else 0
            most, longest = max(most, travels + _INDEX * keys + largest), max(longest, keys)
        most += _LISTED * self._listed_blocks() + _INDEX * self.q.shape[2]
        batch, heads, _ = self._group(longest)
        rows = batch * heads * self.queries
        if self.is_forward:
            most += rows * self.v.shape[3] * (0 if self.ring else self.cast)
            summed = math.prod((*self.q.shape[:3], self.v.shape[3])) if self.ring else 0
        else:
            most += rows * (self.v.shape[3] + 2) * self.cast
            most += math.prod(self.q.shape[:3]) * self.wide
            summed_tensors = (self.q,) if self.ring else (self.q, self.k, self.v)
            summed = sum(math.prod(x.shape) for x in summed_tensors)
        # Sums of a wider dtype than the results are held from the start, results from the end.
        return max(summed * self.cast, summed * max(self.cast - self.size, 0) + most)

    def _keys_in_turn(self) -> Iterator[tuple[int, tuple[int, ...], int]]:
        """The keys that are computed with at a time: their number, their part of the sequence, and
        the bytes that a ring sends and receives meanwhile.
        """
        if self.ring is None:
            yield self.k.shape[2], self.columns, 0
            return
        needs, keys = self.ring.needs(self.args), self.k.shape
        steps = Steps(needs, rank_of(needs, self.rows, self.q.shape[2], keys[2]))
        pair = keys[0] * keys[1] * (keys[3] + self.v.shape[3])
        sizes, is_part = (pair * self.size, pair * self.wide), is_copied(self.k, needs.ring.width)
        travels = travelling(steps, sizes, self.ring.returns, is_part)
        for (piece, step), nbytes in zip(steps.all, travels, strict=True):
            owner = (steps.rank - step) % steps.ring.n
            yield needs.length(steps.rank, owner, piece), tuple(steps.columns(owner, piece)), nbytes

    def _listed_blocks(self) -> int:
        """The number of blocks of the mask that are looked at for a tile's queries."""
        blocks = max(map(math.prod, self.tables), default=0)
        if not blocks:
            return 0
        of_queries = min(attention.TILE, self.q.shape[2]) // self.block[0] + 2
        return min(blocks, -(-blocks // self.tables[0][2]) * of_queries)

    def _group(self, keys: int) -> tuple[int, int, int]:
        """The numbers of batches, query heads and key heads that are computed at a time."""
        heads, of_keys = self.q.shape[1], self.k.shape[1]
        batch, some = attention_flex.group_size(heads, of_keys, self.q.shape[2], keys)
        return min(batch, self.q.shape[0]), some * (heads // of_keys), some

    def _tile(self, held: int, queries: int, keys: int) -> int:
        """The most bytes of a tile.

        Args:
            held: the number of keys that are computed with at a time.
        """
        batch, heads, of_keys = self._group(held)
        repeated = self.wide if heads != of_keys else 0
        sizes = dict(zip(PLACE, (batch, heads, queries, keys), strict=True))
        pairs = math.prod(sizes.values())
        rows, columns = batch * heads * queries, batch * heads * keys
        copies = rows * self.q.shape[3] * self.cast
        copies += columns * self.k.shape[3] * max(self.cast, repeated)
        scores, of_score = pairs * self.wide, _peak(self.score, sizes)
        hidden = _peak(self.mask, sizes)
        sees = _result(self.mask, sizes) if self.mask else queries * keys * bool(self.tables)
        of_values = columns * self.v.shape[3] * max(self.cast, repeated)
        dropped = self.wide if self.has_dropout else 0  # per pair, of the weights after dropout
        draws = pairs * max(_DRAWN, 1 + dropped) if self.has_dropout else 0
        if self.is_forward:
            weighted = pairs * dropped + of_values + rows * self.v.shape[3] * self.wide
            most = max(copies, of_score, hidden, scores + sees, draws, weighted)
            return scores + most + rows * 3 * self.wide
        products = 2 * scores + sees + max(of_values, draws)
        most = max(scores + max(copies, hidden), products)
        if self.score:  # the function's argument and result are kept for its derivative
            kept = 2 * scores + _kept(self.score, sizes)
            most = max(scores + of_score, kept + hidden, kept + most)
        return most


@functools.lru_cache(1024)
def _tiles(
    rows: tuple[int, ...],
    queries: int,
    columns: tuple[int, ...],
    keys: int,
    block: tuple[int, int],
    known: str,
) -> set[tuple[int, int]]:
    """The sizes (queries, keys) of the tiles that the mask lists, as far as a trace knows it.

    Args:
        rows, columns: parts of queries and of keys, as in `ftp.ops.attention`.
        known: which blocks are listed.
    """
    most, found, seen = attention.TILE, set(), known_blocks(known)
    for row in blocks(rows, queries, most):
        span = row.first, row.first + row.length
        near = seen[span[0] // block[0] : -(-span[1] // block[0])]
        for at, length in pieces_of(columns, keys):
            run = at, at + length
            for (first, stop), (begin, end), _ in listed_tiles(near, near, block, span, run):
                for low in range(begin - (begin - at) % most, end, most):
                    found.add((stop - first, min(end, low + most) - max(begin, low)))
    return found


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
