"""``LoweredRounds``: a program whose arguments belong to stages, before it runs."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from ftp.partitioning.collectives import Collective
from ftp.report.collectives import Collectives
from ftp.report.lowered import Lowered
from ftp.report.startable import Startable
from ftp.runtime.pipelines.staged_program import StagedProgram
from ftp.runtime.pipelines.subgraph_planner import StoredValue
from ftp.runtime.program import Program
from ftp.sharding.mesh import Mesh

Key = TypeVar("Key")


def lowered_once(programs: Mapping[Key, Program]) -> dict[Key, Lowered]:
    """Programs before they run; keys that share a program share its memory and cost."""
    known: dict[int, Lowered] = {}
    return {key: known.setdefault(id(p), Lowered(p)) for key, p in programs.items()}


def own_index(mesh: Mesh, axis: str) -> int:
    """The index of this process along an axis; 0 without processes."""
    at = mesh.coordinate if mesh.kind == "process" else None
    return 0 if at is None else at[axis]


def transfer(op: str, held: StoredValue, axis: str, axes: dict[str, int], cause: str) -> Collective:
    """The record of a value that ranks of ``axis`` send each other, on a mesh of ``axes``."""
    shape, nbytes = held.local_shape(axes), held.local_nbytes(axes)
    return Collective(op, (axis,), shape, held.dtype, nbytes, held.shape, nbytes, "", cause)


class LoweredRounds(Startable):
    """A step of placed arguments before it runs; ``print`` shows what its ranks do in each round.

    Attributes:
        program: the rounds, and the values that ranks hand to each other.
        rounds: per round, per rank of the axis its program.
    """

    def __init__(self, program: StagedProgram):
        self.program = self._returning = program
        self.mesh = program.mesh
        lowered = lowered_once(program.programs)
        self.rounds: Sequence[Mapping[int, Lowered]] = [
            {rank: one for (r, rank), one in lowered.items() if r == at}
            for at in range(len(program.rounds.subgraphs))
        ]

    def collectives_of(self, rank: int) -> Collectives:
        """One record per collective that a rank of the axis issues; a ``broadcast`` for each value
        that stages share.
        """
        program, found = self.program, []
        for at, shared in enumerate(program.rounds.shared):
            lowered = self.rounds[at].get(rank)
            if lowered is not None:
                found += [replace(c, cause=f"{c.cause}, round {at}") for c in lowered.collectives]
            for name, owner in shared:
                held, cause = program.values[name], f"{name} of rank {owner}"
                found.append(transfer("broadcast", held, program.axis, program.within.axes, cause))
        return Collectives(found)

    @property
    def collectives(self) -> Collectives:
        """`collectives_of` this process' rank; of the first without processes."""
        return self.collectives_of(own_index(self.program.mesh, self.program.axis))

    def __str__(self) -> str:
        program = self.program
        lines = [f"program of stages over {program.axis!r} of {program.mesh}"]
        for at, own in enumerate(self.rounds):
            for rank, lowered in sorted(own.items()):
                ops = sum(node.kind == "op" for node in lowered.plan.graph.nodes)
                lines.append(
                    f"  round {at}, rank {rank}: {ops} ops, {len(lowered.collectives)} collectives"
                )
            shared = program.rounds.shared[at]
            if shared:
                lines.append(f"  then {len(shared)} values go to all ranks")
        return "\n".join(lines)
