"""Per-rank code over some mesh axes, planned over the others.

Its ops become ops of the surrounding program, on shapes local to its own axes. ``ftp::enter`` turns
a global value into this rank's shard, ``ftp::leave`` turns a shard into a global value; neither
computes anything. On the code's own axes the layouts at these two ops are fixed, and the ops
between them belong to one rank.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ftp.errors import RuleError
from ftp.ops.axis_collectives import OPS, axis_of
from ftp.ops.define import define
from ftp.ops.fill_up import CUT_OFF, FILL_UP
from ftp.per_rank.program import Port, RankCode, factor
from ftp.per_rank.sizes import held
from ftp.rules.call import Call, Meta
from ftp.rules.local_op import LocalOp
from ftp.rules.notation import Dim, Notation
from ftp.rules.overloads import aten
from ftp.rules.registry import rule
from ftp.rules.rule import Rule

_REGION = "str[] region, int[] counts, str[] axes, int[] dims, int[] packs"
ENTER = define(f"enter(Tensor x, {_REGION}) -> Tensor")
LEAVE = define(f"leave(Tensor x, {_REGION}, str[] pending) -> Tensor")
AXIS_INDEX = define("axis_index(str axis, int n) -> Tensor")


def region_of(target: Any, args: Sequence[Any]) -> dict[str, int]:
    """The axes, and their sizes, of the per-rank code that an op enters or leaves, or pads rows
    for; empty for any other op.
    """
    if target is ENTER or target is LEAVE:
        return dict(zip(args[1], args[2], strict=True))
    if target is FILL_UP or target is CUT_OFF:
        return {args[1]: args[2]}
    return {}


def rank_axes(
    target: Any, args: Sequence[Any], operands: Iterable[frozenset[str]]
) -> frozenset[str]:
    """The axes along which an op's result belongs to one rank, given those of its operands."""
    if target is LEAVE:
        return frozenset()
    if target is ENTER:
        return frozenset(args[1])
    axis = args[0] if target is AXIS_INDEX else axis_of(target, args[1:])
    return frozenset(() if axis is None else (axis,)).union(*operands)


def collective_axis(target: Any, args: Sequence[Any]) -> str | None:
    """The axis of a collective of per-rank code, else None."""
    return axis_of(target, args[1:])


def expanded(program: RankCode) -> fx.Graph:
    """The program as ops on global values: it enters each operand and leaves with each result."""
    if program.key in _expanded:
        return _expanded[program.key]
    graph, env = fx.Graph(), {}
    placeholders = program.gm.graph.find_nodes(op="placeholder")
    n = len(program.operands)
    for node, port in zip(placeholders[:n], program.operands, strict=True):
        env[node] = graph.placeholder(node.name)
        env[node].meta["val"] = held(port.global_shape(program.axes), port.dtype)
    for node, port in zip(placeholders[:n], program.operands, strict=True):
        args = (env[node], *_arguments(program, port))
        env[node] = graph.create_node("call_function", ENTER, args, name=f"{node.name}_entered")
        env[node].meta["val"] = held(port.shape, port.dtype)
    for node, (axis, size) in zip(placeholders[n:], program.axes.items(), strict=True):
        env[node] = graph.call_function(AXIS_INDEX, (axis, size))
        env[node].meta["val"] = held((), torch.int64)
    for node in program.gm.graph.nodes:
        if node.op == "call_function":
            env[node] = graph.node_copy(node, env.__getitem__)
    left, outputs = [], program.gm.graph.output_node().args[0]
    for node, port in zip(outputs, program.results, strict=True):  # type: ignore[arg-type]
        args = (env[node], *_arguments(program, port), list(port.pending))
        left.append(graph.create_node("call_function", LEAVE, args, name=f"{node.name}_left"))
        left[-1].meta["val"] = held(port.global_shape(program.axes), port.dtype)
    graph.output(tuple(left))
    return _expanded.setdefault(program.key, graph)


_expanded: dict[str, fx.Graph] = {}


def _arguments(program: RankCode, port: Port) -> tuple[list[Any], ...]:
    axes, dims, packs = [], [], []
    for d in range(len(port.shape)):
        for cut in port.spec.cuts(d):
            axes.append(cut.axis)
            dims.append(d)
            packs.append(cut.pack)
    return list(program.axes), list(program.axes.values()), axes, dims, packs


# Rules. Other axes may not cut the factor of a mesh axis.


def _contiguous(op: LocalOp) -> fx.Node:
    return op.emit(aten.contiguous.default, op.args[0])  # the code was traced on contiguous shards


