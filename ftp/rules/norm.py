"""Rules of softmaxes and normalisations: fused if the dims that they reduce are whole, primitives
if these are cut.
"""

import math
from typing import Any

from torch import fx

from ftp.rules.call import Call
from ftp.rules.dims import acting_on, factors
from ftp.rules.forms import along_dim
from ftp.rules.local_forms import contiguous, unless_empty, zeros
from ftp.rules.local_op import LocalOp
from ftp.rules.notation import Dims, Notation
from ftp.rules.overloads import aten
from ftp.rules.registry import rule
from ftp.rules.rule import Rule

along_dim(aten._softmax.default, "... [d] -> ... [d]")
along_dim(aten._log_softmax.default, "... [d] -> ... [d]")
along_dim(aten._safe_softmax.default, "... [d] -> ... [d]")
along_dim(aten._softmax_backward_data.default, "... [d], ... [d] -> ... [d]", linear=[(0,)])
along_dim(aten._log_softmax_backward_data.default, "... [d], ... [d] -> ... [d]", linear=[(0,)])


@rule(aten.native_layer_norm.default, aten._fused_rms_norm.default)
def layer_norm(call: Call) -> Rule:
    """``... [d], [d], [d] -> ... [d], ... 1, ... 1``, d the normalised dims; the statistics of
    rms norm are one tensor.
    """
    x, (_, *statistics) = call.operands[0], call.results
    inner = len(call.arg("normalized_shape"))
    batch, norm = _batch_and_norm(x.ndim, inner)
    stats = (*batch, *((),) * inner)
    operands = ((*batch, *norm), *(norm,) * (len(call.operands) - 1))
    results = ((*batch, *norm), *(stats[: m.ndim] for m in statistics))
    return Rule(
        Notation(operands, results, factors(norm), ((),) * len(results)),
        (),
        unless_empty(inputs=False),
    )


@rule(aten.native_layer_norm_backward.default, aten._fused_rms_norm_backward.default)
def layer_norm_backward(call: Call) -> Rule:
    """The gradients of weight and bias are sums over the batch."""
    _, x, *rest = call.operands
    inner = len(call.arg("normalized_shape"))
    batch, norm = _batch_and_norm(x.ndim, inner)
    stats = (*batch, *((),) * inner)
    statistics = 2 if call.target is aten.native_layer_norm_backward.default else 1
    operands = (
        ((*batch, *norm),) * 2
        + tuple(stats[: m.ndim] for m in rest[:statistics])
        + (norm,) * (len(rest) - statistics)
    )
    wanted = call.arg("output_mask")
    results = tuple(
        ((*batch, *norm) if i == 0 else norm) if want else () for i, want in enumerate(wanted)
    )
    summed = tuple((f, "sum") for dim in batch for f in dim)
    pending = tuple(summed if want and i else () for i, want in enumerate(wanted))
    return Rule(
        Notation(operands, results, factors(norm), pending),
        ((0,),),
        unless_empty(contiguous(0, 1), inputs=False),
    )


def _batch_and_norm(ndim: int, inner: int) -> tuple[Dims, Dims]:
    return tuple((f"~{i}",) for i in range(ndim - inner)), tuple((f"d{i}",) for i in range(inner))


def _group_norm_of_part(op: LocalOp) -> fx.Node:
    x, weight, bias, *_ = op.args
    n, c, *space = op.operand_shape(0)
    x = op.emit(aten.contiguous.default, x)
    sizes = n, c, math.prod(space), op.sizes["g"]
    return op.emit(op.target, x, weight, bias, *sizes, op.args[-1])


# Groups are independent.
rule(
    aten.native_group_norm.default,
    "n (g [c]) [...], (g [c]), (g [c]) -> n (g [c]) [...], n g, n g",
    sizes={"g": "group"},
    local=unless_empty(_group_norm_of_part),
)


def _group_norm_backward_of_part(op: LocalOp) -> Any:
    dy, x, mean, rstd, weight = op.args[:5]
    n, c, *space = op.operand_shape(1)
    if 0 in (n, c, *space):
        return tuple(zeros(op, i) for i in range(3))
    dy, x = (op.emit(aten.contiguous.default, t) for t in (dy, x))
    sizes = n, c, math.prod(space), op.sizes["g"]
    return op.emit(op.target, dy, x, mean, rstd, weight, *sizes, op.args[9])


rule(
    aten.native_group_norm_backward.default,
    "n (g [c]) [...], n (g [c]) [...], n g, n g, (g [c])"
    " -> n (g [c]) [...], (g [c]) {n}, (g [c]) {n}",
    sizes={"g": "group"},
    wanted="output_mask",
    linear=[(0,)],
    local=_group_norm_backward_of_part,
)


@rule(aten.renorm.default)
def renorm(call: Call) -> Rule:
    """Slices along ``dim`` are independent."""
    ndim = call.operands[0].ndim
    return acting_on(call, [d for d in range(ndim) if d != call.arg("dim") % ndim])


