"""Proofs about dropless experts: rows reach the owner of their expert and come back to their token,
whatever the routing; dispatchers that lose a row or take another's are refused.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from dropless import FORMS, drawn, routed

import ftp
from ftp import P
from ftp.per_rank.dispatch import _of_rank

EXPERTS, TOKENS, K, RANKS = 4, 4, 2, 2
PARAMS, X = drawn(EXPERTS, TOKENS, None, 0)
SPECS = {"router": P(), "favour": P(), "up": P("ep"), "down": P("ep")}


def reference(p: Any, x: torch.Tensor) -> torch.Tensor:
    return FORMS["torchtitan_form"](p, x, K)


def own_experts(rows: torch.Tensor, own: torch.Tensor, parts: Any) -> torch.Tensor:
    up, down = parts
    order = own.argsort(stable=True)
    offs = (own[:, None] <= torch.arange(up.shape[0])).sum(0).to(torch.int32)
    y = F.grouped_mm(F.silu(F.grouped_mm(rows[order], up, offs=offs)), down, offs=offs)
    return torch.zeros_like(rows).index_copy(0, order, y)


def by_ftp(p: Any, x: torch.Tensor) -> torch.Tensor:
    """What from_hf(expert_axis=) runs on a rank."""
    weights, experts = routed(p, x, K)
    parts = [p["up"], p["down"]]
    return _of_rank(own_experts, x, experts, weights, parts, "ep", RANKS, EXPERTS, None)


def by_hand(mutant: str = "") -> Any:
    """A dispatcher by ``ftp.axis.all_to_all``, right or with a fault."""

    def program(p: Any, x: torch.Tensor) -> torch.Tensor:
        weights, experts = routed(p, x, K)
        slots = experts.flatten()
        owner = slots % RANKS if mutant == "owner" else slots // (EXPERTS // RANKS)
        if mutant == "next owner":
            owner = (owner + 1) % RANKS
        order = (owner if mutant == "order" else slots).argsort(stable=True)
        counts = F.one_hot(owner, RANKS).sum(0)
        of_expert = F.one_hot(slots, EXPERTS).sum(0)
        sent = x[order // K]
        if mutant == "dropped":  # the last row sent
            sent = F.pad(sent[:-1], (0, 0, 0, 1))
        rows = ftp.axis.all_to_all(sent, "ep", send_counts=counts)
        arrived = ftp.axis.all_to_all(of_expert, "ep")
        at = torch.arange(len(rows))
        place = torch.searchsorted(arrived.cumsum(0), at, right=True)
        own = torch.where(place < EXPERTS, place % (EXPERTS // RANKS), EXPERTS // RANKS)
        made = own_experts(rows, own, [p["up"], p["down"]])
        back = counts if mutant == "counts" else ftp.axis.all_to_all(counts, "ep")
        if mutant == "another step":  # the first batch's routing was equal on all ranks
            back = torch.full_like(back, len(slots) // RANKS)
        returned = ftp.axis.all_to_all(made, "ep", send_counts=back, bound=len(slots))
        returned = returned * weights.flatten()[order][:, None]
        if mutant == "return order":
            returned = returned.flip(0)
        token = torch.arange(len(slots)) // K if mutant == "token" else order // K
        return torch.zeros_like(x).index_add(0, token, returned)

    return program


def prove(program: Any) -> None:
    mesh = ftp.AbstractMesh((RANKS,), ("ep",))
    given = (SPECS, P("ep")), P("ep"), PARAMS, X
    (said,) = ftp.equivalent(reference, program, mesh, *given, grad=True).assumptions
    assert "as by a router" in said and "12 orders were drawn" in said  # routings are sampled


@pytest.mark.parametrize("program", [by_ftp, by_hand()], ids=["ftp", "by hand"])
def test_rows_come_back_to_their_tokens(program):
    prove(program)


SLOW = [pytest.param(mutant, marks=pytest.mark.slow) for mutant in ("order", "counts")]


MUTANTS = ["owner", "next owner", "token", "dropped", "return order", "another step", *SLOW]


@pytest.mark.parametrize("mutant", MUTANTS)
def test_faults_are_refused(mutant):
    """Undecided where no draw of numbers shows the fault that the residues show: no proof."""
    with pytest.raises((ftp.errors.CertificateError, ftp.errors.Undecided)):
        prove(by_hand(mutant))


def test_a_layer_that_treats_each_token_by_itself():
    """Each rank's tokens alone give what they give among all; not if the layer mixes them."""

    def mixes(p: Any, x: torch.Tensor) -> torch.Tensor:
        return reference(p, x - x.mean(0))

    mesh = ftp.AbstractMesh((RANKS,), ("ep",))
    given = (P(), P("ep")), P("ep"), PARAMS, X
    ftp.equivalent(reference, reference, mesh, *given)
    with pytest.raises(ftp.errors.CertificateError):
        ftp.equivalent(mixes, mixes, mesh, *given)
