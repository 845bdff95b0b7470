"""Recordings of one function that differ only in numbers.

A function that reads a size as a Python number, such as ``int(0.75 * x.shape[1])``, is recorded
anew for each size, but the recordings often differ only in numbers. One trace and one plan then
serve many sizes: each number is a formula of the sizes and of unknown numbers, whose values a new
recording gives. Formulas are fitted to samples, and a recording is only accepted if every number in
it equals its formula.
"""

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, reduce
from typing import TYPE_CHECKING, Any

import optree
import torch
from torch import Tensor, fx

from ftp.dataclass import dataclass
from ftp.rules.local_op import as_module, copied

if TYPE_CHECKING:
    from ftp.tracing.data_dependent.paths import Ran, Static
    from ftp.tracing.recorder import Recorder


@dataclass(frozen=True)
class RecordedOps:
    """A function's ops as recorded, writes included, before a trace makes a functional graph of
    them.

    Attributes:
        graph: its placeholders are the tensor leaves and the captured tensors.
        captured: the captured tensors, in the order of their placeholders.
        out_tree, statics, claims: of the run, see `paths.Ran`.
    """

    graph: fx.Graph
    captured: tuple[Tensor, ...]
    out_tree: optree.PyTreeSpec
    statics: "tuple[Static | None, ...]"
    claims: tuple[Any, ...]

    @cached_property
    def read(self) -> tuple[list[Any], list[int]]:
        """The recording without its numbers, and the numbers."""
        return _read(self.graph)

    def kept(self) -> "RecordedOps":
        """A copy, which the trace does not make functional."""
        return replace(self, graph=copied(self.graph))

    def differs(self, other: "RecordedOps") -> bool:
        """Whether the recordings differ in their number of ops, their results or their captured
        tensors.
        """
        return (
            len(self.graph.nodes) != len(other.graph.nodes)
            or self.out_tree != other.out_tree
            or not all(map(_are_same, self.statics, other.statics))
            or self.claims != other.claims
            or len(self.captured) != len(other.captured)
            or any(a is not b for a, b in zip(self.captured, other.captured, strict=True))
        )


@dataclass(frozen=True)
class Formula:
    """``factor`` times an unknown, or two unknowns joined, ``plus`` a number."""

    factor: int
    of: tuple[int, ...]
    join: Callable[[Any, Any], Any] = operator.add
    plus: int = 0

    def at(self, unknowns: Sequence[Any]) -> Any:
        return self.factor * reduce(self.join, (unknowns[i] for i in self.of)) + self.plus


class Alike:
    """Recordings that differ only in numbers.

    Args:
        samples: recordings, each with the sizes of the dynamic dims.

    Attributes:
        first: one of the recordings.
        formulas: of each number in it, in terms of sizes and unknown numbers; None for a number
            that is the same in all samples.
        unknown: the unknown numbers: the place of each in a recording, and its sign.
    """

    def __init__(self, samples: Sequence[tuple[Sequence[int], RecordedOps]]):
        self.first = samples[0][1]
        self._form, self._numbers = self.first.read
        columns = [list(column) for column in zip(*(sizes for sizes, _ in samples), strict=True)]
        of_samples = zip(*(one.read[1] for _, one in samples), strict=True)
        self.unknown: list[tuple[int, int]] = []
        self.formulas: list[Formula | None] = []
        known: dict[tuple[int, ...], Formula | None] = {}
        for place, found in enumerate(of_samples):
            if found not in known:
                known[found] = _formula(found, columns)
                if known[found] is None and len(set(found)) > 1:
                    sign = -1 if max(found) < 0 else 1
                    self.unknown.append((place, sign))
                    known[found] = Formula(sign, (len(columns),))
                    columns.append([sign * x for x in found])
            self.formulas.append(known[found])

    def numbers(self, sizes: Sequence[int], recording: RecordedOps) -> tuple[int, ...] | None:
        """The unknown numbers of a recording at these sizes; None if it differs in more."""
        form, numbers = recording.read
        if (recording is not self.first and recording.differs(self.first)) or form != self._form:
            return None
        found = tuple(sign * numbers[place] for place, sign in self.unknown)
        is_equal = all(map(int.__eq__, numbers, self._at((*sizes, *found))))
        return found if is_equal and min(found, default=0) >= 0 else None

    def _at(self, unknowns: Sequence[Any]) -> Iterator[Any]:
        """The recording's numbers, from the sizes and the unknown numbers."""
        for own, formula in zip(self._numbers, self.formulas, strict=True):
            yield own if formula is None else formula.at(unknowns)

    def run(self, recorder: "Recorder", inputs: Sequence[Tensor]) -> list[Tensor]:
        """Call the ops of the first recording, with symbolic numbers for the formulas."""
        assert recorder.symbolic is not None
        unknowns = [recorder.number(symbol) for symbol in recorder.symbolic.sizes.symbols]
        given = self._at(unknowns)
        captured = (recorder.known(tensor) for tensor in self.first.captured)

        class OpsAgain(fx.Interpreter):
            extra_traceback = False  # errors name the user's line

            def run_node(self, n: fx.Node) -> Any:
                recorder.replayed = n.meta
                filled: Any = _filled((n.args, dict(n.kwargs)), given)
                if n.op == "placeholder" and "ftp_constant" in n.meta:
                    return next(captured)
                mapped: Any = self.map_nodes_to_values(filled, n)
                args, kwargs = mapped
                return args[0] if n.op == "output" else getattr(self, n.op)(n.target, args, kwargs)

        try:
            return list(OpsAgain(as_module(self.first.graph)).run(*inputs))
        finally:
            recorder.replayed = None


