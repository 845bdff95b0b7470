"""Local forms: emit one op into a rank's graph, by the rule's ``local`` hook if it has one."""

import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import fx
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.node import map_arg

from ftp.dataclass import dataclass
from ftp.rules.call import Call
from ftp.rules.overloads import aten
from ftp.rules.rule import BoundRule
from ftp.torch_internals.graph_nodes import GraphNames, new_node

Index = fx.Node
Offset = int | fx.Node


class RankGraph(fx.Graph):
    """A rank's graph, or a stage's; no argument is a symbolic number."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._graph_namespace = GraphNames()

    def create_node(self, op, target, args=None, kwargs=None, name=None, type_expr=None) -> fx.Node:
        name = name or _name_like(target) or self._target_to_str(target)
        return new_node(self, op, target, args or (), kwargs or {}, name, type_expr)

    def node_copy(self, node, arg_transform=lambda n: n) -> fx.Node:
        args = map_arg(node.args, arg_transform)
        kwargs = node.kwargs and map_arg(node.kwargs, arg_transform)
        made = self.create_node(node.op, node.target, args, kwargs, node.name, node.type)
        made.meta.update(node.meta)
        return made


@cache
def _name_like(target: Any) -> str | None:
    """The name that fx starts from for a node of ``target``, found once; None: as fx finds it."""
    if not callable(target):
        return None
    snake_case = re.sub(r"(?<=[a-z])([A-Z])", r"_\1", target.__name__).lower()
    return re.sub(r"\W+", "_", snake_case, flags=re.ASCII)


def copied(graph: fx.Graph) -> RankGraph:
    """A copy of a graph, with nodes of the same names."""
    new = RankGraph()
    new.output(new.graph_copy(graph, {}))
    return new


def as_module(graph: fx.Graph, root: fx.GraphModule | None = None) -> fx.GraphModule:
    """A module to read or interpret: its code is generated only when asked for.

    Args:
        root: has the attributes that the graph reads.
    """
    return _LazyGraphModule({} if root is None else root, graph)


@dataclass(frozen=True)
class LocalCut:
    """A factor viewed as ``[outer, size, inner]``, of which this rank holds ``length`` from
    ``start`` on; ``start`` may be an input.

    Attributes:
        second: start and length of a zigzag's second piece; ``length`` counts both pieces.
        axis, n, place: the mesh axis, its size and its place among the mesh's axes, by which a
            local form names its process group and numbers its ranks.
    """

    outer: int
    size: int
    inner: int
    start: Offset
    length: int
    second: tuple[Offset, int] | None = None
    axis: str = ""
    n: int = 1
    place: int = 0

    @property
    def pieces(self) -> list[tuple[Offset, int]]:
        """Start and length of each piece."""
        if self.second is None:
            return [(self.start, self.length)]
        return [(self.start, self.length - self.second[1]), self.second]


@dataclass(frozen=True)
class LocalOp:
    """An op as a ``local`` hook sees it: arguments as nodes of the rank's graph, local sizes, and
    the offsets of cut factors.

    A hook returns the node of the op's value (which may be a tuple), or a tuple of nodes, one per
    result.

    Attributes:
        args, kwargs: the op's arguments, ``fx.Node`` in place of tensors, sizes still global.
        sizes: local size of each factor; ``rule.sizes`` has the global ones.
        cuts: the cuts of each cut factor, one per mesh axis, each within the part that the cut
            before it leaves.
        group: gives the name of the process group of an axis, or of several in the mesh's order.
    """

    graph: fx.Graph
    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    rule: BoundRule
    sizes: Mapping[str, int]
    cuts: Mapping[str, Sequence[LocalCut]]
    device: torch.device
    group: Callable[..., str] = str

    @property
    def call(self) -> Call:
        """The global call: its arguments, and the global shapes and dtypes of its tensors."""
        assert self.rule.call is not None, "the rule of a local hook is bound to a call"
        return self.rule.call

    def emit(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        return self.graph.call_function(target, args, kwargs)

    def default(self, *args: Any) -> fx.Node:
        """The op itself, with ``args`` in place of its first arguments."""
        return self.emit(self.target, *args, *self.args[len(args) :], **self.kwargs)

    def replaced(self, at: int, value: Any) -> fx.Node:
        """The op itself with one positional argument replaced."""
        return self.default(*self.args[:at], value)

    def shape(self, result: int = 0) -> list[int]:
        """Local shape of a result."""
        return [math.prod(self.sizes[f] for f in dim) for dim in self.rule.results[result]]

    def operand_shape(self, operand: int) -> list[int]:
        return [math.prod(self.sizes[f] for f in dim) for dim in self.rule.operands[operand]]

    def is_cut(self, *factors: str) -> bool:
        """Whether any of ``factors`` (all of the rule's if none is given) is cut on this rank's
        mesh.
        """
        return any(self.cuts.get(f) for f in factors or self.rule.sizes)

    def item(self, node: fx.Node, index: int) -> fx.Node:
        return self.emit(operator.getitem, node, index)

    def to_local(self, factor: str, index: Index) -> tuple[Index, Index | None]:
        """Global indices along ``factor`` as indices into this rank's shard, and a mask of those
        that it holds (None: all).

        Indices outside the shard are not clamped.
        """
        mask = None
        for cut in self.cuts.get(factor, ()):
            outer, inner = None, None
            if cut.inner != 1:
                inner = self.emit(aten.remainder.Scalar, index, cut.inner)
                index = self.emit(aten.floor_divide.Scalar, index, cut.inner)
            if cut.outer != 1:
                outer = self.emit(aten.floor_divide.Scalar, index, cut.size)
                index = self.emit(aten.remainder.Scalar, index, cut.size)
            index, held = self._in_pieces(cut, index)
            mask = held if mask is None else self.emit(aten.bitwise_and.Tensor, mask, held)
            if outer is not None:
                index = self.emit(
                    aten.add.Tensor, index, self.emit(aten.mul.Scalar, outer, cut.length)
                )
            if inner is not None:
                index = self.emit(
                    aten.add.Tensor, self.emit(aten.mul.Scalar, index, cut.inner), inner
                )
        return index, mask

    def to_global(self, factor: str, index: Index) -> Index:
        """Indices into this rank's part of ``factor`` as global indices."""
        for cut in reversed(self.cuts.get(factor, ())):
            outer, inner = None, None
            if cut.inner != 1:
                inner = self.emit(aten.remainder.Scalar, index, cut.inner)
                index = self.emit(aten.floor_divide.Scalar, index, cut.inner)
            if cut.outer != 1:
                length = max(cut.length, 1)
                outer = self.emit(aten.floor_divide.Scalar, index, length)
                index = self.emit(aten.remainder.Scalar, index, length)
            index = self._from_pieces(cut, index)
            if outer is not None:
                index = self.emit(
                    aten.add.Tensor, index, self.emit(aten.mul.Scalar, outer, cut.size)
                )
            if inner is not None:
                index = self.emit(
                    aten.add.Tensor, self.emit(aten.mul.Scalar, index, cut.inner), inner
                )
        return index

    def _in_pieces(self, cut: LocalCut, index: Index) -> tuple[Index, Index]:
        """Indices along the cut dim as indices into this rank's pieces, and a mask of those that it
        holds.
        """
        found: list[tuple[Index, Index]] = []
        before = 0
        for start, length in cut.pieces:
            at = self.emit(aten.sub.Scalar, index, start)
            held = self.emit(
                aten.bitwise_and.Tensor,
                self.emit(aten.ge.Scalar, at, 0),
                self.emit(aten.lt.Scalar, at, length),
            )
            at = self.emit(aten.add.Scalar, at, before) if before else at
            found.append((at, held))
            before += length
        (at, held), *second = found
        for other, there in second:
            at = self.emit(aten.where.self, there, other, at)
            held = self.emit(aten.bitwise_or.Tensor, held, there)
        return at, held

    def _from_pieces(self, cut: LocalCut, index: Index) -> Index:
        """The inverse of ``_in_pieces``."""
        if cut.second is None:
            return self.emit(aten.add.Scalar, index, cut.start)
        (first, before), (start, _) = cut.pieces
        beyond = self.emit(aten.sub.Scalar, index, before) if before else index
        return self.emit(
            aten.where.self,
            self.emit(aten.ge.Scalar, index, before),
            self.emit(aten.add.Scalar, beyond, start),
            self.emit(aten.add.Scalar, index, first),
        )

    def part(self, factor: str) -> list[Offset]:
        """This rank's part of ``factor`` as numbers, in the form of `ftp.ops.attention`."""
        return [
            number
            for cut in self.cuts.get(factor, ())
            for number in (
                cut.outer,
                cut.size,
                cut.inner,
                len(cut.pieces),
                *(number for piece in cut.pieces for number in piece),
            )
        ]

    def positions(self, factor: str) -> Index:
        """The global indices along ``factor`` of this rank's part, as an int64 vector."""
        return self.to_global(
            factor, self.emit(aten.arange.default, self.sizes[factor], device=self.device)
        )


def localize(op: LocalOp) -> Any:
    """Emit one op of one rank; returns its value or values as the op does."""
    return op.rule.local(op) if op.rule.local is not None else op.default()
