"""Compute only the rows that arrived: a rank's buffer holds the most rows that routing may send it,
and most of the time fewer arrive.
"""

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from ftp.dataclass import dataclass
from ftp.ops.grouped_mm import GROUPED_MM
from ftp.passes.copy_elimination import copied
from ftp.rules.call import operands_of
from ftp.torch_internals.fake_tensors import FakeTensor
from ftp.torch_internals.op_types import OpOverload

if TYPE_CHECKING:
    from fractions import Fraction

aten = torch.ops.aten
_SIZED = (aten.reshape.default, aten.view.default, aten.expand.default)


_SHAPED = (aten.contiguous.default, aten.reshape.default, aten.view.default)
RowCounts = tuple[fx.Node, tuple[int, ...]]  # the node before any reshape, and the counts' shape


@dataclass(frozen=True)
class _Rows:
    """A value whose dim ``dim`` holds the arrived rows; ``of`` are the counts of these rows."""

    of: RowCounts
    dim: int


def only_arrived(graph: fx.Graph, exchanges: Collection[Any]) -> fx.Graph:
    """The graph with exchanges of rows that return as many rows as arrive, where all readers of the
    rows act on each row by itself, are grouped matmuls, or send the rows back. Any other exchange
    returns a buffer for the largest number of rows.

    The graph must come from `with_values`; the sizes in its ``val`` are then the largest possible.
    ``meta["arrived"]`` of a value that holds such rows is their dim, and their share of its size
    under equal loads.

    Args:
        exchanges: the targets of exchanges of rows.
    """
    if not any(graph.find_nodes(op="call_function", target=target) for target in exchanges):
        return graph
    rows, unfit, sizes = _read(graph, exchanges)
    fits = {held.of for node, held in rows.items() if node.target in exchanges} - unfit
    if not fits:
        return graph
    new, env = copied(graph)
    shares = {_counts(node): _share(node) for node in rows if node.target in exchanges}
    for node, made in env.items():
        if node in rows and rows[node].of in fits:
            made.meta["arrived"] = rows[node].dim, shares[rows[node].of]
        if node.target in exchanges and _counts(node) in fits:
            made.args = (*made.args[:4], True, *made.args[5:])
        elif node in sizes and rows[node].of in fits:
            made.args = (made.args[0], sizes[node], *made.args[2:])
    return new


def _read(
    graph: fx.Graph, exchanges: Collection[Any]
) -> tuple[dict[fx.Node, _Rows], set[RowCounts], dict[fx.Node, list[Any]]]:
    """The values that hold arrived rows; the counts of rows with an unsuitable reader; and the new
    sizes for calls that state the number of rows.
    """
    rows: dict[fx.Node, _Rows] = {}
    unfit: set[RowCounts] = set()
    sizes: dict[fx.Node, list[Any]] = {}
    for node in graph.nodes:
        held = {x: rows[x] for x in node.all_input_nodes if x in rows}
        is_exchange = node.target in exchanges
        if is_exchange and not node.args[3] and _is_by_group(node):
            unfit |= {one.of for one in held.values()}
            rows[node] = _Rows(_counts(node), 0)
        elif held:
            of = next(iter(held.values())).of
            if any(one.of != of for one in held.values()):
                unfit |= {one.of for one in held.values()}
            elif is_exchange:
                goes_back = node.args[3] and _counts(node) == of
                if not goes_back or list(held.items()) != [(node.args[0], _Rows(of, 0))]:
                    unfit.add(of)
            elif node.target is GROUPED_MM:
                dim = _of_grouped(node, held)
                if dim is None:
                    unfit.add(of)
                elif dim >= 0:
                    rows[node] = _Rows(of, dim)
            elif (dim := _of_each(node, held)) is None:
                unfit.add(of)
            else:
                if node.target in _SIZED:
                    stated = list(node.args[1])
                    stated[dim] = -1
                    sizes[node] = stated
                rows[node] = _Rows(of, dim)
    return rows, unfit, sizes


def _share(exchange: fx.Node) -> "Fraction":
    """The share of the buffer that is filled under equal loads, when as many rows arrive as a rank
    sends.
    """
    from fractions import Fraction  # few programs exchange rows

    x, _, bound, *_ = exchange.args
    assert isinstance(x, fx.Node) and isinstance(bound, int)
    return Fraction(min(_shape(x)[0], bound), max(bound, 1))


def _is_by_group(exchange: fx.Node) -> bool:
    return len(_counts(exchange)[1]) == 3


def _counts(exchange: fx.Node) -> RowCounts:
    """The row counts of an exchange; equal for the way there and back, and for the gradient."""
    node: Any = exchange.args[1]
    shape = _shape(node)
    while node.target in _SHAPED:
        node = node.args[0]
    return node, shape


def _shape(node: fx.Node) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)


def _of_grouped(node: fx.Node, held: dict[fx.Node, _Rows]) -> int | None:
    """The dim of rows of a grouped matmul's result; -1 where it sums over the rows, None where the
    rows are not those of its groups.
    """
    a, b, *rest = node.args
    of_a, of_b = (held[x].dim if x in held else None for x in (a, b))
    if any(x in held for x in rest):
        return None
    shapes = a.meta["val"].ndim, b.meta["val"].ndim  # type: ignore[union-attr]
    known = {(2, 3, 0, None): 0, (3, 2, None, 1): 1, (2, 2, 1, 0): -1}
    return known.get((*shapes, of_a, of_b))


def _of_each(node: fx.Node, held: dict[fx.Node, _Rows]) -> int | None:
    """The dim of rows in the result of an op that acts on each row by itself; None otherwise."""
    value = node.meta.get("val")
    if node.target is aten.contiguous.default:
        return held[node.all_input_nodes[0]].dim
    if not isinstance(node.target, OpOverload) or not isinstance(value, FakeTensor):
        return None
    operands = operands_of(node)
    if not all(isinstance(x.meta.get("val"), FakeTensor) for x in operands):
        return None
    from ftp.rules.bind import rule_of_node

    rule = rule_of_node(node)
    if rule is None or (rule.local is not None and node.target not in _SIZED):
        return None
    factors = {
        dims[held[x].dim] for x, dims in zip(operands, rule.operands, strict=True) if x in held
    }
    if len(factors) != 1 or len(factor := factors.pop()) != 1:
        return None
    (name,) = factor
    (result,) = rule.results
    elsewhere = [
        dim
        for x, dims in zip(operands, rule.operands, strict=True)
        for d, dim in enumerate(dims)
        if x not in held or d != held[x].dim
    ]
    if name in rule.whole or name in rule.pending[0] or any(name in dim for dim in elsewhere):
        return None
    dims = [d for d, dim in enumerate(result) if name in dim]
    if len(dims) != 1 or result[dims[0]] != factor:
        return None
    return dims[0] if _states_no_size(node, dims[0]) else None


def _states_no_size(node: fx.Node, dim: int) -> bool:
    """Whether a call states no number of rows, or states it where -1 can stand for it."""
    size = _shape(node)[dim]
    if node.target not in _SIZED:
        stated = [*node.args, *node.kwargs.values()]
        return all(size not in _numbers(x) for x in stated)
    sizes: Any = node.args[1]
    others: Sequence[Any] = [s for d, s in enumerate(sizes) if d != dim]
    return all(isinstance(s, int) and s > 0 for s in others)


def _numbers(stated: Any) -> list[int]:
    if isinstance(stated, list | tuple):
        return [n for x in stated for n in _numbers(x)]
    return [stated] if isinstance(stated, int) else []
