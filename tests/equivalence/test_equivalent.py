"""``ftp.equivalent``: what it takes, what it proves, what it refuses and how."""

import json
import linecache
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import Partial, Replicate, Shard

import ftp
from ftp import P
from ftp.certification.certificate_file import load_certificate
from ftp.certification.checker import check
from ftp.errors import CertificateError, SpecError, TraceError, Undecided

pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")
MESH = ftp.AbstractMesh((2,), ("tp",))
GRID = ftp.AbstractMesh((2, 2), ("dp", "tp"))
X, W = torch.randn(4, 6, dtype=torch.float64), torch.randn(6, 3, dtype=torch.float64)
ROWS = (P(None, "tp"), P("tp"))


def prove(reference, program, *args, specs: Any = ROWS, out: Any = P(), mesh=MESH, **options):
    return ftp.equivalent(reference, program, mesh, specs, out, *(args or (X, W)), **options)


def summed(x, w):
    y = x @ w
    dist.all_reduce(y)
    return y


def test_a_certificate_is_saved_and_checked_again(tmp_path):
    path = tmp_path / "rows.json"
    prove(torch.matmul, summed).save(path)
    again = check(load_certificate(path))
    assert [o.name for o in again.operations] == ["args[0]", "args[1]", "matmul"] or again
    assert len(again.ranks.at) == 2


def test_a_certificate_whose_program_is_altered_is_refused(tmp_path):
    path = tmp_path / "rows.json"
    certificate = prove(torch.matmul, summed)
    for graph in certificate.ranks.graphs:
        for node in graph.nodes:
            if node.args and node.args[0] == "all_reduce":
                node.args = (*node.args[:5], "max", *node.args[6:])
    certificate.save(path)
    with pytest.raises(CertificateError, match="output on rank 0 is not what the reference"):
        check(load_certificate(path))


@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_a_certificate_of_another_number_of_ranks_is_refused(ranks):
    certificate = prove(torch.matmul, summed)
    with pytest.raises(CertificateError, match=r"has ranks of shape \(2,\), on a mesh of"):
        check(replace(certificate, axes={"tp": ranks}))


def test_programs_that_no_rank_runs_are_refused():
    certificate = prove(torch.matmul, summed)
    ranks = replace(certificate.ranks, graphs=certificate.ranks.graphs * 2)
    with pytest.raises(CertificateError, match="graphs, and offsets for"):
        check(replace(certificate, ranks=ranks))


def functional(x, w):
    from torch.distributed._functional_collectives import all_reduce

    return all_reduce(x @ w, "sum", MESH.get_group("tp"))


def asynchronous(x, w):
    y = x @ w
    work: Any = dist.all_reduce(y, async_op=True)
    work.wait()
    return y


def scattered_and_gathered(x, w):
    y = x @ w
    part = y.new_empty(2, 3)
    dist.reduce_scatter_tensor(part, y)
    parts = [torch.empty_like(part) for _ in range(2)]
    dist.all_gather(parts, part)
    return torch.cat(parts)


def reduced_and_broadcast(x, w):
    y = x @ w
    dist.reduce(y, 0)
    dist.broadcast(y, 0)
    return y


def per_rank(x, w):
    return ftp.axis.all_reduce(x @ w, "tp")


