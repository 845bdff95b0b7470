"""Cuts in whole units, of packs, and of fewer units than ranks: placed, moved and trained as one
device does.
"""

import math
import re

import pytest
import torch
from few_or_many import few_or_many
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_reshards import unbucketed
from torch.nn import functional as F

import ftp
from ftp import P, units
from ftp.errors import SpecError
from ftp.exported import simulate
from ftp.ops.constrain import Pin, pin_from_str, pin_to_str
from ftp.report.alternatives import neighbours
from ftp.sharding.check_spec import check_spec
from ftp.sharding.local_pieces import local_pieces, local_shape
from ftp.sharding.mesh import resolve
from ftp.sharding.spec import without_stage
from ftp.tensors.device_put import put, take


@st.composite
def meshes(draw):
    shape = draw(st.sampled_from([(2,), (3,), (4,), (2, 2), (2, 3), (4, 2)]))
    return ftp.simulated_mesh(shape, ("a", "b")[: len(shape)])


@st.composite
def packed(draw, axis):
    """A cut in units with packs, and the size of a dim that it fits."""
    size = draw(st.integers(1, 3))
    heads = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    if draw(st.booleans()):
        return units(axis, size, pack=[h * size for h in heads]), sum(heads) * size
    return units(axis, size, pack=len(heads)), len(heads) * heads[0] * size


@st.composite
def cases(draw):
    """A mesh, a shape, and two specs that fit it, of which the first has packs."""
    mesh = draw(meshes())
    axes = mesh.axes
    first = draw(st.sampled_from(mesh.axis_names))
    cut, size = draw(packed(first))
    other = draw(st.integers(1, 6))
    rest = [axis for axis in mesh.axis_names if axis != first]
    places = draw(st.sampled_from(["none", "minor", "major", "other"])) if rest else "none"
    old = {
        "none": P(cut),
        "minor": P((cut, *rest)),
        "major": P((*rest, cut)),
        "other": P(cut, *rest),
    }[places]
    shape = (size, other)
    if check_spec(old, shape, axes, "x"):
        old = P(cut)
    new = draw(
        st.sampled_from([P(), P(first), P(None, first), P(units(first, math.gcd(size, 2))), old])
    )
    return mesh, shape, old, new


