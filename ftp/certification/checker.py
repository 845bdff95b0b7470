"""An independent check that a program's collectives make every output right.

It reads the single-device program, the ranks' programs and the specs, with the layout that is
claimed for each op, and shares no code with what planned and partitioned them. What each rank's
tensors hold follows from the specs of the inputs; an op is right where its operands hold what its
sharding rule (which ``ftp.testing.check_rule`` proves) asks for, and where its local form is the
rule's; what stands between two ops is followed element by element, through the collectives of all
ranks.
"""

import itertools
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import fx
from torch.fx.node import map_arg

from ftp.certification.certificate import Certificate, Coordinate, Operation, Ports, Ref, Spec
from ftp.certification.collective_semantics import COLLECTIVES, Cell, Issued
from ftp.certification.data_movement import FILLS, MOVEMENTS, constant, filled, sliced
from ftp.certification.element_map import (
    Along,
    Held,
    Index,
    Part,
    Pending,
    Unsound,
    added,
    holding,
    is_same,
    number,
    slice_dim,
)
from ftp.certification.op_matching import COPIES, Matcher
from ftp.certification.packed_values import Row
from ftp.certification.purify import without_writes
from ftp.errors import CertificateError, join_failures
from ftp.rules.bind import bind, lookup
from ftp.rules.local_op import Cut, LocalOp, RankGraph, localize
from ftp.rules.notation import Dim, parse
from ftp.rules.rule import BoundRule, Call, Meta, Rule, replaced

aten = torch.ops.aten
c10d = torch.ops._c10d_functional
ROWWISE = (
    aten.mm.default,
    aten.reshape.default,
)  # of rows one below the other they give rows one below the other
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


@dataclass(frozen=True)
class Form:
    """A rank's form of an op.

    Attributes:
        operands: the nodes that it reads, by operand.
        rows: which rows of the first operand, if not all.
    """

    operands: Mapping[int, fx.Node]
    rows: tuple[int, int] | None = None


Reader = Callable[[Cell], fx.Node]


class _Failure(Unsound):
    """With all that there is to say, up to the rank."""


