"""The constraint op: equal values, under every transform, in both directions of a trace."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from ftp.constrain import constrain, spec_from_str, spec_to_str
from ftp.errors import SpecError
from ftp.spec import P, Units

OP = torch.ops.ftp.constrain.default

names = st.text(min_size=1)
cuts = st.one_of(names, st.builds(Units, names, st.integers(1, 1000)))
entries = st.one_of(st.none(), cuts, st.lists(cuts, min_size=2, max_size=3).map(tuple))


@given(st.lists(entries).map(lambda e: P(*e)))
def test_parse_is_the_inverse_of_print(spec):
    assert spec_from_str(spec_to_str(spec)).entries == spec.entries


def pinned(x):
    return constrain(x.sin(), P("dp")).cos().sum()


def free(x):
    return x.sin().cos().sum()


@pytest.mark.filterwarnings("ignore:.torch.jit.script")  # torch's own, when it first loads forward-mode rules
@pytest.mark.parametrize(
    "transform",
    [
        torch.func.grad,
        torch.func.jacrev,
        torch.func.jacfwd,
        torch.func.hessian,
        lambda f: torch.vmap(torch.func.grad(f)),
        lambda f: lambda x: torch.func.jvp(f, (x,), (x.cos(),))[1],
        lambda f: torch.func.grad(lambda x: torch.func.grad(f)(x).square().sum()),
    ],
)
def test_transforms(transform):
    x = torch.linspace(0, 1, 6).reshape(3, 2)
    torch.testing.assert_close(transform(pinned)(x), transform(free)(x))


def test_backward_in_eager():
    x = torch.linspace(0, 1, 6).requires_grad_()
    pinned(x).backward()
    torch.testing.assert_close(x.grad, torch.func.grad(free)(x.detach()))


def specs_in(gm):
    return [spec_from_str(n.args[1]) for n in gm.graph.nodes if n.target is OP]


@pytest.mark.parametrize("functionalized", [False, True])
def test_value_and_gradient_are_pinned(functionalized):
    f = torch.func.grad_and_value(pinned)
    f = torch.func.functionalize(f, remove="mutations") if functionalized else f
    gm = make_fx(f, tracing_mode="fake")(torch.ones(3, 2))
    assert specs_in(gm) == [P("dp"), P("dp")]
    gm.graph.eliminate_dead_code()
    assert specs_in(gm) == [P("dp"), P("dp")]


@pytest.mark.parametrize(("dim", "spec"), [(0, P(None, "dp", "tp")), (1, P("dp", None, "tp")), (2, P("dp", "tp"))])
def test_the_mapped_dim_is_not_cut(dim, spec):
    gm = make_fx(torch.vmap(lambda x: constrain(x, P("dp", "tp")), in_dims=dim), tracing_mode="fake")(torch.ones(2, 3, 4))
    assert specs_in(gm) == [spec]


def test_a_copy():
    x = torch.ones(2)
    y = constrain(x, P())
    y += 1
    assert x.tolist() == [1, 1]


def test_errors():
    with pytest.raises(SpecError) as error:
        constrain(torch.ones(2, 3), P("dp", None, "tp"))
    assert str(error.value).splitlines()[0].endswith('constrain(torch.ones(2, 3), P("dp", None, "tp"))')
    assert "test_constrain.py:" in str(error.value)
    assert "P('dp', None, 'tp') has 3 entries, but the tensor that it pins has 2 dims, shape (2, 3). Give at most 2." in str(error.value)
    with pytest.raises(SpecError, match=r"takes a spec such as P\('dp', None\), not 'dp', a str"):
        constrain(torch.ones(2), "dp")  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="pins a tensor, not 3, a int"):
        constrain(3, P())  # type: ignore[arg-type]
