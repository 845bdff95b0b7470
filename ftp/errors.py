"""The exception types: every error a user can cause is an ``FtpError``.

>>> from ftp import P, errors
>>> try:
...     P("tp", "tp")
... except errors.SpecError as error:
...     print(error)
...
P('tp', 'tp') uses mesh axis 'tp' for dim 0 and again for dim 1. Try P('tp', None).
"""

import re
from collections.abc import Iterable
from typing import Any


class FtpError(Exception):
    """Base of all errors that ftp raises for something that its caller can correct.

    >>> import ftp
    >>> try:
    ...     ftp.simulated_mesh((0,), ("tp",))
    ... except ftp.FtpError as error:
    ...     type(error).__name__
    ...
    'MeshError'
    """


class SpecError(FtpError):
    """A PartitionSpec, spec tree or path pattern that does not fit its tensor, tree or mesh."""


class MeshError(FtpError):
    """A mesh that does not fit the processes, the devices or the call."""


class TraceError(FtpError):
    """A function that cannot be traced into one functional graph.

    Attributes:
        needs_value: whether the function needs a value, or a shape that depends on one.
        needs_decisions: whether it decides by values in too many ways, and uses no integers before.
        is_of_earlier_trace: whether it uses a tensor that an earlier trace left behind.
    """

    needs_value = False
    needs_decisions = False
    is_of_earlier_trace = False


class RuleError(FtpError):
    """A sharding rule that cannot be parsed or does not fit the op it is given for."""


class InputError(FtpError):
    """Arguments of a call that do not fit the program: tree, shape, dtype or device."""


class PlacementError(InputError):
    """A tensor whose placement is not the one that the call needs."""


class DonationError(InputError):
    """A donated tensor that is used again, or donated twice."""


class PlanningError(FtpError):
    """Specs and constraints that no program satisfies."""


class ExplicitError(PlanningError):
    """With ``explicit=True``, collectives that nobody asked for.

    Attributes:
        missing: the lines that ask for them, each with ``source``, ``line`` and ``nbytes``.
    """

    missing: tuple[Any, ...] = ()


class ScheduleError(PlanningError):
    """A pipeline's schedule that misses or repeats work, or on which ranks wait for ever."""


class CertificateError(FtpError):
    """A program whose collectives do not make every output right, or a certificate that cannot
    be read.

    Attributes:
        output: of a rank program, the first wrong output: its path, or that of a gradient's input.
        rank: the first rank that has it wrong.
        line: the line of the program where it goes wrong.
        inputs: whole arguments on which the rank program and the reference differ.
    """

    output: str | None = None
    rank: int | None = None
    line: str | None = None
    inputs: tuple[Any, ...] | None = None


class Undecided(FtpError):
    """Two programs of which neither a proof nor a difference was found.

    Attributes:
        ops: those that the proof cannot see through.
    """

    ops: tuple[str, ...] = ()


class MismatchError(FtpError):
    """Ranks that disagree on the program they are about to run.

    Attributes:
        facet: what they disagree on, such as "program" or "argument tree"; None where a rank never
            arrived, failed, or goes on with another program.
    """

    facet: str | None = None


class CheckpointError(FtpError):
    """A checkpoint that cannot be written, or lacks the requested tensors."""


class DamagedError(CheckpointError):
    """A checkpoint, or a file of one, that is not what was written: truncated, altered, or parts
    of it gone.
    """


class ProgramFileError(FtpError):
    """A saved program that is damaged, is not of this torch and ftp, or cannot be saved."""


class ReportError(FtpError, AssertionError):
    """A claim about a program that does not hold, or a report that cannot be made."""


class CollectiveError(FtpError):
    """A collective that failed while it ran: a rank that is missing, late or ended."""


class ReplicaError(FtpError):
    """Ranks that hold different copies of a value that they should share."""


class ReplicationWarning(UserWarning):
    """An op without a rule is computed whole on every rank."""


class DiscoveryWarning(UserWarning):
    """An op without a stated rule is divided by one that was found by trial."""


class PlanWarning(UserWarning):
    """A plan that leaves much of a model whole on every rank, or ranks of a pipeline idle."""


class ReadWarning(UserWarning):
    """A function needs a value as a Python number, so that each value has a program of its own."""


class CodeWarning(UserWarning):
    """Compiled code that is there and not used, so that a start takes longer."""


class StaleCaptureWarning(UserWarning):
    """A program still uses a value that the function's code has replaced: a variable holds
    another tensor than the one that was captured, a model counts its calls.
    """


MANY = 16  # failures of one error, above which those that differ in numbers only are counted


def join_failures(failures: Iterable[str]) -> str:
    """One message from several, one failing leaf each. Of many the first of each kind is said: one
    mistake in a plan is a failure of every layer.

    >>> print(join_failures(["a is wrong.", "b is wrong."]))
    a is wrong.
    b is wrong.
    >>> print(join_failures([f"layers.{i} is wrong." for i in range(80)]))
    layers.0 is wrong. (79 more are alike, but for numbers)
    """
    lines = list(failures)
    if len(lines) <= MANY:
        return "\n".join(lines)
    alike: dict[str, list[str]] = {}
    for line in lines:
        alike.setdefault(re.sub(r"\d+", "0", line), []).append(line)
    return "\n".join(
        f"{first} ({len(more)} more are alike, but for numbers)" if more else first
        for first, *more in alike.values()
    )


def raise_all(kind: type[FtpError], failures: Iterable[str]) -> None:
    """Raise one error that reports every failing leaf, if there is any."""
    if message := join_failures(failures):
        raise kind(message)
