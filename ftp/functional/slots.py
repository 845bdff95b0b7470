"""Placeholders for the tensors of a model that are arguments of a call."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from ftp.dataclass import dataclass
from ftp.functional.attributes import join
from ftp.torch_internals.modes import is_wrapper


@dataclass(frozen=True)
class Slot:
    """Placeholder in a module's attributes for a tensor that is an argument of the call."""

    path: str

    def of(self, values: Mapping[str, Tensor]) -> Tensor:
        """The tensor of a call."""
        return values[self.path]

    def parts(self, x: Any) -> dict[str, Tensor]:
        """The arguments that such a tensor is made of."""
        return {self.path: x}


@dataclass(frozen=True, eq=False)
class WrapperSlot(Slot):
    """Placeholder for a tensor that holds others, which are arguments of the call.

    Attributes:
        wrapper: the model's own.
        held: placeholders of what it holds, by the attribute.
    """

    wrapper: Any
    held: Mapping[str, Slot]

    def of(self, values: Mapping[str, Tensor]) -> Tensor:
        held = {name: slot.of(values) for name, slot in self.held.items()}
        _, context = self.wrapper.__tensor_flatten__()
        shape, stride = self.wrapper.shape, self.wrapper.stride()
        return type(self.wrapper).__tensor_unflatten__(held, context, shape, stride)

    def parts(self, x: Any) -> dict[str, Tensor]:
        return {
            path: part
            for name, slot in self.held.items()
            for path, part in slot.parts(getattr(x, name)).items()
        }


def slot_of_wrapper(path: str, x: Any, state: dict[str, Tensor]) -> Slot:
    """The placeholder of a frozen tensor; what it holds is put into ``state`` under its paths."""
    if not is_wrapper(type(x)):
        state[path] = x.detach()
        return Slot(path)
    held = {
        n: slot_of_wrapper(join(path, n), getattr(x, n), state) for n in x.__tensor_flatten__()[0]
    }
    return WrapperSlot(path, x, held)


def with_held(path: str, x: Any) -> Iterator[tuple[str, Any]]:
    """A tensor and those that it holds, by path."""
    yield path, x
    if is_wrapper(type(x)):
        for name in x.__tensor_flatten__()[0]:
            yield from with_held(join(path, name), getattr(x, name))
