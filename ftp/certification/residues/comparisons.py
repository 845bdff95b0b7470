"""Ops on values of a residue field that compare or sort them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ftp.certification.residues import arithmetic as ar
from ftp.certification.residues.call import FUNCTIONS, ResidueCall, dims_of, op, reshaped
from ftp.certification.residues.value import Planes, move, order


def _compare(compare: Callable[[Tensor, Tensor], Tensor], c: ResidueCall, a: Any, b: Any) -> Tensor:
    return compare(order(c.field, c.lift(a)), order(c.field, c.lift(b)))


for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    FUNCTIONS[_name] = partial(_compare, getattr(torch, _name))


@op("maximum", "fmax")
def _maximum(c: ResidueCall, a: Any, b: Any) -> Planes:
    return ar.larger(c.field, c.lift(a), c.lift(b))


@op("minimum", "fmin")
def _minimum(c: ResidueCall, a: Any, b: Any) -> Planes:
    return ar.smaller(c.field, c.lift(a), c.lift(b))


@op("clamp", "clip")
def _clamp(c: ResidueCall, x: Any, min: Any = None, max: Any = None) -> Planes:
    x = c.lift(x)
    x = x if min is None else _maximum(c, x, min)
    return x if max is None else _minimum(c, x, max)


FUNCTIONS |= {
    "abs": lambda c, x: ar.chosen(FUNCTIONS["lt"](c, x, 0), ar.negate(c.field, x), x),
    "clamp_min": lambda c, x, min: _maximum(c, x, min),
    "clamp_max": lambda c, x, max: _minimum(c, x, max),
    "relu": lambda c, x: _maximum(c, x, 0),
    "logical_not": lambda c, x: FUNCTIONS["eq"](c, x, 0),
    "threshold_backward": lambda c, grad, x, threshold: ar.chosen(
        FUNCTIONS["gt"](c, x, threshold), grad, c.lift(0)
    ),
    "isnan": lambda c, x: torch.zeros(x.shape, dtype=torch.bool),
    "isfinite": lambda c, x: ~_isinf(c, x),
}


@op("sign", "sgn")
def _sign(c: ResidueCall, x: Planes) -> Planes:
    below, above = FUNCTIONS["lt"](c, x, 0), FUNCTIONS["gt"](c, x, 0)
    return c.lift(above.to(torch.int64) - below.to(torch.int64))


@op("amax", "amin")
def _amax(c: ResidueCall, x: Planes, dim: Any = (), keepdim: bool = False) -> Planes:
    largest = c.target._schema.name.endswith("max")
    dims = sorted(dims_of(x, list(dim) if not isinstance(dim, int) else dim), reverse=True)
    for d in dims:
        x, _ = ar.extreme(c.field, x, d, keepdim, largest)
    return x


@op("max", "min")
def _max(c: ResidueCall, x: Planes, dim: Any = None, keepdim: bool = False) -> Any:
    largest = c.target._schema.name.endswith("max")
    if isinstance(dim, int):
        return ar.extreme(c.field, x, dim, keepdim, largest)
    if dim is not None:
        return (_maximum if largest else _minimum)(c, x, dim)
    return ar.extreme(c.field, reshaped(x, (-1,)), 0, False, largest)[0]


@op("argmax", "argmin")
def _argmax(c: ResidueCall, x: Planes, dim: Any = None, keepdim: bool = False) -> Tensor:
    found = getattr(torch, c.target._schema.name.split("::")[1])
    return found(order(c.field, x), dim=dim, keepdim=keepdim)


@op("sort")
def _sort(c: ResidueCall, x: Planes, dim: int = -1, descending: bool = False, **_: Any) -> Any:
    at = _argsort(c, x, dim, descending)
    return move(lambda p: p.gather(dim, at), [x]), at


@op("argsort")
def _argsort(
    c: ResidueCall, x: Planes, dim: int = -1, descending: bool = False, **_: Any
) -> Tensor:
    return order(c.field, x).sort(dim=dim, descending=descending, stable=True).indices


@op("topk")
def _topk(c: ResidueCall, x: Planes, k: int, dim: int = -1, *options: Any, **named: Any) -> Any:
    at = order(c.field, x).topk(k, dim, *options, **named).indices
    return move(lambda p: p.gather(dim, at), [x]), at


@op("isinf")
def _isinf(c: ResidueCall, x: Planes) -> Tensor:
    if not c.field.has_infinities:
        return torch.zeros(x.shape, dtype=torch.bool)
    return x.planes[-1] != 0
