"""Prove recorded rank programs: on random residues, every output of every rank equals the
reference's.

It proves that both programs are equal as formulas in the algebra of the reals: sums, products,
quotients, powers, ``exp`` and ``log``; other functions are unknown functions of their operands. By
the lemma of Schwartz and Zippel unequal formulas agree on a draw with a probability below their
degree over a prime of more than 2 million, and several independent draws are made. Orders of
compared numbers are sampled: each draw orders the numbers anew.
"""

import secrets
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from ftp.certification.certificate import Certificate, Ref
from ftp.certification.lockstep.program import (
    ReferenceFailed,
    ranks_of,
    run_reference,
    shard,
    shards,
    total,
)
from ftp.certification.lockstep.routings import CHOICES, EveryRouting, is_right, the_choice
from ftp.certification.lockstep.run import dtypes_of, run_ranks
from ftp.certification.residues.domain import Residues
from ftp.certification.residues.field import Field
from ftp.certification.residues.value import Blind, Degenerate, Planes, same
from ftp.certification.residues.words import words
from ftp.dataclass import dataclass
from ftp.errors import CertificateError

DRAWS, ORDERED_DRAWS = 4, 12  # ORDERED_DRAWS where numbers are compared
ATTEMPTS = 8  # of a draw in which a divisor is zero by accident
# Ops that nest one exponential or logarithm deeper, and ops that compare numbers.
_EXPS = words(
    """
    exp expm1 sigmoid silu tanh _softmax _safe_softmax sigmoid_backward silu_backward
    _log_softmax _log_softmax_backward_data logsumexp
    """
)
_LOGS = words("log log1p _log_softmax logsumexp")
_ORDERED = words(
    """
    eq ne lt le gt ge maximum minimum fmax fmin clamp clip clamp_min clamp_max relu abs sign
    sgn amax amin max min argmax argmin sort argsort topk threshold_backward logical_not
    """
)


@dataclass(frozen=True)
class WrongOutput:
    """A wrong output of a rank, by its number; ``why`` goes on after "OUTPUT on rank RANK"."""

    output: int
    rank: int
    why: str


@dataclass(frozen=True)
class Depth:
    """How deep a program nests exponentials and logarithms, whether it holds infinities, and
    whether it compares numbers: facts by which a residue field is chosen.
    """

    exps: int
    logs: int
    has_infinities: bool
    is_ordered: bool

    @property
    def draws(self) -> int:
        return ORDERED_DRAWS if self.is_ordered else DRAWS

    def field(self, seed: int) -> Field:
        return Field.of_depth(self.exps, self.logs, self.has_infinities, seed)


def check_recorded(certificate: Certificate) -> Certificate:
    """The certificate itself, if every output of every rank equals the reference's.

    Raises:
        CertificateError: programs that are not those of the mesh's ranks; the first output that is
            not proven to.
    """
    if certificate.misfit:
        raise CertificateError(certificate.misfit)
    try:
        found = difference(certificate)
    except Blind as e:
        raise CertificateError(f"The proof cannot see through {e}.") from None
    if found is not None:
        raise CertificateError(describe(certificate, found))
    return certificate


def describe(certificate: Certificate, found: WrongOutput) -> str:
    recorded = certificate.recorded
    assert recorded is not None
    return f"{recorded.names[found.output]} on rank {found.rank} {found.why}"


def difference(certificate: Certificate) -> WrongOutput | None:
    """The first output that differs from the reference's on some draw; None if none does.

    Raises:
        Blind: an op of which the residue field knows too little.
    """
    depth = depth_of(certificate)
    assert certificate.recorded is not None
    if certificate.recorded.every_routing:
        return _difference_of_routings(certificate, depth)

    def run(domain: Residues, draw: int) -> WrongOutput | None:
        try:
            return compare(domain, certificate, inputs_for(domain, certificate, draw))
        except ReferenceFailed:
            if draw == 0:
                raise
            return None  # the reference does not take the integers that were drawn

    try:
        return first_over_draws(depth, run)
    except Degenerate:
        raise Blind("a division by zero") from None


def first_over_draws(depth: Depth, run: Callable[[Residues, int], Any]) -> Any:
    """The first result of ``run(residues, draw)`` over independent draws; None if it has none.

    Raises:
        Degenerate: a draw whose every attempt is degenerate.
    """
    for draw in range(depth.draws):
        for attempt in range(ATTEMPTS):
            try:
                found = run(Residues(depth.field(secrets.randbits(60))), draw)
            except Degenerate:
                if attempt == ATTEMPTS - 1:
                    raise
                continue
            if found is not None:
                return found
            break
    return None


