"""What an object holds: copy it now, and put it back later."""

import pickle
import random
import sys
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import lru_cache, partial
from threading import local
from types import CellType, FunctionType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from ftp.functional.attributes import slots_of
from ftp.torch_internals.functorch import temporarily_clear_interpreter_stack
from ftp.torch_internals.modes import DisableTorchFunction

_OF_HOOKS = tuple(k for k in vars(nn.Module()) if k.startswith(("_forward_", "_backward_")))


class Globals:
    """The variables of a module's namespace that code names."""

    def __init__(self, namespace: dict[str, Any]) -> None:
        self.namespace, self.names = namespace, dict[str, None]()

    def new(self, names: Iterable[str]) -> list[str]:
        """Add names; return those that have a value and are new."""
        found = [name for name in names if name in self.namespace and name not in self.names]
        self.names.update(dict.fromkeys(names))
        return found


class Hooks:
    """The functions that a module calls around its forward and backward pass."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    @property
    def by_kind(self) -> dict[str, dict[int, Any]]:
        return {name: self.module.__dict__[name] for name in _OF_HOOKS}

    def now(self) -> dict[tuple[str, int], Any]:
        kinds = self.by_kind.items()
        return {(name, key): hook for name, of in kinds if of for key, hook in of.items()}

    def put(self, held: dict[tuple[str, int], Any]) -> None:
        for of in self.by_kind.values():
            of.clear()
        for (name, key), hook in held.items():
            self.by_kind[name][key] = hook


class _Way(NamedTuple):
    """How to copy what an object holds, and how to put it back."""

    get: Callable[[Any], Any]
    put: Callable[[Any, Any], Any]


def now_in(of: Any) -> Any:
    """A copy of what ``of`` holds."""
    return _kind(type(of)).get(of)


def put_in(of: Any, held: Any) -> None:
    """Make ``held`` the content of ``of``."""
    _kind(type(of)).put(of, held)


def has_content(x: Any) -> bool:
    """Whether an object holds something apart from what its slots hold."""
    return _kind(type(x)) is not _SLOTS


def has_own_state(x: Any) -> bool:
    """Whether an object's content is a state without parts: an array, a set, a generator of random
    numbers.
    """
    return isinstance(x, (*_STATES, *(kind for kind, _ in _of_numpy())))


def is_empty(cell: CellType) -> bool:
    """Whether a captured variable has no value, or itself for one."""
    try:
        return cell.cell_contents is cell
    except ValueError:
        return True


def _put_cell(cell: CellType, held: list[Any]) -> None:
    if held:
        (cell.cell_contents,) = held
    elif not is_empty(cell):
        del cell.cell_contents


def _of_container(kind: Any, copy: Callable[[Any], Any]) -> _Way:
    """By the functions of ``kind``: a class made from it may have others of their names."""
    fill = kind.update if hasattr(kind, "update") else kind.extend

    def put(of: Any, held: Any) -> None:
        kind.clear(of)
        fill(of, held)

    return _Way(copy, put)


def _of_attributes(names: Callable[[Any], Mapping[str, Any]], by: Any) -> _Way:
    """By the functions ``__setattr__`` and ``__delattr__`` of the class ``by``."""

    def put(of: Any, held: dict[str, Any]) -> None:
        now = names(of)
        for name in now.keys() - held.keys():
            by.__delattr__(of, name)
        for name, value in held.items():
            if name not in now or now[name] is not value:
                with suppress(AttributeError):  # read-only, and made anew each time it is read
                    by.__setattr__(of, name, value)

    return _Way(lambda of: dict(names(of)), put)


def _of_dict(namespace: Callable[[Any], dict[str, Any]]) -> _Way:
    put = _of_container(dict, dict).put
    return _Way(lambda of: dict(namespace(of)), lambda of, held: put(namespace(of), held))


def _put_globals(of: Globals, held: dict[str, Any]) -> None:
    for name in of.names:
        if name in held:
            of.namespace[name] = held[name]
        else:
            of.namespace.pop(name, None)


def _of_generator(get: Callable[[Any], Any], put: Callable[[Any, Any], Any]) -> _Way:
    return _Way(lambda of: pickle.dumps(get(of)), lambda of, held: put(of, pickle.loads(held)))


@contextmanager
def _outside() -> Iterator[None]:
    with DisableTorchFunction(), temporarily_clear_interpreter_stack():
        yield


def _state_of(of: torch.Generator) -> bytes:
    with _outside():
        return of.get_state().numpy().tobytes()


def _put_state(of: torch.Generator, state: bytes) -> None:
    with _outside():
        of.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


def _put_array(of: np.ndarray, held: bytes) -> None:
    of[...] = np.frombuffer(held, of.dtype).reshape(of.shape)


def _refill(of: "array[Any]", held: bytes) -> None:
    del of[:]
    of.frombytes(held)


def _of_function(fn: FunctionType) -> dict[str, Any]:
    return {"__defaults__": fn.__defaults__}


def _of_type(kind: type) -> dict[str, Any]:
    """A class's attributes that are neither functions nor properties."""
    own = ((k, v) for k, v in vars(kind).items() if not k.startswith("__"))
    return {name: value for name, value in own if not hasattr(type(value), "__get__")}


