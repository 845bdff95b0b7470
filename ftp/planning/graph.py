"""The planner's graph: a straight line of ops whose tensor dims are factors, with the cuts made so
far.

Shapes in a ``Node`` are global; ``sizes`` holds what is left of each factor on a rank after the
mesh axes folded so far.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field
from functools import cached_property
from operator import attrgetter
from typing import Any, NamedTuple

from ftp.dataclass import dataclass
from ftp.functional.remat import Region
from ftp.ops.choose import BranchPath
from ftp.rules.call import Meta, replaced, tensors
from ftp.rules.notation import Dims
from ftp.rules.rule import BoundRule
from ftp.sharding.layout import Layout, Size, bytes_of, estimated, prod

BATCH, PARAMETER = 1, 2


@dataclass(frozen=True)
class FactorCut:
    """A factor viewed as ``[outer, extent, inner]`` and cut over ``axis``, in sizes local to the
    axes folded before; ``zigzag``: the ranks hold its chunks in zigzag order.
    """

    axis: str
    factor: str
    outer: Size
    extent: Size
    inner: Size
    zigzag: bool = False


@dataclass(frozen=True)
class Reshard:
    """A reshard of a value from layout ``src`` to ``dst`` on one axis. ``shape`` is the value's,
    local to the axes folded before.

    Attributes:
        product: the axes it runs over, in mesh order, if there are several; ``axis`` then joins
            their names.
    """

    axis: str
    n: int
    src: Layout
    dst: Layout
    shape: tuple[Size, ...]
    product: tuple[str, ...] = ()

    @property
    def axes(self) -> tuple[str, ...]:
        return self.product or (self.axis,)

    @property
    def parts(self) -> tuple[int, int, int] | None:
        """(outer, parts, rest) if the reshard is between two cuts of one dim, viewed as ``[outer,
        n, parts, n, rest]``: one of the first ``n``, one of the second. None for other reshards.
        """
        (_, dim, a, *_), (_, there, b, *_) = self.src, self.dst
        is_plain = all(
            x.kind == "S" and x.inner == 1 and not x.zigzag for x in (self.src, self.dst)
        )
        if not is_plain or dim != there or not (isinstance(a, int) and isinstance(b, int)):
            return None
        size, (outer, most) = self.shape[dim], sorted((a, b))
        if not isinstance(size, int) or outer == most or most % (outer * self.n):
            return None
        rest = size // (most * self.n)
        if rest * most * self.n != size or not rest:
            return None
        return outer, most // (outer * self.n), rest

    @property
    def op(self) -> str:
        """The name of the collective that the reshard issues, or of its local op."""
        pair = self.src.kind + self.dst.kind
        if pair == "SS":
            is_gathered = self.src.dim == self.dst.dim and self.parts is None
            return "all_gather" if is_gathered else "all_to_all"
        return _OPS[pair]


_OPS = {
    "PR": "all_reduce",
    "PS": "reduce_scatter",
    "SR": "all_gather",
    "RS": "slice",
    "RP": "contribute",
    "SP": "pad",
}


@dataclass(eq=False)
class Node:
    """One op, input, constraint or reshard.

    Attributes:
        kind: ``input``, ``op``, ``constrain``, ``local`` or ``reshard``.
        target: the aten op; the ``Reshard`` of a reshard; the entries of a constraint's spec; the
            ``Program`` of per-rank code (``local``); None for an input.
        args, kwargs: of the op, with ``Value`` in place of tensors.
        depends: ``BATCH`` | ``PARAMETER`` bits of the inputs it is computed from.
        phase: how often the program has switched between forward and backward before it.
        region: the recomputed region (``remat``) that it is part of.
        branch: the branch of a ``torch.cond`` that it is part of.
        cause: the purpose of a reshard: a parameter path, a constraint, an op.
        pending: per result the ``(axis, op)`` of its pending reductions. Like ``sizes`` and
            ``cuts``, it is replaced and never changed: equal nodes share it.
        own_axes: axes on which the node fixes its layouts itself: those of per-rank code, and of
            nodes that enter or leave it.
        rank_axes: axes along which its results belong to one rank, inside per-rank code. On them
            nothing is cut or resharded.
    """

    name: str
    kind: str
    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    results: tuple[Meta, ...]
    rule: BoundRule
    source: str = ""
    depends: int = 0
    phase: int = 0
    region: Region | None = None
    cause: str = ""
    sizes: Mapping[str, Size] = field(default_factory=dict)
    cuts: list[FactorCut] = field(default_factory=list)
    pending: dict[int, list[tuple[str, str]]] = field(default_factory=dict)
    operands: tuple["Value", ...] = ()
    own_axes: frozenset[str] = frozenset()
    rank_axes: frozenset[str] = frozenset()
    branch: BranchPath = ()

    def __post_init__(self):
        self.sizes = self.sizes or self.rule.sizes
        if not self.kwargs and {Value}.issuperset(map(type, self.args)):
            self.operands = tuple(self.args)
        else:
            self.operands = tuple(tensors((self.args, dict(self.kwargs)), Value))

    def __repr__(self) -> str:
        return self.name

    @property
    def values(self) -> tuple["Value", ...]:
        if len(self.results) == 1:
            return (Value(self),)
        return tuple([Value(self, i) for i in range(len(self.results))])

    def copy(self) -> "Node":
        """A copy; changes to it leave this node as it is."""
        made = object.__new__(Node)
        made.__dict__ = self.__dict__.copy()
        return made

    def shape(self, index: int = 0) -> tuple[Size, ...]:
        """A result's shape on a rank."""
        return self._shape_of(self.rule.results[index])

    def operand_shape(self, slot: int) -> tuple[Size, ...]:
        return self._shape_of(self.rule.operands[slot])

    def _shape_of(self, dims: Dims) -> tuple[Size, ...]:
        sizes = self.sizes
        return tuple(
            [sizes[dim[0]] if len(dim) == 1 else prod([sizes[f] for f in dim]) for dim in dims]
        )

    def replace_operands(self, new: Sequence["Value"]) -> None:
        if not self.operands:
            return
        old, self.operands = self.operands, tuple(new)
        if self.args == old:  # nothing but tensors
            self.args = self.operands
            return
        fresh = iter(self.operands)
        self.args = replaced(self.args, Value, lambda _: next(fresh))
        if self.kwargs:
            self.kwargs = replaced(dict(self.kwargs), Value, lambda _: next(fresh))


