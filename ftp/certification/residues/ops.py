"""Ops on values of a residue field, by the name of the op; one function for all its overloads.

Longer than other files because it is one table: every op of which the proofs know something.

Each function takes a ``ResidueCall`` and the op's arguments. Operands may be values, numbers, or
tensors of integers, whose elements are known numbers.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ftp.certification.residues import arithmetic as ar
from ftp.certification.residues.field import Field
from ftp.certification.residues.value import (
    Blind,
    Planes,
    embed,
    made,
    move,
    order,
    separate,
)
from ftp.certification.residues.words import words

aten = torch.ops.aten


@dataclass(frozen=True)
class ResidueCall:
    """A call of an op: the field, the op, and the dtype of its first result."""

    field: Field
    target: Any
    dtype: torch.dtype

    def lift(self, x: Any) -> Planes:
        """A value, of numbers or integers where they are known."""
        if isinstance(x, Planes):
            return x
        if isinstance(x, bool | int | float):
            x = torch.tensor(x, dtype=torch.float64 if isinstance(x, float) else torch.int64)
        return embed(self.field, x, self.dtype)


FUNCTIONS: dict[str, Callable[..., Any]] = {}


def op(*names: str):
    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        FUNCTIONS.update(dict.fromkeys(names, function))
        return function

    return register


# Arithmetic.


@op("add")
def _add(c: ResidueCall, a: Any, b: Any, alpha: Any = 1) -> Planes:
    b = c.lift(b)
    return ar.add(c.field, c.lift(a), b if alpha == 1 else _times(c, b, alpha))


@op("sub", "subtract")
def _sub(c: ResidueCall, a: Any, b: Any, alpha: Any = 1) -> Planes:
    return _add(c, a, ar.negate(c.field, c.lift(b)), alpha)


@op("rsub")
def _rsub(c: ResidueCall, a: Any, b: Any, alpha: Any = 1) -> Planes:
    return _sub(c, b, a, alpha)


@op("mul", "multiply")
def _mul(c: ResidueCall, a: Any, b: Any) -> Planes:
    return _times(c, c.lift(a), b)


def _times(c: ResidueCall, a: Planes, b: Any) -> Planes:
    if isinstance(b, bool | int):
        return ar.scaled(c.field, a, int(b)) if b != -1 else ar.negate(c.field, a)
    return ar.multiply(c.field, a, c.lift(b))


@op("div", "true_divide", "divide")
def _div(c: ResidueCall, a: Any, b: Any, rounding_mode: str | None = None) -> Planes:
    if rounding_mode is not None:
        raise Blind(f"{c.target}, which rounds")
    if isinstance(b, int) and b:
        return ar.scaled(c.field, c.lift(a), 1, b)
    return ar.multiply(c.field, c.lift(a), ar.reciprocal(c.field, c.lift(b)))


@op("reciprocal")
def _reciprocal(c: ResidueCall, a: Planes) -> Planes:
    return ar.reciprocal(c.field, a)


@op("neg")
def _neg(c: ResidueCall, a: Planes) -> Planes:
    return ar.negate(c.field, a)


@op("addcmul")
def _addcmul(c: ResidueCall, x: Any, a: Any, b: Any, value: Any = 1) -> Planes:
    return _add(c, x, _mul(c, _mul(c, a, b), value))


@op("addcdiv")
def _addcdiv(c: ResidueCall, x: Any, a: Any, b: Any, value: Any = 1) -> Planes:
    return _add(c, x, _mul(c, _div(c, a, b), value))


@op("lerp")
def _lerp(c: ResidueCall, a: Any, b: Any, weight: Any) -> Planes:
    return _add(c, a, _mul(c, _sub(c, b, a), weight))


@op("square")
def _square(c: ResidueCall, a: Planes) -> Planes:
    return ar.multiply(c.field, a, a)


@op("pow")
def _pow(c: ResidueCall, a: Any, exponent: Any) -> Planes:
    if isinstance(exponent, int | float) and isinstance(a, Planes):
        if exponent == int(exponent):
            return ar.integer_power(c.field, a, int(exponent))
        if 2 * exponent == int(2 * exponent):
            return ar.integer_power(c.field, ar.root(c.field, a), int(2 * exponent))
        return ar.function(c.field, f"pow {exponent}", a)
    return ar.function(c.field, "pow", *torch_broadcast(c.lift(a), c.lift(exponent)))


@op("sqrt")
def _sqrt(c: ResidueCall, a: Planes) -> Planes:
    return ar.root(c.field, a)


@op("rsqrt")
def _rsqrt(c: ResidueCall, a: Planes) -> Planes:
    return ar.reciprocal(c.field, ar.root(c.field, a))


@op("mm", "bmm", "mv", "dot", "matmul")
def _product(c: ResidueCall, a: Planes, b: Planes) -> Planes:
    a, b = c.lift(a), c.lift(b)
    left = _reshaped(c, a, (1, *a.shape)) if len(a.shape) == 1 else a
    right = _reshaped(c, b, (*b.shape, 1)) if len(b.shape) == 1 else b
    found = ar.matmul_of_values(c.field, left, right)
    shape = list(found.shape)
    if len(b.shape) == 1:
        shape = shape[:-1]
    if len(a.shape) == 1:
        shape = shape[:-1] if len(b.shape) == 2 and len(shape) < 2 else shape[1:]
    return _reshaped(c, found, shape)


def _reshaped(c: ResidueCall, a: Planes, shape: Sequence[int]) -> Planes:
    return move(c.field, lambda x: x.reshape(tuple(shape)), [a])


@op("addmm", "baddbmm", "addmv")
def _addmm(
    c: ResidueCall, bias: Any, a: Planes, b: Planes, beta: Any = 1, alpha: Any = 1
) -> Planes:
    return _add(c, _mul(c, bias, beta), _mul(c, _product(c, a, b), alpha))


# Sums.


def _dims(x: Planes, dim: Any) -> list[int]:
    if dim is None or dim == []:
        return list(range(len(x.shape)))
    return [d % len(x.shape) if x.shape else 0 for d in ([dim] if isinstance(dim, int) else dim)]


@op("sum")
def _sum(
    c: ResidueCall, x: Any, dim: Any = None, keepdim: bool = False, dtype: Any = None
) -> Planes:
    x = c.lift(x)
    if not x.shape:
        return separate(x)
    return ar.summed(c.field, lambda p: p.sum(_dims(x, dim), keepdim), x)


@op("mean")
def _mean(
    c: ResidueCall, x: Any, dim: Any = None, keepdim: bool = False, dtype: Any = None
) -> Planes:
    x = c.lift(x)
    count = math.prod(x.shape[d] for d in _dims(x, dim)) if x.shape else 1
    return ar.scaled(c.field, _sum(c, x, dim, keepdim), 1, count)


@op("cumsum")
def _cumsum(c: ResidueCall, x: Planes, dim: int, dtype: Any = None) -> Planes:
    return ar.summed(c.field, lambda p: p.cumsum(dim), c.lift(x))


@op("var_mean")
def _var_mean(
    c: ResidueCall, x: Planes, dim: Any = None, correction: Any = 1, keepdim: bool = False
) -> tuple[Planes, Planes]:
    count = math.prod(x.shape[d] for d in _dims(x, dim))
    mean = _mean(c, x, dim, True)
    centred = _sub(c, x, mean)
    total = _sum(c, _square(c, centred), dim, keepdim)
    correction = 1 if correction is None else correction
    var = ar.scaled(c.field, total, 1, count - int(correction))
    return var, mean if keepdim else _mean(c, x, dim)


@op("var")
def _var(
    c: ResidueCall, x: Planes, dim: Any = None, correction: Any = 1, keepdim: bool = False
) -> Planes:
    return _var_mean(c, x, dim, correction, keepdim)[0]


@op("native_layer_norm")
def _layer_norm(c: ResidueCall, x: Planes, shape: Any, weight: Any, bias: Any, eps: float) -> Any:
    dims = list(range(len(x.shape) - len(shape), len(x.shape)))
    var, mean = _var_mean(c, x, dims, 0, True)
    scale = _rsqrt(c, _add(c, var, eps))
    out = _mul(c, _sub(c, x, mean), scale)
    out = out if weight is None else _mul(c, out, weight)
    return out if bias is None else _add(c, out, bias), mean, scale


@op("_fused_rms_norm")
def _rms_norm(c: ResidueCall, x: Planes, shape: Any, weight: Any, eps: Any) -> Any:
    dims = list(range(len(x.shape) - len(shape), len(x.shape)))
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    scale = _rsqrt(c, _add(c, _mean(c, _square(c, x), dims, True), eps))
    out = _mul(c, x, scale)
    return out if weight is None else _mul(c, out, weight), scale


@op("index_add")
def _index_add(
    c: ResidueCall, x: Any, dim: int, index: Tensor, source: Any, alpha: Any = 1
) -> Planes:
    x, source = c.lift(x), _mul(c, source, alpha)
    both = zip(x.planes, source.planes, strict=True)
    return _modular(c, x, source, [p.index_add(dim, index, s) for p, s in both])


@op("scatter_add")
def _scatter_add(c: ResidueCall, x: Any, dim: int, index: Tensor, source: Any) -> Planes:
    x, source = c.lift(x), c.lift(source)
    both = zip(x.planes, source.planes, strict=True)
    return _modular(c, x, source, [p.scatter_add(dim, index, s) for p, s in both])


@op("index_put", "_unsafe_index_put", "_index_put_impl")
def _index_put(
    c: ResidueCall, x: Any, indices: Any, values: Any, accumulate: bool = False
) -> Planes:
    x, values = c.lift(x), c.lift(values)
    both = zip(x.planes, values.planes, strict=True)
    found = [p.index_put(tuple(indices), v, accumulate) for p, v in both]
    return _modular(c, x, values, found)


def _modular(c: ResidueCall, a: Planes, b: Planes, planes: Sequence[Tensor]) -> Planes:
    """Sums of planes as the planes of a sum."""
    f = c.field
    residues = [x % p for x, p in zip(planes, f.primes, strict=False)]
    sign = [s % 2 for s in planes[f.levels : 2 * f.levels]] if f.has_logs else None
    infinite = torch.sign(planes[-1]) if f.has_infinities else None
    return made(f, residues, a.window & b.window, a.dtype, sign, infinite)


@op("embedding_dense_backward")
def _embedding_backward(
    c: ResidueCall, grad: Planes, index: Tensor, rows: int, padding: int, scale: bool
) -> Planes:
    if scale:
        raise Blind(f"{c.target} with scale_grad_by_freq")
    width = grad.shape[-1]
    flat, kept = index.reshape(-1), (index.reshape(-1) != padding)[:, None].to(torch.int64)
    sums = [
        torch.zeros(rows, width, dtype=torch.int64).index_add(0, flat, p.reshape(-1, width) * kept)
        for p in grad.planes
    ]
    return _modular(c, grad, grad, sums)


@op("prod")
def _prod(
    c: ResidueCall, x: Planes, dim: Any = None, keepdim: bool = False, dtype: Any = None
) -> Planes:
    if dim is None:
        x, dim = _reshaped(c, x, (-1,)), 0
    parts = [move(c.field, lambda p, i=i: p.select(dim, i), [x]) for i in range(x.shape[dim])]
    found = c.lift(1) if not parts else parts[0]
    for part in parts[1:]:
        found = ar.multiply(c.field, found, part)
    return move(c.field, lambda p: p.unsqueeze(dim), [found]) if keepdim else found


# Exponentials and their kin.


@op("exp")
def _exp(c: ResidueCall, x: Any) -> Planes:
    return ar.exponential(c.field, c.lift(x))


@op("expm1")
def _expm1(c: ResidueCall, x: Any) -> Planes:
    return _sub(c, _exp(c, x), 1)


@op("log")
def _log(c: ResidueCall, x: Any) -> Planes:
    return ar.natural_logarithm(c.field, c.lift(x))


@op("log1p")
def _log1p(c: ResidueCall, x: Any) -> Planes:
    return _log(c, _add(c, x, 1))


@op("sigmoid")
def _sigmoid(c: ResidueCall, x: Planes) -> Planes:
    return ar.reciprocal(c.field, _add(c, _exp(c, _neg(c, x)), 1))


@op("silu")
def _silu(c: ResidueCall, x: Planes) -> Planes:
    return _mul(c, x, _sigmoid(c, x))


@op("tanh")
def _tanh(c: ResidueCall, x: Planes) -> Planes:
    twice = _exp(c, _mul(c, x, 2))
    return _div(c, _sub(c, twice, 1), _add(c, twice, 1))


@op("logsumexp")
def _logsumexp(c: ResidueCall, x: Planes, dim: Any, keepdim: bool = False) -> Planes:
    return _log(c, _sum(c, _exp(c, x), dim, keepdim))


@op("_softmax", "_safe_softmax")
def _softmax(c: ResidueCall, x: Planes, dim: int, *_: Any, **__: Any) -> Planes:
    terms = _exp(c, x)
    return _div(c, terms, _sum(c, terms, dim, True))


@op("_log_softmax")
def _log_softmax(c: ResidueCall, x: Planes, dim: int, *_: Any) -> Planes:
    return _sub(c, x, _logsumexp(c, x, dim, True))


@op("_softmax_backward_data")
def _softmax_backward(c: ResidueCall, grad: Planes, out: Planes, dim: int, *_: Any) -> Planes:
    weighted = _mul(c, grad, out)
    return _sub(c, weighted, _mul(c, out, _sum(c, weighted, dim, True)))


@op("_log_softmax_backward_data")
def _log_softmax_backward(c: ResidueCall, grad: Planes, out: Planes, dim: int, *_: Any) -> Planes:
    return _sub(c, grad, _mul(c, _exp(c, out), _sum(c, grad, dim, True)))


@op("sigmoid_backward")
def _sigmoid_backward(c: ResidueCall, grad: Planes, out: Planes) -> Planes:
    return _mul(c, grad, _mul(c, out, _rsub(c, out, 1)))


@op("tanh_backward")
def _tanh_backward(c: ResidueCall, grad: Planes, out: Planes) -> Planes:
    return _mul(c, grad, _rsub(c, _square(c, out), 1))


@op("silu_backward")
def _silu_backward(c: ResidueCall, grad: Planes, x: Planes) -> Planes:
    gate = _sigmoid(c, x)
    slope = _add(c, _mul(c, x, _rsub(c, gate, 1)), 1)
    return _mul(c, grad, _mul(c, gate, slope))


def _elementwise(*names: str) -> None:
    """Functions without algebra."""
    for name in names:
        FUNCTIONS[name] = lambda c, *xs, name=name, **kw: ar.function(
            c.field,
            f"{name} {[x for x in xs if not isinstance(x, Planes | Tensor)]} {sorted(kw.items())}",
            *torch_broadcast(*(c.lift(x) for x in xs if isinstance(x, Planes | Tensor))),
        )


def torch_broadcast(*xs: Planes) -> list[Planes]:
    shape = torch.broadcast_shapes(*(x.shape for x in xs))
    return [Planes([p.expand(shape) for p in x.planes], x.window, x.dtype) for x in xs]


_elementwise("acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "ceil", "celu", "cos")
_elementwise("cosh", "digamma", "elu", "erf", "erfc", "erfinv", "exp2", "floor", "fmod", "frac")
_elementwise("hardsigmoid", "hardswish", "hypot", "i0", "lgamma", "log10", "log2", "mish")
_elementwise(
    "remainder", "round", "selu", "sin", "sinh", "special_erfcx", "tan", "trunc", "copysign"
)
_elementwise("log_sigmoid_forward", "softplus", "softplus_backward", "elu_backward")


# Order.


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
    return ar.chosen(c.field, FUNCTIONS["gt"](c, x, threshold), grad, c.lift(0))


@op("abs")
def _abs(c: ResidueCall, x: Planes) -> Planes:
    return ar.chosen(c.field, FUNCTIONS["lt"](c, x, 0), _neg(c, x), x)


@op("sign", "sgn")
def _sign(c: ResidueCall, x: Planes) -> Planes:
    below, above = FUNCTIONS["lt"](c, x, 0), FUNCTIONS["gt"](c, x, 0)
    return c.lift(above.to(torch.int64) - below.to(torch.int64))


@op("amax", "amin")
def _amax(c: ResidueCall, x: Planes, dim: Any = (), keepdim: bool = False) -> Planes:
    largest = c.target._schema.name.endswith("max")
    dims = sorted(_dims(x, list(dim) if not isinstance(dim, int) else dim), reverse=True)
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
    return ar.extreme(c.field, _reshaped(c, x, (-1,)), 0, False, largest)[0]


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
    return move(c.field, lambda p: p.gather(dim, at), [x]), at


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
    return move(c.field, lambda p: p.gather(dim, at), [x]), at


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


# Data movement and constants.


@op("where")
def _where(c: ResidueCall, condition: Tensor, a: Any, b: Any) -> Planes:
    return ar.chosen(c.field, condition, c.lift(a), c.lift(b))


@op("masked_fill")
def _masked_fill(c: ResidueCall, x: Planes, mask: Tensor, value: Any) -> Planes:
    return ar.chosen(c.field, mask, c.lift(value), x)


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
    return move(c.field, lambda p, s: p.scatter(dim, index, s), [x, source])


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
    source = _rounded(c, source, x.dtype)
    return Planes([p.expand(x.shape).clone() for p in source.planes], source.window, x.dtype)


@op("_to_copy", "to", "convert_element_type")
def _to_copy(c: ResidueCall, x: Any, *_: Any, **__: Any) -> Any:
    if not c.dtype.is_floating_point:
        if c.dtype is torch.bool:
            return FUNCTIONS["ne"](c, x, 0)
        raise Blind(f"{c.target}, which rounds numbers to integers")
    return _rounded(c, separate(c.lift(x)), c.dtype)


def _rounded(c: ResidueCall, x: Planes, dtype: torch.dtype) -> Planes:
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
KNOWN = frozenset(FUNCTIONS) | MOVEMENTS
