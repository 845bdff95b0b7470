"""Matmuls of float8 and of integers, with the scales of their operands."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import fx

from ftp.rules.call import Call, Meta, replaced, tensors
from ftp.rules.forms import einsum
from ftp.rules.local_forms import unless_empty
from ftp.rules.local_op import LocalOp
from ftp.rules.overloads import aten
from ftp.rules.registry import make, rule
from ftp.rules.rule import Rule

MULTIPLES: Mapping[str, int] = {"cuda": 16}  # of k and n, by device

einsum(aten._int_mm.default, "m k, k n -> m n")


@rule(aten._scaled_mm.default)
def scaled_mm(call: Call) -> Rule:
    """Each operand has one scale."""
    return _scaled(call, [call.arg("scale_a")], [call.arg("scale_b")], call.arg("scale_result"))


@rule(aten._scaled_mm_v2.default)
def scaled_mm_v2(call: Call) -> Rule:
    """Operands may have scales of several levels."""
    return _scaled(call, call.arg("scale_a"), call.arg("scale_b"), None)


def _scaled(
    call: Call, scale_a: Sequence[Meta], scale_b: Sequence[Meta], scale_result: Meta | None
) -> Rule:
    """With one scale for a tensor, a row of the first or a column of the second, ranks that hold
    parts of k have parts of the sum, unless the result is float8 or has a bias.
    """
    a, b = call.operands[:2]
    bias = call.arg("bias")
    of_a, m, is_a_split = _scales(scale_a, "m", a.shape[0])
    of_b, n, is_b_split = _scales(scale_b, "n", b.shape[1])
    is_sum = is_a_split and is_b_split and bias is None and call.results[0].dtype.itemsize > 1
    k, pending = ("k", "{k}") if is_sum else ("[k]", "")
    texts = [f"{m} {k}", f"{k} {n}", *of_a, *of_b]
    texts += [] if bias is None else [n]
    texts += [] if scale_result is None else [_ones(scale_result)]
    return make(f"{', '.join(texts)} -> {m} {n} {pending}", local=unless_empty(_laid_out))


def _scales(scales: Sequence[Meta], line: str, size: int) -> tuple[list[str], str, bool]:
    """The dims of an operand's scales, its lines (rows of the first, columns of the second), and
    whether its products may be parts of a sum. Lines with other scales are whole, as those of
    blocks of lines, and those that a kernel wants in an order of its own, which are not float32.
    """
    (scale,) = scales if len(scales) == 1 else (None,)
    if scale is not None and scale.dtype == torch.float32:
        if math.prod(scale.shape) == 1:
            return [_ones(scale)], line, True
        dim = 0 if line == "m" else 1
        if scale.ndim == 2 and scale.shape[dim] == size:
            block = "1" if scale.shape[1 - dim] == 1 else f"[{line}0]"
            return [" ".join((line, block)[:: 1 - 2 * dim])], line, block == "1"
    whole = [" ".join(f"[{line}{i}{d}]" for d in range(x.ndim)) for i, x in enumerate(scales)]
    return whole, f"[{line}]", False


def _ones(x: Meta) -> str:
    return " ".join("1" * x.ndim) or "()"


def _laid_out(op: LocalOp) -> fx.Node:
    """The op on operands as kernels of GPUs and inductor ask for them: the rows of the first and
    the columns of the second contiguous; on GPUs k and n are padded to multiples of 16 with zeros.
    """
    k, n = (-op.sizes[factor] % MULTIPLES.get(op.device.type, 1) for factor in "kn")
    a, b, *rest = op.args

    def by_rows(x: fx.Node, dtype: torch.dtype, *pad: int) -> fx.Node:
        if any(pad):
            of_bytes = op.emit(aten.view.dtype, x, torch.uint8)
            of_bytes = op.emit(aten.constant_pad_nd.default, of_bytes, list(pad))
            x = op.emit(aten.view.dtype, of_bytes, dtype)
        return op.emit(aten.contiguous.default, x)

    by_column = {
        x: op.emit(aten.constant_pad_nd.default, x, [0, n])
        for x, dims in zip(tensors(rest, fx.Node), op.rule.operands[2:], strict=True)
        if n and dims and dims[-1] == ("n",)
    }
    rest = replaced(rest, fx.Node, lambda x: by_column.get(x, x))
    of_a, of_b = (x.dtype for x in op.call.operands[:2])  # a gradient's may be another one
    b = op.emit(aten.t.default, by_rows(op.emit(aten.t.default, b), of_b, 0, k, 0, n))
    made = op.default(by_rows(a, of_a, 0, k), b, *rest)
    return op.emit(aten.slice.Tensor, made, 1, 0, op.sizes["n"]) if n else made
