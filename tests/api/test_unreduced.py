"""Values of which a sum is pending, as inputs and outputs of a program."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ftp
from ftp import P
from ftp.certification.checker import check
from ftp.errors import CertificateError, SpecError


def gradients(p, x):
    return torch.func.grad(lambda p: ((x @ p["a"]).relu() @ p["b"]).square().mean())(p)


@settings(max_examples=8, deadline=None)
@given(
    st.sampled_from([((2,), ("dp",)), ((3,), ("dp",)), ((2, 2), ("dp", "tp"))]), st.integers(1, 5)
)
def test_gradients_are_summed_once(mesh, rows: int):
    """Over two batches: as many collectives as over one, and they are one device's."""
    shape, names = mesh
    m, tp = ftp.simulated_mesh(shape, names), "tp" if "tp" in names else None
    g = torch.Generator().manual_seed(rows)
    p = {
        name: torch.randn(size, generator=g, dtype=torch.float64)
        for name, size in {"a": (3, 4), "b": (4, 5)}.items()
    }
    xs = torch.randn(2, rows, 3, generator=g, dtype=torch.float64)
    specs = {"a": P(None, tp), "b": P(tp)}
    pending = {name: P(*spec.entries, unreduced=("dp",)) for name, spec in specs.items()}
    local = ftp.spmd(gradients, m, (specs, P("dp")), pending, certify=True)
    add = ftp.spmd(
        lambda a, b: {k: a[k] + b[k] for k in a}, m, (pending, pending), specs, certify=True
    )
    assert not [r for r in local.lower(p, xs[0]).collectives if "dp" in r.axes]
    first, second = (local(p, x) for x in xs)
    made = add.lower(first, second).collectives
    assert [(r.op, len(r.members)) for r in made] == [("all_reduce", 2)]
    for name, found in add(first, second).items():
        wanted = gradients(p, xs[0])[name] + gradients(p, xs[1])[name]
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_what_the_page_shows():
    """docs/training.md's lines, with the collectives that it names."""
    page = (Path(__file__).resolve().parents[2] / "docs/training.md").read_text()
    (block,) = re.findall(r"```python\n(pending = .*?)```", page, flags=re.S)
    mesh, w, x = ftp.simulated_mesh((2, 2), ("dp", "tp")), torch.randn(3, 4), torch.randn(4, 3)
    here = {
        "P": P,
        "ftp": ftp,
        "torch": torch,
        "mesh": mesh,
        "loss": lambda w, x: (x @ w).square().mean(),
    }
    exec(block, here)
    g = here["gradients"](w, x)
    made = [
        here[name].lower(*args).collectives
        for name, args in (("gradients", (w, x)), ("add", (g, g)), ("reduced", (g,)))
    ]
    assert [[r.op for r in c if "dp" in r.axes] for c in made] == [[], [], ["all_reduce"]]
    torch.testing.assert_close(
        here["reduced"](here["add"](g, g)), 2 * torch.func.grad(here["loss"])(w, x)
    )


def test_a_function_that_is_not_linear_gets_the_sum():
    mesh = ftp.simulated_mesh((2,), ("tp",))
    x = torch.randn(3, 5, dtype=torch.float64)
    step = ftp.spmd(lambda x: x.sin(), mesh, P(unreduced=("tp",)), P(None, "tp"), certify=True)
    assert [r.op for r in step.lower(x).collectives] == ["reduce_scatter"]
    torch.testing.assert_close(step(x), x.sin(), rtol=1e-12, atol=1e-12)
    twice = ftp.spmd(lambda x: 2 * x, mesh, P("tp"), P(unreduced=("tp",)), certify=True)
    assert not twice.lower(x).collectives
    torch.testing.assert_close(twice(x), 2 * x, rtol=0, atol=0)


@pytest.mark.parametrize("misfit", [ftp.units("tp", 6), ftp.units("tp", 2, pack=(2, 4))])
def test_a_sum_of_shards_that_the_planner_gathers_first(misfit):
    """A unit that ranks share, and packs of several sizes, are no cut that the planner knows."""
    mesh = ftp.simulated_mesh((3, 2), ("dp", "tp"))
    x = torch.randn(4, 6, dtype=torch.float64)
    pending = P(None, misfit, unreduced="dp")
    step = ftp.spmd(lambda x: x.sin(), mesh, pending, P("dp"))
    torch.testing.assert_close(step(x), x.sin(), rtol=1e-12, atol=1e-12)
    back = ftp.spmd(lambda x: 2 * x, mesh, P("dp"), pending, certify=True)
    torch.testing.assert_close(back(x), 2 * x, rtol=0, atol=0)


@pytest.mark.parametrize("held", [P(), P("tp"), P(unreduced=("tp",))])
def test_a_certificate_tells_a_term_from_a_value(held: P):
    """A value on every rank, or a shard, is no term of a sum; a term is no value."""
    mesh, x = ftp.simulated_mesh((2,), ("tp",)), torch.ones(4)
    made = ftp.certify(ftp.lower(lambda x: 2 * x, mesh, (held,), x, out_specs=held))
    assert made.unreduced.outputs == (held.unreduced,)
    claimed = () if held.unreduced else ("tp",)
    with pytest.raises(CertificateError, match="output 0"):
        check(replace(made, unreduced=replace(made.unreduced, outputs=(claimed,))))


def test_errors():
    mesh, x = ftp.simulated_mesh((2,), ("tp",)), torch.ones(4)
    with pytest.raises(SpecError, match=r"parameters are no pending sums.*ftp\.spmd"):
        ftp.shard(lambda p: p.sum(), mesh, P(unreduced=("tp",)))(x)
    with pytest.raises(SpecError, match="is a bool, which is no sum"):
        ftp.spmd(lambda x: x, mesh, P(unreduced=("tp",)))(x > 0)
    with pytest.raises(SpecError, match="the mesh has no axis 'dp'"):
        ftp.spmd(lambda x: x, mesh, P(), P(unreduced=("dp",)))(x)
    with pytest.raises(SpecError, match=r"is no constraint.*planner's choice. Give P\(\)"):
        ftp.constrain(x, P(unreduced=("tp",)))
    with pytest.raises(SpecError, match=r"the result has spec .*reduce the value first"):
        ftp.local(lambda x: x, mesh, P(), P(unreduced=("tp",)), check=False)(x)


@pytest.mark.parametrize(("entries", "axes"), [(("tp",), ("tp",)), ((), ("tp", "tp"))])
def test_an_axis_is_used_once(entries, axes):
    with pytest.raises(SpecError, match="uses mesh axis 'tp' twice: a sum over an axis"):
        P(*entries, unreduced=axes)
