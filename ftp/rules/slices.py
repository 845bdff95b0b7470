"""Rules of slices, splits, windows and ``cat``: parts of a dim."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from ftp.ops.windows import (
    HALO_EXCHANGE,
    JOIN_WINDOWS,
    WINDOWS,
    Exchange,
    Windows,
    exchange_of,
)
from ftp.rules.call import Call, Meta
from ftp.rules.dims import acting_on, numbered
from ftp.rules.local_forms import with_shape
from ftp.rules.local_op import LocalOp
from ftp.rules.notation import Dims, Notation
from ftp.rules.overloads import aten
from ftp.rules.registry import rule
from ftp.rules.rule import Rule
from ftp.rules.size_functions import gcd, slice_bounds

# Parts of a dim. If all parts, and the elements around them, are multiples of s elements, the dim
# is viewed as (k s), and s may be cut within each of the k alike: such as three packs of heads, of
# which a part takes one or two.


@rule(aten.slice.Tensor, aten.slice_copy.Tensor)
def slice_(call: Call) -> Rule:
    x, (y,) = call.operands[0], call.results
    dim, (start, _, step), size = _cut_of(call, x, y)
    if step != 1 or not y.shape[dim] or (size == 1 and y.shape[dim] != 1):
        if step != 1 or start:
            return acting_on(call, [dim], linear=[(0,)])
        return _first_elements(
            call, dim, "y", lambda op, n: op.emit(op.target, op.args[0], dim, 0, n), LocalOp.default
        )
    first, last = start // size, (start + y.shape[dim]) // size

    def local(op: LocalOp) -> fx.Node:
        return op.emit(op.target, op.args[0], dim, first * op.sizes["s"], last * op.sizes["s"])

    notation, sizes = _in_parts(
        numbered(x.ndim), dim, size, x.shape[dim], [y.shape[dim]], reverse=False
    )
    return Rule(notation, ((0,),), local, sizes)


@rule(aten.slice_backward.default)
def slice_backward(call: Call) -> Rule:
    y, (x,) = call.operands[0], call.results
    dim, (start, end, step), size = _cut_of(call, x, y)
    # The op broadcasts a gradient of one element over a longer slice.
    if (
        step != 1
        or end - start != y.shape[dim]
        or not y.shape[dim]
        or (size == 1 and y.shape[dim] != 1)
    ):
        if step != 1 or start or end != y.shape[dim]:
            return acting_on(call, [dim], linear=[(0,)], local=with_shape(1))
        return _first_elements(
            call,
            dim,
            "x",
            lambda op, n: op.emit(op.target, op.args[0], op.shape(), dim, 0, n, 1),
            with_shape(1),
        )
    first, last = start // size, (start + y.shape[dim]) // size

    def local(op: LocalOp) -> fx.Node:
        return op.emit(
            op.target, op.args[0], op.shape(), dim, first * op.sizes["s"], last * op.sizes["s"], 1
        )

    notation, sizes = _in_parts(
        numbered(x.ndim), dim, size, x.shape[dim], [y.shape[dim]], reverse=True
    )
    return Rule(notation, ((0,),), local, sizes)


def _cut_of(call: Call, x: Meta, part: Meta) -> tuple[int, tuple[Any, Any, Any], Any]:
    """The dim that a slice of ``x`` is along; its start, end and step; and the size of which the
    part and the elements around it are multiples.
    """
    dim = call.arg("dim") % x.ndim
    bounds = slice_bounds(call.arg("start"), call.arg("end"), call.arg("step"), x.shape[dim])
    return dim, bounds, gcd(x.shape[dim], bounds[0], part.shape[dim])


def _first_elements(
    call: Call,
    dim: int,
    part: str,
    of_part: Callable[[LocalOp, int], fx.Node],
    of_whole: Callable[[LocalOp], fx.Node],
) -> Rule:
    """A slice from 0, or its gradient: the whole is cut with the part, where the ranks' chunks
    start alike.

    Args:
        part: "x" where the operand is the part, "y" where the result is.
        of_part: is given the length of a rank's chunk of the part.
    """
    (x,) = call.operands

    def dims(factor: str) -> Dims:
        return tuple((factor,) if d == dim else (f"~{d}",) for d in range(x.ndim))

    def local(op: LocalOp) -> fx.Node:
        return of_part(op, op.sizes[part]) if op.is_cut("x", "y") else of_whole(op)

    notation = Notation((dims("x"),), (dims("y"),), frozenset(("x", "y")), ((),))
    return Rule(notation, ((0,),), local, together=(("x", "y"),))


@rule(
    aten.split.Tensor, aten.split_with_sizes.default, aten.split_copy.Tensor,
    aten.split_with_sizes_copy.default, aten.unsafe_split.Tensor,
    aten.unsafe_split_with_sizes.default,
)  # fmt: skip
def split(call: Call) -> Rule:
    x = call.operands[0]
    dim = call.arg("dim") % x.ndim
    parts = [m.shape[dim] for m in call.results]
    size = gcd(*parts)
    if not parts or not all(parts) or (size == 1 and len(set(parts)) > 1):
        return acting_on(call, [dim], linear=[(0,)])
    with_sizes = "split_with_sizes" in str(call.target) or len(set(parts)) > 1

    def local(op: LocalOp) -> fx.Node:
        if with_sizes or not op.sizes["s"]:
            return op.emit(
                aten.split_with_sizes.default,
                op.args[0],
                [part // size * op.sizes["s"] for part in parts],
                dim,
            )
        return op.emit(op.target, op.args[0], op.sizes["s"], dim)

    notation, sizes = _in_parts(numbered(x.ndim), dim, size, x.shape[dim], parts, reverse=False)
    return Rule(notation, ((0,),), local, sizes)


@rule(aten.cat.default)
def cat(call: Call) -> Rule:
    (y,) = call.results
    together = [tuple(range(len(call.operands)))]
    if any(m.ndim != y.ndim for m in call.operands):  # torch skips empty vectors among matrices
        return _cat_with_vectors(call, together)
    dim = call.arg("dim") % y.ndim
    parts = [m.shape[dim] for m in call.operands]
    size = gcd(*parts)
    if not all(parts) or (size == 1 and len(set(parts)) > 1):
        return acting_on(call, [dim], linear=together)
    notation, sizes = _in_parts(numbered(y.ndim), dim, size, y.shape[dim], parts, reverse=True)
    return Rule(notation, tuple(together), None, sizes)


def _cat_with_vectors(call: Call, linear: Sequence[Sequence[int]]) -> Rule:
    (y,) = call.results
    dim = call.arg("dim") % y.ndim
    whole = {f"s{i}" for i in range(len(call.operands))} | {"s"}

    def dims(i: int, ndim: int) -> Dims:
        return tuple((f"s{i}",) if d == dim or ndim != y.ndim else (f"~{d}",) for d in range(ndim))

    operands = tuple(dims(i, m.ndim) for i, m in enumerate(call.operands))
    result = tuple(("s",) if d == dim else (f"~{d}",) for d in range(y.ndim))
    return Rule(Notation(operands, (result,), frozenset(whole), ((),)), tuple(map(tuple, linear)))


def _in_parts(
    dims: Dims, dim: int, size: int, all_of: int, parts: Sequence[int], *, reverse: bool
) -> tuple[Notation, dict[str, int]]:
    """The notation of a tensor and its ``parts`` along ``dim``. The dim, of ``all_of`` elements, is
    viewed as (k s) with s of ``size``; each part is a (k s) of its own. Each k is whole. If
    ``reverse``, the parts are the operands.
    """
    sizes = {"s": size}

    def seen(name: str, length: int) -> Dims:
        if length != size:
            sizes[name] = length // size
        return (*dims[:dim], (name, "s") if length != size else ("s",), *dims[dim + 1 :])

    whole = (seen("k", all_of),)
    each = tuple(seen(f"k{i}", length) for i, length in enumerate(parts))
    first, then = (each, whole) if reverse else (whole, each)
    return Notation(first, then, frozenset(sizes.keys() - {"s"}), ((),) * len(then)), sizes


@rule(WINDOWS)
def windows(call: Call) -> Rule:
    """As many windows as an axis has ranks may be cut with the dim that they are of."""
    (x,) = call.operands
    _, dim, n, start, step, size = call.args
    operand = tuple(("x",) if d == dim else (f"~{d}",) for d in range(x.ndim))
    result = (("w",), *(("l",) if d == dim else (f"~{d}",) for d in range(x.ndim)))
    cut = Windows(x.shape[dim], n, start, step, size)
    is_local = (start, step) == (0, cut.chunk) and size <= step

    def local(op: LocalOp) -> fx.Node:
        if not op.is_cut("x"):
            return op.emit(WINDOWS, op.args[0], dim, *op.args[2:])
        if is_local:  # a window is within the rank's chunk, or goes on with zeros
            after = [0, 0] * (x.ndim - 1 - dim)
            more = size - op.operand_shape(0)[dim]
            held = op.emit(aten.constant_pad_nd.default, op.args[0], [*after, 0, more])
            return op.emit(aten.unsqueeze.default, held if more else op.args[0], 0)
        group = op.group(op.cuts["x"][0].axis)
        return op.emit(HALO_EXCHANGE, op.args[0], dim, *op.args[2:], cut.whole, group)

    notation = Notation((operand,), (result,), frozenset("xwl"), ((),))
    exchange = Exchange(n, 0, ()) if is_local else exchange_of(cut)
    return Rule(notation, ((0,),), local, together=(("x", "w"),), exchange=exchange)


@rule(JOIN_WINDOWS)
def join_windows(call: Call) -> Rule:
    """Windows that are a rank's chunks may be cut with the dim that they make."""
    (x,), (y,) = call.operands, call.results
    _, dim, length = call.args
    operand = (("w",), *(("l",) if d == dim else (f"~{d}",) for d in range(y.ndim)))
    result = tuple(("y",) if d == dim else (f"~{d}",) for d in range(y.ndim))
    n, size = x.shape[0], x.shape[1 + dim]

    def local(op: LocalOp) -> fx.Node:
        if not op.is_cut("y"):
            return op.emit(JOIN_WINDOWS, op.args[0], dim, length)
        held = op.emit(aten.squeeze.dim, op.args[0], 0)
        mine = op.sizes["y"]
        return held if mine == size else op.emit(aten.slice.Tensor, held, dim, 0, mine)

    notation = Notation((operand,), (result,), frozenset("wly"), ((),))
    exchange = Exchange(n if -(-length // n) == size else 0, 0, ())
    return Rule(notation, ((0,),), local, together=(("w", "y"),), exchange=exchange)
