"""``balance``: an order of blocks in which all ranks have about equal attention work.

The work of a block is the exact number of unmasked (query, key) pairs with a query in the block.
Each rank holds as many blocks as ``torch.chunk`` gives it. Blocks are assigned from the heaviest to
the lightest, each to the rank with the least work that still has room. Then blocks of the busiest
rank are swapped with lighter blocks of other ranks while that helps.

flex_attention computes all pairs of a block of queries and a block of keys that see each other
anywhere. Where the numbers of these are uneven, more swaps lower the larger of the two measures.
"""

import heapq
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


def balance(mask: "BlockMask | Tensor", n: int, *, block: int = 128) -> Tensor:
    """An order of a sequence's blocks in which ``n`` ranks have about equal attention work. It is
    an argument of the step, so that all batches share one plan.

    Permute tokens, positions and labels by it before they are placed, cut them over the axis in
    plain chunks, and let the mask compare the permuted positions (see docs/attention.md).

    Args:
        mask: a BlockMask, whose work is summed over its batch and heads; or ``cu_seqlens``, the
            ends of packed documents from 0 on, each with causal attention within it.
        n: the size of the mesh axis that cuts the sequence, or the product of several axes.
        block: elements of a block, which stay together.

    Returns:
        An int64 tensor of shape (length / block,): the block at each place. Ranks hold equal
        numbers of blocks; if n does not divide the number, cut by ``ftp.units(axis, block)``.

    Raises:
        SpecError: a length that is no whole number of blocks, numbers that are not the ends of
            documents, an ``n`` below one. Later, when the tensor is placed or given to a step: an
            axis that cuts it (or, if none does, every axis) has another size than ``n``.

    >>> ends = torch.tensor([0, 6, 8])
    >>> order = balance(ends, 2, block=1)
    >>> order  # the tokens of rank 0 see 1 + 2 + 3 + 6 keys, those of rank 1 4 + 5 + 1 + 2
    tensor([0, 1, 2, 5, 3, 4, 6, 7])
    """
    if n < 1 or block < 1:
        raise SpecError(f"balance takes n and block of at least 1, not n={n} and block={block}.")
    if isinstance(mask, Tensor):
        pairs, blocks = _of_documents(mask, block)
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
    work = pairs.reshape(-1, block).sum(1)
    room = [pieces(len(work), n, rank)[0][1] for rank in range(n)]
    held = _dealt(work, room)
    _even_both(np.stack([work, blocks], 1), held)
    order = torch.tensor([b for of in held for b in sorted(of)])
    device = mask.device if isinstance(mask, Tensor) else mask.kv_num_blocks.device
    made = order.to(device)
    key = id(made)
    _made_for[key] = weakref.ref(made, lambda _: _made_for.pop(key, None)), n
    return made


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


def _of_documents(ends: Tensor, block: int) -> tuple[np.ndarray, np.ndarray]:
    """The number of keys that each token of packed documents sees, and the number of blocks of keys
    that each block sees.
    """
    at = ends.detach().cpu().numpy().astype(np.int64) if ends.dim() == 1 else np.zeros(0, np.int64)
    if ends.is_floating_point() or len(at) < 2 or at[0] != 0 or (np.diff(at) < 0).any():
        raise SpecError(
            "balance takes cu_seqlens as a vector of integers: 0, then where each document ends,"
            f" not a tensor of {ends.dtype} and shape {tuple(ends.shape)}"
            + (f" with {at[:6].tolist()}{'...' if len(at) > 6 else ''}." if len(at) else ".")
        )
    begins = np.repeat(at[:-1], np.diff(at))
    first = begins[::block] // block
    return np.arange(at[-1]) - begins + 1, np.arange(len(first)) - first + 1


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


def _dealt(work: np.ndarray, room: list[int]) -> list[list[int]]:
    """The blocks of each rank, as many as it has room for, so that the largest work is small."""
    held: list[list[int]] = [[] for _ in room]
    least = [(0, rank) for rank, places in enumerate(room) if places]
    for at in np.argsort(-work, kind="stable").tolist():
        done, rank = heapq.heappop(least)
        held[rank].append(at)
        if len(held[rank]) < room[rank]:
            heapq.heappush(least, (done + int(work[at]), rank))
    total = [int(work[of].sum()) for of in held]
    for _ in range(4 * len(work)):
        if not _improved(work, held, total):
            break
    return held


def _improved(work: np.ndarray, held: list[list[int]], total: list[int]) -> bool:
    """Swap a block of the busiest rank with one of another rank, so that both come close to their
    mean; False if no swap lowers the larger work of the two.
    """
    most = max(range(len(total)), key=total.__getitem__)
    for other in sorted(range(len(total)), key=total.__getitem__):
        gap = total[most] - total[other]
        if gap < 2:
            return False
        if not held[other]:
            continue
        mine, theirs = work[held[most]], work[held[other]]
        by = np.argsort(theirs, kind="stable")
        wanted = mine - gap / 2
        at = np.searchsorted(theirs[by], wanted).clip(1, len(by)) - 1
        near = np.stack([by[at], by[(at + 1).clip(max=len(by) - 1)]])
        moved = mine - theirs[near]
        after = np.where((moved > 0) & (moved < gap), np.abs(moved - gap / 2), np.inf)
        side, i = np.unravel_index(int(after.argmin()), after.shape)
        if not np.isfinite(after[side, i]):
            continue
        j, by_how_much = int(near[side, i]), int(moved[side, i])
        held[most][i], held[other][j] = held[other][j], held[most][i]
        total[most] -= by_how_much
        total[other] += by_how_much
        return True
    return False


_EVEN = 1.01  # work of the busiest rank that is not improved further, in means
_CANDIDATES = 128  # blocks of a rank that are tried in swaps


def _even_both(work: np.ndarray, held: list[list[int]]) -> None:
    """Swap blocks between ranks while that lowers the largest of all ranks' measures.

    Args:
        work: (blocks, measures).
    """
    share = work * len(held) / work.sum(0).clip(1)  # in means of a rank
    total = np.stack([share[of].sum(0) for of in held])
    for _ in range(2 * len(work)):
        busy = total.max(1)
        most = int(busy.argmax())
        if busy[most] <= _EVEN or not _swapped(share, held, total, most):
            return


def _swapped(share: np.ndarray, held: list[list[int]], total: np.ndarray, most: int) -> bool:
    """Swap a block of a rank with one of another rank, so that neither rank has as much work as it
    had; False if no swap does.
    """
    mine = _some(held[most])
    for other in total[:, total[most].argmax()].argsort(kind="stable").tolist():
        theirs = _some(held[other]) if other != most else []
        if not theirs:
            continue
        moved = share[[held[most][i] for i in mine], None] - share[[held[other][j] for j in theirs]]
        after = np.maximum(total[most] - moved, total[other] + moved).max(2)
        i, j = np.unravel_index(int(after.argmin()), after.shape)
        if after[i, j] >= total[most].max() - 1e-9:
            continue
        at, to = mine[int(i)], theirs[int(j)]
        held[most][at], held[other][to] = held[other][to], held[most][at]
        total[most] -= moved[i, j]
        total[other] += moved[i, j]
        return True
    return False


def _some(held: list[int]) -> list[int]:
    """Places of at most `_CANDIDATES` blocks, evenly spaced."""
    return list(range(0, len(held), -(-len(held) // _CANDIDATES) or 1))