def tensor(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@few_or_many(cases(), few=100, many=1000)
def test_shards_make_up_the_tensor(case):
    mesh, shape, old, _ = case
    x, whole = tensor(*shape), torch.full(shape, torch.nan, dtype=torch.float64)
    for coordinate in resolve(mesh).coordinates():
        pieces = local_pieces(old, shape, mesh.axes, coordinate)
        shard = take(x, pieces)
        assert tuple(shard.shape) == local_shape(old, shape, mesh.axes, coordinate)
        put(whole, shard, pieces)
    assert torch.equal(whole, x)


@few_or_many(cases(), st.booleans(), few=12, many=200)
def test_moves_keep_the_values_and_so_do_their_transposes(case, back):
    mesh, shape, old, new = case
    if back:
        old, new = new, old
    x, weight = tensor(*shape), tensor(*shape, seed=1)
    placed = ftp.device_put(x, mesh, old)
    assert torch.equal(ftp.device_get(ftp.reshard(placed, mesh, old, new), mesh, new), x)
    step = ftp.shard(
        lambda p, w: (ftp.constrain(p["x"], new) * w).sum(), mesh, {"x": old}, batch_specs=P()
    )
    value, grads = step({"x": x}, weight)
    torch.testing.assert_close(value, (x * weight).sum())
    assert torch.equal(grads["x"], weight)


def test_units_that_ranks_share_at_one_of_many_sizes():
    """The third size is planned for many; the ranks' pieces have formulas that differ then."""
    mesh, old = ftp.simulated_mesh((2,), ("a",)), P(units("a", 3, pack=3))
    for n in (36, 45, 9, 18, 54):
        x = tensor(n, 4)
        moved = ftp.reshard(ftp.device_put(x, mesh, old), mesh, old, P(None, "a"))
        assert torch.equal(ftp.device_get(moved, mesh, P(None, "a")), x)


def test_units_of_one_element_are_plain_cuts():
    spec = P(units("a", 1), None)
    assert without_stage(spec) == P("a")
    assert neighbours(spec, (4, 4), {"a": 2}) == [spec, P(), P(None, "a")]
    with pytest.raises(SpecError, match=re.escape("Try P('a', None).")):
        P(units("a", 1), "a")


def test_text_of_a_spec_with_packs():
    for spec in (P(units("tp", 4, pack=3), None), P(None, ("dp", units("tp", 1, pack=(4, 2, 2))))):
        assert pin_from_str(pin_to_str(Pin(spec))).spec == spec


def attention(p, x, heads, kv_heads, head_dim):
    """Grouped attention whose q, k and v lie one after another in one weight: (batch, tokens,
    dim).
    """
    b, t, _ = x.shape
    q, k, v = (x @ p["qkv"].T + p["bias"]).split(
        [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim], -1
    )
    q = q.view(b, t, heads, head_dim).transpose(1, 2)
    k, v = (
        y.view(b, t, kv_heads, 1, head_dim)
        .expand(-1, -1, -1, heads // kv_heads, -1)
        .flatten(2, 3)
        .transpose(1, 2)
        for y in (k, v)
    )
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return y.transpose(1, 2).flatten(2) @ p["out"].T


def check(loss, mesh, specs, params, *batch, batch_specs=P()):
    """Loss and gradients against one device, and the shapes of what each rank holds."""
    leaves = {name: p.clone().requires_grad_() for name, p in params.items()}
    expected = loss(leaves, *batch)
    found = dict(zip(leaves, torch.autograd.grad(expected, list(leaves.values())), strict=True))
    step = ftp.shard(loss, mesh, specs, batch_specs=batch_specs)
    value, grads = step(params, *batch)
    torch.testing.assert_close(value, expected.detach(), rtol=1e-10, atol=1e-10)
    for name, grad in found.items():
        assert grads[name].shape == grad.shape
        assert float((grads[name] - grad).abs().max()) <= 1e-10 * float(grad.abs().max()), name
    return step


@settings(max_examples=10, derandomize=True)
@given(
    kv_heads=st.integers(1, 4),
    group=st.integers(1, 3),
    head_dim=st.sampled_from([1, 2, 3]),
    shape=st.sampled_from([(2,), (3,), (4,), (2, 2)]),
)
def test_fused_grouped_attention(kv_heads, group, head_dim, shape):
    heads, dim = kv_heads * group, 5
    widths = (heads * head_dim, kv_heads * head_dim, kv_heads * head_dim)
    params = {
        "qkv": tensor(sum(widths), dim),
        "bias": tensor(sum(widths), seed=1),
        "out": tensor(dim, widths[0], seed=2),
    }
    cut = units("tp", head_dim, pack=3 if group == 1 else widths)
    specs = {"qkv": P(cut), "bias": P(cut), "out": P(None, units("tp", head_dim))}
    mesh = ftp.simulated_mesh(shape, ("dp", "tp")[-len(shape) :])
    x = tensor(2, 3, dim, seed=3)

    def loss(p, x):
        return attention(p, x, heads, kv_heads, head_dim).square().sum()

    check(loss, mesh, specs, params, x, batch_specs=P("dp") if len(shape) == 2 else P())


def grouped(p, x, heads, kv_heads, head_dim):
    return attention(
        {"qkv": torch.cat([p["q"], p["k"], p["v"]]), "bias": x.new_zeros(()), "out": p["out"]},
        x,
        heads,
        kv_heads,
        head_dim,
    )


@pytest.mark.parametrize(("kv_heads", "n"), [(1, 2), (2, 4), (1, 3), (2, 3), (3, 4)])
def test_fewer_heads_than_ranks(kv_heads, n):
    heads, head_dim, dim = 6 * kv_heads, 2, 5
    params = {
        name: tensor((heads if name == "q" else kv_heads) * head_dim, dim, seed=i)
        for i, name in enumerate("qkv")
    }
    params["out"] = tensor(dim, heads * head_dim, seed=4)
    head = units("tp", head_dim)
    specs = {"q": P(head), "k": P(head), "v": P(head), "out": P(None, head)}
    mesh = ftp.simulated_mesh((n,), ("tp",))
    held = [local_shape(P(head), params["k"].shape, mesh.axes, {"tp": i})[0] for i in range(n)]
    assert held == (
        [head_dim] * n if n % kv_heads == 0 else [head_dim] * kv_heads + [0] * (n - kv_heads)
    )
    check(
        lambda p, x: grouped(p, x, heads, kv_heads, head_dim).square().sum(),
        mesh,
        specs,
        params,
        tensor(2, 3, dim, seed=5),
    )


def test_equal_packs_need_no_move_of_activations():
    """Fused q, k, v and fused gate and up cut as packs cost what the unfused ones cost: one
    all-reduce a block each way.
    """
    dim, heads, head_dim, hidden = 8, 4, 2, 6
    params = {
        "qkv": tensor(3 * dim, dim),
        "bias": tensor(3 * dim),
        "out": tensor(dim, dim),
        "up": tensor(2 * hidden, dim),
        "down": tensor(dim, hidden),
    }
    qkv = P(units("tp", head_dim, pack=3))
    specs = {
        "qkv": qkv,
        "bias": qkv,
        "out": P(None, units("tp", head_dim)),
        "up": P(units("tp", pack=2)),
        "down": P(None, "tp"),
    }

    def loss(p, x):
        x = x + attention(p, x, heads, heads, head_dim)
        gate, up = (x @ p["up"].T).chunk(2, -1)
        return (x + (F.silu(gate) * up) @ p["down"].T).square().sum()

    x = tensor(2, 3, dim, seed=3)
    for n in (2, 3, 4):
        step = check(loss, ftp.simulated_mesh((n,), ("tp",)), specs, params, x)
        assert [c.op for c in unbucketed(step.lower(params, x)).collectives] == ["all_reduce"] * 3


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (
            P(units("tp", 4)),
            "units of 4 do not divide dim 0 of size 6. Pad the dim, or cut it by 'tp' alone.",
        ),
        (
            P(units("tp", pack=4)),
            "4 equal packs do not make up dim 0 of size 6. Give the size of each, as pack=(...).",
        ),
        (
            P(units("tp", pack=(4, 1))),
            "packs of 4 + 1 = 5 do not make up dim 0 of size 6. Give the size of each.",
        ),
        (
            P(units("tp", 2, pack=2)),
            "units of 2 do not divide the packs of 3 + 3 along dim 0 of size 6. Pad them, or cut"
            " it by 'tp' alone.",
        ),
    ],
)
def test_what_does_not_fit(spec, text):
    with pytest.raises(ftp.FtpError) as caught:
        ftp.device_put({"w": tensor(6, 2)}, ftp.simulated_mesh((2,), ("tp",)), {"w": spec})
    assert str(caught.value) == f"tree['w'] has spec {spec}: {text}"


@pytest.mark.parametrize(
    "arguments", [{"size": 0}, {"size": 2.0}, {"pack": 0}, {"pack": ()}, {"pack": (2, 0)}]
)
def test_what_is_no_unit(arguments):
    with pytest.raises(ftp.FtpError, match="takes a mesh axis name, a positive int"):
        units("tp", **arguments)


class GatedMLP(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(4, 12), torch.nn.Linear(6, 4)

    def forward(self, x):
        gate, up = self.up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


def test_exported_programs_hold_packs():
    torch.manual_seed(0)
    model, x = GatedMLP().double(), tensor(3, 4)
    program = torch.export.export(model, (x,), strict=True)
    mesh = ftp.simulated_mesh((3,), ("tp",))
    cuts = {"up.*": P(units("tp", pack=2)), "down.weight": P(None, "tp")}
    made = [ftp.shard_exported(program, mesh, cuts, rank=rank) for rank in range(3)]
    assert torch.equal(made[1].state_dict["up.bias"], model.up.bias[[2, 3, 8, 9]])
    for out in simulate(made, mesh, [(x,)] * 3):
        torch.testing.assert_close(out, model(x).detach(), rtol=1e-12, atol=1e-12)
