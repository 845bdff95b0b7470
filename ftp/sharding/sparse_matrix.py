"""Sparse matrices as pytrees of their entries: no spec describes a sparse layout, but entries are
vectors, which a spec can cut.
"""

from collections.abc import Callable, Mapping
from typing import Any, Never

import optree
import torch
from torch import Tensor

from ftp.dataclass import dataclass
from ftp.errors import InputError, TraceError
from ftp.sharding.pytree import NAMESPACE, flatten
from ftp.source import at_line

LAYOUTS = (torch.sparse_coo, torch.sparse_csr)
_ALL_LAYOUTS = (*LAYOUTS, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
_OF_PAIRS: frozenset[Callable[..., Any]] = frozenset(
    (
        torch.sparse.mm,
        torch.mm,
        torch.mv,
        torch.matmul,
        torch.spmm,
        Tensor.__matmul__,
        Tensor.__rmatmul__,
        Tensor.matmul,
        Tensor.mm,
        Tensor.mv,
    )
)
_SUMS: frozenset[Callable[..., Any]] = frozenset(
    (torch.add, Tensor.add, Tensor.add_, Tensor.__add__, Tensor.__iadd__)
)


@dataclass(frozen=True, eq=False)
class SparseMatrix:
    """A sparse matrix as a step's function gets it.

    Attributes:
        rows, columns: of each entry, int64 of shape (entries,).
        entries: their values; entries at the same place are added.
        whole: numbers of rows and columns of the matrix.
    """

    rows: Tensor
    columns: Tensor
    entries: Tensor
    whole: tuple[int, int]
    layout: torch.layout = torch.sparse_coo

    ndim = 2
    is_sparse = True

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.whole)

    @property
    def dtype(self) -> torch.dtype:
        return self.entries.dtype

    @property
    def device(self) -> torch.device:
        return self.entries.device

    @property
    def T(self) -> "SparseMatrix":
        n, m = self.whole
        return SparseMatrix(self.columns, self.rows, self.entries, (m, n), self.layout)

    mT = T

    def t(self) -> "SparseMatrix":
        return self.T

    def dim(self) -> int:
        return 2

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def values(self) -> Tensor:
        return self.entries

    def indices(self) -> Tensor:
        return torch.stack([self.rows, self.columns])

    _values, _indices = values, indices

    def coalesce(self) -> "SparseMatrix":
        return self

    def to_dense(self) -> Tensor:
        dense = self.entries.new_zeros(self.whole[0] * self.whole[1])
        return dense.index_add(0, self.rows * self.whole[1] + self.columns, self.entries).view(
            self.whole
        )

    def __matmul__(self, x: Tensor) -> Tensor:
        return product(self.rows, self.columns, self.entries, self.whole, x)

    def __rmatmul__(self, x: Tensor) -> Tensor:
        return (self.T @ x.mT).mT if x.ndim > 1 else self.T @ x

    def matmul(self, x: Tensor) -> Tensor:
        return self @ x

    mm = mv = matmul

    def __mul__(self, number: Any) -> "SparseMatrix":
        if isinstance(number, SparseMatrix) or (isinstance(number, Tensor) and number.ndim):
            _refuse("a product of elements")
        made = self.entries * number
        return SparseMatrix(self.rows, self.columns, made, self.whole, self.layout)

    __rmul__ = __mul__

    def __truediv__(self, number: Any) -> "SparseMatrix":
        return self * (1 / number)

    def __neg__(self) -> "SparseMatrix":
        return self * -1

    def __add__(self, other: Any) -> Never:
        _refuse("a sum of elements")

    __radd__ = __sub__ = __rsub__ = __pow__ = __rtruediv__ = __add__

    def __getitem__(self, at: Any) -> Never:
        _refuse("an index")

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _OF_PAIRS and len(args) == 2 and not kwargs:
            a, x = args[::-1] if func is Tensor.__rmatmul__ else args
            if isinstance(a, SparseMatrix) and isinstance(x, Tensor):
                return a @ x
            if isinstance(x, SparseMatrix) and isinstance(a, Tensor):
                return x.__rmatmul__(a)
        if func in _SUMS and isinstance(args[0], Tensor) and isinstance(args[1], SparseMatrix):
            return func(args[0], args[1].to_dense(), *args[2:], **(kwargs or {}))
        return _refuse(getattr(func, "__name__", str(func)))

    def __getattr__(self, name: str) -> Any:
        if hasattr(Tensor, name):
            _refuse(name)
        raise AttributeError(name)


def _refuse(what: str) -> Never:
    raise TraceError(
        f"{at_line()}{what}, which is asked of a sparse argument, is not known for its entries. It"
        " may be multiplied by a dense matrix or vector (a @ x, x @ a, torch.sparse.mm) or by a"
        " number, added to a dense matrix (x + a, x.add_(a)), transposed (a.T), and made dense"
        " (a.to_dense()); a.rows, a.columns and a.values() are its entries."
    )


