"""Certify programs that serve many sizes: one check for all sizes that meet its conditions."""

from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from ftp.api import certify
from ftp.certification.all_sizes import symbolic_of
from ftp.certification.certificate import Certificate
from ftp.certification.checker import check
from ftp.certification.value_numbering import check_traced
from ftp.dynamic_float import evaluated
from ftp.dynamic_int import Conditions, moved
from ftp.errors import CertificateError
from ftp.paused_gc import collection_paused
from ftp.rules.call import Meta
from ftp.rules.local_op import copied
from ftp.runtime.sized_program import SizedProgram
from ftp.torch_internals.pytree import tree_map

MOST_PROOFS = 4  # for all sizes, of the same graphs, before sizes are certified one by one


def check_sizes(program: SizedProgram) -> None:
    """Certify a program at its sizes, once: by a certificate for all sizes where one holds, else by
    one for these sizes alone.

    Raises:
        CertificateError: each value that is wrong.
    """
    given = certify.provable(program)
    assert isinstance(given, SizedProgram)
    served = given.ranks.served(given.values)
    if served not in given.ranks.proven:
        if not (_is_proven(given, served[1]) and _gives_its_formulas(given)):
            certify.certified(given)
        given.ranks.proven.add(served)


def _is_proven(program: SizedProgram, graphs: tuple[int, ...]) -> bool:
    """Whether a certificate for all sizes that these graphs serve holds at a program's sizes."""
    proofs = program.ranks.proofs.setdefault(graphs, [])
    if any(proof is not None and proof.holds(program.values) for proof in proofs):
        return True
    if None in proofs:
        return False
    try:
        found = certified_for_all(program)
    except Exception:  # the check of these sizes alone tells what is wrong at them
        proofs.append(None)
        return False
    proofs.append(found)
    if found.pins() or len(proofs) == MOST_PROOFS:
        proofs.append(None)
    return True


def _gives_its_formulas(program: SizedProgram) -> bool:
    """Whether the ranks' graphs are given the numbers of which the certificate has the formulas."""
    ranks, values = program.ranks, program.values
    with ranks.sizes.noting(values):
        return all(
            tuple(map(evaluated, rank.taken)) == tuple(rank.numbers(values))
            for rank in (ranks.at(c, values) for c in program.mesh.coordinates())
        )


@collection_paused()
def certified_for_all(program: SizedProgram) -> Conditions:
    """Check the graphs that serve a program's sizes with formulas in place of numbers.

    Returns:
        The conditions under which the check holds for other sizes that these graphs serve.

    Raises:
        CertificateError: a fault at these sizes or at others, or what is not known for all sizes.
    """
    ranks = program.ranks
    with ranks.sizes.noting(program.values) as asked:
        certificate = certificate_for_all(program)
        check_traced(_traced_formulas(program), certificate, symbolic_of(ranks.sizes))
        check(certificate)
    return asked


def certificate_for_all(program: SizedProgram) -> Certificate:
    """The certificate of the graphs that serve a program's sizes, with formulas, unchecked.

    Raises:
        CertificateError: per-rank code runs on numbers, at one size.
    """
    if any(node.kind == "local" for node in program.plan.graph.nodes):
        raise CertificateError("Programs with per-rank code are certified for each size.")
    written = certify.written_ranks(program, as_formulas=True)
    made = certify.certificate_of_ranks(program, written, lambda x: x)
    return replace(made, sizes=program.ranks.sizes)


def _traced_formulas(program: SizedProgram) -> fx.Graph:
    """The single-device program, with formulas of the plan's sizes."""
    new, sizes, of_trace = copied(program.traced.graph), program.ranks.sizes, program.ranks.symbolic

    def meta(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        return Meta(tuple(moved(of_trace.dynamic(s), sizes) for s in x.shape), x.dtype)

    with of_trace.sizes.noting(program.values) as asked:
        for node in new.nodes:
            given = map_aggregate((node.args, dict(node.kwargs)), lambda x: moved(x, sizes))
            node._update_args_kwargs(*given)
            node.meta["val"] = tree_map(meta, node.meta.get("val"))
    sizes.ask_again(asked)
    return new
