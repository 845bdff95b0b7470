"""Proofs about dropless experts: rows reach the owner of their expert and come back to their token,
whatever the routing; dispatchers that lose a row or take another's are refused.
"""

from typing import Any

import pytest
import torch
from dispatchers import by_hand, own_experts
from dropless import FORMS, drawn, routed
from few_or_many import slow_after

import ftp
from ftp import P
from ftp.per_rank.dispatch import _of_rank

EXPERTS, TOKENS, K, RANKS = 4, 4, 2, 2
PARAMS, X = drawn(EXPERTS, TOKENS, None, 0)
SPECS = {"router": P(), "favour": P(), "up": P("ep"), "down": P("ep")}


def reference(p: Any, x: torch.Tensor) -> torch.Tensor:
    return FORMS["torchtitan_form"](p, x, K)


def by_ftp(p: Any, x: torch.Tensor) -> torch.Tensor:
    """What from_hf(expert_axis=) runs on a rank."""
    weights, experts = routed(p, x, K)
    parts = [p["up"], p["down"]]
    return _of_rank(own_experts, x, experts, weights, parts, "ep", RANKS, EXPERTS, None)


def prove(program: Any) -> None:
    mesh = ftp.AbstractMesh((RANKS,), ("ep",))
    given = (SPECS, P("ep")), P("ep"), PARAMS, X
    (said,) = ftp.equivalent(reference, program, mesh, *given, grad=True).assumptions
    assert "as by a router" in said and "12 orders were drawn" in said  # routings are sampled


@pytest.mark.parametrize("program", slow_after(1, [by_ftp, by_hand(K)]), ids=["ftp", "by hand"])
def test_rows_come_back_to_their_tokens(program):
    prove(program)


MUTANTS = (
    "owner",
    "token",
    "another step",
    "next owner",
    "dropped",
    "return order",
    "order",
    "counts",
)


@pytest.mark.cases_by_default(1)
@pytest.mark.parametrize("mutant", slow_after(3, MUTANTS))
def test_faults_are_refused(mutant):
    with pytest.raises(ftp.errors.CertificateError) as e:
        prove(by_hand(K, mutant))
    assert e.value.inputs is not None  # inputs on which a simulation differs


@pytest.mark.slow
def test_a_layer_that_treats_each_token_by_itself():
    """Each rank's tokens alone give what they give among all; not if the layer mixes them."""

    def mixes(p: Any, x: torch.Tensor) -> torch.Tensor:
        return reference(p, x - x.mean(0))

    mesh = ftp.AbstractMesh((RANKS,), ("ep",))
    given = (P(), P("ep")), P("ep"), PARAMS, X
    ftp.equivalent(reference, reference, mesh, *given)
    with pytest.raises(ftp.errors.CertificateError):
        ftp.equivalent(mixes, mixes, mesh, *given)
