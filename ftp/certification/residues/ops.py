"""Ops on values of a residue field: arithmetic, sums and exponentials."""

import math
from collections.abc import Sequence
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor

from ftp.certification.residues import arithmetic as ar
from ftp.certification.residues.call import FUNCTIONS, ResidueCall, dims_of, op, reshaped
from ftp.certification.residues.value import Blind, Planes, made, move, separate
from ftp.certification.residues.words import words

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


@op("square")
def _square(c: ResidueCall, a: Planes) -> Planes:
    return ar.multiply(c.field, a, a)


FUNCTIONS |= {
    "reciprocal": lambda c, a: ar.reciprocal(c.field, a),
    "neg": lambda c, a: ar.negate(c.field, a),
    "addcmul": lambda c, x, a, b, value=1: _add(c, x, _mul(c, _mul(c, a, b), value)),
    "addcdiv": lambda c, x, a, b, value=1: _add(c, x, _mul(c, _div(c, a, b), value)),
    "lerp": lambda c, a, b, weight: _add(c, a, _mul(c, _sub(c, b, a), weight)),
    "sqrt": lambda c, a: ar.root(c.field, a),
}


@op("pow")
def _pow(c: ResidueCall, a: Any, exponent: Any) -> Planes:
    if isinstance(exponent, int | float) and isinstance(a, Planes):
        if exponent == int(exponent):
            return ar.integer_power(c.field, a, int(exponent))
        if 2 * exponent == int(2 * exponent):
            return ar.integer_power(c.field, ar.root(c.field, a), int(2 * exponent))
        return ar.function(c.field, f"pow {exponent}", a)
    return ar.function(c.field, "pow", *torch_broadcast(c.lift(a), c.lift(exponent)))


@op("rsqrt")
def _rsqrt(c: ResidueCall, a: Planes) -> Planes:
    return ar.reciprocal(c.field, ar.root(c.field, a))


@op("mm", "bmm", "mv", "dot", "matmul")
def _product(c: ResidueCall, a: Planes, b: Planes) -> Planes:
    a, b = c.lift(a), c.lift(b)
    left = reshaped(a, (1, *a.shape)) if len(a.shape) == 1 else a
    right = reshaped(b, (*b.shape, 1)) if len(b.shape) == 1 else b
    found = ar.matmul_of_values(c.field, left, right)
    shape = list(found.shape)
    if len(b.shape) == 1:
        shape = shape[:-1]
    if len(a.shape) == 1:
        shape = shape[:-1] if len(b.shape) == 2 and len(shape) < 2 else shape[1:]
    return reshaped(found, shape)


@op("addmm", "baddbmm", "addmv")
def _addmm(
    c: ResidueCall, bias: Any, a: Planes, b: Planes, beta: Any = 1, alpha: Any = 1
) -> Planes:
    return _add(c, _mul(c, bias, beta), _mul(c, _product(c, a, b), alpha))


# Sums.


@op("sum")
def _sum(c: ResidueCall, x: Any, dim: Any = None, keepdim: bool = False) -> Planes:
    x = c.lift(x)
    if not x.shape:
        return separate(x)
    return ar.summed(c.field, lambda p: p.sum(dims_of(x, dim), keepdim), x)


@op("mean")
def _mean(c: ResidueCall, x: Any, dim: Any = None, keepdim: bool = False) -> Planes:
    x = c.lift(x)
    count = math.prod(x.shape[d] for d in dims_of(x, dim)) if x.shape else 1
    return ar.scaled(c.field, _sum(c, x, dim, keepdim), 1, count)


@op("cumsum")
def _cumsum(c: ResidueCall, x: Planes, dim: int) -> Planes:
    return ar.summed(c.field, lambda p: p.cumsum(dim), c.lift(x))


