"""Prove recorded rank programs: on random residues, every output of every rank is the reference's.

What is proven: that both programs are equal as formulas, in the algebra of the reals (sums,
products, quotients, powers, ``exp`` and ``log``), with every other function free, and for every
order of the numbers that are compared. By Schwartz and Zippel unequal formulas agree on a draw with
a probability below their degree over a prime of more than 2 million; independent draws are taken.
Comparisons are sampled: each draw orders the numbers anew.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
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
from ftp.errors import CertificateError

DRAWS, ORDERED_DRAWS = 4, 12
ATTEMPTS = 8
_EXPS = words(
    """
    exp expm1 sigmoid silu tanh _softmax _safe_softmax sigmoid_backward silu_backward
    """
)
_LOGS = frozenset(["log", "log1p"])
_BOTH = frozenset(["_log_softmax", "logsumexp"])
_AFTER = frozenset(("_log_softmax_backward_data",))
_ORDERED = words(
    """
    eq ne lt le gt ge maximum minimum fmax fmin clamp clip clamp_min clamp_max relu abs sign
    sgn amax amin max min argmax argmin sort argsort topk threshold_backward logical_not
    """
)


@dataclass(frozen=True)
class WrongOutput:
    """An output that a rank has wrong.

    Attributes:
        output: its number.
        why: in words.
    """

    output: int
    rank: int
    why: str


@dataclass(frozen=True)
class Depth:
    """How deep exponentials and logarithms nest, and the other facts by which a residue field is
    chosen.
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
    """The certificate itself, if every output of every rank is the reference's.

    Raises:
        CertificateError: the first output that is not proven.
    """
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
        Blind: an op of which the model knows too little.
    """
    depth = depth_of(certificate)
    assert certificate.recorded is not None
    if certificate.recorded.every_routing:
        return _difference_of_routings(certificate, depth)
    for draw in range(depth.draws):
        for attempt in range(ATTEMPTS):
            domain = Residues(depth.field(secrets.randbits(60)))
            try:
                found = compare(domain, certificate, inputs_for(domain, certificate, draw))
            except Degenerate:
                if attempt == ATTEMPTS - 1:
                    raise Blind("a division by zero") from None
                continue
            except ReferenceFailed:
                if draw == 0:
                    raise
                break  # integers in the range of those given that neither program takes
            if found is not None:
                return found
            break
    return None


def _difference_of_routings(certificate: Certificate, depth: Depth) -> WrongOutput | None:
    """The first output that differs for some routing."""
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
    """An output whose shape is not the expected one."""


def graphs_of(certificate: Certificate) -> list[fx.Graph]:
    at = certificate.ranks.at
    return [certificate.ranks.graphs[at[c][0]] for c in sorted(at)]


def inputs_for(domain: Any, certificate: Certificate, draw: int) -> list[Any]:
    """Whole inputs: numbers drawn at random; integers as given, and in later draws permuted or
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
    """Run both programs on the same inputs; the first difference."""
    unreduced = certificate.unreduced
    values = run_reference(
        domain,
        certificate.operations,
        [domain.separate(x) for x in inputs],
        watch_reference,
    )
    given = [o for o in certificate.operations if o.target is None]
    parts = [
        shards(domain, x, op.spec, unreduced.inputs[i], certificate, i)
        for i, (x, op) in enumerate(zip(inputs, given, strict=True))
    ]
    graphs = graphs_of(certificate)
    of_ranks = [[p[r] for p in parts] for r in range(ranks_of(certificate))]
    results = run_ranks(domain, graphs, of_ranks, watch)
    names = list(certificate.axes)
    every = sorted(certificate.ranks.at)
    for at, (ref, spec) in enumerate(certificate.outputs):
        local = [r[at] for r in results]
        for rank, coordinate in enumerate(every):
            where = dict(zip(names, coordinate, strict=True))
            expected = shard(domain, values[ref], spec, certificate.axes, where)
            held = local[rank]
            if tuple(held.shape) != tuple(expected.shape):
                return WrongOutput(
                    at,
                    rank,
                    f"has shape {tuple(held.shape)}; its spec gives the rank"
                    f" {tuple(expected.shape)}.",
                )
            if unreduced.outputs[at]:
                held = total(domain, local, unreduced.outputs[at], certificate, rank)
            equal = (is_same or is_equal)(domain, held, expected)
            if not equal:
                return WrongOutput(at, rank, "is not what the reference computes.")
    return None


def is_equal(domain: Residues, a: Any, b: Any) -> bool:
    """Whether two values are the same, element for element."""
    if not isinstance(a, Planes) or not isinstance(b, Planes):
        return (
            not isinstance(a, Planes)
            and not isinstance(b, Planes)
            and a.dtype == b.dtype
            and bool((a == b).all())
        )
    return a.dtype == b.dtype and bool(same(domain.field, a, b).all())


# Properties that a proof needs of its field and its draws.


def sampled(certificate: Certificate) -> list[str]:
    """The assumptions of a proof that rests on draws."""
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
    """Whether numbers are compared otherwise than by the reference's one choice and the ranks'
    choices.
    """
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
    """How deep exponentials nest; through memory that is written, an upper bound."""
    reference = [
        (o.target, [Ref(r.name) for r in o.operands], Ref(o.name), (o.args, dict(o.kwargs)))
        for o in certificate.operations
        if o.target is not None
    ]
    return _deepest([*map(_calls, certificate.ranks.graphs), reference])


def depth_of_graphs(graphs: Sequence[fx.Graph]) -> Depth:
    """The same of ranks' graphs alone."""
    return _deepest([*map(_calls, graphs)])


def _calls(graph: fx.Graph) -> list[Any]:
    return [(n.target, n.all_input_nodes, n, n.args) for n in graph.nodes]


def _deepest(programs: Sequence[Sequence[Any]]) -> Depth:
    exps = logs = 0
    infinite = ordered = False
    for program in programs:
        e, g, i, o = _depth(program)
        exps, logs, infinite, ordered = max(exps, e), max(logs, g), infinite or i, ordered or o
    return Depth(exps, logs, infinite, ordered)


def _depth(program: Sequence[tuple[Any, Sequence[Any], Any, Any]]) -> tuple[int, int, bool, bool]:
    found: dict[Any, tuple[int, int]] = {}
    floor = (0, 0)
    deepest = (0, 0)
    infinite = ordered = False
    for target, operands, node, args in program:
        here = floor
        for operand in operands:
            known = found.get(operand, (0, 0))
            here = (max(here[0], known[0]), max(here[1], known[1]))
        schema = getattr(target, "_schema", None)
        name = _name_of(target)
        here = (
            here[0] + (name in _EXPS or name in _BOTH or name in _AFTER),
            here[1] + (name in _LOGS or name in _BOTH),
        )
        ordered = ordered or _compares(name, args)
        infinite = infinite or _holds_infinity(args)
        found[node] = here
        deepest = (max(deepest[0], here[0]), max(deepest[1], here[1]))
        if schema is not None and schema.is_mutable:
            floor = (max(floor[0], here[0]), max(floor[1], here[1]))
    return deepest[0], deepest[1], infinite, ordered


def _holds_infinity(args: Any) -> bool:
    if isinstance(args, float):
        return args in (float("inf"), -float("inf"))
    if isinstance(args, list | tuple):
        return any(_holds_infinity(a) for a in args)
    return isinstance(args, dict) and any(_holds_infinity(a) for a in args.values())
