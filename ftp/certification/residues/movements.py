"""Ops on values of a residue field that move, choose, fill or convert them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ftp.certification.residues import arithmetic as ar
from ftp.certification.residues.call import FUNCTIONS, ResidueCall, op
from ftp.certification.residues.value import Blind, Planes, move, separate
from ftp.certification.residues.words import words

aten = torch.ops.aten


@op("where")
def _where(c: ResidueCall, condition: Tensor, a: Any, b: Any) -> Planes:
    return ar.chosen(condition, c.lift(a), c.lift(b))


FUNCTIONS["masked_fill"] = lambda c, x, mask, value: _where(c, mask, value, x)


@op("constant_pad_nd")
def _pad(c: ResidueCall, x: Planes, pad: Sequence[int], value: Any = 0) -> Planes:
    fill = c.lift(value)
    planes = [
        aten.constant_pad_nd(p, pad, int(v)) for p, v in zip(x.planes, fill.planes, strict=True)
    ]
    return Planes(planes, x.window.copy(), x.dtype)


@op("scatter")
def _scatter(c: ResidueCall, x: Any, dim: int, index: Tensor, source: Any, **kwargs: Any) -> Planes:
    if kwargs:
        raise Blind(f"{c.target} with {kwargs}")
    x, source = c.lift(x), c.lift(source)
    if not source.shape:
        source = Planes([p.expand(index.shape) for p in source.planes], source.window, x.dtype)
    return move(lambda p, s: p.scatter(dim, index, s), [x, source])


def _expanded(x: Planes, shape: Sequence[int], dtype: torch.dtype) -> Planes:
    return Planes([p.expand(tuple(shape)).clone() for p in x.planes], x.window, dtype)


@op("fill", "full_like")
def _fill(c: ResidueCall, x: Planes, value: Any, **_: Any) -> Planes:
    return _expanded(c.lift(value), x.shape, c.dtype)


@op("new_full")
def _new_full(c: ResidueCall, x: Any, size: Sequence[int], value: Any, **_: Any) -> Planes:
    return _expanded(c.lift(value), size, c.dtype)


FUNCTIONS |= {
    "zero": lambda c, x: _fill(c, x, 0),
    "zeros_like": lambda c, x, **_: _fill(c, x, 0),
    "ones_like": lambda c, x, **_: _fill(c, x, 1),
    "new_zeros": lambda c, x, size, **_: _new_full(c, x, size, 0),
    "new_ones": lambda c, x, size, **_: _new_full(c, x, size, 1),
}


@op("copy")
def _copy(c: ResidueCall, x: Planes, source: Any, *_: Any) -> Planes:
    return _expanded(rounded(c, c.lift(source), x.dtype), x.shape, x.dtype)


@op("_to_copy", "to", "convert_element_type")
def _to_copy(c: ResidueCall, x: Any, *_: Any, **__: Any) -> Any:
    if not c.dtype.is_floating_point:
        if c.dtype is torch.bool:
            return FUNCTIONS["ne"](c, x, 0)
        raise Blind(f"{c.target}, which rounds numbers to integers")
    return rounded(c, separate(c.lift(x)), c.dtype)


def rounded(c: ResidueCall, x: Planes, dtype: torch.dtype) -> Planes:
    """``x`` in another dtype. Rounding to fewer digits or a smaller range: an unknown function."""
    if x.dtype != dtype and x.dtype.is_floating_point:
        a, b = torch.finfo(x.dtype), torch.finfo(dtype)
        if b.eps > a.eps or b.max < a.max:
            x = ar.function(c.field, f"round to {dtype}", x)
    return Planes(x.planes, x.window, dtype)


MOVEMENTS = words(
    """
    alias detach view _unsafe_view reshape expand permute transpose t squeeze unsqueeze
    slice select narrow diagonal unfold split split_with_sizes unbind chunk clone
    contiguous cat stack flip roll repeat index _unsafe_index gather index_select embedding
    tril triu select_scatter slice_scatter diagonal_scatter lift_fresh lift_fresh_copy lift
    alias_copy expand_copy _reshape_alias index_copy slice_backward select_backward
    diagonal_backward diag_embed take take_along_dim view_copy permute_copy movedim
    broadcast_in_dim
    """
)
