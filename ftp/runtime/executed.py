"""The eager runner's form of a rank's graph: its order, and its writes in place."""

import functools
from collections.abc import Mapping, Sequence

import torch
from torch import fx

from ftp.dataclass import dataclass
from ftp.ops.exchange_rows import ALL_TO_ALL_ROWS
from ftp.partitioning.local_program import LocalProgram
from ftp.passes.arrived_rows import only_arrived
from ftp.runtime.local_shapes import LocalShapes, annotate, local_shapes
from ftp.runtime.lowering import ordered, with_writes
from ftp.runtime.program import Program
from ftp.sharding.local_pieces import local_shape
from ftp.sharding.mesh import mesh_device


@dataclass(frozen=True)
class Ordered:
    """A rank's graph in the order in which it runs, without writes in place, and its shapes."""

    graph: fx.Graph
    shapes: LocalShapes

    def executed(self, donated: Sequence[int]) -> fx.Graph:
        """The eager runner's form of the graph, which is used up: exchanges return only the rows
        that arrive, and results are written to operands' memory.

        Args:
            donated: positions of the inputs that may be written to.
        """
        return with_writes(only_arrived(self.graph, (ALL_TO_ALL_ROWS,)), donated)


def in_order(program: Program, local: LocalProgram, coordinate: Mapping[str, int]) -> Ordered:
    """A rank's graph in the order in which it runs, for contiguous inputs.

    Inductor's code (``compile=True``) is made from it with its updates merged.
    """
    device = mesh_device(program.mesh).type
    graph = ordered(local.gm.graph)
    shapes = local_shapes(
        graph, local_inputs(program, coordinate), local.offsets_at(coordinate), device
    )
    annotate(shapes, device)
    return Ordered(graph, shapes)


def local_inputs(
    program: Program, coordinate: Mapping[str, int]
) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of each tensor that a rank's graph takes."""
    at = {"axes": program.mesh.axes, "coordinate": dict(coordinate)}
    shape_of = functools.cache(functools.partial(local_shape, **at))  # layers have equal inputs
    metas = [node.results[0] for node in program.plan.graph.inputs]
    return [
        (shape_of(spec, meta.shape), meta.dtype)
        for meta, spec in zip(metas, program.input_specs, strict=True)
    ]
