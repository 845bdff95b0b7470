"""Per-rank code inside global programs: values, gradients and collectives equal plain torch on
one device, and claims are checked.
"""

import itertools
import math
from collections import Counter
from pathlib import Path
from typing import Any

import own_process  # type: ignore[import-not-found]
import pytest
import torch
import torch.nn.functional as F
from few_or_many import few_or_many
from hypothesis import strategies as st
from plan_reshards import unbucketed

import ftp
from ftp import P

MESHES = [((2,), ("tp",)), ((3,), ("tp",)), ((2, 2), ("dp", "tp"))]
IDS = ["2", "3", "2×2"]


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(
        shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed + math.prod(shape))
    )


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def check(layer, plain, mesh, specs, batch_specs, params, batch, **options) -> ftp.Lowered:
    """A step with ``layer``, and ``layer`` on whole tensors, have the loss and gradients that
    ``plain`` has without ftp.
    """

    def loss_of(f):
        def loss(params, batch):
            y = f(params, batch)
            return (
                y * torch.linspace(0, 1, y.numel(), dtype=y.dtype).reshape(y.shape)
            ).sum() + y.square().mean()

        return loss

    expected_grads, expected = torch.func.grad_and_value(loss_of(plain))(params, batch)
    step = ftp.shard(loss_of(layer), mesh, specs, batch_specs=batch_specs, **options)
    loss, grads = step(params, batch)
    close(loss, expected)
    whole_grads, whole = torch.func.grad_and_value(loss_of(layer))(params, batch)
    close(whole, expected)
    for name, grad in expected_grads.items():
        close(grads[name], grad)
        close(whole_grads[name], grad)
    return step.lower(params, batch)


# Three layers that people write by hand.


def mlp(x, up, down):
    return ftp.axis.all_reduce(F.silu(x @ up) @ down, "tp")


@pytest.mark.parametrize(("shape", "names"), MESHES, ids=IDS)
def test_megatron_mlp(shape, names):
    mesh = ftp.simulated_mesh(shape, names)
    tokens = P("dp") if "dp" in names else P()
    layer = ftp.local(mlp, mesh, (tokens, P(None, "tp"), P("tp")), tokens)
    params = {"in": drawn(5, 5), "up": drawn(5, 12), "down": drawn(12, 5)}
    specs = {"in": P(), "up": P(None, "tp"), "down": P("tp")}
    program = check(
        lambda p, x: layer(x @ p["in"], p["up"], p["down"]),
        lambda p, x: F.silu(x @ p["in"] @ p["up"]) @ p["down"],
        mesh,
        specs,
        tokens,
        params,
        drawn(4, 5),
    )
    # One in each pass, as Megatron has; the loss and the gradients over dp besides.
    counts = Counter(c.op for c in unbucketed(program).collectives if c.axes == ("tp",))
    assert counts == {"all_reduce": 2}
    assert all(
        math.prod(c.shape) == 4 * 5 // (2 if "dp" in names else 1)
        for c in unbucketed(program).collectives
        if c.axes == ("tp",)
    )


def test_weights_cut_as_zero_are_gathered_around_it():
    mesh = ftp.simulated_mesh((2, 2), ("dp", "tp"))
    layer = ftp.local(mlp, mesh, (P("dp"), P(None, "tp"), P("tp")), P("dp"))
    program = check(
        lambda p, x: layer(x, p["up"], p["down"]),
        lambda p, x: F.silu(x @ p["up"]) @ p["down"],
        mesh,
        {"up": P("dp", "tp"), "down": P(("tp", "dp"))},
        P("dp"),
        {"up": drawn(6, 8), "down": drawn(8, 6)},
        drawn(4, 6),
    )
    assert Counter(
        c.op
        for c in unbucketed(program).collectives
        if c.axes == ("dp",) and math.prod(c.shape) > 1
    ) == {
        # Down for both passes, up for the forward one alone: the gradient of x is not asked
        # for.
        "all_gather": 3,
        "reduce_scatter": 2,
    }


def routed(x, router):
    """Each token's expert, its weight, and where it stands in the queue of its expert."""
    scores = (x @ router).softmax(-1)
    weight, expert = scores.max(-1)
    chosen = (expert[:, None] == torch.arange(router.shape[1])).long()
    place = (chosen.cumsum(0) * chosen).sum(-1) - 1
    return weight, expert, place


