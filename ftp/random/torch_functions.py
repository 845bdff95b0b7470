"""Replacements of torch's random functions, which draw from a key."""

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ftp import random
from ftp.errors import TraceError
from ftp.random.attention_dropout import attention_with_dropout
from ftp.random.distributions import DIGITS


class Keys(Protocol):
    """Where a draw takes its key from; see `Draws`."""

    def next_key(self, what: str) -> Tensor: ...


Drawn = Callable[..., Any]
# Replacement of each of torch's functions: takes the mode, the function and its arguments;
# NotImplemented where nothing is random.
DRAWN: dict[Any, Drawn] = {}


def _draws(*functions: Any) -> Callable[[Drawn], Drawn]:
    def register(drawn: Drawn) -> Drawn:
        DRAWN.update(dict.fromkeys(functions, drawn))
        return drawn

    return register


# Layers.


@_draws(torch.dropout, torch.dropout_, torch.feature_dropout, torch.feature_dropout_)
def _dropout(draws: Keys, func: Any, input: Tensor, p: float, train: bool) -> Any:
    if not train or p == 0:
        return NotImplemented
    dropped = random.bernoulli(draws.next_key(func.__name__), p, _mask_shape(func, input))
    return _given(func, input, input.masked_fill(dropped, 0) * (1 / (1 - p) if p < 1 else 0.0))


@_draws(
    torch.alpha_dropout,
    torch.alpha_dropout_,
    torch.feature_alpha_dropout,
    torch.feature_alpha_dropout_,
)
def _alpha_dropout(draws: Keys, func: Any, input: Tensor, p: float, train: bool) -> Any:
    """Set dropped elements to SELU's least value, then restore mean and variance."""
    if not train or p == 0:
        return NotImplemented
    if p == 1:
        return _given(func, input, input * 0.0)
    least = -1.7580993408473766
    scale = 1 / math.sqrt((least * least * p + 1) * (1 - p))
    dropped = random.bernoulli(draws.next_key(func.__name__), p, _mask_shape(func, input))
    return _given(func, input, input.masked_fill(dropped, least) * scale - scale * p * least)


def _mask_shape(func: Any, input: Tensor) -> tuple[int, ...]:
    """The shape of a dropout mask: one draw per feature for functions of features."""
    is_of_features = "feature" in func.__name__
    return (*input.shape[:2], *(1,) * (input.ndim - 2)) if is_of_features else tuple(input.shape)


def _given(func: Any, input: Tensor, value: Tensor) -> Tensor:
    return input.copy_(value) if func.__name__.endswith("_") else value


@_draws(torch.rrelu, torch.rrelu_)
def _rrelu(
    draws: Keys,
    func: Any,
    input: Tensor,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
    generator: Any = None,
) -> Any:
    if not training or lower == upper:
        return NotImplemented
    slope = random.uniform(
        draws.next_key("rrelu"), tuple(input.shape), input.dtype, low=lower, high=upper
    )
    return _given(func, input, torch.where(input >= 0, input, input * slope))


