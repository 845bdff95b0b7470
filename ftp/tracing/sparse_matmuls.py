"""Matmuls with a captured sparse matrix, such as a graph's adjacency, by its entries: a gather of
rows, a matmul and a sum, which have rules. No spec describes a sparse layout.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakTensorKeyDictionary

MATMULS: frozenset[Callable[..., Any]] = frozenset(
    (
        torch.sparse.mm,
        torch.mm,
        torch.matmul,
        torch.spmm,  # pyright: ignore[reportPrivateImportUsage]
        Tensor.__matmul__,
        Tensor.matmul,
        Tensor.mm,
    )
)
_LAYOUTS = (torch.sparse_coo, torch.sparse_csr)
_entries: Any = WeakTensorKeyDictionary()


def matmul(args: Sequence[Any]) -> Tensor | None:
    """``a @ x`` of a sparse matrix and a dense matrix or vector; None for all others."""
    if len(args) != 2 or not all(isinstance(a, Tensor) for a in args):
        return None
    a, x = args
    is_captured = a.layout in _LAYOUTS and not isinstance(a, FakeTensor) and a.ndim == 2
    if not is_captured or a.requires_grad or x.layout is not torch.strided or x.ndim > 2:
        return None
    if x.shape[0] != a.shape[1]:
        return None  # for torch's error
    rows, columns, values = _entries_of(a)
    values = values.to(torch.result_type(values, x))
    taken = x.index_select(0, columns)
    out = taken.new_zeros((a.shape[0], *x.shape[1:]), dtype=values.dtype)
    return out.index_add(0, rows, values.reshape(-1, *(1,) * (x.ndim - 1)) * taken)


def _entries_of(a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The row, the column and the value of each entry, the same tensors each time."""
    if a not in _entries:
        with _disable_current_modes(), temporarily_clear_interpreter_stack():
            if a.layout is torch.sparse_coo:
                rows, columns = a._indices()
                found = rows.contiguous(), columns.contiguous(), a._values()
            else:
                counts = a.crow_indices().diff()
                rows = torch.arange(a.shape[0], device=a.device).repeat_interleave(counts)
                found = rows, a.col_indices(), a.values()
        _entries[a] = found
    return _entries[a]
