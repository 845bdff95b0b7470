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


@op("masked_fill")
def _masked_fill(c: ResidueCall, x: Planes, mask: Tensor, value: Any) -> Planes:
    return ar.chosen(mask, c.lift(value), x)


@op("constant_pad_nd")
def _pad(c: ResidueCall, x: Planes, pad: Sequence[int], value: Any = 0) -> Planes:
    fill = c.lift(value)
    planes = [
        aten.constant_pad_nd(p, pad, int(v)) for p, v in zip(x.planes, fill.planes, strict=True)
    ]
    return Planes(planes, x.window & x.window, x.dtype)


@op("scatter")
def _scatter(c: ResidueCall, x: Any, dim: int, index: Tensor, source: Any, **kwargs: Any) -> Planes:
    if kwargs:
        raise Blind(f"{c.target} with {kwargs}")
    x, source = c.lift(x), c.lift(source)
    if not source.shape:
        source = Planes([p.expand(index.shape) for p in source.planes], source.window, x.dtype)
    return move(lambda p, s: p.scatter(dim, index, s), [x, source])


@op("fill", "full_like")
def _fill(c: ResidueCall, x: Planes, value: Any, **_: Any) -> Planes:
    found = c.lift(value)
    return Planes([p.expand(x.shape).clone() for p in found.planes], found.window, c.dtype)


@op("zeros_like", "zero")
def _zeros_like(c: ResidueCall, x: Planes, **_: Any) -> Planes:
    return _fill(c, x, 0)


@op("ones_like")
def _ones_like(c: ResidueCall, x: Planes, **_: Any) -> Planes:
    return _fill(c, x, 1)


@op("new_zeros", "new_ones", "new_full")
def _new(c: ResidueCall, x: Any, size: Sequence[int], value: Any = None, **_: Any) -> Planes:
    if value is None:
        value = int(c.target._schema.name.endswith("ones"))
    found = c.lift(value)
    return Planes([p.expand(tuple(size)).clone() for p in found.planes], found.window, c.dtype)


@op("copy")
def _copy(c: ResidueCall, x: Planes, source: Any, *_: Any) -> Planes:
    source = c.lift(source)
    source = rounded(c, source, x.dtype)
    return Planes([p.expand(x.shape).clone() for p in source.planes], source.window, x.dtype)


@op("_to_copy", "to", "convert_element_type")
def _to_copy(c: ResidueCall, x: Any, *_: Any, **__: Any) -> Any:
    if not c.dtype.is_floating_point:
        if c.dtype is torch.bool:
            return FUNCTIONS["ne"](c, x, 0)
        raise Blind(f"{c.target}, which rounds numbers to integers")
    return rounded(c, separate(c.lift(x)), c.dtype)


def rounded(c: ResidueCall, x: Planes, dtype: torch.dtype) -> Planes:
    """A conversion to a dtype of fewer digits or a smaller range is a function without algebra."""
    if x.dtype == dtype or not x.dtype.is_floating_point:
        return Planes(x.planes, x.window, dtype)
    a, b = torch.finfo(x.dtype), torch.finfo(dtype)
    if b.eps <= a.eps and b.max >= a.max:
        return Planes(x.planes, x.window, dtype)
    found = ar.function(c.field, f"round to {dtype}", x)
    return Planes(found.planes, found.window, dtype)


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
