"""The key blocks that the tables of a BlockMask list, and a text of them that a trace can keep."""

import base64
import functools
import zlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def listed(count: Tensor, index: Tensor, columns: int) -> Tensor:
    """Whether each key block is listed: (batch or 1, heads or 1, query blocks, ``columns``)."""
    is_listed = torch.arange(index.shape[-1], device=index.device) < count.unsqueeze(-1)
    at = torch.where(is_listed, index, columns).long()
    table = torch.zeros((*index.shape[:-1], columns + 1), device=index.device)
    return table.scatter(-1, at, 1.0)[..., :columns] > 0


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
