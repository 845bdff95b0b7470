"""Reductions over dims."""

import math
from dataclasses import replace

import torch
from torch import fx

from ftp.rules.forms import reduction_rule
from ftp.rules.local_forms import unless_empty
from ftp.rules.local_op import LocalOp
from ftp.rules.registry import reduction, rule
from ftp.rules.rule import Call, LocalHook, Rule

aten = torch.ops.aten

reduction(aten.sum.default, aten.sum.dim_IntList, linear=[(0,)])
reduction(aten.count_nonzero.default, aten.count_nonzero.dim_IntList, aten.nansum.default)


@rule(aten.mean.default, aten.mean.dim)
def mean(call: Call) -> Rule:
    """A part's share is its sum over the size of the whole."""
    made = reduction_rule(call, "sum", linear=[(0,)])
    reduced = [f for f, _ in made.notation.pending[0]]
    dtype = call.results[0].dtype
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype

    def local(op: LocalOp) -> fx.Node:
        if not op.is_cut(*reduced):
            return op.default()
        x, *rest = op.args if call.target is aten.mean.dim else (op.args[0], None)
        total = op.emit(aten.sum.dim_IntList, x, *rest, dtype=wide)
        total = op.emit(aten.div.Scalar, total, math.prod(op.rule.sizes[f] for f in reduced))
        return total if wide == dtype else op.emit(aten._to_copy.default, total, dtype=dtype)

    return replace(made, local=local) if reduced else made


# All of the elements at once matter: whole, or by their decompositions.


@rule(
    aten.all.default, aten.all.dim, aten.all.dims, aten.any.default, aten.any.dim, aten.any.dims,
    aten.linalg_vector_norm.default, aten.logsumexp.default, aten.norm.Scalar,
    aten.norm.ScalarOpt_dim, aten.prod.default, aten.prod.dim_int,
)  # fmt: skip
def whole(call: Call) -> Rule:
    return reduction_rule(call, None)


@rule(
    aten.aminmax.default, aten.argmax.default, aten.argmin.default, aten.max.dim, aten.min.dim,
    aten.median.default, aten.median.dim, aten.nanmedian.default, aten.nanmedian.dim,
    aten.mode.default, aten.kthvalue.default, aten.std.correction, aten.std.default, aten.std.dim,
    aten.std_mean.correction, aten.var.correction, aten.var.default, aten.var.dim,
    aten.var_mean.correction, aten.var_mean.default, aten.var_mean.dim,
)  # fmt: skip
def picked(call: Call) -> Rule:
    """Their kernels raise or warn where there is nothing."""
    return reduction_rule(call, None, local=unless_empty(call))


@rule(aten.amax.default, aten.max.default)
def maximum(call: Call) -> Rule:
    return reduction_rule(call, "max", local=_extremum(call, lowest=True))


@rule(aten.amin.default, aten.min.default)
def minimum(call: Call) -> Rule:
    return reduction_rule(call, "min", local=_extremum(call, lowest=False))


def _extremum(call: Call, lowest: bool) -> LocalHook:
    """A rank that holds nothing of what is reduced would raise alone: it gives the identity."""

    def local(op: LocalOp) -> fx.Node:
        if math.prod(op.operand_shape(0)) or not op.is_cut():
            return op.default()
        return op.emit(
            aten.new_full.default, op.args[0], op.shape(), _identity(call.operands[0].dtype, lowest)
        )

    return local


def _identity(dtype: torch.dtype, lowest: bool) -> float | int | bool:
    if dtype is torch.bool:
        return not lowest
    if dtype.is_floating_point:
        return -math.inf if lowest else math.inf
    return torch.iinfo(dtype).min if lowest else torch.iinfo(dtype).max
