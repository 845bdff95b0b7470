"""One plan for many sizes: a program's rank graphs, which take sizes and offsets as inputs, and the
program at one size.

A rank has a graph for each set of answers to the conditions that partitioning has on sizes: whether
its shard is full, shorter, or empty. A graph is made when a size first needs it.
"""

import functools
import itertools
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.fx.node import map_arg

from ftp.dataclass import dataclass
from ftp.dynamic_int import Conditions, is_dynamic
from ftp.ops.exchange_rows import ALL_TO_ALL_ROWS
from ftp.partitioning.local_program import Coordinate, LocalProgram
from ftp.partitioning.rank_tables import Table, table
from ftp.passes.number_inputs import number_inputs
from ftp.passes.onednn_matmuls import Matmul, at_any_size, at_one_size
from ftp.runtime.compile import Run, compiled, eager
from ftp.runtime.executed import local_inputs
from ftp.runtime.lowering import for_eager
from ftp.runtime.process_groups import faster_by_onednn
from ftp.runtime.program import Program
from ftp.sharding.mesh import Mesh, mesh_device
from ftp.torch_internals.fake_tensors import mode_for

if TYPE_CHECKING:
    from ftp.tracing.symbolic import Symbolic

# Sizes, and the number of the graph that serves them on each rank.
Served = tuple[tuple[int, ...], tuple[int, ...]]


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
        taken: the ints that it takes, as formulas: ``offsets`` offsets, then sizes.
        numbers: function from sizes to the values of ``taken``.
        number: by which it is told from the other graphs of all ranks.
        run: the function that runs the graph; None before its first run.
        written: the graph as the eager runner runs it; None before it is asked for.
    """

    conditions: Conditions
    local: LocalProgram
    taken: Sequence[int]
    offsets: int
    numbers: Callable[[Sequence[int]], tuple[int, ...]]
    number: int
    run: Run | None = None
    written: fx.Graph | None = None

    def written_with(
        self, given: Sequence[Any], made: dict[Any, fx.Graph]
    ) -> tuple[fx.Graph, tuple[Any, ...]]:
        """``written`` with sizes in place of its inputs for them, and the offsets that it takes.

        Args:
            given: ``taken``, or the numbers that it gives.
            made: as of `SizedProgram.written`.
        """
        assert self.written is not None
        given = tuple(given)
        offsets, sizes = given[: self.offsets], given[self.offsets :]
        key = self.written, sizes
        if key not in made:
            made[key] = _with_sizes(self.written, sizes)
        return made[key], offsets


def _with_sizes(graph: fx.Graph, sizes: Sequence[int]) -> fx.Graph:
    """A graph with numbers in place of its last inputs."""
    new, env = fx.Graph(), dict[fx.Node, Any]()
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    env.update(zip(inputs[len(inputs) - len(sizes) :], sizes, strict=True))
    for node in graph.nodes:
        if node not in env:
            made = env[node] = new.create_node(
                node.op,
                node.target,
                map_arg(node.args, env.__getitem__),
                map_arg(node.kwargs, env.__getitem__),
                node.name,
            )
            made.meta = {key: x for key, x in node.meta.items() if key != "val"}
    return new


class RankPrograms:
    """The graphs of a program that is planned for many sizes.

    Args:
        program: its plan's sizes are formulas.
        symbolic: the sizes of its trace.

    Attributes:
        why_not: why graphs are compiled for every size by itself; "" where they are not.
        proven: the sizes and graphs that have a certificate.
        proofs: of the graphs that serve a size on each rank, the conditions of their certificates
            for all sizes; None ends the list where further sizes are certified one by one.
        written: the graphs as the eager runner runs them, with their conditions on sizes, by
            what they are made of: a graph without its offsets.
    """

    def __init__(self, program: Program, symbolic: "Symbolic"):
        assert program.plan.sizes is not None
        self.program, self.sizes = program, program.plan.sizes
        self.symbolic = symbolic
        self._known: dict[tuple[int, ...], list[RankProgram]] = {}
        program.decide()  # its conditions on sizes hold for all ranks
        shapes = [v.meta.shape for v in program.plan.graph.outputs]
        self.why_not = ""
        self.proven: set[Served] = set()
        self.proofs: dict[tuple[int, ...], list[Conditions | None]] = {}
        self._numbers = itertools.count()
        self.written: dict[str, tuple[fx.Graph, Conditions]] = {}
        self._others: dict[str, list[tuple[Conditions, RankPrograms]]] = {}
        self._by_onednn: set[Matmul] | None = None
        self._ndims = [len(shape) for shape in shapes]
        self._out_sizes = self.sizes.function([s for shape in shapes for s in shape])
        self.is_dynamic = tuple(any(map(is_dynamic, shape)) for shape in shapes)

    def out_leaves(self, values: Sequence[int]) -> tuple[Any, ...]:
        """As `Program.out_leaves`, with the numbers that sizes in the result are."""
        leaves = self.program.out_leaves
        formulas = [x for x in leaves if is_dynamic(x)]
        if not formulas:
            return leaves
        numbers = iter(formulas[0].sizes.function(formulas)(values))
        return tuple(next(numbers) if is_dynamic(x) else x for x in leaves)

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
        counts = map(self.sizes.count, self.sizes.symbols)
        beside = tuple(counts) if self.program.options.compile else ()
        graph, formulas = number_inputs(local.gm.graph, beside)
        taken = [*offsets, *formulas]
        made = RankProgram(
            asked,
            LocalProgram(fx.GraphModule({}, graph), (), local.collectives),
            taken,
            len(offsets),
            self.sizes.function(taken),
            next(self._numbers),
        )
        known.insert(0, made)
        del known[self.program.options.programs :]
        return made

    def served(self, values: tuple[int, ...]) -> Served:
        """The sizes, and the number of the graph that serves them on each rank."""
        coordinates = self.program.mesh.coordinates()
        return values, tuple(self.at(c, values).number for c in coordinates)

    def with_options(self, values: Sequence[int], changes: Mapping[str, Any]) -> "RankPrograms":
        """The graphs of the same plan, run with other options at these sizes."""
        known = self._others.setdefault(repr(changes), [])
        for conditions, others in known:
            if conditions.holds(values):
                return others
        with self.sizes.noting(values) as asked:
            made = RankPrograms(self.program.with_options(**changes), self.symbolic)
        known.append((asked, made))
        return made

    def by_onednn(self, mesh: Mesh, matmuls: Collection[Matmul]) -> Collection[Matmul]:
        """The matmuls for oneDNN: those that it computes faster at the sizes at hand, at half and
        at twice of them. The ranks choose them together for the first graph, which all make at one
        call; later graphs, which each makes when it needs them, follow that choice.
        """
        if self._by_onednn is None:
            faster = {*matmuls}
            for factor in (1, 0.5, 2):
                sized = {m: at_one_size(m, factor) for m in faster}
                measured = faster_by_onednn(mesh, sorted({*sized.values()}))
                faster = {m for m, one in sized.items() if one in measured}
            self._by_onednn = {*map(at_any_size, faster)}
        return [m for m in matmuls if at_any_size(m) in self._by_onednn]

    def compile_one_by_one(self, why: str) -> None:
        """Compile every size by itself from now on, and say why."""
        self.why_not = why
        names = ", ".join(s.name for s in self.sizes.given)
        warnings.warn(
            f"dynamic_shapes: every size of {names} is compiled for itself: {why}", stacklevel=6
        )


@dataclass(kw_only=True)
class SizedProgram(Program):
    """A program that is planned for many sizes, at one of them."""

    ranks: RankPrograms
    values: tuple[int, ...]
    is_of_many_sizes = True

    @classmethod
    def of(cls, ranks: RankPrograms, values: tuple[int, ...]) -> "SizedProgram":
        program = ranks.program
        given = {f.name: getattr(program, f.name) for f in fields(Program)}
        given["out_leaves"] = ranks.out_leaves(values)
        return cls(**given, ranks=ranks, values=values)

    def communicates(self) -> bool:
        """True, as far as is known without making the graph of one size."""
        return True

    def with_options(self, **changes: Any) -> "SizedProgram":
        return SizedProgram.of(self.ranks.with_options(self.values, changes), self.values)

    @cached_property
    def fingerprint(self) -> str:
        sizes = ", ".join(
            f"{s.name} = {v}" for s, v in zip(self.ranks.sizes.given, self.values, strict=True)
        )
        return f"{self.ranks.program.fingerprint} at {sizes}"

    @property
    def description(self) -> str:
        return self.ranks.program.description  # which all sizes share, as decided once

    @property
    def out_shapes(self) -> list[tuple[int, ...]]:
        return self.ranks.out_shapes(self.values)

    def local(self, coordinate: Mapping[str, int] | None = None) -> LocalProgram:
        if coordinate is None:
            coordinate = self.own_coordinate
        found = self.ranks.at(coordinate, self.values)
        numbers: Any = tuple(map(Number, found.numbers(self.values)))
        return LocalProgram(found.local.gm, numbers, found.local.collectives)

    def alike(self) -> list[list[list[int]]]:
        """Ranks do not share graphs."""
        return [[[i] for i in range(n)] for n in self.mesh.axes.values()]

    @property
    def traced_graph(self) -> fx.Graph:
        return self.ranks.symbolic.at(self.traced.graph, self.values)

    def written(
        self, coordinate: Coordinate, made: dict[Any, fx.Graph], *, as_formulas: bool = False
    ) -> tuple[fx.Graph, tuple[Any, ...]]:
        """The graph of the rank at ``coordinate`` at these sizes, as the eager runner runs it for
        contiguous inputs, and the offsets that it takes.

        Args:
            made: such graphs of other ranks, which ranks with equal graphs share.
            as_formulas: the graph for all sizes that it serves, with formulas for numbers.
        """
        found, ranks = self.ranks.at(coordinate, self.values), self.ranks
        if found.written is None:
            graph = found.local.gm.graph
            with ranks.sizes.noting(self.values) as asked:
                shapes = [shape for shape, _ in local_inputs(self, coordinate)]
            found.conditions.include(asked)
            key = f"{graph}{shapes}{list(found.taken[found.offsets :])}"
            known = ranks.written.get(key)
            if known is None or not known[1].holds(self.values):
                noting = ranks.sizes.noting(self.values)
                with noting as asked, self._symbolic(coordinate) as given:
                    form = for_eager(graph, given, self.donated, (ALL_TO_ALL_ROWS,))
                known = ranks.written[key] = form, asked
            found.written = known[0]
            found.conditions.include(known[1])
        given = found.taken if as_formulas else found.numbers(self.values)
        return found.written_with(given, made)

    def make_graph(self) -> None:
        """Make this rank's graph, so that errors are known before the ranks agree."""
        self.ranks.at(self.own_coordinate, self.values)

    def _run_as_rank(self) -> Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]:
        constants = [c.to(mesh_device(self.mesh)) for c in self.constants]
        ready: list[tuple[Run, list[Any]]] = []

        def run(inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
            if not ready:
                ready.append(self._ready(inputs, constants))
            made, extra = ready[0]
            return made([*inputs, *extra])

        return run

    def _ready(
        self, inputs: Sequence[torch.Tensor], constants: Sequence[torch.Tensor]
    ) -> tuple[Run, list[Any]]:
        """The function that runs this rank's graph, and its arguments after the inputs. A CUDA
        graph is recorded of each size.
        """
        found = self.ranks.at(self.own_coordinate, self.values)
        extra = [*constants, *found.numbers(self.values)]
        if found.run is None:
            with self.ranks.sizes.noting(self.values) as asked:
                made = self._prepared(found.local, [*inputs, *extra])
            found.conditions.include(asked)
            found.run = made
        return self._recorded(found.run), extra

    def _compiled(self, graph: fx.Graph, given: Sequence[Any]) -> Run:
        """As `Program`, compiled for all sizes that the graph serves; only for these sizes where
        inductor cannot.
        """
        ranks, host = self.ranks, self._has_host
        choose = functools.partial(ranks.by_onednn, self.mesh)
        if not ranks.why_not:
            try:
                with self._symbolic(self.own_coordinate, for_inductor=True) as symbolic:
                    return compiled(graph, symbolic, self.donated, choose, host=host)
            except Exception as error:
                ranks.compile_one_by_one(f"{type(error).__name__}: {error}")
        for size in ranks.sizes.symbols:
            ranks.sizes.fix(size)
        return compiled(graph, given, self.donated, choose, host=host)

    def _eager(self, program: LocalProgram, given: Sequence[Any]) -> Run:
        """As `Program`, with memory reuse decided for all sizes that the graph serves."""
        graph = self._bound(program)
        with self._symbolic(self.own_coordinate) as symbolic:
            return eager(graph, symbolic, self.donated, host=self._has_host)

    @contextmanager
    def _symbolic(
        self, coordinate: Coordinate, *, for_inductor: bool = False
    ) -> Iterator[list[Any]]:
        """The arguments of a rank's graph with symbolic sizes. What the block asks about sizes is
        noted as conditions. Inductor may take it that no symbolic size is zero or one.
        """
        from ftp.tracing.symbolic import Symbolic

        symbolic, device = Symbolic(self.ranks.sizes), mesh_device(self.mesh)
        inputs = local_inputs(self, coordinate)
        if for_inductor:
            symbolic.keeps_ones = True
            inputs = [(tuple(s if s > 1 else int(s) for s in shape), x) for shape, x in inputs]
        with mode_for(symbolic.env):
            fakes = [
                torch.empty([symbolic.symint(s) for s in shape], dtype=dtype, device=device)
                for shape, dtype in inputs
            ]
        numbers = map(symbolic.symint, self.ranks.at(coordinate, self.values).taken)
        yield [*fakes, *numbers]
        symbolic.note_guards()