def _difference_of_routings(certificate: Certificate, depth: Depth) -> WrongOutput | None:
    """The first output that differs from the reference's for some routing."""
    for draw in range(DRAWS):
        left = list(the_choice(certificate).routings())
        for _ in range(ATTEMPTS):
            field = depth.field(secrets.randbits(60))
            inputs = inputs_for(Residues(field), certificate, draw)

            def choose(domain: Residues, inputs: list[Any] = inputs) -> None:
                run_reference(domain, certificate.operations, inputs)

            def run(domain: Residues, inputs: list[Any] = inputs) -> list[torch.Tensor]:
                right: list[torch.Tensor] = []
                wrong = compare(
                    domain,
                    certificate,
                    inputs,
                    is_same=lambda d, a, b: right.append(is_right(d, a, b)) or True,
                )
                if wrong is not None:
                    raise WrongShape(wrong)
                return right

            try:
                found, left = EveryRouting(certificate, field, choose, run).wrong(left)
            except Degenerate:
                continue
            except WrongShape as e:
                return e.args[0]
            if found is not None:
                number, routing = found
                output, rank = divmod(number, ranks_of(certificate))
                said = ", ".join(str(list(row)) for row in routing)
                why = f"is not what the reference computes where tokens choose {said}."
                return WrongOutput(output, rank, why)
            if not left:
                break
        else:
            raise Blind("a division by zero, or a choice among equal numbers")
    return None


class WrongShape(Exception):
    """An output has another shape than its spec gives; the argument is the ``WrongOutput``."""


def inputs_for(domain: Any, certificate: Certificate, draw: int) -> list[Any]:
    """Global inputs. Numbers are drawn at random. Integers are the given ones in draw 0, and later
    drawn between the smallest and the largest given.
    """
    assert certificate.recorded is not None
    found = []
    for i, op in enumerate(o for o in certificate.operations if o.target is None):
        meta = op.results[0]
        shape = tuple(map(int, meta.shape))
        if meta.dtype.is_floating_point:
            found.append(domain.draw(shape, i, meta.dtype))
            continue
        given = torch.tensor(certificate.recorded.integers[i], dtype=torch.int64)
        if draw and given.numel():
            generator = torch.Generator().manual_seed(secrets.randbits(60))
            low, high = int(given.min()), int(given.max())
            given = torch.randint(low, high + 1, given.shape, generator=generator)
        found.append(given.reshape(shape).to(meta.dtype))
    return found


def compare(
    domain: Any,
    certificate: Certificate,
    inputs: Sequence[Any],
    watch: Any = None,
    watch_reference: Any = None,
    is_same: Any = None,
) -> WrongOutput | None:
    """Run both programs on the same inputs; the first difference.

    Args:
        watch: is called with each rank's results, as in ``run_ranks``.
        watch_reference: is called with the reference's results, as in ``run_reference``.
        is_same: compares a rank's output with the expected one; default ``is_equal``.
    """
    unreduced, axes = certificate.unreduced, certificate.axes
    copies = [domain.separate(x) for x in inputs]
    values = run_reference(domain, certificate.operations, copies, watch_reference)
    given = [o for o in certificate.operations if o.target is None]
    parts = [
        shards(domain, x, op.spec, unreduced.inputs[i], certificate, i)
        for i, (x, op) in enumerate(zip(inputs, given, strict=True))
    ]
    programs = sorted(certificate.ranks.at.items())
    graphs = [certificate.ranks.graphs[number] for _, (number, _) in programs]
    of_ranks = [[p[rank] for p in parts] for rank in range(len(programs))]
    results = run_ranks(domain, graphs, of_ranks, watch)
    for at, (ref, spec) in enumerate(certificate.outputs):
        local = [r[at] for r in results]
        for rank, (coordinate, _) in enumerate(programs):
            where = dict(zip(axes, coordinate, strict=True))
            expected = shard(domain, values[ref], spec, axes, where)
            held = local[rank]
            shapes = tuple(held.shape), tuple(expected.shape)
            if shapes[0] != shapes[1]:
                why = f"has shape {shapes[0]}; its spec gives the rank {shapes[1]}."
                return WrongOutput(at, rank, why)
            if unreduced.outputs[at]:
                held = total(domain, local, unreduced.outputs[at], certificate, rank)
            if not (is_same or is_equal)(domain, held, expected):
                return WrongOutput(at, rank, "is not what the reference computes.")
    return None


