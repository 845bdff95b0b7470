"""Proofs of dispatchers for every routing: each outcome of the router's choice is run."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from dispatchers import RANKS, by_hand, own_experts
from dropless import FORMS, drawn, routed
from few_or_many import slow_after
from hypothesis import given, settings
from hypothesis import strategies as st

import ftp
from ftp import P
from ftp.certification.certificate_file import load_certificate
from ftp.certification.checker import check
from ftp.certification.lockstep.routings import ReferenceChoice, choice_of
from ftp.errors import CertificateError, SpecError
from ftp.per_rank.dispatch import _of_rank

FORM = FORMS["torchtitan_form"]
SPECS = {"router": P(), "favour": P(), "up": P("ep"), "down": P("ep")}


def prove(
    program: Any, experts: int, tokens: int, k: int, ranks: int = RANKS, grad: bool = False
) -> ftp.Certificate:
    mesh = ftp.AbstractMesh((ranks,), ("ep",))
    return ftp.equivalent(
        lambda p, x: FORM(p, x, k),
        program,
        mesh,
        (SPECS, P("ep")),
        P("ep"),
        *drawn(experts, tokens, None, 0),
        grad=grad,
        every_routing=True,
    )


def by_ftp(experts: int, k: int, ranks: int = RANKS) -> Any:
    """What from_hf(expert_axis=) runs on a rank."""
    room = -(-experts // ranks)

    def program(p: Any, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = routed(p, x, k)
        parts = [F.pad(p[n], (0, 0, 0, 0, 0, room - len(p[n]))) for n in ("up", "down")]
        return _of_rank(own_experts, x, chosen, weights, parts, "ep", ranks, experts, None)

    return program


@pytest.mark.cases_by_default(2)
@pytest.mark.parametrize(
    ("experts", "tokens", "k", "ranks"),
    [(4, 2, 1, 2), (4, 4, 1, 2), (3, 2, 3, 2), (7, 3, 1, 3), (2, 6, 1, 3), (4, 2, 4, 2)],
)
def test_rows_come_back_to_their_tokens(experts, tokens, k, ranks):
    """Experts that do not divide, ranks without one, tokens that choose all of them: every count of
    rows from rank to rank, empty ones and all tokens to one expert among them.
    """
    assert prove(by_ftp(experts, k, ranks), experts, tokens, k, ranks).assumptions == []


@pytest.mark.slow
def test_with_gradients_by_hand_and_again_from_the_file(tmp_path):
    for program in (by_ftp(4, 1), by_hand(1)):
        prove(program, 4, 2, 1, grad=True)
    found = prove(by_ftp(4, 1), 4, 4, 1, grad=True)
    assert found.assumptions == []
    found.save(tmp_path / "found.json")
    assert check(load_certificate(tmp_path / "found.json")).assumptions == []


def overflow(p: Any, x: torch.Tensor) -> torch.Tensor:
    """An expert takes three of the four rows that it may get: wrong in 4 routings of 256."""
    _, chosen = routed(p, x, 1)
    every = ftp.axis.all_gather(chosen.flatten(), "ep")
    before = torch.arange(len(every))[:, None] > torch.arange(len(every))
    rank = (before & (every[:, None] == every)).sum(1)
    mine = rank.view(RANKS, -1).index_select(0, ftp.axis.axis_index("ep")[None])[0]
    return by_ftp(4, 1)(p, x) * (mine < 3)[:, None]


def test_a_fault_of_few_routings_is_refused():
    with pytest.raises(CertificateError):
        prove(overflow, 4, 4, 1)


FAULTS = {  # by the experts of a token and the tokens
    (1, 4): ("owner", "next owner", "next expert", "dropped", "order", "counts", "token"),
    (1, 6): ("inverse",),  # of two rows of a rank each order is its own inverse
    (2, 2): ("summed twice", "rows of the first range", "router gradient"),
}


@pytest.mark.cases_by_default(2)
@pytest.mark.parametrize(
    ("k", "tokens", "mutant"),
    slow_after(4, [(*size, m) for size, names in FAULTS.items() for m in names]),
)
def test_faults_are_refused_with_inputs_that_show_them(k, tokens, mutant):
    with pytest.raises(CertificateError) as e:
        prove(by_hand(k, mutant), 4, tokens, k, grad=mutant == "router gradient")
    params, x = drawn(4, tokens, None, 0)
    inputs: Any = e.value.inputs
    assert [i.shape for i in inputs] == [params[n].shape for n in sorted(params)] + [x.shape]


@pytest.mark.slow
def test_ranks_that_choose_by_other_numbers_are_refused():
    """A bias of the router's scores that is added once per rank."""
    with pytest.raises(CertificateError):
        prove(by_hand(1, "bias once per rank"), 4, 4, 1)


