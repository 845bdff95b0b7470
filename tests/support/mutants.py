"""Mutants: a program's rank graphs with one thing changed. Each that changes a result must be
refused.
"""

import random
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from forked import answers
from torch import fx
from torch.fx._lazy_graph_module import _make_graph_module, _use_lazy_graph_module

from ftp.api.certify import certificate_of
from ftp.certification.certificate import Certificate
from ftp.certification.checker import check
from ftp.certification.data_movement import MOVEMENTS
from ftp.certification.ranks import Ranks
from ftp.errors import CertificateError
from ftp.ops.fused_optimizer import UPDATES
from ftp.partitioning.local_program import LocalProgram
from ftp.passes.buffer_reuse import in_place
from ftp.report.lowered import Lowered
from ftp.rules.local_op import RankGraph
from ftp.runtime.mesh_groups import groups_of
from ftp.runtime.program import Program, join_parts, shard_of
from ftp.runtime.simulate import COLLECTIVES, simulate

c10d = torch.ops._c10d_functional
aten = torch.ops.aten

KINDS = (
    "drop",
    "again",
    "max",
    "axis",
    "early",
    "retype",
    "operand",
    "result",
    "unmoved",
    "unwaited",
)
LOCAL = (
    "items",
    "sizes",
    "shift",
    "order",
    "write",
    "sooner",
    "rows",
)  # changes to what stands beside collectives, and to writes
OTHER_SHAPES = (
    "early",
    "retype",
    "operand",
    "result",
    "unmoved",
    "sizes",
    "shift",
)  # native kernels may crash on what these give them
KERNELS = {update.kernel for update in UPDATES.values()}


@dataclass
class Mutant:
    """The ranks' graphs and offsets with one thing changed."""

    what: str
    graphs: list[fx.Graph]
    at: dict[tuple[int, ...], tuple[int, tuple[int, ...]]]


def fresh(certificate: Certificate, what: str) -> Mutant:
    graphs = []
    for graph in certificate.ranks.graphs:
        new = RankGraph()
        new.output(new.graph_copy(graph, {}))
        graphs.append(new)
    return Mutant(what, graphs, dict(certificate.ranks.at))


def issued(graph: fx.Graph) -> list[fx.Node]:
    return [n for n in graph.nodes if n.target in COLLECTIVES]


def mutants(
    certificate: Certificate, seed: int, most: int, without: Collection[str] = ()
) -> Iterator[Mutant]:
    """Changes to the collectives and offsets, of all ranks or of one graph only; up to ``most``,
    none inside the ops ``without``.
    """
    count = len(issued(certificate.ranks.graphs[0]))
    graphs = len(certificate.ranks.graphs)
    axes = list(certificate.groups)
    jobs: list[Any] = [("swap", i, one) for i in range(count - 1) for one in range(-1, graphs)]
    for i in range(count):
        jobs += [(kind, i, one) for kind in KINDS for one in {-1, graphs - 1}]
    jobs += [
        ("offset", c, k)
        for c, (_, offsets) in certificate.ranks.at.items()
        for k in range(len(offsets))
    ]
    for kind in LOCAL:
        jobs += [
            (kind, i, one)
            for i in range(min(len(candidates(g, kind)) for g in certificate.ranks.graphs))
            for one in {-1, graphs - 1}
        ]
    random.Random(seed).shuffle(jobs)
    for kind, i, one in jobs[:most]:
        mutant = fresh(certificate, f"{kind} {i} {one}")
        if kind == "offset":
            graph, offsets = mutant.at[i]
            mutant.at[i] = (
                graph,
                (
                    *offsets[:one],
                    offsets[one] + (1 if offsets[one] == 0 else -1),
                    *offsets[one + 1 :],
                ),
            )
            yield mutant
            continue
        if any(is_inside(g, kind, i, without) for g in mutant.graphs):
            continue
        if all(
            change(g, kind, i, axes)
            for g in (mutant.graphs if one < 0 else mutant.graphs[one : one + 1])
        ):
            yield mutant


def is_inside(graph: fx.Graph, kind: str, i: int, ops: Collection[str]) -> bool:
    nodes = (
        candidates(graph, kind)[i : i + 1]
        if kind in LOCAL
        else issued(graph)[i : i + 1 + (kind == "swap")]
    )
    return any(n.meta.get("origin") in ops for n in nodes) or bool(ops and kind == "unmoved")


