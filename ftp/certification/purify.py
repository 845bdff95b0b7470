"""Turn a graph that writes to memory into a pure graph, in which each read has the value that the
memory holds at that time.

The ops' schemas say which results share memory; nothing is taken from the passes that made the
writes. Errors are: aliases that the schemas leave open, writes to a tensor that a collective still
sends, and writes to inputs that are not donated.
"""

import operator
from collections.abc import Collection, Sequence
from dataclasses import field
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from ftp.certification.unsound import Unsound
from ftp.dataclass import dataclass
from ftp.ops.fused_optimizer import COUNT_UP, UPDATES
from ftp.ops.mapped_arguments import mapped_arguments
from ftp.ops.written import written_arguments
from ftp.rules.local_op import RankGraph
from ftp.rules.op_kinds import ONTO_FIRST
from ftp.torch_internals.op_types import OpOverload

aten = torch.ops.aten
c10d = torch.ops._c10d_functional
WAIT = c10d.wait_tensor.default
COPIES = (aten.alias.default, aten.detach.default)  # the same elements in the same memory
WHOLE_VIEWS = (  # each element once, in the same memory or, of a reshape, in a copy
    *COPIES,
    aten._unsafe_view.default,
    aten.permute.default,
    aten.reshape.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.t.default,
    aten.transpose.int,
    aten.unsqueeze.default,
    aten.view.default,
)
_NUMBERS = (  # on numbers, such as the offsets of random draws
    operator.add,
    operator.sub,
    operator.mul,
    operator.floordiv,
    operator.mod,
    operator.neg,
)
_BY_KERNEL = {update.kernel: (op, update) for op, update in UPDATES.items()}


def without_writes(graph: fx.Graph, donated: Collection[int]) -> fx.Graph:
    """The pure graph.

    Args:
        donated: positions of the inputs whose memory may be written to.

    Raises:
        Unsound: a read of memory that was partly overwritten, or a write that changes what another
            node reads.
    """
    return _Purified(graph, donated).run()


@dataclass
class _SharedMemory:
    """Memory that several nodes may share.

    Attributes:
        owner: the node that made it.
        writes: time, node and part of each write to all of it.
        senders: collectives in flight that read it.
    """

    owner: fx.Node
    writes: list[tuple[int, fx.Node, fx.Node]] = field(default_factory=list)
    senders: list[fx.Node] = field(default_factory=list)