class Value(NamedTuple):
    """One result of a node."""

    node: Node
    index: int = 0

    def __repr__(self) -> str:
        return self.node.name if len(self.node.results) == 1 else f"{self.node.name}[{self.index}]"

    @property
    def meta(self) -> Meta:
        return self.node.results[self.index]

    @property
    def dims(self) -> Dims:
        return self.node.rule.results[self.index]

    @property
    def shape(self) -> tuple[Size, ...]:
        return self.node.shape(self.index)

    @property
    def axes(self) -> list[tuple[str, ...]]:
        """The axes that cut each dim."""
        cuts: dict[str, list[str]] = {}
        for cut in self.node.cuts:
            cuts.setdefault(cut.factor, []).append(cut.axis)
        return [tuple(a for factor in dim for a in cuts.get(factor, ())) for dim in self.dims]

    def nbytes(self, size_of: Callable[[Size], int] = estimated) -> int:
        """Bytes on the rank that holds most, cut by the axes folded so far."""
        return bytes_of(self.shape, self.meta.dtype, size_of)


@dataclass
class Graph:
    """Nodes in an order in which they can run, and the values that the program returns.

    Names are unique: of two nodes with one name the later is renamed.
    """

    nodes: list[Node]
    outputs: list[Value]

    def __post_init__(self):
        if len(set(map(attrgetter("name"), self.nodes))) == len(self.nodes):
            return
        names: set[str] = set()
        for node in self.nodes:
            base, n = node.name, 1
            while node.name in names:
                node.name, n = f"{base}_{n}", n + 1
            names.add(node.name)

    @cached_property
    def inputs(self) -> list[Node]:
        return [n for n in self.nodes if n.kind == "input"]

    @cached_property
    def followed(self) -> dict[Any, Any]:
        """What cuts lead to, as `reach` found out, for nodes of one rule and sizes."""
        return {}

    @cached_property
    def reshards(self) -> dict[int, Node]:
        """The reshards by their place among the nodes."""
        return {at: n for at, n in enumerate(self.nodes) if n.kind == "reshard"}

    def copied(self) -> "Rewrite":
        """A copy of the graph and its nodes, and the copy of each node."""
        copies: dict[Node, Node] = {}
        for node in self.nodes:
            made = copies[node] = node.copy()
            made.replace_operands([Value(copies[v.node], v.index) for v in node.operands])
        outputs = [Value(copies[v.node], v.index) for v in self.outputs]
        return Graph(list(copies.values()), outputs), copies

    @cached_property
    def users(self) -> dict[Value, list[tuple[Node, int]]]:
        """The users of each value: (node, position among its operands)."""
        users: dict[Value, list[tuple[Node, int]]] = {}
        for node in self.nodes:
            for slot, value in enumerate(node.operands):
                users.setdefault(value, []).append((node, slot))
        return users

    def __str__(self) -> str:
        lines = [
            f"{node.name} = {node.kind} {node.target or ''}({', '.join(map(repr, node.operands))})"
            f"  {node.rule}"
            for node in self.nodes
        ]
        return "\n".join([*lines, f"return {self.outputs}"])


