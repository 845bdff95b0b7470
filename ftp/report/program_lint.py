"""Lint of a planned program: its findings, and the origins of its cuts that they name."""

from ftp.errors import PlanningError, join_failures
from ftp.ops.constrain import pin_from_str
from ftp.partitioning.local_program import LocalProgram
from ftp.report.causes import Origins, origins
from ftp.report.disagreement import disagreements
from ftp.report.lint import Finding, lint
from ftp.report.work import repeated_work
from ftp.runtime.program import Program


def origins_of(program: Program) -> Origins:
    graph = program.plan.graph
    return origins(
        graph, list(program.plan.axes), list(zip(graph.inputs, program.in_specs, strict=False))
    )


def lint_of(
    program: Program, local: LocalProgram, found: Origins, is_strict: bool = False
) -> list[Finding]:
    graph = program.plan.graph
    issued = {
        n.meta.get("origin", ""): n.meta["collective"]
        for n in local.gm.graph.nodes
        if "collective" in n.meta
    }
    inputs = list(zip(graph.inputs, program.in_specs, program.roles, strict=False))
    specs = {node: spec for node, spec, _ in inputs}
    axes = program.mesh.axes
    named = {axis for spec in specs.values() for axis in spec.axes}
    named |= {
        axis
        for node in graph.nodes
        if node.kind == "constrain"
        for axis in pin_from_str(node.target).spec.axes
    }
    used = [axis for axis in axes if axis in named]
    return [
        *_broken(program),
        *repeated_work(graph, axes, used, found, specs),
        *disagreements(graph, found, specs),
        *lint(graph, inputs, axes, found, issued, is_strict),
    ]


def _broken(program: Program) -> list[Finding]:
    """Axes on which no plan keeps all placement constraints."""
    text = (
        "has no plan that keeps all constraints: some activations or parameters that should stay"
        " are resharded. print(lowered) shows where; data_axes= says on which axes parameters move."
    )
    return [
        Finding("constraints broken", "warning", f"mesh axis {axis!r}", text)
        for axis, kept in program.plan.kept_rules.items()
        if not kept
    ]


def check_strictly(program: Program) -> None:
    """Refuse a planned program whose lint has warnings, for ``strict=True``.

    Raises:
        PlanningError: with every warning of its lint.
    """
    local = program.partitioner.program(dict.fromkeys(program.mesh.axes, 0))
    findings = lint_of(program, local, origins_of(program), is_strict=True)
    warnings = [f for f in findings if f.severity == "warning"]
    if warnings:
        raise PlanningError(
            join_failures(
                ["strict=True, and the program has:", *(f"  {f.where} {f.text}" for f in warnings)]
            )
        )
