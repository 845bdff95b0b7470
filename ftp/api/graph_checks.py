"""Checks of a step's graphs and programs: prepared graphs against the mesh, programs as options
ask.
"""

from collections.abc import Iterable
from contextlib import nullcontext

from ftp.errors import MeshError, SpecError, raise_all
from ftp.ops.constrain import Pin
from ftp.per_rank.planned import region_of
from ftp.planning.graph import Graph, Node
from ftp.planning.prepare import Prepared
from ftp.runtime.options import Options
from ftp.runtime.program import Program
from ftp.runtime.sized_program import SizedProgram
from ftp.sharding.check_spec import check_spec
from ftp.sharding.mesh import Mesh


def check_programs(programs: Iterable[Program], options: Options) -> None:
    """Lint each program once under ``strict``, and certify it under ``certify``."""
    once = {id(p): p for p in programs}.values()
    if options.strict:
        from ftp.report.program_lint import check_strictly

        for program in once:
            sizes = program.plan.sizes
            with nullcontext() if sizes is None else sizes.noting():
                check_strictly(program)
    if options.certify:
        for program in once:
            check_certified(program)


def check_certified(program: Program) -> None:
    """Certify a program; one that serves many sizes, at its sizes, once."""
    from ftp.api.certify import certified
    from ftp.api.certify_sizes import check_sizes

    if isinstance(program, SizedProgram):
        check_sizes(program)
    else:
        certified(program)


def check_prepared(prepared: Prepared, mesh: Mesh) -> None:
    """Raises for constraints and per-rank regions of a graph that do not fit the mesh."""
    _check_constraints(prepared.constraints, mesh)
    _check_local_meshes(prepared.graph, mesh)


def _check_constraints(constrained: dict[Node, Pin], mesh: Mesh) -> None:
    failures: dict[str, None] = {}
    for node, pin in constrained.items():
        where = f"the constraint at {node.source}" if node.source else "a constraint"
        failures |= dict.fromkeys(check_spec(pin.spec, node.results[0].shape, mesh.axes, where))
        failures |= dict.fromkeys(
            f"{where} has spec {pin.spec}, but stands in per-rank code over {axis!r}, where a"
            " tensor belongs to one rank. Name other axes only."
            for axis in sorted(node.rank_axes.intersection(pin.spec.axes))
        )
        failures |= dict.fromkeys(
            f"{where} names mesh axis {axis!r}, but the mesh is {mesh}. Give axes= names of"
            " its axes."
            for axis in pin.axes or ()
            if axis not in (*mesh.axes, *pin.spec.axes)
        )
    raise_all(SpecError, failures)


def _check_local_meshes(graph: Graph, mesh: Mesh) -> None:
    failures: dict[str, None] = {}
    held = dict(mesh.axes).items()
    for node in graph.nodes:
        axes = region_of(node.target, node.args)
        fits = axes.items() <= held
        if node.kind == "local":
            axes = dict(node.target.axes)
            fits = axes == mesh.axes
        if not fits:
            given = ", ".join(f"{axis} {n}" for axis, n in axes.items())
            failures[
                f"ftp.local at {node.source} is given a mesh ({given}), but runs in a step on"
                f" {mesh}. Give it the same mesh, or none."
            ] = None
    raise_all(MeshError, failures)
