"""Replacements for functions of torch that a trace cannot run: they read values to check them or to
choose an algorithm, they need writes in place or strides, or autocast casts their ops one by one.
"""

import sys
import warnings
from collections.abc import Callable
from itertools import combinations, combinations_with_replacement
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

import ftp.tracing.selected_rows.operators
import ftp.tracing.selected_rows.unsqueezed
import ftp.tracing.selected_rows.writes  # noqa: F401  (they fill the tables of selected rows)
from ftp.axis import is_inside
from ftp.errors import TraceError
from ftp.functional.modes_of_blocks import ModeOfBlocks
from ftp.ops import tensor_lists
from ftp.ops.assume import assume, is_listening
from ftp.sharding.sparse_matrix import of_values
from ftp.source import at_line, describe_line, user_line, users_frame
from ftp.torch_internals.fake_tensors import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    is_fake,
)
from ftp.torch_internals.functorch import (
    is_functorch_wrapped_tensor,
    temporarily_clear_interpreter_stack,
    unwrapped,
)
from ftp.tracing.data_dependent.arrays import Arrays
from ftp.tracing.data_dependent.guards import guard_at, line_of_identity
from ftp.tracing.data_dependent.known_values import KnownValues
from ftp.tracing.data_dependent.paths import decided, note_integers
from ftp.tracing.data_dependent.traced_number import (
    TracedNumber,
    arrays_stacked,
    beside_narrow,
    is_answered_by_reading,
    numbers_read,
    without_numbers,
)
from ftp.tracing.data_dependent.values_read import Level, captured_value, is_reading, python_value
from ftp.tracing.nested_arguments import flat, input_first, is_of_a_tensor, map_leaves
from ftp.tracing.refused_calls import check_written
from ftp.tracing.replacements.addresses import Addresses
from ftp.tracing.replacements.cast_as_one import CAST_AS_ONE
from ftp.tracing.replacements.comparisons import COMPARING
from ftp.tracing.replacements.counted_classes import OF_CLASSES, bincount
from ftp.tracing.replacements.covariance import corrcoef, cov
from ftp.tracing.replacements.deep_copies import deepcopy
from ftp.tracing.replacements.diagonals import fill_diagonal_
from ftp.tracing.replacements.flat_linear import linear
from ftp.tracing.replacements.gaussian_nll import gaussian_nll_loss
from ftp.tracing.replacements.masked_writes import (
    index_put,
    is_mask,
    write_at_mask,
)
from ftp.tracing.replacements.recurrent_layers import of_sequences
from ftp.tracing.replacements.repeats import REPEATS, with_size
from ftp.tracing.replacements.short_time_fourier import istft, stft
from ftp.tracing.replacements.sparse_matmuls import MATMULS, matmul
from ftp.tracing.replacements.tensors_of_items import OF_ITEMS, tensor_of_items
from ftp.tracing.replacements.texts import repr_of, text_of
from ftp.tracing.selected_rows.factories import sized_by_row_count
from ftp.tracing.selected_rows.narrow import narrow
from ftp.tracing.selected_rows.refused import forget_needed, note_needed, tried
from ftp.tracing.selected_rows.selected import Selected, apply
from ftp.tracing.selected_rows.selecting import SELECTING, selection, with_counts
from ftp.tracing.selected_rows.slices import slices_read, write_traced_slice


