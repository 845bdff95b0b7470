"""Reductions over dims."""

import math

import torch
from torch import fx

from ftp.ops.moments import moments, sums
from ftp.rules.call import Call
from ftp.rules.decompositions.registry import HALF
from ftp.rules.forms import reduction
from ftp.rules.local_forms import unless_empty
from ftp.rules.local_op import LocalOp
from ftp.rules.notation import Dims, Notation
from ftp.rules.overloads import aten
from ftp.rules.registry import rule
from ftp.rules.rule import LocalHook, Rule

reduction(aten.sum.default, aten.sum.dim_IntList, linear=[(0,)])
reduction(aten.count_nonzero.default, aten.count_nonzero.dim_IntList, aten.nansum.default)


def _mean_of_part(op: LocalOp) -> fx.Node:
    """A rank's term of the mean: its sum divided by the global number of elements."""
    reduced = list(op.rule.pending[0])
    if not reduced or not op.is_cut(*reduced):
        return op.default()
    x, *rest = op.args if op.target is aten.mean.dim else (op.args[0], None)
    dtype = op.call.results[0].dtype
    wide = torch.float32 if dtype in HALF else dtype
    total = op.emit(aten.sum.dim_IntList, x, *rest, dtype=wide)
    total = op.emit(aten.div.Scalar, total, math.prod(op.rule.sizes[f] for f in reduced))
    return total if wide == dtype else op.emit(aten._to_copy.default, total, dtype=dtype)


def _or_identity(*, lowest: bool) -> LocalHook:
    """The op; or its identity if a cut leaves nothing to reduce, which the kernel refuses."""

    def local(op: LocalOp) -> fx.Node:
        if math.prod(op.operand_shape(0)) or not op.is_cut():
            return op.default()
        identity = _identity(op.call.operands[0].dtype, lowest)
        return op.emit(aten.new_full.default, op.args[0], op.shape(), identity)

    return local


def _identity(dtype: torch.dtype, lowest: bool) -> float | int | bool:
    if dtype is torch.bool:
        return not lowest
    if dtype.is_floating_point:
        return -math.inf if lowest else math.inf
    return torch.iinfo(dtype).min if lowest else torch.iinfo(dtype).max


reduction(aten.mean.default, aten.mean.dim, linear=[(0,)], local=_mean_of_part)
reduction(aten.amax.default, aten.max.default, op="max", local=_or_identity(lowest=True))
reduction(aten.amin.default, aten.min.default, op="min", local=_or_identity(lowest=False))


def _moments_of_part(op: LocalOp) -> tuple[fx.Node, ...]:
    x, dims = op.args
    return sums(op.emit, x, dims, op.operand_shape(0), op.call.operands[0].dtype)


reduction(moments, local=_moments_of_part)

# Reductions that need all of the elements at once: whole, or by their decompositions.
reduction(
    aten.all.default, aten.all.dim, aten.all.dims, aten.any.default, aten.any.dim, aten.any.dims,
    aten.linalg_vector_norm.default, aten.logsumexp.default, aten.norm.Scalar,
    aten.norm.ScalarOpt_dim, aten.prod.default, aten.prod.dim_int,
    op=None,
)  # fmt: skip

# The same for kernels that raise or warn if there is nothing to reduce.
reduction(
    aten.aminmax.default, aten.argmax.default, aten.argmin.default, aten.max.dim, aten.min.dim,
    aten.median.default, aten.median.dim, aten.nanmedian.default, aten.nanmedian.dim,
    aten.mode.default, aten.kthvalue.default, aten.std.correction, aten.std.default, aten.std.dim,
    aten.std_mean.correction, aten.var.correction, aten.var.default, aten.var.dim,
    aten.var_mean.correction, aten.var_mean.default, aten.var_mean.dim,
    op=None, local=unless_empty(),
)  # fmt: skip


@rule(aten.segment_reduce.default, aten._segment_reduce_backward.default)
def segment_reduce(call: Call) -> Rule:
    """Segments of one whole dim; their lengths or offsets have the dims before it."""
    is_backward = len(call.operands) == 4
    ndim = (call.operands if is_backward else call.results)[0].ndim
    axis = call.arg("axis") % ndim
    rows, segments = _around_axis(ndim, axis, "n"), _around_axis(ndim, axis, "s")
    bounds = _around_axis(axis + 1, axis, "b")
    operands = (segments, segments, rows, bounds) if is_backward else (rows, bounds)
    result = rows if is_backward else segments
    is_linear = is_backward or (call.arg("reduce") in ("sum", "mean") and not call.arg("initial"))
    return Rule(
        Notation(operands, (result,), frozenset("nsb"), ((),)),
        ((0,),) if is_linear else (),
        unless_empty(),
    )


def _around_axis(ndim: int, axis: int, own: str) -> Dims:
    """A factor for each dim; that of dim ``axis`` is the tensor's own."""
    return tuple((own,) if d == axis else (f"~{d}",) for d in range(ndim))
