"""StepsByValues: the steps of a function that reads values as Python numbers, by those values."""

import json
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from ftp.api.definition import Definition
from ftp.distributed.calls import Calls
from ftp.errors import ReadWarning
from ftp.tracing.data_dependent.values_read import Asked, Level

if TYPE_CHECKING:
    from ftp.api.step import Step

_MANY = 10  # values, at which a step warns


class StepsByValues:
    """The steps of a function that reads a value, one for each value.

    Args:
        definition: of the step whose program returns the value.
        new_step: makes a step of a definition.

    Attributes:
        last: the step of the value that was read last, for each kind of values: the first value of
            another kind is read at another line.
    """

    def __init__(self, definition: Definition, new_step: "Callable[[Definition], Step]"):
        self._definition, self._new_step = definition, new_step
        self._steps: dict[tuple[Level, str], Step] = {}
        self._made = 0
        self.last: dict[Level, Step] = {}

    def step_for(self, asked: Asked, output: Tensor, record: Calls) -> "Step":
        """The step that goes on with the value that a program returned. All ranks take the first
        rank's: it decides what they run.
        """
        own = json.dumps(output.tolist())
        value = json.loads(record.exchange("value read", own)[0])
        reads = asked.given.then(value)
        if not self._made:
            warnings.warn(
                f"{asked.line}\n  The function needs a value as a Python number, as for a size."
                " Each call computes it first, and each new value is traced and planned for itself."
                " Masks and ftp.static need one program for all (docs/values.md).",
                ReadWarning,
                stacklevel=4,
            )
        key = reads.level, repr(reads.values[-1])
        step = self._steps.pop(key, None)
        if step is None:
            step = self._new_step(replace(self._definition, reads=reads, dynamic=None))
            self._made += 1
            if self._made == _MANY:
                shown = [text for _, text in (*self._steps, key)][-3:]
                warnings.warn(
                    f"{asked.line}\n  The function has read {_MANY} different values here, the last"
                    f" ones {', '.join(shown)}; each costs as much as a first call. Use a mask of"
                    " fixed size, round the number up to a few, or take a size of ftp.static"
                    " (docs/values.md).",
                    ReadWarning,
                    stacklevel=4,
                )
        self._steps[key] = self.last[reads.level] = step
        if len(self._steps) > self._definition.options.programs:
            del self._steps[next(iter(self._steps))]
        return step