class unchecked(ModeOfBlocks):
    """A mode in which the functions below, and their gradients, read no values. Values that torch
    would refuse are not refused.

    Args:
        note_read: takes a captured tensor that is read in a way that no op shows.
        known: the values that are known while tracing.
        arrays: gets NumPy's arrays of tensors.
    """

    def __init__(
        self, note_read: Callable[[Tensor], None], known: KnownValues, arrays: Arrays
    ) -> None:
        super().__init__()
        self._note_read, self._known, self._arrays = note_read, known, arrays
        self._addresses = Addresses()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return self._replaced(func, types, *input_first(func, args, kwargs or {}))
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            note_needed(error)
            raise

    def _replaced(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if func in REPEATS:
            kwargs = with_size(args, kwargs, self._integer)
        if TracedNumber in types:
            forget_needed()
            args, kwargs = arrays_stacked(args), arrays_stacked(kwargs)
            if (found := sized_by_row_count(func, args, kwargs)) is not None:
                return found
            if (found := beside_narrow(func, args, kwargs)) is not None:
                return found
            given, (args, kwargs) = (args, kwargs), without_numbers(args, kwargs)
            try:
                with tried():
                    return self._called(func, types, args, kwargs)
            except (TypeError, RuntimeError) as error:
                if not is_answered_by_reading(error):
                    raise
            args, kwargs = numbers_read(given)  # torch takes them as sizes
            types = ()
        try:
            return self._called(func, types, args, kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            # torch takes tensors of one integer as sizes, but not as what its methods are of.
            of = args[:1] if is_of_a_tensor(func) else ()
            given = [*args[len(of) :]], kwargs
            args, kwargs = map_leaves(self._integer, given)
            if all(x is y for x, y in zip(flat(given), flat((args, kwargs)), strict=True)):
                raise
        return self._called(func, types, (*of, *args), kwargs)

    def _integer(self, x: Any) -> Any:
        """The value of a tensor of one integer, if it may be read; else ``x``."""
        if not isinstance(x, Tensor) or x.numel() != 1 or x.dtype not in _INTEGERS:
            return x
        value = self._read(Tensor.__index__, x)
        return x if value is None else value

    def _called(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if Selected in types:
            return apply(func, args, kwargs)
        if (
            func in _AT_KEY
            and is_mask(args[1])
            and not args[1].ndim
            and is_fake(unwrapped(args[1]))
        ):
            args = args[0].unsqueeze(0), args[1].reshape(1), *args[2:]
        if func in SELECTING and is_listening():
            if is_reading(Level.INTEGERS):
                args, kwargs = slices_read((args, kwargs))
            found = selection(func, args, kwargs)
            if found is not None:
                note_integers()
                return with_counts(func, found) if is_reading(Level.INTEGERS) else found
        if func in MATMULS and (found := matmul(args)) is not None:
            return found
        if func is Tensor.data_ptr:
            return self._addresses.of(args[0])
        if func in _BY_MEMORY:
            self._note_items(args[0])
        elif func in OF_ITEMS:
            if (made := tensor_of_items(func, args, kwargs)) is not None:
                return made
            lists = (x for x in (*args, *kwargs.values()) if not isinstance(x, Tensor))
            self._note_items(tuple(lists))
        if func in _READING and (found := self._read(func, args[0])) is not None:
            return found if func is not Tensor.numpy else self._arrays.add(found, args[0])
        if func in COMPARING and (found := self._compared(func, args, kwargs)) is not None:
            return found
        return (_UNCHECKED.get(func) or func)(*args, **kwargs)

    def _note_items(self, data: Any) -> None:
        """Note captured tensors, of which torch copies the numbers."""
        if isinstance(data, Tensor):
            if not is_fake(unwrapped(data)):
                self._note_read(data)
        elif isinstance(data, list | tuple):
            for item in data:
                self._note_items(item)

    def _compared(self, func: Any, args: Any, kwargs: Any) -> bool | None:
        """The result of a comparison of tensors; None where torch computes it."""
        found = COMPARING[func](*args, **kwargs)
        return self._read(Tensor.__bool__, found) if isinstance(found, Tensor) else found

    def _read(self, func: Any, x: Tensor) -> Any:
        """The result of a method that reads ``x``; None where torch computes it."""
        if not is_fake(unwrapped(x)):
            return None
        if (known := self._known.read(x, func)) is not None:
            return known
        if func in _OF_NUMBERS:
            reads = python_value if is_reading(Level.INTEGERS) else captured_value
            if (value := reads(func, x)) is not None:
                return value
            if not x.is_floating_point():
                note_integers()
        frame = _asking_frame() if func in _ASKING else None
        if frame is not None and (guarded := _guarded(x, frame)) is not None:
            return guarded
        if func is Tensor.numpy and x.dtype is torch.int64:  # numbers of a program are of 64 bits
            numbers = self._read(Tensor.tolist, x)
            return None if numbers is None else np.array(numbers, dtype=object)
        if func in (Tensor.item, Tensor.tolist):
            if x.is_complex() or x.dtype is torch.uint64:  # programs count in int64
                return None
            if x.numel() <= _MOST_NUMBERS:
                return _numbers(func, x.detach().clone())  # x may be written to later
        if func in _ASKING and (found := decided(x, frame)) is not None:
            return found
        return python_value(func, x)


# The methods by which code reads one value of a tensor, and all that read values.
_ASKING = (Tensor.__bool__, Tensor.item, Tensor.is_nonzero, torch.is_nonzero)
_READING = {
    *(*_ASKING, Tensor.tolist, Tensor.numpy, Tensor.__int__, Tensor.__float__, Tensor.__index__)
}
_AT_KEY = (Tensor.__getitem__, Tensor.__setitem__)
_BY_MEMORY = (Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__)
_OF_CALLS = (
    *("_compared", "_read", "_called", "_replaced", "len_of", "__torch_function__"),
    *("handle_torch_function", "__contains__"),  # torch's own
)
_OF_NUMBERS = (Tensor.item, Tensor.tolist, Tensor.numpy)
_MOST_NUMBERS = 64  # of a list


def _numbers(func: Any, x: Tensor) -> Any:
    """``x.item()``, or the lists of ``x.tolist()``, of values of the program."""
    if func is Tensor.tolist and x.ndim:
        return [_numbers(func, row) for row in x.unbind()]
    value = x.reshape(())
    if value.dtype is not torch.bool:
        value = value.double() if value.is_floating_point() else value.long()
    elif (frame := users_frame()) and (line := line_of_identity(frame.f_code)):
        warnings.warn(
            f"{describe_line(frame.f_code.co_filename, line)}\n  A bool that the function reads by"
            " .item() is never the object True or False here: write if b, or b == True.",
            stacklevel=2,
        )
    return TracedNumber(value)


def _asking_frame() -> FrameType | None:
    """The frame that reads a condition's value."""
    frame = sys._getframe(2)
    while frame is not None and (
        frame.f_code.co_name in _OF_CALLS
        or frame.f_code in (TracedNumber.__bool__.__code__, Selected.__len__.__code__)
    ):
        frame = frame.f_back
    return frame


def _guarded(condition: Tensor, frame: FrameType) -> Any:
    """The assumed value of a guard's condition; None if the condition is no guard's."""
    if not is_listening() or is_inside() or condition.numel() != 1:
        return None  # in ftp.local each rank has values of its own
    if (guard := guard_at(frame)) is None:
        return None
    if guard.claim and guard.value is not None:
        is_true = condition.detach() != 0
        assume(is_true if guard.value else ~is_true, guard.claim)
    return guard.value


def _assert_async(condition: Tensor, message: str = "torch._assert_async: not zero") -> None:
    assume(condition.detach() != 0, message)


def _combinations(input: Tensor, r: int = 2, with_replacement: bool = False) -> Tensor:
    if input.ndim != 1 or r <= 0:
        return torch.combinations(input, r, with_replacement)
    choose = combinations_with_replacement if with_replacement else combinations
    places = list(choose(range(input.shape[0]), r))
    return input[torch.tensor(places, dtype=torch.int64, device=input.device).reshape(-1, r)]


def _index_fill(input: Tensor, dim: int, index: Tensor, value: Any) -> Tensor:
    """``index_fill`` by a mask of the positions that the index names, once or several times."""
    if not isinstance(value, Tensor) or value.ndim or index.ndim > 1:
        return torch.index_fill(input, dim, index, value)
    shape = [1] * max(input.ndim, 1)
    size = shape[dim] = input.shape[dim] if input.ndim else 1
    filled = torch.zeros(size, dtype=torch.bool, device=input.device)
    filled = filled.index_fill(0, index.long(), True).reshape(shape[: input.ndim])
    return input.masked_fill(filled, value.to(input.dtype))


def _getitem(input: Tensor, key: Any) -> Tensor:
    """``x[i]``, where ``i`` may be a tensor of one integer, which torch reads."""
    while (at := _place_by_tensor(input, key)) is not None:
        dim, place, key = at
        input = input.index_select(dim, place)
    return Tensor.__getitem__(input, key)


def _place_by_tensor(input: Tensor, key: Any) -> tuple[int, Tensor, Any] | None:
    """The first 0-d integer tensor in ``key``: the dim that it indexes, its place along the dim,
    and the rest of the key, for a tensor that has this place only. None if there is none.
    """
    keys = list(key) if isinstance(key, tuple) else [key]
    numbers = [
        isinstance(k, Tensor)
        and not k.ndim
        and k.dtype in _INTEGERS
        and getattr(k, "constant", None) is None  # torch reads a literal's value
        for k in keys
    ]
    if True not in numbers or any(isinstance(k, Selected) for k in keys):
        return None
    at = numbers.index(True)
    taken = [0 if k is None or k is Ellipsis else k.ndim if is_mask(k) else 1 for k in keys]
    dim = sum(taken[:at])
    if any(k is Ellipsis for k in keys[:at]):
        dim = input.ndim - sum(taken[at:])
    if not 0 <= dim < input.ndim:
        return None  # for torch's error
    place = keys[at].long().reshape(1)
    place = torch.where(place < 0, place + input.shape[dim], place)
    keys[at] = 0
    return dim, place, tuple(keys)


_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8)


def _setitem(input: Tensor, key: Any, value: Any) -> None:
    if is_reading(Level.INTEGERS):
        key = slices_read(key)
    if write_traced_slice(input, key, value):
        note_integers()
        return
    if (at := _place_by_tensor(input, key)) is not None:
        dim, place, key = at
        part = input.index_select(dim, place)
        _setitem(part, key, value)
        input.index_copy_(dim, place, part)
    elif not write_at_mask(input, key, value):
        Tensor.__setitem__(input, key, value)


def _data(x: Tensor) -> Tensor:
    """``x.data``: under torch.func that of a captured tensor is one that no trace follows. It skips
    the transforms that are running, which see the copies of ops that a trace makes.
    """
    if not is_fake(unwrapped(x)):
        return x.detach()
    if is_functorch_wrapped_tensor(x):
        return x.data
    with temporarily_clear_interpreter_stack():
        return x.data


def _set_data(x: Tensor, value: Tensor) -> None:
    """``x.data = value``: torch.func refuses it, and a trace would go on with the old value."""
    if x.shape != value.shape or x.dtype != value.dtype:
        raise TraceError(
            f"{at_line()}x.data = y puts a tensor of shape {tuple(value.shape)} and {value.dtype}"
            f" in the place of one of shape {tuple(x.shape)} and {x.dtype}. Give the new tensor a"
            " name of its own."
        )
    x.data.copy_(value.detach())


def _with_lengths(ctc_loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``ctc_loss`` with its lengths as tensors."""

    def fn(
        log_probs: Tensor,
        targets: Tensor,
        input_lengths: Any,
        target_lengths: Any,
        *rest: Any,
        **options: Any,
    ) -> Tensor:
        lengths = (
            x if isinstance(x, Tensor) else torch.tensor(x) for x in (input_lengths, target_lengths)
        )
        return ctc_loss(log_probs, targets, *lengths, *rest, **options)

    return fn


def _sparse_coo_tensor(*args: Any, **kwargs: Any) -> Any:
    """``sparse_coo_tensor`` by its entries, where a trace computes them."""
    is_traced = any(isinstance(x, Tensor) and is_fake(x) for x in (*args, *kwargs.values()))
    found = of_values(*args, **kwargs) if is_traced else None
    return torch.sparse_coo_tensor(*args, **kwargs) if found is None else found


def _polygamma(input: Tensor, n: int) -> Tensor:
    return torch.polygamma(n, input.clone())


def _in_place(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def of(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        found = fn(input, *args, **kwargs)
        check_written(fn.__name__.strip("_") + "_", found.dtype, input, user_line())
        return input.copy_(found)

    return of


_METHODS: dict[str, Callable[..., Any]] = {  # also functions of torch
    "bincount": bincount,
    "narrow": narrow,
    "cov": cov,
    "corrcoef": corrcoef,
    "index_fill": _index_fill,
    "index_put": index_put,
    "istft": istft,
    "stft": stft,
}
_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")
_UNCHECKED: dict[Any, Callable[..., Any]] = {
    **CAST_AS_ONE,
    torch._is_all_true: torch.all,  # pyright: ignore[reportPrivateImportUsage]
    torch._is_any_true: torch.any,  # pyright: ignore[reportPrivateImportUsage]
    Tensor._is_all_true: torch.all,  # pyright: ignore[reportAttributeAccessIssue]
    Tensor._is_any_true: torch.any,  # pyright: ignore[reportAttributeAccessIssue]
    torch._assert_async: _assert_async,  # pyright: ignore[reportPrivateImportUsage]
    **OF_CLASSES,
    **tensor_lists.FUNCTIONS,
    F.linear: linear,
    F.gaussian_nll_loss: gaussian_nll_loss,
    torch.sparse_coo_tensor: _sparse_coo_tensor,
    **{getattr(of, name): fn for name, fn in _METHODS.items() for of in (torch, Tensor)},
    torch.combinations: _combinations,
    Tensor.__deepcopy__: deepcopy,
    Tensor.__format__: text_of,
    Tensor.__repr__: repr_of,
    F.ctc_loss: _with_lengths(F.ctc_loss),
    torch.ctc_loss: _with_lengths(torch.ctc_loss),
    Tensor.fill_diagonal_: fill_diagonal_,
    Tensor.index_fill_: _in_place(_index_fill),
    Tensor.index_put_: _in_place(index_put),
    Tensor.__getitem__: _getitem,
    Tensor.__setitem__: _setitem,
    Tensor.data.__get__: _data,  # pyright: ignore[reportAttributeAccessIssue]
    Tensor.data.__set__: _set_data,  # pyright: ignore[reportAttributeAccessIssue]
    **{getattr(torch, name): of_sequences(name) for name in _RECURRENT},
    # torch cannot functionalize it.
    Tensor.polygamma_: _in_place(_polygamma),
}
