"""The eager runner's form of a rank's graph: its order, and its writes in place."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import fx

from ftp.ops.exchange_rows import ALL_TO_ALL_ROWS
from ftp.partitioning.local_program import LocalProgram
from ftp.passes.arrived_rows import only_arrived
from ftp.runtime.local_shapes import LocalShapes, annotate, local_shapes
from ftp.runtime.lowering import ordered, with_writes
from ftp.runtime.program import Program
from ftp.sharding.local_pieces import local_shape
from ftp.sharding.mesh import mesh_device
from ftp.sharding.spec import PartitionSpec


@dataclass(frozen=True)
class Executed:
    """A rank's graph as it runs.

    Attributes:
        ordered: the nodes in the order in which they run, without writes in place.
        shapes: of the values of ``ordered``.
        graph: ``ordered`` with exchanges that return only the rows that arrive, and with results
            written to operands' memory.
    """

    ordered: fx.Graph
    shapes: LocalShapes
    graph: fx.Graph


def executed(program: Program, local: LocalProgram, coordinate: Mapping[str, int]) -> Executed:
    """The eager runner's form of a rank's graph, for contiguous inputs.

    Inductor's code (``compile=True``) is made from the ordered graph with its updates merged.
    """
    device = mesh_device(program.mesh).type
    graph = ordered(local.gm.graph)
    shapes = local_shapes(
        graph, local_inputs(program, coordinate), local.offsets_at(coordinate), device
    )
    annotate(shapes, device)
    fitted = only_arrived(graph, (ALL_TO_ALL_ROWS,))
    return Executed(graph, shapes, with_writes(fitted, program.donated))


def local_inputs(
    program: Program, coordinate: Mapping[str, int]
) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of each tensor that a rank's graph takes."""
    nodes, specs = program.plan.graph.inputs, program.in_specs
    specs = [*specs, *[PartitionSpec()] * (len(nodes) - len(specs))]
    axes = dict(program.mesh.axes)
    return [
        (local_shape(spec, node.results[0].shape, axes, dict(coordinate)), node.results[0].dtype)
        for node, spec in zip(nodes, specs, strict=True)
    ]