SIZES = st.sampled_from([(7, 3, 1, 3), (4, 2, 3, 2), (5, 2, 2, 3), (2, 8, 1, 2), (3, 4, 2, 2)])


@pytest.mark.slow
@settings(max_examples=5)
@given(SIZES, st.booleans())
def test_rows_come_back_with_gradients(size, grad):
    experts, tokens, k, ranks = size
    prove(by_ftp(experts, k, ranks), experts, tokens + -tokens % ranks, k, ranks, grad)


def test_what_it_is_not_for():
    def twice(p: Any, x: torch.Tensor) -> torch.Tensor:
        return FORM(p, FORM(p, x, 1), 1)

    mesh = ftp.AbstractMesh((RANKS,), ("ep",))
    given = mesh, (P(), P("ep")), P("ep"), *drawn(4, 2, None, 0)
    with pytest.raises(SpecError, match="this one chooses 2 times"):
        ftp.equivalent(twice, twice, *given, every_routing=True)
    with pytest.raises(SpecError, match=r"12 \*\* 6 routings(.|\n)*Give 4 tokens"):
        prove(by_ftp(4, 2), 4, 6, 2)


def test_other_comparisons_are_sampled():
    def layer(p: Any, x: torch.Tensor) -> torch.Tensor:
        return FORM(p, x, 1).relu()

    mesh = ftp.AbstractMesh((RANKS,), ("ep",))
    given = mesh, (P(), P("ep")), P("ep"), *drawn(4, 2, None, 0)
    (said,) = ftp.equivalent(layer, layer, *given, every_routing=True).assumptions
    assert "beside the routing" in said and "64 orders were drawn" in said


@pytest.mark.parametrize(
    ("name", "args", "kwargs"),
    [
        ("topk", ("x", 2), {}),
        ("topk", ("x", 2, 0, False), {}),
        ("argmax", ("x", 1), {}),
        ("min", ("x", 0), {}),
        ("sort", ("x",), {}),
        ("sort", ("x", 0, True), {}),
    ],
)
def test_keys_give_each_outcome_once(name, args, kwargs):
    x = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))
    choice = choice_of(name, x.shape, args, kwargs)
    assert isinstance(choice, ReferenceChoice)
    every = list(choice.routings())
    assert len(set(every)) == len(every) == choice.outcomes
    rows = x.movedim(choice.dim, -1)
    keys = (rows * 1e6).to(torch.int64).reshape(-1, rows.shape[-1])
    for routing, made in zip(every, choice.keys(every, keys), strict=True):
        made = made.view(rows.shape).movedim(-1, choice.dim)
        found = getattr(torch, name)(made, *args[1:], **kwargs)
        at = found if isinstance(found, torch.Tensor) else found[1]
        at = at.movedim(choice.dim, -1) if at.ndim == 2 else at[:, None]
        assert tuple(map(tuple, at.tolist())) == routing
        assert made.sort(dim=choice.dim).values.equal(
            keys.view(rows.shape).movedim(-1, choice.dim).sort(dim=choice.dim).values
        )
