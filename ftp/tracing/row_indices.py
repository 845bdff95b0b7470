"""``x[torch.arange(len(x)), k]`` as a gather: the element that each row selects is on the row's
rank, where indices in general read all rows.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from ftp.dataclass import dataclass
from ftp.torch_internals.fake_tensors import FakeTensorMode

aten = torch.ops.aten


def gather_rows(graph: fx.Graph, mode: FakeTensorMode) -> None:
    """Write reads and writes at all rows, and one index a row, along the dim of that index."""
    for node in list(graph.nodes):
        if node.target not in (aten.index.Tensor, aten.index_put.default):
            continue
        found = _rows(*node.args[:2])
        if found is None:
            continue
        emit = _NodesBefore(graph, node, mode)
        if node.target is aten.index.Tensor:
            made = _read(emit, found, node.args[0])
        else:
            made = _written(emit, found, *node.args, **node.kwargs)
        if made is not None:
            made.meta["val"] = node.meta["val"]
            node.replace_all_uses_with(made)
            graph.erase_node(node)


@dataclass(frozen=True)
class _AllRows:
    """Indices of which all but one name all rows, in order.

    Attributes:
        dim: of x, that the other index is along.
        index: its node.
        shape: of x, with the number of elements that a row selects in place of the dim's size.
        is_one: each row selects one element, for which the result has no dim.
        place: of the index among all indices.
        before: how many dims of x stand before the indices'.
        ndim: of the indices together.
    """

    dim: int
    index: fx.Node
    shape: tuple[int, ...]
    is_one: bool
    place: int
    before: int
    ndim: int


def _rows(x: fx.Node, indices: Sequence[fx.Node | None]) -> _AllRows | None:
    shape = x.meta["val"].shape
    at = [d for d, index in enumerate(indices) if index is not None]
    given = [index for index in indices if index is not None]
    vals = [index.meta["val"] for index in given]
    is_together = at == list(range(at[0], at[0] + len(at)))
    if len(at) < 2 or not is_together or any(v.dtype != torch.int64 for v in vals):
        return None
    ndim = max(v.ndim for v in vals)
    row_dims = [_row_dim(index, shape[d], ndim) for d, index in zip(at, given, strict=True)]
    if row_dims.count(None) != 1 or ndim not in (len(at) - 1, len(at)):
        return None
    place, is_one = row_dims.index(None), ndim == len(at) - 1
    if row_dims != [None if i == place else i - (is_one and i > place) for i in range(len(at))]:
        return None
    index = given[place]
    counts = [v.shape[place - ndim] for v in vals if v.ndim >= ndim - place and not is_one]
    count = next((n for n in counts if not _same(n, 1)), 1)
    dim = at[place]
    return _AllRows(
        dim, index, (*shape[:dim], count, *shape[dim + 1 :]), is_one, place, at[0], ndim
    )


def _row_dim(index: fx.Node, size: Any, ndim: int) -> int | None:
    """The dim along which an index counts all rows, among ``ndim`` broadcast dims."""
    chain = [index]
    while chain[-1].target in _MOVES:
        chain.append(chain[-1].all_input_nodes[0])
    counts = chain[-1]
    from_zero = counts.args[:1] == (0,) and counts.args[2:] in ((), (1,))
    if not (counts.target is aten.arange.default or (counts.target in _RANGES and from_zero)):
        return None
    if not _same(counts.meta["val"].shape[0], size) or _same(size, 1):
        return None
    if any(node.meta["val"].dtype not in (torch.int32, torch.int64) for node in chain):
        return None
    dim = 0
    for node in reversed(chain[:-1]):
        shape, args = node.meta["val"].shape, node.args
        if node.target is aten.unsqueeze.default:
            dim += (args[1] % len(shape)) <= dim  # type: ignore[operator]
        elif node.target is aten.expand.default:
            dim += len(shape) - node.all_input_nodes[0].meta["val"].ndim
        elif node.target in _VIEWS:
            dims = [d for d, n in enumerate(shape) if not _same(n, 1)]
            if len(dims) != 1 or not _same(shape[dims[0]], size):
                return None
            dim = dims[0]
    return dim + ndim - index.meta["val"].ndim


_RANGES = (aten.arange.start, aten.arange.start_step)
_VIEWS = (aten.view.default, aten._unsafe_view.default)
_MOVES = {
    aten.unsqueeze.default, aten.expand.default, aten.alias.default, aten._to_copy.default, *_VIEWS,
}  # fmt: skip


def _same(a: Any, b: Any) -> bool:
    """Whether two sizes are equal whatever the dynamic ones are."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    return str(a) == str(b)