Rewrite = tuple[Graph, dict[Node, Node]]
"""The result of a pass: the new graph, and for each old node that is left its new node. A pass
changes no node of its input; both graphs share the nodes that are equal.
"""


def unchanged(graph: Graph) -> Rewrite:
    """The result of a pass that has nothing to do."""
    return graph, {node: node for node in graph.nodes}


def rewired(node: Node, now: Mapping[Node, Node]) -> Node:
    """The node with its operands replaced by ``now``: itself if none changes, else a copy."""
    for value in node.operands:
        if now[value.node] is not value.node:
            return with_operands(node, [Value(now[v.node], v.index) for v in node.operands])
    return node


def with_operands(node: Node, operands: Sequence[Value]) -> Node:
    """The node with these operands: itself if they are its own, else a copy."""
    if tuple(operands) == node.operands:
        return node
    made = node.copy()
    made.replace_operands(operands)
    return made


def in_turn(first: Mapping[Node, Node], second: Mapping[Node, Node]) -> dict[Node, Node]:
    """The new node of each old node after two passes."""
    return {node: second[now] for node, now in first.items() if now in second}


def after_operands(nodes: Iterable[Node]) -> list[Node]:
    """The nodes in the given order, but each operand that comes later, or is not among them, is
    placed just before its first user. So a parameter is gathered where it is used.
    """
    done: dict[Node, None] = {}
    for node in nodes:
        stack = [node]
        while stack:
            missing = [v.node for v in stack[-1].operands if v.node not in done]
            if missing:
                stack += reversed(missing)
            else:
                done[stack.pop()] = None
    return list(done)


def identity_rule(shape: Sequence[int], operands: int = 1) -> BoundRule:
    """One factor per dim, the same in the operand (if any) and the result."""
    dims = tuple((f"~{d}",) for d in range(len(shape)))
    sizes = {f"~{d}": s for d, s in enumerate(shape)}
    return BoundRule((dims,) * operands, (dims,), frozenset(), ({},), (), sizes, None, False)


def whole_rule(
    operands: Sequence[tuple[int, ...]], results: Sequence[tuple[int, ...]]
) -> BoundRule:
    """The rule of an op without one: nothing may be cut."""
    sizes: dict[str, int] = {}

    def dims(shape: Sequence[int]) -> Dims:
        out = []
        for s in shape:
            name = f"~{len(sizes)}"
            sizes[name] = s
            out.append((name,))
        return tuple(out)

    ins, outs = tuple(map(dims, operands)), tuple(map(dims, results))
    return BoundRule(ins, outs, frozenset(sizes), ({},) * len(outs), (), sizes, None, True)
