"""A recorded program as the lines of a certificate."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ftp.certification.certificate import Operation, Ref, Spec
from ftp.ops.mapped_arguments import mapped_arguments
from ftp.rules.call import Meta


def operations(
    graph: fx.Graph, outputs: Sequence[fx.Node], specs: Sequence[Spec], names: Sequence[str]
) -> tuple[tuple[Operation, ...], list[Ref]]:
    """A recorded program as the lines of a certificate, and its outputs."""
    refs: dict[fx.Node, Ref] = {}
    found: list[Operation] = []
    used: dict[str, int] = {}
    given, titles = iter(specs), iter(names)
    graph.output(list(outputs))
    graph = without_dead(graph)
    for node in graph.nodes:
        if node.op == "output":
            continue
        if node.op == "call_function" and _is_item(node):
            parent: Any = node.args[0]
            refs[node] = Ref(refs[parent].name, node.args[1])
            continue
        title = node.name
        if node.op == "placeholder":
            title = next(titles, node.name)
        used[title] = used.get(title, 0) + 1
        name = title if used[title] == 1 else f"{title}__{used[title]}"
        refs[node] = Ref(name)
        metas = tuple(
            Meta(tuple(shape), getattr(torch, dtype))
            for shape, dtype in zip(node.meta["shape"], node.meta["dtypes"], strict=True)
        )
        if node.op == "placeholder":
            found.append(Operation(name, None, (), {}, metas, spec=next(given)))
        else:
            args, kwargs = mapped_arguments(node, refs.__getitem__)
            target: Any = node.target
            source, strides = node.meta["source"], tuple(map(tuple, node.meta["strides"]))
            found.append(
                Operation(name, target, args, kwargs, metas, source=source, strides=strides)
            )
    return tuple(found), [refs[n] for n in outputs]


def _is_item(node: fx.Node) -> bool:
    return getattr(node.target, "__name__", "") == "getitem"


def without_dead(graph: fx.Graph) -> fx.Graph:
    """A graph without nodes whose results nothing reads; nodes that write to memory stay."""
    for node in reversed(list(graph.nodes)):
        if node.op != "call_function" or node.users:
            continue
        schema = getattr(node.target, "_schema", None)
        if schema is None or not (
            schema.is_mutable
            or (node.target.namespace == "ftp_rank" and schema.name != "ftp_rank::literal")
        ):
            graph.erase_node(node)
    return graph
