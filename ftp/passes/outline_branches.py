"""Move each branch of a ``torch.cond`` to a separate graph, so that only one branch runs."""

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ftp.ops.choose import BranchPath, number_of
from ftp.passes.aliasing import is_view
from ftp.passes.branch_order import branches
from ftp.rules.local_op import RankGraph
from ftp.torch_internals.op_types import OpOverload

aten = torch.ops.aten
NodeMap = dict[fx.Node, fx.Node]


def outline_branches(graph: fx.Graph) -> fx.Graph:
    """The graph with each cond's nodes replaced by a call that runs the branch that is taken.

    The nodes of a cond must stand together, before its choices (see ``schedule``). This pass comes
    last: other passes see the nodes of both branches.
    """
    found = branches(graph)
    if not found:
        return graph
    new = RankGraph()
    env: NodeMap = {}
    _emit(new, env, list(graph.nodes), found, 0)
    return new


def _emit(
    new: fx.Graph,
    env: NodeMap,
    nodes: Sequence[fx.Node],
    found: Mapping[fx.Node, BranchPath],
    depth: int,
) -> None:
    inside: dict[int, list[fx.Node]] = {}
    choices: dict[int, list[fx.Node]] = {}
    for node in nodes:
        if len(found[node]) > depth:
            inside.setdefault(found[node][depth][0], []).append(node)
        elif (number := number_of(node.target, node.args)) >= 0:
            choices.setdefault(number, []).append(node)
    for node in nodes:
        if len(found[node]) > depth or node in env:
            continue
        if (number := number_of(node.target, node.args)) >= 0:
            _emit_cond(new, env, inside.get(number, []), choices[number], found, depth)
        else:
            env[node] = new.node_copy(node, env.__getitem__)


def _emit_cond(
    new: fx.Graph,
    env: NodeMap,
    inside: Sequence[fx.Node],
    choices: Sequence[fx.Node],
    found: Mapping[fx.Node, BranchPath],
    depth: int,
) -> None:
    """Emit the call of a cond, and its results as those of its choices."""
    mine = set(inside)
    given = dict.fromkeys(x for node in inside for x in node.all_input_nodes if x not in mine)
    chosen: list[Any] = [x for c in choices for x in c.args[1:3]]
    given |= dict.fromkeys(x for x in chosen if x not in mine)
    runs = []
    for slot, side in ((1, True), (2, False)):
        graph = RankGraph()
        local: NodeMap = {x: graph.placeholder(x.name) for x in given}
        _emit(graph, local, [n for n in inside if found[n][depth][1] == side], found, depth + 1)
        results: list[Any] = [choice.args[slot] for choice in choices]
        graph.output(
            tuple(
                local[x]
                if _is_own(x, mine) and results.count(x) == 1
                else graph.call_function(
                    aten.clone.default, (local[x],), {"memory_format": torch.contiguous_format}
                )
                for x in results
            )
        )
        runs.append(fx.GraphModule({}, graph).forward)
    predicate: Any = choices[0].args[0]
    call = new.call_function(_either(*runs), (env[predicate], *(env[x] for x in given)))
    call.meta.update(choices[0].meta)
    call.meta["issues"] = any("collective" in node.meta for node in inside)
    for i, choice in enumerate(choices):
        env[choice] = new.call_function(operator.getitem, (call, i))


def _is_own(x: Any, inside: set[fx.Node]) -> bool:
    """Whether a result is contiguous, in memory that its branch allocates."""
    if x not in inside or not isinstance(x.target, OpOverload) or is_view(x):
        return False
    value = x.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_contiguous()


def _either(if_true: Callable[..., Any], if_false: Callable[..., Any]) -> Callable[..., Any]:
    def either(predicate: torch.Tensor, *values: Any) -> Any:
        return (if_true if predicate else if_false)(*values)

    return either
