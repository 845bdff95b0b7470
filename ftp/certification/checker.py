"""The independent check that every rank computes every output of a program right.

The checker reads the single-device program, the ranks' graphs, the specs, and the layout that is
claimed for each op. The specs of the inputs say which elements each rank's tensors hold. An op is
right if its operands hold the elements that its rule needs, and the rank's nodes are the rule's
local form. Between two ops the checker follows data movement element by element, through the
collectives of all ranks.

The checker shares no code with the planner, the partitioner and the passes. It shares the sharding
rules (which ``ftp.testing.check_rule`` proves), the decompositions, the rules' local forms, and the
tracer.
"""

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import fx
from torch.fx.node import map_arg

from ftp.certification.axis_collectives import Contribution, reduce_axis
from ftp.certification.branches import leaks
from ftp.certification.cells import Cell, Cells
from ftp.certification.certificate import Certificate, Ref
from ftp.certification.collective_semantics import COLLECTIVES, IssuedCollective
from ftp.certification.data_movement import FILLS, MOVEMENTS, divided, filled
from ftp.certification.element_map import (
    ElementMap,
    MeshAxis,
    PendingSums,
    element_map,
    is_same,
    pending_sums,
)
from ftp.certification.expected_parts import ExpectedParts
from ftp.certification.lockstep.check import check_recorded
from ftp.certification.op_forms import OpForms
from ftp.certification.packed_values import PackedValues
from ftp.certification.rank_code import unproven
from ftp.certification.rank_graphs import RankGraphs
from ftp.certification.unsound import Refused, Unsound
from ftp.errors import CertificateError, raise_all
from ftp.ops.rings import SENDING

aten = torch.ops.aten
c10d = torch.ops._c10d_functional
FEW = 64  # up to so many ranks are checked one by one after a failure, to name the one that fails


def check(certificate: Certificate) -> Certificate:
    """The certificate itself, if every output of every rank is right.

    Raises:
        CertificateError: each wrong value, on which ranks, and why.
    """
    try:
        if certificate.recorded is not None:
            return check_recorded(certificate)
        failures = dict.fromkeys(Checker(certificate).failures())
        raise_all(CertificateError, failures or map(str, unproven(certificate)))
    except CertificateError:
        raise
    except Exception as e:  # of a file that was altered
        raise CertificateError(
            f"The certificate states what no program has: {type(e).__name__}: {e}"
        ) from e
    return certificate


NodeOfCell = Callable[[Cell], fx.Node]