def recording_of(gm: fx.GraphModule, recorder: "Recorder", ran: "Ran") -> RecordedOps | None:
    """The recording that a recorder has just made; None where it holds tensors made from lists."""
    if any(node.op == "get_attr" for node in gm.graph.nodes):
        return None
    of_run = ran.tree, tuple(ran.statics), tuple(ran.claims)
    return RecordedOps(gm.graph, recorder.captured, *of_run)


def are_alike(a: RecordedOps, b: RecordedOps) -> bool:
    return not a.differs(b) and a.read[0] == b.read[0]


def _formula(found: Sequence[int], columns: Sequence[Sequence[int]]) -> Formula | None:
    """The formula of a number whose values in the samples are ``found``; ``columns`` are those of
    the unknowns. None if there is none, or if the number is the same in all samples.
    """
    if len(set(found)) == 1:
        return None
    places = range(len(columns))
    candidates = [((i,), operator.add) for i in places]
    joins = (operator.sub, operator.add, operator.mul)
    candidates += [((i, j), join) for i in places for j in places for join in joins]
    for of, join in candidates:
        given = [reduce(join, (columns[i][k] for i in of)) for k in range(len(found))]
        at = next((k for k, x in enumerate(given) if x != given[0]), None)
        if at is not None and (found[at] - found[0]) % (given[at] - given[0]) == 0:
            factor = (found[at] - found[0]) // (given[at] - given[0])
            plus = found[0] - factor * given[0]
            if all(factor * x + plus == y for x, y in zip(given, found, strict=True)):
                return Formula(factor, of, join, plus)
    return None


def _are_same(a: "Static | None", b: "Static | None") -> bool:
    """Whether two leaves of results are equal: 1, True and 1.0 are not, nor are 0.0 and -0.0."""
    if a is None or b is None:
        return a is b
    x, y = a.value, b.value
    return type(x) is type(y) and bool(x == y) and repr(x) == repr(y)


def _read(graph: fx.Graph) -> tuple[list[Any], list[int]]:
    form: list[Any] = []
    numbers: list[int] = []
    places: dict[fx.Node, int] = {}
    for node in graph.nodes:
        meta = node.meta
        form.append((node.op, None if node.op == "placeholder" else node.target))
        form.append([meta.get(k) for k in ("source", "phase", "branch", "ftp_constant")])
        form.append(meta.get("region") is None)
        _add((node.args, node.kwargs), form, numbers, places)
        places[node] = len(places)
    return form, numbers


def _is_number(x: Any) -> bool:
    return type(x) is int or (type(x) is float and x.is_integer() and 0 < abs(x) < 2**53)


def _add(x: Any, form: list[Any], numbers: list[int], places: dict[fx.Node, int]) -> None:
    if isinstance(x, fx.Node):
        form.append(("node", places[x]))
    elif _is_number(x):
        form.append(type(x))
        numbers.append(int(x))
    elif isinstance(x, tuple | list):
        form.append((isinstance(x, tuple), len(x)))
        for part in x:
            _add(part, form, numbers, places)
    elif isinstance(x, dict):
        form.append(tuple(x))
        for part in x.values():
            _add(part, form, numbers, places)
    else:
        form.append(x.hex() if type(x) is float else (type(x), x))


def _filled(x: Any, numbers: Iterator[Any]) -> Any:
    """Arguments with the given numbers in place of theirs, in the order of `_add`."""
    if _is_number(x):
        number = next(numbers)
        return number if type(x) is int else torch.sym_float(number)
    if isinstance(x, tuple | list):
        parts = [_filled(part, numbers) for part in x]
        return tuple(parts) if isinstance(x, tuple) else parts
    if isinstance(x, dict):
        return {k: _filled(part, numbers) for k, part in x.items()}
    return x
