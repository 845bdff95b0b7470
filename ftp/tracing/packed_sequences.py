"""Sequences of unequal lengths as torch's recurrent layers take them: ``pack_padded_sequence``,
``nn.RNN``, ``nn.LSTM`` and ``nn.GRU`` of what it packs, and ``pad_packed_sequence``.

The number of packed rows depends on values. Packed rows are rows selected by a mask, those of all
sequences at step 0, then at step 1, and so on, so that losses of packed rows count only these. A
recurrent layer runs all steps, and a sequence that has ended keeps its state.
"""

import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from ftp.errors import TraceError
from ftp.ops.assume import assume, is_listening
from ftp.source import at_line
from ftp.tracing.known_values import KnownValues

States = tuple[Tensor, ...]


class BatchSizes:
    """``batch_sizes`` of a packed sequence: how many sequences go on at each step, which is a
    value. Its first entry is the number of sequences, and its size the steps of the longest one.

    Attributes:
        kept: the mask of the steps that are not padding, (steps, sequences).
    """

    device = torch.device("cpu")

    def __init__(self, kept: Tensor):
        self.kept = kept
        self.steps, self.sequences = kept.shape

    def size(self, dim: int = 0) -> int:
        if dim or not is_listening():
            raise self._refused()
        # pad_packed_sequence only compares it with the total length that it is given, if any.
        if _argument_of(pad_packed_sequence, "total_length") is None:
            is_whole = self.kept[-1].any()
            assume(is_whole, claim := f"the longest sequence has all {self.steps} steps")
            if KnownValues().of(is_whole) is None:
                warnings.warn(
                    f"{at_line()}The length of the longest packed sequence is a value: ftp"
                    f" assumes that {claim}. Give pad_packed_sequence total_length={self.steps},"
                    " or let check_inputs=True check it.",
                    stacklevel=2,
                )
        return self.steps

    def __getitem__(self, at: Any) -> int:
        if at != 0:
            raise self._refused()
        return self.sequences

    def __iter__(self) -> Any:
        raise self._refused()

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        raise cls._refused()

    @staticmethod
    def _refused() -> TraceError:
        return TraceError(
            f"{at_line()}batch_sizes of a packed sequence depend on values: a program has fixed"
            " shapes. nn.RNN, nn.LSTM, nn.GRU and pad_packed_sequence take packed sequences, and"
            " functions of each row take packed.data."
        )


def packed_steps(x: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, BatchSizes]:
    """``pack_padded_sequence``: the steps of padded sequences, (steps, sequences, ...), and the
    batch sizes, whose mask says which are not padding.
    """
    x = x.transpose(0, 1) if batch_first else x
    steps, sequences = x.shape[:2]
    if lengths.shape != (sequences,):
        raise TraceError(
            f"{at_line()}pack_padded_sequence got lengths of shape {tuple(lengths.shape)} for"
            f" {sequences} sequences."
        )
    known = lengths.detach()
    assume((known >= 1) & (known <= steps), f"sequences have lengths in [1, {steps}]")
    if _argument_of(pack_padded_sequence, "enforce_sorted") is not False:
        claim = "sequences are sorted by length, the longest first (or pass enforce_sorted=False)"
        assume(known[:-1] >= known[1:], claim)
    kept = torch.arange(steps, device=x.device)[:, None] < lengths.to(x.device)
    return x, BatchSizes(kept)


def padded(
    rows: Tensor, valid: Tensor, sizes: BatchSizes, batch_first: bool, value: float, total: int
) -> tuple[Tensor, Tensor]:
    """``pad_packed_sequence``: the padded sequences and their lengths."""
    kept = valid.reshape(sizes.steps, sizes.sequences)
    rows = rows.reshape(sizes.steps, sizes.sequences, *rows.shape[1:])
    of_rows = kept.reshape(*kept.shape, *(1,) * (rows.ndim - 2))
    filled = torch.where(of_rows, rows, rows.new_full((), value))
    behind = filled.new_full((total - sizes.steps, *filled.shape[1:]), value)
    filled = torch.cat([filled, behind]) if total > sizes.steps else filled
    return filled.transpose(0, 1) if batch_first else filled, kept.sum(0)


def _argument_of(function: Callable[..., Any], argument: str) -> Any:
    """The argument that a running function of torch was given; None where it does not run."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not function.__code__:
        frame = frame.f_back
    return None if frame is None else frame.f_locals.get(argument)


def recurrent(
    name: str,
    rows: Tensor,
    valid: Tensor,
    sizes: BatchSizes,
    hx: Any,
    weights: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
) -> tuple[Tensor, ...]:
    """``torch.lstm``, ``torch.gru``, ``torch.rnn_tanh`` or ``torch.rnn_relu`` of packed rows: the
    rows of the last layer, padding included, and the states after each sequence's last step.
    """
    x = rows.reshape(sizes.steps, sizes.sequences, -1)
    kept = valid.reshape(sizes.steps, sizes.sequences, 1)
    given = tuple(hx) if name == "lstm" else (hx,)
    each = len(weights) // (num_layers * (2 if bidirectional else 1))
    runs = [weights[i : i + each] for i in range(0, len(weights), each)]
    last: list[States] = []
    for layer in range(num_layers):
        made = []
        for backward in (False, True)[: 2 if bidirectional else 1]:
            at = len(last)
            states = tuple(h[at] for h in given)
            out, states = _one_run(name, x, kept, states, runs[at], has_biases, backward)
            made.append(out)
            last.append(states)
        x = torch.cat(made, -1)
        if dropout and train and layer < num_layers - 1:
            x = F.dropout(x, dropout, train)
    stacked = tuple(torch.stack(of) for of in zip(*last, strict=True))
    return (x.reshape(rows.shape[0], -1), *stacked)


def _one_run(
    name: str,
    x: Tensor,
    kept: Tensor,
    states: States,
    weights: Sequence[Tensor],
    has_biases: bool,
    backward: bool,
) -> tuple[Tensor, States]:
    """One layer in one direction: its outputs (steps, sequences, dim), and the last states."""
    w_in, w_own = weights[:2]
    b_in, b_own = weights[2:4] if has_biases else (None, None)
    is_projected = name == "lstm" and len(weights) in (3, 5)
    projection = weights[-1] if is_projected else None
    inputs = F.linear(x, w_in, b_in).unbind(0)
    found: list[Tensor] = []
    steps = range(len(inputs))
    for t in reversed(steps) if backward else steps:
        new = _CELLS[name](inputs[t], F.linear(states[0], w_own, b_own), states)
        if projection is not None:
            new = (F.linear(new[0], projection), new[1])
        states = tuple(torch.where(kept[t], n, s) for n, s in zip(new, states, strict=True))
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
