"""A planned program as it is printed, and the reason of each collective that it issues."""

from dataclasses import replace
from functools import cached_property

from torch import fx

from ftp.partitioning.collectives import Collective, Member
from ftp.partitioning.local_program import LocalProgram
from ftp.report.causes import Origins, of_reshards
from ftp.report.collectives import Collectives, members_of, resharded_name
from ftp.report.program_lint import origins_of
from ftp.report.text import program_lines
from ftp.runtime.program import Program
from ftp.sharding.pytree import leaf_names


class PrintedProgram:
    """The lines of a program, and one rank's collectives with their reasons.

    Attributes:
        issued: the nodes of the rank's collectives, in order.
    """

    def __init__(self, program: Program, local: LocalProgram):
        self.program, self.graph = program, program.plan.graph
        self.issued = [n for n in local.gm.graph.nodes if "collective" in n.meta]

    @cached_property
    def origins(self) -> Origins:
        return origins_of(self.program)

    @cached_property
    def lines(self) -> list[str]:
        issued: dict[str, list[Collective]] = {}
        for node in self.issued:
            for m in members_of(node):
                record = replace(node.meta["collective"], nbytes=m.nbytes)
                issued.setdefault(m.name, []).append(record)
        return program_lines(self.graph, issued, lambda node: self._reasons.get(node.name, ""))

    def collectives(self) -> Collectives:
        names = {n.name: resharded_name(n) for n in self.graph.nodes if n.kind == "reshard"}
        return Collectives(
            replace(
                n.meta["collective"],
                cause=self._why(n),
                members=tuple(
                    Member(
                        names.get(m.name, m.name), m.nbytes, self._reasons.get(m.name) or m.cause
                    )
                    for m in members_of(n)
                ),
            )
            for n in self.issued
        )

    def collective_lines(self) -> list[str]:
        """Per issued collective its line."""
        lines = {
            line.split(":")[0].removeprefix("  >> %"): line
            for line in self.lines
            if line.startswith("  >> %")
        }
        return [
            lines.get(
                node.meta.get("origin", ""),
                f"  >> {c.op} over {', '.join(c.axes)}, {c.nbytes:,} bytes, for {self._why(node)}",
            )
            for node in self.issued
            for c in [node.meta["collective"]]
        ]

    def _why(self, node: fx.Node) -> str:
        first, *others = members_of(node)
        why = self._reasons.get(first.name) or first.cause
        return f"{why}, and {len(others)} more" if others else why

    @cached_property
    def _reasons(self) -> dict[str, str]:
        """Per reshard, by name, why it is needed."""
        specs = dict(zip(self.graph.inputs, self.program.in_specs, strict=False))
        return of_reshards(self.graph, self.origins, specs, self._output_names())

    def _output_names(self) -> list[str]:
        program = self.program
        result = program.out_tree.unflatten(program.out_leaves)
        leaves = zip(
            program.out_leaves, program.is_static, leaf_names(result, "the result"), strict=True
        )
        names = {leaf: name for leaf, static, name in leaves if not static}
        checked = range(len(names), len(self.graph.outputs))
        names |= {i: f"assumption {i - checked.start}" for i in checked}
        return [names[i] for i in range(len(self.graph.outputs))]
