"""FLOPs of a call by torch's own counter, and of the ops that ftp defines."""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import fx
from torch.fx.node import map_arg
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from ftp.ops.attention import PART, PART_BACKWARD, pieces_of, visible
from ftp.ops.attention_flex import FLEX, FLEX_BACKWARD
from ftp.ops.attention_varlen import VARLEN, VARLEN_BACKWARD
from ftp.ops.listed_blocks import known_blocks
from ftp.ops.map_slices import MAP_SLICES, slice_program_of
from ftp.ops.mapped_arguments import mapped_arguments
from ftp.ops.rings import RINGS
from ftp.ops.symmetric_memory import gather_matmuls, matmul_scatter, multiplications
from ftp.runtime.local_shapes import LocalShapes
from ftp.sharding.local_pieces import Interval

_FORWARD = (PART, FLEX, VARLEN)
_BACKWARD = (PART_BACKWARD, FLEX_BACKWARD, VARLEN_BACKWARD)
_AS_MM = (torch.ops.aten._scaled_mm_v2, torch.ops.aten._int_mm)  # torch's counter lacks them
PIPELINED = (gather_matmuls, matmul_scatter, *RINGS)  # compute while they send


def flops_of(node: fx.Node, shapes: LocalShapes) -> float:
    """FLOPs of a matmul, attention or convolution by torch's own counter; 0 for any other op."""
    if not is_counted(node.target):
        return 0.0

    def shape(value: Any) -> Any:
        if isinstance(value, fx.Node):
            held = shapes.values.get(value)
            return held[0].shape if held else 0
        if isinstance(value, list | tuple):
            return type(value)(map(shape, value))
        return value

    if node.target in RINGS or node.target in (*_FORWARD, *_BACKWARD):
        return _part_flops(node, shapes)
    args, kwargs = shape(tuple(node.args)), {k: shape(v) for k, v in node.kwargs.items()}
    return flops_of_call(node.target, args, kwargs, [r.shape for r in shapes.values[node]])


@functools.cache
def is_counted(target: Any) -> bool:
    """Whether calls of an op have FLOPs that are counted."""
    packet = getattr(target, "overloadpacket", None)
    is_own = target in (*PIPELINED, MAP_SLICES)
    return packet is not None and (
        is_own or is_attention(target) or packet in flop_registry or packet in _AS_MM
    )


def flops_of_call(
    target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], results: Sequence[Any]
) -> float:
    """`flops_of` a call, with shapes in place of tensors as arguments."""
    if not is_counted(target):
        return 0.0
    if target in (gather_matmuls, matmul_scatter):
        return 2.0 * multiplications(target, args)
    if target is MAP_SLICES:
        return results[0][0] * _flops_of_slice(args[2])
    if is_attention(target):
        if "backward" in op_name(target):
            return float(sdpa_backward_flop_count(*args[:4]))
        return float(sdpa_flop_count(*args[:3]))
    call = target.overloadpacket, args, tuple(kwargs.items()), tuple(results)
    try:
        return _counted(*call)
    except TypeError:  # arguments in lists
        return _counted.__wrapped__(*call)


@functools.lru_cache(maxsize=4096)
def _counted(packet: Any, args: Any, kwargs: Any, results: tuple[Any, ...]) -> float:
    out = results[0] if len(results) == 1 else results
    formula = flop_registry[torch.ops.aten.mm if packet in _AS_MM else packet]
    return float(formula(*args, **dict(kwargs), out_val=out))


@functools.cache
def _flops_of_slice(key: str) -> float:
    """FLOPs of a function of one slice (``map_slices``)."""

    def shape(x: fx.Node) -> Any:
        val = x.meta["val"]
        return val.shape if isinstance(val, torch.Tensor) else [v.shape for v in val]

    total = 0.0
    for node in slice_program_of(key).gm.graph.nodes:
        if node.op == "call_function" and is_counted(node.target):
            args, kwargs = mapped_arguments(node, shape)
            found = node.meta["val"]
            results = [shape(node)] if isinstance(found, torch.Tensor) else shape(node)
            total += flops_of_call(node.target, args, kwargs, results)
    return total


def _part_flops(node: fx.Node, shapes: LocalShapes) -> float:
    """FLOPs of attention over the pairs of a query and a key that the mask leaves, as far as a
    trace knows the mask.
    """
    target: Any = node.target
    ring = RINGS.get(target)
    at = ring.at if ring else int(target in _BACKWARD)
    q, k, v = (shapes.values[x][0].shape for x in node.args[at : at + 3])  # type: ignore[index]
    args: Any = map_arg(node.args, lambda n: shapes.numbers.get(n, 0))
    given = dict(zip((a.name for a in target._schema.arguments), args, strict=False))
    rows = pieces_of(given["rows"], q[2])
    keys = [(0, ring.needs(args).ring.size)] if ring else pieces_of(given["columns"], k[2])
    if "known" in given:
        pairs = _listed_pairs(rows, keys, given["block"], given["known"])
    elif "is_self" in given:
        sides = (given["left"], given["right"]) if given["is_self"] else (-1, -1)
        pairs = _pairs_of_window(rows, keys, *sides)
    else:
        pairs = visible(rows, keys, bool(given.get("is_causal")))
    of_pair = 6 * q[3] + 4 * v[3] if at else 2 * q[3] + 2 * v[3]
    return float(math.prod(q[:2]) * pairs * of_pair)


def _pairs_of_window(
    rows: Sequence[Interval], keys: Sequence[Interval], left: int, right: int
) -> int:
    """
    >>> _pairs_of_window([(2, 3)], [(0, 4)], 1, 0), _pairs_of_window([(2, 3)], [(0, 4)], -1, 0)
    (5, 11)
    """
    total = 0
    for first, length in rows:
        at = np.arange(first, first + length)
        for begin, count in keys:
            start = np.maximum(at - left, begin) if left >= 0 else begin
            stop = np.minimum(at + right + 1, begin + count) if right >= 0 else begin + count
            total += int(np.maximum(np.broadcast_to(stop - start, at.shape), 0).sum())
    return total


def _listed_pairs(
    rows: Sequence[Interval], keys: Sequence[Interval], block: Sequence[int], known: str
) -> int:
    """Pairs of the blocks that a mask lists."""
    if not known:
        return visible(rows, keys, False)
    of_keys = np.zeros(known_blocks(known).shape[1] * block[1], dtype=bool)
    for begin, count in keys:
        of_keys[begin : begin + count] = True
    held = known_blocks(known) @ of_keys.reshape(-1, block[1]).sum(1)  # keys per block of queries
    at = np.concatenate([np.arange(first, first + n) for first, n in rows] or [np.arange(0)])
    return int(held[at // block[0]].sum())


@functools.cache
def op_name(target: Any) -> str:
    return str(target).removeprefix("aten.")


def is_attention(target: Any) -> bool:
    return "scaled_dot_product" in op_name(target)
