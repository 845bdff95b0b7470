"""Kinds of ops: views, stacks, matmuls, attention."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ftp.ops.attention_flex import FLEX, FLEX_BACKWARD
from ftp.ops.attention_varlen import VARLEN, VARLEN_BACKWARD
from ftp.ops.grouped_mm import GROUPED_MM
from ftp.ops.map_slices import MAP_SLICES
from ftp.ops.stack import STACK, UNSTACK
from ftp.rules.overloads import aten
from ftp.torch_internals.op_types import OpOverload

VIEWS = frozenset(
    {
        aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.t.default,
        aten.transpose.int, aten.permute.default, aten.expand.default, aten.unsqueeze.default,
        aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default, aten.slice.Tensor,
        aten.select.int, aten.alias.default, aten.detach.default, aten.split.Tensor,
        aten.split_with_sizes.default, aten.unbind.int,
    }
)  # fmt: skip
RESHAPES = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
PARTS = frozenset(
    {aten.slice.Tensor, aten.split.Tensor, aten.split_with_sizes.default, aten.unsafe_split.Tensor}
)
ONE_BY_ONE = frozenset({aten.select.int, aten.unbind.int})  # elements along a dim, as tensors
VIEWS_AND_COPIES = VIEWS | {aten._to_copy.default, aten.clone.default}
STACKS = frozenset({UNSTACK, STACK})  # views of layers, and copies that no plan avoids
_NAMESPACES = frozenset(("aten", "prims", "ftp", "c10d", "_c10d_functional", "_dtensor"))
BY_SLICE = frozenset({MAP_SLICES})  # functions of slices; each slice is sent to its owner
ONTO_FIRST = frozenset(
    {
        aten.scatter_add.default, aten.scatter.src, aten.scatter.value, aten.index_add.default,
        aten.index_copy.default, aten.index_fill.int_Scalar, aten.index_put.default,
    }
)  # they change some elements of a copy of their first operand  # fmt: skip
LOOKUPS = frozenset(
    {
        aten.embedding.default, aten.index.Tensor, aten._unsafe_index.Tensor,
        aten.index_select.default, aten.gather.default,
    }
)  # they read their first operand at ids  # fmt: skip
LOOKUPS_BACKWARD = frozenset(
    {
        aten.embedding_dense_backward.default, aten.index_put.default,
        aten._unsafe_index_put.default, aten.index_add.default, aten.scatter_add.default,
    }
)  # they add values at ids  # fmt: skip
NARROW_MATMULS = frozenset(  # their operands are narrower than their results
    {aten._scaled_mm.default, aten._scaled_mm_v2.default, aten._int_mm.default}
)
MATMULS = NARROW_MATMULS | {
    aten.mm.default, aten.bmm.default, aten.convolution.default,
    aten.convolution_backward.default, aten.mv.default, aten.dot.default, aten.addmm.default,
    aten.baddbmm.default, aten.addmv.default, GROUPED_MM,
}  # fmt: skip

CONVOLUTIONS = frozenset({aten.convolution.default, aten.convolution_backward.default})

_ATTENTION = (
    "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable", "_scaled_dot_product_attention_math",
    "scaled_dot_product_attention",
)  # fmt: skip
# Fused attention, forward and backward: those that this torch has.
ATTENTION = frozenset(
    getattr(aten, name).default
    for forward in _ATTENTION
    for name in (forward, f"{forward}_backward")
    if hasattr(aten, name)
) | {VARLEN, VARLEN_BACKWARD, FLEX, FLEX_BACKWARD}
_OF_ATTENTION = ("b", "h", "r", "s", "t", "e", "v")
BACKWARD = frozenset(target for target in ATTENTION if "backward" in str(target))
_MATMULS_AND_ATTENTION = MATMULS | ATTENTION


def may_call_autograd(target: Any) -> bool:
    """Whether a kernel may call autograd: one of the user's, and a function of slices, which is not
    looked into.
    """
    is_ours = not isinstance(target, OpOverload) or target.namespace in _NAMESPACES
    return target in BY_SLICE or not is_ours


def is_matmul(target: Any) -> bool:
    """Whether an op spends its time in matmuls: matmuls, convolutions, attention."""
    return target in _MATMULS_AND_ATTENTION


def multiplications(
    target: Any, sizes: Mapping[str, int], wanted: Sequence[bool] = (True,)
) -> float:
    """Number of multiplications of an op of `is_matmul` whose factors have these sizes; groups of
    rows are assumed to be equal. ``wanted``: which results the op computes.
    """
    if target in ATTENTION:  # its other factors belong to masks, lengths and generators
        sizes = {f: n for f, n in sizes.items() if f in _OF_ATTENTION}
    elif target in NARROW_MATMULS and sizes.keys() >= {*"mkn"}:  # to scales of blocks
        sizes = {f: sizes[f] for f in "mkn"}
    total = math.prod(sizes.values())
    if target in CONVOLUTIONS:
        # Each position of one lattice, z, meets all taps, and by them positions of the other, y.
        one = math.prod(n for factor, n in sizes.items() if factor[0] != "y")
        return one * (sum(wanted[:2]) if target is aten.convolution_backward.default else 1)
    if target is GROUPED_MM:
        return total / max(sizes["e"], 1) ** 2
    if target in ATTENTION and (both := sizes["e"] * sizes["v"]):
        # Scores and their matmul with the values; backward scores again, and four gradients.
        e, v = (3, 2) if target in BACKWARD else (1, 1)
        return total * (e * sizes["e"] + v * sizes["v"]) / both
    return total
