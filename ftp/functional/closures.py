"""Run a function again later with its variables, containers and attributes as they are now."""

import dis
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from functools import lru_cache, partial
from operator import is_
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

from ftp.functional.attributes import CONSTANTS, OF_MODULES, REGISTERED, is_plain_object
from ftp.source import is_users

_RESTORED = (dict, OrderedDict, defaultdict, list, set, deque)
_VISITED = 10_000  # most objects to look for containers in, the nearest first
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
    """The present content of a captured variable (a cell) or a container, to be restored later."""

    def __init__(self, of: Any) -> None:
        self.of = of
        self._held = [of.cell_contents] if isinstance(of, CellType) else copy(of)

    @property
    def is_current(self) -> bool:
        of, held = self.of, self._held
        if isinstance(held, set):
            return of == held
        if isinstance(of, CellType):
            return of.cell_contents is held[0]
        if isinstance(held, dict):
            return len(of) == len(held) and all(of.get(k, held) is v for k, v in held.items())
        return len(of) == len(held) and all(map(is_, of, held))

    def give_back(self) -> None:
        if isinstance(self.of, CellType):
            (self.of.cell_contents,) = self._held
            return
        self.of.clear()
        (self.of.update if isinstance(self.of, dict | set) else self.of.extend)(self._held)


@contextmanager
def restored(contents: Sequence[Content]) -> Iterator[None]:
    """Within the block, variables and containers hold ``contents``."""
    changed = [content for content in contents if not content.is_current]
    later = [Content(content.of) for content in changed]
    try:
        for content in changed:
            content.give_back()
        yield
    finally:
        for content in later:
            content.give_back()


def contents_of(root: Any) -> list[Content]:
    """The contents of the variables, containers and objects that ``root`` refers to, directly or
    through others.
    """
    found: list[Content] = []
    seen: set[int] = set()
    queue: list[Any] = [root]
    for visited in queue:  # the loop appends to it
        if isinstance(visited, _LEAVES) or id(visited) in seen or len(seen) == _VISITED:
            continue
        seen.add(id(visited))
        if isinstance(visited, FunctionType):
            cells = [cell for cell in visited.__closure__ or () if not _is_empty(cell)]
            found += map(Content, cells)
            queue += _around(visited, [cell.cell_contents for cell in cells])
        elif isinstance(visited, MethodType):
            queue += [visited.__self__, visited.__func__]
        elif isinstance(visited, partial):
            queue += [visited.func, *visited.args, *visited.keywords.values()]
        elif isinstance(visited, tuple):
            queue += visited
        elif isinstance(visited, dict | list | set | deque):
            if type(visited) in _RESTORED:
                found.append(Content(visited))
            queue += visited.values() if isinstance(visited, dict) else visited
        elif isinstance(visited, nn.Module):
            found.append(Content(visited.__dict__))
            queue += own_attributes(visited.__dict__).values()
        elif is_plain_object(visited):
            queue.append(getattr(visited, "__dict__", ()))
    return found


def own_attributes(attributes: dict[str, Any]) -> dict[str, Any]:
    """The attributes of a module without those that every module has, such as its hooks."""
    return {k: v for k, v in attributes.items() if k not in OF_MODULES or k in REGISTERED}


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
