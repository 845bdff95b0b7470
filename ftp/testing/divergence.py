"""``first_divergence``: compare one device with all simulated ranks, up to the first value that
differs.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from typing import Any

import numpy as np
import torch
from torch import fx

from ftp.api.certify import certificate_of
from ftp.api.step import Step
from ftp.certification.cells import Cell
from ftp.certification.certificate import Certificate, Operation, Ref
from ftp.certification.checker import Checker
from ftp.certification.element_map import DimPart, ElementMap, element_map, on_rank
from ftp.certification.ranks import MeshIndex
from ftp.certification.unsound import Unsound
from ftp.dataclass import dataclass
from ftp.errors import InputError, MeshError, TraceError
from ftp.partitioning.local_program import LocalProgram
from ftp.rules.decompositions.registry import HALF
from ftp.runtime.mesh_groups import groups_of
from ftp.runtime.program import shard_of
from ftp.runtime.simulate import simulate
from ftp.sharding.pytree import flatten, kind_of
from ftp.testing.evaluate import doubled, eps, evaluate, evaluate_in_double


@dataclass(frozen=True)
class Divergence:
    """The first value of a program that is wrong on some rank.

    Attributes:
        name: of the op in the printed program.
        source: the user's line.
        rank: ``{axis: index}``; for a pending sum, the first of the ranks whose sum is wrong.
        error: the largest absolute difference; infinite if the rank's form of the op cannot be
            right for any input.
        why: the reason in words.

    >>> Divergence("mm", "train.py:8", {"tp": 1}, 0.5, "an operand is not reduced").rank
    {'tp': 1}
    """

    name: str
    source: str
    rank: Mapping[str, int]
    error: float
    why: str


def first_divergence(
    step: Step, *args: Any, rtol: float | None = None, atol: float | None = None
) -> Divergence | None:
    """Run a step's single-device program and every rank's on ``args``, and compare value by value;
    None if all agree.

    Args:
        step: of ``shard`` or ``spmd`` on a simulated mesh.
        args: the step's arguments, with global tensors.
        rtol, atol: as in ``torch.testing.assert_close``; default: the possible rounding error of
            each value in its dtype.

    Raises:
        MeshError: on a mesh of processes, which have only their own parts.

    >>> import ftp
    >>> step = ftp.spmd(lambda x: x.cumsum(0), ftp.simulated_mesh((2,), ("dp",)), ftp.P("dp"))
    >>> first_divergence(step, torch.ones(5)) is None
    True
    """
    if not isinstance(step, Step):
        raise InputError(
            f"first_divergence takes a step, as ftp.shard or ftp.spmd makes, not {kind_of(step)}."
        )
    if step.mesh.kind == "process":
        raise MeshError(
            "first_divergence runs all ranks in one process. Make the step on ftp.simulated_mesh"
            " with the same axes."
        )
    program = step.lower(*args)._program
    certificate = certificate_of(program)
    leaves, _ = flatten(args)
    args = tuple(leaves[i] for i in program.tensor_leaves)
    inputs = [*args, *program.constants]
    shards = []
    for coordinate in program.mesh.coordinates():
        parts = [
            shard_of(x, spec, program.mesh.axes, coordinate)
            for x, spec in zip(args, program.in_specs, strict=True)
        ]
        shards.append([*parts, *program.constants])
    return compare(certificate, inputs, shards, groups_of(program.mesh), rtol, atol)


def compare(
    certificate: Certificate,
    inputs: Sequence[torch.Tensor],
    shards: Sequence[Sequence[torch.Tensor]],
    groups: Mapping[str, Any],
    rtol: float | None,
    atol: float | None,
) -> Divergence | None:
    """The first divergence of a certificate's programs on whole ``inputs`` and every rank's
    ``shards`` of them.

    Each op is judged by itself: its operands on the ranks are compared with the values that were
    computed, and the ranks' joined results with one device's result on the same operands, in
    float64. So rounding errors do not accumulate from op to op, and a sign flipped by rounding does
    not count.
    """
    checker = Checker(certificate)
    if any(checker.parts.rank_axes.values()):
        raise TraceError(
            "first_divergence compares ops with one device's, which has none of the ops in"
            " ftp.local(axes=...). Compare the parts of the program around it."
        )
    seen = _Seen()
    watched: dict[MeshIndex, list[_Watched]] = {}
    for cell in checker.cells.all:
        nodes = _watched_in(cell, certificate, checker, seen)
        if isinstance(nodes, Divergence):
            return nodes
        for coordinate in cell.coordinates():
            at = [together.index(i) for together, i in zip(cell.at, coordinate, strict=True)]
            watched[coordinate] = [(node, on_rank(held, at), parts) for node, held, parts in nodes]
    _run_ranks(certificate, checker, watched, shards, groups)
    return _judged(_Judge(certificate, checker, seen.made, rtol, atol), seen, inputs)


RankValues = dict[MeshIndex, list[tuple[ElementMap, torch.Tensor]]]  # each rank's part of a value
_Watched = tuple[fx.Node, ElementMap, RankValues]  # a node, expected elements, recorded values


@dataclass(frozen=True)
class _Seen:
    """The ranks' parts of values: as ops read them, by op and operand; as ops made them, by value;
    and as the program returned them, by output.
    """

    read: dict[tuple[str, int], RankValues] = field(default_factory=dict)
    made: dict[str, RankValues] = field(default_factory=dict)
    returned: dict[int, RankValues] = field(default_factory=dict)


def _watched_in(
    cell: Cell, certificate: Certificate, checker: Checker, seen: _Seen
) -> "list[_Watched] | Divergence":
    """The nodes of a cell's graph to watch; a divergence if a rank's form of an op is wrong for any
    input.
    """
    nodes: list[_Watched] = []
    for name in checker.graphs.local_ops[cell.graph]:
        op = checker.operations[name]
        try:
            forms = checker.forms.bind(cell, name)
        except Unsound as e:
            rank = dict(zip(certificate.axes, next(cell.coordinates()), strict=True))
            return Divergence(name, op.source, rank, float("inf"), str(e))
        for form in forms:
            for slot, node in form.operands.items():
                expected = checker.forms.expected_operand(op, cell, slot, form.rows)
                pending = frozenset(
                    (axis, "sum") for axis, slots in op.partial.items() if slot in slots
                )
                parts = seen.read.setdefault((name, slot), {})
                nodes.append((node, replace(expected, pending=pending), parts))
    nodes += [
        (node, held, seen.made.setdefault(held.value, {}))
        for (c, node), held in checker.forms.result_maps.items()
        if c is cell
    ]
    for at, (node, (ref, spec)) in enumerate(
        zip(checker.output_nodes(cell), certificate.outputs, strict=True)
    ):
        shape = checker.operations[ref.name].results[ref.index].shape
        held = element_map(
            checker.forms.key(ref, cell), checker.parts.cut_by_spec(shape, spec, cell)
        )
        nodes.append((node, held, seen.returned.setdefault(at, {})))
    return nodes


def _run_ranks(
    certificate: Certificate,
    checker: Checker,
    watched: Mapping[MeshIndex, Sequence[_Watched]],
    shards: Sequence[Sequence[torch.Tensor]],
    groups: Mapping[str, Any],
) -> None:
    """Run all ranks and record the values of the watched nodes."""
    programs, given = [], []
    for coordinate, of_rank in zip(certificate.ranks.at, shards, strict=True):
        number, offsets = certificate.ranks.at[coordinate]
        graph = _watching(checker.graphs.pure[number], [node for node, _, _ in watched[coordinate]])
        programs.append(LocalProgram(fx.GraphModule({}, graph), (), ()))
        given.append([*of_rank, *offsets])
    for coordinate, values in zip(
        certificate.ranks.at, simulate(programs, given, groups), strict=True
    ):
        for (_, held, parts), value in zip(watched[coordinate], values, strict=True):
            parts.setdefault(coordinate, []).append((held, value))


def _judged(judge: "_Judge", seen: _Seen, inputs: Sequence[torch.Tensor]) -> Divergence | None:
    """Run the single-device program, op by op, and compare it with the ranks' values."""
    certificate, checker = judge.certificate, judge.checker
    feed = iter(inputs)
    env: dict[str, Any] = {}
    for op in certificate.operations:
        if op.target is None:
            env[Ref(op.name).key] = next(feed)
            continue
        operands = [env[ref.key] for ref in op.operands]
        wide = list(map(doubled, operands))
        for slot, ref in enumerate(op.operands):
            if (op.name, slot) in seen.read:
                if found := judge.differing_read(op, ref, operands[slot], seen.read[op.name, slot]):
                    return found
                wide[slot], _ = judge.combined(operands[slot], seen.read[op.name, slot])
                operands[slot] = wide[slot].to(operands[slot].dtype)
        results, exact, terms = evaluate_in_double(op, operands, wide, checker)
        for index, whole in enumerate(evaluate(op, [env[ref.key] for ref in op.operands])):
            env[Ref(op.name, index).key] = whole
            parts = seen.made.get(Ref(op.name, index).key, {})
            if isinstance(whole, torch.Tensor) and (
                found := judge.differing_result(
                    op, results[index], exact[index], terms[index], parts
                )
            ):
                return found
    for at, (ref, _) in enumerate(certificate.outputs):
        if found := judge.differing_read(
            checker.operations[ref.name], ref, env[ref.key], seen.returned[at]
        ):
            return found
    return None