@op("var_mean")
def _var_mean(
    c: ResidueCall, x: Planes, dim: Any = None, correction: Any = 1, keepdim: bool = False
) -> tuple[Planes, Planes]:
    count = math.prod(x.shape[d] for d in dims_of(x, dim))
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
    var, mean = _var_mean(c, x, list(range(-len(shape), 0)), 0, True)
    scale = _rsqrt(c, _add(c, var, eps))
    out = _mul(c, _sub(c, x, mean), scale)
    out = out if weight is None else _mul(c, out, weight)
    return out if bias is None else _add(c, out, bias), mean, scale


@op("_fused_rms_norm")
def _rms_norm(c: ResidueCall, x: Planes, shape: Any, weight: Any, eps: Any) -> Any:
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    mean = _mean(c, _square(c, x), list(range(-len(shape), 0)), True)
    scale = _rsqrt(c, _add(c, mean, eps))
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
    """The value of sums of planes."""
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
def _prod(c: ResidueCall, x: Planes, dim: Any = None, keepdim: bool = False) -> Planes:
    if dim is None:
        x, dim = reshaped(x, (-1,)), 0
    dims = sorted(
        (d % len(x.shape) for d in ([dim] if isinstance(dim, int) else dim)), reverse=True
    )
    for d in dims:
        parts = [move(lambda p, i=i, d=d: p.select(d, i), [x]) for i in range(x.shape[d])]
        x = reduce(partial(ar.multiply, c.field), parts) if parts else c.lift(1)
    for d in reversed(dims if keepdim else []):
        x = move(lambda p, d=d: p.unsqueeze(d), [x])
    return x


# Exponentials and their kin.


@op("exp")
def _exp(c: ResidueCall, x: Any) -> Planes:
    return ar.exponential(c.field, c.lift(x))


@op("log")
def _log(c: ResidueCall, x: Any) -> Planes:
    return ar.natural_logarithm(c.field, c.lift(x))


@op("sigmoid")
def _sigmoid(c: ResidueCall, x: Planes) -> Planes:
    return ar.reciprocal(c.field, _add(c, _exp(c, ar.negate(c.field, x)), 1))


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


FUNCTIONS |= {
    "expm1": lambda c, x: _sub(c, _exp(c, x), 1),
    "log1p": lambda c, x: _log(c, _add(c, x, 1)),
    "silu": lambda c, x: _mul(c, x, _sigmoid(c, x)),
    "sigmoid_backward": lambda c, grad, out: _mul(c, grad, _mul(c, out, _rsub(c, out, 1))),
    "tanh_backward": lambda c, grad, out: _mul(c, grad, _rsub(c, _square(c, out), 1)),
}


@op("silu_backward")
def _silu_backward(c: ResidueCall, grad: Planes, x: Planes) -> Planes:
    gate = _sigmoid(c, x)
    slope = _add(c, _mul(c, x, _rsub(c, gate, 1)), 1)
    return _mul(c, grad, _mul(c, gate, slope))


def _elementwise(*names: str) -> None:
    """Register unknown functions."""
    for name in names:
        FUNCTIONS[name] = lambda c, *xs, name=name, **kw: ar.function(
            c.field,
            f"{name} {[x for x in xs if not isinstance(x, Planes | Tensor)]} {sorted(kw.items())}",
            *torch_broadcast(*(c.lift(x) for x in xs if isinstance(x, Planes | Tensor))),
        )


def torch_broadcast(*xs: Planes) -> list[Planes]:
    shape = torch.broadcast_shapes(*(x.shape for x in xs))
    return [Planes([p.expand(shape) for p in x.planes], x.window, x.dtype) for x in xs]


_elementwise(
    *words(
        """
        acos acosh asin asinh atan atan2 atanh ceil celu copysign cos cosh digamma elu elu_backward
        erf erfc erfinv exp2 floor fmod frac hardsigmoid hardswish hypot i0 lgamma
        log_sigmoid_forward log10 log2 mish remainder round selu sin sinh softplus
        softplus_backward special_erfcx tan trunc
        """
    )
)
