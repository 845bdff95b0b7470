"""Parts of ranks filled up to equal lengths: no collective, exact gradients, and a proof that
refuses another length.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ftp
from ftp import P
from ftp.api.certify import certificate_of
from ftp.certification.checker import check
from ftp.ops.fill_up import CUT_OFF, FILL_UP, filled_up


@settings(max_examples=4)
@given(st.integers(1, 9), st.integers(2, 4))
def test_nothing_moves_and_gradients_are_exact(rows, n):
    mesh = ftp.simulated_mesh(n, "ep")
    x = torch.arange(1.0, 2 * rows + 1, dtype=torch.float64).view(rows, 2)

    def loss(x):
        each = ftp.local(
            lambda p: p.square() * (1 + ftp.axis.axis_index("ep")), mesh, P("ep"), P("ep")
        )
        return each(filled_up(x, "ep", n)).sum()

    step = ftp.shard(loss, mesh, P("ep"), certify=True)
    owner = torch.arange(rows, dtype=torch.float64)[:, None] // -(-rows // n)
    torch.testing.assert_close(step(x), ((x.square() * (1 + owner)).sum(), 2 * x * (1 + owner)))
    assert [c.op for c in step.lower(x).collectives] == ["all_reduce"]


def test_transforms():
    x, t = torch.randn(2, 5, 3, dtype=torch.float64)
    grown = torch.nn.functional.pad(x, (0, 0, 0, 1))
    assert torch.equal(filled_up(x, "ep", 3), grown)
    assert torch.equal(torch.func.vmap(lambda r: filled_up(r, "ep", 3), 1, 1)(x), grown)
    _, tangent = torch.func.jvp(lambda x: filled_up(x, "ep", 3), (x,), (t,))
    assert torch.equal(tangent, torch.nn.functional.pad(t, (0, 0, 0, 1)))
    assert torch.autograd.gradcheck(lambda x: filled_up(x, "ep", 3), x.requires_grad_())


@pytest.mark.parametrize("rows", [4, 9])
def test_a_length_that_moves_where_parts_begin_is_refused(rows):
    """5 rows over 2 ranks begin at 0 and 3."""
    op = FILL_UP if rows > 5 else CUT_OFF
    mesh = ftp.AbstractMesh((2,), ("ep",))
    with pytest.raises(ftp.errors.RuleError, match="changes the start of a rank's rows"):
        ftp.lower(lambda x: op(x, "ep", 2, rows), mesh, P("ep"), torch.ones(5), out_specs=P("ep"))


def test_a_proof_refuses_other_lengths():
    """On the rank that owns two of eight: one more row, or one less."""
    mesh = ftp.AbstractMesh((3,), ("ep",))
    f = ftp.local(lambda x: x * 2, mesh, P("ep"), P("ep"))
    step = ftp.spmd(lambda x: f(filled_up(x, "ep", 3)), mesh, P("ep"), P("ep"))
    for rows in (3, 2, 4):
        certificate = certificate_of(step.lower(torch.ones(8, 2))._program)
        nodes = [n for g in certificate.ranks.graphs for n in g.nodes if n.target is FILL_UP]
        assert {n.args[3] for n in nodes} == {3}
        nodes[-1].args = (*nodes[-1].args[:3], rows)
        if rows == 3:
            check(certificate)
        else:
            with pytest.raises(ftp.errors.CertificateError, match="fill_up"):
                check(certificate)
