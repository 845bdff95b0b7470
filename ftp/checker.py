"""An independent check that a program's collectives make every output right.

It reads the single-device program, the ranks' programs and the specs, with the layout that is claimed for each op, and shares no code with
what planned and partitioned them. What each rank's tensors hold follows from the specs of the inputs; an op is right where its operands
hold what its sharding rule (which ``ftp.testing.check_rule`` proves) asks for, and where its local form is the rule's; what stands between
two ops is followed element by element, through the collectives of all ranks.
"""

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from torch import fx
from torch.fx.node import map_arg

from ftp.certificate import Certificate, Coordinate, Operation, Ref, Spec
from ftp.errors import CertificateError, join_failures
from ftp.holding import (
    Held,
    Index,
    Pending,
    Unsound,
    added,
    concatenated,
    holding,
    is_same,
    joined,
    pad_dim,
    parts_of,
    permute,
    reshape,
    slice_dim,
    zeros_like,
)
from ftp.localize import Cut, LocalOp, localize
from ftp.notation import Dim
from ftp.registry import BoundRule, Call, Meta, lookup, replaced

aten = torch.ops.aten
c10d = torch.ops._c10d_functional
ALL_RANKS = 64  # of a larger mesh, the ranks at its corners are checked, with all that they receive


def check(certificate: Certificate) -> Certificate:
    """The certificate itself, if every output of every rank is right.

    On more than ``ALL_RANKS`` ranks the first, middle and last of those with equal programs are checked, with all that they receive.

    Raises:
        CertificateError: with each value that is wrong, on which rank, and why.
    """
    failures = list(dict.fromkeys(Checker(certificate).failures()))
    if failures:
        raise CertificateError(join_failures(failures))
    return certificate


Reader = Callable[[Coordinate], fx.Node]


class _Failure(Unsound):
    """With all that there is to say, up to the rank."""


