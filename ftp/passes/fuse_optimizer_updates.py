"""Merge parameter updates that are ready together into one call of the optimizer's kernel, in place
where the old values are donated.
"""

from collections import Counter
from collections.abc import Collection
from typing import Any

import torch
from torch import fx

from ftp.ops.choose import BranchPath
from ftp.ops.fused_optimizer import COUNT_UP, UPDATES, written
from ftp.ops.written import writes
from ftp.passes.aliasing import WAIT, families, is_view, last_uses
from ftp.passes.copy_elimination import copied

aten = torch.ops.aten
_DENSE = (
    aten.mm.default,
    aten.bmm.default,
    aten.sum.dim_IntList,
    aten.embedding_dense_backward.default,
)


def merge_updates(graph: fx.Graph, donated: Collection[int] = ()) -> fx.Graph:
    """Merge the `ftp.fused` ops between two collectives into one call. This pass comes last, as the
    merged calls write to their operands.

    Updates are collected until a collective starts or is waited for, a result of one of them is
    used, or a tensor that they read is written. The call writes to a copy of an operand that is not
    donated or is used later. The graph must come from `with_values`.
    """
    if not any(node.target in UPDATES for node in graph.nodes):
        return graph
    graph, _ = copied(graph)
    merge_updates_in(graph, donated)
    return graph


def merge_updates_in(graph: fx.Graph, donated: Collection[int]) -> None:
    """``merge_updates`` on a graph that the caller has copied: changes it."""
    if not any(node.target in UPDATES for node in graph.nodes):
        return
    merge = _Merge(graph, donated)
    for node in list(graph.nodes):
        if merge.waiting and node.meta.get("branch", ()) != merge.branch:
            merge.call_before(node)
        merge.branch = node.meta.get("branch", ())
        if node.target in UPDATES:
            if not merge.results.isdisjoint(node.all_input_nodes):  # a parameter's second update
                merge.call_before(node)
            merge.results.update(node.users)
            kinds = tuple((t.meta["val"].dtype, t.meta["val"].device) for t in _tensors(node))
            merge.waiting.setdefault((node.target, kinds, *node.kwargs.items()), []).append(node)
        elif merge.waiting and (
            node.op == "output"
            or "collective" in node.meta
            or node.target is WAIT
            or merge.concerns(node)
        ):
            merge.call_before(node)


class _Merge:
    """The graph that is being changed, and the collected updates by call."""

    def __init__(self, graph: fx.Graph, donated: Collection[int]):
        self.graph = graph
        self.waiting: dict[Any, list[fx.Node]] = {}
        self.results: set[fx.Node] = set()  # of the collected updates
        self.uses: Counter[fx.Node] = Counter()  # by the updates that are called, of each family
        self.branch: BranchPath = ()
        self.position = {node: at for at, node in enumerate(graph.nodes)}
        self.family = families(graph)
        self.last = last_uses(list(graph.nodes), self.family)
        inputs = [node for node in graph.nodes if node.op == "placeholder"]
        self.free = {inputs[i] for i in donated}

    def concerns(self, node: fx.Node) -> bool:
        """Whether a node reads a result of collected updates or writes to one of their operands."""
        updates = [update for members in self.waiting.values() for update in members]
        if all(operand in updates for operand in node.all_input_nodes):
            return False
        given = {self.family[item] for update in updates for item in update.users}
        read = {self.family[operand] for update in updates for operand in update.all_input_nodes}
        return any(self.family[x] in given for x in node.all_input_nodes) or any(
            self.family[x] in read for x in writes(node)
        )

    def call_before(self, node: fx.Node) -> None:
        updates = [update for members in self.waiting.values() for update in members]
        self.uses = Counter(self.family[x] for update in updates for x in _tensors(update))
        with self.graph.inserting_before(node):
            for updates in self.waiting.values():
                self._call(updates)
        self.waiting.clear()
        self.results.clear()

    def _call(self, updates: list[fx.Node]) -> None:
        kind = UPDATES[updates[0].target]
        rows = []
        for update in updates:
            param, grad, *moments = _tensors(update)
            if not _is_dense(grad):
                grad = self._contiguous(update, aten.contiguous.default, grad)
            rows.append(
                [self._own(update, param), grad, *(self._own(update, moment) for moment in moments)]
            )
        lists = kind.lists(rows)
        if kind.counts:
            self._emit(updates[0], COUNT_UP, lists[-1], 1)
        called = self._emit(updates[0], kind.kernel, *lists, **updates[0].kwargs)
        called.meta["origins"] = [update.meta.get("origin", "") for update in updates]  # row by row
        for update, row in zip(updates, rows, strict=True):
            for item in list(update.users):
                index: Any = item.args[1]
                new = written(row)[index]
                made = self._emit(update, aten.detach.default, new)
                made.meta["val"] = new.meta["val"]
                self.family[made] = self.family[item]
                item.replace_all_uses_with(made)
                self.graph.erase_node(item)
            self.graph.erase_node(update)

    def _own(self, update: fx.Node, operand: fx.Node) -> fx.Node:
        """The tensor that the update writes: ``operand`` if nothing reads it later, nor another one
        of the collected updates, whose calls have no order; else a copy.
        """
        root = self.family[operand]
        is_free = operand in self.free or (_is_dense(operand) and root.op == "call_function")
        if is_free and self.uses[root] == 1 and self.last[root] == self.position[update]:
            return operand
        return self._contiguous(
            update, aten.clone.default, operand, memory_format=torch.contiguous_format
        )

    def _contiguous(self, update: fx.Node, target: Any, x: fx.Node, **kwargs: Any) -> fx.Node:
        """A call whose result has the elements of ``x`` in order."""
        made = self._emit(update, target, x, **kwargs)
        made.meta["val"] = torch.empty_like(x.meta["val"], memory_format=torch.contiguous_format)
        return made

    def _emit(self, update: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        made = self.graph.call_function(target, args, kwargs)
        made.meta.update(
            {key: update.meta[key] for key in ("source", "origin", "branch") if key in update.meta}
        )
        return made


def _tensors(update: fx.Node) -> list[fx.Node]:
    return list(update.args[0])  # type: ignore[arg-type]


def _is_dense(node: fx.Node) -> bool:
    """Whether a value is contiguous for any strides of the graph's inputs."""
    if not node.meta["val"].is_contiguous():
        return False
    while node.op == "call_function" and is_view(node):
        node = node.all_input_nodes[0]
    return node.target in _DENSE or "collective" in node.meta
