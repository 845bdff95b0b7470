"""The constraint op: equal values, under every transform, in both directions of a trace."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from plan_reshards import unbucketed
from torch.fx.experimental.proxy_tensor import make_fx

import ftp
from ftp.errors import SpecError
from ftp.ops.constrain import Pin, constrain, pin_from_str, pin_to_str
from ftp.sharding.spec import P, Units

OP = torch.ops.ftp.constrain.default

names = st.text(min_size=1)
cuts = st.one_of(names, st.builds(Units, names, st.integers(1, 1000)))
entries = st.one_of(st.none(), cuts, st.lists(cuts, min_size=2, max_size=3).map(tuple))


def once(listed):
    """Entries without the cuts of an axis that cuts before."""
    seen: set[str] = set()
    found = []
    for entry in listed:
        parts = entry if isinstance(entry, tuple) else () if entry is None else (entry,)
        new = []
        for part in parts:
            axis = part.axis if isinstance(part, Units) else part
            new += [] if axis in seen else [part]
            seen.add(axis)
        found.append(tuple(new) if len(new) > 1 else new[0] if new else None)
    return found


@given(
    st.builds(
        Pin,
        st.lists(entries).map(lambda e: P(*once(e))),
        st.none() | st.lists(names, min_size=1).map(tuple),
    )
)
def test_parse_is_the_inverse_of_print(pin):
    parsed = pin_from_str(pin_to_str(pin))
    assert parsed == pin and parsed.spec.entries == pin.spec.entries


def pinned(x):
    return constrain(x.sin(), P("dp")).cos().sum()


def free(x):
    return x.sin().cos().sum()


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
    return [pin_from_str(n.args[1]).spec for n in gm.graph.nodes if n.target is OP]


@pytest.mark.parametrize("functionalized", [False, True])
def test_value_and_gradient_are_pinned(functionalized):
    f = torch.func.grad_and_value(pinned)
    f = torch.func.functionalize(f, remove="mutations") if functionalized else f
    gm = make_fx(f, tracing_mode="fake")(torch.ones(3, 2))
    assert specs_in(gm) == [P("dp"), P("dp")]
    gm.graph.eliminate_dead_code()
    assert specs_in(gm) == [P("dp"), P("dp")]


@pytest.mark.parametrize(
    ("dim", "spec"), [(0, P(None, "dp", "tp")), (1, P("dp", None, "tp")), (2, P("dp", "tp"))]
)
def test_the_mapped_dim_is_not_cut(dim, spec):
    gm = make_fx(
        torch.vmap(lambda x: constrain(x, P("dp", "tp")), in_dims=dim), tracing_mode="fake"
    )(torch.ones(2, 3, 4))
    assert specs_in(gm) == [spec]


def test_a_copy():
    x = torch.ones(2)
    y = constrain(x, P())
    y += 1
    assert x.tolist() == [1, 1]


def test_errors():
    with pytest.raises(SpecError) as error:
        constrain(torch.ones(2, 3), P("dp", None, "tp"))
    assert (
        str(error.value)
        .splitlines()[0]
        .endswith('constrain(torch.ones(2, 3), P("dp", None, "tp"))')
    )
    assert "test_constrain.py:" in str(error.value)
    assert (
        "P('dp', None, 'tp') has 3 entries, but the tensor that it pins has 2 dims, shape (2, 3)."
        " Give at most 2." in str(error.value)
    )
    with pytest.raises(SpecError, match=r"takes a spec such as P\('dp', None\), not 'dp', a str"):
        constrain(torch.ones(2), "dp")  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="pins a tensor, not 3, a int"):
        constrain(3, P())  # type: ignore[arg-type]
    with pytest.raises(
        SpecError,
        match=r"P\('dp'\) names 'dp', which axes=\('tp',\) does not list.",
    ):
        constrain(torch.ones(2), P("dp"), axes="tp")
    with pytest.raises(SpecError, match=r"axes=\(\): it takes the name of a mesh axis"):
        constrain(torch.ones(2), P(), axes=())
    with pytest.raises(
        SpecError,
        match=r"P\(\.\.\., 'tp', None\) has 3 entries, but the tensor that it pins has 1 dims",
    ):
        constrain(torch.ones(2), P(..., "tp", None))


def test_the_last_dims_are_named_from_behind():
    gm = make_fx(lambda x: constrain(x, P(..., "tp", None)), tracing_mode="fake")(
        torch.ones(2, 3, 4)
    )
    assert specs_in(gm) == [P(None, "tp")]
    gm = make_fx(lambda x: constrain(x, P(..., "dp", "tp")), tracing_mode="fake")(torch.ones(2, 3))
    assert specs_in(gm) == [P("dp", "tp")]


def test_a_gradient_may_be_left_to_the_planner():
    gm = make_fx(
        torch.func.grad_and_value(lambda x: constrain(x.sin(), P("dp"), grad=False).cos().sum()),
        tracing_mode="fake",
    )(torch.ones(3, 2))
    assert specs_in(gm) == [P("dp")]


def issued(step, *args):
    return sorted((c.op, c.axes) for c in unbucketed(step.lower(*args)).collectives)


def test_a_constraint_leaves_alone_the_axes_of_which_it_does_not_speak():
    mesh = ftp.simulated_mesh((2, 2), ("dp", "tp"))
    w = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(4, 6)
    v = w.T.contiguous() / 3
    x = torch.linspace(0, 1, 16, dtype=torch.float64).reshape(4, 4)

    def loss(params, x, **options):
        hidden = constrain(x @ params["w"], P(), **options) if options else x @ params["w"]
        return (hidden.sin() @ params["v"]).square().sum()

    params, specs = {"w": w, "v": v}, {"w": P(None, "tp"), "v": P("tp", None)}
    expected, value = torch.func.grad_and_value(loss)(params, x)
    found = {}
    for name, options in {
        "none": {},
        "all": {"axes": None, "grad": True},
        "tp": {"axes": "tp"},
        "dp": {"axes": "dp"},
    }.items():
        step = ftp.shard(
            lambda p, x, options=options: loss(p, x, **options), mesh, specs, batch_specs=P("dp")
        )
        found[name] = issued(step, params, x)
        got, grads = step(params, x)
        torch.testing.assert_close(got, value)
        torch.testing.assert_close(grads, expected)
    over = {name: {axes for op, axes in ops if op == "all_gather"} for name, ops in found.items()}
    assert over == {"none": set(), "all": {("dp",), ("tp",)}, "tp": {("tp",)}, "dp": {("dp",)}}


def test_an_axis_that_the_mesh_has_not():
    step = ftp.shard(
        lambda p, x: constrain(x * p, P(), axes="model").sum(), ftp.simulated_mesh(2, "tp"), P()
    )
    with pytest.raises(
        SpecError,
        match=r"names mesh axis 'model', but the mesh is \(tp 2\) on cpu. Give axes= names of"
        r" its axes.",
    ):
        step.lower(torch.ones(2), torch.ones(2))


def test_only_a_constraint_may_begin_with_dots():
    with pytest.raises(
        SpecError,
        match=r"has spec P\(\.\.\., 'tp'\), but only a constraint may begin with '...'. Give"
        r" P\(None, 'tp'\).",
    ):
        ftp.shard(lambda p, x: (x * p).sum(), ftp.simulated_mesh(2, "tp"), P(..., "tp")).lower(
            torch.ones(2, 2), torch.ones(2, 2)
        )