def _flatten(a: SparseMatrix) -> tuple[Any, Any, Any]:
    return (a.rows, a.columns, a.entries), (a.whole, a.layout), ("rows", "columns", "entries")


def _unflatten(kept: Any, given: Any) -> SparseMatrix:
    return SparseMatrix(*given, *kept)


optree.register_pytree_node(
    SparseMatrix,  # pyright: ignore[reportArgumentType]
    _flatten,  # pyright: ignore[reportArgumentType]
    _unflatten,  # pyright: ignore[reportArgumentType]
    path_entry_type=optree.GetAttrEntry,
    namespace=NAMESPACE,
)


def product(
    rows: Tensor, columns: Tensor, values: Tensor, size: tuple[int, int], x: Tensor
) -> Tensor:
    """The matmul of a sparse matrix with a dense matrix or vector, as a gather of rows and a sum,
    which have rules.
    """
    if x.ndim not in (1, 2) or x.shape[0] != size[1]:
        raise InputError(
            f"{at_line()}A sparse matrix of shape {tuple(size)} is multiplied by a tensor of shape"
            f" {tuple(x.shape)}; it takes a matrix or vector of {size[1]} rows."
        )
    values = values.to(torch.result_type(values, x))
    taken = x.index_select(0, columns)
    out = taken.new_zeros((size[0], *x.shape[1:]), dtype=values.dtype)
    return out.index_add(0, rows, values.reshape(-1, *(1,) * (x.ndim - 1)) * taken)


def entries_of(a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The row, the column and the value of each entry of a COO or CSR matrix."""
    if a.layout is torch.sparse_coo:
        rows, columns = a._indices()
        return rows.contiguous(), columns.contiguous(), a._values()
    counts, columns, n = a.crow_indices().diff(), a.col_indices(), a.shape[0]
    rows = torch.arange(n, device=a.device).repeat_interleave(counts, output_size=columns.shape[0])
    return rows, columns.to(torch.int64), a.values()


def of_values(
    indices: Any, values: Any, size: Any = None, *, is_coalesced: bool | None = None, **unknown: Any
) -> SparseMatrix | None:
    """``torch.sparse_coo_tensor`` of values that a trace computes; None if it is not a matrix of
    numbers.
    """
    if not isinstance(indices, Tensor) or not isinstance(values, Tensor) or size is None:
        return None
    if len(size) != 2 or values.ndim != 1 or not {*unknown} <= {"dtype", "check_invariants"}:
        return None
    values = values if unknown.get("dtype") is None else values.to(unknown["dtype"])
    return SparseMatrix(indices[0], indices[1], values, (int(size[0]), int(size[1])))


def is_sparse_matrix(x: Any) -> bool:
    """Whether ``x`` is a sparse tensor that is a matrix of numbers."""
    return isinstance(x, Tensor) and x.layout in LAYOUTS and x.ndim == 2 and x.dense_dim() == 0


def with_entries(tree: Any) -> Any:
    """The tree with each sparse matrix as a `SparseMatrix`; the tree itself where it has none.

    Raises:
        InputError: sparse tensors of other kinds.
    """
    return flatten_entries(tree)[0]


def flatten_entries(tree: Any) -> tuple[Any, list[Any], optree.PyTreeSpec]:
    """`with_entries`, its leaves and its structure."""
    leaves, treedef = flatten(tree)
    sparse = [x for x in leaves if isinstance(x, Tensor) and x.layout in _ALL_LAYOUTS]
    if not sparse:
        return tree, leaves, treedef
    for x in sparse:
        if not is_sparse_matrix(x):
            raise InputError(
                f"A {x.layout} tensor of shape {tuple(x.shape)} is given; ftp takes dense tensors,"
                " and sparse matrices in COO or CSR with one number an entry. Give .to_dense(), or"
                " indices and values."
            )
    made = treedef.unflatten(
        SparseMatrix(*entries_of(x.detach()), tuple(x.shape), x.layout)
        if is_sparse_matrix(x)
        else x
        for x in leaves
    )
    return made, *flatten(made)


def with_tensors(tree: Any) -> Any:
    """The tree with each `SparseMatrix` as a sparse tensor again."""

    def is_one(x: Any) -> bool:
        return isinstance(x, SparseMatrix)

    def made(x: Any) -> Any:
        if not is_one(x):
            return x
        coo = torch.sparse_coo_tensor(
            torch.stack([x.rows, x.columns]), x.entries, x.whole, check_invariants=True
        )
        return coo.to_sparse_csr() if x.layout is torch.sparse_csr else coo

    return optree.tree_map(made, tree, is_leaf=is_one, none_is_leaf=False, namespace=NAMESPACE)
