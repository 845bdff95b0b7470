"""Certificates for all sizes: at one of them, and with one formula changed."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx.node import map_aggregate

from ftp.certification.certificate import Certificate
from ftp.certification.checker import check
from ftp.certification.ranks import Ranks
from ftp.dynamic_float import DynamicFloat, evaluated
from ftp.dynamic_int import Conditions, DynamicInt, is_dynamic
from ftp.errors import CertificateError
from ftp.rules.call import Meta, replaced
from ftp.rules.local_op import copied

NUMBERS = DynamicInt, DynamicFloat


def at_sizes(certificate: Certificate, values: Sequence[int]) -> Certificate:
    """A certificate with the numbers of these sizes in place of formulas."""
    assert certificate.sizes is not None
    with certificate.sizes.noting(values):
        operations = [
            replace(
                o,
                args=replaced(o.args, NUMBERS, evaluated),
                kwargs=replaced(dict(o.kwargs), NUMBERS, evaluated),
                results=tuple(Meta(tuple(map(evaluated, m.shape)), m.dtype) for m in o.results),
                claims=tuple(
                    replace(c, **{k: replaced(getattr(c, k), NUMBERS, evaluated) for k in SIZES})
                    for c in o.claims
                ),
            )
            for o in certificate.operations
        ]
        ranks = certificate.ranks
        graphs = [copied(graph) for graph in ranks.graphs]
        for node in [node for graph in graphs for node in graph.nodes]:
            node.args, node.kwargs = map_aggregate((node.args, node.kwargs), evaluated)
        at = {
            c: (graph, tuple(map(evaluated, offsets))) for c, (graph, offsets) in ranks.at.items()
        }
    return replace(
        certificate, operations=tuple(operations), ranks=Ranks.of(graphs, at), sizes=None
    )


SIZES = ("outer", "extent", "inner")


def proven(certificate: Certificate) -> Conditions | None:
    """The conditions of a certificate for all sizes; None if it is refused."""
    assert certificate.sizes is not None
    with certificate.sizes.noting() as asked:
        try:
            check(certificate)
        except CertificateError:
            return None
    return asked


def is_right(certificate: Certificate, values: Sequence[int]) -> bool:
    """Whether the check of one set of sizes accepts it there."""
    try:
        check(at_sizes(certificate, values))
    except CertificateError:
        return False
    return True


def others(x: Any) -> Iterator[tuple[str, Any]]:
    """Numbers that equal a formula at the sizes at hand, or at most of them, but not at all."""
    yield "its value", x.value
    for s in x.sizes.symbols:
        yield "by the size", x + (s - s.value)
        yield "times the size", x * s // s.value
    if any(x.sizes.made_of(a)[0] == "//" for product in x.terms for a in product):
        yield "floor", _floor(x)


def _floor(x: DynamicInt) -> Any:
    """A formula with floors for its ceilings: ``-((-S) // n)`` becomes ``S // n``."""
    total: Any = 0
    for product, c in x.terms.items():
        value: Any = c
        for atom in product:
            kind, of = x.sizes.made_of(atom)
            value *= -(-of[0] // of[1]) if kind == "//" else x.sizes.alone(atom)
        total += value
    return total


def with_other_numbers(certificate: Certificate) -> Iterator[tuple[str, Certificate]]:
    """The certificate with one number of one rank graph, or of one rank's offsets, changed."""
    ranks = certificate.ranks
    for g, graph in enumerate(ranks.graphs):
        count = len(_formulas(graph))
        for i in range(count):
            for what, new in others(_formulas(graph)[i]):
                changed = copied(graph)
                _change(changed, i, new)
                graphs = [changed if k == g else other for k, other in enumerate(ranks.graphs)]
                yield f"graph {g}, number {i}: {what}", _with(certificate, graphs, ranks.at)
    for c, (graph, offsets) in ranks.at.items():
        for i, offset in enumerate(offsets):
            for what, new in others(offset) if is_dynamic(offset) else ():
                mine = graph, (*offsets[:i], new, *offsets[i + 1 :])
                yield (
                    f"rank {c}, offset {i}: {what}",
                    _with(certificate, ranks.graphs, {**ranks.at, c: mine}),
                )


def _with(certificate: Certificate, graphs: Any, at: Any) -> Certificate:
    return replace(certificate, ranks=Ranks.of(graphs, at))


def _formulas(graph: torch.fx.Graph) -> list[DynamicInt]:
    found: list[Any] = []
    for node in graph.nodes:
        map_aggregate((node.args, node.kwargs), lambda x: found.append(x) if is_dynamic(x) else x)
    return found


def _change(graph: torch.fx.Graph, at: int, new: Any) -> None:
    """Replace the ``at``-th formula."""
    seen = 0

    def number(x: Any) -> Any:
        nonlocal seen
        if not is_dynamic(x):
            return x
        seen += 1
        return new if seen == at + 1 else x

    for node in graph.nodes:
        node.args, node.kwargs = map_aggregate((node.args, node.kwargs), number)