def experts_of_all_ranks(x, router, up, down, axis):
    n = ftp.axis.axis_size(axis)
    weight, expert, place = routed(x, router)
    buffer = x.new_zeros(router.shape[1], x.shape[0], x.shape[1]).index_put((expert, place), x)
    arrived = ftp.axis.all_to_all(buffer, axis, split_dim=0, concat_dim=1)
    done = torch.bmm(F.gelu(torch.bmm(arrived, up)), down)
    assert done.shape == (router.shape[1] // n, n * x.shape[0], x.shape[1])
    back = ftp.axis.all_to_all(done, axis, split_dim=1, concat_dim=0)
    return weight[:, None] * back[expert, place]


def experts_plain(x, router, up, down):
    weight, expert, _ = routed(x, router)
    return weight[:, None] * torch.einsum(
        "th,thd->td", F.gelu(torch.einsum("td,tdh->th", x, up[expert])), down[expert]
    )


@pytest.mark.cases_by_default(1)
@pytest.mark.parametrize(
    ("shape", "names"), [((2,), ("dp",)), ((3,), ("dp",)), ((2, 2), ("dp", "tp"))], ids=IDS
)
def test_tokens_travel_to_experts_that_are_cut_on_the_data_axis(shape, names):
    mesh = ftp.simulated_mesh(shape, names)
    specs = {"router": P(), "up": P("dp"), "down": P("dp")}
    layer = ftp.local(
        lambda x, router, up, down: experts_of_all_ranks(x, router, up, down, "dp"),
        mesh,
        (P("dp"), P(), P("dp"), P("dp")),
        P("dp"),
    )
    params = {"router": drawn(4, 6), "up": drawn(6, 4, 3), "down": drawn(6, 3, 4)}
    program = check(
        lambda p, x: layer(x, p["router"], p["up"], p["down"]),
        lambda p, x: experts_plain(x, p["router"], p["up"], p["down"]),
        mesh,
        specs,
        P("dp"),
        params,
        drawn(12, 4),
    )
    # Two ways in the forward pass, one in the backward: the gradient of x is not asked for. Nothing
    # is sent again for it.
    counts = Counter(c.op for c in unbucketed(program).collectives)
    assert counts["all_to_all"] == 3
    assert counts["all_gather"] == 0


def ring_attention(q, k, v, axis):
    """Causal attention of this rank's queries; keys and values go around."""
    n, here = ftp.axis.axis_size(axis), ftp.axis.axis_index(axis)
    seq = q.shape[-2]
    rows = here * seq + torch.arange(seq)
    top = q.new_full(q.shape[:-1], -torch.inf)
    total, out = q.new_zeros(q.shape[:-1]), torch.zeros_like(q)
    for step in range(n):
        cols = (here - step) % n * seq + torch.arange(seq)
        scores = q @ k.mT / q.shape[-1] ** 0.5
        scores = torch.where(rows[:, None] >= cols, scores, -torch.inf)
        new_top = torch.maximum(top, scores.amax(-1)).detach()
        shrink = (top - new_top).exp()
        weights = (scores - new_top[..., None]).exp()
        total = total * shrink + weights.sum(-1)
        out = out * shrink[..., None] + weights @ v
        top = new_top
        if step < n - 1:
            k, v = (
                ftp.axis.ppermute(t, axis, [(i, (i + 1) % n) for i in range(n)]) for t in (k, v)
            )
    return out / total[..., None]


@pytest.mark.cases_by_default(1)
@pytest.mark.parametrize(("shape", "names"), MESHES, ids=IDS)
def test_ring_attention(shape, names):
    mesh = ftp.simulated_mesh(shape, names)
    spec = P("dp" if "dp" in names else None, None, "tp")
    layer = ftp.local(lambda q, k, v: ring_attention(q, k, v, "tp"), mesh, spec, spec)

    def block(attend):
        def f(p, x):
            q, k, v = (
                (x @ p[name]).unflatten(-1, (2, 3)).transpose(1, 2) for name in ("q", "k", "v")
            )
            return attend(q, k, v).transpose(1, 2).flatten(2) @ p["o"]

        return f

    program = check(
        block(layer),
        block(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)),
        mesh,
        P(),
        P("dp" if "dp" in names else None, "tp"),
        {name: drawn(6, 6, seed=i) for i, name in enumerate("qkvo")},
        drawn(2, 12, 6),
    )
    n = shape[-1]
    assert Counter(c.op for c in unbucketed(program).collectives if c.axes == ("tp",))[
        "ppermute"
    ] == 4 * (n - 1)
    assert "all_gather" not in {c.op for c in program.collectives}


# Each collective, forwards and backwards, as a function of the list of all ranks' parts.


def zeros(parts):
    return [torch.zeros_like(p) for p in parts]


