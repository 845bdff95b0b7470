"""Check that a block computes the same when it runs again, by numbers of its values.

Two tensors have one number if they are results of one function of values with equal numbers (value
numbering). Tensors of the state have numbers of their own; one that nobody has seen being made, as
by a transform within the block, may be any value. A block whose results get other numbers
in its second run has read something that has changed since and that nobody has put back: a
generator that has gone on, a file, a tensor that was written to.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import ref

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ftp.functional.attributes import CONSTANTS
from ftp.functional.writes import writes_statistics, written_by
from ftp.source import user_line
from ftp.torch_internals.functorch import (
    custom_function_call,
    get_unwrapped,
    is_functorch_wrapped_tensor,
)
from ftp.torch_internals.modes import DisableTorchFunction, get_current_function_mode_stack
from ftp.torch_internals.pytree import tree_leaves
from ftp.torch_internals.storages import version

ANY = "any value"  # the number of a value that was computed unseen, or of such ones
_SMALL = 1000  # most elements of an array of which the values count
_OF_GRAPHS = ("retain_graph", "create_graph")  # of torch.autograd.grad: other graphs, equal values


class ValueNumbers:
    """The numbers of the values of a run.

    Attributes:
        of_key: by what a value is computed of.
        versions: of the tensors of the state that the run reads, by number.
    """

    def __init__(self) -> None:
        self.of_key: dict[Hashable, str] = {}
        self.versions: dict[str, int] = {}
        self._of_tensor: dict[int, tuple[ref[Tensor], str]] = {}

    def set(self, x: Tensor, number: str) -> None:
        self._of_tensor[id(x)] = ref(x), number

    def of(self, x: Tensor) -> str | None:
        """The number of a tensor, or of the one in its wrappers."""
        then, number = self._of_tensor.get(id(x), (None, None))
        if then is not None and then() is x:
            return number
        return self.of(get_unwrapped(x)) if is_functorch_wrapped_tensor(x) else None

    def end(self) -> None:
        """Forget the tensors that are gone."""
        self._of_tensor = {k: v for k, v in self._of_tensor.items() if v[0]() is not None}


class ValueNumbering(TorchFunctionMode):
    """Number the values of a run.

    Args:
        is_of_state: whether a tensor is of the state of the block.
        first: the numbers of the first run; None in that run.
        around: the run of a block around this one.
    """

    def __init__(
        self,
        is_of_state: Callable[[Tensor], bool],
        first: ValueNumbers | None = None,
        around: "ValueNumbering | None" = None,
    ) -> None:
        super().__init__()
        self.is_paused = False
        # A run within this one numbers its values here too: torch may hide it from this mode.
        self._with_around: tuple[ValueNumbering, ...] = (
            self,
            *(around._with_around if around else ()),
        )
        self.numbers = ValueNumbers()
        self._is_of_state, self._first = is_of_state, first
        if first is not None:
            self.numbers.of_key.update(first.of_key)
        self._reads_floats = False
        # Memory to which all writes so far gave no gradient, by the ids of tensors that are no
        # views, and its versions; and tensors that were made without a gradient.
        self._written_plainly: dict[int, int] = {}
        self._made_plainly: dict[int, tuple[ref[Tensor], int]] = {}
        self.differs = ""  # the first line at which a value has no number of the first run

    def stands_for(self, new: Tensor, old: Tensor) -> None:
        """Take ``new`` for the input ``old``."""
        self.numbers.set(new, _place(old))

    def of(self, x: Tensor) -> str:
        number = self.numbers.of(x)
        if number is None:
            number = self._of_state(x) if self._is_of_state(x) else self._unseen(x)
            self.numbers.set(x, number)
        return number

    def _of_state(self, x: Tensor) -> str:
        number, now = _place(x), version(x)
        then = now if self._first is None else self._first.versions.get(number, now)
        self.numbers.versions[number] = now
        return number if then == now else self._number(("written to", number))

    def _unseen(self, x: Tensor) -> str:
        """The number of a tensor that the first run has computed and kept, or that torch has made
        unseen: transforms and autograd functions do.
        """
        return (None if self._first is None else self._first.of(x)) or ANY

    def has_seen(self, x: Tensor) -> bool:
        """Whether a tensor has a number."""
        return self.numbers.of(x) is not None

    def _is_plain(self, func: Callable[..., Any], args: Any, kwargs: Any, to: Any = ()) -> bool:
        """Whether a call computes, and writes ``to`` tensors, what has no gradient."""
        return func in _DETACHING or all(
            any(x is written for written in to) or self._was_made_plainly(x)
            if isinstance(x, Tensor)
            else not callable(x)
            for x in tree_leaves((args, kwargs))
        )

    def _was_made_plainly(self, x: Tensor) -> bool:
        then, when = self._made_plainly.get(id(x), (None, 0))
        return then is not None and then() is x and version(x) == when

    def _plain_writes(
        self, func: Callable[..., Any], args: Any, kwargs: Any, written: Sequence[Tensor]
    ) -> list[Tensor]:
        """The memory to which a call is about to write, where it gets, and got, no gradient."""
        gives = torch.is_grad_enabled() and not writes_statistics(func)
        if not written or (gives and not self._is_plain(func, args, kwargs, written)):
            return []
        return [x for x in map(_memory, written) if self.lacks_gradient(x)]

    def lacks_gradient(self, x: Tensor) -> bool:
        """Whether all writes to a tensor, which was new, gave it no gradient."""
        return self._written_plainly.get(id(x), 0) == version(x)

    def in_order(self, tensors: list[Tensor]) -> list[Tensor]:
        return sorted(tensors, key=self.of)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        written = written_by(func, args, kwargs)
        inner_args, inner_kwargs = self.prepared(func, args, kwargs, written)
        runs = () if self.is_paused else self._with_around
        keys = [(each, each.key_of(func, args, kwargs, written)) for each in runs]
        plain = self._plain_writes(func, args, kwargs, written)
        made = func(*inner_args, **inner_kwargs)
        self._written_plainly.update((id(x), version(x)) for x in plain)
        is_seen = torch.is_grad_enabled() and not (written or self.is_paused)
        if is_seen and isinstance(made, Tensor) and self._is_plain(func, args, kwargs):
            self._made_plainly[id(made)] = ref(made), version(made)
        same = _given_as(made, args, inner_args)  # such as x.to(x.dtype)
        if func is Tensor.view_as:  # hooks of modules take one where a gradient is taken
            same = args[0]
        for each, key in keys:
            if same is not None:
                each.numbers.set(made, each.of(same))
            else:
                each.note(made, key)
        self.made(made)
        return made

    def passes(self, new: Tensor, old: Tensor) -> None:
        """Take ``new`` for ``old`` in this run and those around it."""
        for each in self._with_around:
            each.numbers.set(new, each.of(old))

    def key_of(
        self, func: Callable[..., Any], args: Any, kwargs: Any, written: Sequence[Tensor]
    ) -> tuple[Hashable, ...]:
        """What the results of a call are computed of; number the tensors that it writes to."""
        by = ANY if func is custom_function_call else func
        of_values = {name: x for name, x in kwargs.items() if name not in _OF_GRAPHS}
        key = (by, self._key(args), self._key(of_values))
        for x in written:
            self._write(x, self._number((*key, "written")))
        return key

    def prepared(
        self, func: Callable[..., Any], args: Any, kwargs: Any, written: Sequence[Tensor]
    ) -> tuple[Any, Any]:
        """The arguments with which to call a function, which writes to ``written``."""
        return args, kwargs

    def made(self, found: Any) -> None:
        """Take note of what a function has returned."""

    def _write(self, x: Tensor, number: str) -> None:
        memory = _memory(x)
        for written in (x,) if memory is x else (x, memory):
            self.numbers.set(written, number)

    def note(self, made: Any, key: tuple[Hashable, ...]) -> None:
        if isinstance(made, Tensor):
            self.numbers.set(made, self._number((*key, made.dtype, made.device)))
        elif isinstance(made, float):  # which the device may compute otherwise in the next run
            self._reads_floats = True
        elif isinstance(made, tuple | list):
            for i, x in enumerate(made):
                if isinstance(x, Tensor):
                    self.note(x, (*key, i))

    def _number(self, key: tuple[Hashable, ...]) -> str:
        if _has_any(key):
            return ANY
        keys = self.numbers.of_key
        if (number := keys.get(key)) is None:
            number = keys[key] = f"#{len(keys):06}"
            if self._first is not None and not self.differs:
                self.differs = user_line() or "an unknown line"
        return number

    def _key(self, x: Any) -> Hashable:
        """What counts of an argument: of a tensor its number, of others their values."""
        if isinstance(x, Tensor):
            return self.of(x)
        if isinstance(x, tuple | list):
            return tuple(map(self._key, x))
        if isinstance(x, dict):
            return tuple((name, self._key(value)) for name, value in x.items())
        if isinstance(x, slice):
            return slice, self._key(x.start), self._key(x.stop), self._key(x.step)
        if isinstance(x, float | bool):
            return type(x), None if self._reads_floats and type(x) is not bool else repr(x)
        if isinstance(x, np.ndarray | np.generic):
            return np.ndarray, x.tobytes() if x.size <= _SMALL else x.shape
        return x if type(x) in _VALUES else type(x)


def _memory(x: Tensor) -> Tensor:
    """The tensor that a view is of; of others, themselves."""
    with DisableTorchFunction():
        return x if x._base is None else x._base


def _given_as(made: Any, args: Sequence[Any], inner: Sequence[Any]) -> Tensor | None:
    """The argument that a function has returned as it is. (A transform wraps it anew.)"""
    if not isinstance(made, Tensor):
        return None
    found = _without_wrappers(made)
    pairs = [(x, y) for x, y in zip(args, inner, strict=True) if isinstance(y, Tensor)]
    return next((x for x, y in pairs if _without_wrappers(y) is found), None)


def _without_wrappers(x: Tensor) -> Tensor:
    while is_functorch_wrapped_tensor(x):
        x = get_unwrapped(x)
    return x


def _has_any(key: tuple[Hashable, ...]) -> bool:
    return ANY in key or any(isinstance(x, tuple) and _has_any(x) for x in key)


def are_same(numbers: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether values have the same numbers, as far as the numbers say."""
    return len(numbers) == len(others) and all(
        x == y or ANY in (x, y) for x, y in zip(numbers, others, strict=True)
    )


def _place(x: Tensor) -> str:
    """The number of a tensor that a run has not computed."""
    return f"at {id(x)}"


def _numberings() -> list[ValueNumbering]:
    return [m for m in get_current_function_mode_stack() if isinstance(m, ValueNumbering)]


def numbering_now() -> ValueNumbering | None:
    """That of the innermost block that runs."""
    found = _numberings()
    return found[-1] if found else None


@contextmanager
def no_numbering() -> Iterator[None]:
    """Within the block the runs that have begun number no values."""
    paused = [each for each in _numberings() if not each.is_paused]
    try:
        for each in paused:
            each.is_paused = True
        yield
    finally:
        for each in paused:
            each.is_paused = False


_DETACHING = (torch.detach, Tensor.detach, Tensor.data.__get__)  # type: ignore[attr-defined]
_VALUES = CONSTANTS | {complex, type(...), torch.layout, torch.memory_format}