def change(graph: fx.Graph, kind: str, i: int, axes: Sequence[str]) -> bool:
    """Changes collective ``i``, or the ``i``-th node that a kind can change; whether there was
    something to change.
    """
    if kind in LOCAL:
        return change_beside(graph, kind, candidates(graph, kind)[i])
    node = issued(graph)[i]
    wait = next(u for u in node.users if u.target is c10d.wait_tensor.default)
    x: Any = node.args[0]
    match kind:
        case "unwaited":
            wait.replace_all_uses_with(node)
            graph.erase_node(wait)
        case "drop":
            wait.replace_all_uses_with(x)
            graph.erase_node(wait)
            graph.erase_node(node)
        case "again":
            with graph.inserting_after(wait):
                second = graph.node_copy(node, lambda n: wait if n is x else n)
                with graph.inserting_after(second):
                    last = graph.call_function(c10d.wait_tensor.default, (second,))
            wait.replace_all_uses_with(last, delete_user_cb=lambda u: u is not second)
        case "max":
            if "sum" not in node.args:
                return False
            node.args = tuple("max" if a == "sum" else a for a in node.args)
        case "axis":
            other = next((a for a in axes if a != node.args[-1]), None)
            if other is None:
                return False
            node.args = (*node.args[:-1], other)
            node.meta = {**node.meta, "axis": other.removeprefix("sim:")}
        case "early":  # what it would move, one step too early
            if (
                not isinstance(x, fx.Node)
                or x.op != "call_function"
                or not x.args
                or not isinstance(x.args[0], fx.Node)
            ):
                return False
            node.args = (x.args[0], *node.args[1:])
        case "retype":
            op = next((a for a in node.args if a in ("sum", "max")), "sum")
            target: Any = (
                c10d.all_gather_into_tensor.default
                if node.target is c10d.all_reduce.default
                else c10d.all_reduce.default
            )
            node.target, node.args = (
                target,
                (x, 2 if target is not c10d.all_reduce.default else op, node.args[-1]),
            )
        case "operand":  # what another one moves
            before = [n.args[0] for n in issued(graph)[:i] if n.args[0] is not x]
            if not before:
                return False
            node.args = (before[-1], *node.args[1:])
        case "result":  # what another one gives
            before = [next(iter(n.users)) for n in issued(graph)[:i]]
            if not before:
                return False
            wait.replace_all_uses_with(before[-1])
        case "unmoved":  # a step between two ops is left out
            steps = [
                n for n in graph.nodes if n.target in MOVEMENTS and isinstance(n.args[0], fx.Node)
            ]
            if not steps:
                return False
            step = steps[7 * i % len(steps)]
            step.replace_all_uses_with(step.args[0])
            graph.erase_node(step)
        case "swap":
            after = issued(graph)[i + 1]
            before = list(graph.nodes)
            between = before[before.index(node) + 1 : before.index(after)]
            needed = {after}
            for n in reversed(between):
                if any(u in needed for u in n.users):
                    needed.add(n)
            if wait in needed:
                return False
            for n in [n for n in between if n in needed] + [after]:
                node.prepend(n)
    return True


def candidates(graph: fx.Graph, kind: str) -> list[fx.Node]:
    """The nodes that a kind of change can be made to."""
    nodes = [n for n in graph.nodes if n.op == "call_function"]
    match kind:
        case "items" | "sizes":
            return [n for n in nodes if n.target is aten.split_with_sizes.default]
        case "shift":
            return [
                n for n in nodes if n.target is aten.slice.Tensor and isinstance(n.args[2], int)
            ]
        case "order":
            return [n for n in nodes if n.target is aten.cat.default and len(n.args[0]) > 1]
        case "write":
            return [n for n in nodes if in_place(n) is not None and isinstance(n.args[0], fx.Node)]
        case "sooner":
            return [n for n in nodes if writes(n)]
    return [n for n in nodes if n.target in KERNELS and len(n.args[0]) > 1]


