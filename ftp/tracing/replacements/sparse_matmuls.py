"""Matmuls with a captured sparse matrix, such as a graph's adjacency, by its entries: a gather of
rows and a sum, which have rules. Sparse arguments are in `ftp.sharding.sparse_matrix`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ftp.sharding.sparse_matrix import LAYOUTS, entries_of, product
from ftp.torch_internals.fake_tensors import FakeTensor
from ftp.torch_internals.functorch import temporarily_clear_interpreter_stack
from ftp.torch_internals.modes import disable_current_modes

_METHODS = (Tensor.__matmul__, Tensor.matmul, Tensor.mm)
MATMULS: frozenset[Callable[..., Any]] = frozenset(
    (torch.sparse.mm, torch.mm, torch.matmul, torch.spmm, *_METHODS)
)
_entries: Any = WeakTensorKeyDictionary()


def matmul(args: Sequence[Any]) -> Tensor | None:
    """``a @ x`` of a sparse matrix and a dense matrix or vector; None for all others."""
    if len(args) != 2 or not all(isinstance(a, Tensor) for a in args):
        return None
    a, x = args
    is_captured = a.layout in LAYOUTS and not isinstance(a, FakeTensor) and a.ndim == 2
    if not is_captured or a.requires_grad or x.layout is not torch.strided or x.ndim > 2:
        return None
    if x.shape[0] != a.shape[1]:
        return None  # for torch's error
    return product(*_entries_of(a), (a.shape[0], a.shape[1]), x)


def _entries_of(a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The row, the column and the value of each entry, the same tensors each time."""
    if a not in _entries:
        with disable_current_modes(), temporarily_clear_interpreter_stack():
            _entries[a] = entries_of(a)
    return _entries[a]