COLLECTIVES = {
    "all_reduce": (lambda x: ftp.axis.all_reduce(x, "tp"), P(), sum),
    "max": (
        lambda x: ftp.axis.all_reduce(x, "tp", "max"),
        P(),
        lambda parts: torch.stack(parts).amax(0),
    ),
    "min": (
        lambda x: ftp.axis.all_reduce(x, "tp", "min"),
        P(),
        lambda parts: torch.stack(parts).amin(0),
    ),
    "all_gather": (lambda x: ftp.axis.all_gather(x, "tp"), P(), torch.cat),
    "all_gather, dim": (
        lambda x: ftp.axis.all_gather(x, "tp", dim=-1),
        P(),
        lambda parts: torch.cat(parts, -1),
    ),
    "all_gather, cut": (
        lambda x: ftp.axis.all_gather(x, "tp")[None],
        P("tp"),
        lambda parts: torch.stack([torch.cat(parts)] * len(parts)),
    ),
    "reduce_scatter": (lambda x: ftp.axis.reduce_scatter(x, "tp"), P("tp"), sum),
    "reduce_scatter, dim": (lambda x: ftp.axis.reduce_scatter(x, "tp", dim=1), P(None, "tp"), sum),
    "all_to_all": (lambda x: ftp.axis.all_to_all(x, "tp", 1, 0), P(None, "tp"), torch.cat),
    "all_to_all, one dim": (
        lambda x: ftp.axis.all_to_all(x, "tp", 0, 0),
        P("tp"),
        lambda parts: torch.cat([p.chunk(len(parts))[i] for i in range(len(parts)) for p in parts]),
    ),
    "ppermute": (
        lambda x: ftp.axis.ppermute(x, "tp", [(0, 1), (1, 0)]),
        P("tp"),
        lambda parts: torch.cat([parts[1], parts[0], *zeros(parts[2:])]),
    ),
    "ppermute, one way": (
        lambda x: ftp.axis.ppermute(x, "tp", [(0, 1)]),
        P("tp"),
        lambda parts: torch.cat([*zeros(parts[:1]), parts[0], *zeros(parts[2:])]),
    ),
    "axis_index": (
        lambda x: x * ftp.axis.axis_index("tp"),
        P("tp"),
        lambda parts: torch.cat([i * p for i, p in enumerate(parts)]),
    ),
    "axis_size": (
        lambda x: x * ftp.axis.axis_size("tp"),
        P("tp"),
        lambda parts: len(parts) * torch.cat(parts),
    ),
}


@pytest.mark.cases_by_default(5)
@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives(name):
    f, out_spec, plain = COLLECTIVES[name]
    mesh = ftp.simulated_mesh(3, "tp")
    layer = ftp.local(f, mesh, P("tp"), out_spec)
    check(
        lambda p, x: layer(p["w"] * x).sin(),
        lambda p, x: plain((p["w"] * x).chunk(3)).sin(),
        mesh,
        P("tp"),
        P(),
        {"w": drawn(9, 3)},
        drawn(9, 3, seed=1),
    )


@pytest.mark.parametrize("name", [name for name in COLLECTIVES if "ppermute" not in name])
def test_one_rank_alone(name):
    f, out_spec, plain = COLLECTIVES[name]
    x = drawn(4, 2)
    mesh = ftp.simulated_mesh(1, "tp")
    close(ftp.local(f, mesh, P("tp"), out_spec)(x), plain([x]))
    assert not ftp.lower(ftp.local(f, mesh, P("tp"), out_spec), mesh, P("tp"), x).collectives


