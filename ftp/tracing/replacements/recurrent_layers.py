"""Recurrent layers, step by step: ``nn.RNN``, ``nn.LSTM`` and ``nn.GRU`` as matmuls and pointwise
functions.

torch runs a kernel of cuDNN or oneDNN for a whole sequence, or writes in place; a mesh can cut
neither.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ftp.tracing.replacements.flat_linear import linear

States = tuple[Tensor, ...]


def of_sequences(name: str) -> Callable[..., Any]:
    """``torch.lstm``, ``torch.gru``, ``torch.rnn_tanh`` or ``torch.rnn_relu``, step by step for
    sequences of one length.
    """
    network = getattr(torch, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        is_packed = "batch_sizes" in kwargs or (len(args) > 3 and isinstance(args[3], list | tuple))
        return network(*args, **kwargs) if is_packed else _layers(name, *args, **kwargs)

    return call


def _layers(
    name: str,
    input: Tensor,
    hx: Any,
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, ...]:
    x = input.transpose(0, 1) if batch_first else input
    options = (has_biases, num_layers, dropout, train, bidirectional)
    x, *states = recurrent(name, x, None, hx, params, *options)
    return (x.transpose(0, 1) if batch_first else x, *states)


def recurrent(
    name: str,
    x: Tensor,
    kept: Tensor | None,
    hx: Any,
    weights: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
) -> tuple[Tensor, ...]:
    """The outputs of the last layer, (steps, sequences, dim), and each sequence's states after its
    last step.

    Args:
        x: (steps, sequences, dim).
        kept: which steps are not padding, (steps, sequences, 1): a sequence that has ended keeps
            its state. None where all are.
    """
    given = tuple(hx) if name == "lstm" else (hx,)
    directions = (False, True)[: 2 if bidirectional else 1]
    each = len(weights) // (num_layers * len(directions))
    runs = [weights[i : i + each] for i in range(0, len(weights), each)]
    last: list[States] = []
    for layer in range(num_layers):
        made = []
        for backward in directions:
            own, states = runs[len(last)], tuple(h[len(last)] for h in given)
            out, states = _one_run(name, x, kept, states, own, has_biases, backward)
            made.append(out)
            last.append(states)
        x = torch.cat(made, -1) if bidirectional else made[0]
        if dropout and train and layer < num_layers - 1:
            x = F.dropout(x, dropout, train)
    return (x, *(torch.stack(of) for of in zip(*last, strict=True)))


def _one_run(
    name: str,
    x: Tensor,
    kept: Tensor | None,
    states: States,
    weights: Sequence[Tensor],
    has_biases: bool,
    backward: bool,
) -> tuple[Tensor, States]:
    """One layer in one direction: its outputs (steps, sequences, dim), and the last states."""
    w_in, w_own = weights[0], weights[1].T
    b_in, b_own = weights[2:4] if has_biases else (None, None)
    if b_in is not None and b_own is not None and name != "gru":
        b_in, b_own = b_in + b_own, None
    is_projected = name == "lstm" and len(weights) in (3, 5)
    projection = weights[-1].T if is_projected else None
    inputs = linear(x, w_in, b_in).unbind(0)
    found: list[Tensor] = []
    steps = range(len(inputs))
    for t in reversed(steps) if backward else steps:
        own = states[0] @ w_own
        new = _CELLS[name](inputs[t], own if b_own is None else own + b_own, states)
        if projection is not None:
            new = (new[0] @ projection, new[1])
        if kept is not None:
            new = tuple(torch.where(kept[t], n, s) for n, s in zip(new, states, strict=True))
        states = new
        found.append(states[0])
    return torch.stack(found[::-1] if backward else found), states


def _lstm(x: Tensor, own: Tensor, states: States) -> States:
    i, f, g, o = (x + own).chunk(4, -1)
    cell = f.sigmoid() * states[1] + i.sigmoid() * g.tanh()
    return o.sigmoid() * cell.tanh(), cell


def _gru(x: Tensor, own: Tensor, states: States) -> States:
    (reset, update, new), (own_reset, own_update, own_new) = x.chunk(3, -1), own.chunk(3, -1)
    new = (new + (reset + own_reset).sigmoid() * own_new).tanh()
    return (new + (update + own_update).sigmoid() * (states[0] - new),)


_CELLS: dict[str, Callable[[Tensor, Tensor, States], States]] = {
    "lstm": _lstm,
    "gru": _gru,
    "rnn_tanh": lambda x, own, _: ((x + own).tanh(),),
    "rnn_relu": lambda x, own, _: ((x + own).relu(),),
}
