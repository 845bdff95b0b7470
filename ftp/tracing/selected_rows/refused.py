"""Errors about decisions by a tensor's values, and about rows that a mask selects."""

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any

from ftp.context import set_within
from ftp.errors import TraceError
from ftp.source import is_called_from, raised_call, user_line, users_call

# The line that last used a traced number as a size, and whether it was a number of selected rows.
_ASKED_AT: ContextVar[tuple[str, bool]] = ContextVar("ftp_number_asked_at", default=("", False))


# The errors of one run of a function that needed values, and the calls in its code that got them.
_NEEDED: ContextVar[list[tuple[Exception, Any]] | None] = ContextVar("ftp_needed", default=None)


def value_error(message: str) -> TraceError:
    """The error of a function that needs a value, or a shape that depends on one."""
    error = TraceError(message)
    error.needs_value = True
    note_needed(error)
    return error


def note_needed(error: Exception) -> None:
    """Note an error that the function gets in a trace alone, because it needs a value or another
    way to its gradient; not for a line of a log, where Python's logging prints errors, and goes on.
    """
    if (needed := _NEEDED.get()) is not None and not is_called_from(logging.__file__):
        needed.append((error, users_call()))


def forget_needed() -> None:
    """Forget errors of the call that is made now: torch asks numbers whether they are sizes, and
    goes on where they raise one.
    """
    needed = _NEEDED.get()
    while needed and needed[-1][1] == users_call():
        needed.pop()


@contextmanager
def needed_values_refused() -> Iterator[None]:
    """A block that ends with the first error of a needed value, also where code catches it: on one
    device there is no error, and the code goes on with the value.
    """
    needed: list[tuple[Exception, Any]] = []
    try:
        with set_within(_NEEDED, needed):
            yield
    except Exception as error:
        call = raised_call(error)
        if any(error is each or call == at for each, at in needed) or not needed:
            raise
        raise needed[0][0] from None
    if needed:
        raise needed[0][0]


def tried() -> AbstractContextManager[Any]:
    """A block whose errors are caught, and which is then run in another way."""
    return set_within(_NEEDED, None)


def value_refused(line: str, advice: str = "") -> TraceError:
    return value_error(
        "The function needs a tensor's value (if, while, bool(), float(), int(), .item(),"
        " .tolist(), .numpy())"
        f"{f' at {line}' if line else ''}.{advice or NO_VALUES}"
    )


NO_VALUES = (
    "\n  A trace has shapes and no values. Choose with torch.where, keep numbers as tensors or as"
    " x.item(), or pass the value as a static argument"
    " (a Python number). Sizes, split points and numbers of classes are Python numbers too."
    "\n  What NumPy or SciPy computes is an op of its own: torch.library.custom_op."
)


def numpy_refused(kind: str) -> TraceError:
    line = user_line()
    return value_error(
        f"A number that the function reads from a tensor is used beside numpy's {kind}"
        f"{f' at {line}' if line else ''}. Use a Python number or a tensor."
    )


def refused(what: str, as_it_is: bool = False, instead: str | None = None) -> TraceError:
    """The error for a use of selected rows that no program of fixed shapes can run.

    Args:
        what: the use: a function's name, or the whole subject of the message if ``as_it_is``.
        instead: what the user can write; default, advice on selected rows.
    """
    line = user_line()
    instead = instead or (
        "Selected rows may go through functions of each row, and end in a sum, a mean, a loss,"
        " x[mask] = rows or index_add. Otherwise use torch.where(mask, x, 0) or weights, or"
        " ftp.static.masked_select and nonzero, which take a size."
    )
    does = what if as_it_is else f"{what}, which is asked of rows that a mask selects,"
    where = f" at {line}" if line else ""
    return value_error(f"{does} depends on values{where}: a program has fixed shapes.\n  {instead}")


def number_refused(is_of_rows: bool, what: str = "the number of selected rows") -> TraceError:
    """The error where a number of selected rows, or another value, is used as a size."""
    line = user_line()
    _ASKED_AT.set((line, is_of_rows))
    if not is_of_rows:
        return value_refused(line)
    instead = (
        "Use x[mask].shape[0] and mask.sum(), the number of rows, in arithmetic:"
        " mask.sum().clamp(min=1). Where no row is selected, sums are zero and writes do nothing."
    )
    return refused(what, instead=instead)


def number_asked_at(line: str) -> bool | None:
    """Whether the number that a line has asked for is one of selected rows; None if it asked for
    none. torch drops the error above where it wants a size, and says only that there are too many
    arguments.
    """
    asked, is_of_rows = _ASKED_AT.get()
    return is_of_rows if line and line == asked else None