class _NodesBefore:
    """Adds nodes before a node, in its place of the user's program."""

    def __init__(self, graph: fx.Graph, before: fx.Node, mode: FakeTensorMode):
        self._graph, self._before, self._mode = graph, before, mode

    def __call__(self, target: Any, *args: Any) -> fx.Node:
        with self._graph.inserting_before(self._before):
            node = self._graph.call_function(target, args)
        with self._mode:
            val = target(*map_arg(args, lambda n: n.meta["val"]))
        node.meta = {**self._before.meta, "val": val}
        return node


def _read(emit: _NodesBefore, rows: _AllRows, x: fx.Node) -> fx.Node | None:
    index = _along(emit, rows, x)
    if index is None:
        return None
    found = emit(aten.gather.default, x, rows.dim, index)
    return emit(aten.squeeze.dim, found, rows.dim) if rows.is_one else found


def _written(
    emit: _NodesBefore,
    rows: _AllRows,
    x: fx.Node,
    indices: Any,
    values: fx.Node,
    accumulate: bool = False,
) -> fx.Node | None:
    if not (rows.is_one or accumulate):
        return None  # a row may write twice to one element
    shape = list(rows.shape)
    if rows.is_one:
        del shape[rows.dim]
    source = _expanded(emit, values, shape)
    index = None if source is None else _along(emit, rows, x)
    if source is None or index is None:
        return None
    if rows.is_one:
        source = emit(aten.unsqueeze.default, source, rows.dim)
    target = aten.scatter_add.default if accumulate else aten.scatter.src
    return emit(target, x, rows.dim, index, source)


def _along(emit: _NodesBefore, rows: _AllRows, x: fx.Node) -> fx.Node | None:
    """The index, counted from the front, with the dims of x; None where sizes are missing."""
    size, index = x.meta["val"].shape[rows.dim], rows.index
    if not isinstance(size, int):
        return None
    is_negative = emit(aten.lt.Scalar, index, 0)
    index = emit(aten.where.self, is_negative, emit(aten.add.Tensor, index, size), index)
    index.meta["from_the_front"] = True  # the last operand is the index as it was given
    while index.meta["val"].ndim < rows.ndim:
        index = emit(aten.unsqueeze.default, index, 0)
    if rows.is_one:
        index = emit(aten.unsqueeze.default, index, rows.place)
    while index.meta["val"].ndim < len(rows.shape) - rows.before:
        index = emit(aten.unsqueeze.default, index, index.meta["val"].ndim)
    return _expanded(emit, index, rows.shape)


def _expanded(emit: _NodesBefore, x: fx.Node, shape: Sequence[Any]) -> fx.Node | None:
    """A value expanded to a shape; None where that takes a dynamic size."""
    given = x.meta["val"].shape
    own = (1,) * (len(shape) - len(given)) + tuple(given)
    missing = len(shape) - len(given)
    sizes = [-1 if d >= missing and _same(own[d], n) else n for d, n in enumerate(shape)]
    if not all(isinstance(n, int) for n in sizes):
        return None
    return x if sizes == [-1] * len(given) else emit(aten.expand.default, x, sizes)
