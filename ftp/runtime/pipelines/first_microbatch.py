"""The program of a stage's first microbatch, whose gradients are the first terms of the sums: the
program of the other microbatches without its additions.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from ftp.pipeline.subgraphs import StageGraph
from ftp.planning.graph import Graph, Node, Value
from ftp.planning.plan import Plan
from ftp.runtime.program import Program
from ftp.sharding.pytree import flatten

ADD = torch.ops.aten.add.Tensor


def without_sums(
    program: Program, subgraph: StageGraph, summed: StageGraph, given_up: tuple[int, ...]
) -> Program | None:
    """The program of ``subgraph``, by the plan of ``program``, the program of ``summed``; None if
    that plan does anything with a sum but add to it.
    """
    params, batch, sums = len(subgraph.params), len(subgraph.batch), len(summed.sums)
    begin = params + batch + len(subgraph.values)
    totals = {name: len(summed.outputs) - sums + k for k, name in enumerate(summed.sums)}
    others = {name: k for k, name in enumerate(summed.outputs[: len(summed.outputs) - sums])}
    at = [totals[name] if name in totals else others[name] for name in subgraph.outputs]
    plan = _without(program.plan, range(begin, begin + sums), at)
    if plan is None:
        return None
    outputs = len(subgraph.outputs)
    return replace(
        program,
        traced=subgraph.gm,
        plan=plan,
        tensor_leaves=tuple(range(begin)),
        in_specs=program.in_specs[:begin],
        leaf_specs=program.leaf_specs[:begin],
        out_tree=flatten((0,) * outputs)[1],
        out_leaves=tuple(range(outputs)),
        is_static=(False,) * outputs,
        roles=program.roles[:begin],
        donated=(),
        given_up=given_up,
        gradients=tuple(k for k, of in enumerate(at) if of in (program.gradients or ())),
    )


def _without(plan: Plan, sums: range, outputs: Sequence[int]) -> Plan | None:
    """A plan without some inputs, each of which is added to an output.

    Args:
        outputs: indices of the plan's outputs, in the order in which the new plan returns them.
    """
    graph, copies = plan.graph.copied()
    inputs, users = graph.inputs, graph.users
    gone: set[Node] = set()
    added: dict[Node, Value] = {}
    for node in (inputs[i] for i in sums):
        read = users.get(Value(node, 0), [])
        if len(read) != 1:
            return None
        ((adds, slot),) = read
        if adds.kind != "op" or adds.target is not ADD or slot != 0 or adds.kwargs:
            return None
        if len(adds.operands) != 2 or users.get(Value(adds, 0)):
            return None
        gone |= {node, adds}
        added[adds] = adds.operands[1]
    if plan.exits or any(copies[node] in gone for node in plan.entries):
        return None
    found = [graph.outputs[k] for k in outputs]
    return replace(
        plan,
        graph=Graph(
            [node for node in graph.nodes if node not in gone],
            [added.get(value.node, value) for value in found],
        ),
        out_specs=[plan.out_specs[k] for k in outputs],
        entries={copies[node]: spec for node, spec in plan.entries.items()},
    )