class Checker:
    """One check of one certificate.

    Attributes:
        parts: the positions that the specs and the claims give each rank.
        graphs: the ranks' graphs without writes.
        cells: the groups of ranks that are checked together.
        maps: the element maps of nodes, each computed once.
        forms: the nodes that compute each op.
    """

    def __init__(self, certificate: Certificate, *, is_each_alone: bool = False):
        self.certificate = c = certificate
        self.axes = {name: MeshAxis(name, dim, n) for dim, (name, n) in enumerate(c.axes.items())}
        self.operations = {o.name: o for o in c.operations}
        self.inputs = [o for o in c.operations if o.target is None]
        self.parts = ExpectedParts(self.axes, c.operations)
        self.graphs = RankGraphs(c, self.operations)
        alone = frozenset().union(*self.parts.rank_axes.values())
        self.cells = Cells(
            c.ranks, self.axes, self.parts.lengths, alone=self.axes if is_each_alone else alone
        )
        self.maps: dict[tuple[Cell, fx.Node], ElementMap | PackedValues] = {}
        self.forms = OpForms(self.operations, self.parts, self.graphs, self.map_of)
        self.splits: dict[tuple[Cell, fx.Node], Sequence[ElementMap | PackedValues]] = {}

    # Every op and output of every rank.

    def failures(self) -> Iterator[str]:
        if len(self.operations) < len(self.certificate.operations):
            names = [o.name for o in self.certificate.operations]
            several = ", ".join(sorted({n for n in names if names.count(n) > 1}))
            yield f"several values are called {several}: a name stands for one value"
            return
        if self.certificate.misfit:
            yield self.certificate.misfit
            return
        issued = [
            [n for n in g.nodes if n.target in COLLECTIVES or n.target in SENDING]
            for g in self.certificate.ranks.graphs
        ]
        yield from self.mismatched_collectives(issued)
        writes = [self.refused_write(graph) for graph in range(len(issued))]
        yield from filter(None, writes)
        if any(writes):
            return
        for graph, pure in enumerate(self.graphs.pure):
            where = self.cells.where(self.graphs.first(graph))
            yield from (f"{leak}{where}" for leak in leaks(pure))
        for cell in self.cells.all:
            try:
                self.check_cell(cell)
            except Refused as e:
                if cell.size > 1 and math.prod(self.certificate.ranks.shape) <= FEW:
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
        """Messages for ranks that issue other collectives than the first rank: a deadlock."""
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

    def check_cell(self, cell: Cell) -> None:
        for name in self.graphs.local_ops[cell.graph]:
            op = self.operations[name]
            for at, form in enumerate(self.forms.bind(cell, name)):
                for slot in form.operands:
                    self.require(
                        cell,
                        lambda c, name=name, at=at, slot=slot: self.operand(c, name, at, slot),
                        self.forms.expected_operand(op, cell, slot, form.rows),
                        pending_sums([a for a, slots in op.partial.items() if slot in slots]),
                        f"operand {slot} of {op}",
                    )
        for at, (ref, spec) in enumerate(self.certificate.outputs):
            shape = self.operations[ref.name].results[ref.index].shape
            self.require(
                cell,
                lambda c, at=at: self.output_nodes(c)[at],
                element_map(self.forms.key(ref, cell), self.parts.cut_by_spec(shape, spec, cell)),
                self.unreduced(self.certificate.unreduced.outputs[at]),
                f"output {at}",
            )
        for node in self.graphs.pure[cell.graph].nodes:
            is_followed = node.target in MOVEMENTS or node.target is c10d.wait_tensor.default
            if not node.users and is_followed and not self.graphs.is_operation(node):
                self.require_that_it_runs(cell, node)

    def require_that_it_runs(self, cell: Cell, node: fx.Node) -> None:
        """Check that a node whose result no op reads does not raise: the other ranks would wait for
        this one.
        """
        try:
            self.map_of(cell, node)
        except (Unsound, KeyError) as e:
            raise e if isinstance(e, Refused) else Refused(f"{node.name}, unread, {e}") from None

    def operand(self, cell: Cell, name: str, at: int, slot: int) -> fx.Node:
        forms = self.forms.bind(cell, name)
        if at >= len(forms) or slot not in forms[at].operands:
            raise Unsound("the ranks along an axis compute different parts of it")
        return forms[at].operands[slot]

    def output_nodes(self, cell: Cell) -> Sequence[fx.Node]:
        output = self.graphs.pure[cell.graph].output_node()
        return output.args[0]  # type: ignore[return-value]

    # Element maps.

    def require(
        self, cell: Cell, at: NodeOfCell, expected: ElementMap, pending: PendingSums, what: str
    ) -> None:
        """Check that the tensor of a node holds the expected elements, on each rank or as the sum
        over the axes of ``pending``.

        Args:
            at: the node, in the graph of a cell.
            what: names the tensor in messages.
        """
        node = at(cell)
        what = f"{what}, {node.name},"
        try:
            held = self.single(cell, node)
            missing = sorted(pending - held.pending)
            if extra := held.pending - pending:
                raise Unsound(
                    f"is a reduction still pending over {', '.join(sorted(a for a, _ in extra))}"
                )
            if missing:
                held = self.reduced(cell, at, [axis for axis, _ in missing])
        except (Unsound, KeyError) as e:
            raise e if isinstance(e, Refused) else Refused(f"{what} {e}") from None
        if expected.is_empty and held.shape == expected.shape:
            # Empty parts of all values are alike. The dtype counts: an empty part may be padded and
            # sent beside other ranks' parts.
            if self.dtype_of(held) != self.dtype_of(expected):
                raise Refused(f"{what} is {self.dtype_of(held)}; expected is another dtype")
            return
        if held.value != expected.value:
            raise Refused(
                f"{what} is {held.value.rsplit('.', 1)[0]!r}; expected is"
                f" {expected.value.rsplit('.', 1)[0]!r}"
            )
        if held.shape != expected.shape:
            raise Refused(f"{what} is of shape {held.shape}; expected is {expected.shape}")
        if not is_same(held, expected):
            raise Refused(f"{what} holds other elements than expected")

    def dtype_of(self, x: ElementMap) -> torch.dtype | None:
        """The dtype of the value whose elements a tensor holds; None for a value that is not the
        program's.
        """
        return self.dtypes.get(x.value, self.dtypes.get(x.value.rpartition("@")[0]))

    def dtypes_of(self, x: ElementMap | PackedValues) -> list[torch.dtype | None]:
        return [self.dtype_of(p) for p in (x.parts if isinstance(x, PackedValues) else (x,))]

    @cached_property
    def dtypes(self) -> dict[str, torch.dtype]:
        return {
            self.forms.key_in(self.forms.names, ref): meta.dtype
            for op in self.operations.values()
            for i, meta in enumerate(op.results)
            for ref in (Ref(op.name, i),)
        }

    def single(self, cell: Cell, node: fx.Node) -> ElementMap:
        held = self.map_of(cell, node)
        if isinstance(held, PackedValues):
            raise Unsound(f"is {len(held.parts)} packed values")
        return held

    def reduced(self, cell: Cell, at: NodeOfCell, axes: Sequence[str]) -> ElementMap:
        """The sum over ``axes`` of the ranks' tensors."""
        if not axes:
            return self.single(cell, at(cell))
        along = self.axes[axes[0]]
        peers = self.cells.along(cell, along)
        parts = [Contribution(c.at[along.dim], self.reduced(c, at, axes[1:])) for c in peers]
        return reduce_axis(parts, along, "sum")

    def map_of(self, cell: Cell, node: fx.Node) -> ElementMap | PackedValues:
        key = (cell, node)
        if key in self.forms.result_maps:
            return self.forms.result_maps[key]
        if key not in self.maps:
            self.maps[key] = self.follow(cell, node)
        return self.maps[key]

    def follow(self, cell: Cell, node: fx.Node) -> ElementMap | PackedValues:
        """The element map of a node of a cell's graph."""
        if node.op == "placeholder":
            return self._map_of_input(cell, node)
        if self.graphs.is_operation(node):
            if (cell, node.meta["origin"]) not in self.forms.in_rows:
                self.forms.bind(cell, node.meta["origin"])
            if (cell, node) in self.forms.result_maps:
                return self.forms.result_maps[cell, node]
        if node.target is c10d.wait_tensor.default:
            issued: Any = node.args[0]
            if issued.target not in COLLECTIVES:
                raise Unsound("wait_tensor waits for a node that is no collective")
            return self.received(cell, issued)
        if node.target in COLLECTIVES:
            raise Unsound("it is read before it has arrived (no wait_tensor)")
        if node.target is operator.getitem:
            parts, at = self.split(cell, node.args[0]), node.args[1]
            if at not in range(len(parts)):
                raise Unsound(f"part {at} is taken of {len(parts)}")
            return parts[at]  # type: ignore[index]
        if node.target in FILLS and node.target is not aten.zeros_like.default:
            made = filled(node)
            self.map_of(cell, node.args[0])  # type: ignore[arg-type]  # it must have arrived
            return made
        return self._moved(cell, node)

    def _map_of_input(self, cell: Cell, node: fx.Node) -> ElementMap:
        at = self.graphs.placeholders[cell.graph][node]
        if at >= len(self.inputs):
            raise Unsound("an offset is used as a tensor")
        op = self.inputs[at]
        return element_map(
            Ref(op.name).key,
            self.parts.cut_by_spec(op.results[0].shape, op.spec, cell),
            self.unreduced(self.certificate.unreduced.inputs[at]),
        )

    def unreduced(self, axes: Sequence[str]) -> PendingSums:
        """The pending sums over axes that a spec names; over one rank a sum is complete."""
        return pending_sums(axis for axis in axes if self.certificate.axes.get(axis) != 1)

    def _moved(self, cell: Cell, node: fx.Node) -> ElementMap | PackedValues:
        """The element map after a data movement, such as a slice or a transpose."""
        step = MOVEMENTS.get(node.target)
        if step is None:
            raise Unsound(f"{node.target} belongs to no op of the program and is no data movement")
        offsets = self.graphs.offsets(cell)

        def given(n: fx.Node) -> Any:
            return offsets[n] if n in offsets else self.map_of(cell, n)

        args: Any = map_arg(node.args, given)
        if isinstance(args[0], np.ndarray):
            raise Unsound("an offset is used as a tensor")
        try:
            return step(*args)
        except (IndexError, TypeError, ValueError, AttributeError):
            raise Unsound(f"{node.target}{node.args} does not fit its arguments") from None

    def split(self, cell: Cell, node: Any) -> Sequence[ElementMap | PackedValues]:
        if node.target is not aten.split_with_sizes.default:
            raise Unsound(f"{node.target} belongs to no op of the program and is no data movement")
        if (cell, node) not in self.splits:
            x, (sizes, *rest) = self.map_of(cell, node.args[0]), node.args[1:]
            dim: Any = rest[0] if rest else 0
            if not -len(x.shape) <= dim < len(x.shape):
                raise Unsound(f"a value of shape {list(x.shape)} is split along dim {dim}")
            if sum(sizes) != x.shape[dim] or min(sizes, default=0) < 0:
                raise Unsound(f"{x.shape[dim]} are split into parts of {list(sizes)}")
            self.splits[cell, node] = divided(x, dim % len(x.shape), sizes)
        return self.splits[cell, node]

    def received(self, cell: Cell, node: fx.Node) -> ElementMap | PackedValues:
        """The element map of a collective's result, once it has arrived."""
        group: Any = node.args[-1]
        if group not in self.certificate.groups:
            raise Unsound(f"its collective runs over {group!r}, which is no axis of the mesh")
        axes = [self.axes[axis] for axis in self.certificate.groups[group]]
        at = self.graphs.position[node]

        def sent(there: Cell) -> ElementMap | PackedValues:
            found = self.graphs.collectives[there.graph]
            if (
                at >= len(found)
                or self.graphs.signature(found[at]) != self.graphs.signature(node)
                or found[at].args[1:-1] != node.args[1:-1]
            ):
                where = self.cells.where(next(there.coordinates()))
                raise Unsound(f"collective {at + 1}{where} differs")
            held = self.map_of(there, found[at].args[0])  # type: ignore[arg-type]
            theirs = self.dtypes_of(held)
            if len(theirs) == len(own) and theirs != own:
                raise Unsound("ranks send tensors of different dtypes")
            return held

        own = self.dtypes_of(self.map_of(cell, node.args[0]))  # type: ignore[arg-type]
        issued = IssuedCollective(cell, sent, self.cells.along, axes)
        return COLLECTIVES[node.target](issued, *node.args[1:-1])
