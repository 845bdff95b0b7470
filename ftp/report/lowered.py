"""``Lowered``: a program before it runs, to be read, counted, priced and compared."""

import math
import re
from collections.abc import Callable, Iterable
from functools import cached_property
from itertools import product
from typing import Any

import torch
from torch import fx

from ftp.errors import ReportError
from ftp.partitioning.collectives import Collective, Member
from ftp.partitioning.local_program import LocalProgram
from ftp.paused_gc import collection_paused
from ftp.planning.layers.labels import named_layers
from ftp.planning.machine import GivenHardware, hardware_on
from ftp.planning.plan import Plan
from ftp.report.alternatives import (
    Alternative,
    Difference,
    Why,
    chain_of,
    counts,
    find,
    other_layouts,
    other_specs,
)
from ftp.report.attention_memory import of_attention
from ftp.report.collectives import Collectives, broken_claims, members_of, part_of
from ftp.report.empty_rows import empty_rows
from ftp.report.flex_memory import of_flex
from ftp.report.lint import Finding
from ftp.report.loads import Loads, loads_of, whole_tensors
from ftp.report.memory import Memory, copied_bytes, measure, on_cpu
from ftp.report.printed_program import PrintedProgram
from ftp.report.program_lint import lint_of
from ftp.report.rank_shapes import on_busiest, with_equal_loads
from ftp.report.startable import CallableProgram, Startable
from ftp.report.summary import summary
from ftp.report.text import folded, typed
from ftp.report.timing import Cost, estimate
from ftp.report.work import Work, work_of
from ftp.runtime.executed import in_order, local_inputs
from ftp.runtime.local_shapes import LocalShapes, local_shapes
from ftp.runtime.program import Program
from ftp.sharding.mesh import mesh_device
from ftp.sharding.patterns import nearest
from ftp.sharding.pytree import flatten, kind_of


