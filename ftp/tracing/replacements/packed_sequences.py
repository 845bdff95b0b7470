"""Sequences of unequal lengths as torch's recurrent layers take them: ``pack_padded_sequence`` and
``pad_packed_sequence``.

The number of packed rows depends on values. Packed rows are rows selected by a mask, those of all
sequences at step 0, then at step 1, and so on, so that losses of packed rows count only these.
"""

import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from ftp.errors import TraceError
from ftp.ops.assume import assume, is_listening
from ftp.source import at_line
from ftp.tracing.data_dependent.known_values import KnownValues


class BatchSizes:
    """``batch_sizes`` of a packed sequence: how many sequences have each step, which are values.
    Only its first entry, the number of sequences, and its size, the number of steps, are known.

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
    """An argument of a function of torch that is running; None if it is not running."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not function.__code__:
        frame = frame.f_back
    return None if frame is None else frame.f_locals.get(argument)
