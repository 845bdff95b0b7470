"""Check the options of a step against its mesh."""

import operator
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch

from ftp.errors import InputError, MeshError, SpecError, raise_all
from ftp.pipeline.placement import Pipeline
from ftp.planning.machine import hardware_on
from ftp.runtime.options import Options
from ftp.sharding.mesh import Mesh
from ftp.sharding.mesh_groups import uses_nccl
from ftp.sharding.pytree import flatten, kind_of
from ftp.sharding.spec import PartitionSpec, staged


def checked_options(mesh: Mesh, options: Options) -> Options:
    """The options, with tuples for sequences.

    Raises:
        SpecError: where ``data_axes`` names no axis of the mesh.
        InputError: for numbers out of range, and for options that exclude each other.
        MeshError: for what the mesh's devices cannot do, and for links of axes that it lacks.
    """
    _check_axes(options, mesh)
    flags = (f.name for f in fields(options) if isinstance(f.default, bool))
    check_flags({name: getattr(options, name) for name in flags})
    prefetch = _checked_prefetch(options.prefetch)
    chunks = _checked_count("chunks", options.chunks, "chunks, 1 for none")
    _check_cuda_graph(options, mesh)
    _check_async_tp(options, mesh)
    _check_reduce_dtype(options)
    hardware_on(mesh, options.hardware)
    programs = _checked_count("programs", options.programs, "programs, at least 1")
    donate = _checked_positions(options.donate)
    data_axes = None if options.data_axes is None else tuple(options.data_axes)
    numbers = {"prefetch": prefetch, "chunks": chunks, "programs": programs, "donate": donate}
    return replace(options, data_axes=data_axes, **numbers)


def check_flags(flags: Mapping[str, Any]) -> None:
    """Raises for options that are neither True nor False.

    Raises:
        InputError: such as ``compile="max-autotune"``.
    """
    wrong = [
        f"{name} is {value!r}, {kind_of(value)}; give True or False."
        for name, value in flags.items()
        if not isinstance(value, bool | np.bool_)
    ]
    raise_all(InputError, wrong)


def check_pipeline(
    pipeline: Any, mesh: Mesh, options: Options, specs: Any, *, updates: bool = False
) -> None:
    """Raises for what does not go with a pipeline.

    Args:
        specs: those of the parameters, or of all arguments.
        updates: the step does more after its gradient, and returns the arguments' new values.

    Raises:
        InputError: no ``Pipeline``, or options that exclude it.
        SpecError: specs without stages.
        MeshError: a mesh without its axis, or devices between which stages cannot send.
        ScheduleError: a schedule that does not end, or misses work.
    """
    if not isinstance(pipeline, Pipeline):
        raise InputError(f"pipeline is {pipeline!r}; give an ftp.Pipeline(axis, microbatches).")
    ranks = pipeline.mesh_of(mesh).axes[pipeline.axis]
    pipeline.actions(ranks)
    if mesh.kind == "process" and mesh.device_type == "cuda" and not uses_nccl(mesh):
        raise MeshError(
            f"The mesh is {mesh}, but its processes talk by gloo, which sends no tensors of a GPU"
            " from one stage to another. Start them with ftp.init_process_group(), which uses NCCL,"
            ' or make the mesh with device_type="cpu".'
        )
    if options.donate and not updates:
        raise InputError(
            "pipeline= and donate= exclude each other: a step's arguments are read until its last"
            " microbatch. Leave one out."
        )
    check_staged(options)
    if options.data_axes and pipeline.axis in options.data_axes:
        raise SpecError(f"data_axes names {pipeline.axis!r}, the axis of the pipeline.")
    given = [s for s in flatten(specs)[0] if isinstance(s, PartitionSpec)]
    in_stages = has_stages(given) or any(pipeline.axis in s.axes for s in given)
    if ranks > 1 and not in_stages:
        raise SpecError(
            "pipeline= is given, and no spec gives a stage: all ranks would hold all parameters,"
            " and the first do all work. Give the specs of pipeline.place(params, specs, mesh)."
        )


def has_stages(specs: Any) -> bool:
    """Whether some spec of a tree gives a stage."""
    return any(isinstance(s, PartitionSpec) and staged(s) is not None for s in flatten(specs)[0])