@_draws(F.scaled_dot_product_attention)
def _attention(
    draws: Keys,
    func: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    if dropout_p == 0:
        return NotImplemented
    if enable_gqa:
        key, value = (t.repeat_interleave(query.shape[-3] // t.shape[-3], -3) for t in (key, value))
    drawn = draws.next_key("scaled_dot_product_attention")
    return attention_with_dropout(
        drawn, query, key, value, attn_mask, dropout_p, is_causal=is_causal, scale=scale
    )


@_draws(torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)
def _recurrent(draws: Keys, func: Any, *args: Any, **kwargs: Any) -> Any:
    """One layer at a time, with dropout between them."""
    # A packed sequence has its batch sizes after the data.
    at = 3 if isinstance(args[3], list | tuple) else 2
    state, weights, has_biases, layers, p, train, *options = args[at - 1 :]
    if not train or p == 0 or layers == 1:
        return NotImplemented
    states = state if isinstance(state, list | tuple) else (state,)
    each, rows = len(weights) // layers, states[0].shape[0] // layers
    x, last = args[0], []
    for layer in range(layers):
        own = tuple(s[layer * rows : (layer + 1) * rows] for s in states)
        x, *new = func(
            x,
            *args[1 : at - 1],
            own if isinstance(state, list | tuple) else own[0],
            weights[layer * each : (layer + 1) * each],
            has_biases,
            1,
            0.0,
            train,
            *options,
            **kwargs,
        )
        last.append(new)
        if layer < layers - 1:
            x = random.dropout(draws.next_key(func.__name__), x, p)
    return (x, *(torch.cat(parts) for parts in zip(*last, strict=True)))


# Tensors.


@_draws(torch.rand, torch.randn)
def _factory(
    draws: Keys,
    func: Any,
    *size: Any,
    generator: Any = None,
    dtype: torch.dtype | None = None,
    **kwargs: Any,
) -> Tensor:
    draw = random.uniform if func is torch.rand else random.normal
    return _made(draw(_key(draws, func, generator), _size(size, kwargs), dtype), kwargs)


@_draws(torch.rand_like, torch.randn_like)
def _like(
    draws: Keys,
    func: Any,
    input: Tensor,
    *,
    generator: Any = None,
    dtype: torch.dtype | None = None,
    **kwargs: Any,
) -> Tensor:
    draw = random.uniform if func is torch.rand_like else random.normal
    return _made(
        draw(_key(draws, func, generator), tuple(input.shape), dtype or input.dtype),
        {"device": input.device, **kwargs},
    )


@_draws(torch.randint)
def _randint(
    draws: Keys,
    func: Any,
    *args: Any,
    generator: Any = None,
    dtype: torch.dtype | None = None,
    low: int = 0,
    **kwargs: Any,
) -> Tensor:
    *bounds, size = (*args, kwargs.pop("size")) if "size" in kwargs else args
    bounds = [*bounds, kwargs.pop("high")] if "high" in kwargs else bounds
    first, last = bounds if len(bounds) == 2 else (low, bounds[0])
    return _made(
        random.randint(
            _key(draws, func, generator), first, last, tuple(size), dtype or torch.int64
        ),
        kwargs,
    )


@_draws(torch.randint_like)
def _randint_like(
    draws: Keys,
    func: Any,
    input: Tensor,
    *bounds: int,
    low: int = 0,
    high: int | None = None,
    dtype: torch.dtype | None = None,
    **kwargs: Any,
) -> Tensor:
    bounds = bounds if high is None else (*bounds, high)
    first, last = bounds if len(bounds) == 2 else (low, bounds[0])
    drawn = random.randint(
        _key(draws, func, kwargs.pop("generator", None)),
        first,
        last,
        tuple(input.shape),
        dtype or input.dtype,
    )
    return _made(drawn, {"device": input.device, **kwargs})


@_draws(torch.randperm)
def _randperm(
    draws: Keys,
    func: Any,
    n: int,
    *,
    generator: Any = None,
    dtype: torch.dtype = torch.int64,
    **kwargs: Any,
) -> Tensor:
    return _made(random.permutation(_key(draws, func, generator), n).to(dtype), kwargs)


@_draws(torch.normal)
def _normal(
    draws: Keys,
    func: Any,
    mean: Any = 0.0,
    std: Any = 1.0,
    size: Any = None,
    *,
    generator: Any = None,
    dtype: Any = None,
    **kwargs: Any,
) -> Tensor:
    given = [t for t in (mean, std) if isinstance(t, Tensor)]
    shape = torch.broadcast_shapes(*(t.shape for t in given)) if size is None else tuple(size)
    dtype = dtype or (given[0].dtype if given else None)
    drawn = random.normal(_key(draws, func, generator), shape, dtype)
    drawn = _made(drawn, {"device": given[0].device}) if given else drawn
    return _made(drawn * std + mean, kwargs)


@_draws(torch.bernoulli, Tensor.bernoulli)
def _bernoulli(
    draws: Keys,
    func: Any,
    input: Tensor,
    p: float | None = None,
    *,
    generator: Any = None,
    out: Tensor | None = None,
) -> Tensor:
    key = _key(draws, func, generator)
    drawn = (
        random.bernoulli(key, input) if p is None else random.bernoulli(key, p, tuple(input.shape))
    ).to(input.dtype)
    return drawn if out is None else out.copy_(drawn)


@_draws(torch.multinomial, Tensor.multinomial)
def _multinomial(
    draws: Keys,
    func: Any,
    input: Tensor,
    num_samples: int,
    replacement: bool = False,
    *,
    generator: Any = None,
    out: Tensor | None = None,
) -> Tensor:
    """Without replacement the largest of logits with Gumbel draws added come in the order of
    drawing one by one.
    """
    key, logits = _key(draws, func, generator), input.log()
    if replacement:
        drawn = random.categorical(key, logits, (num_samples, *input.shape[:-1])).movedim(0, -1)
    else:
        gumbel = -random.exponential(key, tuple(input.shape), input.dtype).log()
        drawn = (logits + gumbel).topk(num_samples, -1).indices
    return drawn if out is None else out.copy_(drawn)


# Tensors in place.


def _in_place(method: Any, draw: Callable[..., Tensor], *named: tuple[str, Any]) -> None:
    """Register ``draw(key, shape, dtype, *numbers)``; the numbers have names and defaults."""

    @_draws(method)
    def drawn(
        draws: Keys, func: Any, x: Tensor, *given: Any, generator: Any = None, **kwargs: Any
    ) -> Tensor:
        numbers = _numbers(given, kwargs, *named)
        return x.copy_(draw(_key(draws, func, generator), tuple(x.shape), x.dtype, *numbers))


def _normal_at(key: Tensor, shape: Any, dtype: Any, mean: float, std: float) -> Tensor:
    return random.normal(key, shape, dtype) * std + mean


_in_place(
    Tensor.uniform_,
    lambda key, shape, dtype, low, high: random.uniform(key, shape, dtype, low=low, high=high),
    ("from", 0.0),
    ("to", 1.0),
)
_in_place(Tensor.normal_, _normal_at, ("mean", 0.0), ("std", 1.0))
_in_place(Tensor.log_normal_, lambda *args: _normal_at(*args).exp(), ("mean", 1.0), ("std", 2.0))
_in_place(
    Tensor.cauchy_,
    lambda key, shape, dtype, median, sigma: (
        ((random.uniform(key, shape, dtype) - 0.5) * math.pi).tan() * sigma + median
    ),
    ("median", 0.0),
    ("sigma", 1.0),
)
_in_place(
    Tensor.exponential_,
    lambda key, shape, dtype, rate: random.exponential(key, shape, dtype) / rate,
    ("lambd", 1.0),
)
_in_place(
    Tensor.geometric_,
    lambda key, shape, _, p: (
        random.exponential(key, shape, torch.float32) / -math.log1p(-p)
    ).ceil(),
    ("p", None),
)
_in_place(Tensor.bernoulli_, lambda key, shape, _, p: random.bernoulli(key, p, shape), ("p", 0.5))


@_draws(Tensor.random_)
def _random_(
    draws: Keys, func: Any, x: Tensor, *bounds: int | None, generator: Any = None, **kwargs: Any
) -> Tensor:
    bounds = (0, *bounds) if len(bounds) == 1 and "to" not in kwargs else bounds
    first, last = _numbers(bounds, kwargs, ("from", 0), ("to", None))
    if last is None and x.dtype in DIGITS:
        last = 2 ** DIGITS[x.dtype] + 1
    elif last is None:
        last = min(torch.iinfo(x.dtype).max + 1, (1 << 63) - 1)
    return x.copy_(random.randint(_key(draws, func, generator), first, last, tuple(x.shape)))


@_draws(
    torch.poisson,
    torch.binomial,
    torch._standard_gamma,  # type: ignore[reportPrivateImportUsage]
    torch._sample_dirichlet,  # type: ignore[reportPrivateImportUsage]
)
def _unknown(draws: Keys, func: Any, *args: Any, **kwargs: Any) -> Tensor:
    draws.next_key(func.__name__)
    raise TraceError(
        f"{func.__name__} cannot be drawn from a key. Draw with ftp.random's functions, and pass"
        " the numbers to the model."
    )


def _key(draws: Keys, func: Any, generator: Any) -> Tensor:
    if generator is not None:
        raise TraceError(
            f"{func.__name__} is given a generator, whose numbers would differ from rank to rank."
            " Leave it out: rng=key decides."
        )
    return draws.next_key(func.__name__)


def _size(size: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...]:
    given = kwargs.pop("size", None)
    if given is not None:
        return tuple(given)
    return tuple(size[0]) if len(size) == 1 and isinstance(size[0], list | tuple) else size


def _made(drawn: Tensor, kwargs: dict[str, Any]) -> Tensor:
    """The drawn tensor with a factory's ``device``, ``out`` and ``requires_grad``."""
    device, out = kwargs.get("device"), kwargs.get("out")
    if device is not None and torch.device(device).type != drawn.device.type:
        drawn = drawn.to(device)
    drawn = drawn if out is None else out.copy_(drawn)
    return drawn.requires_grad_() if kwargs.get("requires_grad") else drawn


def _numbers(given: Sequence[Any], kwargs: dict[str, Any], *named: tuple[str, Any]) -> list[Any]:
    return [
        given[i] if i < len(given) else kwargs.get(name, default)
        for i, (name, default) in enumerate(named)
    ]