def is_equal(domain: Residues, a: Any, b: Any) -> bool:
    """Whether two values are equal, element for element."""
    if a.dtype != b.dtype or isinstance(a, Planes) != isinstance(b, Planes):
        return False
    equal = same(domain.field, a, b) if isinstance(a, Planes) else a == b
    return bool(equal.all())


# The assumptions of a proof, and the residue field that it needs.


def sampled(certificate: Certificate) -> list[str]:
    """The assumptions of a proof by draws, as text."""
    assert certificate.recorded is not None
    found = []
    is_every = certificate.recorded.every_routing
    if compares_besides(certificate) if is_every else depth_of(certificate).is_ordered:
        where = "beside the routing" if is_every else "as by a router,"
        orders = DRAWS * the_choice(certificate).outcomes if is_every else ORDERED_DRAWS
        found.append(
            f"where numbers are compared, sorted or chosen among, {where} results are equal"
            f" for every order: {orders:,} orders were drawn, and proven for all numbers in"
            " that order"
        )
    if certificate.recorded.integers:
        found.append(
            "results are equal for every value of integer inputs: those given were proven, and"
            " some drawn in their range"
        )
    return found


def compares_besides(certificate: Certificate) -> bool:
    """Whether ops other than choices, such as ``topk``, compare numbers."""
    dtypes = {
        Ref(o.name, i): m.dtype for o in certificate.operations for i, m in enumerate(o.results)
    }
    calls = [
        (o.target, o.args, [dtypes[r] for r in o.operands])
        for o in certificate.operations
        if o.target is not None
    ]
    calls += [
        (n.target, n.args, [d for x in n.all_input_nodes for d in dtypes_of(x)])
        for graph in certificate.ranks.graphs
        for n in graph.nodes
        if n.op == "call_function"
    ]
    return any(
        any(d.is_floating_point for d in kinds) and name not in CHOICES and _compares(name, args)
        for target, args, kinds in calls
        for name in [_name_of(target)]
    )


def _name_of(target: Any) -> str:
    schema = getattr(target, "_schema", None)
    return schema.name.split("::")[1].removesuffix("_") if schema is not None else ""


def _compares(name: str, args: Any) -> bool:
    return name in _ORDERED or (name == "exchange" and args[5] in ("max", "min"))


def depth_of(certificate: Certificate) -> Depth:
    """The depth of both programs."""
    reference = [
        (o.target, [Ref(r.name) for r in o.operands], Ref(o.name), (o.args, dict(o.kwargs)))
        for o in certificate.operations
        if o.target is not None
    ]
    return depth_of_graphs(certificate.ranks.graphs, reference)


def depth_of_graphs(graphs: Sequence[fx.Graph], reference: Sequence[Any] = ()) -> Depth:
    """The depth of graphs and of a reference, its calls (op, operands, result, arguments). Through
    memory that is written it is an upper bound.
    """
    every: list[tuple[int, int]] = [(0, 0)]
    has_infinities = is_ordered = False
    calls = [[(n.target, n.all_input_nodes, n, n.args) for n in graph.nodes] for graph in graphs]
    for program in (*calls, reference):
        found: dict[Any, tuple[int, int]] = {}
        floor = (0, 0)  # of any value, since writes may have changed it
        for target, operands, result, args in program:
            name = _name_of(target)
            before = [floor, *(found.get(x, (0, 0)) for x in operands)]
            exps, logs = map(max, zip(*before, strict=True))
            found[result] = here = (exps + (name in _EXPS), logs + (name in _LOGS))
            every.append(here)
            is_ordered = is_ordered or _compares(name, args)
            has_infinities = has_infinities or _holds_infinity(args)
            schema = getattr(target, "_schema", None)
            if schema is not None and schema.is_mutable:
                floor = (max(floor[0], here[0]), max(floor[1], here[1]))
    exps, logs = map(max, zip(*every, strict=True))
    return Depth(exps, logs, has_infinities, is_ordered)


def _holds_infinity(args: Any) -> bool:
    if isinstance(args, float):
        return args in (float("inf"), -float("inf"))
    if isinstance(args, list | tuple):
        return any(_holds_infinity(a) for a in args)
    return isinstance(args, dict) and any(_holds_infinity(a) for a in args.values())
