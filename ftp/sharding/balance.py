"""``balance``: an order of blocks in which all ranks have about equal attention work.

A block of queries has two measures of work: the exact number of its unmasked (query, key) pairs,
and the number of blocks of keys in which it sees any, of which flex_attention computes all pairs.
Each rank holds as many blocks as ``torch.chunk`` gives it. Blocks are dealt from the heaviest to
the lightest, each to the rank with the least work that still has room. Then one or two blocks of
the busiest rank are swapped with as many of another rank while that lowers the larger measure.

Whole documents (``block=None``) have as many tokens on each rank, within one document.
"""

import heapq
import itertools
import math
import weakref
from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ftp.errors import SpecError
from ftp.sharding.layout import pieces

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

    from ftp.sharding.spec import PartitionSpec

_AT_ONCE = 1 << 22  # (query, key) pairs for which a mask is evaluated in one call

# By id of a live index tensor, the number of ranks that it was made for.
_made_for: dict[int, tuple[weakref.ref[Tensor], int]] = {}


def balance(mask: "BlockMask | Tensor", n: int, *, block: int | None = 128) -> Tensor:
    """An order of a sequence's blocks in which ``n`` ranks have about equal attention work. It is
    an argument of the step, so that all batches share one plan.

    Permute tokens, positions and labels by it before they are placed, cut them over the axis in
    plain chunks, and let the mask compare the permuted positions (see docs/attention.md).

    Args:
        mask: a BlockMask, whose work is summed over its batch and heads; or ``cu_seqlens``, the
            ends of packed documents from 0 on, each with causal attention within it.
        n: the size of the mesh axis that cuts the sequence, or the product of several axes.
        block: elements of a block, which stay together; None: documents stay whole, as
            ``varlen_attn`` needs them, and ranks are even if documents are much shorter than what a
            rank holds.

    Returns:
        An int64 tensor of shape (length / block,): the block at each place. Ranks hold equal
        numbers of blocks; if n does not divide the number, cut by ``ftp.units(axis, block)``. With
        ``block=None``, of shape (documents,): the document at each place.

    Raises:
        SpecError: a length that is no whole number of blocks, numbers that are not the ends of
            documents, an ``n`` below one. Later, when the tensor is placed or given to a step: an
            axis that cuts it (or, if none does, every axis) has another size than ``n``.

    >>> ends = torch.tensor([0, 6, 8])
    >>> order = balance(ends, 2, block=1)
    >>> order  # the tokens of rank 0 see 1 + 2 + 3 + 6 keys, those of rank 1 4 + 5 + 1 + 2
    tensor([0, 1, 2, 5, 3, 4, 6, 7])
    """
    if n < 1 or (block is not None and block < 1):
        raise SpecError(f"balance takes n and block of at least 1, not n={n} and block={block}.")
    if block is None:
        if not isinstance(mask, Tensor):
            raise SpecError(
                "balance with block=None takes cu_seqlens: a BlockMask has no documents."
            )
        held = _whole(np.diff(_checked_ends(mask)), n)
    else:
        held = _in_blocks(mask, n, block)
    order = torch.tensor([at for of in held for at in of], dtype=torch.int64)
    device = mask.device if isinstance(mask, Tensor) else mask.kv_num_blocks.device
    made = order.to(device)
    key = id(made)
    _made_for[key] = weakref.ref(made, lambda _: _made_for.pop(key, None)), n
    return made


