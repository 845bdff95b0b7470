"""Errors about rows that a mask selects."""

from contextvars import ContextVar

from ftp.errors import TraceError
from ftp.source import user_line

_ASKED_AT: ContextVar[str] = ContextVar("ftp_number_of_rows_asked_at", default="")


def refused(what: str, as_it_is: bool = False, instead: str | None = None) -> TraceError:
    line = user_line()
    instead = instead or (
        "Selected rows may go through functions of each row, and end in a sum, a mean, a loss,"
        " x[mask] = rows or index_add. Else use torch.where(mask, x, 0) or weights, or"
        " ftp.static.masked_select and nonzero, which take a size."
    )
    does = what if as_it_is else f"{what}, which is asked of rows that a mask selects,"
    where = f" at {line}" if line else ""
    return TraceError(f"{does} depends on values{where}: a program has fixed shapes.\n  {instead}")


def number_refused(what: str) -> TraceError:
    _ASKED_AT.set(user_line())
    instead = (
        "x[mask].shape[0] and mask.sum() are their number, in arithmetic:"
        " mask.sum().clamp(min=1). An if for no rows is not needed: sums of none are zero, and"
        " writes write nothing."
    )
    return refused(what, instead=instead)


def is_number_asked_at(line: str) -> bool:
    """Whether a line has asked for a number of selected rows. torch drops the error above where it
    wants a size, and says only that there are too many arguments.
    """
    return line != "" and line == _ASKED_AT.get()
