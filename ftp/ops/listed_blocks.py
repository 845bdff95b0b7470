"""The key blocks that the tables of a BlockMask list, the tiles that they leave, and a text of them
that a trace can keep.
"""

import base64
import functools
import zlib
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

FINE = 128  # least queries and keys of a tile


def listed(count: Tensor, index: Tensor, columns: int) -> Tensor:
    """Whether each key block is listed: (batch or 1, heads or 1, query blocks, ``columns``)."""
    is_listed = torch.arange(index.shape[-1], device=index.device) < count.unsqueeze(-1)
    at = torch.where(is_listed, index, columns).long()
    table = torch.zeros((*index.shape[:-1], columns + 1), device=index.device)
    return table.scatter(-1, at, 1.0)[..., :columns] > 0


def listed_tiles(
    seen: np.ndarray,
    full: np.ndarray,
    block: Sequence[int],
    rows: tuple[int, int],
    keys: tuple[int, int],
) -> Iterator[tuple[tuple[int, int], tuple[int, int], bool]]:
    """The tiles of some queries and keys that listed blocks leave: rows, keys, whether a pair of
    them may be hidden. Blocks of less than ``FINE`` elements are taken together.

    Args:
        seen, full: of each query block from that of the first query on, and each key block,
            whether it is listed, and whether all its pairs are seen.
        block: queries and keys of a block.
        rows, keys: begin and end.

    >>> seen, full = np.tril(np.ones((3, 3), bool)), np.tril(np.ones((3, 3), bool), -1)
    >>> for tile in listed_tiles(seen, full, (128, 128), (0, 384), (0, 384)):
    ...     print(tile)
    ((0, 384), (0, 128), True)
    ((128, 384), (128, 256), True)
    ((256, 384), (256, 384), True)
    """
    of_rows, of_keys = (
        _edges(run, max(1, FINE // size) * size)
        for run, size in zip((rows, keys), block, strict=True)
    )
    at_rows = of_rows[:-1] // block[0] - rows[0] // block[0]
    at_keys, last = of_keys[:-1] // block[1], -(-keys[1] // block[1])
    seen = np.logical_or.reduceat(seen, at_rows, 0)
    full = np.logical_and.reduceat(full, at_rows, 0)
    seen = np.logical_or.reduceat(seen[:, :last], at_keys, 1)
    full = np.logical_and.reduceat(full[:, :last], at_keys, 1)
    differ = (seen[:, 1:] != seen[:, :-1]).any(0)
    starts = [0, *(np.flatnonzero(differ) + 1).tolist()]
    for at, end in zip(starts, [*starts[1:], seen.shape[1]], strict=True):
        ends = np.flatnonzero(np.diff(seen[:, at], prepend=False, append=False))
        for first, stop in ends.reshape(-1, 2).tolist():
            queries = int(of_rows[first]), int(of_rows[stop])
            is_hidden = not full[first:stop, at:end].all()
            yield queries, (int(of_keys[at]), int(of_keys[end])), is_hidden


def _edges(run: tuple[int, int], size: int) -> np.ndarray:
    """Begin and end of a run, and the multiples of ``size`` between them."""
    first, stop = run
    return np.array([first, *range((first // size + 1) * size, stop, size), stop])


def known_of(tables: Sequence[Tensor]) -> str:
    """The key blocks that each query block lists in any batch or head, as text."""
    columns = tables[1].shape[-1]
    found = [
        listed(count, index, columns).flatten(0, 1).any(0)
        for count, index in zip(tables[::2], tables[1::2], strict=True)
    ]
    table = torch.stack(found).any(0).cpu().numpy()
    packed = zlib.compress(np.packbits(table).tobytes(), 9)
    return f"{table.shape[0]} {table.shape[1]} {base64.b85encode(packed).decode()}"


@functools.lru_cache(64)
def known_blocks(known: str) -> np.ndarray:
    """The table in the text of `known_of`, (query blocks, key blocks)."""
    rows, columns, packed = known.split(" ")
    shape = int(rows), int(columns)
    bits = np.frombuffer(zlib.decompress(base64.b85decode(packed)), np.uint8)
    return np.unpackbits(bits, count=shape[0] * shape[1]).reshape(shape).astype(bool)