def _boundary(call: Call, whole: Meta) -> tuple[tuple[Dim, ...], tuple[Dim, ...], Any, set[str]]:
    """The dims of the global value, those of the shard, the sizes of their factors, and the factors
    that are whole.
    """
    region = region_of(call.target, call.args)
    cuts: dict[int, list[tuple[str, int]]] = {}
    for axis, d, pack in zip(*call.args[3:6], strict=True):
        cuts.setdefault(d, []).append((axis, pack))
    sizes: dict[str, int] = {factor(axis): n for axis, n in region.items()}
    kept, outside, inside = set(sizes), [], []
    for d, size in enumerate(whole.shape):
        before: Dim = ()
        at, (pack, *_) = cuts.get(d, []), [*(p for _, p in cuts.get(d, [])), 1]
        if pack > 1:
            before, sizes[f"~{d}p"] = (f"~{d}p",), pack
            kept.add(f"~{d}p")
        sizes[f"~{d}"] = size // (math.prod(region[axis] for axis, _ in at) * pack)
        outside.append((*before, *(factor(axis) for axis, _ in at), f"~{d}"))
        inside.append((*before, f"~{d}"))
    return tuple(outside), tuple(inside), sizes, kept


@rule(ENTER)
def enter(call: Call) -> Rule:
    outside, inside, sizes, kept = _boundary(call, call.operands[0])
    notation = Notation((outside,), (inside,), frozenset(kept), ((),))
    return Rule(notation, ((0,),), _contiguous, sizes, decompose=False)


@rule(LEAVE)
def leave(call: Call) -> Rule:
    outside, inside, sizes, kept = _boundary(call, call.results[0])
    pending = tuple((factor(axis), "sum") for axis in call.args[6])
    notation = Notation((inside,), (outside,), frozenset(kept), (pending,))
    return Rule(notation, ((0,),), _contiguous, sizes, decompose=False)


rule(AXIS_INDEX)(lambda call: Rule(Notation((), ((),), frozenset(), ((),))))


@rule(FILL_UP, CUT_OFF)
def resized(call: Call) -> Rule:
    """Each rank's rows get longer or shorter at their end."""
    _, axis, n, rows = call.args
    if -(-rows // n) != -(-call.operands[0].shape[0] // n):
        raise RuleError(f"{call.target} changes the start of a rank's rows")
    dims, resized = ((factor(axis),), *_dims(call)[1:]), frozenset({factor(axis)})
    return Rule(
        Notation((dims,), (dims,), resized, ((),)),
        ((0,),),
        lambda op: op.default(*op.args[:3], op.shape()[0]),
        {factor(axis): rows},
        decompose=False,
        resized=resized,
    )


def _dims(call: Call) -> list[Dim]:
    return [(f"~{d}",) for d in range(call.operands[0].ndim)]


def _same(call: Call, linear: bool) -> Rule:
    dims = tuple(_dims(call))
    return Rule(Notation((dims,), (dims,), frozenset(), ((),)), ((0,),) if linear else ())


def _divided(call: Call, operand: Mapping[int, str], result: Mapping[int, str], n: int) -> Rule:
    """A rule in which dims have a factor of the ranks before their own, by name."""

    def dims(names: Mapping[int, str]) -> tuple[Dim, ...]:
        return tuple((names[d], *dim) if d in names else dim for d, dim in enumerate(_dims(call)))

    sizes = dict.fromkeys((*operand.values(), *result.values()), n)  # in one order on all ranks
    notation = Notation((dims(operand),), (dims(result),), frozenset(sizes), ((),))
    return Rule(notation, ((0,),), None, sizes)


rule(OPS.all_reduce.default)(lambda call: _same(call, call.args[1] == "sum"))
rule(OPS.contribute.default, OPS.ppermute.default)(lambda call: _same(call, True))
rule(OPS.all_gather.default, OPS.place_part.default)(
    lambda call: _divided(call, {}, {call.args[3]: "g"}, call.args[2])
)
rule(OPS.reduce_scatter.default, OPS.own_part.default)(
    lambda call: _divided(call, {call.args[3]: "g"}, {}, call.args[2])
)


@rule(OPS.exchange_rows.default)
def exchange_rows(call: Call) -> Rule:
    _, *rest = _dims(call)
    counts: tuple[Dim, ...] = (("i",), ("j",), ("g",))[: len(call.operands[1].shape)]
    notation = Notation(
        ((("k",), *rest), counts), ((("m",), *rest),), frozenset({"k", "m", "i", "j", "g"}), ((),)
    )
    return Rule(notation, ((0,),))


rule(OPS.all_to_all.default)(
    lambda call: _divided(call, {call.args[3]: "g"}, {call.args[4]: "h"}, call.args[2])
)
