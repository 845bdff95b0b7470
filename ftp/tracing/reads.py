"""Traces of functions that read values as Python numbers."""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ftp.errors import TraceError
from ftp.tracing.data_dependent.values_read import (
    Reading,
    ValueAsked,
    ValuesRead,
    reading_to,
)
from ftp.tracing.input_values import WholeInputs
from ftp.tracing.selected_rows.results import counted

if TYPE_CHECKING:
    from ftp.tracing.trace import Traced


class _FollowsDecision(Exception):
    """The function reads a value after a decision: each path would read a value of its own."""


def with_reads(
    made: "Callable[..., Traced]", reads: ValuesRead | None, whole: WholeInputs | None
) -> "Traced":
    """A trace that reads as few values as possible.

    Args:
        made: makes a trace that reads the values of a level.
    """
    refused: TraceError | None = None
    if reads is None or not (reads.values or whole):
        try:
            return made(reads=None)
        except TraceError as error:
            if not error.needs_value or reads is None:
                raise
            refused = error
            reads = reads.more(decisions=True) if error.needs_decisions else reads
    while reads is not None:
        decides = False
        try:
            return made(reads=reads, whole=whole)
        except _FollowsDecision:
            pass
        except TraceError as error:
            if not error.needs_value:
                raise
            refused, decides = refused or error, error.needs_decisions
        reads = reads.more(decisions=decides)
        whole = whole and replace(whole, after=0)
    assert refused is not None
    raise refused


def result_of(
    fn: Callable[..., Any], args: Any, reading: Reading | None, has_decided: Callable[[], bool]
) -> Any:
    """The function's result; if it asks for a value, the tensor that has the value."""
    if reading is None:
        return counted(fn(*args))
    reading.begin()
    out: Any = None
    try:
        with reading_to(reading, has_decided):
            out = counted(fn(*args))
    except (ValueAsked, Exception):
        # torch replaces an error that is raised where it converts a size.
        if not reading.is_over:
            raise
    if reading.follows_decision:
        raise _FollowsDecision
    return out if reading.asked is None else reading.asked
