"""Random numbers that programs draw: whether their outputs depend on them, and where."""

import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ftp.certification.certificate import Certificate
from ftp.certification.lockstep.check import compare, inputs_for
from ftp.certification.lockstep.reals import Reals
from ftp.errors import TraceError

_ADVICE = (
    "A proof is for all inputs, and the programs draw different numbers. Draw outside of the"
    " program and pass the numbers, such as a dropout mask, as an argument with its spec; without"
    " dropout, call the module in eval mode."
)


def random_line(certificate: Certificate) -> str | None:
    """The first line of either program whose random numbers change an output; None if none do."""
    programs = [*(o.target for o in certificate.operations if o.target is not None)]
    programs += [n.target for g in certificate.ranks.graphs for n in g.nodes]
    if not any(torch.Tag.nondeterministic_seeded in getattr(t, "tags", ()) for t in programs):
        return None
    numbers = _Redrawn(None)
    try:
        first = _outputs(certificate, numbers)
        for line in dict.fromkeys(numbers.lines):
            of_line = {i for i, x in enumerate(numbers.lines) if x == line}
            if not _are_equal(first, _outputs(certificate, _Redrawn(of_line))):
                return line
    except Exception:  # the program does not take these numbers
        pass
    return None


def drawn_error(line: str) -> TraceError:
    return TraceError(f"{line}\n  The program draws random numbers here. {_ADVICE}")


class _Redrawn(Reals):
    """Runs ops like ``Reals``, but the draws whose numbers are in ``other`` give other values.

    Attributes:
        lines: of each draw.
    """

    def __init__(self, other: set[int] | None):
        super().__init__(1)
        self.other, self.lines, self.made = other or set(), [], 0

    def call(
        self, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], dtypes: Sequence[Any]
    ) -> Any:
        if torch.Tag.nondeterministic_seeded in target.tags:
            torch.manual_seed(2 * self.made + (self.made in self.other))
            self.made += 1
        return super().call(target, args, kwargs, dtypes)

    def note(self, line: str) -> None:
        """The line of the draws since the last one."""
        self.lines += [line] * (self.made - len(self.lines))


def _outputs(certificate: Certificate, domain: _Redrawn) -> list[Tensor]:
    """The outputs of all ranks, and of the reference."""
    found: list[Tensor] = []

    def keep(_: Any, held: Tensor, expected: Tensor) -> bool:
        found.extend([held.clone(), expected.clone()])
        return True

    with torch.random.fork_rng(devices=[]):
        compare(
            domain,
            certificate,
            inputs_for(domain, certificate, 0),
            watch=lambda rank, node, value: domain.note(node.meta.get("source", "")),
            watch_reference=lambda op, value: domain.note(op.source),
            is_same=keep,
        )
    return found


def _are_equal(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    return all(
        torch.equal(x.nan_to_num(), y.nan_to_num()) if x.is_floating_point() else torch.equal(x, y)
        for x, y in zip(a, b, strict=True)
    )


@contextmanager
def without_python_draws(who: str) -> Iterator[None]:
    """Refuse a program that draws from Python's or numpy's generator: its numbers are constants of
    the recording.
    """
    before = _python_state()
    yield
    if _python_state() != before:
        raise TraceError(
            f"{who} draws random numbers from the generator of Python's random or of numpy."
            f" {_ADVICE}"
        )


def _python_state() -> Any:
    numpy: Any = sys.modules.get("numpy.random")
    if numpy is None:
        return random.getstate(), None
    name, keys, *rest = numpy.get_state()
    return random.getstate(), (name, keys.tobytes(), *rest)