class _Purified:
    def __init__(self, graph: fx.Graph, donated: Collection[int]):
        self.graph, self.new = graph, RankGraph()
        inputs = [node for node in graph.nodes if node.op == "placeholder"]
        self.free = {inputs[i] for i in donated}
        self.env: dict[fx.Node, fx.Node] = {}
        self.memory: dict[fx.Node, _SharedMemory] = {}
        self.part: dict[fx.Node, fx.Node] = {}  # nodes with one part have all elements in common
        self.whole: set[fx.Node] = set()  # parts with each element of their memory once
        self.content: dict[fx.Node, fx.Node] = {}  # part that was written to -> the value it holds
        self.born: dict[fx.Node, int] = {}
        self.counted: dict[fx.Node, fx.Node] = {}  # step counter -> its value before the increment
        self.items: dict[tuple[fx.Node, Any], fx.Node] = {}

    def run(self) -> fx.Graph:
        for at, node in enumerate(self.graph.nodes):
            self.born[node] = at
            if node.op == "output":
                self.new.output(map_arg(node.args[0], self.read))
            elif node.op == "placeholder" or not _is_mutable(node):
                self.pure(node)
            elif node.target is COUNT_UP:
                self.count_up(node)
            elif node.target in _BY_KERNEL:
                self.update(node)
            elif node.target is aten.copy_.default:
                self.write(node.args[0], self.read(node.args[1]), node)
                self.share_memory(node, node.args[0], True)
            else:
                self.in_place(node)
        return self.new

    def read(self, node: fx.Node) -> fx.Node:
        if node not in self.part:
            raise Unsound(f"{node.name} is read before it is computed")
        part = self.part[node]
        for time, by, written in self.memory[node].writes:
            if time > self.born[node] and part is not written:
                raise Unsound(f"{node.name} is read after {by.name} has written to its memory")
        return self.content.get(part, self.env[node])

    def write(self, node: fx.Node, value: fx.Node, by: fx.Node) -> None:
        memory, part = self.memory[node], self.part[node]
        if memory.owner.op == "placeholder" and memory.owner not in self.free:
            raise Unsound(f"{by.name} writes to {memory.owner.name}, an input that is not donated")
        if part not in self.whole:  # it may be expanded
            raise Unsound(
                f"{by.name} writes to {node.name}, which is a part or a view of {memory.owner.name}"
            )
        if memory.senders:
            raise Unsound(
                f"{by.name} writes to {node.name}, which {memory.senders[0].name} still sends"
            )
        self.read(node)
        memory.writes.append((self.born[by], by, part))
        self.content[part] = value

    def share_memory(self, node: fx.Node, base: fx.Node, exactly: bool) -> None:
        self.memory[node] = self.memory[base]
        self.part[node] = self.part[base] if exactly else node
        if node.target in WHOLE_VIEWS and self.part[base] in self.whole:
            self.whole.add(self.part[node])

    def pure(self, node: fx.Node) -> None:
        if node.op == "call_function" and node.target in COPIES:
            self.env[node] = self.read(node.args[0])  # type: ignore[arg-type]
        else:
            self.env[node] = self.new.node_copy(node, self.read)
        bases = _bases(node)
        # The results of one op have memory of their own; getitem nodes of one result share it.
        is_item = node.target is operator.getitem and not bases
        if is_item:
            item: Any = node.args[:2]
            first = self.items.setdefault(item, node)
            bases = [] if first is node else [first]
        if len({id(self.memory[b]) for b in bases}) > 1:
            raise Unsound(f"{node.name} = {node.target} may share memory with several operands")
        if bases:
            self.share_memory(node, bases[0], is_item or node.target in (*COPIES, WAIT))
        else:
            self.memory[node], self.part[node] = _SharedMemory(node), node
            self.whole.add(node)
        # An all-reduce sends a copy.
        if _is_collective(node) and node.target is not c10d.all_reduce.default:
            self.memory[node.args[0]].senders.append(node)  # type: ignore[index]
        elif node.target is WAIT and _is_collective(node.args[0]):
            senders = self.memory[node.args[0].args[0]].senders  # type: ignore[union-attr,index]
            if node.args[0] in senders:
                senders.remove(node.args[0])

    def in_place(self, node: fx.Node) -> None:
        target: Any = node.target
        pure = _pure_form(target)
        if pure is None:
            raise Unsound(f"{node.name} = {target} writes to memory, and has no pure form")
        made = self.new.call_function(pure, *mapped_arguments(node, self.read))
        made.meta = {**node.meta, "in_place": True}
        first: Any = node.args[0]
        others: list[fx.Node] = []
        map_arg((node.args[1:], node.kwargs), others.append)
        if any(
            self.memory[x] is self.memory[first]
            and (self.part[x] is not self.part[first] or pure in ONTO_FIRST)
            for x in others
        ):
            raise Unsound(f"{node.name} writes to memory of which it reads another part")
        self.write(first, made, node)
        self.env[node] = made
        self.share_memory(node, first, True)

    def count_up(self, node: fx.Node) -> None:
        numbers, by = node.args
        if by != 1:
            raise Unsound(f"{node.name} increments by {by}")
        for each in numbers:  # type: ignore[union-attr]
            before = self.read(each)
            made = self.new.call_function(aten.add.Tensor, (before, 1))
            made.meta["branch"] = node.meta.get("branch", ())
            self.counted[made] = before
            self.write(each, made, node)

    def update(self, node: fx.Node) -> None:
        """Replace an optimizer's kernel for lists by the update of each parameter."""
        op, kind = _BY_KERNEL[node.target]
        rows: list[list[Any]] = [
            list(row) for row in zip(*(column for column in node.args if column), strict=True)
        ]
        wrote = [self.memory[x] for row in rows for i, x in enumerate(row) if i != 1]
        sent = [self.memory[row[1]] for row in rows]
        if len({*map(id, wrote)}) < len(wrote) or {*map(id, wrote)} & {*map(id, sent)}:
            raise Unsound(f"{node.name} writes to memory that it also reads, or writes to twice")
        for number, row in enumerate(rows):
            given = list(map(self.read, row))
            if kind.counts:
                if given[-1] not in self.counted:
                    raise Unsound(f"{node.name} takes {row[-1].name}, which was not incremented")
                given[-1] = self.counted[given[-1]]
            made = self.new.call_function(op, (given,), dict(node.kwargs))
            origins: Sequence[str] = node.meta.get("origins", ())
            made.meta.update(node.meta)
            made.meta["origin"] = origins[number] if number < len(origins) else ""
            for i, x in enumerate([row[0], *row[2:]]):
                item = self.new.call_function(operator.getitem, (made, i))
                item.meta.update(made.meta)
                if kind.counts and x is row[-1]:  # the kernel reads the counter and writes the rest
                    self.content[self.part[x]] = item
                else:
                    self.write(x, item, node)


def _is_mutable(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


def _is_collective(node: Any) -> bool:
    target: Any = node.target
    return (
        isinstance(target, OpOverload)
        and target.namespace == "_c10d_functional"
        and target is not WAIT
    )


def _bases(node: fx.Node) -> list[fx.Node]:
    """The operands that a node's result may share memory with."""
    target: Any = node.target
    if node.op != "call_function" or target in _NUMBERS:
        return []
    if target in (WAIT, aten._unsafe_view.default):  # their schemas do not say so
        return [node.args[0]]  # type: ignore[list-item]
    if target is operator.getitem:
        return _bases(node.args[0])  # type: ignore[arg-type]
    if not isinstance(target, OpOverload):
        return list(node.all_input_nodes)
    found: list[fx.Node] = []
    if any(r.alias_info is not None for r in target._schema.returns):
        for argument, value in zip(target._schema.arguments, node.args, strict=False):
            if argument.alias_info is not None:
                map_arg(value, found.append)
    return found


def _pure_form(target: Any) -> Any:
    """The op that computes what ``target`` writes to its first operand: pointwise, or of some
    elements.
    """
    name = target._schema.name.split("::")[1]
    packet = getattr(getattr(torch.ops, target.namespace), name.removesuffix("_"), None)
    if (
        [at for at, _ in written_arguments(target)] != [0]
        or packet is None
        or target._overloadname not in packet.overloads()
    ):
        return None
    found = getattr(packet, target._overloadname)
    same = [(a.name, str(a.type)) for a in found._schema.arguments] == [
        (a.name, str(a.type)) for a in target._schema.arguments
    ]
    is_known = torch.Tag.pointwise in found.tags or found in ONTO_FIRST
    return found if same and is_known else None
