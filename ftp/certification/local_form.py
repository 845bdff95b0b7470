"""The local form of an op by its sharding rule. The checker matches a rank's nodes with it."""

import operator
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import fx
from torch.fx.node import map_aggregate

from ftp.certification.certificate import Operation, Ref
from ftp.certification.element_map import DimPart
from ftp.certification.progression import Index
from ftp.certification.unsound import Refused
from ftp.dynamic_float import DynamicFloat, evaluated
from ftp.dynamic_int import DynamicInt
from ftp.rules.bind import bind, lookup
from ftp.rules.call import Call, Meta, replaced, returns_tuple
from ftp.rules.local_op import LocalCut, LocalOp, RankGraph, localize
from ftp.rules.notation import parse
from ftp.rules.rule import BoundRule, Rule


def rule_of(op: Operation, operations: Mapping[str, Operation]) -> BoundRule:
    """The rule of an op. An op with formulas has the rule of its formulas: in it, two dims share a
    factor if they are equal at all sizes of the program, not if they happen to be equal at one.
    """
    stated = _rule_of(op, operations)
    if op.formulas is None:
        return stated
    every = {name: o.formulas or o for name, o in operations.items()}
    for name in (op.name, *(ref.name for ref in op.operands)):
        if _numbers(every[name]) != _numbers(operations[name]):
            raise Refused(f"{operations[name]} is not what its formulas give at these sizes")
    general = _rule_of(op.formulas, every)
    if str(general) == str(stated) and general.ring == stated.ring:
        return stated
    sizes = {f: evaluated(size) for f, size in general.sizes.items()}
    return replace(general, sizes=sizes, call=stated.call)


def _numbers(op: Operation) -> str:
    """An op's call as text, with the numbers that its formulas give."""
    given = replaced(
        (op.args, dict(op.kwargs), [list(m.shape) for m in op.results]),
        (DynamicInt, DynamicFloat),
        evaluated,
    )
    return f"{op.target} {given}"


def _rule_of(op: Operation, operations: Mapping[str, Operation]) -> BoundRule:
    def meta(ref: Ref) -> Meta:
        return operations[ref.name].results[ref.index]

    call = Call(
        op.target,
        replaced(tuple(op.args), Ref, meta),
        replaced(dict(op.kwargs), Ref, meta),
        op.results,
    )
    found = lookup(call)
    if found is not None:
        return found
    operands, results = ([m.shape for m in metas] for metas in (call.operands, op.results))
    if op.found:
        return bind(Rule(parse(op.found), op.linear), operands, results, str(op.target))
    # No rule: every dim is a factor of its own, and whole.
    sizes: dict[str, int] = {}
    dims = []
    for shape in (*operands, *results):
        factors = [f"whole{len(sizes) + d}" for d in range(len(shape))]
        sizes |= dict(zip(factors, shape, strict=True))
        dims.append(tuple((f,) for f in factors))
    n = len(operands)
    whole, pending = frozenset(sizes), ({},) * len(results)
    return BoundRule(tuple(dims[:n]), tuple(dims[n:]), whole, pending, (), sizes, None, False)


def local_form(
    op: Operation,
    rule: BoundRule,
    parts: Mapping[str, DimPart],
    cuts: Mapping[str, list[LocalCut]],
    device: torch.device,
    groups: Mapping[str, tuple[str, ...]],
):
    """Build the local form of an op as a graph of its own.

    Args:
        groups: the axes of each process group.

    Returns:
        The graph's results; ``{input: operand}``; ``{input: starts of a cut on the ranks}``.
    """
    graph = RankGraph()
    places: dict[fx.Node, int] = {}
    starts: dict[fx.Node, Index] = {}

    def place(_: Ref) -> fx.Node:
        node = graph.placeholder(f"operand_{len(places)}")
        places[node] = len(places)
        return node

    def begin(cut: LocalCut) -> LocalCut:
        begins = []
        for start, _ in cut.pieces:
            node = graph.placeholder(f"start_{len(starts)}")
            starts[node] = start  # type: ignore[assignment]
            begins.append(node)
        second = None if cut.second is None else (begins[1], cut.second[1])
        return replace(cut, start=begins[0], second=second)

    args, kwargs = replaced(tuple(op.args), Ref, place), replaced(dict(op.kwargs), Ref, place)
    sizes = {f: part.size for f, part in parts.items()}
    begun = {f: list(map(begin, found)) for f, found in cuts.items()}
    names = {axes: name for name, axes in groups.items()}

    def group(*axes: str) -> str:
        return names[axes]

    made = localize(LocalOp(graph, op.target, args, kwargs, rule, sizes, begun, device, group))
    for node in graph.nodes:
        if node.op == "call_function" and op.formulas is not None:
            node.args, node.kwargs = map_aggregate((node.args, node.kwargs), evaluated)
    if isinstance(made, tuple):
        results = list(made)
    elif len(op.results) > 1 or returns_tuple(op.target):
        results = [graph.call_function(operator.getitem, (made, i)) for i in range(len(op.results))]
    else:
        results = [made]
    return results, places, starts
