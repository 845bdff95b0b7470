"""Draw the random numbers of an exported program from a key: the numbers that ``ftp.functionalize``
draws for the exported module.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.fx.node import map_arg

from ftp import random
from ftp.random.draws import Draws
from ftp.random.torch_functions import DRAWN
from ftp.torch_internals.op_types import OpOverload
from ftp.tracing.op_facts import is_deterministic

aten = torch.ops.aten
# torch's function for an op: with the same arguments, or (_FILLED) in place.
_SAME: dict[Any, Any] = {
    aten.alpha_dropout: torch.alpha_dropout, aten.bernoulli: torch.bernoulli,
    aten.dropout: torch.dropout, aten.feature_alpha_dropout: torch.feature_alpha_dropout,
    aten.feature_dropout: torch.feature_dropout, aten.gru: torch.gru, aten.lstm: torch.lstm,
    aten.multinomial: torch.multinomial, aten.normal: torch.normal, aten.rand: torch.rand,
    aten.rand_like: torch.rand_like, aten.randint: torch.randint,
    aten.randint_like: torch.randint_like, aten.randn: torch.randn,
    aten.randn_like: torch.randn_like, aten.randperm: torch.randperm, aten.rnn_relu: torch.rnn_relu,
    aten.rnn_tanh: torch.rnn_tanh, aten.rrelu: torch.rrelu,
    aten.scaled_dot_product_attention: F.scaled_dot_product_attention,
}  # fmt: skip
_FILLED = {
    aten.cauchy: Tensor.cauchy_, aten.exponential: Tensor.exponential_,
    aten.geometric: Tensor.geometric_, aten.log_normal: Tensor.log_normal_,
    aten.normal_functional: Tensor.normal_, aten.random: Tensor.random_,
    aten.uniform: Tensor.uniform_,
}  # fmt: skip
_IN_PLACE = {
    aten.bernoulli_,
    aten.cauchy_,
    aten.exponential_,
    aten.geometric_,
    aten.log_normal_,
    aten.normal_,
    aten.random_,
    aten.uniform_,
}


def is_random(node: fx.Node) -> bool:
    """Whether a node's op draws random numbers."""
    arguments: Any = (node.args, dict(node.kwargs))
    args, kwargs = map_arg(arguments, lambda n: n.meta.get("val"))
    return _is_random(node.target, args, kwargs)


def _is_random(target: Any, args: Any, kwargs: Any) -> bool:
    if not isinstance(target, OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    return not is_deterministic(target, args, kwargs)


def undrawn(node: fx.Node) -> str | None:
    """Why a node cannot draw from a key; None if it can."""
    packet = node.target.overloadpacket  # type: ignore[union-attr]
    if packet in _SAME or packet in _FILLED or packet in _IN_PLACE or packet is aten.native_dropout:
        return None
    return "cannot be drawn from a key. Pass what it draws as an input."


def drawn(target: Any, args: Any, kwargs: Any) -> Callable[[Draws], Any] | None:
    """A function that draws an op's result from a key; None if the op is not random."""
    if not _is_random(target, args, kwargs):
        return None
    packet = target.overloadpacket
    if packet is aten.native_dropout:
        return partial(_native_dropout, x=args[0], p=args[1])
    if packet in _FILLED:
        function = _FILLED[packet]
        # The function fills its tensor: give it a copy.
        return lambda draws: DRAWN[function](draws, function, args[0].clone(), *args[1:], **kwargs)
    function = _SAME[packet]
    given = {k: v for k, v in kwargs.items() if k not in ("layout", "pin_memory", "memory_format")}
    return lambda draws: DRAWN[function](draws, function, *args, **given)


def _native_dropout(draws: Draws, x: Tensor, p: float) -> tuple[Tensor, Tensor]:
    dropped = random.bernoulli(draws.next_key("dropout"), p, tuple(x.shape))
    return x.masked_fill(dropped, 0) * (1 / (1 - p) if p < 1 else 0.0), dropped.logical_not()
