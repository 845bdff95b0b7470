"""An independent check that a program's collectives make every output right.

The checker reads the single-device program, the ranks' graphs, the specs, and the layout that is
claimed for each op. It shares no code with the planner, the partitioner and the passes; it does
share the sharding rules (which ``ftp.testing.check_rule`` proves), the decompositions, the rules'
local forms, and the tracer. What each rank's tensors hold follows from the specs of the inputs. An
op is right where its operands hold what its rule asks for and its nodes are the rule's local form.
Data movement between two ops is followed element by element, through the collectives of all ranks.
"""

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import fx
from torch.fx.node import map_arg

from ftp.certification.axis_collectives import Part, added
from ftp.certification.cells import Cell, Cells
from ftp.certification.certificate import Certificate, Ref
from ftp.certification.collective_semantics import COLLECTIVES, Issued
from ftp.certification.data_movement import FILLS, MOVEMENTS, filled, sliced
from ftp.certification.element_map import Along, Held, Pending, holding, is_same
from ftp.certification.expected_parts import ExpectedParts
from ftp.certification.op_forms import OpForms
from ftp.certification.packed_values import Row
from ftp.certification.rank_graphs import RankGraphs
from ftp.certification.unsound import Refused, Unsound
from ftp.errors import CertificateError, join_failures

aten = torch.ops.aten
c10d = torch.ops._c10d_functional
FEW = 64  # ranks, each of which is checked alone if something is wrong, to say where


def check(certificate: Certificate) -> Certificate:
    """The certificate itself, if every output of every rank is right.

    Raises:
        CertificateError: with each value that is wrong, on which ranks, and why.
    """
    failures = list(dict.fromkeys(Checker(certificate).failures()))
    if failures:
        raise CertificateError(join_failures(failures))
    return certificate


Reader = Callable[[Cell], fx.Node]


