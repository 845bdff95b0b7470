"""Lint of a planned program: its findings, and the origins of its cuts that they name."""

from ftp.partitioning.partition import LocalProgram
from ftp.report.causes import Origins, origins
from ftp.report.disagreement import disagreements
from ftp.report.lint import Finding, lint
from ftp.runtime.program import Program


def origins_of(program: Program) -> Origins:
    graph = program.plan.graph
    return origins(
        graph, list(program.plan.axes), list(zip(graph.inputs, program.in_specs, strict=False))
    )


def lint_of(program: Program, local: LocalProgram, found: Origins) -> list[Finding]:
    graph = program.plan.graph
    issued = {
        n.meta.get("origin", ""): n.meta["collective"]
        for n in local.gm.graph.nodes
        if "collective" in n.meta
    }
    inputs = list(zip(graph.inputs, program.in_specs, program.roles, strict=False))
    odd = disagreements(graph, found, {node: spec for node, spec, _ in inputs})
    return [*odd, *lint(graph, inputs, program.mesh.axes, found, issued)]
