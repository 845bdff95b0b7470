"""FLOPs of a call by torch's own counter, and of the ops that ftp defines."""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from ftp.ops.attention import PART, PART_BACKWARD, pieces_of, visible
from ftp.ops.map_slices import MAP_SLICES, slice_program_of
from ftp.ops.mapped_arguments import mapped_arguments
from ftp.ops.rings import RINGS
from ftp.ops.symmetric_memory import gather_matmuls, matmul_scatter, multiplications
from ftp.runtime.local_shapes import LocalShapes

PIPELINED = (gather_matmuls, matmul_scatter, *RINGS)  # compute while they send


def flops_of(node: fx.Node, shapes: LocalShapes) -> float:
    """FLOPs of a matmul, attention or convolution by torch's own counter; 0 for any other op."""
    if not _is_counted(node.target):
        return 0.0

    def shape(value: Any) -> Any:
        if isinstance(value, fx.Node):
            held = shapes.values.get(value)
            return held[0].shape if held else 0
        if isinstance(value, list | tuple):
            return type(value)(map(shape, value))
        return value

    if node.target in RINGS or node.target in (PART, PART_BACKWARD):
        return _part_flops(node, shapes)
    args, kwargs = shape(tuple(node.args)), {k: shape(v) for k, v in node.kwargs.items()}
    return flops_of_call(node.target, args, kwargs, [r.shape for r in shapes.values[node]])


@functools.cache
def _is_counted(target: Any) -> bool:
    packet = getattr(target, "overloadpacket", None)
    is_own = target in (*PIPELINED, MAP_SLICES)
    return packet is not None and (is_own or is_attention(target) or packet in flop_registry)


def flops_of_call(
    target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], results: Sequence[Any]
) -> float:
    """As `flops_of`, from a call's arguments with shapes in place of tensors."""
    if not _is_counted(target):
        return 0.0
    if target in (gather_matmuls, matmul_scatter):
        return 2.0 * multiplications(target, args)
    if target is MAP_SLICES:
        return results[0][0] * _flops_of_slice(args[2])
    if is_attention(target):
        if "backward" in op_name(target):
            return float(sdpa_backward_flop_count(*args[:4]))
        return float(sdpa_flop_count(*args[:3]))
    out = tuple(results)
    count = flop_registry[target.overloadpacket]
    return float(count(*args, **kwargs, out_val=out[0] if len(out) == 1 else out))


@functools.cache
def _flops_of_slice(key: str) -> float:
    """Of a function of one slice (``map_slices``)."""

    def shape(x: fx.Node) -> Any:
        val = x.meta["val"]
        return val.shape if isinstance(val, torch.Tensor) else [v.shape for v in val]

    total = 0.0
    for node in slice_program_of(key).gm.graph.nodes:
        if node.op == "call_function" and _is_counted(node.target):
            args, kwargs = mapped_arguments(node, shape)
            found = node.meta["val"]
            results = [shape(node)] if isinstance(found, torch.Tensor) else shape(node)
            total += flops_of_call(node.target, args, kwargs, results)
    return total


def _part_flops(node: fx.Node, shapes: LocalShapes) -> float:
    """Attention's FLOPs over the pairs of a query and a key that its mask leaves."""
    target: Any = node.target
    ring = RINGS.get(target)
    at = ring.at if ring else int(target is PART_BACKWARD)
    q, k, v = (shapes.values[x][0].shape for x in node.args[at : at + 3])  # type: ignore[index]
    given: Any = map_arg(node.args, lambda n: shapes.numbers.get(n, 0))
    if ring:
        rows, is_causal = (ring.argument(given, name) for name in ("rows", "is_causal"))
        keys = [(0, ring.needs(given).ring.size)]
    else:
        rows, columns, *causal = given[6 if at else 3 :]
        keys, is_causal = pieces_of(columns, k[2]), causal and causal[0]
    pairs = visible(pieces_of(rows, q[2]), keys, bool(is_causal))
    of_pair = 6 * q[3] + 4 * v[3] if at else 2 * q[3] + 2 * v[3]
    return float(math.prod(q[:2]) * pairs * of_pair)


@functools.cache
def op_name(target: Any) -> str:
    return str(target).removeprefix("aten.")


def is_attention(target: Any) -> bool:
    return "scaled_dot_product" in op_name(target)