@pytest.mark.slow
def test_several_axes_count_from_major_to_minor():
    mesh = ftp.simulated_mesh((2, 3), ("dp", "tp"))

    def f(x):
        both = ("dp", "tp")
        here = ftp.axis.axis_index(both) * torch.ones_like(x)
        assert ftp.axis.axis_size(both) == 6
        return (
            here,
            ftp.axis.all_gather(x, both),
            ftp.axis.reduce_scatter(ftp.axis.all_gather(x, both), both),
        )

    x = torch.arange(12.0)
    here, whole, parts = ftp.local(
        f, mesh, P(("dp", "tp")), (P(("dp", "tp")), P(), P(("dp", "tp")))
    )(x)
    assert here.tolist() == [i // 2 for i in range(12)]
    assert whole.tolist() == x.tolist()
    assert parts.tolist() == (6 * x).tolist()


def test_ties_share_the_gradient_of_the_largest():
    largest = ftp.local(
        lambda x: ftp.axis.all_reduce(x, "tp", "max").sum(),
        ftp.simulated_mesh(3, "tp"),
        P("tp"),
        P(),
    )
    x = torch.tensor([[2.0, 1.0], [2.0, 3.0], [0.0, 3.0]])
    close(torch.func.grad(largest)(x), torch.func.grad(lambda x: x.amax(0).sum())(x))


def test_gradients_inside_are_of_the_sum_over_ranks():
    """A whole data-parallel step written by hand, with its gradient in it."""
    mesh = ftp.simulated_mesh(3, "dp")

    def step(w, x):
        grad = torch.func.grad(lambda w: (x @ w).sin().sum())(w)
        return w - 0.1 * ftp.axis.all_reduce(grad, "dp")

    w, x = drawn(4), drawn(6, 4)
    close(
        ftp.local(step, mesh, (P(), P("dp")), P())(w, x),
        w - 0.1 * torch.func.grad(lambda w: (x @ w).sin().sum())(w),
    )


def test_inside_a_reduction_differentiates_as_its_transpose():
    mesh = ftp.simulated_mesh(3, "dp")

    def f(x):
        return torch.func.grad(lambda x: ftp.axis.all_reduce(x.sin(), "dp").square().sum())(x)

    x = drawn(6)
    # Every rank squares the same sum, so that it counts once for each.
    expected = torch.func.grad(lambda x: 3 * x.sin().reshape(3, 2).sum(0).square().sum())(x)
    close(ftp.local(f, mesh, P("dp"), P("dp"))(x), expected)


def test_what_is_detached_inside_stays_so():
    mesh = ftp.simulated_mesh(2, "tp")

    def f(x, w):
        with torch.no_grad():
            scale = w.exp()
        return ftp.axis.all_reduce((x * w.detach() * scale * w).sum(), "tp")

    layer = ftp.local(f, mesh, (P("tp"), P()), P())
    x, w = drawn(4), drawn()
    plain = torch.func.grad(lambda w: (x * w.detach() * w.detach().exp() * w).sum())(w)
    close(torch.func.grad(lambda w: layer(x, w))(w), plain)


def test_vmap_inside():
    mesh = ftp.simulated_mesh(2, "tp")
    x = drawn(3, 4, 2)
    gather = torch.vmap(lambda x: ftp.axis.all_gather(x.sin(), "tp", dim=-1), in_dims=1)
    close(ftp.local(gather, mesh, P(None, None, "tp"), P())(x), x.sin().transpose(0, 1))


def test_eager_autograd():
    mesh = ftp.simulated_mesh(2, "tp")
    layer = ftp.local(mlp, mesh, (P(), P(None, "tp"), P("tp")), P())
    x, up, down = drawn(4, 3), drawn(3, 6), drawn(6, 3)
    tensors = [t.clone().requires_grad_() for t in (x, up, down)]
    others = [t.clone().requires_grad_() for t in (x, up, down)]
    layer(*tensors).square().sum().backward()
    (F.silu(others[0] @ others[1]) @ others[2]).square().sum().backward()
    for a, b in zip(tensors, others, strict=True):
        assert a.grad is not None and b.grad is not None
        close(a.grad, b.grad)


def test_trees_and_static_leaves():
    mesh = ftp.simulated_mesh(2, "tp")

    def f(p, times, name):
        y = ftp.axis.all_reduce(p["w"].sum() * times + p["b"], "tp")
        return {"y": y, "w": p["w"], "name": name, "i": ftp.axis.axis_index("tp")[None]}

    layer = ftp.local(
        f,
        mesh,
        ({"w": P("tp"), "b": P()}, P(), P()),
        {"y": P(), "w": P("tp"), "name": P(), "i": P("tp")},
    )
    p = {"w": torch.arange(4.0), "b": torch.tensor(1.0)}
    out = layer(p, 3, "n")
    assert float(out["y"]) == 20.0
    assert out["w"].tolist() == p["w"].tolist()
    assert out["name"] == "n"
    assert out["i"].tolist() == [0, 1]
    stepped = ftp.spmd(lambda p: layer(p, 3, "n"), mesh, P())(p)
    assert float(stepped["y"]) == 20.0
    assert stepped["i"].tolist() == [0, 1]


def test_static_leaves_that_are_equal_and_of_other_types():
    layer = ftp.local(lambda x, n: x * n, ftp.simulated_mesh(2, "tp"), (P("tp"), P()), P("tp"))
    x = torch.arange(4)
    found = [layer(x, n) for n in (1, 1.0, True)]
    assert [y.dtype for y in found] == [torch.int64, torch.float32, torch.int64]
    divided = ftp.local(lambda x, n: x / torch.tensor(n), ftp.simulated_mesh(2, "tp"), P(), P())
    assert [divided(torch.tensor(1.0), n) for n in (0.0, -0.0)] == [torch.inf, -torch.inf]


def test_packs_and_units():
    mesh = ftp.simulated_mesh(2, "tp")
    packed = P(None, ftp.units("tp", 2, pack=3))

    def f(x, w):
        q, k, v = (x @ w).chunk(3, -1)
        return q * k + v, x @ w

    layer = ftp.local(f, mesh, (P(), packed), (P(None, ftp.units("tp", 2)), packed))
    x, w = drawn(2, 3), drawn(3, 24)
    q, k, v = (x @ w).chunk(3, -1)
    got, whole = layer(x, w)
    close(got, q * k + v)
    close(whole, x @ w)
    check(
        lambda p, x: layer(x, p["w"])[0] * layer(x, p["w"])[1].sum(),
        lambda p, x: f(x, p["w"])[0] * (x @ p["w"]).sum(),
        mesh,
        {"w": packed},
        P(),
        {"w": w},
        x,
    )
    assert "its packs are equal" in failing(
        lambda x: x, drawn(12), in_specs=P(ftp.units("tp", 1, pack=(4, 8)))
    )


def test_captured_tensors_are_constants():
    mesh = ftp.simulated_mesh(2, "tp")
    table = drawn(4)
    layer = ftp.local(lambda x: x * table.take(ftp.axis.axis_index("tp")), mesh, P("tp"), P("tp"))
    x = drawn(2)
    close(layer(x), x * table[:2])
    close(torch.func.grad(lambda x: layer(x).square().sum())(x), 2 * x * table[:2].square())
    close(ftp.spmd(layer, mesh, P("tp"))(x), x * table[:2])


def test_the_mesh_of_the_step_is_the_default():
    mesh = ftp.simulated_mesh(2, "tp")
    layer = ftp.local(lambda x: ftp.axis.all_reduce(x.sum(), "tp"), None, P("tp"), P())
    assert ftp.spmd(layer, mesh, P("tp"))(torch.arange(4)) == 6
    with ftp.use_mesh(mesh):
        assert layer(torch.arange(4)) == 6
    with pytest.raises(ftp.errors.MeshError, match="No mesh is given"):
        layer(torch.arange(4))


def test_an_error_without_a_line_of_the_users_names_none():
    mesh = ftp.simulated_mesh(2, "tp")
    whole = ftp.local(lambda x: x.sum(), mesh, P("tp"), P())
    with pytest.raises(ftp.errors.SpecError) as error:
        ftp.spmd(whole, mesh, (P("tp"),))(torch.ones(4))
    assert "<string>" not in str(error.value)


def test_unchecked_claims_are_believed():
    mesh = ftp.simulated_mesh(2, "tp")

    def rolled(x):
        everywhere = ftp.axis.all_to_all(x.expand(2, *x.shape), "tp", 0, 1).flatten()
        return everywhere.sin()

    with pytest.raises(ftp.errors.SpecError, match="says that all ranks along 'tp' hold the same"):
        ftp.local(rolled, mesh, P("tp"), P())(drawn(4))
    layer = ftp.local(rolled, mesh, P("tp"), P(), check=False)
    check(
        lambda p, x: layer(p["w"]) * x,
        lambda p, x: p["w"].sin() * x,
        mesh,
        P("tp"),
        P(),
        {"w": drawn(4)},
        drawn(4, seed=2),
    )


# What is wrong is said.


def failing(
    f,
    *args,
    in_specs: Any = P("tp"),
    out_specs: Any = P("tp"),
    mesh=None,
    error: type[Exception] = ftp.errors.SpecError,
    **options,
):
    with pytest.raises(error) as e:
        ftp.local(
            f, mesh or ftp.simulated_mesh((2, 2), ("dp", "tp")), in_specs, out_specs, **options
        )(*args)
    return str(e.value)


def test_claims_that_cannot_be_shown():
    def f(x, w):
        y = x * 2
        return {
            "mean": y.mean(),
            "rank": ftp.axis.axis_index("dp"),
            "sum": ftp.axis.all_reduce(y, "tp"),
        }

    text = failing(f, torch.ones(4), torch.ones(2), in_specs=(P("tp"), P()), out_specs=P())
    assert (
        "the result['mean'] has out spec P(), which says that all ranks along 'tp' hold the same,"
        " but it varies there" in text
    )
    assert (
        "it comes from x, which in_specs cut as P('tp'), at tests/per_rank/test_local.py:" in text
    )
    assert "y.mean()" in text
    assert "Reduce it with ftp.axis.all_reduce(x, 'tp'), or pass check=False" in text
    assert (
        "the result['rank'] has out spec P(), which says that all ranks along 'dp' hold the same"
        in text
    )
    assert "it comes from ftp.axis.axis_index('dp')" in text
    assert "the result['sum']" not in text
    text = failing(lambda x: x + 1, torch.ones(4, 2), out_specs=P())
    assert "or cut it by the axis in out_specs, as P('tp', None), or pass" in text


def test_specs_that_do_not_fit():
    text = failing(
        lambda x, y, z: x,
        torch.ones(3, 5),
        torch.ones(5),
        torch.ones(3, 6),
        in_specs=(P("tp", "dp"), P(("dp", "tp")), P("dp", ftp.units("tp", 2))),
    )
    advice = (
        ": the parts are not equal. In ftp.local one dim of a tensor may have such parts, over one"
        " axis: pad the dim, or leave it whole."
    )
    assert [line.strip() for line in text.split("\n")[1:]] == [
        f"x of shape (3, 5) has spec P('tp', 'dp'), which cuts dim 0 of size 3 in 2{advice}",
        f"x of shape (3, 5) has spec P('tp', 'dp'), which cuts dim 1 of size 5 in 2{advice}",
        f"y of shape (5,) has spec P(('dp', 'tp')), which cuts dim 0 of size 5 in 4{advice}",
        "z of shape (3, 6) has spec P('dp', units('tp', 2)), which cuts dim 1 of size 6 in 2 in"
        f" units of 2{advice}",
    ]
    assert "a zigzag is two" in failing(lambda x: x, torch.ones(5), in_specs=P(ftp.zigzag("tp")))
    assert "the mesh has no axis 'pp'" in failing(lambda x: x, torch.ones(4), in_specs=P("pp"))
    assert "the mesh has no axis 'pp'" in failing(lambda x: x, torch.ones(4), out_specs=P("pp"))
    assert "2 entries" in failing(lambda x: x, torch.ones(4), out_specs=P("tp", None))


def test_collectives_that_do_not_fit():
    assert "names axis 'pp', but the mesh of ftp.local has 'dp' (size 2), 'tp' (size 2)" in failing(
        lambda x: ftp.axis.all_reduce(x, "pp"), torch.ones(4), error=ftp.errors.MeshError
    )
    assert "takes the name of a mesh axis, or a tuple of names, not 3" in failing(
        lambda x: ftp.axis.all_reduce(x, 3),  # type: ignore[arg-type]
        torch.ones(4),
        error=ftp.errors.InputError,
    )
    assert "does not divide it" in failing(
        lambda x: ftp.axis.reduce_scatter(x, "tp"), torch.ones(6), error=ftp.errors.InputError
    )
    assert "at most once" in failing(
        lambda x: ftp.axis.ppermute(x, "tp", [(0, 1), (1, 1)]),
        torch.ones(4),
        error=ftp.errors.InputError,
    )
    assert "dim 1, but its tensor has 1 dims" in failing(
        lambda x: ftp.axis.all_gather(x, "tp", dim=1), torch.ones(4), error=ftp.errors.InputError
    )
    with pytest.raises(
        ftp.errors.MeshError,
        match=r"ftp.axis.all_reduce is for one rank's code: it works in a function given to",
    ):
        ftp.axis.all_reduce(torch.ones(2), "tp")


def test_another_mesh_than_the_step_has():
    layer = ftp.local(lambda x: x, ftp.simulated_mesh(4, "tp"), P("tp"), P("tp"))
    with pytest.raises(
        ftp.errors.MeshError,
        match=r"is given a mesh \(tp 4\), but runs in a step on \(tp 2\) on cpu",
    ):
        ftp.spmd(layer, ftp.simulated_mesh(2, "tp"), P("tp"))(torch.ones(4))


def test_local_may_be_the_first_name_that_a_program_uses():
    """The kernel for calls outside of a step is there without another name having been loaded."""
    program = (
        "import torch, ftp; double = ftp.local(lambda x: 2 * x, ftp.simulated_mesh(2, 'tp'),"
        " ftp.P('tp'), ftp.P('tp')); print(double(torch.ones(2)).tolist())"
    )
    own_process.check(program, ["[2.0, 2.0]"])


def test_nesting_and_tensors_of_the_surrounding_function():
    mesh = ftp.simulated_mesh(2, "tp")
    inner = ftp.local(lambda x: x, mesh, P("tp"), P("tp"))
    assert "in one rank's code" in failing(
        inner, torch.ones(4), mesh=mesh, error=ftp.errors.TraceError
    )

    def captures(x):
        y = x.sin()
        return ftp.local(lambda z: z + y.sum(), mesh, P("tp"), P("tp"))(x).sum()

    for step in (
        ftp.spmd(captures, mesh, P()),
        ftp.shard(captures, mesh),
        torch.func.grad(captures),
    ):
        with pytest.raises(
            ftp.errors.TraceError,
            match=r"given to ftp.local uses .*, a tensor of the surrounding function",
        ):
            step(torch.ones(4))


def test_forward_mode_is_refused():
    double = ftp.local(lambda x: 2 * x, ftp.simulated_mesh(2, "tp"), P("tp"), P("tp"))
    with pytest.raises(ftp.errors.TraceError, match=r"forward mode"):
        torch.func.jvp(double, (torch.ones(4),), (torch.ones(4),))


def test_a_kernel_that_cannot_be_seen_through_is_wrapped(monkeypatch):
    monkeypatch.setenv("FTP_DISCOVERY", "0")
    torch.library.define("ftp_tests::thrice", "(Tensor x) -> Tensor")
    torch.library.impl("ftp_tests::thrice", "CompositeExplicitAutograd")(lambda x: 3 * x)
    thrice = torch.ops.ftp_tests.thrice.default
    mesh, x = ftp.simulated_mesh(2, "tp"), drawn(4)
    with pytest.warns(
        ftp.errors.ReplicationWarning,
        match=r"ftp.rule\(torch.ops.ftp_tests.thrice.default, (.|\n)*ftp.local\(fn, mesh",
    ):
        close(ftp.spmd(thrice, mesh, P("tp"))(x), 3 * x)
    close(ftp.spmd(ftp.local(thrice, mesh, P("tp"), P("tp")), mesh, P("tp"), strict=True)(x), 3 * x)


# Programs of every kind.


@st.composite
def bodies(draw):
    """Steps of per-rank code on a (dp 2, tp 2) mesh that keep the local shape (4, 4), with what
    they do to the four ranks' values.

    The plain form works on a tensor of (dp, tp, 4, 4).
    """
    axis = draw(st.sampled_from(["dp", "tp"]))
    at = 0 if axis == "dp" else 1
    dim = draw(st.integers(0, 1))
    perm = draw(st.sampled_from([[(0, 1), (1, 0)], [(1, 0)], [(0, 0), (1, 1)]]))

    def parts(v):
        return v.unbind(at)

    def permuted(v):
        old = parts(v)
        new = [torch.zeros_like(p) for p in old]
        for a, b in perm:
            new[b] = old[a]
        return torch.stack(new, at)

    def exchanged(v):
        halves = [
            p.chunk(2, dim + 1) for p in parts(v)
        ]  # dims of a part: the other axis, rows, columns
        return torch.stack([torch.cat([h[i] for h in halves], dim + 1) for i in range(2)], at)

    def scattered(v):
        return torch.stack([torch.cat([h, -h], dim + 1) for h in v.sum(at).chunk(2, dim + 1)], at)

    def gathered(v):
        whole = torch.cat(parts(v), dim + 1)
        return torch.stack([whole.narrow(dim + 1, 2, 4)] * 2, at)

    index = torch.arange(2.0, dtype=torch.float64).reshape([2 if d == at else 1 for d in range(4)])
    return draw(
        st.sampled_from(
            [
                (
                    lambda x, w: ftp.axis.all_reduce(x, axis),
                    lambda v, w: v.sum(at, keepdim=True).expand_as(v),
                ),
                (
                    lambda x, w: x + ftp.axis.all_reduce(x, axis, "max"),
                    lambda v, w: v + v.amax(at, keepdim=True),
                ),
                (lambda x, w: ftp.axis.ppermute(x, axis, perm), lambda v, w: permuted(v)),
                (lambda x, w: ftp.axis.all_to_all(x, axis, dim, dim), lambda v, w: exchanged(v)),
                (
                    lambda x, w: torch.cat([h := ftp.axis.reduce_scatter(x, axis, dim), -h], dim),
                    lambda v, w: scattered(v),
                ),
                (
                    lambda x, w: ftp.axis.all_gather(x, axis, dim).narrow(dim, 2, 4),
                    lambda v, w: gathered(v),
                ),
                (lambda x, w: (x @ w).tanh(), lambda v, w: (v @ w).tanh()),
                (lambda x, w: x * w + x.detach().sin(), lambda v, w: v * w + v.detach().sin()),
                (lambda x, w: x.softmax(dim), lambda v, w: v.softmax(dim + 2)),
                (
                    lambda x, w: x * (1.5 + ftp.axis.axis_index(axis)),
                    lambda v, w: v * (1.5 + index),
                ),
            ]
        )
    )


IN = [
    P(),
    P("dp"),
    P(None, "tp"),
    P("dp", "tp"),
    P("tp", "dp"),
    P(("dp", "tp")),
    P(None, ("tp", "dp")),
]


def split(x, spec):
    """The ranks' parts, as (dp, tp, ...)."""
    return torch.stack(
        [torch.stack([x[part_of(x, spec, dp, tp)] for tp in range(2)]) for dp in range(2)]
    )


def part_of(x, spec, dp, tp):
    position, found = {"dp": dp, "tp": tp}, []
    for d, size in enumerate(x.shape):
        start, length = 0, size
        for cut in spec.cuts(d):
            length //= 2
            start += position[cut.axis] * length
        found.append(slice(start, start + length))
    return tuple(found)


@few_or_many(st.data(), few=4, many=100)
def test_random_bodies_under_random_specs(data):
    mesh = ftp.simulated_mesh((2, 2), ("dp", "tp"))
    x_spec, w_spec, y_spec = (data.draw(st.sampled_from(IN)) for _ in range(3))
    steps = data.draw(st.lists(bodies(), min_size=1, max_size=4))
    reduced = [axis for axis in ("dp", "tp") if axis not in y_spec.axes]

    def cut(d, spec):
        return 4 * 2 ** len(spec.cuts(d))

    def one_rank(x, w):
        for f, _ in steps:
            x = f(x, w)
        return ftp.axis.all_reduce(x, reduced) if reduced else x

    def plain(x, w):
        v, w = split(x, x_spec), split(w, w_spec)
        for _, f in steps:
            v = f(v, w)
        for at in [at for at, axis in enumerate(("dp", "tp")) if axis in reduced]:
            v = v.sum(at, keepdim=True).expand_as(v)
        y = v.new_zeros([cut(d, y_spec) for d in range(2)])
        for dp, tp in itertools.product(range(2), range(2)):
            mask = torch.zeros_like(y)
            mask[part_of(y, y_spec, dp, tp)] = 1
            tiled = v[dp, tp].repeat([y.shape[d] // 4 for d in range(2)])
            y = torch.where(mask.bool(), tiled, y)
        return y

    layer = ftp.local(one_rank, mesh, (x_spec, w_spec), y_spec)
    outer = data.draw(st.sampled_from([P(), P("dp"), P("tp", "dp"), P(None, ("dp", "tp"))]))
    batch = data.draw(st.sampled_from([P(), P("dp")]))
    params = {"w": drawn(*(cut(d, w_spec) for d in range(2)))}
    x = drawn(*(cut(d, x_spec) for d in range(2)), seed=7)
    check(
        lambda p, x: layer(x * p["w"].mean(), p["w"]),
        lambda p, x: plain(x * p["w"].mean(), p["w"]),
        mesh,
        outer,
        batch,
        params,
        x,
    )


def test_the_guide_runs(capsys):
    text = (Path(__file__).parent.parent.parent / "docs" / "local.md").read_text()
    blocks = [block.split("```")[0] for block in text.split("```python\n")[1:]]
    scope: dict[str, Any] = {"__name__": "guide"}
    for block in blocks:
        exec(compile(block, "docs/local.md", "exec"), scope)
    printed = capsys.readouterr().out
    assert "says that all ranks along 'tp' hold the same" in printed
    assert "['all_to_all', 'all_to_all', 'all_reduce', 'all_to_all', 'all_reduce']" in printed
    x, (up, down) = scope["x"], scope["whole"].values()
    torch.testing.assert_close(scope["layer"](x, up, down), F.silu(x @ up) @ down)


def test_rows_that_a_mask_selects():
    """On each rank those of its own part, of which there may be none."""
    mesh = ftp.simulated_mesh((3,), ("dp",))
    x, w = drawn(6, 3), drawn(3, 4, seed=1)
    x[:2] = -x[:2].abs()

    def kept(w, x):
        y = x @ w
        return y[x[:, 0] > 0].log_softmax(-1).square().sum() + y[:, w[0] > 0].exp().sum()

    layer = ftp.local(lambda w, x: ftp.axis.all_reduce(kept(w, x), "dp"), mesh, (P(), P("dp")), P())
    given = w.clone().requires_grad_()
    expected = kept(given, x)
    value, grad = ftp.shard(layer, mesh, P(), batch_specs=P("dp"), certify=True)(w, x)
    close(value, expected.detach())
    close(grad, torch.autograd.grad(expected, given)[0])
    rows = ftp.local(lambda x: x[x[:, 0] > 0], mesh, P("dp"), P("dp"))
    with pytest.raises(ftp.errors.TraceError, match=r"the result of ftp\.local's function gives"):
        rows(x)


def test_a_copy_that_is_a_result_is_certified():
    """The copy is dropped, and what it copies is the result."""
    mesh = ftp.simulated_mesh((2,), ("dp",))

    def twice(x):
        y = x.sin()
        return ftp.axis.all_reduce(y.sum(), "dp"), y.clone()

    layer = ftp.local(twice, mesh, P("dp"), (P(), P("dp")))

    def loss(w, x):
        total, rows = layer(x * w)
        return total + (rows * 2).square().sum()

    w, x = drawn(3), drawn(4, 3)
    value, _ = ftp.shard(loss, mesh, P(), batch_specs=P("dp"), certify=True)(w, x)
    close(value, (x * w).sin().sum() + (2 * (x * w).sin()).square().sum())
