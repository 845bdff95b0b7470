"""One op of one rank: emits the op's local form into the rank's graph, through the rule's
``local`` hook where it has one.
"""

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.node import map_arg

from ftp.rules.call import Call
from ftp.rules.overloads import aten
from ftp.rules.rule import BoundRule

Index = fx.Node
Offset = int | fx.Node


class RankGraph(fx.Graph):
    """A rank's graph. Its nodes get their arguments after they are made: fx looks for symbolic
    numbers in those it is given, at half the price of a node, and a rank's graph has none. Setting
    an attribute of a node costs half of another."""

    def create_node(self, op, target, args=None, kwargs=None, name=None, type_expr=None) -> fx.Node:
        node = super().create_node(op, target, None, None, name, type_expr)
        if args or kwargs:
            node._update_args_kwargs(args or (), kwargs or {})
        return node

    def node_copy(self, node, arg_transform=lambda n: n) -> fx.Node:
        args, kwargs = map_arg(node.args, arg_transform), map_arg(node.kwargs, arg_transform)
        made = self.create_node(node.op, node.target, args, kwargs, node.name, node.type)
        made.meta.update(node.meta)
        return made


def as_module(graph: fx.Graph) -> fx.GraphModule:
    """A module that is read or interpreted: its code is generated when it is asked for."""
    return _LazyGraphModule({}, graph)


@dataclass(frozen=True)
class LocalCut:
    """A factor seen as ``[outer, size, inner]`` of which this rank holds ``length`` from
    ``start`` on; ``start`` may be an input.

    Attributes:
        second: of a zigzag start and length of the second piece; ``length`` counts both.
        axis, n: the mesh axis and its size; a local form that passes parts around its ranks names
            its process group by them.
    """

    outer: int
    size: int
    inner: int
    start: Offset
    length: int
    second: tuple[Offset, int] | None = None
    axis: str = ""
    n: int = 1

    @property
    def pieces(self) -> list[tuple[Offset, int]]:
        """Start and length of each piece."""
        if self.second is None:
            return [(self.start, self.length)]
        return [(self.start, self.length - self.second[1]), self.second]


@dataclass(frozen=True)
class LocalOp:
    """What a ``local`` hook sees of an op: arguments as nodes of the rank's graph, local sizes, and
    where cut factors begin.

    A hook returns the node of the op's value (which may be a tuple), or a tuple of nodes, one a
    result.

    Attributes:
        args, kwargs: the op's arguments, ``fx.Node`` in place of tensors, sizes still global.
        sizes: local size of each factor; ``rule.sizes`` has the global ones.
        cuts: how each cut factor is cut, one entry a mesh axis, each within what the one before
            left.
        group: the name of an axis' process group.
    """

    graph: fx.Graph
    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    rule: BoundRule
    sizes: Mapping[str, int]
    cuts: Mapping[str, Sequence[LocalCut]]
    device: torch.device
    group: Callable[[str], str] = str

    @property
    def call(self) -> Call:
        """The call on the whole: its arguments, and the global shapes and dtypes of its tensors."""
        assert self.rule.call is not None, "the rule of a local hook is bound to a call"
        return self.rule.call

    def emit(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        return self.graph.call_function(target, args, kwargs)

    def default(self, *args: Any) -> fx.Node:
        """The op itself, with ``args`` in place of the first of its arguments."""
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
        """A tensor of global indices along ``factor`` as indices into this rank's part, and a mask
        of those it holds (None: all).

        Indices outside the part are not clamped.
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
        """A tensor of indices into this rank's part of ``factor`` as global indices."""
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
        """Indices along a cut's middle as indices into what this rank holds, and which it holds."""
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
        """Which part of ``factor`` this rank holds, in numbers, as `ftp.ops.attention` has it."""
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
        """The global indices along ``factor`` of what this rank holds, as an int64 vector."""
        return self.to_global(
            factor, self.emit(aten.arange.default, self.sizes[factor], device=self.device)
        )


def localize(op: LocalOp) -> Any:
    """Emit one op of one rank; the value(s) as the op returns them."""
    return op.rule.local(op) if op.rule.local is not None else op.default()