class Lowered(Startable):
    """A program before it runs; ``print`` shows it.

    Attributes:
        plan: what was decided, with the cost of each axis' network.

    >>> import ftp, torch
    >>> mesh = ftp.AbstractMesh((4,), ("tp",))
    >>> lowered = ftp.lower(lambda x: x.sum(), mesh, ftp.P("tp"), torch.ones(8), out_specs=ftp.P())
    >>> [c.op for c in lowered.collectives], lowered.out_specs
    (['all_reduce'], P())
    """

    def __init__(
        self,
        program: Program,
        again: Callable[..., "Lowered"] | None = None,
        bound: CallableProgram | None = None,
    ):
        self._program = self._returning = program
        self._again, self._bound = again, bound

    @property
    def plan(self) -> Plan:
        return self._program.plan

    @property
    def graph(self) -> fx.GraphModule:
        """This rank's program on local tensors (the first rank's where there are no processes)."""
        return self._local.gm

    @cached_property
    @collection_paused()
    def collectives(self) -> Collectives:
        """One record per issued collective, in order, unfolded; printed as a table that folds
        repeats.
        """
        return self._printed.collectives()

    @cached_property
    def by_layer(self) -> dict[str, Collectives]:
        """The collectives of each layer, ``layers.0`` first, and under ``""`` those of no layer. Of
        a bucket each layer has the part that holds its members.
        """
        layers = {node.name: name for node, name in named_layers(self.plan.graph).items()}
        found: dict[str, list[Collective]] = {}
        for node, record in zip(self._printed.issued, self.collectives, strict=True):
            of_layer: dict[str, list[Member]] = {}
            for issued_as, member in zip(members_of(node), record.members, strict=True):
                of_layer.setdefault(layers.get(issued_as.name, ""), []).append(member)
            for name, members in of_layer.items():
                found.setdefault(name, []).append(part_of(record, members))
        return {
            name: Collectives(found[name])
            for name in sorted(
                found, key=lambda n: (not n, [int(i) for i in re.findall(r"\d+", n)])
            )
        }

    @cached_property
    @collection_paused()
    def work(self) -> Work:
        """Matmul operations of all ranks over one device's, a float with its parts by layer;
        ``print`` shows what is done more than once.

        >>> import ftp
        >>> mesh, x = ftp.AbstractMesh((4,), ("dp",)), torch.empty(8, 6)
        >>> lowered = ftp.lower(lambda x, w: x @ w, mesh, (ftp.P(), ftp.P()), x, torch.empty(6, 2))
        >>> print(lowered.work)
        work: 4 x one device's, 768 of 192 matmul FLOP
               4 x  no layer
          on 4 ranks: %mm at ..., 192 FLOP each
        """
        graph = self.plan.graph
        return work_of(graph, self._program.mesh.axes, named_layers(graph))

    @cached_property
    @collection_paused()
    def memory(self) -> Memory:
        """Peak bytes per rank, an int with its parts and a picture of live bytes over the
        program.

        What the eager runner holds, with its order of the ops and its writes in place: arguments
        throughout, any other value up to its last use. Inductor's code (``compile=True``) holds
        less.
        """
        roles = [
            *self._program.roles,
            *["constants"] * (len(self.plan.graph.inputs) - len(self._program.roles)),
        ]
        phases = {node.name: node.phase for node in self.plan.graph.nodes}
        last = max(phases.values(), default=0)

        def phase(node: fx.Node) -> int:
            return phases.get(node.meta.get("origin", ""), 0 if node.op == "placeholder" else last)

        def workspace(node: fx.Node) -> int:
            own = on_cpu(node, shapes) if self._program.mesh.device_type == "cpu" else 0
            return own + of_attention(node, shapes) + of_flex(node, shapes)

        def measured(shapes: LocalShapes) -> Memory:
            return measure(
                graph,
                shapes,
                roles,
                phase,
                lambda node: "collective" in node.meta,
                workspace,
                sum(copies),
                self._program.given_up,
            )

        graph, shapes, copies = self._executed
        most, equal = measured(shapes), with_equal_loads(graph, shapes)
        return most if equal is shapes else most.with_expected(measured(equal))

    @collection_paused()
    def cost(self, hardware: GivenHardware = None) -> Cost:
        """Estimated seconds of a step, a float with the time of every op and collective: of the
        rank that computes most, among those that run this rank's graph.

        Args:
            hardware: as of ``ftp.shard``, such as ``"h100"``, or ``ftp.calibrate()`` for this
                machine's; default the hardware that the program was planned for.

        Raises:
            InputError: no such hardware. MeshError: links of axes that the mesh does not have.

        >>> import ftp
        >>> mesh, x = ftp.AbstractMesh((4,), ("tp",)), torch.empty(64, 64)
        >>> lowered = ftp.lower(lambda x: x @ x.T, mesh, ftp.P("tp"), x, out_specs=ftp.P())
        >>> cost = lowered.cost("h100")
        >>> cost.flops, 0 < cost < 1e-3
        (131072.0, True)
        """
        program = self._program
        rates = program.hardware if hardware is None else hardware_on(program.mesh, hardware)
        graph, shapes, _ = self._executed
        alike = zip(self._coordinate.items(), self._program.alike(), strict=True)
        same = [next(held for held in groups if i in held) for (_, i), groups in alike]
        ranks = (dict(zip(self._coordinate, at, strict=True)) for at in product(*same))
        shapes = on_busiest(graph, shapes, map(self._local.offsets_at, ranks))
        return estimate(graph, shapes, rates, self.plan.axes)

    @collection_paused()
    def loads(self, *args: Any) -> Loads:
        """The numbers of rows that ranks exchange for given arguments, if they depend on values:
        rows per rank, and per expert. All ranks run in this process.

        ``.most`` of a load is the least capacity that the arguments need. Time and memory with
        equal loads are ``cost()`` and ``memory.expected``; with the most unequal loads,
        ``cost().worst`` and ``memory``.

        Args:
            args: the step's arguments, with global tensors.

        Raises:
            ReportError: fewer arguments than the step's.

        >>> import ftp
        >>> mesh = ftp.simulated_mesh(2, "ep")
        >>> def send(x, counts):
        ...     return ftp.axis.all_to_all(x, "ep", send_counts=counts)
        >>> send = ftp.local(send, mesh, ftp.P("ep"), ftp.P("ep"))
        >>> args = torch.ones(4), torch.tensor([0, 2, 1, 1])
        >>> lowered = ftp.lower(send, mesh, ftp.P("ep"), *args, out_specs=ftp.P("ep"))
        >>> print(str(lowered.loads(*args)).partition(": ")[2])
        2 a rank if equal, 3 at most (1.5 x), room for 4
          ep=0: 1
          ep=1: 3
        """
        leaves = flatten(args)[0]
        if len(leaves) <= max(self._program.tensor_leaves, default=-1):
            raise ReportError("loads takes the arguments of the step, with values: loads(*args).")
        return loads_of(self._program, whole_tensors(self._program, leaves))

    def assert_collectives(
        self,
        *,
        all_reduce: int | None = None,
        all_gather: int | None = None,
        reduce_scatter: int | None = None,
        all_to_all: int | None = None,
        max_bytes: int | None = None,
        none_over: str | Iterable[str] | None = None,
    ) -> None:
        """Claims about a program's communication, for tests.

        Args:
            all_reduce, all_gather, reduce_scatter, all_to_all: how many there are; None makes no
                claim.
            max_bytes: the most bytes that a rank sends in a step.
            none_over: axes over which nothing is sent.

        Raises:
            ReportError: an AssertionError with every claim that does not hold, and the collectives'
                lines of the program.

        >>> import ftp
        >>> w, mesh = {"w": torch.ones(8, 4)}, ftp.AbstractMesh((4,), ("dp",))
        >>> loss = lambda p, x: (x @ p["w"]).sum()
        >>> step = ftp.shard(loss, mesh, {"w": ftp.P()}, batch_specs=ftp.P("dp"))
        >>> lowered = step.lower(w, torch.ones(8, 8))
        >>> lowered.assert_collectives(all_reduce=1, all_gather=0, max_bytes=300)
        """
        given = {
            "all_reduce": all_reduce,
            "all_gather": all_gather,
            "reduce_scatter": reduce_scatter,
            "all_to_all": all_to_all,
        }
        claims = {op: n for op, n in given.items() if n is not None}
        axes = [none_over] if isinstance(none_over, str) else list(none_over or ())
        if unknown := [axis for axis in axes if axis not in self._program.mesh.axes]:
            raise ReportError(
                f"none_over names {', '.join(map(repr, unknown))}, but the mesh has axes"
                f" {', '.join(map(repr, self._program.mesh.axes))}."
            )
        broken = broken_claims(self.collectives, claims, max_bytes, axes)
        if not broken:
            return
        lines = dict(zip(map(id, self.collectives), self._printed.collective_lines(), strict=True))
        text = []
        for claim, collectives in broken:
            text.append(f"{claim}:")
            text += [
                f"  {line.strip()}" for line in folded([lines[id(c)] for c in collectives], least=1)
            ] or ["  (none)"]
        raise ReportError("\n".join(text))

    @cached_property
    @collection_paused()
    def lint(self) -> list[Finding]:
        """Findings, warnings first: specs that shard nothing, large replicated parameters, uneven
        shards with their waste, activations gathered whole, ops with inputs that disagree on their
        layout, room for rows that stays empty. With ``strict=True`` a warning is an error.
        """
        found = lint_of(self._program, self._local, self._printed.origins)
        compiled = bool(self._program.options.compile)
        return [*found, *empty_rows(self._executed[0], compiled=compiled)]

    def why(self, name: str) -> Why:
        """The decisions behind the layout of a value or a parameter, and the whole plan's cost with
        each other layout.

        For an input, every spec that differs in the dim that one axis cuts: the program is planned
        anew with each, exactly. For a value, every layout on each axis: the minimum over all plans
        with it, and for attention's result what that plan sends and holds.

        Args:
            name: as in the printed program, with or without ``%``, or a parameter's path.

        Raises:
            ReportError: no such value.

        >>> import ftp
        >>> params, mesh = {"w": torch.empty(8, 4)}, ftp.AbstractMesh((2,), ("tp",))
        >>> loss = lambda p, x: (x @ p["w"]).square().sum()
        >>> step = ftp.shard(loss, mesh, {"w": ftp.P(None, "tp")})
        >>> print(step.lower(params, torch.empty(16, 8)).why("mm").chain[0])
        over tp: because of params['w'] P(None, 'tp')
        """
        if not isinstance(name, str):
            raise ReportError(
                f"why takes the name of a value, not {kind_of(name)}. Of a collective it is that"
                " of its members: [m.name for m in collective.members]."
            )
        graph, axes = self.plan.graph, self.plan.axes
        value = find(graph, name)
        if value is None:
            near = nearest(name, [node.name for node in graph.nodes])
            raise ReportError(
                f"The program has no value {name!r}; the nearest are {', '.join(near)}."
                " print(lowered) shows all."
            )
        specs = dict(zip(graph.inputs, self._program.in_specs, strict=False))
        layout = str(specs[value.node]) if value.node in specs else typed(value)
        chain = chain_of(value, self._printed.origins, specs, list(axes))
        found: list[Alternative] = []
        if self._again is not None and value.node in specs:
            leaf = self._program.tensor_leaves[graph.inputs.index(value.node)]
            found = other_specs(
                value.node,
                specs[value.node],
                self._program.mesh.axes,
                self,
                lambda spec, again=self._again: again({leaf: spec}),
            )
        elif self._again is not None:
            found = other_layouts(value, self.plan, self._program.hardware, self._again)
        return Why(value.node.name, layout, tuple(chain), tuple(found))

    def diff(self, other: "Lowered") -> Difference:
        """How another program differs, such as the same function under other specs.

        >>> import ftp
        >>> mesh, x = ftp.AbstractMesh((2,), ("dp",)), torch.empty(4, 4)
        >>> here, there = (ftp.lower(torch.sum, mesh, spec, x) for spec in (ftp.P("dp"), ftp.P()))
        >>> here.diff(there).specs
        {'args[0]': ("P('dp')", 'P()')}
        """
        if not isinstance(other, Lowered):
            raise ReportError(f"diff takes another program, as step.lower gives, not {other!r}.")
        mine, theirs = counts(self.collectives), counts(other.collectives)
        specs = {
            node.name: spec
            for node, spec in zip(self.plan.graph.inputs, self._program.in_specs, strict=False)
        }
        changed = {
            node.name: (str(specs.get(node.name)), str(spec))
            for node, spec in zip(other.plan.graph.inputs, other._program.in_specs, strict=False)
            if specs.get(node.name) != spec
        }
        return Difference(
            changed,
            dict(theirs - mine),
            dict(mine - theirs),
            other.collectives.wire_nbytes - self.collectives.wire_nbytes,
            int(other.memory) - int(self.memory),
            float(other.cost()) - float(self.cost()),
        )

    @collection_paused()
    def text(self, *, fold: bool = True) -> str:
        """The program as ``print`` shows it; with ``fold=False`` repeated blocks are written
        out.
        """
        lines = self._printed.lines
        head = f"program on {self._program.mesh}"
        return "\n".join(
            [
                head,
                *(folded(lines) if fold else lines),
                *summary(self.plan, self.collectives, self.lint),
            ]
        )

    def __str__(self) -> str:
        return self.text()

    @cached_property
    def _local(self) -> LocalProgram:
        return self._program.local()

    @cached_property
    def _printed(self) -> PrintedProgram:
        return PrintedProgram(self._program, self._local)

    @cached_property
    def _coordinate(self) -> dict[str, int]:
        return self._program.own_coordinate

    @cached_property
    def _local_inputs(self) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of each tensor that this rank's graph takes."""
        return local_inputs(self._program, self._coordinate)

    @property
    def _local_offsets(self) -> list[int]:
        return self._local.offsets_at(self._coordinate)

    @cached_property
    def _executed(self) -> tuple[fx.Graph, LocalShapes, list[int]]:
        """The graph that the eager runner runs, its shapes, and the bytes of each output that is
        copied when it is returned.
        """
        program, device = self._program, mesh_device(self._program.mesh).type
        made = in_order(program, self._local, self._coordinate)
        donated = {
            held.storage
            for at in program.donated
            for held in made.shapes.values[made.shapes.inputs[at]]
        }
        copies = copied_bytes(made.graph.output_node(), made.shapes, donated)
        graph = made.executed(program.donated)
        shapes = local_shapes(
            graph, self._local_inputs, self._local_offsets, device, before=made.shapes
        )
        return graph, shapes, copies

    @property
    def executed(self) -> fx.Graph:
        """The graph that the eager runner runs."""
        return self._executed[0]

    @cached_property
    def input_bytes(self) -> dict[str, int]:
        """Bytes of each input on this rank."""
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in self._local_inputs]
        return dict(zip([node.name for node in self.plan.graph.inputs], sizes, strict=True))