class Checker:
    """One check of one certificate; what has been found of each rank's tensors is kept."""

    def __init__(self, certificate: Certificate):
        self.certificate = c = certificate
        self.axes = dict(c.axes)
        self.operations = {o.name: o for o in c.operations}
        self.rules: dict[str, BoundRule] = {}
        self.known: dict[tuple[Coordinate, fx.Node], Held] = {}
        self.collectives = [[n for n in g.nodes if n.target in COLLECTIVES] for g in c.ranks.graphs]
        self.position = {n: i for nodes in self.collectives for i, n in enumerate(nodes)}
        self.made: dict[tuple[Coordinate, fx.Node], Held] = {}
        self.bound: dict[tuple[Coordinate, str], dict[int, fx.Node]] = {}

    # What is checked, and where.

    def failures(self) -> Iterator[str]:
        yield from self.mismatched_collectives()
        for coordinate in self.coordinates():
            try:
                self.rank(coordinate)
            except _Failure as e:
                yield f"{e}{self.where(coordinate)}"

    def coordinates(self) -> list[Coordinate]:
        every = list(self.certificate.ranks.at)
        if len(every) <= ALL_RANKS:
            return every
        graphs: dict[int, list[Coordinate]] = {}
        for coordinate in every:
            graphs.setdefault(self.certificate.ranks.at[coordinate][0], []).append(coordinate)
        return list(dict.fromkeys(c for found in graphs.values() for c in (found[0], found[len(found) // 2], found[-1])))

    def where(self, coordinate: Coordinate) -> str:
        return " on the rank at (" + ", ".join(f"{a} {i}" for a, i in zip(self.axes, coordinate, strict=True)) + ")"

    def mismatched_collectives(self) -> Iterator[str]:
        """Ranks that issue other collectives than the first: they would wait for each other for ever."""
        first = [self.call(n) for n in self.collectives[0]]
        for graph, nodes in enumerate(self.collectives[1:], 1):
            calls = [self.call(n) for n in nodes]
            if calls != first:
                at = next((i for i, (a, b) in enumerate(zip(first, calls, strict=False)) if a != b), min(len(first), len(calls)))
                coordinate = next(c for c, (g, _) in self.certificate.ranks.at.items() if g == graph)
                mine, theirs = (calls[at : at + 1] or ["none"])[0], (first[at : at + 1] or ["none"])[0]
                yield f"collective {at + 1} is {mine}{self.where(coordinate)}, and {theirs} on the first"

    def call(self, node: fx.Node) -> str:
        """What ranks must agree on; sizes only with those that a rank talks to."""
        group: Any = node.args[-1]
        options = ", ".join(str(a) for a in node.args[1:-1] if not isinstance(a, list | tuple))
        return f"{node.target.__name__}({options}) over {self.certificate.groups.get(group, group)!r}"  # type: ignore[union-attr]

    def rank(self, coordinate: Coordinate) -> None:
        number, _ = self.certificate.ranks.at[coordinate]
        for name in self.local_ops[number]:
            op = self.operations[name]
            rule = self.rule(op)
            index, _ = self.factors(op, rule, coordinate)
            for slot in self.bind(coordinate, name):
                due = holding(op.operands[slot].key, [_of_dim(dim, index, rule.sizes) for dim in rule.operands[slot]])
                pending = frozenset((axis, "sum") for axis, slots in op.partial.items() if slot in slots)
                self.require(coordinate, lambda c, name=name, slot=slot: self.bind(c, name)[slot], due, pending, f"operand {slot} of {op}")
        for at, (ref, spec) in enumerate(self.certificate.outputs):
            shape = self.operations[ref.name].results[ref.index].shape
            due = holding(ref.key, self.cut_by_spec(shape, spec, coordinate))
            self.require(coordinate, lambda c, at=at: self.returned(c)[at], due, frozenset(), f"output {at}")

    def returned(self, coordinate: Coordinate) -> Sequence[fx.Node]:
        graph = self.certificate.ranks.graphs[self.certificate.ranks.at[coordinate][0]]
        return next(n for n in graph.nodes if n.op == "output").args[0]  # type: ignore[return-value]

    @cached_property
    def local_ops(self) -> list[dict[str, list[fx.Node]]]:
        """Per graph the nodes that say they belong to each op of the program."""
        found: list[dict[str, list[fx.Node]]] = []
        for graph in self.certificate.ranks.graphs:
            found.append({})
            for node in graph.nodes:
                if node.op == "call_function" and self.is_operation(node):
                    found[-1].setdefault(node.meta["origin"], []).append(node)
        return found

    def is_operation(self, node: fx.Node) -> bool:
        found = self.operations.get(node.meta.get("origin", ""))
        return found is not None and found.target is not None

    @cached_property
    def placeholders(self) -> list[list[fx.Node]]:
        return [[n for n in g.nodes if n.op == "placeholder"] for g in self.certificate.ranks.graphs]

    def offsets(self, graph: int, values: Sequence[int]) -> dict[fx.Node, int]:
        return dict(zip(self.placeholders[graph][len(self.inputs) :], values, strict=True))

    # One op of one rank.

    def bind(self, coordinate: Coordinate, name: str) -> dict[int, fx.Node]:
        """The nodes that a rank's form of an op reads, by operand. That its nodes are the rule's local form is checked here."""
        if (coordinate, name) in self.bound:
            return self.bound[coordinate, name]
        number, values = self.certificate.ranks.at[coordinate]
        op, nodes = self.operations[name], self.local_ops[number].get(name, [])
        rule = self.rule(op)
        index, cuts = self.factors(op, rule, coordinate)
        results, places = self.local_form(op, rule, index, cuts)
        offsets = self.offsets(number, values)
        inside = set(nodes)
        bound: dict[fx.Node, fx.Node] = {}
        taken: set[int] = set()
        for node in nodes:
            if all(u in inside for u in node.users):
                continue
            # Results of one form, such as zeros where a rank's part is empty, are taken in their order.
            left = [at for at in range(len(results)) if at not in taken] + sorted(taken)
            for at in left:
                trial = dict(bound)
                if _matches(results[at], node, offsets, trial, {}):
                    bound = trial
                    taken.add(at)
                    self.made[coordinate, node] = self.result(op, rule, index, at)
                    break
            else:
                raise _Failure(f"{node.name} = {node.target}{node.args} is not the local form of {op}")
        self.bound[coordinate, name] = {slot: bound[p] for p, slot in places.items() if p in bound}
        return self.bound[coordinate, name]

    def rule(self, op: Operation) -> BoundRule:
        if op.name not in self.rules:
            self.rules[op.name] = _rule_of(op, self.operations)
        return self.rules[op.name]

    def factors(self, op: Operation, rule: BoundRule, coordinate: Coordinate) -> tuple[dict[str, Index], dict[str, list[Cut]]]:
        """Per factor the positions that the rank holds, as claimed, and the claims in numbers; the claims are checked against the rule."""
        index = {f: _whole(size) for f, size in rule.sizes.items()}
        cuts: dict[str, list[Cut]] = {}
        cut_axes: dict[str, str] = {}
        for claim in op.claims:
            if claim.axis in cut_axes:
                raise _Failure(f"{op} is claimed to be cut twice over {claim.axis}")
            if claim.factor in rule.whole or claim.factor not in rule.sizes:
                raise _Failure(f"{op} is claimed to be cut along {claim.factor}, which its rule {rule} keeps whole")
            cut_axes[claim.axis] = claim.factor
            outer, extent, inner = (self.size(s, coordinate) for s in (claim.outer, claim.extent, claim.inner))
            held = index[claim.factor]
            if outer * extent * inner != len(held):
                raise _Failure(f"{op} is claimed to be cut in {outer} x {extent} x {inner} of {len(held)}")
            start, length = self.chunk(extent, claim.axis, coordinate)
            index[claim.factor] = _part(held, outer, extent, inner, start, length)
            cuts.setdefault(claim.factor, []).append(Cut(outer, extent, inner, start, length))
        for axis, slots in op.partial.items():
            if axis in cut_axes:
                raise _Failure(f"{op} is cut over {axis}, and its operands {slots} are pending over it")
            if tuple(sorted(slots)) not in {tuple(sorted(g)) for g in rule.linear}:
                raise _Failure(f"{op} is not linear in its operands {slots} together, which are pending over {axis}")
        return index, cuts

    def result(self, op: Operation, rule: BoundRule, index: Mapping[str, Index], at: int) -> Held:
        dims = rule.results[at]
        held = {f for dim in dims for f in dim}
        pending = {(axis, "sum") for axis in op.partial}
        for claim in op.claims:
            if claim.factor not in held and (reduction := rule.pending[at].get(claim.factor)):
                pending.add((claim.axis, reduction))
        return holding(Ref(op.name, at).key, [_of_dim(dim, index, rule.sizes) for dim in dims], frozenset(pending))

    def local_form(self, op: Operation, rule: BoundRule, index: Mapping[str, Index], cuts: Mapping[str, list[Cut]]):
        """The rule's local form as a graph of its own: its results, and which of its inputs is which operand."""
        graph = fx.Graph()
        places: dict[fx.Node, int] = {}

        def place(_: Ref) -> fx.Node:
            node = graph.placeholder(f"operand_{len(places)}")
            places[node] = len(places)
            return node

        args, kwargs = replaced(tuple(op.args), Ref, place), replaced(dict(op.kwargs), Ref, place)
        sizes = {f: len(i) for f, i in index.items()}
        made = localize(LocalOp(graph, op.target, args, kwargs, rule, sizes, cuts, self.device))
        if isinstance(made, tuple):
            results = list(made)
        elif len(op.results) > 1 or _returns_tuple(op.target):
            results = [graph.call_function(operator.getitem, (made, i)) for i in range(len(op.results))]
        else:
            results = [made]
        return results, places

    @cached_property
    def device(self) -> torch.device:
        for graph in self.certificate.ranks.graphs:
            for node in graph.nodes:
                if isinstance(found := node.kwargs.get("device"), torch.device):
                    return found
        return torch.device("cpu")

    # What a tensor holds.

    def require(self, coordinate: Coordinate, at: Reader, due: Held, pending: Pending, what: str) -> None:
        """Checks that the tensor read ``at`` a rank holds what is due, alone or summed with the ranks along the axes pending."""
        node = at(coordinate)
        what = f"{what}, {node.name},"
        try:
            held = self.held(coordinate, node)
            missing = sorted(pending - held.pending)
            if extra := held.pending - pending:
                raise Unsound(f"is a reduction still pending over {', '.join(sorted(a for a, _ in extra))}")
            if missing:
                held = self.summed(coordinate, at, [axis for axis, _ in missing])
        except (Unsound, KeyError) as e:
            raise e if isinstance(e, _Failure) else _Failure(f"{what} {e}") from None
        if due.is_empty and held.shape == due.shape:
            return
        if held.value != due.value:
            raise _Failure(f"{what} is {held.value.rsplit('.', 1)[0]!r}; due is {due.value.rsplit('.', 1)[0]!r}")
        if held.shape != due.shape:
            raise _Failure(f"{what} is of shape {held.shape}; due is {due.shape}")
        if not is_same(held, due):
            raise _Failure(f"{what} holds other elements than are due")

    def summed(self, coordinate: Coordinate, at: Reader, axes: Sequence[str]) -> Held:
        """What the ranks along ``axes`` hold together: one of them alone or each a part, zeros elsewhere."""
        if not axes:
            return self.held(coordinate, at(coordinate))
        parts = [self.summed(c, at, axes[1:]) for c in self.along(coordinate, axes[0])]
        return added(parts, axes[0], "sum")

    def along(self, coordinate: Coordinate, axis: str) -> list[Coordinate]:
        at = list(self.axes).index(axis)
        return [(*coordinate[:at], i, *coordinate[at + 1 :]) for i in range(self.axes[axis])]

    def held(self, coordinate: Coordinate, node: fx.Node) -> Held:
        key = (coordinate, node)
        if key in self.made:
            return self.made[key]
        if key not in self.known:
            self.known[key] = self.find(coordinate, node)
        return self.known[key]

    def find(self, coordinate: Coordinate, node: fx.Node) -> Held:
        number, values = self.certificate.ranks.at[coordinate]
        if node.op == "placeholder":
            at = self.placeholders[number].index(node)
            if at >= len(self.inputs):
                raise Unsound("an offset is taken for a tensor")
            op = self.inputs[at]
            return holding(Ref(op.name).key, self.cut_by_spec(op.results[0].shape, op.spec, coordinate))
        if self.is_operation(node):
            self.bind(coordinate, node.meta["origin"])
            return self.made[coordinate, node]
        if node.target is c10d.wait_tensor.default:
            issued: Any = node.args[0]
            if issued.target not in COLLECTIVES:
                raise Unsound("it waits for what is no collective")
            return self.received(coordinate, issued)
        if node.target in COLLECTIVES:
            raise Unsound("it is read before it has arrived (no wait_tensor)")
        step = MOVEMENTS.get(node.target)
        if step is None:
            raise Unsound(f"{node.target} belongs to no op of the program, and moves nothing")
        offsets = self.offsets(number, values)
        args = map_arg(node.args, lambda n: offsets[n] if n in offsets else self.held(coordinate, n))  # type: ignore[arg-type]
        try:
            return step(*args)  # type: ignore[misc]
        except (IndexError, TypeError, ValueError):
            raise Unsound(f"{node.target}{node.args} does not fit what it is given") from None

    @cached_property
    def inputs(self) -> list[Operation]:
        return [o for o in self.certificate.operations if o.target is None]

    def received(self, coordinate: Coordinate, node: fx.Node) -> Held:
        axis = self.certificate.groups.get(node.args[-1])  # type: ignore[arg-type]
        if axis is None:
            raise Unsound(f"its collective runs over {node.args[-1]!r}, which is no axis of the mesh")
        number = self.position[node]
        ranks = self.along(coordinate, axis)
        peers = []
        for there in ranks:
            issued = self.collectives[self.certificate.ranks.at[there][0]]
            if number >= len(issued) or self.call(issued[number]) != self.call(node) or issued[number].args[1:-1] != node.args[1:-1]:
                raise Unsound(f"collective {number + 1}{self.where(there)} is another one")
            peers.append(self.held(there, issued[number].args[0]))  # type: ignore[arg-type]
        return COLLECTIVES[node.target](peers, ranks.index(coordinate), axis, *node.args[1:-1])

    # Where parts begin.

    def cut_by_spec(self, shape: Sequence[int], spec: Spec, coordinate: Coordinate) -> list[Index]:
        found = []
        for dim, size in enumerate(shape):
            index = _whole(int(size))
            for axis, unit, packs in spec[dim] if dim < len(spec) else ():
                sizes = [len(index) // packs] * packs if isinstance(packs, int) else packs
                ends = np.cumsum(sizes).tolist()
                index = np.concatenate(
                    [self.units(index[end - s : end], axis, unit, coordinate) for s, end in zip(sizes, ends, strict=True)]
                )
            found.append(index)
        return found

    def units(self, index: Index, axis: str, unit: int, coordinate: Coordinate) -> Index:
        """A rank's share of whole units; neighbours share one where the ranks are a multiple of the units."""
        count, n = -(-len(index) // unit), self.axes[axis]
        if unit > 1 and 0 < count < n and n % count == 0:
            start, length = coordinate[list(self.axes).index(axis)] // (n // count), 1
        else:
            start, length = self.chunk(count, axis, coordinate)
        return index[start * unit : (start + length) * unit]

    def chunk(self, size: int, axis: str, coordinate: Coordinate) -> tuple[int, int]:
        """Start and length of a rank's chunk, as ``torch.chunk`` cuts: of one length, the last ones shorter or empty."""
        at = coordinate[list(self.axes).index(axis)]
        length = math.ceil(size / self.axes[axis])
        start = min(at * length, size)
        return start, min(length, size - start)

    def size(self, size: Any, coordinate: Coordinate) -> int:
        if isinstance(size, int):
            return size
        const, chunks = size
        return const * math.prod(self.chunk(self.size(whole, coordinate), axis, coordinate)[1] for whole, axis, _ in chunks)


@lru_cache(maxsize=4096)
def _whole(size: int) -> Index:
    return np.arange(size)


def _part(index: Index, outer: int, extent: int, inner: int, start: int, length: int) -> Index:
    return index.reshape(outer, extent, inner)[:, start : start + length].reshape(-1)


def _of_dim(dim: Dim, index: Mapping[str, Index], sizes: Mapping[str, int]) -> Index:
    """Positions along a dim that is made of factors, major to minor."""
    if len(dim) == 1:
        return index[dim[0]]
    found = np.zeros(1, dtype=np.int64)
    for factor in dim:
        found = (found[:, None] * sizes[factor] + index[factor][None]).reshape(-1)
    return found


def _rule_of(op: Operation, operations: Mapping[str, Operation]) -> BoundRule:
    def meta(ref: Ref) -> Meta:
        return operations[ref.name].results[ref.index]

    call = Call(op.target, replaced(tuple(op.args), Ref, meta), replaced(dict(op.kwargs), Ref, meta), op.results)
    found = lookup(call)
    if found is not None:
        return found
    names = iter(range(10**6))
    dims = [tuple((f"whole{next(names)}",) for _ in m.shape) for m in (*call.operands, *op.results)]
    sizes = {f: int(s) for ds, m in zip(dims, (*call.operands, *op.results), strict=True) for (f,), s in zip(ds, m.shape, strict=True)}
    n = len(call.operands)
    return BoundRule(tuple(dims[:n]), tuple(dims[n:]), frozenset(sizes), ({},) * len(op.results), (), sizes, None, False)


def _returns_tuple(target: Any) -> bool:
    returns = target._schema.returns
    return len(returns) > 1 or (len(returns) == 1 and isinstance(returns[0].type, torch.ListType))


def _matches(expected: Any, actual: Any, offsets: Mapping[fx.Node, int], bound: dict[fx.Node, fx.Node], seen: dict[Any, bool]) -> bool:
    """Whether a node computes what the expected one does; operands that it reads are noted in ``bound``."""
    if isinstance(expected, fx.Node):
        if not isinstance(actual, fx.Node):
            return False
        if expected.op == "placeholder":
            return actual not in offsets and bound.setdefault(expected, actual) is actual
        key = (expected, actual)
        if key not in seen:
            seen[key] = (
                actual.op == "call_function"
                and expected.target is actual.target
                and _matches(expected.args, actual.args, offsets, bound, seen)
                and _matches(dict(expected.kwargs), dict(actual.kwargs), offsets, bound, seen)
            )
        return seen[key]
    if isinstance(actual, fx.Node):
        return actual in offsets and isinstance(expected, int) and offsets[actual] == expected
    if isinstance(expected, list | tuple):
        return (
            isinstance(actual, list | tuple)
            and len(expected) == len(actual)
            and all(_matches(e, a, offsets, bound, seen) for e, a in zip(expected, actual, strict=True))
        )
    if isinstance(expected, dict):
        return (
            isinstance(actual, dict)
            and expected.keys() == actual.keys()
            and all(_matches(e, actual[k], offsets, bound, seen) for k, e in expected.items())
        )
    if isinstance(expected, float) and math.isnan(expected):
        return isinstance(actual, float) and math.isnan(actual)
    return type(expected) is type(actual) and expected == actual


# What the steps between ops do.


def _sliced(x: Held, dim: int = 0, start: int | None = None, stop: int | None = None, step: int = 1) -> Held:
    if step != 1:
        raise Unsound(f"it is sliced in steps of {step}")
    size = x.shape[dim]
    first, last = (v + size if v < 0 else v for v in (start or 0, size if stop is None else stop))
    return slice_dim(x, dim % len(x.shape), first, last)


def _padded(x: Held, pad: Sequence[int], value: float = 0.0) -> Held:
    if value:
        raise Unsound(f"it is padded with {value}")
    for i in range(len(pad) // 2):
        x = pad_dim(x, len(x.shape) - 1 - i, pad[2 * i], pad[2 * i + 1])
    return x


def _selected(x: Held, dim: int, at: int) -> Held:
    y = slice_dim(x, dim, at, at + 1)
    return reshape(y, [size for d, size in enumerate(y.shape) if d != dim])


MOVEMENTS: dict[Any, Callable[..., Held]] = {
    aten.alias.default: lambda x: x,
    aten.cat.default: lambda parts, dim=0: joined(parts, dim),
    aten.clone.default: lambda x: x,
    aten.constant_pad_nd.default: _padded,
    aten.contiguous.default: lambda x: x,
    aten.permute.default: permute,
    aten.reshape.default: reshape,
    aten.select.int: _selected,
    aten.slice.Tensor: _sliced,
    aten.view.default: reshape,
    aten.zeros_like.default: lambda x: zeros_like(x),
}


def _all_to_all(parts: Sequence[Held], rank: int, axis: str, received: Sequence[int], sent: Sequence[int]) -> Held:
    n = len(parts)
    if len({*received, *sent}) > 1 or any(p.shape[:1] != (n * sent[0],) for p in parts):
        raise Unsound("ranks deal out unequal parts")
    return concatenated([_dealt(p, n, axis)[rank] for p in parts])


def _dealt(x: Held, n: int, axis: str) -> list[Held]:
    if any(a == axis for a, _ in x.pending):
        raise Unsound(f"a sum still pending over {axis} is dealt out along it")
    return parts_of(x, n)


def _gathered(parts: Sequence[Held], rank: int, axis: str, n: int) -> Held:
    if n != len(parts):
        raise Unsound(f"{n} parts are gathered over {axis} of size {len(parts)}")
    if any(a == axis for p in parts for a, _ in p.pending):
        raise Unsound(f"a sum still pending over {axis} is gathered along it")
    return concatenated(parts)


def _scattered(parts: Sequence[Held], rank: int, axis: str, op: str, n: int) -> Held:
    if n != len(parts):
        raise Unsound(f"{n} parts are scattered over {axis} of size {len(parts)}")
    return parts_of(added(parts, axis, op), n)[rank]


COLLECTIVES: dict[Any, Callable[..., Held]] = {
    c10d.all_gather_into_tensor.default: _gathered,
    c10d.all_reduce.default: lambda parts, rank, axis, op: added(parts, axis, op),
    c10d.all_to_all_single.default: _all_to_all,
    c10d.reduce_scatter_tensor.default: _scattered,
}