@rule(aten._weight_norm_interface.default)
def weight_norm(call: Call) -> Rule:
    """``v, g -> g * v / norm, norm``: slices along ``dim`` are independent."""
    full, kept = _along(call)
    results = (full, kept)
    whole = factors(full) - {"o"}
    return Rule(Notation((full, kept), results, whole, ((), ())), (), unless_empty(contiguous(0)))


@rule(aten._weight_norm_interface_backward.default)
def weight_norm_backward(call: Call) -> Rule:
    full, kept = _along(call)
    operands, whole = (full, full, kept, kept), factors(full) - {"o"}
    local = unless_empty(contiguous(0, 1), inputs=False)
    return Rule(Notation(operands, (full, kept), whole, ((), ())), ((0,),), local)


def _along(call: Call) -> tuple[Dims, Dims]:
    """The dims of a weight, and those of its norms, whose size is one in all dims but ``dim``."""
    ndim = call.operands[0].ndim
    dim = call.arg("dim") % ndim
    full = tuple(("o",) if i == dim else (f"d{i}",) for i in range(ndim))
    return full, tuple(d if i == dim else () for i, d in enumerate(full))


# Whole unless the losses are not reduced. The decomposition, which sums losses and weights
# separately, may be cut.
rule(
    aten.nll_loss_forward.default, aten.nll_loss2d_forward.default,
    "n [c] ..., n ..., [c] -> n ..., ()",
    or_whole=True,
)  # fmt: skip
rule(
    aten.nll_loss_backward.default, aten.nll_loss2d_backward.default,
    "(), n [c] ..., n ..., [c], () -> n [c] ...",
    "n ..., n [c] ..., n ..., [c], () -> n [c] ...",
    "(), [c], (), [c], () -> [c]",
    linear=[(0,)], local=unless_empty(inputs=False),
)  # fmt: skip


@rule(
    aten.native_batch_norm.default,
    aten._native_batch_norm_legit.no_stats,
    aten._native_batch_norm_legit_functional.default,
)
def batch_norm(call: Call) -> Rule:
    """Channels are independent; with given statistics all dims are."""
    training = bool(call.arg("training"))
    x = call.operands[0]
    full, channel = _channels(x.ndim)
    results = (
        full,
        *(
            channel
            if m.ndim and m.shape == x.shape[1:2]
            else tuple((f"e{i}_{d}",) for d in range(m.ndim))
            for i, m in enumerate(call.results[1:])
        ),
    )
    whole = factors(*results if training else results[1:]) - {"c"}

    def local(op: LocalOp) -> Any:
        made = unless_empty(contiguous(0))(op)
        if len(results) == 5 and isinstance(made, tuple):  # given statistics are returned unchanged
            return (*made[:3], *(op.emit(aten.clone.default, s) for s in op.args[3:5]))
        return made

    return Rule(
        Notation(
            (full, *(channel,) * (len(call.operands) - 1)), results, whole, ((),) * len(results)
        ),
        (),
        local,
    )


# With given statistics all elements are independent. The results for batch statistics are empty on
# some devices.
rule(
    aten._native_batch_norm_legit_no_training.default,
    "n c ..., c, c, c, c -> n c ..., c, c",
    "n c ..., c, c, c, c -> n c ..., [d], [e]",
    local=unless_empty(contiguous(0)),
)


@rule(aten.native_batch_norm_backward.default)
def batch_norm_backward(call: Call) -> Rule:
    training = bool(call.arg("train"))
    x = call.operands[1]
    full, channel = _channels(x.ndim)
    rest: tuple[Dims, ...] = tuple(
        channel if m.shape == x.shape[1:2] else (("e",),) for m in call.operands[2:]
    )
    wanted = call.arg("output_mask")
    # Results that are not wanted have shapes too.
    shaped = [want or bool(m.ndim) for want, m in zip(wanted, call.results, strict=True)]
    results = tuple(
        dims if has else () for dims, has in zip((full, channel, channel), shaped, strict=True)
    )
    batch = [f for dim in full for f in dim if f != "c"]
    pending = tuple(
        tuple((f, "sum") for f in batch) if want and i else () for i, want in enumerate(wanted)
    )
    whole = factors(*rest) - {"c"} | (set(batch) if training else set())
    return Rule(Notation((full, full, *rest), results, whole, pending), ((0,),), _by_channel)


def _by_channel(op: LocalOp) -> Any:
    if op.is_cut() and 0 in op.operand_shape(1):
        return tuple(zeros(op, i) for i in range(3))
    return contiguous(0, 1)(op)


def _channels(ndim: int) -> tuple[Dims, Dims]:
    return (("n",), ("c",), *((f"y{i}",) for i in range(ndim - 2))), (("c",),)
