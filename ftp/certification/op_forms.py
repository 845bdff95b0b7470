"""Op forms: the nodes of a rank's graph that compute an op, matched with its rule's local form."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import fx

from ftp.certification.all_sizes import WithoutValues
from ftp.certification.cells import Cell
from ftp.certification.certificate import Operation, Ref
from ftp.certification.collective_semantics import COLLECTIVES
from ftp.certification.data_movement import FILLS, constant
from ftp.certification.element_map import (
    ElementMap,
    common_position,
    element_map,
    is_same,
    pending_sums,
    slice_dim,
)
from ftp.certification.expected_parts import ExpectedParts
from ftp.certification.local_form import local_form, rule_of
from ftp.certification.op_matching import COPIES, Matcher
from ftp.certification.packed_values import PackedValues
from ftp.certification.rank_graphs import RankGraphs
from ftp.certification.unsound import Refused
from ftp.dataclass import dataclass
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
    """The nodes with which a rank computes an op, or a block of rows of its result.

    Attributes:
        operands: ``{operand: node that is read}``.
        rows: begin and end of the block in the first operand's rows; None for all rows.
    """

    operands: Mapping[int, fx.Node]
    rows: tuple[int, int] | None = None


class OpForms:
    """The forms of each op on each cell, each matched once.

    Args:
        map_of: the element map of a node.

    Attributes:
        result_maps: the element maps of matched results.
        in_rows: the ops that a cell computes in blocks of rows.
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
        """Match a rank's nodes of an op with the rule's local form: one form, or one for each block
        of rows.
        """
        if (cell, name) not in self.bound:
            op, nodes = self.operations[name], self.graphs.local_ops[cell.graph].get(name, [])
            is_collective = collective_axis(op.target, op.args) is not None
            if op.ports is not None or op.target is AXIS_INDEX or is_collective:
                self.bound[cell, name] = [self._of_per_rank_code(cell, op, nodes)]
            else:
                self.bound[cell, name] = self._matched(cell, op, nodes)
        return self.bound[cell, name]

    def _matched(self, cell: Cell, op: Operation, nodes: Sequence[fx.Node]) -> list[Form]:
        """The forms of an op that its rule computes: blocks of rows, or the local form."""
        rule = self.rule(op)
        index, cuts = self.parts.factors(op, rule, cell)
        results, places, starts = local_form(
            op, rule, index, cuts, self.graphs.device, self.graphs.certificate.groups
        )
        is_rowwise = len(results) == 1 and results[0].target in ROWWISE
        # The slices that blocks of rows read may carry the op's name too.
        blocks = [node for node in nodes if is_rowwise and node.target is results[0].target]
        if len(blocks) > 1:
            self.in_rows.add((cell, op.name))
            whole = self.result(cell, op, 0)
            forms = [self.rows(cell, node, op, whole, at) for at, node in enumerate(blocks)]
        else:
            matcher = Matcher(self.graphs.offsets(cell), starts)
            bound = self._match_results(cell, op, nodes, results, matcher)
            forms = [Form({slot: bound[p] for p, slot in places.items() if p in bound})]
        if written := [node for node in nodes if node.meta.get("in_place")]:
            self.check_written(op, nodes, forms, written, cell)
        return forms

    def _match_results(
        self,
        cell: Cell,
        op: Operation,
        nodes: Sequence[fx.Node],
        results: Sequence[fx.Node],
        matcher: Matcher,
    ) -> dict[fx.Node, fx.Node]:
        """Match each node that other ops read with a result of the local form, and return the
        rank's node for each node of that form.
        """
        inside = set(nodes)
        bound: dict[fx.Node, fx.Node] = {}
        taken: set[int] = set()
        for node in nodes:
            if all(u in inside for u in node.users) or node.target in COPIES:
                continue
            # Results may be computed alike, such as zeros where a rank's part is empty: the node
            # notes which result it gives.
            noted = [at for at in node.meta.get("gives", ()) if at in range(len(results))]
            left = [*noted, *(at for at in range(len(results)) if at not in taken), *sorted(taken)]
            for at in left:
                trial = dict(bound)
                if matcher.is_same(results[at], node, trial, {}):
                    bound = trial
                    taken.add(at)
                    self.result_maps[cell, node] = self.result(cell, op, at)
                    break
            else:
                raise _no_form(node, op)
        return bound

    def check_written(
        self,
        op: Operation,
        nodes: Sequence[fx.Node],
        forms: Sequence[Form],
        written: Sequence[fx.Node],
        cell: Cell,
    ) -> None:
        """Check that a result written to an operand's memory has the operand's shape and dtype:
        torch would convert it without an error.
        """
        values: dict[fx.Node, Any] = {
            node: self.without_values.number(at.item(0))
            for node, at in self.graphs.offsets(cell).items()
        }
        for form in forms:
            for slot, node in form.operands.items():
                ref = op.operands[slot]
                dtype = self.operations[ref.name].results[ref.index].dtype
                shape = self.expected_operand(op, cell, slot, form.rows).shape
                values[node] = self.without_values.tensor(shape, dtype)
        for node in nodes:
            if node not in values:
                if any(x not in values for x in node.all_input_nodes):
                    raise Refused(f"{node.name} of {op} is written in place, and nothing reads it")
                args, kwargs = mapped_arguments(node, values.__getitem__)
                try:
                    values[node] = self.without_values.run(node.target, args, kwargs)
                except (IndexError, RuntimeError, TypeError, ValueError) as e:
                    raise Refused(f"{node.name} of {op} does not run: {e}") from None
            if node in written:
                before = values[node.args[0]]  # type: ignore[index]
                made, memory = self._typed(values[node]), self._typed(before)
                if made != memory:
                    raise Refused(
                        f"{node.name} of {op} is {_written(*made)}, and is written to a"
                        f" tensor that is {_written(*memory)}"
                    )

    def _typed(self, x: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...]]:
        return x.dtype, self.without_values.shape(x)

    @cached_property
    def without_values(self) -> WithoutValues:
        return WithoutValues(self.graphs.certificate.sizes)

    def _of_per_rank_code(self, cell: Cell, op: Operation, nodes: Sequence[fx.Node]) -> Form:
        """The form of per-rank code (``ftp.local``), of a collective in it, or of the rank's index.
        Its nodes read the parts of its operands and nothing else. Its results hold what the out
        specs say, or what the collective of that name gives.
        """
        if op.ports is None:
            self.parts.factors(op, self.rule(op), cell)  # check the claims
        inside, offsets = set(nodes), self.graphs.offsets(cell)
        taking: dict[int, fx.Node] = {}
        for node in nodes:
            if (
                op.ports is not None
                and node.target in COLLECTIVES
                and node.target is not ALL_TO_ALL_ROWS
                and any(u.target is not c10d.wait_tensor.default for u in node.users)
            ):
                raise Refused(f"{node.name} of {op} is read before it has arrived (no wait_tensor)")
            if "takes" in node.meta and node.target is aten.contiguous.default:
                taking[node.meta["takes"]] = node.args[0]  # type: ignore[assignment]
            elif other := [x for x in node.all_input_nodes if x not in inside and x not in offsets]:
                raise Refused(f"{node.name} of {op} reads {other[0].name}, which it was not given")
            for at in node.meta.get("gives", ())[:1]:
                if op.target is AXIS_INDEX:
                    self.check_index(cell, op, node)
                self.result_maps[cell, node] = self.result(cell, op, at)
        return Form(taking)

    def check_index(self, cell: Cell, op: Operation, node: fx.Node) -> None:
        start: Any = node.args[1] if node.target is aten.full.default else None
        here = cell.at[self.parts.axes[op.args[0]].dim]
        given = self.graphs.offsets(cell).get(start)
        if given is None or (common_position(given),) != here:
            raise Refused(f"{node.name} is not the rank's index along {op.args[0]!r}")

    def rows(self, cell: Cell, node: fx.Node, op: Operation, result: ElementMap, at: int) -> Form:
        """The form of a node that computes a block of rows of an op, ``at``-th of such nodes."""
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
            raise _no_form(node, op)
        size = held.shape[0]
        found = [
            a for a in range(0, count, size) if is_same(held, slice_dim(expected, 0, a, a + size))
        ]
        # Rows without elements fit every block: assume the order of the nodes.
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
            raise _no_form(node, op)
        self.result_maps[cell, node] = part
        return Form(operands, rows)

    def expected_operand(
        self, op: Operation, cell: Cell, slot: int, rows: tuple[int, int] | None = None
    ) -> ElementMap:
        """The element map that an op needs in an operand, or in a block of its rows."""
        ref = op.operands[slot]
        shape = self.operations[ref.name].results[ref.index].shape
        if op.ports is not None:
            return element_map(
                self.key(ref, cell), self.parts.cut_by_spec(shape, op.ports.operands[slot], cell)
            )
        rule = self.rule(op)
        index, _ = self.parts.factors(op, rule, cell)
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
        """The cuts of an operand's dim whose size the op changes: chunks of the operand's size."""
        claims = [claim for claim in op.claims if claim.factor in dim]
        if any((claim.outer, claim.inner, claim.zigzag) != (1, 1, False) for claim in claims):
            raise Refused(f"{op} is claimed to be cut within {dim}, whose size it changes")
        return [(claim.axis, 1, 1) for claim in claims]

    def result(self, cell: Cell, op: Operation, at: int) -> ElementMap:
        """The element map of an op's result, by its claims or its out specs."""
        key = self.key(Ref(op.name, at), cell)
        if op.ports is not None:
            spec, pending = op.ports.results[at]
            index = self.parts.cut_by_spec(op.results[at].shape, spec, cell)
            return element_map(key, index, pending_sums(pending))
        rule = self.rule(op)
        index, _ = self.parts.factors(op, rule, cell)
        dims = rule.results[at]
        held = {f for dim in dims for f in dim}
        pending = set(pending_sums(op.partial))
        cut = {claim.axis for claim in op.claims if claim.factor in held}
        for claim in op.claims:
            if claim.axis not in cut and (reduction := rule.pending[at].get(claim.factor)):
                pending.add((claim.axis, reduction))
        parts = [self.parts.positions_along(dim, index, rule.sizes) for dim in dims]
        return element_map(key, parts, frozenset(pending))

    def rule(self, op: Operation) -> BoundRule:
        if op.name not in self.rules:
            self.rules[op.name] = rule_of(op, self.operations)
        return self.rules[op.name]

    def key(self, ref: Ref, cell: Cell | None = None) -> str:
        """The name of a value in element maps. In per-rank code the name has the cell's coordinates
        along the code's axes, since each rank has a value of its own.
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
        """Values that are copies of another value, or constants: their names in element maps."""
        found: dict[str, str] = {}
        for op in self.operations.values():
            if op.target in COPIES:
                found[Ref(op.name).key] = self.key_in(found, op.operands[0])
            elif op.target in FILLS and op.results[0].shape == ():
                found[Ref(op.name).key] = constant(op.target, op.args, op.results[0].dtype)
        return found

    def key_in(self, names: Mapping[str, str], ref: Ref) -> str:
        return names.get(ref.key, ref.key)


def _no_form(node: fx.Node, op: Operation) -> Refused:
    return Refused(f"{node.name} = {node.target}{node.args} is not the local form of {op}")


def _written(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"