def writes(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def change_beside(graph: fx.Graph, kind: str, node: fx.Node) -> bool:
    args: Any = node.args
    match kind:
        case "items":  # a pack's parts are taken for each other
            first, *_, last = node.users
            if first is last:
                return False
            first.args, last.args = (node, last.args[1]), (node, first.args[1])
        case "sizes":
            sizes = list(args[1])
            node.args = (args[0], [sizes[0] + 1, *sizes[1:-1], sizes[-1] - 1], *args[2:])
        case "shift":
            by = 1 if args[2] == 0 else -1
            node.args = (
                *args[:2],
                args[2] + by,
                args[3] + by if isinstance(args[3], int) else args[3],
                *args[4:],
            )
        case "order":
            node.args = ([*args[0][1:], args[0][0]], *args[1:])
        case "write":  # over an operand that may be needed
            node.target = in_place(node)
        case "sooner":
            operands = set(node.all_input_nodes)
            while node.prev not in operands and node.prev.op == "call_function":
                node.prev.prepend(node)
        case "rows":  # a parameter is updated by another's gradient
            gradients = list(args[1])
            node.args = (args[0], [*gradients[1:], gradients[0]], *args[2:])
    return True


def prompt(graph: fx.Graph) -> fx.Graph:
    """The graph with what ranks receive as tensors of their own, which the simulator lets them
    share.
    """
    new = RankGraph()
    new.output(new.graph_copy(graph, {}))
    for node in [n for n in new.nodes if n.target is c10d.wait_tensor.default]:
        with new.inserting_after(node):
            own = new.call_function(aten.clone.default, (node,))
        node.replace_all_uses_with(own, delete_user_cb=lambda u, own=own: u is not own)
    return new


def delayed(graph: fx.Graph) -> fx.Graph:
    """The graph as badly as ranks may run it: a collective reads what it sends when it is waited
    for, and gives nothing before. Collectives run in the order in which they are issued, so that it
    reads no later than those issued after it: ranks may wait in different orders.
    """
    new = prompt(graph)
    order = {node: i for i, node in enumerate(new.nodes)}
    next_one = None  # the collective that is issued after, and where it is now
    at = len(order)
    for node in reversed(issued(new)):
        waits = [u for u in node.users if u.target is c10d.wait_tensor.default]
        if len(waits) < len(node.users):
            with new.inserting_after(node):
                nothing = new.call_function(aten.mul.Tensor, (node, float("nan")))
            node.replace_all_uses_with(
                nothing,
                delete_user_cb=lambda u, waits=waits, nothing=nothing: u not in (*waits, nothing),
            )
            next_one, at = node, order[node]
        elif waits and node.target is not c10d.all_reduce.default:  # which works on a copy
            first = min(waits, key=order.__getitem__)
            if next_one is None or order[first] < at:
                next_one, at = first, order[first]
            next_one.prepend(node)
            next_one = node
        else:
            next_one, at = node, order[node]
    return new


def run(
    program: Program, mutant: Mutant, inputs: Sequence[torch.Tensor], read: Any = prompt
) -> list[torch.Tensor]:
    coordinates, axes = program.mesh.coordinates(), program.mesh.axes
    locals_, programs = [], []
    with _use_lazy_graph_module(True):  # no code is written for them
        modules = [_make_graph_module({}, read(graph)) for graph in mutant.graphs]
    for c in coordinates:
        graph, offsets = mutant.at[tuple(c[a] for a in axes)]
        programs.append(LocalProgram(modules[graph], (), ()))
        shards = [
            shard_of(x, spec, axes, c).clone()
            for x, spec in zip(inputs, program.in_specs, strict=True)
        ]
        locals_.append([*shards, *program.constants, *offsets])
    outputs = simulate(programs, locals_, groups_of(program.mesh))
    # Every rank's part counts: a replicated result that differs between ranks is wrong on some.
    found = []
    for i, (spec, shape) in enumerate(zip(program.out_specs, program.out_shapes, strict=True)):
        found.append(join_parts([rank[i] for rank in outputs], spec, shape, axes, coordinates))
        found += [rank[i] for rank in outputs]
    return found


def is_changed(
    program: Program, mutant: Mutant, inputs: Sequence[torch.Tensor], right: Sequence[torch.Tensor]
) -> bool:
    for read in (prompt, delayed):
        try:
            found = run(program, mutant, inputs, read)
        except (RuntimeError, AssertionError, IndexError, ValueError, TypeError, KeyError):
            return True
        if not all(
            a.shape == b.shape and torch.allclose(a, b, 1e-9, 1e-9, equal_nan=True)
            for a, b in zip(found, right, strict=True)
        ):
            return True
    return False


def check_mutants(lowered: Lowered, *given: Any, **options: Any) -> tuple[int, int, int]:
    return check_mutants_of(lowered._program, *given, **options)


def check_mutants_of(
    program: Program,
    inputs: Sequence[torch.Tensor],
    seed: int,
    most: int,
    without: Collection[str] = (),
) -> tuple[int, int, int]:
    """Mutants that change a result, those that change none, and how many of these are refused;
    not all that are refused are run.
    """
    certificate = certificate_of(program)
    right = run(program, fresh(certificate, "none"), inputs)
    tried: list[tuple[Mutant, bool]] = []
    for mutant in mutants(certificate, seed, most, without):
        try:
            check(replace(certificate, ranks=Ranks.of(mutant.graphs, mutant.at)))
            is_refused = False
        except CertificateError:
            is_refused = True
        if not (is_refused and mutant.what.startswith(OTHER_SHAPES)):
            tried.append((mutant, is_refused))
    found = answers([partial(is_changed, program, m, inputs, right) for m, _ in tried])
    for (mutant, is_refused), is_other in zip(tried, found, strict=True):
        assert is_refused or is_other is False, f"{mutant.what} changes a result and is certified"
    same = [tried[i][1] for i, is_other in enumerate(found) if is_other is False]
    return len(tried) - len(same), len(same), sum(same)
