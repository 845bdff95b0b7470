"""Matmuls: rules for ops that are einsums."""

from dataclasses import replace

import torch
from torch import fx

from ftp.ops.grouped_mm import GROUPED_MM, GROUPED_MM_PART
from ftp.rules.call import Call
from ftp.rules.forms import einsum
from ftp.rules.local_forms import unless_empty
from ftp.rules.local_op import LocalOp
from ftp.rules.notation import Notation, parse
from ftp.rules.overloads import aten
from ftp.rules.registry import register, rule
from ftp.rules.rule import LocalHook, Rule
from ftp.torch_internals.op_types import OpOverload

einsum(aten.bmm.default, "b m k, b k n -> b m n")
einsum(aten.dot.default, "k, k -> ()")
einsum(aten.mm.default, "m k, k n -> m n")
einsum(aten.mv.default, "m k, k -> m")
einsum(aten.vdot.default, "k, k -> ()")


@rule(aten._trilinear.default)
def trilinear(call: Call) -> Rule:
    """Three tensors multiplied and summed over some dims: ``nn.Bilinear``'s result and gradients.
    A tensor has no factor for a dim in which it is expanded.
    """
    ndim = call.operands[0].ndim + len(call.arg("expand1"))
    at = [
        [d for d in range(ndim) if d not in call.arg(name)]
        for name in ("expand1", "expand2", "expand3")
    ]
    sizes = [1] * ndim
    for dims, x in zip(at, call.operands, strict=True):
        for d, size in zip(dims, x.shape, strict=True):
            sizes[d] = size if size != 1 else sizes[d]
    operands = tuple(
        tuple((f"~{d}",) if size == sizes[d] else () for d, size in zip(dims, x.shape, strict=True))
        for dims, x in zip(at, call.operands, strict=True)
    )
    summed = sorted(set(call.arg("sumdim")))
    result = tuple((f"~{d}",) for d in range(ndim) if d not in summed)
    pending = tuple((f"~{d}", "sum") for d in summed)
    return Rule(
        Notation(operands, (result,), frozenset(), (pending,)),
        ((0,), (1,), (2,)),
        unless_empty(),
    )


def added_matmul(op: OpOverload, text: str, local: LocalHook | None = None) -> None:
    """A matmul to which ``self`` is added, broadcast. k is whole, as every rank with a part of k
    would add ``self``; the decomposition allows cutting k.

    >>> added_matmul(aten.addmm.default, "m [k], [k] n -> m n")
    """
    n = parse(text)
    (result,) = n.results

    def maker(call: Call) -> Rule:
        shape, out = call.operands[0].shape, call.results[0].shape
        skip = len(out) - len(shape)
        own = tuple(
            f if s == o else () for f, s, o in zip(result[skip:], shape, out[skip:], strict=True)
        )
        return Rule(replace(n, operands=(own, *n.operands)), ((0, 1), (0, 2)), local)

    register([op], maker)


added_matmul(aten.addmm.default, "m [k], [k] n -> m n")
# The kernel returns ``self``'s shape where the matrix has no rows.
added_matmul(aten.addmv.default, "m [k], [k] -> m", unless_empty(inputs=False))
added_matmul(aten.addr.default, "m, n -> m n")
added_matmul(aten.baddbmm.default, "b m [k], b [k] n -> b m n")


_GROUPED = {
    (2, 3): "m k, g k n, [e] -> m n {k g}",  # rows of m are grouped
    (3, 2): "g m k, k n, [e] -> m n {k g}",  # of n
    (2, 2): "m k, k n, [e] -> g m n {k}",  # of k
}
_ROWS = {(2, 3): "m", (3, 2): "n", (2, 2): "k"}


@rule(GROUPED_MM)
def grouped_mm(call: Call) -> Rule:
    """Groups are of rows (2-D x 3-D), columns (3-D x 2-D) or of the summed dim (2-D x 2-D). A rank
    that lacks a group, or some of its rows, has zeros for them.
    """
    form = (call.operands[0].ndim, call.operands[1].ndim)
    return Rule(parse(_GROUPED[form]), ((0,), (1,)), _own_groups(_ROWS[form]))


def _own_groups(rows: str) -> LocalHook:
    def local(op: LocalOp) -> fx.Node:
        if not op.is_cut("g", rows):
            return op.default()
        a, b, offs, *rest = op.args
        count = op.call.operands[2].shape[0]
        offs = op.emit(aten._to_copy.default, offs, dtype=torch.int64)
        bounds = op.emit(aten.constant_pad_nd.default, offs, [1, 0])
        # A group whose end is before the end of the group before it has no rows.
        bounds = op.item(op.emit(aten.cummax.default, bounds, 0), 0)
        starts = op.emit(aten.slice.Tensor, bounds, 0, 0, count)
        ends = op.emit(aten.slice.Tensor, bounds, 0, 1, count + 1)
        if op.is_cut("g"):
            held = op.positions("g")
            starts, ends = (op.emit(aten.index_select.default, x, 0, held) for x in (starts, ends))
        if op.is_cut(rows):  # number of the rank's rows before each end
            held = op.positions(rows)
            starts, ends = (op.emit(aten.searchsorted.Tensor, held, x) for x in (starts, ends))
        return op.emit(GROUPED_MM_PART, a, b, starts, ends, count, *rest, **op.kwargs)

    return local
