"""Planned: a program, and a step's work before and after each of its calls."""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from ftp.api.fast_path import items_at
from ftp.api.inputs import Inputs
from ftp.api.outputs import RENEWALS
from ftp.dataclass import dataclass
from ftp.runtime.program import Program
from ftp.sharding.arguments import Shape
from ftp.sharding.counted_rows import are_counted, cut
from ftp.sharding.mesh import Mesh
from ftp.tensors.placement import Donated, Placement, placement
from ftp.tracing.captured import Captured, check_unchanged, kept_by_traces
from ftp.tracing.data_dependent.values_read import Asked
from ftp.tracing.trace import Traced
from ftp.tracing.watched_values import WatchedValues

if TYPE_CHECKING:
    from ftp.runtime.pipelines.stage_programs import ProgramOfSubgraphs


@dataclass(frozen=True, eq=False)
class Planned:
    """A program, the arguments it was made for, and the work around each of its calls.

    Attributes:
        key: of the arguments.
        shapes: global shape of each leaf of the arguments.
        placements: layout of each output of the graph.
        renewed: outputs that share memory with an argument or another output, and how each is
            copied.
        donated: leaves whose memory is reused, and the fact to record of each.
        captured: tensors that the function reads and that are no arguments, and where it finds
            them.
        asked: the program returns a value that the function reads, rather than its result.
        watched: Python values that it may read outside of its arguments; None if there are none.
    """

    program: Program
    key: tuple[Any, ...]
    shapes: tuple[Shape | None, ...]
    placements: tuple[Placement, ...]
    renewed: tuple[tuple[int, Callable[[torch.Tensor], torch.Tensor]], ...]
    donated: tuple[tuple[int, Donated], ...]
    captured: list[Captured]
    asked: Asked | None = None
    watched: WatchedValues | None = None

    @property
    def is_stale(self) -> bool:
        """Whether a captured tensor is another one by now, or has other numbers than were read, or
        a Python value that the function may read is another one.
        """
        if self.captured and any(place.is_stale for place in self.captured):
            return True
        return self.watched is not None and self.watched.has_changed()

    def check_unchanged(self, again: Callable[[], Traced], *, stacklevel: int) -> None:
        """Warn of what is another one by now; see `WatchedValues.check`."""
        check_unchanged(self.captured, stacklevel=stacklevel + 1)
        if self.watched is not None:
            self.watched.check(again, stacklevel=stacklevel + 1)

    @property
    def is_outgrown(self) -> bool:
        """Whether a later trace has put another tensor in the place of a captured one, such as a
        longer table.
        """
        now = (place.now() for place in self.captured if place.is_stale)
        return any(isinstance(x, torch.Tensor) and x in kept_by_traces for x in now)

    def compare(self, outgrown: "Planned") -> None:
        """Do without the places of tables that the function makes anew for each size: the program
        is the one of before.
        """
        old, new = outgrown.program, self.program
        if old.fingerprint != new.fingerprint or not isinstance(new, Program):
            return
        if all(torch.equal(a, b) for a, b in zip(old.constants, new.constants, strict=True)):
            replaced = {place.name for place in outgrown.captured if place.is_stale}
            self.captured[:] = [place for place in self.captured if place.name not in replaced]

    def describe_leaf(self, i: int) -> str:
        """A leaf in words, as it counts in the program's key: dtype and global shape, or value."""
        shape, (kind, known, *_) = self.shapes[i], self.key[1 + i]
        if shape is not None:
            return f"{str(known).removeprefix('torch.')}{list(shape)}"
        return known if kind in (float, complex) else repr(known)

    def result(self, outputs: Sequence[torch.Tensor]) -> Any:
        """The function's result, from the outputs of the graph."""
        result = self.program.out_tree.unflatten(self._leaves(outputs))
        return cut(result) if self._has_counted_rows else result

    @cached_property
    def _leaves(self) -> Callable[[Sequence[torch.Tensor]], Sequence[Any]]:
        """The leaves of the result, from the outputs."""
        leaves, is_static = self.program.out_leaves, self.program.is_static
        if not any(is_static):
            return items_at(leaves)
        pairs = list(zip(leaves, is_static, strict=True))
        return lambda outputs: [leaf if static else outputs[leaf] for leaf, static in pairs]

    @cached_property
    def _has_counted_rows(self) -> bool:
        return any(are_counted(self.program.out_tree))


def planned_for(
    inputs: Inputs,
    program: "Program | ProgramOfSubgraphs",
    mesh: Mesh,
    donated: dict[int, str],
    captured: list[Captured],
    asked: Asked | None = None,
    watched: WatchedValues | None = None,
) -> Planned:
    """The `Planned` of a program.

    Args:
        donated: names of the donated arguments, by position.
    """
    positions = inputs.call.positions
    facts = {position: Donated(name) for position, name in donated.items()}
    outputs = zip(program.out_specs, program.out_shapes, strict=True)
    renewed = program.renewed if isinstance(program, Program) else ()
    reused = [i for i in program.tensor_leaves if positions[i] in facts]
    return Planned(
        program,  # type: ignore[arg-type]
        inputs.call.key,
        tuple(inputs.shapes),
        tuple(placement(mesh, spec, tuple(shape)) for spec, shape in outputs),
        tuple((i, RENEWALS[name]) for i, name in renewed),
        tuple((i, facts[positions[i]]) for i in reused),
        captured,
        asked,
        watched or None,
    )
