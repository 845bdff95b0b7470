"""Per-rank code over some mesh axes, planned over the others."""

import functools
import math
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from few_or_many import slow_after
from plan_reshards import unbucketed

import ftp
from ftp import P

MESHES = [((2, 2), ("ep", "tp")), ((2, 2), ("tp", "ep")), ((2, 3), ("ep", "tp"))]
IDS = ["ep2×tp2", "tp2×ep2", "ep2×tp3"]


def drawn(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(math.prod(shape) + len(shape))
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def check(layer, plain, mesh, specs, batch_specs, params, batch) -> ftp.Lowered:
    """A certified step, and the layer on whole tensors, have the loss and the gradients of
    ``plain``.
    """

    def loss_of(f):
        def loss(params, batch):
            leaves = torch.utils._pytree.tree_leaves(f(params, batch))
            weights = [torch.linspace(0, 1, y.numel(), dtype=y.dtype) for y in leaves]
            terms = [(y.reshape(-1) * w).sum() for y, w in zip(leaves, weights, strict=True)]
            return sum(terms) + sum(y.square().mean() for y in leaves)

        return loss

    expected_grads, expected = torch.func.grad_and_value(loss_of(plain))(params, batch)
    step = ftp.shard(loss_of(layer), mesh, specs, batch_specs=batch_specs)
    loss, grads = step(params, batch)
    whole_grads, whole = torch.func.grad_and_value(loss_of(layer))(params, batch)
    for found in ((loss, grads), (whole, whole_grads)):
        torch.testing.assert_close(found, (expected, expected_grads), rtol=1e-12, atol=1e-12)
    lowered = step.lower(params, batch)
    ftp.certify(lowered)
    return lowered


def experts(x, router, up, down):
    weight, expert = (x @ router).softmax(-1).max(-1)
    chosen = (expert[:, None] == torch.arange(router.shape[1])).long()
    place = (chosen.cumsum(0) * chosen).sum(-1) - 1
    queue = x.new_zeros(router.shape[1], *x.shape).index_put((expert, place), x)
    arrived = ftp.axis.all_to_all(queue, "ep", split_dim=0, concat_dim=1)
    done = torch.bmm(F.gelu(torch.bmm(arrived, up)), down)
    back = ftp.axis.all_to_all(done, "ep", split_dim=1, concat_dim=0)
    return weight[:, None] * back[expert, place]


def experts_on_one_device(x, router, up, down):
    weight, expert = (x @ router).softmax(-1).max(-1)
    done = torch.einsum("tef,efd->ted", F.gelu(torch.einsum("td,edf->tef", x, up)), down)
    return weight[:, None] * done[torch.arange(len(x)), expert]


@pytest.mark.cases_by_default(1)
@pytest.mark.parametrize(("shape", "names"), MESHES, ids=IDS)
def test_experts_by_hand_whose_weights_are_cut_by_the_planner(shape, names):
    mesh = ftp.simulated_mesh(shape, names)
    moe = ftp.local(experts, mesh, (P("ep"), P(), P("ep"), P("ep")), P("ep"), axes=("ep",))
    weights = {"up": drawn(4, 6, 10), "down": drawn(4, 10, 6), "router": drawn(6, 4)}
    lowered = check(
        lambda p, x: moe(x @ p["in"], p["router"], p["up"], p["down"]) @ p["out"],
        lambda p, x: experts_on_one_device(x @ p["in"], p["router"], p["up"], p["down"]) @ p["out"],
        mesh,
        {"in": P(), "router": P(), "out": P(), "up": P("ep", None, "tp"), "down": P("ep", "tp")},
        P("ep"),
        {**weights, "in": drawn(6, 6), "out": drawn(6, 5)},
        drawn(8, 6),
    )
    # Megatron's two all-reduces of activations over tp, and four all-to-alls over ep.
    over = Counter((c.op, c.axes) for c in lowered.collectives if math.prod(c.shape) > 1)
    assert over["all_reduce", ("tp",)] == 2
    assert over["all_to_all", ("ep",)] == 4
    assert not over["all_gather", ("ep",)] and not over["all_gather", ("tp",)]


def every_collective(x, w):
    n, i = ftp.axis.axis_size("ep"), ftp.axis.axis_index("ep")
    h = (x @ w).tanh()
    total = ftp.axis.all_reduce(h.sum(0), "ep")
    top = ftp.axis.all_reduce(h.amax(0), "ep", "max")
    every = ftp.axis.all_gather(h, "ep", dim=0)
    share = ftp.axis.reduce_scatter(every.square() * (1 + i), "ep", dim=0)
    turned = ftp.axis.all_to_all(h, "ep", split_dim=0, concat_dim=1)
    ring = ftp.axis.ppermute(h, "ep", [(j, (j + 1) % n) for j in range(n)])
    return total * top, share * ring, turned


def every_collective_on_one_device(n):
    def run(x, w):
        h = (x @ w).tanh()
        parts = h.chunk(n)
        share = sum((1 + i) * h.square() for i in range(n))
        ring = torch.cat([parts[i - 1] for i in range(n)])
        turned = torch.cat([torch.cat([p.chunk(n)[i] for p in parts], 1) for i in range(n)])
        top = torch.stack([p.amax(0) for p in parts]).amax(0)
        return h.sum(0) * top, share * ring, turned

    return run


@pytest.mark.cases_by_default(1)
@pytest.mark.parametrize(("shape", "names"), MESHES, ids=IDS)
@pytest.mark.parametrize("cut", slow_after(1, [P(None, "tp"), P("tp")]), ids=["columns", "rows"])
def test_every_collective(shape, names, cut):
    mesh = ftp.simulated_mesh(shape, names)
    outs = (P(), P("ep"), P("ep"))
    layer = ftp.local(every_collective, mesh, (P("ep"), P()), outs, axes=["ep"])
    plain = every_collective_on_one_device(mesh.axes["ep"])
    batch, params = drawn(8, 6), {"w": drawn(6, 5)}
    given = (mesh, {"w": cut}, P("ep"), params, batch)
    lowered = check(lambda p, x: layer(x, p["w"]), lambda p, x: plain(x, p["w"]), *given)
    assert not [c for c in unbucketed(lowered).collectives if len(c.axes) > 1]


def test_a_weight_that_data_ranks_share_is_gathered_around_it():
    mesh = ftp.simulated_mesh((2, 2), ("dp", "cp"))

    def attention(q, k, v):
        every = [ftp.axis.all_gather(t, "cp", dim=2) for t in (k, v)]
        return F.scaled_dot_product_attention(q, *every)

    cut = P(None, None, "cp")
    layer = ftp.local(attention, mesh, (cut, cut, cut), cut, axes="cp")

    def block(attend):
        def run(p, x):
            heads = (x @ p["qkv"]).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
            return attend(*heads).transpose(1, 2).flatten(2) @ p["out"]

        return run

    lowered = check(
        block(layer),
        block(F.scaled_dot_product_attention),
        mesh,
        {"qkv": P("dp"), "out": P("dp")},
        P("dp", "cp"),
        {"qkv": drawn(8, 24), "out": drawn(8, 8)},
        drawn(4, 6, 8),
    )
    over = Counter((c.op, c.axes) for c in lowered.collectives)
    assert over["all_gather", ("cp",)] == over["reduce_scatter", ("cp",)] == 2
    assert over["all_gather", ("dp",)] and over["reduce_scatter", ("dp",)]


def test_what_it_refuses():
    mesh = ftp.simulated_mesh((2, 2), ("ep", "tp"))

    def call(in_specs=P("ep"), out_specs=P("ep"), axes=("ep",), fn=torch.exp):
        return ftp.local(fn, mesh, in_specs, out_specs, axes)(drawn(4, 4))

    with pytest.raises(ftp.errors.SpecError, match=r"leaves 'tp' to the planner"):
        call(P("ep", "tp"))
    with pytest.raises(ftp.errors.SpecError, match=r"leaves 'tp' to the planner"):
        call(out_specs=P("ep", "tp"))
    with pytest.raises(ftp.errors.SpecError, match=r"the mesh has .*no axis 'dp'"):
        call(axes=("dp",))
    with pytest.raises(ftp.errors.SpecError, match=r"axes=\(\)"):
        call(axes=())
    with pytest.raises(ftp.errors.MeshError, match="names axis 'tp'"):
        call(fn=lambda x: ftp.axis.all_reduce(x, "tp"))
    with pytest.raises(ftp.errors.SpecError, match="hold the same, but it varies there"):
        call(out_specs=P())


def test_a_constraint_within_names_the_other_axes():
    mesh = ftp.simulated_mesh((2, 2), ("ep", "tp"))

    def step(spec):
        layer = ftp.local(
            lambda x, w: ftp.constrain((x @ w).relu(), spec).sum(1, keepdim=True),
            mesh, (P("ep"), P()), P("ep"), axes=("ep",),
        )  # fmt: skip
        return ftp.spmd(layer, mesh, (P("ep"), P()), P("ep"))

    x, w = drawn(4, 6), drawn(6, 4)
    got = step(P(None, "tp"))(x, w)
    torch.testing.assert_close(got, (x @ w).relu().sum(1, keepdim=True), rtol=1e-12, atol=1e-12)
    lowered = step(P(None, "tp")).lower(x, w)
    assert [c.axes for c in lowered.collectives] == [("tp",)]
    with pytest.raises(ftp.errors.SpecError, match="stands in per-rank code over 'ep'"):
        step(P("ep")).lower(x, w)


def test_rows_whose_counts_are_values():
    mesh = ftp.simulated_mesh((2, 2), ("ep", "tp"))

    def experts(x, first, up, down):  # tokens that are sorted by rank
        counts = torch.stack([first.sum(), len(first) - first.sum()])
        arrived = ftp.axis.all_to_all(x, "ep", send_counts=counts, bound=6)
        done = (arrived @ up[0]).tanh() @ down[0]
        back = ftp.axis.all_to_all(counts, "ep")
        return ftp.axis.all_to_all(done, "ep", send_counts=back, bound=len(x))

    specs = (P("ep"), P("ep"), P("ep"), P("ep"))
    layer = ftp.local(experts, mesh, specs, P("ep"), axes=("ep",))
    first = torch.tensor([1, 1, 0, 0, 1, 1, 1, 0])

    def plain(p, x):
        both = (torch.einsum("td,edf->etf", x @ p["in"], p["up"])).tanh()
        done = torch.einsum("etf,efd->etd", both, p["down"])
        return torch.where(first[:, None] > 0, done[0], done[1])

    lowered = check(
        lambda p, x: layer(x @ p["in"], first, p["up"], p["down"]),
        plain,
        mesh,
        {"in": P(), "up": P("ep", None, "tp"), "down": P("ep", "tp")},
        P("ep"),
        {"in": drawn(4, 4), "up": drawn(2, 4, 6), "down": drawn(2, 6, 4)},
        drawn(8, 4),
    )
    over = Counter((c.op, c.axes) for c in lowered.collectives if len(c.shape) == 2)
    assert over["all_reduce", ("tp",)] == 2


def test_in_a_checkpointed_block():
    mesh = ftp.simulated_mesh((2, 2), ("cp", "tp"))

    def attend(q, k, v):
        every = [ftp.axis.all_gather(t, "cp", dim=2) for t in (k, v)]
        return F.scaled_dot_product_attention(q, *every)

    cut = P(None, None, "cp")
    layer = ftp.local(attend, mesh, (cut, cut, cut), cut, axes=("cp",))

    def loss(attend, run):
        def block(x, p):
            heads = (x @ p["qkv"]).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
            return attend(*heads).transpose(1, 2).flatten(2) @ p["out"]

        return lambda p, x: run(block, x, p).square().mean()

    params, x = {"qkv": drawn(8, 24), "out": drawn(8, 8)}, drawn(2, 6, 8)
    plain = loss(F.scaled_dot_product_attention, lambda block, x, p: block(x, p))
    grads, value = torch.func.grad_and_value(plain)(params, x)
    again = functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=False)
    specs = {"qkv": P(None, "tp"), "out": P("tp")}
    step = ftp.shard(loss(layer, again), mesh, specs, batch_specs=P(None, "cp"))
    torch.testing.assert_close(step(params, x), (value, grads), rtol=1e-12, atol=1e-12)
