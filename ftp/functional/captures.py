"""See what a block reads and writes in its first run."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

from torch import Tensor

from ftp.errors import InputError
from ftp.functional.block_values import ValueNumbering, ValueNumbers
from ftp.functional.differentiable import is_differentiable
from ftp.source import user_line
from ftp.torch_internals.autograd_state import get_sequence_nr
from ftp.torch_internals.functorch import (
    TransformType,
    get_interpreter_stack,
    get_unwrapped,
    is_batchedtensor,
    is_functorch_wrapped_tensor,
    maybe_get_level,
    unwrap_if_dead,
)
from ftp.torch_internals.modes import DisableTorchFunction
from ftp.torch_internals.pytree import tree_leaves, tree_map_only
from ftp.torch_internals.storages import storage_number

_T = TypeVar("_T")
Transforms = Mapping[int, TransformType | None]
outer_transforms: list[Transforms] = [{}]


def transforms_around() -> Transforms:
    """By level, the transforms inside which a block is called, also those that a surrounding block
    runs without; None for a level of two kinds.
    """
    found = dict(outer_transforms[-1])
    for level, key in _running().items():
        found[level] = key if found.get(level, key) == key else None
    return found


def is_transforming() -> bool:
    """Whether a transform of torch.func is running."""
    return bool(get_interpreter_stack())


def is_within_one_gradient() -> bool:
    """Whether one transform of torch.func is running, which takes a gradient."""
    return [*_running().values()] == [TransformType.Grad]


def _running() -> dict[int, TransformType]:
    """The transforms that run, by level."""
    return {one.level(): one.key() for one in get_interpreter_stack() or ()}


class WatchedCall(Protocol):
    """What `BlockWatch` asks about a call of a block."""

    name: str
    transforms: Transforms

    def holds(self, x: Tensor) -> bool: ...

    def may_read(self, x: Tensor) -> bool: ...

    def untouched(self, tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]: ...


class ReadsState(BaseException):
    """A block reads tensors of its state that are not among its inputs, or is about to write to an
    input: it has to be called once more. (Not an Exception, which a model may catch.)
    """

    def __init__(self, call: WatchedCall, read: Sequence[Tensor], written: Tensor | None) -> None:
        super().__init__()
        self.call, self.read, self.written = call, read, written


class BlockWatch(ValueNumbering):
    """In a block's first run, find the tensors of its state that may have a gradient, refuse other
    captured ones, and unwrap the rest from the transforms from which the block's inputs were
    unwrapped.
    """

    def __init__(
        self,
        call: WatchedCall,
        own: Sequence[Tensor],
        before: ValueNumbers | None,
        around: ValueNumbering | None,
    ) -> None:
        super().__init__(call.holds, before, around)
        self.call, self._inner_inputs = call, own
        self.own = {id(x): x for x in own}
        self.running = _running()
        self.read: dict[int, Tensor] = {}  # tensors of the state that are not among the inputs
        self._start = get_sequence_nr()
        self._untouched: dict[int, Tensor] | None = None  # by the numbers of storages

    def prepared(
        self, func: Callable[..., Any], args: Any, kwargs: Any, written: Sequence[Tensor]
    ) -> tuple[Any, Any]:
        if _running() != self.running:
            self._check_inside((args, kwargs))
            return args, kwargs
        if func is not Tensor.requires_grad_:
            for x in written:
                self._check_written(x)
        return tree_map_only(Tensor, self._inner, (args, kwargs))

    def made(self, found: Any) -> None:
        if not self.running:  # what the block asks autograd for
            leaves = (x for x in tree_leaves(found) if isinstance(x, Tensor) and x.requires_grad)
            self.own.update((id(x), x) for x in leaves)

    def _check_inside(self, tree: Any) -> None:
        """Within a transform that the block itself runs, which may have the level of one around the
        block: take every tensor of the state that may have a gradient.
        """
        for x in tree_leaves(tree):
            if (
                isinstance(x, Tensor)
                and (is_functorch_wrapped_tensor(x) or x.requires_grad)
                and self.call.may_read(x)
            ):
                self._take(x)
                self._begin_again()

    def _check_written(self, x: Tensor) -> None:
        if self._untouched is None:
            pairs = self.call.untouched(self._inner_inputs)
            self._untouched = {storage_number(inner): outer for inner, outer in pairs}
        outer = self._untouched.get(storage_number(x))
        if outer is not None:
            self._begin_again(outer)

    def _begin_again(self, written: Tensor | None = None) -> None:
        raise ReadsState(self.call, tuple(self.read.values()), written)

    def _inner(self, given: Tensor) -> Tensor:
        """A tensor at the level at which the block runs."""
        x = alive = unwrap_if_dead(given)
        while is_functorch_wrapped_tensor(x) and not self._is_at_hand(x):
            is_grad = self.call.transforms.get(maybe_get_level(x)) == TransformType.Grad
            if is_batchedtensor(x):
                self._take(given)
                self._begin_again()
            if is_differentiable(x) and (x.requires_grad or not is_grad):
                self._take(given)
            x = unwrap_if_dead(get_unwrapped(x))
        if not self.running and x.requires_grad and id(x) not in self.own and self._is_older(x):
            self._take(given)
        return given if x is alive else x  # torch.func.vjp asks one that is dead for its graph

    def _is_older(self, x: Tensor) -> bool:
        """Whether a tensor was made before the block was called."""
        with DisableTorchFunction():
            return x.grad_fn is None or x.grad_fn._sequence_nr() < self._start

    def _is_at_hand(self, x: Tensor) -> bool:
        """Whether the transform that wrapped a tensor is running."""
        key = self.running.get(maybe_get_level(x))
        return key is not None and (key == TransformType.Vmap) == is_batchedtensor(x)

    def _take(self, x: Tensor) -> None:
        """Note a tensor of the state as read; refuse others."""
        if id(x) in self.read:
            return
        if self.call.may_read(x):
            self.read[id(x)] = x
            return
        why = (
            "that it was not given, of which vmap maps elements"
            if is_batchedtensor(x)
            else "that it was not given, and a gradient is asked for, which would not flow"
        )
        raise InputError(
            f"remat({self.call.name}) uses a tensor of shape {tuple(x.shape)} at"
            f" {user_line() or 'an unknown line'} {why}. Pass it as an argument: block(params, x)."
        )


@contextmanager
def on_top(stack: list[_T], value: _T) -> Iterator[None]:
    """Within the block ``value`` is the last item of ``stack``. (A context variable would be unset
    in the threads in which torch runs backward passes.)
    """
    stack.append(value)
    try:
        yield
    finally:
        stack.pop()
