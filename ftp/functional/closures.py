"""Run a function again later with its variables, containers and attributes as they are now."""

import dis
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from functools import lru_cache, partial
from operator import is_
from types import BuiltinMethodType, CellType, CodeType, FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

from ftp.functional.attributes import (
    CONSTANTS,
    OF_MODULES,
    REGISTERED,
    is_of_library,
    is_plain_object,
    of_class,
    slots_of,
)
from ftp.source import is_editable, is_users

_RESTORED = (dict, OrderedDict, defaultdict, list, set, deque)
_VISITED = 10_000  # most objects to look for containers in, the nearest first,
_OF_MODULE = 100  # and as many more for each module
_LEAVES = (*CONSTANTS, Tensor)


def bound_now(fn: Callable[..., Any]) -> Callable[..., Any]:
    """``fn`` with the present values of its captured variables, and of the containers and
    attributes that they hold. Without it, a lambda in a loop that runs again in the backward pass
    reads the loop variable's last value.

    >>> def outer(i, seen):
    ...     late = lambda: (i, seen[0])
    ...     now = bound_now(late)
    ...     i = seen[0] = 2
    ...     return late(), now()
    >>> outer(1, [1])
    ((2, 2), (1, 1))
    """
    contents = contents_of(fn)

    def now(*args: Any, **kwargs: Any) -> Any:
        with restored(contents):
            return fn(*args, **kwargs)

    return now if contents else fn


class Content:
    """The present content of a captured variable (a cell), a container, an object or a module, to
    be restored later.
    """

    def __init__(self, of: Any) -> None:
        self.of = of
        self.held = now_in(of)

    @property
    def values(self) -> Iterable[Any]:
        """What may hold tensors: of a module, not its hooks."""
        held = own_attributes(self.held) if isinstance(self.of, nn.Module) else self.held
        return held.values() if isinstance(held, dict) else held

    def give_back(self) -> None:
        put_in(self.of, self.held)


def now_in(of: Any) -> Any:
    """A copy of the content: a dict of the attributes, or a container of the values."""
    if isinstance(of, CellType):
        return [] if _is_empty(of) else [of.cell_contents]
    if isinstance(of, nn.Module):
        return dict(of.__dict__)
    return copy(of) if type(of) in _RESTORED else slots_of(of)


def put_in(of: Any, held: Any) -> None:
    """Make ``held`` the content of ``of``."""
    if isinstance(of, CellType):
        if held:
            (of.cell_contents,) = held
        elif not _is_empty(of):
            del of.cell_contents
        return
    if not isinstance(of, nn.Module) and type(of) not in _RESTORED:
        for name in slots_of(of).keys() - held.keys():
            object.__delattr__(of, name)
        for name, value in held.items():
            object.__setattr__(of, name, value)
        return
    of = of.__dict__ if isinstance(of, nn.Module) else of
    of.clear()
    (of.update if isinstance(of, dict | set) else of.extend)(held)


def is_same(held: Any, now: Any) -> bool:
    """Whether two contents have the same values under the same names."""
    if isinstance(held, set):
        return held == now
    if len(held) != len(now) or not all(map(is_, held, now)):
        return False  # of dicts, the keys
    return not isinstance(held, dict) or all(map(is_, held.values(), now.values()))


@contextmanager
def restored(contents: Sequence[Content]) -> Iterator[None]:
    """Within the block, variables and containers hold ``contents``."""
    later = [now for c in contents if not is_same(c.held, (now := Content(c.of)).held)]
    changed = set(map(id, (now.of for now in later)))
    try:
        for content in contents:
            if id(content.of) in changed:
                content.give_back()
        yield
    finally:
        for content in later:
            content.give_back()


def contents_of(root: Any, seen: set[int] | None = None) -> list[Content]:
    """The contents of the variables, containers and objects that ``root`` refers to, directly or
    through others.

    Args:
        seen: the ids of what has been visited, which is left out; it gets those of ``found``.
    """
    found: list[Content] = []
    seen = set() if seen is None else seen
    queue: list[Any] = [root]
    most = len(seen) + _VISITED
    for visited in queue:  # the loop appends to it
        if isinstance(visited, _LEAVES) or id(visited) in seen or len(seen) >= most:
            continue
        seen.add(id(visited))
        if isinstance(visited, FunctionType):
            cells = [cell for cell in visited.__closure__ or () if not _is_empty(cell)]
            found += map(Content, cells)
            queue += _around(visited, [cell.cell_contents for cell in cells])
        elif isinstance(visited, MethodType):
            queue += [visited.__self__, visited.__func__]
        elif isinstance(visited, BuiltinMethodType):  # of a container
            queue.append(visited.__self__)
        elif isinstance(visited, partial):
            queue += [visited.func, *visited.args, *visited.keywords.values()]
        elif isinstance(visited, tuple):
            queue += visited
        elif isinstance(visited, dict | list | set | deque):
            if type(visited) in _RESTORED:
                found.append(Content(visited))
            queue += visited.values() if isinstance(visited, dict) else visited
        elif isinstance(visited, nn.Module):
            found.append(Content(visited))
            queue += own_attributes(visited.__dict__).values()
            most += _OF_MODULE
            if id(type(visited)) not in seen:
                seen.add(id(type(visited)))
                queue += _of_class(type(visited))
        elif is_plain_object(visited):
            queue.append(getattr(visited, "__dict__", ()))
            if slots := slots_of(visited):
                found.append(Content(visited))
                queue += slots.values()
    return found


def own_attributes(attributes: dict[str, Any]) -> dict[str, Any]:
    """The attributes of a module without those that every module has, such as its hooks."""
    return {k: v for k, v in attributes.items() if k not in OF_MODULES or k in REGISTERED}


def _of_class(kind: type[nn.Module]) -> Iterator[Any]:
    """The containers of a user's module class, and its functions."""
    yield from (value for _, value in of_class(kind))
    for owner in kind.__mro__:
        for value in () if is_of_library(owner) else vars(owner).values():
            if isinstance(value, FunctionType) and is_editable(value.__code__.co_filename):
                yield value


def _is_empty(cell: CellType) -> bool:
    try:
        return cell.cell_contents is cell
    except ValueError:
        return True


def _around(fn: FunctionType, held: list[Any]) -> list[Any]:
    """The values that a function refers to: captured ones (``held``), defaults and globals; for a
    function of ftp, captured and default callables alone.
    """
    held = [*held, *(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values()]
    if not is_users(fn.__code__):
        return [x for x in held if callable(x)]
    return held + [fn.__globals__[name] for name in _read(fn.__code__) if name in fn.__globals__]


@lru_cache(maxsize=4096)
def _read(code: CodeType) -> frozenset[str]:
    """The names of the globals that a function, or one within it, reads."""
    own = (each.argval for each in dis.get_instructions(code) if each.opname == "LOAD_GLOBAL")
    inner = (_read(each) for each in code.co_consts if isinstance(each, CodeType))
    return frozenset(own).union(*inner)
