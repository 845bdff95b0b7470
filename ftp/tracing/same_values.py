"""Whether two tensors of a trace hold the same values because equal ops computed them from the same
tensors, as when code computes one mask twice.
"""

import operator
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from ftp.torch_internals.functorch import is_batched
from ftp.torch_internals.op_types import OpOverload
from ftp.tracing.captured_tensors import node_of
from ftp.tracing.data_dependent.known_values import are_written
from ftp.tracing.op_facts import op_facts

aten = torch.ops.aten
_EQUAL = (aten.clone.default, aten.detach.default, aten.alias.default)
_COPIES = (*_EQUAL, aten._to_copy.default)


def holds_same(a: Tensor, b: Tensor) -> bool:
    """Whether the recorded ops show that ``b`` holds the values that ``a`` had when it was made.

    Two ops read the same values from a tensor if nothing writes to it after the first of them.
    """
    x, y = node_of(a), node_of(b)
    if x is None or y is None or is_batched(a) or is_batched(b):
        return a is b
    reads: list[tuple[fx.Node, list[fx.Node]]] = []
    pairs: dict[tuple[_Read, _Read], None] = {}
    stack: list[tuple[_Read, _Read, list[fx.Node]]] = [((x, False), (y, False), [])]
    while stack:
        first, second, readers = stack.pop()
        pair = (left, _), (right, _) = _resolved(first), _resolved(second)
        if left is right:
            reads.append((left, readers))
        if pair in pairs or pair[0] == pair[1]:
            continue
        pairs[pair] = None
        if copies := [node for node, _ in pair if node.target in _EQUAL]:
            copy = max(copies)  # the last one, which may be a copy of the other
            reads.append((copy, [copy]))
            source = copy.all_input_nodes[0]
            one, other = ((source if node is copy else node, at) for node, at in pair)
            stack.append((one, other, [*readers, copy]))
            continue
        mine, theirs = _inputs(pair[0]), _inputs(pair[1])
        if mine is None and theirs is None:
            mine, theirs = _inputs((left, False)), _inputs((right, False))
        if mine is None or theirs is None or not _is_same_call(left, right):
            return False
        reads += [(left, [left]), (right, [right])]
        stack += ((*of, [left, right]) for of in zip(mine, theirs, strict=True))
    return not are_written(reads, x.graph)


class NumberedValues:
    """A number for each tensor, found in one visit of each node. Two tensors that `holds_same` of
    have one number, but where it looks through views of a last dim.
    """

    def __init__(self) -> None:
        self._of: dict[fx.Node, int] = {}
        self._calls: dict[Any, int] = {}

    def of(self, x: Tensor) -> int:
        if (node := node_of(x)) is None:
            return -1
        stack = [node]
        while stack:
            at = stack[-1]
            if missing := [n for n in at.all_input_nodes if n not in self._of]:
                stack += missing
            elif stack.pop() not in self._of:
                self._of[at] = self._number(at)
        return self._of[node]

    def _number(self, node: fx.Node) -> int:
        if node.target in _EQUAL:
            return self._of[node.all_input_nodes[0]]
        call: Any = node
        if _is_same_call(node, node):
            call = node.target, _arguments(node), tuple(self._of[n] for n in node.all_input_nodes)
        return self._calls.setdefault(call, len(self._calls))


def is_same_along_last(x: Tensor) -> bool:
    """Whether the recorded ops show that the elements of ``x`` are equal along its last dim, like
    those of an expanded mask.
    """
    node = node_of(x)
    if node is None or is_batched(x) or not x.ndim:
        return False
    seen: dict[fx.Node, None] = {}
    stack = [node]
    while stack:
        if (at := stack.pop()) in seen:
            continue
        seen[at] = None
        if at.meta["val"].ndim == 0 or at.meta["val"].shape[-1] == 1:
            continue
        if at.target is aten.expand.default and _last_of(at.all_input_nodes[0], at) == 1:
            continue
        if not (at.target in _COPIES or _is_pointwise(at)):
            return False
        if any(_last_of(n, at) is None for n in at.all_input_nodes):
            return False
        stack += at.all_input_nodes
    return not are_written(((n, ()) for n in seen), node.graph)


# A node's value, or its elements at the first place of its last dim.
_Read = tuple[fx.Node, bool]


def _resolved(read: _Read) -> _Read:
    """The source of a read, through views that only drop, add or expand the last dim."""
    node, is_first = read
    while True:
        inner = next(iter(node.all_input_nodes), None)
        if not is_first:
            if node.target is not aten.select.int or node.args[2] != 0:
                return node, is_first
            assert inner is not None
            if node.args[1] % inner.meta["val"].ndim != inner.meta["val"].ndim - 1:
                return node, is_first
            node, is_first = inner, True
        elif node.target is aten.unsqueeze.default and inner is not None:
            if node.args[1] % node.meta["val"].ndim != node.meta["val"].ndim - 1:
                return node, is_first
            node, is_first = inner, False
        elif node.target is aten.expand.default and inner is not None:
            of, to = inner.meta["val"].shape, node.meta["val"].shape
            if len(of) != len(to) or of[:-1] != to[:-1]:
                return node, is_first
            node = inner
        else:
            return node, is_first


def _inputs(read: _Read) -> list[_Read] | None:
    """The reads of a node's operands that suffice to compute this read of the node; None if it
    needs other elements too.
    """
    node, is_first = read
    if not is_first:
        return [(n, False) for n in node.all_input_nodes]
    if not _is_pointwise(node) or any(_last_of(n, node) is None for n in node.all_input_nodes):
        return None
    return [(n, n.meta["val"].ndim > 0) for n in node.all_input_nodes]


def _is_pointwise(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and torch.Tag.pointwise in node.target.tags


def _last_of(node: fx.Node, reader: fx.Node) -> int | None:
    """The size of an operand's last dim, if it corresponds to the reader's last dim; 1 for a
    scalar.
    """
    val = node.meta.get("val")
    if not isinstance(val, Tensor):
        return None
    if not val.ndim:
        return 1
    return int(val.shape[-1]) if val.ndim == reader.meta["val"].ndim else None


def _is_same_call(x: fx.Node, y: fx.Node) -> bool:
    """Whether two nodes call one op with equal arguments, up to the nodes that they read."""
    if x.op != "call_function" or y.op != x.op or x.target is not y.target:
        return False
    if x.target is not operator.getitem:
        if not isinstance(x.target, OpOverload):
            return False
        if x.target._schema.is_mutable or op_facts(x.target).is_random:
            return False
    return _arguments(x) == _arguments(y)


def _arguments(node: fx.Node) -> str:
    """A node's arguments, with the number of each node that it reads in the place of the node."""
    numbers = {n: i for i, n in enumerate(node.all_input_nodes)}
    given = (node.args, node.kwargs)
    return repr(map_arg(given, lambda n: f"%{numbers[n]}"))