def _of_error(error: BaseException) -> dict[str, Any]:
    own = {name: getattr(error, name) for name in ("args", "__cause__", "__context__")}
    return {**slots_of(error), **own}


_SLOTS = _of_attributes(slots_of, object)
_KINDS: dict[Any, _Way] = {
    CellType: _Way(lambda of: [] if is_empty(of) else [of.cell_contents], _put_cell),
    nn.Module: _of_dict(lambda of: of.__dict__),
    OrderedDict: _of_container(OrderedDict, lambda of: dict(OrderedDict.items(of))),
    dict: _of_container(dict, lambda of: dict(dict.items(of))),
    list: _of_container(list, list),
    deque: _of_container(deque, list),
    set: _of_container(set, set),
    type: _of_attributes(_of_type, type),
    FunctionType: _of_attributes(_of_function, object),
    partial: _Way(
        lambda of: {"args": of.args},
        lambda of, held: of.__setstate__((of.func, held["args"], of.keywords, vars(of))),
    ),
    BaseException: _of_attributes(_of_error, object),
    Globals: _Way(
        lambda of: {name: of.namespace[name] for name in of.names if name in of.namespace},
        _put_globals,
    ),
    Hooks: _Way(Hooks.now, Hooks.put),
    local: _of_dict(vars),
    ContextVar: _Way(
        lambda of: [] if of.get(_KINDS) is _KINDS else [of.get()],
        lambda of, held: [of.set(value) for value in held],
    ),
    random.Random: _of_generator(random.Random.getstate, random.Random.setstate),
    torch.Generator: _Way(_state_of, _put_state),
    np.ndarray: _Way(lambda of: of.tobytes(), _put_array),
    bytearray: _Way(bytes, lambda of, held: of.__setitem__(slice(None), held)),
    array: _Way(lambda of: of.tobytes(), lambda of, held: _refill(of, held)),
}


_STATES = (set, random.Random, np.ndarray, bytearray, array)


@lru_cache(maxsize=4096)
def _kind(of: type) -> _Way:
    kinds = [*_KINDS.items(), *_of_numpy()]
    return next((kind for base, kind in kinds if issubclass(of, base)), _SLOTS)


def _of_numpy() -> list[tuple[type, _Way]]:
    """numpy's generators; none where nobody has loaded them."""
    if "numpy.random" not in sys.modules:
        return []
    random_state = _of_generator(
        lambda of: of.get_state(legacy=False), lambda of, state: of.set_state(state)
    )
    generator = _of_generator(
        lambda of: of.bit_generator.state,
        lambda of, state: setattr(of.bit_generator, "state", state),
    )
    return [(np.random.RandomState, random_state), (np.random.Generator, generator)]
