"""Grouped matmuls, as of experts: each group of rows is multiplied by its own matrix.
``torch._grouped_mm`` for all dtypes and strides, and for a rank that holds some of the groups or
some of the rows.

torch's kernel takes no float64 and no expanded gradients on CPU, and its shape function takes
bfloat16 only. Rows of no group are zero here; torch leaves them undefined.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ftp.ops.define import define, register_fake

aten = torch.ops.aten
# ``offs``: the end of each group.
GROUPED_MM = define(
    "grouped_mm(Tensor a, Tensor b, Tensor offs, ScalarType? out_dtype=None) -> Tensor"
)
# ``starts``, ``ends``: of the rank's groups; ``groups``: the number of all groups.
GROUPED_MM_PART = define(
    "grouped_mm_part"
    "(Tensor a, Tensor b, Tensor starts, Tensor ends, int groups, ScalarType? out_dtype=None)"
    " -> Tensor"
)


def recorded(
    a: Tensor,
    b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """The op that a trace records for ``torch._grouped_mm``."""
    if bias is not None or (offs is None and out_dtype is not None):
        return aten._grouped_mm.default(a, b, offs, bias, out_dtype)
    return torch.bmm(a, b) if offs is None else GROUPED_MM(a, b, offs, out_dtype)


def as_matmuls(
    a: Tensor,
    b: Tensor,
    offs: Tensor,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """The same result by masked matmuls of all rows with every matrix; for proofs."""
    assert bias is None
    ends = offs.to(torch.int64).cummax(0).values
    starts = torch.cat([ends.new_zeros(1), ends[:-1]])
    rows = a.shape[1] if a.ndim == b.ndim else a.shape[0] if a.ndim == 2 else b.shape[1]
    at = torch.arange(rows, device=a.device)
    has = (at >= starts[:, None]) & (at < ends[:, None])  # (groups, rows)
    groups = offs.shape[0]
    if a.ndim == b.ndim:
        found = torch.bmm(_masked(has[:, None], a), b.expand(groups, *b.shape))
    elif a.ndim == 2:
        found = _masked(has[..., None], torch.bmm(a.expand(groups, *a.shape), b)).sum(0)
    else:
        found = _masked(has[:, None], torch.bmm(a, b.expand(groups, *b.shape))).sum(0)
    return found if out_dtype is None else found.to(out_dtype)


def _masked(mask: Tensor, x: Tensor) -> Tensor:
    return torch.where(mask, x, torch.zeros((), dtype=x.dtype, device=x.device))


@torch.library.impl("ftp::grouped_mm", "CompositeExplicitAutograd")
def _grouped_mm(a: Tensor, b: Tensor, offs: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
    # A group whose end is before the end of the group before it has no rows.
    bounds = torch.nn.functional.pad(offs, (1, 0)).cummax(0).values
    return _part(a, b, bounds[:-1], bounds[1:], offs.shape[0], out_dtype)


@register_fake("ftp::grouped_mm")
def _shape(a: Tensor, b: Tensor, offs: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
    return _fake_part(a, b, offs, offs, 0, out_dtype)


def _part(
    a: Tensor,
    b: Tensor,
    starts: Tensor,
    ends: Tensor,
    groups: int,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    out = _fake_part(a, b, starts, ends, groups, out_dtype)
    dim = 0 if a.ndim == 2 else 1  # the dim that groups divide, if the result has no dim of groups
    filled = 0
    for i, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        if start >= end:
            if out.ndim == 3:
                out[i].zero_()
            continue
        rows = slice(start, end)
        if out.ndim == 2:
            if start > filled:
                out.narrow(dim, filled, start - filled).zero_()
            filled = max(filled, end)
        left = a[i] if a.ndim == 3 else a[rows] if b.ndim == 3 else a[:, rows]
        right = b[i] if b.ndim == 3 else b[:, rows] if a.ndim == 3 else b[rows]
        into = out[i] if out.ndim == 3 else out[rows] if a.ndim == 2 else out[:, rows]
        if out.dtype == a.dtype and into.is_contiguous():
            torch.mm(left, right, out=into)
        else:
            into.copy_(left.to(out.dtype) @ right.to(out.dtype))
    if out.ndim == 2:
        out.narrow(dim, filled, out.shape[dim] - filled).zero_()
    return out


torch.library.impl("ftp::grouped_mm_part", "CompositeExplicitAutograd", _part)


def _fake_part(
    a: Tensor,
    b: Tensor,
    starts: Tensor,
    ends: Tensor,
    groups: int,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    torch._check(
        {a.ndim, b.ndim} <= {2, 3} and a.ndim + b.ndim < 6 and a.dtype == b.dtype,
        lambda: (
            f"grouped_mm takes matrices of one dtype, not {a.dtype} {tuple(a.shape)} and"
            f" {b.dtype} {tuple(b.shape)}"
        ),
    )
    for x in (a, b):
        torch._check(
            x.ndim == 2 or x.shape[0] == starts.shape[0],
            lambda x=x: f"grouped_mm has {x.shape[0]} matrices and {starts.shape[0]} groups",
        )
    torch._check(
        a.shape[-1] == b.shape[-2],
        lambda: f"grouped_mm of shapes {tuple(a.shape)} and {tuple(b.shape)}",
    )
    grouped = [starts.shape[0]] if a.ndim == b.ndim else []
    return a.new_empty([*grouped, a.shape[-2], b.shape[-1]], dtype=out_dtype)


register_fake("ftp::grouped_mm_part", _fake_part)


@register_flop_formula(torch.ops.ftp.grouped_mm)
def _flops(a: Any, b: Any, *_: Any, out_val: Any = None, **__: Any) -> int:
    """FLOPs: each row, or each term of a sum, belongs to one group."""
    return 2 * a[-2] * a[-1] * b[-1]


@register_flop_formula(torch.ops.ftp.grouped_mm_part)
def _part_flops(
    a: Any, b: Any, starts: Any, ends: Any, groups: int, *_: Any, out_val: Any = None, **__: Any
) -> int:
    """FLOPs, as if groups were of equal size."""
    return 2 * a[-2] * a[-1] * b[-1] * starts[0] // max(groups, 1)
