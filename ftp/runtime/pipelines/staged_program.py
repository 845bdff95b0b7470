"""A program whose arguments belong to stages. It runs in rounds: subgraphs, then an exchange."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from ftp.dataclass import dataclass
from ftp.pipeline.rounds import ALL, Rounds, text_of
from ftp.runtime.pipelines.stage_programs import ProgramOfSubgraphs, as_bytes
from ftp.runtime.pipelines.subgraph_planner import StoredValue
from ftp.runtime.program import Program
from ftp.sharding.mesh import Mesh, mesh_device, require_coordinate

Values = dict[str, torch.Tensor]


@dataclass(kw_only=True)
class StagedProgram(ProgramOfSubgraphs):
    """The program of ranks that hold different stages, for one set of abstract inputs.

    Attributes:
        within: the mesh without the axis of the stages.
        programs: by round and rank of the axis.
        values: the inputs, and values that cross rounds and ranks, by name.
        inputs: names of the arguments' tensors, then of the captured ones in ``constants``.
        due: per output the rank that returns it, or ``ALL``.
    """

    within: Mesh
    rounds: Rounds
    programs: Mapping[tuple[int, int], Program]
    values: Mapping[str, StoredValue]
    inputs: Sequence[str]
    constants: Sequence[torch.Tensor]
    due: Sequence[int]

    @property
    def subgraphs(self) -> Mapping[Any, Program]:
        return self.programs

    @cached_property
    def description(self) -> str:
        subgraphs = [f"{key}: {p.fingerprint}" for key, p in sorted(self.programs.items())]
        return "\n".join([*subgraphs, text_of(self.rounds), f"{self.due} {self.out_specs}"])

    @cached_property
    def _is_copied(self) -> list[bool]:
        """Per result whether a call copies it: a result that shares memory with an argument or with
        another result, because writing to one must not change the other.
        """
        shared = {*self.inputs}
        for (at, rank), program in self.programs.items():
            outputs = self.rounds.subgraphs[at][rank].outputs
            shared |= {outputs[i] for i, _ in program.renewed}
        names = self.rounds.results
        return [name in shared or names.index(name) < i for i, name in enumerate(names)]

    def _given(self, inputs: Sequence[torch.Tensor]) -> Values:
        """The inputs by name; a rank adds the values that it computes and receives."""
        device = mesh_device(self.mesh)
        constants = [x.to(device) for x in self.constants]
        return dict(zip(self.inputs, [*inputs, *constants], strict=True))

    def _act(self, at: int, rank: int, held: Values) -> None:
        subgraph = self.rounds.subgraphs[at].get(rank)
        if subgraph is None:
            return
        tensors = [held[self.inputs[i]] for i in subgraph.params]
        tensors += [held[name] for name in subgraph.values]
        held.update(zip(subgraph.outputs, self.programs[at, rank].run(tensors), strict=True))

    def run_as_rank(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        coordinate = require_coordinate(self.mesh)
        rank = coordinate[self.axis]
        held = self._given(inputs)
        for at, shared in enumerate(self.rounds.shared):
            self._act(at, rank, held)
            for owner in sorted({owner for _, owner in shared}):
                names = [name for name, of in shared if of == owner]
                self._hand_on(names, owner, rank, held, coordinate)
        found = []
        within = {axis: coordinate[axis] for axis in self.within.axes}
        results = zip(self.rounds.results, self.due, self._is_copied, strict=True)
        for name, due, is_copied in results:
            if due in (ALL, rank):
                found.append(held[name].clone() if is_copied else held[name])
            else:
                value = self.values[name]
                _, *rest = value.local_shape(self.within.axes, within)
                device = mesh_device(self.mesh)
                found.append(torch.empty((0, *rest), dtype=value.dtype, device=device))
        return found

    def _hand_on(
        self,
        names: Sequence[str],
        owner: int,
        rank: int,
        held: Values,
        coordinate: Mapping[str, int],
    ) -> None:
        """Broadcast the bytes of several values in one message."""
        assert self.mesh.torch is not None
        group = self.mesh.torch.get_group(self.axis)
        axes = self.within.axes
        at = {axis: coordinate[axis] for axis in axes}
        like = [self.values[name] for name in names]
        shapes = [x.local_shape(axes, at) for x in like]
        numbers = [torch.Size(shape).numel() for shape in shapes]
        sizes = [n * x.dtype.itemsize for n, x in zip(numbers, like, strict=True)]
        if rank == owner:
            data = torch.cat([as_bytes(held[name].contiguous()) for name in names])
        else:
            data = torch.empty(sum(sizes), dtype=torch.uint8, device=mesh_device(self.mesh))
        if data.numel():
            dist.broadcast(data, dist.get_global_rank(group, owner), group=group)
        if rank != owner:
            for name, part, shape, x in zip(names, data.split(sizes), shapes, like, strict=True):
                held[name] = part.clone().view(x.dtype).view(shape)

    def run_simulated(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        given = self._given(inputs)
        held = [dict(given) for _ in range(self.ranks)]
        for at, shared in enumerate(self.rounds.shared):
            for rank in range(self.ranks):
                self._act(at, rank, held[rank])
            for name, owner in shared:
                for own in held:
                    own[name] = held[owner][name]
        found = []
        results = zip(self.rounds.results, self.due, self._is_copied, strict=True)
        for name, due, is_copied in results:
            own = held[0 if due == ALL else due][name]
            found.append(own.clone() if is_copied else own)
        return found
