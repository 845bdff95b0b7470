"""Per-rank code in certificates: run as it is written, and equal where its out specs say so."""

import pytest
import torch

import ftp
from ftp import P
from ftp.__main__ import main
from ftp.api.certify import certify
from ftp.certification import rank_code_run
from ftp.certification.checker import check
from ftp.errors import CertificateError

TP = ftp.AbstractMesh((4,), ("tp",))
GRID = ftp.AbstractMesh((2, 2), ("dp", "tp"))
aten = torch.ops.aten


def own(x, up, down):
    return ftp.axis.all_reduce(torch.tanh(x @ up) @ down, "tp")


def layer(mesh=GRID, out=P("dp")):
    return ftp.local(own, mesh, (P("dp"), P(None, "tp"), P("tp")), out)


def lowered(fn=None) -> ftp.Lowered:
    fn = fn or layer()
    params = {name: torch.randn(4, 4) for name in ("down", "up")}
    step = ftp.shard(
        lambda p, x: fn(x, p["up"], p["down"]).square().mean(),
        GRID,
        {"down": P("tp"), "up": P(None, "tp")},
        batch_specs=P("dp"),
    )
    return step.lower(params, torch.randn(6, 4))


def test_forward_and_backward_code_are_proven(tmp_path, capsys):
    certificate = certify(lowered())
    assert sum(o.ports is not None for o in certificate.operations) == 2
    assert certificate.assumptions == []
    certificate.save(tmp_path / "local.json")
    assert main(["certify", str(tmp_path / "local.json")]) == 0
    assert "assumes" not in capsys.readouterr().out


def test_ranks_that_run_other_code_are_refused():
    certificate = certify(lowered())
    other = {aten.tanh.default: aten.relu.default, aten.tanh_.default: aten.relu_.default}
    nodes = [n for g in certificate.ranks.graphs for n in g.nodes if n.target in other]
    assert nodes
    for node in nodes:
        node.target = other[node.target]
    with pytest.raises(CertificateError, match="is not what the per-rank code computes"):
        check(certificate)


def ring(x):
    """A sum without an all-reduce."""
    total = x
    for _ in range(3):
        x = ftp.axis.ppermute(x, "tp", [(r, (r + 1) % 4) for r in range(4)])
        total = total + x
    return total


def test_equal_results_that_only_a_run_shows():
    fn = ftp.local(ring, TP, P("tp"), P(), check=False)
    step = ftp.shard(lambda p, x: (fn(p) * x).sum(), TP, P("tp"), batch_specs=P())
    assert certify(step.lower(torch.ones(8, 3), torch.ones(2, 3))).assumptions == []


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: 2 * x,
        lambda x: x * (1 + ftp.axis.axis_index("tp")),
        lambda x: ftp.axis.ppermute(x, "tp", [(0, 1), (1, 0)]),
    ],
    ids=["shards", "the index", "one hop"],
)
def test_out_specs_that_are_wrong_are_refused(fn):
    taken = ftp.local(fn, TP, P("tp"), P(), check=False)
    with pytest.raises(CertificateError, match=r"other values on rank \d than on rank 0.*along tp"):
        certify(ftp.lower(lambda x: taken(x), TP, P("tp"), torch.ones(8, 3)))


def test_the_certificate_says_what_is_left(monkeypatch):
    monkeypatch.setattr(rank_code_run, "LARGEST", 10)
    certificate = certify(lowered())
    forward, backward = certificate.assumptions
    for line in (forward, backward):
        assert "test_rank_code.py" in line and "is run on each rank as it is written" in line
    fn = ftp.local(ring, TP, P("tp"), P(), check=False)
    program = ftp.lower(lambda x: fn(x), TP, P("tp"), torch.ones(8, 3))
    assert [line.split(" returns ")[1:] for line in certify(program).assumptions] == [[], ["P()"]]


def test_more_ranks_than_are_run():
    mesh = ftp.AbstractMesh((32, 4), ("dp", "tp"))
    fn = layer(mesh)
    specs = (P("dp"), P(None, "tp"), P("tp"))
    args = torch.ones(64, 4), torch.ones(4, 8), torch.ones(8, 4)
    (line,) = certify(ftp.lower(lambda *a: fn(*a), mesh, specs, *args)).assumptions
    assert line.endswith("is run on each rank as it is written")


def test_rows_that_travel_by_counts():
    def send(x, counts):
        return ftp.axis.all_to_all(x, "tp", send_counts=counts, bound=8)

    fn = ftp.local(send, TP, P("tp"), P("tp"))
    program = ftp.lower(
        lambda *a: fn(*a), TP, P("tp"), torch.ones(8, 3), torch.ones(16, dtype=torch.int64)
    )
    (line,) = certify(program).assumptions
    assert line.endswith("is run on each rank as it is written")


def test_code_over_some_axes():
    """Its results are seen to be equal; that its collectives do what they say is assumed."""
    mean = ftp.local(
        lambda x, w: ftp.axis.all_reduce((x @ w).sum(0), "dp"),
        GRID,
        (P("dp"), P()),
        P(),
        axes=("dp",),
    )
    step = ftp.spmd(mean, GRID, (P("dp"), P(None, "tp")), P("tp"))
    (line,) = certify(step.lower(torch.ones(4, 3), torch.ones(3, 2))).assumptions
    assert line.startswith("all_reduce over dp") and line.endswith("does what it says")