def by_place(x, w):
    """Reads its rank and sends by hand."""
    y = x @ w
    other = torch.empty_like(y)
    peer = 1 - dist.get_rank()
    ops = [dist.P2POp(dist.isend, y, peer), dist.P2POp(dist.irecv, other, peer)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return y + other


@pytest.mark.parametrize(
    "program",
    [functional, asynchronous, scattered_and_gathered, reduced_and_broadcast, per_rank, by_place],
    ids=lambda p: p.__name__,
)
def test_collectives_in_every_form(program):
    prove(torch.matmul, program)


def test_ftp_axis_with_gradients():
    prove(torch.matmul, per_rank, grad=True)


@pytest.mark.parametrize("keepdim", [False, True])
def test_gradients_of_products(keepdim):
    def product(x):
        return (x * x + x).prod(0, keepdim=keepdim)

    out = P(None, "tp") if keepdim else P("tp")
    prove(product, product, X, specs=(P(None, "tp"),), out=out, grad=True)
    with pytest.raises(CertificateError, match="is not what the reference computes"):
        prove(product, lambda x: product(x) * 2, X, specs=(P(None, "tp"),), out=out, grad=True)


def test_the_groups_of_a_mesh_of_two_axes():
    def program(x, w):
        y = x @ w
        dist.all_reduce(y, group=GRID.get_group("tp"))
        return y

    specs = (P("dp", "tp"), P("tp"))
    prove(torch.matmul, program, mesh=GRID, specs=specs, out=P("dp"))

    def wrong(x, w):
        y = x @ w
        dist.all_reduce(y, group=GRID.get_group("dp"))  # over dp
        return y

    with pytest.raises(CertificateError) as refused:
        prove(torch.matmul, wrong, mesh=GRID, specs=specs, out=P("dp"))
    assert "over dp" in (refused.value.line or "")


def test_dtensors():
    def program(x, w):
        return (x @ w).redistribute(placements=[Replicate()])

    specs = ([Shard(1)], [Shard(0)])
    prove(torch.matmul, program, specs=specs, out=[Replicate()])
    prove(torch.matmul, lambda x, w: x @ w, specs=specs, out=[Partial()])


def test_an_unreduced_output_is_the_sum_of_the_ranks():
    prove(torch.matmul, torch.matmul, out=P(unreduced=("tp",)), grad=True)


def test_an_unreduced_input():
    def program(x, w):
        x = x.clone()
        dist.all_reduce(x)
        return x @ w

    prove(torch.matmul, program, specs=(P(unreduced=("tp",)), P()))
    with pytest.raises(CertificateError):
        prove(torch.matmul, torch.matmul, specs=(P(unreduced=("tp",)), P()))


def test_uneven_shards_and_three_ranks():
    def program(x, w):
        y = x @ w
        dist.all_reduce(y)
        return y

    mesh = ftp.AbstractMesh((3,), ("tp",))
    args = torch.randn(2, 7, dtype=torch.float64), torch.randn(7, 3, dtype=torch.float64)
    prove(torch.matmul, program, *args, mesh=mesh)


# Programs that cannot run.


def test_a_deadlock_names_both_lines():
    def program(x, w):
        y = x @ w
        if dist.get_rank() == 0:
            dist.all_reduce(y)
        else:
            dist.broadcast(y, 0)
        return y

    with pytest.raises(CertificateError, match=r"all_reduce\(sum\).*on one rank, broadcast") as e:
        prove(torch.matmul, program)
    assert e.value.line


def test_a_collective_that_one_rank_skips():
    def program(x, w):
        y = x @ w
        if dist.get_rank() == 0:
            dist.all_reduce(y)  # alone
        return y

    with pytest.raises(CertificateError, match="wait for each other for ever") as e:
        prove(torch.matmul, program)
    assert "rank 1 has ended" in str(e.value) and "# alone" in (e.value.line or "")


def test_both_ranks_receive_first():
    def program(x, w):
        y = x @ w
        dist.recv(y, 1 - dist.get_rank())
        return y

    with pytest.raises(CertificateError, match="wait for each other for ever"):
        prove(torch.matmul, program)


def test_a_result_that_is_read_before_it_arrives():
    def program(x, w):
        y = x @ w
        work: Any = dist.all_reduce(y, async_op=True)
        z = y + 0  # too early
        work.wait()
        return z

    with pytest.raises(CertificateError, match="used before it is waited for") as e:
        prove(torch.matmul, program)
    assert "# too early" in (e.value.line or "")


def test_a_result_that_is_returned_before_it_arrives():
    def program(x, w):
        y = x @ w
        dist.all_reduce(y, async_op=True)  # nobody waits
        return y

    with pytest.raises(CertificateError, match=r"# nobody waits is returned before") as e:
        prove(torch.matmul, program)
    assert "# nobody waits" in (e.value.line or "")


def test_an_index_beyond_the_end_is_an_error_on_its_line():
    """The rows of a table that another rank holds are to be masked."""
    ids, table = torch.arange(8), torch.randn(8, 3)

    def program(ids, table):
        found = F.embedding(ids - dist.get_rank() * 4, table)  # not masked
        dist.all_reduce(found)
        return found

    with pytest.raises(CertificateError, match=r"on rank 0 aten.embedding.default raises") as e:
        prove(F.embedding, program, ids, table, specs=(P(), P("tp")))
    assert e.value.rank == 0 and "# not masked" in (e.value.line or "")
    with pytest.raises(CertificateError, match=r"in the reference aten.embedding.default raises"):
        prove(F.embedding, program, ids + 1, table, specs=(P(), P("tp")))


def test_integers_that_neither_program_takes_are_not_drawn():
    """Sizes in the range of those given, whose sum is another."""
    sizes, x = torch.tensor([1, 3]), torch.randn(4, 2)

    def rows(sizes, x):
        return x.index_add(0, sizes.cumsum(0) - 1, x[:2])

    prove(rows, rows, sizes, x, specs=P())


def test_a_program_that_ends_its_process_group():
    def program(x, w):
        y = summed(x, w)
        dist.destroy_process_group()
        return y

    prove(torch.matmul, program)
    assert not dist.is_initialized()


def test_a_value_that_is_read():
    with pytest.raises(TraceError, match="reads the value of a tensor"):
        prove(torch.matmul, lambda x, w: x @ w if x.sum().item() > 0 else w)
    with pytest.raises(TraceError, match="depends on the data"):
        prove(torch.matmul, lambda x, w: x @ w if bool(x.sum() > 0) else w)


def test_a_shape_that_depends_on_the_data():
    def program(x, w):
        y = summed(x, w)
        return y[y > 0].sum()

    with pytest.raises(
        TraceError, match=r"Rank 0.*y\[y > 0\](.|\n)*makes a shape of it .aten.nonzero"
    ):
        prove(lambda x, w: (x @ w).relu().sum(), program)


def test_a_collective_that_is_polled():
    """Waiting in a loop is an error, not a hang."""

    def program(x, w):
        y = x @ w
        work: Any = dist.all_reduce(y, async_op=True)
        while not work.is_completed():
            pass
        return y

    with pytest.raises(TraceError, match=r"work.is_completed(.|\n)*depends on time. Wait"):
        prove(torch.matmul, program)
    assert dist.Work.is_completed.__name__ == "is_completed"


def test_a_loop_that_never_ends(monkeypatch):
    """A rank's program that waits for what a peer writes is an error, not a hang."""
    monkeypatch.setattr("ftp.equivalence.recorder.LONGEST", 500)

    def program(x, w):
        flag = torch.zeros(1)
        while True:
            dist.broadcast(flag, 0)
            flag = flag.clone()

    with pytest.raises(TraceError, match=r"flag.clone(.|\n)*has run 500 ops and goes on"):
        prove(torch.matmul, program)


def test_gradients_that_the_engine_adds_up_have_the_line_of_their_use():
    """One of two uses of an argument lacks the sum of its gradients."""

    def reference(x, w):
        return (x @ w).tanh() * (x @ w)

    def program(x, w):
        h = SummedGradient.apply(x)
        return (h @ w).tanh() * (x @ w)  # here

    with pytest.raises(CertificateError) as e:
        prove(
            reference,
            program,
            X,
            W[:, :2],
            specs=(P(), P(None, "tp")),
            out=P(None, "tp"),
            grad=True,
        )
    assert "# here" in (e.value.line or "") and "at ," not in str(e.value)


class SummedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


def test_one_rank_that_raises():
    def program(x, w):
        if dist.get_rank() == 1:
            raise ValueError("nothing to do")
        return summed(x, w)

    with pytest.raises(TraceError, match=r"Rank 1: .*ValueError(.|\n)*nothing to do"):
        prove(torch.matmul, program)


def test_an_input_that_is_written():
    def program(x, w):
        return x.mul_(2) @ w

    with pytest.raises(TraceError, match="writes to its input"):
        prove(torch.matmul, program)

    def reduces(x, w):
        dist.all_reduce(x)
        return x @ w

    with pytest.raises(TraceError, match=r"writes to its input .*all_reduce"):
        prove(torch.matmul, reduces)


def test_shapes_that_fit_no_spec():
    with pytest.raises(SpecError, match=r"has shape \(4, 3\) on rank 0.*gives this rank \(2, 3\)"):
        prove(torch.matmul, summed, out=P("tp"))
    with pytest.raises(SpecError, match="returns 2 tensors; the reference returns 1"):
        prove(torch.matmul, lambda x, w: (x @ w, x))
    with pytest.raises(SpecError, match=r"float32 on rank 0; the reference's is of torch.float64"):
        prove(torch.matmul, lambda x, w: summed(x, w).float())


# What is proven of functions.


def test_an_unknown_function_is_free_but_equal_on_equal_operands():
    def program(x, w):
        return torch.special.bessel_j0(summed(x, w))

    prove(lambda x, w: torch.special.bessel_j0(x @ w), program)


def test_undecided_names_what_it_cannot_see_through():
    def program(x, w):
        y = summed(x, w)
        return y.cos() * y.cos() - y.sin() * y.sin()

    with pytest.raises(Undecided, match=r"aten\.cos\.default") as e:
        prove(lambda x, w: (2 * (x @ w)).cos(), program)
    assert "aten.sin.default" in e.value.ops


def test_inputs_that_show_the_difference():
    with pytest.raises(CertificateError) as e:
        prove(torch.matmul, torch.matmul)
    inputs: Any = e.value.inputs
    x, w = inputs
    whole, half = x @ w, x[:, :3] @ w[:3]
    assert (e.value.output, e.value.rank) == ("output", 0)
    assert not torch.allclose(whole, half)


def test_a_rounding_is_no_identity():
    def program(x, w):
        return summed(x, w).to(torch.bfloat16).to(torch.float64)

    with pytest.raises(CertificateError):
        prove(torch.matmul, program)


def test_softmax_over_a_cut_dim_with_another_maximum():
    """exp is a homomorphism: what is subtracted cancels."""

    def program(x):
        e = (x - x.max(-1, keepdim=True).values.max()).exp()
        total = e.sum(-1, keepdim=True)
        return e / total

    ftp.equivalent(lambda x: x.softmax(-1), program, MESH, P("tp"), P("tp"), X, grad=True)


def test_masked_attention_skips_blocks():
    """-inf adds nothing to a softmax: a rank may leave out what its mask hides."""

    def reference(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def program(q, k, v):
        n = q.shape[-2]
        ks, vs = ([torch.empty_like(t) for _ in range(2)] for t in (k, v))
        dist.all_gather(ks, k)
        dist.all_gather(vs, v)
        seen = dist.get_rank() + 1
        k, v = torch.cat(ks[:seen], -2), torch.cat(vs[:seen], -2)
        mask = torch.ones(n, n * seen, dtype=torch.bool).tril(n * (seen - 1))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    q, k, v = torch.randn(3, 2, 4, 8, dtype=torch.float64)
    spec = P(None, "tp")
    ftp.equivalent(reference, program, MESH, spec, spec, q, k, v)


def test_the_command_line(tmp_path, capsys):
    from ftp.__main__ import main

    file = tmp_path / "layer.py"
    file.write_text(
        "import torch, ftp\nimport torch.distributed as dist\n"
        "def rows(x, w):\n    y = x @ w\n    dist.all_reduce(y)\n    return y\n"
        "def right():\n    mesh = ftp.AbstractMesh((2,), ('tp',))\n"
        "    specs = ftp.P(None, 'tp'), ftp.P('tp')\n"
        "    return torch.matmul, rows, mesh, specs, ftp.P(), torch.ones(2, 4), torch.ones(4, 2)\n"
        "def wrong():\n    return (torch.matmul, torch.matmul, *right()[2:])\n"
    )
    saved = tmp_path / "proof.json"
    assert main(["prove", f"{file}:right", "--save", str(saved)]) == 0
    assert "proven" in capsys.readouterr().out
    assert json.loads(saved.read_text())["ftp certificate"]
    assert main(["certify", str(saved)]) == 0
    assert "1 collectives, 2 ranks on (tp 2)" in capsys.readouterr().out
    assert main(["prove", f"{file}:rows"]) == 1
    assert "rows takes x, w. The function takes nothing" in capsys.readouterr().err
    assert main(["prove", f"{file}:wrong"]) == 1
    assert "is not what the reference computes" in capsys.readouterr().err


def test_the_page(tmp_path, monkeypatch):
    """docs/prove.md in one scope, as a reader runs it."""
    page = Path(__file__).resolve().parents[2] / "docs/prove.md"
    monkeypatch.chdir(tmp_path)
    scope: dict = {"__name__": "prove_page"}
    lines: list[str] = []
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if line == "```python":
            lines = ["\n"] * number
        elif line == "```" and lines:
            file = Path("prove_page.py")
            source = "".join(lines)
            linecache.cache[str(file)] = (len(source), None, source.splitlines(True), str(file))
            exec(compile(source, str(file), "exec"), scope)
            lines = []
        elif lines:
            lines.append(line + "\n")
