"""Python values that a step's function changes outside of its arguments, such as a count of its
calls, a flag or an array: a program has the ones of its trace at each call.
"""

import itertools
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from types import GeneratorType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ftp.dataclass import dataclass
from ftp.errors import StaleCaptureWarning, TraceError
from ftp.functional.attributes import CONSTANTS, held_in
from ftp.functional.carried_values import Carried, as_left
from ftp.functional.contents import is_leaf_state
from ftp.functional.held_values import now_in
from ftp.torch_internals.storages import storage_of
from ftp.tracing.kept_state import given_back
from ftp.tracing.places import LARGE, SYMBOLIC, is_leaf, places_around

if TYPE_CHECKING:
    from ftp.tracing.trace import Traced


@dataclass(frozen=True, eq=False)
class StateMark:
    """A value that a place holds, and what tells whether it changes."""

    value: Any
    of: Any

    def is_same(self, now: "StateMark") -> bool:
        return type(self.of) is type(now.of) and (self.of is now.of or self.of == now.of)


State = dict[str, list[StateMark]]


def state_around(fn: Callable[..., Any]) -> State:
    """What tells whether Python values change that ``fn`` finds outside of its arguments."""
    found: State = {}
    for place in places_around(getattr(fn, "__wrapped__", fn)):
        found.setdefault(place.name, []).append(StateMark(place.value, _mark(place.value)))
    return found


def check_changes(
    fn: Callable[..., Any],
    before: State,
    carried: Carried,
    traced: "Traced",
    again: "Callable[[], Traced]",
) -> None:
    """Warn if the function changed Python values while it was traced, and its next trace is another
    one.

    Args:
        before: what the values were.
        carried: what models left in attributes.
        again: traces the function anew; what it changes then is undone.

    Raises:
        TraceError: these are arrays.
    """
    changed = list(_changes(before, state_around(fn)))
    if not (changed or carried):
        return
    arrays = [(name, was, now) for name, was, now in changed if isinstance(now.value, np.ndarray)]
    for name, was, now in arrays:
        if was.value is now.value and any(_shares_memory(now.value, x) for x in traced.constants):
            raise _of_array(name)
    is_same = False
    if not any(_gives_items(now.value) for _, _, now in changed):
        with given_back(getattr(fn, "__wrapped__", fn)), as_left(carried), suppress(Exception):
            first = traced if traced.symbolic is None else again()
            is_same = is_same_program(first, again())
    if is_same:
        return
    names = [name for name, *_ in arrays]
    names += [
        f"{name!r} of a model" for (_, name), x in carried.items() if isinstance(x, np.ndarray)
    ]
    if names:
        raise _of_array(names[0])
    if changed:
        name, was, now = changed[0]
        what = f"{name}, {_described(was, now)}"
    else:
        name = ", ".join(sorted({repr(name) for _, name in carried}))
        what = f"{name} of a model changed"
    warnings.warn(
        f"{what} while the function was traced, and"
        " the function computes something else when it runs again. A step is traced once: each"
        " call computes what the first one does. Pass such a value as an argument, as a tensor"
        " if it changes often.",
        StaleCaptureWarning,
        stacklevel=2,
    )


def _gives_items(x: Any) -> bool:
    """Whether another trace would take items of an iterator that cannot be put back."""
    return hasattr(type(x), "__next__") and not isinstance(x, itertools.count)


def _of_array(name: str) -> TraceError:
    return TraceError(
        f"{name}, is an array that the function changes, and reads at its next call. A step is"
        " traced once, and its calls do not go through Python: each would read what was there at"
        " first. Make it a tensor; pass it as an argument, and return it (has_aux=True)."
    )


def _changes(before: State, after: State) -> Iterator[tuple[str, StateMark, StateMark]]:
    """The places whose values have changed, with both. A new tensor is none: `left_behind` sees
    them.
    """
    for name in dict.fromkeys([*before, *after]):
        was, now = before.get(name, []), after.get(name, [])
        for i in range(max(len(was), len(now))):
            a = was[i] if i < len(was) else _NOTHING
            b = now[i] if i < len(now) else _NOTHING
            if not (isinstance(b.value, Tensor) or a.is_same(b)):
                yield name, a, b


_NOTHING = StateMark(None, NotImplemented)


def _described(was: StateMark, now: StateMark) -> str:
    if was is _NOTHING:
        return "was added"
    if now is _NOTHING:
        return "was removed"
    if all(is_leaf(mark.value) for mark in (was, now)):
        return f"went from {was.value!r} to {now.value!r}"
    return "changed"


def _mark(x: Any) -> Any:
    """What is equal as long as a value is the same; its type where its parts have marks of their
    own.
    """
    if type(x) in SYMBOLIC or isinstance(x, Tensor):
        return type(x)
    if is_leaf(x) or isinstance(x, complex | np.generic):
        return x
    if is_leaf_state(x):
        return now_in(x)
    if isinstance(x, dict | list | tuple | deque) and len(held := held_in(x)) > LARGE:
        return type(x), tuple(value for value in held if type(value) in CONSTANTS)
    if isinstance(x, GeneratorType):
        frame = x.gi_frame
        return frame and (frame.f_lasti, _marks(frame.f_locals.values()))
    if hasattr(type(x), "__next__") and type(x).__module__ in ("builtins", "itertools"):
        return _mark_of_iterator(x)
    return type(x)


def _marks(values: Iterable[Any]) -> tuple[Any, ...]:
    """The marks of what an iterator holds, which may be itself."""
    return tuple(
        len(held_in(x))
        if isinstance(x, list | tuple | dict)
        else type(x)
        if isinstance(x, GeneratorType)
        else _mark(x)
        for x in values
    )


def _mark_of_iterator(x: Any) -> Any:
    """Python's own iterators give their state to be copied."""
    try:
        _, given, *state = x.__reduce__()
    except Exception:
        return type(x)
    parts = (part for each in state for part in (each if isinstance(each, tuple) else (each,)))
    return _marks((*given, *parts))


def _shares_memory(array: np.ndarray, x: Tensor) -> bool:
    storage = storage_of(x)
    if storage is None or x.device.type != "cpu":
        return False
    start, first = storage.data_ptr(), array.__array_interface__["data"][0]
    return start < first + array.nbytes and first < start + storage.nbytes()


def is_same_program(a: "Traced", b: "Traced") -> bool:
    """Whether two traces are of one program, with equal constants."""
    if (str(a.gm.graph), a.out_tree, a.out_leaves) != (str(b.gm.graph), b.out_tree, b.out_leaves):
        return False
    return len(a.constants) == len(b.constants) and all(
        x is y or (x.shape == y.shape and x.dtype == y.dtype and torch.equal(x, y))
        for x, y in zip(a.constants, b.constants, strict=True)
    )
