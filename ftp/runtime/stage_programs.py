"""The pieces of a pipeline's stages as planned programs: each over the mesh axes other than the
pipeline's, with what crosses stages sharded as its producer leaves it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from ftp.pipeline.schedule import Kind
from ftp.pipeline.split import Piece, Stages
from ftp.planning.prepare import Prepared, plan_prepared, prepare
from ftp.runtime.options import Options
from ftp.runtime.program import Program
from ftp.sharding.mesh import Mesh, resolve
from ftp.sharding.pytree import flatten
from ftp.sharding.spec import PartitionSpec


@dataclass(frozen=True)
class Held:
    """A value that outlives the action that computed it: its spec over the other axes, its global
    shape and its dtype.
    """

    spec: PartitionSpec
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class StagePrograms:
    """A program for each piece; equal pieces of several stages share one.

    Attributes:
        mesh: the axes other than the pipeline's, for the ranks that share this rank's stage.
        values: what crosses pieces, by name.
    """

    mesh: Mesh
    stages: Stages
    programs: Mapping[tuple[Kind, int], Program]
    values: Mapping[str, Held]


def within_stage(mesh: Mesh, axis: str) -> Mesh:
    """The mesh of the ranks that share a stage with this one: all axes but ``axis``."""
    rest = tuple(name for name in mesh.axis_names if name != axis)
    if mesh.kind == "process" and rest:
        assert mesh.torch is not None
        return resolve(mesh.torch[rest])
    kind = "simulated" if mesh.kind == "process" else mesh.kind
    return Mesh(tuple(mesh.axes[name] for name in rest), rest, mesh.device_type, kind)


def plan_stages(
    stages: Stages,
    mesh: Mesh,
    names: tuple[Sequence[str], Sequence[str]],
    params: Sequence[PartitionSpec],
    batch: Sequence[PartitionSpec],
    constants: Sequence[torch.Tensor],
    options: Options,
    check: Callable[[Prepared], None],
) -> StagePrograms:
    """Plan every piece, forward passes first: what a stage takes is sharded as it was left.

    Args:
        mesh: as `within_stage` gives it.
        names: of the parameters, and of the batch tensors.
        params, batch: their specs, without stages.
        check: raises for constraints that do not fit the mesh.
    """
    data_axes = options.data_axes
    if data_axes is None:
        data_axes = tuple(dict.fromkeys(axis for spec in batch for axis in spec.axes))
    own = replace(options, data_axes=data_axes)
    gradients = {
        name: params[leaf] for leaf, found in enumerate(stages.gradients) for name in found.values()
    }
    found: dict[Any, Program] = {}
    programs: dict[tuple[Kind, int], Program] = {}
    values: dict[str, Held] = {}
    order = [("F", k) for k in sorted({k for _, k in stages.pieces})]
    order += [
        (kind, k) for k in sorted({k for _, k in stages.pieces}, reverse=True) for kind in "BIW"
    ]
    for key in order:
        piece = stages.pieces.get(key)  # type: ignore[arg-type]
        if piece is None:
            continue
        given = [
            *(params[i] for i in piece.params),
            *(batch[i] for i in piece.batch),
            *(values[name].spec for name in piece.values),
        ]
        asked = [gradients.get(name) for name in piece.outputs]
        text = _describe(piece, given, asked)
        if text not in found:
            made = _planned(piece, mesh, names, given, asked, constants, own, check)
            found[text] = made
        program = programs[piece.kind, piece.stage] = found[text]
        for name, spec, shape, node in zip(
            piece.outputs,
            program.out_specs,
            program.out_shapes,
            piece.gm.graph.output_node().args[0],  # type: ignore[arg-type]
            strict=True,
        ):
            values[name] = Held(spec, shape, node.meta["val"].dtype)  # type: ignore[union-attr]
    return StagePrograms(mesh, stages, programs, values)


def _planned(
    piece: Piece,
    mesh: Mesh,
    names: tuple[Sequence[str], Sequence[str]],
    given: Sequence[PartitionSpec],
    asked: Sequence[PartitionSpec | None],
    constants: Sequence[torch.Tensor],
    options: Options,
    check: Callable[[Prepared], None],
) -> Program:
    called = [names[0][i] for i in piece.params] + [names[1][i] for i in piece.batch]
    called += piece.values
    is_state = [True] * len(piece.params) + [False] * (len(piece.batch) + len(piece.values))
    prepared = prepare(piece.gm, called, is_state, strict=options.strict)
    check(prepared)
    plan = plan_prepared(
        prepared,
        mesh.axes,
        given,
        asked,
        data_axes=options.data_axes,
        reshard_after_forward=options.reshard_after_forward,
        strict=options.strict,
    )
    roles = ["parameters"] * len(piece.params) + ["batch"] * len(piece.batch)
    roles += ["activations"] * len(piece.values)
    outputs = len(piece.outputs)
    return Program(
        mesh=mesh,
        traced=piece.gm,
        plan=plan,
        tensor_leaves=tuple(range(len(given))),
        in_specs=tuple(given),
        constants=tuple(constants[i] for i in piece.constants),
        out_tree=flatten((0,) * outputs)[1],
        out_leaves=tuple(range(outputs)),
        is_static=(False,) * outputs,
        leaf_specs=tuple(given),
        roles=tuple(roles),
        options=options,
    )


def _describe(
    piece: Piece, given: Sequence[PartitionSpec], asked: Sequence[PartitionSpec | None]
) -> str:
    """A piece as text without names, equal for those that one program serves."""
    number: dict[fx.Node, str] = {}
    lines = [piece.kind, str(given), str(asked), str(piece.constants), str(len(piece.params))]
    for node in piece.gm.graph.nodes:
        number[node] = f"%{len(number)}"
        val = node.meta.get("val")
        kind = [
            f"{tuple(v.shape)} {v.dtype}"
            for v in (val if isinstance(val, list | tuple) else [val])
            if isinstance(v, torch.Tensor)
        ]
        arguments = fx.node.map_arg((node.args, dict(node.kwargs)), number.__getitem__)  # type: ignore[arg-type]
        target = "" if node.op == "placeholder" else str(node.target)
        region = node.meta.get("region")
        lines.append(f"{node.op} {target} {arguments} {kind} {region}")
    return "\n".join(lines)
