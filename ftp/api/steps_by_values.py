"""StepsByValues: the steps of a function that reads values as Python numbers, by those values."""

import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from torch import Tensor

from ftp.api.arguments import Arguments
from ftp.api.definition import Definition, checked_specs, traced_for
from ftp.api.inputs import Inputs
from ftp.api.planned import Planned
from ftp.distributed.calls import Calls
from ftp.errors import ReadWarning
from ftp.tracing.data_dependent.values_read import Asked, Level, ValuesRead, frozen
from ftp.tracing.input_values import ReadProgram, WholeInputs
from ftp.tracing.trace import Traced
from ftp.turns import turn

if TYPE_CHECKING:
    from ftp.api.step import Step

_FAILED = ""  # what a rank sends that could not compute the values
_MANY = 10  # values, at which a step warns


class StepsByValues:
    """The steps of a function that reads values, one for each value or sequence of values.

    Args:
        definition: of the step whose program returns the value, or the inputs that values are
            computed from.
        new_step: makes a step of a definition, and of traces by the key of their arguments.

    Attributes:
        last: the step of the values that were read last, for each kind of values: the first value
            of another kind is read at another line.
    """

    def __init__(
        self, definition: Definition, new_step: "Callable[[Definition, Mapping[Any, Traced]], Step]"
    ):
        self._definition, self._new_step = definition, new_step
        self._steps: dict[ValuesRead, Step] = {}
        self._programs: WeakKeyDictionary[Planned, dict[ValuesRead, ReadProgram]] = (
            WeakKeyDictionary()
        )
        self._made = 0
        self.last: dict[Level, Step] = {}

    def step_for(
        self, planned: Planned, outputs: Sequence[Tensor], record: Calls, args: tuple[Any, ...]
    ) -> "Step":
        """The step that goes on with the values that the function reads. All ranks take the first
        rank's: it decides what they run.

        Args:
            planned: the program that was run.
            outputs: what it returned.
            args: of the call.
        """
        asked, traced = planned.asked, None
        assert asked is not None
        if asked.inputs:
            whole = WholeInputs(dict(zip(asked.inputs, outputs, strict=True)))
            reads, traced = self._computed(planned, asked, whole, record, args)
            reads = replace(reads, inputs=asked.inputs)
        else:
            own = json.dumps(outputs[0].tolist())
            reads = asked.given.then(json.loads(record.exchange("value read", own)[0]))
        with _told(record):  # a warning may be an error here, and on no other rank
            step = self._steps.pop(reads, None) or self._new(planned, asked, reads, traced)
        self._steps[reads] = self.last[asked.given.level] = step
        if len(self._steps) > self._definition.options.programs:
            del self._steps[next(iter(self._steps))]
        return step

    def _computed(
        self,
        planned: Planned,
        asked: Asked,
        whole: WholeInputs,
        record: Calls,
        args: tuple[Any, ...],
    ) -> tuple[ValuesRead, Traced | None]:
        """The values that the function reads, as far as plain ops compute them, and its trace if
        they are all and were not read before.
        """
        programs = self._programs.setdefault(planned, {})
        traced = None
        try:
            own = _known(programs.values(), whole)
            if own is None:
                traced = self._traced(planned, asked, asked.given, whole, args)
                own = _program(traced).reads
        except BaseException as e:
            record.exchange("values read", _FAILED)
            record.agree(record.next(), e)
            raise
        sent = record.exchange("values read", json.dumps([own.level, own.way, own.values]))
        if _FAILED in sent:
            record.agree(record.next(), {})  # which raises
        level, way, values = json.loads(sent[0])
        first = replace(own, values=frozen(values), level=Level(level), way=way)
        if first != own:
            traced = None
        if first not in programs:
            if traced is None:
                with _told(record):
                    traced = self._traced(planned, asked, first, whole, args)
            programs[first] = _program(traced)
            if len(programs) > self._definition.options.programs:
                del programs[next(iter(programs))]
        return first, traced if traced is None or traced.asked is None else None

    def _traced(
        self,
        planned: Planned,
        asked: Asked,
        reads: ValuesRead,
        whole: WholeInputs,
        args: tuple[Any, ...],
    ) -> Traced:
        """The trace of the function, which reads the values of ``reads`` first."""
        definition = self._definition
        call = Arguments(args, definition.arguments)
        inputs = Inputs(call, checked_specs(definition, call), planned.shapes)
        after = len(asked.given.values) if reads.level is asked.given.level else 0
        with turn():
            return traced_for(
                replace(definition, reads=reads), inputs, whole=replace(whole, after=after)
            )

    def _new(
        self, planned: Planned, asked: Asked, reads: ValuesRead, traced: Traced | None
    ) -> "Step":
        if not self._made:
            warnings.warn(
                f"{asked.line}\n  The function needs a value as a Python number, as for a size."
                " Each call computes it first, and each new value is traced and planned for itself."
                " Masks and ftp.static need one program for all (docs/values.md).",
                ReadWarning,
                stacklevel=5,
            )
        known = {} if traced is None else {planned.key: traced}
        step = self._new_step(replace(self._definition, reads=reads, dynamic=None), known)
        self._made += 1
        if self._made == _MANY:
            shown = [_shown(asked, r) for r in (*self._steps, reads)][-3:]
            warnings.warn(
                f"{asked.line}\n  The function has read {_MANY} different values here, the last"
                f" ones {', '.join(shown)}; each costs as much as a first call. Use a mask of"
                " fixed size, round the number up to a few, or take a size of ftp.static"
                " (docs/values.md).",
                ReadWarning,
                stacklevel=5,
            )
        return step


@contextmanager
def _told(record: Calls) -> Iterator[None]:
    """A block whose error the other ranks are told of."""
    try:
        yield
    except BaseException as e:
        record.agree(record.next(), e)
        raise


def _known(programs: Iterable[ReadProgram], whole: WholeInputs) -> ValuesRead | None:
    """The values that the function reads, if it has read the same ones before."""
    found: dict[tuple[Level, int], list[Any]] = {}
    for program in reversed([*programs]):
        kind = program.reads.level, len(program.reads.values) - len(program.expected)
        if any(a != b for a, b in zip(found.get(kind, ()), program.expected, strict=False)):
            continue
        values = found[kind] = program.run(whole)
        if tuple(values) == program.expected:
            return program.reads
    return None


def _program(traced: Traced) -> ReadProgram:
    assert traced.read_program is not None
    return traced.read_program


def _shown(asked: Asked, reads: ValuesRead) -> str:
    new = reads.values[len(asked.given.values) :]
    return repr(new[0] if len(new) == 1 else new)
