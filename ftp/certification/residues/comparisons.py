"""Ops on values of a residue field that compare or sort them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ftp.certification.residues import arithmetic as ar
from ftp.certification.residues.call import FUNCTIONS, ResidueCall, dims_of, op, reshaped
from ftp.certification.residues.value import Planes, move, order


def _compared(compare: Callable[[Tensor, Tensor], Tensor]):
    def run(c: ResidueCall, a: Any, b: Any) -> Tensor:
        return compare(order(c.field, c.lift(a)), order(c.field, c.lift(b)))

    return run


for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    FUNCTIONS[_name] = _compared(getattr(torch, _name))


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


@op("clamp_min")
def _clamp_min(c: ResidueCall, x: Any, min: Any) -> Planes:
    return _maximum(c, x, min)


@op("clamp_max")
def _clamp_max(c: ResidueCall, x: Any, max: Any) -> Planes:
    return _minimum(c, x, max)


@op("relu")
def _relu(c: ResidueCall, x: Planes) -> Planes:
    return _maximum(c, x, 0)


@op("threshold_backward")
def _threshold_backward(c: ResidueCall, grad: Planes, x: Planes, threshold: Any) -> Planes:
    return ar.chosen(FUNCTIONS["gt"](c, x, threshold), grad, c.lift(0))


@op("abs")
def _abs(c: ResidueCall, x: Planes) -> Planes:
    return ar.chosen(FUNCTIONS["lt"](c, x, 0), ar.negate(c.field, x), x)


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
def _sort(
    c: ResidueCall,
    x: Planes,
    dim: int = -1,
    descending: bool = False,
    *,
    stable: bool = True,
) -> Any:
    at = order(c.field, x).sort(dim=dim, descending=descending, stable=True).indices
    return move(lambda p: p.gather(dim, at), [x]), at


@op("argsort")
def _argsort(
    c: ResidueCall, x: Planes, dim: int = -1, descending: bool = False, **_: Any
) -> Tensor:
    return order(c.field, x).argsort(dim=dim, descending=descending, stable=True)


@op("topk")
def _topk(
    c: ResidueCall,
    x: Planes,
    k: int,
    dim: int = -1,
    largest: bool = True,
    sorted: bool = True,
) -> Any:
    at = order(c.field, x).topk(k, dim, largest, sorted).indices
    return move(lambda p: p.gather(dim, at), [x]), at


@op("isnan")
def _isnan(c: ResidueCall, x: Planes) -> Tensor:
    return torch.zeros(x.shape, dtype=torch.bool)


@op("isinf")
def _isinf(c: ResidueCall, x: Planes) -> Tensor:
    if not c.field.has_infinities:
        return torch.zeros(x.shape, dtype=torch.bool)
    return x.planes[-1] != 0


@op("isfinite")
def _isfinite(c: ResidueCall, x: Planes) -> Tensor:
    return ~_isinf(c, x)


@op("logical_not")
def _logical_not(c: ResidueCall, x: Planes) -> Tensor:
    return FUNCTIONS["eq"](c, x, 0)
