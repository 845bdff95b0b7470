"""``LoweredRounds``: a program whose arguments belong to stages, before it runs."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from ftp.partitioning.collectives import Collective
from ftp.report.collectives import Collectives
from ftp.report.lowered import Lowered
from ftp.report.startable import Startable
from ftp.runtime.program import Program
from ftp.runtime.staged_program import StagedProgram
from ftp.sharding.local_pieces import local_shape

Key = TypeVar("Key")


def lowered_once(programs: Mapping[Key, Program]) -> dict[Key, Lowered]:
    """Programs before they run; keys that share a program share its memory and cost."""
    known: dict[int, Lowered] = {}
    return {key: known.setdefault(id(p), Lowered(p)) for key, p in programs.items()}


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
            found += [self._broadcast(name, owner) for name, owner in shared]
        return Collectives(found)

    def _broadcast(self, name: str, owner: int) -> Collective:
        held, axis = self.program.values[name], self.program.axis
        shape = local_shape(held.spec, held.shape, self.program.within.axes)
        nbytes = math.prod(shape) * held.dtype.itemsize
        cause = f"{name} of rank {owner}"
        return Collective(
            "broadcast", (axis,), shape, held.dtype, nbytes, held.shape, nbytes, "", cause
        )

    @property
    def collectives(self) -> Collectives:
        """`collectives_of` this process' rank; of the first without processes."""
        mesh = self.program.mesh
        at = mesh.coordinate if mesh.kind == "process" else None
        return self.collectives_of(0 if at is None else at[self.program.axis])

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