def check_staged(options: Options, *, is_pipeline: bool = True) -> None:
    """Raises for options that do not go with specs that give stages.

    Args:
        is_pipeline: a pipeline takes the step's gradient.

    Raises:
        InputError: an option that is not written for programs that run in subgraphs.
    """
    excluded = {
        "check_inputs": (options.check_inputs, "Call ftp.check_replicas now and then."),
        "explicit": (options.explicit, "What stages send to each other is no line's."),
        "cuda_graph": (options.cuda_graph, "What stages send is not recorded."),
        "reduce_dtype": (
            options.reduce_dtype is not None and not is_pipeline,
            "Gradients are summed where pipeline= takes them.",
        ),
    }
    for name, (is_given, why) in excluded.items():
        if is_given:
            raise InputError(
                f"{name}= does not go with stages of a pipeline. {why} Leave {name}= out."
            )


def _checked_positions(donate: Any) -> tuple[int, ...]:
    if isinstance(donate, int) or _whole(donate) is not None:
        raise InputError(f"donate is {donate!r}; give positions of arguments, as ({donate!r},).")
    positions = () if isinstance(donate, str) else tuple(map(_whole, donate))
    if isinstance(donate, str) or None in positions:
        raise InputError(f"donate is {donate!r}; give positions of arguments, as (0,).")
    return tuple(i for i in positions if i is not None)


def _check_axes(options: Options, mesh: Mesh) -> None:
    if isinstance(options.data_axes, str):
        raise SpecError(
            f"data_axes is {options.data_axes!r}; give a tuple: ({options.data_axes!r},)."
        )
    unknown = [axis for axis in options.data_axes or () if axis not in mesh.axes]
    if unknown:
        raise SpecError(
            f"data_axes names {', '.join(map(repr, unknown))}, but the mesh has axes"
            f" {', '.join(map(repr, mesh.axes))}."
        )


def _checked_prefetch(prefetch: Any) -> int | None:
    size = _whole(prefetch)
    if prefetch is not None and (size is None or size < 0):
        raise InputError(
            f"prefetch is {prefetch!r}; it must be a number of bytes, 0 for none, or None for"
            " those of the largest parameter."
        )
    return size


def _checked_count(name: str, count: Any, unit: str) -> int:
    number = _whole(count)
    if number is None or number < 1:
        raise InputError(f"{name} is {count!r}; it must be a number of {unit}.")
    return number


def _whole(x: Any) -> int | None:
    """An int, also one of numpy or an enum; None for another value."""
    try:
        return None if isinstance(x, bool) else operator.index(x)
    except TypeError:
        return None


def _check_cuda_graph(options: Options, mesh: Mesh) -> None:
    if not options.cuda_graph:
        return
    if mesh.device_type != "cuda":
        raise MeshError(
            f"cuda_graph=True, but the mesh {mesh} has no GPUs whose work could be recorded."
            " Leave it out, or give cuda_graph=mesh.device_type == 'cuda'."
        )
    if options.check_inputs:
        raise InputError(
            "cuda_graph=True and check_inputs=True: the check reads digests on the host at every"
            " call, for which the GPU waits. Leave one out, and call ftp.check_replicas now and"
            " then."
        )


def _check_reduce_dtype(options: Options) -> None:
    if options.reduce_dtype not in (None, torch.bfloat16):
        raise InputError(
            f"reduce_dtype is {options.reduce_dtype!r}; give torch.bfloat16, in which gradients'"
            " terms are sent and then summed in float32, or None for their own dtype."
        )
    if options.reduce_dtype is not None and options.certify:
        raise InputError(
            "certify=True and reduce_dtype=torch.bfloat16: a certificate proves that a program"
            " sums what one device sums, and rounded terms are others. Leave one out; ftp.certify"
            " of the step without reduce_dtype proves the plan."
        )


def _check_async_tp(options: Options, mesh: Mesh) -> None:
    if not options.async_tp:
        return
    if mesh.kind == "process" and mesh.device_type != "cuda":
        raise MeshError(
            f"async_tp=True, but the mesh {mesh} has no GPUs with symmetric memory. Leave it out;"
            " chunks=n hides the same reshards behind matmuls with ordinary collectives."
        )
    if options.chunks > 1:
        raise InputError(
            f"async_tp=True and chunks={options.chunks} both take the reshards beside matmuls."
            " Leave one out."
        )