class Checker:
    """One check of one certificate; what has been found of each rank's tensors is kept.

    Attributes:
        parts: the positions that the specs and the claims give each rank.
        graphs: the ranks' graphs without writes.
        forms: the nodes that compute each op.
        cells: the ranks that are checked together.
    """

    def __init__(self, certificate: Certificate, *, is_each_alone: bool = False):
        self.certificate = c = certificate
        self.axes = {name: Along(name, dim, n) for dim, (name, n) in enumerate(c.axes.items())}
        self.operations = {o.name: o for o in c.operations}
        self.inputs = [o for o in c.operations if o.target is None]
        self.parts = ExpectedParts(self.axes, c.operations)
        self.graphs = RankGraphs(c, self.operations)
        self.cells = Cells(c.ranks, self.axes, self.parts.lengths, is_each_alone=is_each_alone)
        self.known: dict[tuple[Cell, fx.Node], Held | Row] = {}
        self.forms = OpForms(self.operations, self.parts, self.graphs, self.held)
        self.splits: dict[tuple[Cell, fx.Node], Sequence[Held | Row]] = {}

    # Every op and output of every rank.

    def failures(self) -> Iterator[str]:
        if len(self.operations) < len(self.certificate.operations):
            names = [o.name for o in self.certificate.operations]
            yield (
                "several values are called"
                f" {', '.join(sorted({n for n in names if names.count(n) > 1}))}: a name is to"
                " stand for one"
            )
            return
        issued = [
            [n for n in g.nodes if n.target in COLLECTIVES] for g in self.certificate.ranks.graphs
        ]
        yield from self.mismatched_collectives(issued)
        writes = [self.refused_write(graph) for graph in range(len(issued))]
        yield from filter(None, writes)
        if any(writes):
            return
        for cell in self.cells.all:
            try:
                self.rank(cell)
            except Refused as e:
                if len(list(cell.coordinates())) > 1 and len(self.certificate.ranks.at) <= FEW:
                    # Check each rank alone, to name the one that fails.
                    yield from Checker(self.certificate, is_each_alone=True).failures()
                    return
                yield f"{e}{self.cells.among(cell)}"

    def refused_write(self, graph: int) -> str | None:
        try:
            self.graphs.without_writes(graph)
        except Unsound as e:
            return f"{e}{self.cells.where(self.graphs.first(graph))}"

    def mismatched_collectives(self, issued: Sequence[Sequence[fx.Node]]) -> Iterator[str]:
        """Ranks that issue other collectives than the first: they would wait for each other for
        ever.
        """
        first = [self.graphs.signature(n) for n in issued[0]]
        for graph, nodes in enumerate(issued[1:], 1):
            calls = [self.graphs.signature(n) for n in nodes]
            if calls != first:
                at = next(
                    (i for i, (a, b) in enumerate(zip(first, calls, strict=False)) if a != b),
                    min(len(first), len(calls)),
                )
                mine, theirs = [*calls, "none"][at], [*first, "none"][at]
                where = self.cells.where(self.graphs.first(graph))
                yield f"collective {at + 1} is {mine}{where}, and {theirs} on the first"

    def rank(self, cell: Cell) -> None:
        for name in self.graphs.local_ops[cell.graph]:
            op = self.operations[name]
            forms = self.forms.bind(cell, name)
            for at in range(len(forms)):
                for slot in forms[at].operands:
                    due = self.forms.due(op, cell, slot, forms[at].rows)
                    pending = frozenset(
                        (axis, "sum") for axis, slots in op.partial.items() if slot in slots
                    )
                    self.require(
                        cell,
                        lambda c, name=name, at=at, slot=slot: self.operand(c, name, at, slot),
                        due,
                        pending,
                        f"operand {slot} of {op}",
                    )
        for at, (ref, spec) in enumerate(self.certificate.outputs):
            shape = self.operations[ref.name].results[ref.index].shape
            due = holding(self.forms.key(ref), self.parts.cut_by_spec(shape, spec, cell))
            self.require(
                cell, lambda c, at=at: self.returned(c)[at], due, frozenset(), f"output {at}"
            )

    def operand(self, cell: Cell, name: str, at: int, slot: int) -> fx.Node:
        forms = self.forms.bind(cell, name)
        if at >= len(forms) or slot not in forms[at].operands:
            raise Unsound("the ranks along an axis compute other parts of it")
        return forms[at].operands[slot]

    def returned(self, cell: Cell) -> Sequence[fx.Node]:
        return next(n for n in self.graphs.pure[cell.graph].nodes if n.op == "output").args[0]  # type: ignore[return-value]

    # What a tensor holds.

    def require(self, cell: Cell, at: Reader, due: Held, pending: Pending, what: str) -> None:
        """Checks that the tensor read ``at`` a rank holds what is due, alone or summed with the
        ranks along the axes pending.
        """
        node = at(cell)
        what = f"{what}, {node.name},"
        try:
            held = self.one(cell, node)
            missing = sorted(pending - held.pending)
            if extra := held.pending - pending:
                raise Unsound(
                    f"is a reduction still pending over {', '.join(sorted(a for a, _ in extra))}"
                )
            if missing:
                held = self.summed(cell, at, [axis for axis, _ in missing])
        except (Unsound, KeyError) as e:
            raise e if isinstance(e, Refused) else Refused(f"{what} {e}") from None
        if due.is_empty and held.shape == due.shape:
            return
        if held.value != due.value:
            raise Refused(
                f"{what} is {held.value.rsplit('.', 1)[0]!r}; due is"
                f" {due.value.rsplit('.', 1)[0]!r}"
            )
        if held.shape != due.shape:
            raise Refused(f"{what} is of shape {held.shape}; due is {due.shape}")
        if not is_same(held, due):
            raise Refused(f"{what} holds other elements than are due")

    def one(self, cell: Cell, node: fx.Node) -> Held:
        held = self.held(cell, node)
        if isinstance(held, Row):
            raise Unsound(f"is {len(held.parts)} values in a row")
        return held

    def summed(self, cell: Cell, at: Reader, axes: Sequence[str]) -> Held:
        """What the ranks along ``axes`` hold together: one of them alone or each a part, zeros
        elsewhere.
        """
        if not axes:
            return self.one(cell, at(cell))
        along = self.axes[axes[0]]
        return added(
            [
                Part(c.at[along.dim], self.summed(c, at, axes[1:]))
                for c in self.cells.along(cell, along)
            ],
            along,
            "sum",
        )

    def held(self, cell: Cell, node: fx.Node) -> Held | Row:
        key = (cell, node)
        if key in self.forms.made:
            return self.forms.made[key]
        if key not in self.known:
            self.known[key] = self.find(cell, node)
        return self.known[key]

    def find(self, cell: Cell, node: fx.Node) -> Held | Row:
        if node.op == "placeholder":
            at = self.graphs.placeholders[cell.graph][node]
            if at >= len(self.inputs):
                raise Unsound("an offset is taken for a tensor")
            op = self.inputs[at]
            return holding(
                Ref(op.name).key, self.parts.cut_by_spec(op.results[0].shape, op.spec, cell)
            )
        if self.graphs.is_operation(node):
            if (cell, node.meta["origin"]) not in self.forms.in_rows:
                self.forms.bind(cell, node.meta["origin"])
            if (cell, node) in self.forms.made:
                return self.forms.made[cell, node]
        if node.target is c10d.wait_tensor.default:
            issued: Any = node.args[0]
            if issued.target not in COLLECTIVES:
                raise Unsound("it waits for what is no collective")
            return self.received(cell, issued)
        if node.target in COLLECTIVES:
            raise Unsound("it is read before it has arrived (no wait_tensor)")
        if node.target is operator.getitem:
            return self.split(cell, node.args[0])[node.args[1]]  # type: ignore[index]
        if node.target in FILLS and node.target is not aten.zeros_like.default:
            return filled(node)
        step = MOVEMENTS.get(node.target)
        if step is None:
            raise Unsound(f"{node.target} belongs to no op of the program, and moves nothing")
        offsets = self.graphs.offsets(cell)
        args = map_arg(node.args, lambda n: offsets[n] if n in offsets else self.held(cell, n))  # type: ignore[arg-type]
        try:
            return step(*args)  # type: ignore[misc]
        except (IndexError, TypeError, ValueError, AttributeError):
            raise Unsound(f"{node.target}{node.args} does not fit what it is given") from None

    def split(self, cell: Cell, node: Any) -> Sequence[Held | Row]:
        if node.target is not aten.split_with_sizes.default:
            raise Unsound(f"{node.target} belongs to no op of the program, and moves nothing")
        if (cell, node) not in self.splits:
            x, (sizes, *rest) = self.held(cell, node.args[0]), node.args[1:]
            dim: Any = rest[0] if rest else 0
            if sum(sizes) != x.shape[dim]:
                raise Unsound(f"{x.shape[dim]} are split into {sum(sizes)}")
            ends = np.cumsum(sizes).tolist()
            self.splits[cell, node] = [
                sliced(x, dim, end - size, end) for size, end in zip(sizes, ends, strict=True)
            ]
        return self.splits[cell, node]

    def received(self, cell: Cell, node: fx.Node) -> Held | Row:
        axes = self.certificate.groups.get(node.args[-1])  # type: ignore[arg-type]
        if axes is None:
            raise Unsound(
                f"its collective runs over {node.args[-1]!r}, which is no axis of the mesh"
            )
        at = self.graphs.position[node]

        def issued(there: Cell) -> fx.Node:
            found = self.graphs.collectives[there.graph]
            if (
                at >= len(found)
                or self.graphs.signature(found[at]) != self.graphs.signature(node)
                or found[at].args[1:-1] != node.args[1:-1]
            ):
                where = self.cells.where(next(there.coordinates()))
                raise Unsound(f"collective {at + 1}{where} is another one")
            return found[at]

        def sent(there: Cell) -> Held | Row:
            return self.held(there, issued(there).args[0])  # type: ignore[arg-type]

        return COLLECTIVES[node.target](
            Issued(cell, sent, self.cells.along, [self.axes[a] for a in axes]), *node.args[1:-1]
        )
