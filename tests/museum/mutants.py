"""Mutants of proven programs: one change of what the ranks run, on one rank or on all."""

import operator
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from ftp.certification.certificate import Certificate
from ftp.ops.exchange import ARRIVED, EXCHANGE

aten = torch.ops.aten


def mutant(certificate: Certificate, seed: int) -> tuple[str, Certificate] | None:
    """What is changed, and the changed certificate; None where the change finds no place."""
    rng = random.Random(seed)
    change = rng.choice(CHANGES)
    every = len(certificate.ranks.graphs)
    where = range(every) if rng.random() < 0.5 else [rng.randrange(every)]
    place = rng.random()
    graphs = []
    done = False
    for i, graph in enumerate(certificate.ranks.graphs):
        new = _copy(graph)
        if i in where:
            done = change(new, place) or done
        graphs.append(new)
    if not done:
        return None
    ranks = replace(certificate.ranks, graphs=tuple(graphs))
    title = f"{change.__name__} on {'all ranks' if len(where) > 1 else f'rank {where[0]}'}"
    return title, replace(certificate, ranks=ranks)


def _copy(graph: fx.Graph) -> fx.Graph:
    new = fx.Graph()
    result = new.graph_copy(graph, {})
    new.output(result)
    return new


def _pick(nodes: list[fx.Node], place: float) -> fx.Node | None:
    return nodes[int(place * len(nodes))] if nodes else None


def _exchanges(graph: fx.Graph) -> list[fx.Node]:
    return [n for n in graph.nodes if n.target is EXCHANGE and n.args[0] != "barrier"]


def _floats(graph: fx.Graph) -> list[fx.Node]:
    return [
        n
        for n in graph.nodes
        if n.op == "call_function"
        and (n.meta.get("dtypes") or [""])[0].startswith("float")
        and len(n.meta["dtypes"]) == 1
        and n.users
    ]


def drop(graph: fx.Graph, place: float) -> bool:
    """A collective is not issued."""
    node = _pick(_exchanges(graph), place)
    if node is None:
        return False
    for wait in [n for n in graph.nodes if n.target is ARRIVED and n.args[0] == node.args[-1]]:
        graph.erase_node(wait)
    graph.erase_node(node)
    return True


def double(graph: fx.Graph, place: float) -> bool:
    """A collective is issued twice."""
    node = _pick([n for n in _exchanges(graph) if n.args[0] == "all_reduce"], place)
    if node is None:
        return False
    wait = next(n for n in graph.nodes if n.target is ARRIVED and n.args[0] == node.args[-1])
    number = 1000
    with graph.inserting_after(wait):
        again = graph.call_function(
            EXCHANGE, (node.args[0], node.args[2], *node.args[2:-1], number)
        )
    again.meta.update(node.meta)
    with graph.inserting_after(again):
        graph.call_function(ARRIVED, (number,)).meta.update(wait.meta)
    return True


def retype(graph: fx.Graph, place: float) -> bool:
    """A reduction of another kind."""
    node = _pick([n for n in _exchanges(graph) if n.args[5]], place)
    if node is None or node.args[0] in ("send", "recv"):
        return False
    others = [o for o in ("sum", "avg", "max", "min") if o != node.args[5]]
    node.args = (*node.args[:5], others[int(place * 100) % 3], *node.args[6:])
    return True


def wrong_group(graph: fx.Graph, place: float) -> bool:
    """A collective over another group: one that the program uses elsewhere, or this rank alone."""
    node = _pick([n for n in _exchanges(graph) if n.args[0] not in ("send", "recv")], place)
    if node is None:
        return False
    mine: Any = (tuple(node.args[3]), node.args[4])  # type: ignore[arg-type]
    used: list[Any] = [(tuple(n.args[3]), n.args[4]) for n in _exchanges(graph)]
    others = [g for g in dict.fromkeys(used) if len(g[0]) == len(mine[0]) and g != mine]
    ranks, name = others[int(place * 7919) % len(others)] if others else (mine[0][::-1], "other")
    node.args = (*node.args[:3], list(ranks), name, *node.args[5:])
    return True


def _scaled(graph: fx.Graph, place: float, by: float) -> bool:
    node = _pick(_floats(graph), place)
    if node is None:
        return False
    with graph.inserting_after(node):
        new = graph.call_function(aten.mul.Tensor, (node, by))
    new.meta.update(node.meta)
    node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
    return True


def divisor(graph: fx.Graph, place: float) -> bool:
    """A value divided by the ranks."""
    return _scaled(graph, place, 0.5)


def factor(graph: fx.Graph, place: float) -> bool:
    """A value multiplied by the ranks."""
    return _scaled(graph, place, 2)


def offset(graph: fx.Graph, place: float) -> bool:
    """A whole number in an op's arguments that is one more or less."""
    nodes = [
        n
        for n in graph.nodes
        if n.op == "call_function"
        and getattr(n.target, "namespace", "") == "aten"
        and any(type(a) is int for a in n.args)
    ]
    node = _pick(nodes, place)
    if node is None:
        return False
    at = [i for i, a in enumerate(node.args) if type(a) is int][-1]
    by = 1 if int(place * 1000) % 2 else -1
    node.args = (*node.args[:at], node.args[at] + by, *node.args[at + 1 :])
    return True


def part(graph: fx.Graph, place: float) -> bool:
    """Another part: a slice that begins one earlier or later, or the next of several results."""
    nodes = [
        n
        for n in graph.nodes
        if n.target in (aten.slice.Tensor, operator.getitem) and len(n.args) in (2, 4) and n.users
    ]
    node = _pick(nodes, place)
    if node is None:
        return False
    if node.target is operator.getitem:
        of: Any = node.args[0]
        count = len(of.meta.get("dtypes") or ())
        if count < 2:
            return False
        node.args = (of, (node.args[1] + 1) % count)  # type: ignore[operator]
        return True
    x, dim, start, end = node.args
    by = -1 if start else 1
    node.args = (x, dim, start + by, end + by)  # type: ignore[operator]
    return True


def stale(graph: fx.Graph, place: float) -> bool:
    """An op reads an earlier value of the same shape."""
    nodes = [n for n in _floats(graph) if n.all_input_nodes]
    node = _pick(nodes, place)
    if node is None:
        return False
    order = {n: i for i, n in enumerate(graph.nodes)}
    operand = node.all_input_nodes[0]
    earlier = [
        n
        for n in graph.nodes
        if n.meta.get("shape") == operand.meta.get("shape")
        and n.meta.get("dtypes") == operand.meta.get("dtypes")
        and n is not operand
        and order[n] < order[node]
        and n.op in ("call_function", "placeholder")
        and n.target not in (EXCHANGE, ARRIVED)
    ]
    if not earlier:
        return False
    node.replace_input_with(operand, earlier[int(place * 7919) % len(earlier)])
    return True


def unwaited(graph: fx.Graph, place: float) -> bool:
    """A collective that is not waited for."""
    node = _pick([n for n in graph.nodes if n.target is ARRIVED], place)
    if node is None:
        return False
    graph.erase_node(node)
    return True


CHANGES: list[Callable[[fx.Graph, float], bool]] = [
    drop,
    double,
    retype,
    wrong_group,
    divisor,
    factor,
    offset,
    part,
    stale,
    unwaited,
]
