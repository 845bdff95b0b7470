"""Functions that run again later: their variables keep the values of now."""

import dis
from collections.abc import Callable
from functools import lru_cache, partial
from types import CellType, CodeType, FunctionType
from typing import Any


def bound_now(fn: Callable[..., Any]) -> Callable[..., Any]:
    """``fn`` with the values that the variables around it have now, also in functions that they
    hold: a lambda of a loop reads the loop's variable, which has moved on when the lambda is run
    again in the backward pass.

    >>> i = 1
    >>> def outer(i):
    ...     late = lambda: i
    ...     now = bound_now(late)
    ...     i = 2
    ...     return late(), now()
    >>> outer(1)
    (2, 1)
    """
    return _bound(fn, {})


def _bound(fn: Any, done: dict[int, Any]) -> Any:
    if id(fn) in done:
        return done[id(fn)]
    if type(fn) is partial:
        return partial(_bound(fn.func, done), *fn.args, **fn.keywords)
    # A function that assigns a variable around it is left alone: others read what it assigns.
    if type(fn) is not FunctionType or fn.__closure__ is None or _assigned(fn.__code__):
        return fn
    cells = tuple(CellType() for _ in fn.__closure__)
    new = FunctionType(fn.__code__, fn.__globals__, fn.__name__, fn.__defaults__, cells)
    new.__kwdefaults__, new.__qualname__ = fn.__kwdefaults__, fn.__qualname__
    new.__module__, new.__doc__ = fn.__module__, fn.__doc__
    new.__dict__.update(fn.__dict__)
    done[id(fn)] = new
    for cell, held in zip(cells, fn.__closure__, strict=True):
        try:
            value = held.cell_contents
        except ValueError:  # not assigned yet
            continue
        cell.cell_contents = _bound(value, done)
    return new


@lru_cache(maxsize=4096)
def _assigned(code: CodeType) -> bool:
    """Whether a function, or one within it, assigns variables of the functions around it."""
    stored = {
        each.argval
        for each in dis.get_instructions(code)
        if each.opname in ("STORE_DEREF", "DELETE_DEREF")
    }
    inner = (each for each in code.co_consts if isinstance(each, CodeType))
    return bool(stored & set(code.co_freevars)) or any(map(_assigned, inner))
