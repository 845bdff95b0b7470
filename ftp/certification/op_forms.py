"""Op forms: the nodes of a rank's graph that compute an op, matched with its rule's local form."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx

from ftp.certification.cells import Cell
from ftp.certification.certificate import Operation, Ports, Ref
from ftp.certification.collective_semantics import COLLECTIVES
from ftp.certification.data_movement import FILLS, constant
from ftp.certification.element_map import (
    DimPart,
    ElementMap,
    common_position,
    element_map,
    is_same,
    slice_dim,
)
from ftp.certification.expected_parts import ExpectedParts
from ftp.certification.local_form import local_form, rule_of
from ftp.certification.op_matching import COPIES, Matcher
from ftp.certification.packed_values import PackedValues
from ftp.certification.rank_graphs import RankGraphs
from ftp.certification.unsound import Refused
from ftp.ops.exchange_rows import ALL_TO_ALL_ROWS
from ftp.ops.mapped_arguments import mapped_arguments
from ftp.per_rank.planned import AXIS_INDEX, collective_axis
from ftp.rules.notation import Dim
from ftp.rules.rule import BoundRule

aten = torch.ops.aten
c10d = torch.ops._c10d_functional
ROWWISE = (aten.mm.default, aten.reshape.default)  # blocks of rows give blocks of rows


@dataclass(frozen=True)
class Form:
    """A rank's form of an op.

    Attributes:
        operands: the nodes that it reads, by operand.
        rows: first and last row of the first operand, if not all.
    """

    operands: Mapping[int, fx.Node]
    rows: tuple[int, int] | None = None


class OpForms:
    """The forms of each op on each cell; each is matched once.

    Args:
        map_of: what a node's tensor holds.

    Attributes:
        result_maps: what the results of matched nodes hold.
        in_rows: ops that are computed in blocks of rows.
    """

    def __init__(
        self,
        operations: Mapping[str, Operation],
        parts: ExpectedParts,
        graphs: RankGraphs,
        map_of: Callable[[Cell, fx.Node], ElementMap | PackedValues],
    ):
        self.operations, self.parts, self.graphs, self.map_of = operations, parts, graphs, map_of
        self.result_maps: dict[tuple[Cell, fx.Node], ElementMap] = {}
        self.in_rows: set[tuple[Cell, str]] = set()
        self.rules: dict[str, BoundRule] = {}
        self.bound: dict[tuple[Cell, str], list[Form]] = {}

    def bind(self, cell: Cell, name: str) -> list[Form]:
        """Match a rank's nodes of an op with the rule's local form.

        Returns one form, or one for each block of rows.
        """
        if (cell, name) in self.bound:
            return self.bound[cell, name]
        op, nodes = self.operations[name], self.graphs.local_ops[cell.graph].get(name, [])
        if op.ports is not None:
            self.bound[cell, name] = [self.own_code(cell, op, op.ports, nodes)]
            return self.bound[cell, name]
        if op.target is AXIS_INDEX or collective_axis(op.target, op.args) is not None:
            self.bound[cell, name] = [self.own_collective(cell, op, nodes)]
            return self.bound[cell, name]
        rule = self.rule(op)
        index, cuts = self.parts.factors(op, rule, cell)
        results, places, starts = local_form(
            op, rule, index, cuts, self.graphs.device, self.graphs.certificate.groups
        )
        matcher = Matcher(self.graphs.offsets(cell), starts)
        inside = set(nodes)
        bound: dict[fx.Node, fx.Node] = {}
        taken: set[int] = set()
        blocks = (
            [node for node in nodes if node.target is results[0].target]
            if len(results) == 1 and results[0].target in ROWWISE
            else []
        )
        for node in nodes if len(blocks) < 2 else ():
            if all(u in inside for u in node.users) or node.target in COPIES:
                continue
            # Results of one form, such as zeros where a rank's part is empty, are told apart by
            # their notes.
            noted = [at for at in node.meta.get("gives", ()) if at in range(len(results))]
            left = [*noted, *(at for at in range(len(results)) if at not in taken), *sorted(taken)]
            for at in left:
                trial = dict(bound)
                if matcher.is_same(results[at], node, trial, {}):
                    bound = trial
                    taken.add(at)
                    self.result_maps[cell, node] = self.result(cell, op, rule, index, at)
                    break
            else:
                raise Refused(
                    f"{node.name} = {node.target}{node.args} is not the local form of {op}"
                )
        forms = [Form({slot: bound[p] for p, slot in places.items() if p in bound})]
        if len(blocks) > 1:
            self.in_rows.add((cell, name))  # slices that its nodes read may be marked as its own
            whole = self.result(cell, op, rule, index, 0)
            forms = [self.rows(cell, node, op, whole, at) for at, node in enumerate(blocks)]
        if written := [node for node in nodes if node.meta.get("in_place")]:
            self.check_written(op, nodes, forms, written, cell)
        self.bound[cell, name] = forms
        return forms

    def check_written(
        self,
        op: Operation,
        nodes: Sequence[fx.Node],
        forms: Sequence[Form],
        written: Sequence[fx.Node],
        cell: Cell,
    ) -> None:
        """Check that what is written to an operand's memory has its shape and dtype: torch would
        convert it.
        """
        values: dict[fx.Node, Any] = {
            node: int(at.flat[0]) for node, at in self.graphs.offsets(cell).items()
        }
        for form in forms:
            for slot, node in form.operands.items():
                dtype = (
                    self.operations[op.operands[slot].name].results[op.operands[slot].index].dtype
                )
                values[node] = torch.empty(
                    self.expected_operand(op, cell, slot, form.rows).shape,
                    dtype=dtype,
                    device="meta",
                )
        for node in nodes:
            if node not in values:
                if any(x not in values for x in node.all_input_nodes):
                    raise Refused(f"{node.name} of {op} is written in place, and nothing reads it")
                args, kwargs = mapped_arguments(node, values.__getitem__)
                options = {k: "meta" if k == "device" else v for k, v in kwargs.items()}
                try:
                    values[node] = node.target(*args, **options)  # type: ignore[operator]
                except (IndexError, RuntimeError, TypeError, ValueError) as e:
                    raise Refused(f"{node.name} of {op} does not run: {e}") from None
            if node in written:
                before = values[node.args[0]]  # type: ignore[index]
                if (values[node].shape, values[node].dtype) != (before.shape, before.dtype):
                    raise Refused(
                        f"{node.name} of {op} is {_typed(values[node])}, and is written to a"
                        f" tensor that is {_typed(before)}"
                    )

    def own_code(self, cell: Cell, op: Operation, ports: Ports, nodes: Sequence[fx.Node]) -> Form:
        """The form of per-rank code (``ftp.local``): it reads its operands' parts and nothing else,
        and its results hold what its out specs say.
        """
        inside, offsets = set(nodes), self.graphs.offsets(cell)
        taking: dict[int, fx.Node] = {}
        for node in nodes:
            if (
                node.target in COLLECTIVES
                and node.target is not ALL_TO_ALL_ROWS
                and any(u.target is not c10d.wait_tensor.default for u in node.users)
            ):
                raise Refused(f"{node.name} of {op} is read before it has arrived (no wait_tensor)")
            if "takes" in node.meta and node.target is aten.contiguous.default:
                taking[node.meta["takes"]] = node.args[0]  # type: ignore[assignment]
            elif other := [x for x in node.all_input_nodes if x not in inside and x not in offsets]:
                raise Refused(f"{node.name} of {op} reads {other[0].name}, which it was not given")
            for at in node.meta.get("gives", ())[:1]:
                spec, pending = ports.results[at]
                index = self.parts.cut_by_spec(op.results[at].shape, spec, cell)
                self.result_maps[cell, node] = element_map(
                    self.key(Ref(op.name, at), cell),
                    index,
                    frozenset((axis, "sum") for axis in pending),
                )
        return Form(taking)

    def own_collective(self, cell: Cell, op: Operation, nodes: Sequence[fx.Node]) -> Form:
        """The form of a collective of per-rank code, or of the rank's index: it reads its operand's
        part, and its result is what the collective of that name gives.
        """
        rule = self.rule(op)
        index, _ = self.parts.factors(op, rule, cell)
        inside, offsets, taking = set(nodes), self.graphs.offsets(cell), {}
        for node in nodes:
            if "takes" in node.meta and node.target is aten.contiguous.default:
                taking[node.meta["takes"]] = node.args[0]
            elif other := [x for x in node.all_input_nodes if x not in inside and x not in offsets]:
                raise Refused(f"{node.name} of {op} reads {other[0].name}, which it was not given")
            for at in node.meta.get("gives", ())[:1]:
                if op.target is AXIS_INDEX:
                    self.check_index(cell, op, node)
                self.result_maps[cell, node] = self.result(cell, op, rule, index, at)
        return Form(taking)

    def check_index(self, cell: Cell, op: Operation, node: fx.Node) -> None:
        start: Any = node.args[1] if node.target is aten.full.default else None
        here = cell.at[self.parts.axes[op.args[0]].dim]
        given = self.graphs.offsets(cell).get(start)
        if given is None or (common_position(given),) != here:
            raise Refused(f"{node.name} is not the rank's index along {op.args[0]!r}")

    def rows(self, cell: Cell, node: fx.Node, op: Operation, result: ElementMap, at: int) -> Form:
        """The form of a node that computes a block of rows of an op, the ``at``-th that does."""
        expected = self.expected_operand(op, cell, 0)
        given: Any = node.args[0]
        held = self.map_of(cell, given)
        count = expected.shape[0] if expected.shape else 0
        if (
            isinstance(held, PackedValues)
            or not held.shape
            or not count
            or not result.shape
            or not held.shape[0]
            or count % held.shape[0]
        ):
            raise Refused(f"{node.name} = {node.target}{node.args} is not the local form of {op}")
        size = held.shape[0]
        found = [
            a for a in range(0, count, size) if is_same(held, slice_dim(expected, 0, a, a + size))
        ]
        # Rows without elements are any block's, and give zeros or nothing: they are in order.
        first = at * size if at * size in found else next(iter(found), None)
        if first is None:
            raise Refused(
                f"operand 0 of {op}, {given.name}, holds other elements than any block of rows"
                " that is expected"
            )
        rows, times = (first, first + size), result.shape[0]
        operands = {0: given}
        if node.target is aten.mm.default:
            operands[1] = node.args[1]
        if (size * times) % count or (first * times) % count:
            raise Refused(f"{node.name} = {node.target}{node.args} gives no whole rows of {op}")
        part = slice_dim(result, 0, first * times // count, (first + size) * times // count)
        shape: Any = node.args[1] if node.target is aten.reshape.default else part.shape
        if tuple(shape) != part.shape:
            raise Refused(f"{node.name} = {node.target}{node.args} is not the local form of {op}")
        self.result_maps[cell, node] = part
        return Form(operands, rows)

    def expected_operand(
        self, op: Operation, cell: Cell, slot: int, rows: tuple[int, int] | None = None
    ) -> ElementMap:
        """The element map that a rank's form of an op needs in an operand."""
        ref = op.operands[slot]
        if op.ports is not None:
            shape = self.operations[ref.name].results[ref.index].shape
            return element_map(
                self.key(ref, cell), self.parts.cut_by_spec(shape, op.ports.operands[slot], cell)
            )
        rule = self.rule(op)
        index, _ = self.parts.factors(op, rule, cell)
        shape = self.operations[ref.name].results[ref.index].shape
        expected = element_map(
            self.key(ref, cell),
            [
                self.parts.positions_along(dim, index, rule.sizes)
                if math.prod(rule.sizes[f] for f in dim) == size
                else self.parts.cut(size, self.cuts_of(op, dim), cell)
                for dim, size in zip(rule.operands[slot], shape, strict=True)
            ],
        )
        return expected if rows is None or slot else slice_dim(expected, 0, *rows)

    def cuts_of(self, op: Operation, dim: Dim) -> list[tuple[str, int, Any]]:
        """The cuts of a dim that an op gives another size: chunks of the size that it has."""
        claims = [claim for claim in op.claims if claim.factor in dim]
        if any((claim.outer, claim.inner, claim.zigzag) != (1, 1, False) for claim in claims):
            raise Refused(f"{op} is claimed to be cut within {dim}, whose size it changes")
        return [(claim.axis, 1, 1) for claim in claims]

    def result(
        self, cell: Cell, op: Operation, rule: BoundRule, index: Mapping[str, DimPart], at: int
    ) -> ElementMap:
        dims = rule.results[at]
        held = {f for dim in dims for f in dim}
        pending = {(axis, "sum") for axis in op.partial}
        cut = {claim.axis for claim in op.claims if claim.factor in held}
        for claim in op.claims:
            if claim.axis not in cut and (reduction := rule.pending[at].get(claim.factor)):
                pending.add((claim.axis, reduction))
        return element_map(
            self.key(Ref(op.name, at), cell),
            [self.parts.positions_along(dim, index, rule.sizes) for dim in dims],
            frozenset(pending),
        )

    def rule(self, op: Operation) -> BoundRule:
        if op.name not in self.rules:
            self.rules[op.name] = rule_of(op, self.operations)
        return self.rules[op.name]

    def key(self, ref: Ref, cell: Cell | None = None) -> str:
        """The name of the value that a reference stands for. In per-rank code each position along
        its axes has a value of its own, that of a cell.
        """
        found = self.key_in(self.names, ref)
        root = self.operations.get(found.rpartition(".")[0])
        if root is None or not (axes := self.parts.rank_axes[root.name]):
            return found
        assert cell is not None, ref
        at = [f"{axis}={cell.at[self.parts.axes[axis].dim][0]}" for axis in sorted(axes)]
        return f"{found}@{','.join(at)}"

    @cached_property
    def names(self) -> dict[str, str]:
        """Keys of values that are copies of others, or constants."""
        found: dict[str, str] = {}
        for op in self.operations.values():
            if op.target in COPIES:
                found[Ref(op.name).key] = self.key_in(found, op.operands[0])
            elif op.target in FILLS and op.results[0].shape == ():
                found[Ref(op.name).key] = constant(op.target, op.args, op.results[0].dtype)
        return found

    def key_in(self, names: Mapping[str, str], ref: Ref) -> str:
        return names.get(ref.key, ref.key)


def _typed(x: torch.Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}"
