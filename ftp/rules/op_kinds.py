"""Kinds of ops: views, stacks, matrix products."""

from typing import Any

from ftp.ops.stack import STACK, UNSTACK
from ftp.rules.overloads import aten

VIEWS = frozenset(
    {
        aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.t.default,
        aten.transpose.int, aten.permute.default, aten.expand.default, aten.unsqueeze.default,
        aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default, aten.slice.Tensor,
        aten.select.int, aten.alias.default, aten.detach.default, aten.split.Tensor,
        aten.split_with_sizes.default, aten.unbind.int,
    }
)  # fmt: skip
STACKS = frozenset({UNSTACK, STACK})  # views of layers, and copies that no choice avoids
PRODUCTS = frozenset(
    {
        aten.mm.default, aten.bmm.default, aten.convolution.default,
        aten.convolution_backward.default, aten.mv.default, aten.dot.default, aten.addmm.default,
        aten.baddbmm.default, aten.addmv.default,
    }
)  # fmt: skip


def is_product(target: Any) -> bool:
    return target in PRODUCTS or "scaled_dot_product" in str(target)