OF_DTYPE = 8.0  # allowed roundings of a value
OF_DEVICE = 16.0  # allowed multiple of one device's own error


@dataclass(frozen=True)
class _Judge:
    """Judges differences by the possible rounding errors.

    Attributes:
        made: the ranks' parts of each value computed so far.
    """

    certificate: Certificate
    checker: Checker
    made: Mapping[str, RankValues]
    rtol: float | None
    atol: float | None

    def combined(self, like: torch.Tensor, parts: RankValues) -> tuple[torch.Tensor, torch.Tensor]:
        """The ranks' parts combined in double precision, and the sum of the magnitudes of their
        terms; elements that no rank holds are ``like``'s.
        """
        names = list(self.certificate.axes)
        total = doubled(like).clone()
        size = total.abs()
        for coordinate, pieces in parts.items():
            for number, (held, value) in enumerate(pieces):
                pending = sorted(held.pending)
                dims = [names.index(axis) for axis, _ in pending]
                if any(coordinate[d] for d in dims) or value.shape != held.shape:
                    continue  # the first rank along these axes stands for all
                moved = [
                    range(self.certificate.axes[names[i]]) if i in dims else [c]
                    for i, c in enumerate(coordinate)
                ]
                terms = torch.stack(
                    [
                        doubled(parts[c][number][1])
                        for c in itertools.product(*moved)
                        if len(parts.get(c, ())) > number
                    ]
                )
                op = pending[0][1] if pending else "sum"
                added = (
                    terms.sum(0, dtype=terms.dtype)
                    if op == "sum"
                    else terms.amax(0)
                    if op == "max"
                    else terms.amin(0)
                )
                where = _places(held)
                total[where] = added.reshape(total[where].shape)
                size[where] = terms.abs().sum(0, dtype=size.dtype).reshape(total[where].shape)
        return total, size

    def differing_read(
        self, op: Operation, ref: Ref, like: torch.Tensor, parts: RankValues
    ) -> Divergence | None:
        """The divergence of a value read by an op or a caller from the computed one, beyond the
        rounding of sums over ranks.
        """
        key = self.checker.forms.key(ref)
        source = self.made.get(key)
        if source is None:
            expected, size = doubled(like), doubled(like).abs()
        else:
            expected, size = self.combined(like, source)
        is_sum = any(
            held.pending
            for pieces in (*(source or {}).values(), *parts.values())
            for held, _ in pieces
        )
        ranks = math.prod(self.certificate.axes.values()) if is_sum else 0
        return self.first(
            op,
            parts,
            expected,
            eps(like.dtype) * (OF_DTYPE + ranks) * size if ranks else torch.zeros_like(size),
            like.dtype,
        )

    def differing_result(
        self,
        op: Operation,
        one: torch.Tensor,
        exact: torch.Tensor,
        terms: torch.Tensor,
        parts: RankValues,
    ) -> Divergence | None:
        """The divergence of the ranks' results from one device's and from the exact ones, beyond
        the rounding of either.
        """
        _, size = self.combined(one, parts)
        inner = torch.float32 if one.dtype in HALF else one.dtype  # the dtype of kernels' sums
        own = (doubled(one) - exact).abs()
        worst = own[own.isfinite()].max() if own.isfinite().any() else 0.0
        room = (
            OF_DTYPE * (eps(one.dtype) * (size + exact.abs()) + eps(inner) * terms)
            + OF_DEVICE * worst
        )
        found = self.first(op, parts, exact, room, one.dtype)
        return found and self.first(op, parts, doubled(one), room, one.dtype)

    def first(
        self,
        op: Operation,
        parts: RankValues,
        expected: torch.Tensor,
        room: torch.Tensor,
        dtype: torch.dtype,
    ) -> Divergence | None:
        names = list(self.certificate.axes)
        for coordinate, pieces in parts.items():
            for held, value in pieces:
                where, rank = _places(held), dict(zip(names, coordinate, strict=True))
                if value.shape != held.shape or value.dtype != dtype:
                    message = (
                        f"it is {value.dtype} of shape {tuple(value.shape)}, not {dtype} of"
                        f" shape {held.shape}"
                    )
                    return Divergence(op.name, op.source, rank, float("inf"), message)
                if any(coordinate[names.index(axis)] for axis, _ in held.pending):
                    continue
                own = self.combined(
                    expected, {c: p for c, p in parts.items() if held.pending or c == coordinate}
                )[0][where]
                wanted, error = expected[where], (own - expected[where]).abs()
                allowed = room[where].nan_to_num(nan=0.0, posinf=0.0)
                is_same = (own == wanted) | (own.isnan() & wanted.isnan())
                if dtype.is_floating_point:  # values above the dtype's largest number are infinite
                    is_same |= (
                        own.isinf()
                        & (own.sign() == wanted.sign())
                        & (wanted.abs() + allowed >= torch.finfo(dtype).max)
                    )
                error = torch.where(is_same, 0.0, error).nan_to_num(nan=torch.inf, posinf=torch.inf)
                if self.rtol is not None or self.atol is not None:
                    allowed = (self.atol or 0.0) + (self.rtol or 0.0) * wanted.abs()
                if (error > allowed).any():
                    worst = float(error.max())
                    message = (
                        f"{int((error > allowed).sum())} of {error.numel()} values are off by"
                        f" more than rounding, by up to {worst:.3g}"
                    )
                    return Divergence(op.name, op.source, rank, worst, message)
        return None


def _places(held: ElementMap) -> Any:
    """The positions of a tensor's elements in the value that it is a part of."""
    return (
        tuple(
            torch.from_numpy(i)
            for i in np.ix_(
                *(
                    DimPart(index, size).positions()
                    for index, size in zip(held.index, held.atoms, strict=True)
                )
            )
        )
        if held.index
        else ...
    )


def _watching(graph: fx.Graph, nodes: Sequence[fx.Node]) -> fx.Graph:
    """A copy that returns ``nodes``."""
    copied = fx.Graph()
    places: dict[fx.Node, Any] = {}
    copied.graph_copy(graph, places)
    copied.output(tuple(places[n] for n in nodes))
    return copied
