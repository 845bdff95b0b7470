"""One plan for many sizes: a program's rank graphs, which take sizes and offsets as inputs, and the
program at one size.

A rank has a graph for each set of answers to the conditions that partitioning has on sizes: whether
its shard is full, shorter, or empty. A graph is made when a size first needs it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import torch
from torch import fx

from ftp.dynamic_int import Conditions, is_dynamic
from ftp.partitioning.local_program import Coordinate, LocalProgram
from ftp.partitioning.rank_tables import Table, table
from ftp.passes.number_inputs import number_inputs
from ftp.runtime.compile import Run, eager
from ftp.runtime.program import Program
from ftp.sharding.mesh import mesh_device
from ftp.sharding.spec import PartitionSpec, local_shape
from ftp.torch_internals.fake_tensors import FakeTensorMode


@dataclass(frozen=True)
class Number:
    """An int input of a rank's graph, at one size; see `local_program.ShardOffset`."""

    value: int

    def at(self, coordinate: Coordinate) -> int:
        return self.value

    def table(self, axes: Mapping[str, int]) -> Table:
        """Its value on every rank that runs the graph: one rank."""
        return table(axes, (), lambda _: self.value)


@dataclass
class RankProgram:
    """One rank's graph for the sizes that meet ``conditions``.

    Attributes:
        local: takes the local tensors, then offsets, then sizes.
        taken: the ints that it takes, as formulas.
        numbers: function from sizes to the values of ``taken``.
        run: the function that runs the graph; None before its first run.
    """

    conditions: Conditions
    local: LocalProgram
    taken: Sequence[int]
    numbers: Callable[[Sequence[int]], tuple[int, ...]]
    run: Run | None = None


class RankPrograms:
    """The graphs of a program that is planned for many sizes.

    Args:
        program: its plan's sizes are formulas.
    """

    def __init__(self, program: Program):
        assert program.plan.sizes is not None
        self.program, self.sizes = program, program.plan.sizes
        self._known: dict[tuple[int, ...], list[RankProgram]] = {}
        program.decide()  # its conditions on sizes hold for all ranks
        shapes = [v.meta.shape for v in program.plan.graph.outputs]
        self._ndims = [len(shape) for shape in shapes]
        self._out_sizes = self.sizes.function([s for shape in shapes for s in shape])
        self.is_dynamic = tuple(any(map(is_dynamic, shape)) for shape in shapes)

    def out_shapes(self, values: Sequence[int]) -> list[tuple[int, ...]]:
        """The outputs' global shapes at these sizes."""
        flat = iter(self._out_sizes(values))
        return [tuple(next(flat) for _ in range(ndim)) for ndim in self._ndims]

    def at(self, coordinate: Coordinate, values: Sequence[int]) -> RankProgram:
        """The graph of the rank at ``coordinate`` for these sizes."""
        known = self._known.setdefault(tuple(coordinate.values()), [])
        for i, found in enumerate(known):
            if found.conditions.holds(values):
                if i:
                    known.insert(0, known.pop(i))
                return found
        with self.sizes.noting(values) as asked:
            local = self.program.local(coordinate)
            offsets = local.offsets_at(coordinate)
        graph, formulas = number_inputs(local.gm.graph)
        taken = [*offsets, *formulas]
        made = RankProgram(
            asked,
            LocalProgram(fx.GraphModule({}, graph), (), local.collectives),
            taken,
            self.sizes.function(taken),
        )
        known.insert(0, made)
        return made


@dataclass(kw_only=True)
class SizedProgram(Program):
    """A program that is planned for many sizes, at one of them."""

    ranks: RankPrograms
    values: tuple[int, ...]

    @classmethod
    def of(cls, ranks: RankPrograms, values: tuple[int, ...]) -> "SizedProgram":
        program = ranks.program
        given = {f.name: getattr(program, f.name) for f in fields(Program)}
        return cls(**given, ranks=ranks, values=values)

    @cached_property
    def fingerprint(self) -> str:
        sizes = ", ".join(
            f"{s.name} = {v}" for s, v in zip(self.ranks.sizes.given, self.values, strict=True)
        )
        return f"{self.ranks.program.fingerprint} at {sizes}"

    @property
    def out_shapes(self) -> list[tuple[int, ...]]:
        return self.ranks.out_shapes(self.values)

    def local(self, coordinate: Mapping[str, int] | None = None) -> LocalProgram:
        if coordinate is None:
            coordinate = self._own_coordinate
        found = self.ranks.at(coordinate, self.values)
        numbers: Any = tuple(map(Number, found.numbers(self.values)))
        return LocalProgram(found.local.gm, numbers, found.local.collectives)

    def alike(self) -> list[list[list[int]]]:
        """Each rank has a graph of its own."""
        return [[[i] for i in range(n)] for n in self.mesh.axes.values()]

    def make_graph(self) -> None:
        """Make this rank's graph, so that errors are known before the ranks agree."""
        self.ranks.at(self._own_coordinate, self.values)

    def _run_as_rank(self) -> Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]:
        found = self.ranks.at(self._own_coordinate, self.values)
        constants = [c.to(mesh_device(self.mesh)) for c in self.constants]
        extra = [*constants, *found.numbers(self.values)]

        def run(inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
            given = [*inputs, *extra]
            if found.run is None:
                with self.ranks.sizes.noting(self.values) as asked:
                    made = self._prepared(found.local, given)
                found.conditions.include(asked)
                found.run = made
            return found.run(given)

        return run

    def _eager(self, graph: fx.Graph, given: Sequence[Any]) -> Run:
        """As `Program`, with memory reuse decided for all sizes that the graph serves."""
        from ftp.tracing.symbolic import Symbolic

        symbolic, coordinate = Symbolic(self.ranks.sizes), dict(self._own_coordinate)
        nodes, axes = self.plan.graph.inputs, dict(self.mesh.axes)
        specs = [*self.in_specs, *[PartitionSpec()] * (len(nodes) - len(self.in_specs))]
        shapes = [
            local_shape(spec, node.results[0].shape, axes, coordinate)
            for spec, node in zip(specs, nodes, strict=True)
        ]
        mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=symbolic.env)
        with mode:
            fakes = [
                torch.empty([symbolic.symint(s) for s in shape], dtype=x.dtype, device=x.device)
                for shape, x in zip(shapes, given, strict=False)
            ]
        numbers = map(symbolic.symint, self.ranks.at(coordinate, self.values).taken)
        made = eager(graph, [*fakes, *numbers], self.donated, host=True)
        symbolic.note_guards()
        return made