class Checker:
    """One check of one certificate; what has been found of each rank's tensors is kept."""

    def __init__(self, certificate: Certificate, *, is_each_alone: bool = False):
        self.certificate = c = certificate
        self.is_each_alone = is_each_alone
        self.axes = {name: Along(name, dim, n) for dim, (name, n) in enumerate(c.axes.items())}
        self.operations = {o.name: o for o in c.operations}
        self.inputs = [o for o in c.operations if o.target is None]
        self.rules: dict[str, BoundRule] = {}
        self.known: dict[tuple[Cell, fx.Node], Held | Row] = {}
        self.made: dict[tuple[Cell, fx.Node], Held] = {}
        self.bound: dict[tuple[Cell, str], list[Form]] = {}
        self.in_rows: set[tuple[Cell, str]] = set()
        self.graphs: list[fx.Graph] = []

    # What is checked, and where.

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
        for at, graph in enumerate(self.certificate.ranks.graphs):
            try:
                self.graphs.append(without_writes(graph, self.certificate.donated))
            except Unsound as e:
                yield f"{e}{self.where(self.first(at))}"
        if len(self.graphs) < len(issued):
            return
        for cell in self.cells:
            try:
                self.rank(cell)
            except _Failure as e:
                if len(list(cell.coordinates())) > 1 and len(self.certificate.ranks.at) <= FEW:
                    yield from Checker(
                        self.certificate, is_each_alone=True
                    ).failures()  # to name the rank
                    return
                yield f"{e}{self.among(cell)}"

    def pure_graphs(self) -> list[fx.Graph]:
        """The ranks' programs without writes to memory."""
        self.graphs = self.graphs or [
            without_writes(g, self.certificate.donated) for g in self.certificate.ranks.graphs
        ]
        return self.graphs

    def first(self, graph: int) -> Coordinate:
        return next(c for c, (g, _) in self.certificate.ranks.at.items() if g == graph)

    @cached_property
    def cells(self) -> list[Cell]:
        """All ranks, those together that have one program and parts of one shape; along an axis
        whatever the others' coordinates.
        """
        counts = [along.n for along in self.axes.values()]
        kinds: dict[Any, int] = {}
        kind = np.empty(counts, dtype=np.int64)
        for coordinate in itertools.product(*map(range, counts)):
            kind[coordinate] = kinds.setdefault(
                (self.certificate.ranks.at[coordinate][0], *self.lengths(coordinate)), len(kinds)
            )
        classes: list[list[tuple[int, ...]]] = []
        for dim, n in enumerate(counts):
            alike: dict[bytes, list[int]] = {}
            for i in range(n):
                alike.setdefault(kind.take(i, dim).tobytes(), []).append(i)
            classes.append(
                [(i,) for i in range(n)]
                if self.is_each_alone
                else [tuple(found) for found in alike.values()]
            )
        return [
            Cell(self.certificate.ranks.at[tuple(at[0] for at in together)][0], together)
            for together in itertools.product(*classes)
        ]

    @cached_property
    def sizes(self) -> list[tuple[Any, str]]:
        """The distinct sizes that are cut over an axis, as claimed."""
        found: dict[str, tuple[Any, str]] = {}

        def collect(size: Any, axis: str | None) -> None:
            if axis is not None:
                found.setdefault(f"{size} {axis}", (size, axis))
            for whole, inner, _ in () if isinstance(size, int) else size[1]:
                collect(whole, inner)

        for op in self.certificate.operations:
            for claim in op.claims:
                collect(claim.extent, claim.axis)
                collect(claim.outer, None)
                collect(claim.inner, None)
        return list(found.values())

    def lengths(self, coordinate: Coordinate) -> list[int]:
        return [
            self.chunk_at(self.size_at(size, coordinate), axis, coordinate)[1]
            for size, axis in self.sizes
        ]

    def where(self, coordinate: Coordinate) -> str:
        return (
            " on the rank at ("
            + ", ".join(f"{a} {i}" for a, i in zip(self.axes, coordinate, strict=True))
            + ")"
        )

    def among(self, cell: Cell) -> str:
        if all(len(at) == 1 for at in cell.at):
            return self.where(next(cell.coordinates()))
        ranges = [", ".join(map(str, at[:3])) + (", ..." if len(at) > 3 else "") for at in cell.at]
        return (
            " on one of the ranks at ("
            + ", ".join(f"{a} {r}" for a, r in zip(self.axes, ranges, strict=True))
            + ")"
        )

    def mismatched_collectives(self, issued: Sequence[Sequence[fx.Node]]) -> Iterator[str]:
        """Ranks that issue other collectives than the first: they would wait for each other for
        ever.
        """
        first = [self.call(n) for n in issued[0]]
        for graph, nodes in enumerate(issued[1:], 1):
            calls = [self.call(n) for n in nodes]
            if calls != first:
                at = next(
                    (i for i, (a, b) in enumerate(zip(first, calls, strict=False)) if a != b),
                    min(len(first), len(calls)),
                )
                mine, theirs = (
                    (calls[at : at + 1] or ["none"])[0],
                    (first[at : at + 1] or ["none"])[0],
                )
                yield (
                    f"collective {at + 1} is {mine}{self.where(self.first(graph))}, and {theirs}"
                    " on the first"
                )

    def call(self, node: fx.Node) -> str:
        """What ranks must agree on; sizes only with those that a rank talks to."""
        group: Any = node.args[-1]
        options = ", ".join(str(a) for a in node.args[1:-1] if not isinstance(a, list | tuple))
        return (
            f"{node.target.__name__}({options}) over"
            f" {self.certificate.groups.get(group, group)!r}"  # type: ignore[union-attr]
        )

    def rank(self, cell: Cell) -> None:
        for name in self.local_ops[cell.graph]:
            op = self.operations[name]
            forms = self.bind(cell, name)
            for at in range(len(forms)):
                for slot in forms[at].operands:
                    due = self.due(op, cell, slot, forms[at].rows)
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
            due = holding(self.key(ref), self.cut_by_spec(shape, spec, cell))
            self.require(
                cell, lambda c, at=at: self.returned(c)[at], due, frozenset(), f"output {at}"
            )

    def due(
        self, op: Operation, cell: Cell, slot: int, rows: tuple[int, int] | None = None
    ) -> Held:
        """What a rank's form of an op must find in an operand."""
        ref = op.operands[slot]
        if op.ports is not None:
            shape = self.operations[ref.name].results[ref.index].shape
            return holding(self.key(ref), self.cut_by_spec(shape, op.ports.operands[slot], cell))
        rule = self.rule(op)
        index, _ = self.factors(op, rule, cell)
        due = holding(
            self.key(ref), [_of_dim(dim, index, rule.sizes) for dim in rule.operands[slot]]
        )
        return due if rows is None or slot else slice_dim(due, 0, *rows)

    def operand(self, cell: Cell, name: str, at: int, slot: int) -> fx.Node:
        forms = self.bind(cell, name)
        if at >= len(forms) or slot not in forms[at].operands:
            raise Unsound("the ranks along an axis compute other parts of it")
        return forms[at].operands[slot]

    def returned(self, cell: Cell) -> Sequence[fx.Node]:
        return next(n for n in self.graphs[cell.graph].nodes if n.op == "output").args[0]  # type: ignore[return-value]

    @cached_property
    def local_ops(self) -> list[dict[str, list[fx.Node]]]:
        """Per graph the nodes that say they belong to each op of the program."""
        found: list[dict[str, list[fx.Node]]] = []
        for graph in self.pure_graphs():
            found.append({})
            for node in graph.nodes:
                if node.op == "call_function" and self.is_operation(node):
                    found[-1].setdefault(node.meta["origin"], []).append(node)
        return found

    def is_operation(self, node: fx.Node) -> bool:
        found = self.operations.get(node.meta.get("origin", ""))
        return found is not None and found.target is not None and found.target not in COPIES

    @cached_property
    def collectives(self) -> list[list[fx.Node]]:
        return [[n for n in g.nodes if n.target in COLLECTIVES] for g in self.pure_graphs()]

    @cached_property
    def position(self) -> dict[fx.Node, int]:
        return {n: i for nodes in self.collectives for i, n in enumerate(nodes)}

    @cached_property
    def placeholders(self) -> list[dict[fx.Node, int]]:
        return [
            {n: i for i, n in enumerate(g.nodes) if n.op == "placeholder"}
            for g in self.pure_graphs()
        ]

    @cached_property
    def names(self) -> dict[str, str]:
        """Values that are others, or constants: by what they are."""
        found: dict[str, str] = {}
        for op in self.certificate.operations:
            if op.target in COPIES:
                found[Ref(op.name).key] = self.key_in(found, op.operands[0])
            elif op.target in FILLS and op.results[0].shape == ():
                found[Ref(op.name).key] = constant(op.target, op.args, op.results[0].dtype)
        return found

    def key_in(self, names: Mapping[str, str], ref: Ref) -> str:
        return names.get(ref.key, ref.key)

    def key(self, ref: Ref) -> str:
        return self.key_in(self.names, ref)

    def offsets(self, cell: Cell) -> dict[fx.Node, Index]:
        """The inputs that are numbers, and what they are on each rank of a cell: an array with a
        dim for each axis.
        """
        if cell not in self._offsets:
            of_ranks = np.array(
                [self.certificate.ranks.at[c][1] for c in cell.coordinates()], dtype=np.int64
            )
            of_ranks = of_ranks.reshape(*map(len, cell.at), -1)
            nodes = list(self.placeholders[cell.graph])[len(self.inputs) :]
            if of_ranks.shape[-1] != len(nodes):
                raise _Failure(
                    f"{of_ranks.shape[-1]} offsets are given to a program that takes {len(nodes)}"
                )
            self._offsets[cell] = {node: _shrunk(of_ranks[..., i]) for i, node in enumerate(nodes)}
        return self._offsets[cell]

    @cached_property
    def _offsets(self) -> dict[Cell, dict[fx.Node, Index]]:
        return {}

    # One op of one rank.

    def bind(self, cell: Cell, name: str) -> list[Form]:
        """A rank's forms of an op: one, or several for rows of it. That its nodes are the rule's
        local form is checked here.
        """
        if (cell, name) in self.bound:
            return self.bound[cell, name]
        op, nodes = self.operations[name], self.local_ops[cell.graph].get(name, [])
        if op.ports is not None:
            self.bound[cell, name] = [self.own_code(cell, op, op.ports, nodes)]
            return self.bound[cell, name]
        rule = self.rule(op)
        index, cuts = self.factors(op, rule, cell)
        results, places, starts = self.local_form(op, rule, index, cuts)
        matcher = Matcher(self.offsets(cell), starts)
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
            # Results of one form, such as zeros where a rank's part is empty, are what they say
            # they are.
            noted = [at for at in node.meta.get("gives", ()) if at in range(len(results))]
            left = [*noted, *(at for at in range(len(results)) if at not in taken), *sorted(taken)]
            for at in left:
                trial = dict(bound)
                if matcher.is_same(results[at], node, trial, {}):
                    bound = trial
                    taken.add(at)
                    self.made[cell, node] = self.result(op, rule, index, at)
                    break
            else:
                raise _Failure(
                    f"{node.name} = {node.target}{node.args} is not the local form of {op}"
                )
        forms = [Form({slot: bound[p] for p, slot in places.items() if p in bound})]
        if len(blocks) > 1:
            self.in_rows.add(
                (cell, name)
            )  # what its nodes read may be slices that are counted as its own
            forms = [self.rows(cell, node, op, self.result(op, rule, index, 0)) for node in blocks]
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
        """What is written to an operand's memory must be of its shape and dtype: what does not
        fit would be converted.
        """
        values: dict[fx.Node, Any] = {
            node: int(at.flat[0]) for node, at in self.offsets(cell).items()
        }
        for form in forms:
            for slot, node in form.operands.items():
                dtype = (
                    self.operations[op.operands[slot].name].results[op.operands[slot].index].dtype
                )
                values[node] = torch.empty(
                    self.due(op, cell, slot, form.rows).shape, dtype=dtype, device="meta"
                )
        for node in nodes:
            if node not in values:
                args, kwargs = map_arg((node.args, dict(node.kwargs)), values.__getitem__)  # type: ignore[misc]
                values[node] = node.target(
                    *args, **{k: "meta" if k == "device" else v for k, v in kwargs.items()}
                )  # type: ignore[operator]
            if node in written:
                before = values[node.args[0]]  # type: ignore[index]
                if (values[node].shape, values[node].dtype) != (before.shape, before.dtype):
                    raise _Failure(
                        f"{node.name} of {op} is {_typed(values[node])}, and is written to a"
                        f" tensor that is {_typed(before)}"
                    )

    def own_code(self, cell: Cell, op: Operation, ports: Ports, nodes: Sequence[fx.Node]) -> Form:
        """Per-rank code: it takes its operands' parts and nothing else, and gives what its user
        says.
        """
        inside, offsets = set(nodes), self.offsets(cell)
        taking: dict[int, fx.Node] = {}
        for node in nodes:
            if node.target in COLLECTIVES and any(
                u.target is not c10d.wait_tensor.default for u in node.users
            ):
                raise _Failure(
                    f"{node.name} of {op} is read before it has arrived (no wait_tensor)"
                )
            if "takes" in node.meta and node.target is aten.contiguous.default:
                taking[node.meta["takes"]] = node.args[0]  # type: ignore[assignment]
            elif other := [x for x in node.all_input_nodes if x not in inside and x not in offsets]:
                raise _Failure(f"{node.name} of {op} reads {other[0].name}, which it was not given")
            for at in node.meta.get("gives", ())[:1]:
                spec, pending = ports.results[at]
                index = self.cut_by_spec(op.results[at].shape, spec, cell)
                self.made[cell, node] = holding(
                    self.key(Ref(op.name, at)), index, frozenset((axis, "sum") for axis in pending)
                )
        return Form(taking)

    def rows(self, cell: Cell, node: fx.Node, op: Operation, result: Held) -> Form:
        """A node that computes some rows of an op."""
        due = self.due(op, cell, 0)
        given: Any = node.args[0]
        held = self.held(cell, given)
        count = due.shape[0] if due.shape else 0
        if (
            isinstance(held, Row)
            or not held.shape
            or not count
            or not result.shape
            or not held.shape[0]
            or count % held.shape[0]
        ):
            raise _Failure(f"{node.name} = {node.target}{node.args} is not the local form of {op}")
        size = held.shape[0]
        first = next(
            (a for a in range(0, count, size) if is_same(held, slice_dim(due, 0, a, a + size))),
            None,
        )
        if first is None:
            raise _Failure(
                f"operand 0 of {op}, {given.name}, holds other elements than any rows of what is"
                " due"
            )
        rows, times = (first, first + size), result.shape[0]
        operands = {0: given}
        if node.target is aten.mm.default:
            operands[1] = node.args[1]  # type: ignore[assignment]
        if (size * times) % count or (first * times) % count:
            raise _Failure(f"{node.name} = {node.target}{node.args} gives no whole rows of {op}")
        part = slice_dim(result, 0, first * times // count, (first + size) * times // count)
        if node.target is aten.reshape.default and tuple(node.args[1]) != part.shape:  # type: ignore[arg-type]
            raise _Failure(f"{node.name} = {node.target}{node.args} is not the local form of {op}")
        self.made[cell, node] = part
        return Form(operands, rows)

    def rule(self, op: Operation) -> BoundRule:
        if op.name not in self.rules:
            self.rules[op.name] = _rule_of(op, self.operations)
        return self.rules[op.name]

    def factors(
        self, op: Operation, rule: BoundRule, cell: Cell
    ) -> tuple[dict[str, Index], dict[str, list[Cut]]]:
        """Per factor the positions that each rank holds, as claimed, and the claims in numbers; the
        claims are checked against the rule.

        Where a cut begins is an array over the ranks, if it differs."""
        index = {f: self.whole(size) for f, size in rule.sizes.items()}
        cuts: dict[str, list[Cut]] = {}
        cut_axes: dict[str, str] = {}
        for claim in op.claims:
            if claim.axis in cut_axes:
                raise _Failure(f"{op} is claimed to be cut twice over {claim.axis}")
            if claim.factor in rule.whole or claim.factor not in rule.sizes:
                raise _Failure(
                    f"{op} is claimed to be cut along {claim.factor}, which its rule {rule} keeps"
                    " whole"
                )
            cut_axes[claim.axis] = claim.factor
            outer, extent, inner = (
                self.size(s, cell) for s in (claim.outer, claim.extent, claim.inner)
            )
            held = index[claim.factor]
            if outer * extent * inner != held.shape[-1]:
                raise _Failure(
                    f"{op} is claimed to be cut in {outer} x {extent} x {inner} of {held.shape[-1]}"
                )
            start, length = self.chunk(extent, claim.axis, cell)
            index[claim.factor] = self.part(held, outer, extent, inner, start, length)
            cuts.setdefault(claim.factor, []).append(Cut(outer, extent, inner, start, length))  # type: ignore[arg-type]
        for axis, slots in op.partial.items():
            if axis in cut_axes:
                raise _Failure(
                    f"{op} is cut over {axis}, and its operands {slots} are pending over it"
                )
            if tuple(sorted(slots)) not in {tuple(sorted(g)) for g in rule.linear}:
                raise _Failure(
                    f"{op} is not linear in its operands {slots} together, which are pending over"
                    f" {axis}"
                )
        return index, cuts

    def whole(self, size: int) -> Index:
        if size not in self._wholes:
            self._wholes[size] = np.arange(size).reshape(*(1,) * len(self.axes), size)
        return self._wholes[size]

    @cached_property
    def _wholes(self) -> dict[int, Index]:
        return {}

    def part(
        self, held: Index, outer: int, extent: int, inner: int, start: Index, length: int
    ) -> Index:
        """The ranks' parts of what they hold; computed once for equal questions."""
        key = (id(held), outer, extent, inner, start.tobytes(), start.shape, length)
        if key not in self._parts:
            seen = held.reshape(*held.shape[:-1], outer, extent, inner)
            if (first := number(start)) is not None:
                found = seen[..., first : first + length, :]
            else:
                places = start.reshape(*start.shape, 1, 1, 1) + np.arange(length).reshape(length, 1)
                found = np.take_along_axis(seen, places, -2)
            self._parts[key] = held, found.reshape(*found.shape[:-3], -1)
        return self._parts[key][1]

    @cached_property
    def _parts(self) -> dict[Any, tuple[Index, Index]]:
        return {}

    def result(self, op: Operation, rule: BoundRule, index: Mapping[str, Index], at: int) -> Held:
        dims = rule.results[at]
        held = {f for dim in dims for f in dim}
        pending = {(axis, "sum") for axis in op.partial}
        for claim in op.claims:
            if claim.factor not in held and (reduction := rule.pending[at].get(claim.factor)):
                pending.add((claim.axis, reduction))
        return holding(
            self.key(Ref(op.name, at)),
            [_of_dim(dim, index, rule.sizes) for dim in dims],
            frozenset(pending),
        )

    def local_form(
        self,
        op: Operation,
        rule: BoundRule,
        index: Mapping[str, Index],
        cuts: Mapping[str, list[Cut]],
    ):
        """The rule's local form as a graph of its own: its results, which of its inputs is which
        operand, and where cuts begin.
        """
        graph = RankGraph()
        places: dict[fx.Node, int] = {}
        starts: dict[fx.Node, Index] = {}

        def place(_: Ref) -> fx.Node:
            node = graph.placeholder(f"operand_{len(places)}")
            places[node] = len(places)
            return node

        def begin(cut: Cut) -> Cut:
            node = graph.placeholder(f"start_{len(starts)}")
            starts[node] = cut.start  # type: ignore[assignment]
            return replace(cut, start=node)

        args, kwargs = replaced(tuple(op.args), Ref, place), replaced(dict(op.kwargs), Ref, place)
        sizes = {f: i.shape[-1] for f, i in index.items()}
        begun = {f: list(map(begin, found)) for f, found in cuts.items()}
        made = localize(LocalOp(graph, op.target, args, kwargs, rule, sizes, begun, self.device))
        if isinstance(made, tuple):
            results = list(made)
        elif len(op.results) > 1 or _returns_tuple(op.target):
            results = [
                graph.call_function(operator.getitem, (made, i)) for i in range(len(op.results))
            ]
        else:
            results = [made]
        return results, places, starts

    @cached_property
    def device(self) -> torch.device:
        for graph in self.certificate.ranks.graphs:
            for node in graph.nodes:
                if isinstance(found := node.kwargs.get("device"), torch.device):
                    return found
        return torch.device("cpu")

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
            raise e if isinstance(e, _Failure) else _Failure(f"{what} {e}") from None
        if due.is_empty and held.shape == due.shape:
            return
        if held.value != due.value:
            raise _Failure(
                f"{what} is {held.value.rsplit('.', 1)[0]!r}; due is"
                f" {due.value.rsplit('.', 1)[0]!r}"
            )
        if held.shape != due.shape:
            raise _Failure(f"{what} is of shape {held.shape}; due is {due.shape}")
        if not is_same(held, due):
            raise _Failure(f"{what} holds other elements than are due")

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
            [Part(c.at[along.dim], self.summed(c, at, axes[1:])) for c in self.along(cell, along)],
            along,
            "sum",
        )

    def along(self, cell: Cell, along: Along) -> list[Cell]:
        """The cells that differ from one in their coordinates on one axis only."""
        key = (along.dim, cell.at[: along.dim], cell.at[along.dim + 1 :])
        return self._columns[key]

    @cached_property
    def _columns(self) -> dict[Any, list[Cell]]:
        found: dict[Any, list[Cell]] = {}
        for cell in self.cells:
            for dim in range(len(self.axes)):
                found.setdefault((dim, cell.at[:dim], cell.at[dim + 1 :]), []).append(cell)
        return found

    def held(self, cell: Cell, node: fx.Node) -> Held | Row:
        key = (cell, node)
        if key in self.made:
            return self.made[key]
        if key not in self.known:
            self.known[key] = self.find(cell, node)
        return self.known[key]

    def find(self, cell: Cell, node: fx.Node) -> Held | Row:
        if node.op == "placeholder":
            at = self.placeholders[cell.graph][node]
            if at >= len(self.inputs):
                raise Unsound("an offset is taken for a tensor")
            op = self.inputs[at]
            return holding(Ref(op.name).key, self.cut_by_spec(op.results[0].shape, op.spec, cell))
        if self.is_operation(node):
            if (cell, node.meta["origin"]) not in self.in_rows:
                self.bind(cell, node.meta["origin"])
            if (cell, node) in self.made:
                return self.made[cell, node]
        if node.target is c10d.wait_tensor.default:
            issued: Any = node.args[0]
            if issued.target not in COLLECTIVES:
                raise Unsound("it waits for what is no collective")
            return self.received(cell, issued)
        if node.target in COLLECTIVES:
            raise Unsound("it is read before it has arrived (no wait_tensor)")
        if node.target is operator.getitem:
            return self.parts(cell, node.args[0])[node.args[1]]  # type: ignore[index]
        if node.target in FILLS and node.target is not aten.zeros_like.default:
            return filled(node)
        step = MOVEMENTS.get(node.target)
        if step is None:
            raise Unsound(f"{node.target} belongs to no op of the program, and moves nothing")
        offsets = self.offsets(cell)
        args = map_arg(node.args, lambda n: offsets[n] if n in offsets else self.held(cell, n))  # type: ignore[arg-type]
        try:
            return step(*args)  # type: ignore[misc]
        except (IndexError, TypeError, ValueError, AttributeError):
            raise Unsound(f"{node.target}{node.args} does not fit what it is given") from None

    def parts(self, cell: Cell, node: Any) -> Sequence[Held | Row]:
        if node.target is not aten.split_with_sizes.default:
            raise Unsound(f"{node.target} belongs to no op of the program, and moves nothing")
        if (cell, node) not in self._split:
            x, (sizes, *rest) = self.held(cell, node.args[0]), node.args[1:]
            dim: Any = rest[0] if rest else 0
            if sum(sizes) != x.shape[dim]:
                raise Unsound(f"{x.shape[dim]} are split into {sum(sizes)}")
            ends = np.cumsum(sizes).tolist()
            self._split[cell, node] = [
                sliced(x, dim, end - size, end) for size, end in zip(sizes, ends, strict=True)
            ]
        return self._split[cell, node]

    @cached_property
    def _split(self) -> dict[Any, Sequence[Held | Row]]:
        return {}

    def received(self, cell: Cell, node: fx.Node) -> Held | Row:
        axes = self.certificate.groups.get(node.args[-1])  # type: ignore[arg-type]
        if axes is None:
            raise Unsound(
                f"its collective runs over {node.args[-1]!r}, which is no axis of the mesh"
            )
        at = self.position[node]

        def issued(there: Cell) -> fx.Node:
            found = self.collectives[there.graph]
            if (
                at >= len(found)
                or self.call(found[at]) != self.call(node)
                or found[at].args[1:-1] != node.args[1:-1]
            ):
                raise Unsound(
                    f"collective {at + 1}{self.where(next(there.coordinates()))} is another one"
                )
            return found[at]

        def sent(there: Cell) -> Held | Row:
            return self.held(there, issued(there).args[0])  # type: ignore[arg-type]

        return COLLECTIVES[node.target](
            Issued(cell, sent, self.along, [self.axes[a] for a in axes]), *node.args[1:-1]
        )

    # Where parts begin.

    def cut_by_spec(self, shape: Sequence[int], spec: Spec, cell: Cell) -> list[Index]:
        found = []
        for dim, size in enumerate(shape):
            cuts = spec[dim] if dim < len(spec) else ()
            if not cuts:
                found.append(self.whole(int(size)))
                continue
            key = (cell, int(size), cuts)
            if key not in self._cuts:
                self._cuts[key] = self.cut(int(size), cuts, cell)
            found.append(self._cuts[key])
        return found

    @cached_property
    def _cuts(self) -> dict[Any, Index]:
        return {}

    def cut(self, size: int, cuts: Sequence[tuple[str, int, Any]], cell: Cell) -> Index:
        """The positions that each rank of a cell holds of a dim."""
        dims = {self.axes[axis].dim for axis, _, _ in cuts}
        ranges = [at if dim in dims else at[:1] for dim, at in enumerate(cell.at)]
        rows = []
        for coordinate in itertools.product(*ranges):
            index = np.arange(size)
            for axis, unit, packs in cuts:
                sizes = [len(index) // packs] * packs if isinstance(packs, int) else packs
                ends = np.cumsum(sizes).tolist()
                index = np.concatenate(
                    [
                        self.units(index[end - s : end], axis, unit, coordinate)
                        for s, end in zip(sizes, ends, strict=True)
                    ]
                )
            rows.append(index)
        if len({len(r) for r in rows}) > 1:
            raise Unsound("ranks with one program hold parts of different sizes")
        return np.stack(rows).reshape(*map(len, ranges), -1)

    def units(self, index: Index, axis: str, unit: int, coordinate: Coordinate) -> Index:
        """A rank's share of whole units; neighbours share one where the ranks are a multiple of
        the units.
        """
        count, n = -(-len(index) // unit), self.axes[axis].n
        if unit > 1 and 0 < count < n and n % count == 0:
            start, length = coordinate[self.axes[axis].dim] // (n // count), 1
        else:
            start, length = self.chunk_at(count, axis, coordinate)
        return index[start * unit : (start + length) * unit]

    def chunk_at(self, size: int, axis: str, coordinate: Coordinate) -> tuple[int, int]:
        """Start and length of a rank's chunk, as ``torch.chunk`` cuts: of one length, the last
        ones shorter or empty.
        """
        length = math.ceil(size / self.axes[axis].n)
        start = min(coordinate[self.axes[axis].dim] * length, size)
        return start, min(length, size - start)

    def chunk(self, size: int, axis: str, cell: Cell) -> tuple[Index, int]:
        """Where the chunks of a cell's ranks start, and their one length."""
        key = (cell, size, axis)
        if key not in self._chunks:
            along = self.axes[axis]
            found = [self.chunk_at(size, axis, (0,) * along.dim + (i,)) for i in cell.at[along.dim]]
            if len({length for _, length in found}) > 1:
                raise _Failure(
                    f"ranks with one program hold chunks of different sizes of {size} over {axis}"
                )
            shape = [len(found) if dim == along.dim else 1 for dim in range(len(self.axes))]
            self._chunks[key] = np.array([start for start, _ in found]).reshape(shape), found[0][1]
        return self._chunks[key]

    @cached_property
    def _chunks(self) -> dict[Any, tuple[Index, int]]:
        return {}

    def size(self, size: Any, cell: Cell) -> int:
        if isinstance(size, int):
            return size
        const, chunks = size
        return const * math.prod(
            self.chunk(self.size(whole, cell), axis, cell)[1] for whole, axis, _ in chunks
        )

    def size_at(self, size: Any, coordinate: Coordinate) -> int:
        if isinstance(size, int):
            return size
        const, chunks = size
        return const * math.prod(
            self.chunk_at(self.size_at(whole, coordinate), axis, coordinate)[1]
            for whole, axis, _ in chunks
        )


def _typed(x: torch.Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}"


def _shrunk(of_ranks: Index) -> Index:
    """Without the dims along which nothing changes."""
    for dim in range(of_ranks.ndim):
        first = of_ranks.take([0], dim)
        if (of_ranks == first).all():
            of_ranks = first
    return of_ranks


def _of_dim(dim: Dim, index: Mapping[str, Index], sizes: Mapping[str, int]) -> Index:
    """Positions along a dim that is made of factors, major to minor."""
    if len(dim) == 1:
        return index[dim[0]]
    lead = next(iter(index.values())).ndim - 1 if index else 0
    found = np.zeros((1,) * (lead + 1), dtype=np.int64)
    for factor in dim:
        both = found[..., :, None] * sizes[factor] + index[factor][..., None, :]
        found = both.reshape(*both.shape[:-2], -1)
    return found


def _rule_of(op: Operation, operations: Mapping[str, Operation]) -> BoundRule:
    def meta(ref: Ref) -> Meta:
        return operations[ref.name].results[ref.index]

    call = Call(
        op.target,
        replaced(tuple(op.args), Ref, meta),
        replaced(dict(op.kwargs), Ref, meta),
        op.results,
    )
    found = lookup(call)
    if found is not None:
        return found
    if op.found:
        return bind(
            Rule(parse(op.found), op.linear),
            [m.shape for m in call.operands],
            [m.shape for m in op.results],
            str(op.target),
        )
    names = iter(range(10**6))
    dims = [tuple((f"whole{next(names)}",) for _ in m.shape) for m in (*call.operands, *op.results)]
    sizes = {
        f: int(s)
        for ds, m in zip(dims, (*call.operands, *op.results), strict=True)
        for (f,), s in zip(ds, m.shape, strict=True)
    }
    n = len(call.operands)
    return BoundRule(
        tuple(dims[:n]),
        tuple(dims[n:]),
        frozenset(sizes),
        ({},) * len(op.results),
        (),
        sizes,
        None,
        False,
    )


def _returns_tuple(target: Any) -> bool:
    returns = target._schema.returns
    return len(returns) > 1 or (len(returns) == 1 and isinstance(returns[0].type, torch.ListType))
