"""Tensors that a traced function captured, and the variables and attributes that hold them: a step
warns if one of these holds another object later.
"""

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ftp.dataclass import dataclass
from ftp.errors import InputError, StaleCaptureWarning
from ftp.torch_internals.functorch import temporarily_clear_interpreter_stack
from ftp.torch_internals.modes import DisableTorchFunction, disable_current_modes
from ftp.torch_internals.storages import storage_number, storage_of, version
from ftp.tracing.places import StatePlace, tensors_around

_COPIED = 4096  # most elements of a tensor whose values are compared at each call
kept_by_traces = WeakIdKeyDictionary()  # the tensors that traces left where the function keeps them


@dataclass(frozen=True, eq=False)
class ReadTensor:
    """A captured tensor that a function read as Python numbers, and what it held then.

    Attributes:
        bits: its elements, as of `_bits`; None where only the version tells: on a device, of many
            elements.
    """

    tensor: Tensor
    version: int
    dtype: torch.dtype
    bits: Tensor | None

    @property
    def has_changed(self) -> bool:
        if self.bits is None:
            return version(self.tensor) != self.version
        if self.tensor.dtype is not self.dtype or self.tensor.device.type != "cpu":
            return True
        return not torch.equal(_bits(self.tensor), self.bits)


_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bits(x: Tensor) -> Tensor:
    """The elements as integers, which tell -0.0 from 0.0, and a NaN from none."""
    if x.is_complex():
        x = torch.view_as_real(x.resolve_conj())
    if not x.is_floating_point():
        return x
    return x.detach().resolve_neg().view(_OF_SIZE[x.element_size()])


def have_changed(read: Iterable[ReadTensor]) -> bool:
    """Whether any of these tensors has changed, asked while a function is traced."""
    with disable_current_modes(), temporarily_clear_interpreter_stack(), DisableTorchFunction():
        return any(each.has_changed for each in read)


def read_now(tensor: Tensor) -> ReadTensor:
    """A captured tensor as it is now. Its values show writes that versions do not, to ``x.data``
    or by numpy.
    """
    with disable_current_modes(), temporarily_clear_interpreter_stack(), DisableTorchFunction():
        bits, storage = None, storage_of(tensor)
        if storage is not None and tensor.device.type == "cpu" and tensor.numel() <= _COPIED:
            bits = _bits(tensor).clone()
        return ReadTensor(tensor, version(tensor), tensor.dtype, bits)


@dataclass(frozen=True, eq=False)
class Captured(StatePlace):
    """A captured tensor, one place of it, its memory, and the tensor as it was, where the function
    read it as Python numbers.
    """

    memory: torch.UntypedStorage | None
    read: ReadTensor | None = None

    @property
    def is_replaced(self) -> bool:
        """Whether the place holds another object, or the tensor another one's memory, as after
        ``torch.utils.swap_tensors`` or an assignment to ``x.data``.
        """
        if self.now() is not self.value:
            return True
        return self.memory is not None and self.value.untyped_storage() is not self.memory

    @property
    def is_stale(self) -> bool:
        """Whether it is replaced, or holds other numbers than were read."""
        return self.is_replaced or (self.read is not None and self.read.has_changed)


def places_of(fn: Callable[..., Any], tensors: Sequence[Tensor]) -> list[StatePlace]:
    """Where ``fn`` and the objects that it refers to hold ``tensors``: variables, items of dicts
    and lists, attributes. Of a tensor that is in none, where others hold its memory.

    >>> import torch
    >>> mask = torch.ones(2)
    >>> [place.name for place in places_of(eval("lambda x: x * mask", {"mask": mask}), [mask])]
    ["'mask', which <lambda> reads"]
    """
    if not tensors:
        return []
    places = list(tensors_around(fn))
    wanted = set(map(id, tensors))
    placed = {id(place.value) for place in places}
    memory = {storage_number(x) for x in tensors if id(x) not in placed}
    return [
        place
        for place in places
        if id(place.value) in wanted or (memory and storage_number(place.value) in memory)
    ]


def with_read(
    places: Sequence[StatePlace], captured: Sequence[Tensor], read: Sequence[ReadTensor]
) -> list[Captured]:
    """The places of captured tensors, and what those held that the function read as Python numbers.
    A tensor without a place, as one of a model, is its own.
    """
    held = {id(each.tensor): each for each in read}
    placed = {id(place.value) for place in places}
    others = {id(x): x for x in (*captured, *(each.tensor for each in read)) if id(x) not in placed}
    own = [
        StatePlace(f"A captured tensor of shape {tuple(x.shape)}", x, [x], 0)
        for x in others.values()
    ]
    return [
        Captured(**vars(place), memory=storage_of(place.value), read=held.get(id(place.value)))
        for place in (*places, *own)
    ]


def check_unchanged(captured: list[Captured], *, stacklevel: int) -> None:
    """Warn of each place whose tensor is replaced, once, and forget it.

    Raises:
        InputError: a tensor that the function read as Python numbers was written to since.
    """
    for place in [place for place in captured if place.is_replaced]:
        captured.remove(place)
        now = place.now()
        what = f"a tensor of shape {tuple(now.shape)}" if isinstance(now, Tensor) else repr(now)
        how = "has other memory" if now is place.value else "is another object"
        warnings.warn(
            f"{place.name}, {how} now, {what}. The step still uses the tensor of shape"
            f" {tuple(place.value.shape)} that it captured when it was traced. Pass a tensor that"
            " changes as an argument of the step, or make the step anew.",
            StaleCaptureWarning,
            stacklevel=stacklevel + 1,
        )
    for place in captured:
        if place.is_stale:
            raise InputError(
                f"{place.name}, was read as Python numbers when the step was traced, by int(x),"
                " .item() or .tolist(), and was written to since: the step would go on with the"
                " numbers of then. Pass the numbers as an argument, or make the step anew."
            )