def _in_blocks(mask: "BlockMask | Tensor", n: int, block: int) -> list[list[int]]:
    """The blocks of each rank, in the sequence's order."""
    if isinstance(mask, Tensor):
        pairs, blocks = _of_documents(_checked_ends(mask), block)
    elif hasattr(mask, "kv_num_blocks"):
        pairs, blocks = _of_block_mask(mask, block)
    else:
        raise SpecError(
            "balance takes a BlockMask of torch.nn.attention.flex_attention, or cu_seqlens as a"
            f" tensor, not a {type(mask).__name__}."
        )
    length = len(pairs)
    if length % block or not length:
        raise SpecError(
            f"balance: a sequence of {length} is no whole number of blocks of {block}."
            f" Pad it to {-(-max(length, 1) // block) * block}, or give block= a divisor."
        )
    room = [pieces(length // block, n, rank)[0][1] for rank in range(n)]
    held = _balanced(np.stack([pairs.reshape(-1, block).sum(1), blocks], 1), room)
    return [sorted(of) for of in held]


def _whole(lengths: np.ndarray, n: int) -> list[list[int]]:
    """The documents of each rank: from the longest on, each to the rank that sees the fewest pairs
    of those with room for it, or to the one with the fewest tokens.
    """
    held: list[list[int]] = [[] for _ in range(n)]
    tokens, pairs = np.zeros(n, np.int64), np.zeros(n, np.int64)
    for at in np.argsort(-lengths, kind="stable").tolist():
        length = lengths[at]
        has_room = tokens + length <= lengths.sum() / n
        rank = int((np.where(has_room, pairs, np.inf) if has_room.any() else tokens).argmin())
        held[rank].append(at)
        tokens[rank] += length
        pairs[rank] += length * (length + 1) // 2
    return held


def ranks_of(tensor: Any) -> int | None:
    """The number of ranks that `balance` made a tensor for; None for any other tensor."""
    entry = _made_for.get(id(tensor)) if _made_for else None
    return entry[1] if entry is not None and entry[0]() is tensor else None


def misfits(tensor: Any, spec: "PartitionSpec", axes: Mapping[str, int], where: str) -> list[str]:
    """Why an index tensor of `balance` does not fit a mesh; empty for any other value."""
    n = ranks_of(tensor)
    if n is None or n == 1:
        return []
    named = [cut.axis for cut in spec.cuts(0)] if len(spec) else []
    sizes = {axis: size for axis, size in axes.items() if not named or axis in named}
    fits = prod(sizes.values()) == n or (not named and _is_product(n, list(axes.values())))
    if fits:
        return []
    listed = ", ".join(f"{axis} {size}" for axis, size in sizes.items())
    return [
        f"{where} balances the work of {n} ranks, but the mesh has {listed}. Make it with the size"
        " of the axis that cuts the sequence: ftp.balance(mask, n)."
    ]


def _is_product(n: int, sizes: list[int]) -> bool:
    """Whether ``n`` is the product of some of the sizes."""
    found = {1}
    for size in sizes:
        found |= {size * other for other in found}
    return n in found


def _checked_ends(ends: Tensor) -> np.ndarray:
    """``cu_seqlens`` as an array."""
    at = ends.detach().cpu().numpy().astype(np.int64) if ends.dim() == 1 else np.zeros(0, np.int64)
    if ends.is_floating_point() or len(at) < 2 or at[0] != 0 or (np.diff(at) < 0).any():
        raise SpecError(
            "balance takes cu_seqlens as a vector of integers: 0, then where each document ends,"
            f" not a tensor of {ends.dtype} and shape {tuple(ends.shape)}"
            + (f" with {at[:6].tolist()}{'...' if len(at) > 6 else ''}." if len(at) else ".")
        )
    return at


def _of_documents(ends: np.ndarray, block: int) -> tuple[np.ndarray, np.ndarray]:
    """The number of keys that each token of packed documents sees, and the number of blocks of keys
    that each block sees.
    """
    begins = np.repeat(ends[:-1], np.diff(ends))
    first = begins[::block] // block
    return np.arange(ends[-1]) - begins + 1, np.arange(len(first)) - first + 1


def _of_block_mask(mask: "BlockMask", block: int) -> tuple[np.ndarray, np.ndarray]:
    """The number of keys that a BlockMask leaves each query, and the number of blocks of keys that
    it leaves each block, both summed over batch and heads.
    """
    queries, keys = mask.seq_lengths
    rows, columns = mask.BLOCK_SIZE
    total = torch.zeros(queries, dtype=torch.int64)
    batch = mask.kv_num_blocks.shape[:2]
    seen = torch.zeros(*batch, -(-queries // block), -(-keys // block), dtype=torch.bool)
    if mask.full_kv_num_blocks is not None:
        b, h, row, column = _listed(mask.full_kv_num_blocks, mask.full_kv_indices)
        width = (keys - column * columns).clamp(0, columns)
        of_block = torch.zeros(-(-queries // rows), dtype=torch.int64).index_add_(0, row, width)
        total += of_block.repeat_interleave(rows)[:queries]
        of_row = _blocks_of(row, rows, queries, block)
        of_column = _blocks_of(column, columns, keys, block)
        seen[b[:, None, None], h[:, None, None], of_row[:, :, None], of_column[:, None]] = True
    b, h, row, column = _listed(mask.kv_num_blocks, mask.kv_indices)
    device = mask.kv_num_blocks.device
    sees = mask.mask_mod
    for dims in ((None, None, None, 0), (None, None, 0, None), (0, 0, 0, 0)):
        sees = torch.vmap(sees, in_dims=dims)
    step = max(1, _AT_ONCE // (rows * columns))
    for first in range(0, len(row), step):
        part = slice(first, first + step)
        q = row[part, None] * rows + torch.arange(rows)
        k = column[part, None] * columns + torch.arange(columns)
        inside_q, inside_k = q < queries, k < keys
        given = (b[part], h[part], q.clamp(max=queries - 1), k.clamp(max=keys - 1))
        found = sees(*(x.to(device) for x in given)).cpu() & inside_k[:, None]
        total.index_add_(0, q[inside_q], found.sum(2)[inside_q])
        at, i, j = (found & inside_q[:, :, None]).nonzero(as_tuple=True)
        seen[b[part][at], h[part][at], q[at, i] // block, k[at, j] // block] = True
    return total.numpy(), seen.sum((0, 1, 3)).numpy()


def _blocks_of(index: Tensor, size: int, length: int, block: int) -> Tensor:
    """Per block of ``size`` elements the blocks of ``block`` elements that it overlaps; some may be
    named several times.
    """
    within = torch.arange(0, size + block, block).clamp(max=size - 1)
    return (index[:, None] * size + within).clamp(max=length - 1) // block


def _listed(count: Tensor, index: Any) -> tuple[Tensor, ...]:
    """Batch, head, query block and key block of every listed pair of blocks."""
    count, index = count.cpu(), index.cpu().long()
    is_listed = torch.arange(index.shape[-1]) < count.unsqueeze(-1)
    *places, at = (x.contiguous() for x in is_listed.nonzero().unbind(1))
    return (*places, index[(*places, at)])


_EVEN = 1.01  # work of the busiest rank that is not improved further, in means
_CANDIDATES = 128  # blocks, or pairs of blocks, of a rank that are tried in swaps
_OTHERS = 32  # ranks with the least work that swaps are tried with


def _balanced(work: np.ndarray, room: list[int]) -> list[list[int]]:
    """The blocks of each rank, as many as it has room for, so that the largest of all ranks'
    measures is small: the best of what swaps make of several dealings.

    Args:
        work: (blocks, measures).
    """
    share = work * len(room) / work.sum(0).clip(1)  # in means of a rank
    best, least = [], math.inf
    for measure in (*share.T, share.sum(1)):
        held = _dealt(measure, room)
        busiest = _swap_while_better(share, held)
        if busiest < least:
            best, least = held, busiest
        if least <= _EVEN:
            break
    return best


def _dealt(measure: np.ndarray, room: list[int]) -> list[list[int]]:
    """Blocks from the heaviest on, each to the rank with the least work that still has room."""
    held: list[list[int]] = [[] for _ in room]
    least = [(0.0, rank) for rank, places in enumerate(room) if places]
    for at in np.argsort(-measure, kind="stable").tolist():
        done, rank = heapq.heappop(least)
        held[rank].append(at)
        if len(held[rank]) < room[rank]:
            heapq.heappush(least, (done + float(measure[at]), rank))
    return held


def _swap_while_better(share: np.ndarray, held: list[list[int]]) -> float:
    """Swap blocks between ranks while that lowers the largest of all ranks' measures; returns
    it.
    """
    total = np.stack([share[of].sum(0) for of in held])
    for _ in range(2 * len(share)):
        most = int(total.max(1).argmax())
        if total[most].max() <= _EVEN:
            break
        if not any(_swapped(share, held, total, most, size) for size in (1, 2)):
            break
    return float(total.max())


def _swapped(
    share: np.ndarray, held: list[list[int]], total: np.ndarray, most: int, size: int
) -> bool:
    """Swap ``size`` blocks of a rank with as many of another rank, so that neither rank has as much
    work as it had; False if no swap does.
    """
    mine = _some(len(held[most]), size)
    others = total[:, total[most].argmax()].argsort(kind="stable")[:_OTHERS]
    for other in others.tolist():
        theirs = _some(len(held[other]), size) if other != most else mine[:0]
        if not len(theirs) or not len(mine):
            continue
        given, taken = np.array(held[most])[mine], np.array(held[other])[theirs]
        moved = share[given].sum(1)[:, None] - share[taken].sum(1)
        after = np.maximum(total[most] - moved, total[other] + moved).max(2)
        i, j = np.unravel_index(int(after.argmin()), after.shape)
        if after[i, j] >= total[most].max() - 1e-9:
            continue
        for at, to in zip(mine[i], theirs[j], strict=True):
            held[most][at], held[other][to] = held[other][to], held[most][at]
        total[most] -= moved[i, j]
        total[other] += moved[i, j]
        return True
    return False


def _some(count: int, size: int) -> np.ndarray:
    """At most `_CANDIDATES` choices of ``size`` of ``count`` places, evenly spaced: (choices,
    size).
    """
    most = next(n for n in range(_CANDIDATES, 0, -1) if math.comb(n, size) <= _CANDIDATES)
    places = range(0, count, -(-count // most) or 1)
    return np.array(list(itertools.combinations(places, size)), dtype=int).reshape(-1, size)
