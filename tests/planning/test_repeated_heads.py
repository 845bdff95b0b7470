"""Fewer heads of keys than ranks: query heads stay cut, and each rank picks its keys from all."""

import pytest
import torch
from few_or_many import slow_after
from plan_reshards import unbucketed

import ftp
from ftp import P

F = torch.nn.functional
HEADS, SIZE = 8, 4


def heads(x, w):
    return (x @ w).unflatten(-1, (-1, SIZE)).transpose(1, 2)


def grouped(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def interleaved(q, k, v):
    k, v = (x.repeat_interleave(HEADS // x.shape[1], 1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def expanded(q, k, v):
    times = HEADS // k.shape[1]
    k, v = (x[:, :, None].expand(-1, -1, times, -1, -1).flatten(1, 2) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v)


def masked(q, k, v):
    mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril(1)
    return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)


def loss_with(attend, layers=1):
    def loss(p, x):
        for layer in p[:layers]:
            q, k, v = (heads(x, layer[name]) for name in "qkv")
            x = x + attend(q, k, v).transpose(1, 2).flatten(2) @ layer["o"]
        return x.square().mean()

    return loss


def weights(of_keys, layers=1):
    width, narrow = HEADS * SIZE, of_keys * SIZE
    shapes = {"q": (width, width), "k": (width, narrow), "v": (width, narrow), "o": (width, width)}
    torch.manual_seed(0)
    return [
        {k: torch.randn(s, dtype=torch.float64) / 8 for k, s in shapes.items()}
        for _ in range(layers)
    ]


BY_HEAD = ftp.units("tp", SIZE)
SPECS = {"q": P(None, BY_HEAD), "k": P(), "v": P(), "o": P(BY_HEAD)}


def sent(lowered):
    return [(c.op, c.nbytes) for c in unbucketed(lowered).collectives]


@pytest.mark.cases_by_default(2)
@pytest.mark.parametrize("attend", [grouped, interleaved, expanded, masked])
@pytest.mark.parametrize(("n", "of_keys"), slow_after(2, [(4, 2), (3, 2), (4, 1), (8, 2), (3, 4)]))
def test_query_heads_stay_cut(attend, n, of_keys):
    loss, params = loss_with(attend), weights(of_keys)
    x = torch.randn(2, 6, HEADS * SIZE, dtype=torch.float64)
    step = ftp.shard(loss, ftp.simulated_mesh((n,), ("tp",)), [SPECS], certify=True)
    lowered = step.lower(params, x)
    keys = 2 * 6 * of_keys * SIZE * 8
    # The result of attention, and the gradients of keys and values before they are repeated.
    expected = [("all_reduce", x.nbytes), ("all_reduce", keys), ("all_reduce", keys)]
    assert sent(lowered) == expected
    attention = [n for n in lowered.plan.graph.nodes if "attention" in str(n.target)]
    assert len(attention) == 2 and all(node.cuts for node in attention)
    grads, value = torch.func.grad_and_value(loss)(params, x)
    torch.testing.assert_close(step(params, x), (value, grads), rtol=1e-12, atol=1e-12)


def test_layers_that_repeat_heads_are_planned_as_one():
    loss, params = loss_with(grouped, 9), weights(2, 9)
    x = torch.randn(2, 6, HEADS * SIZE, dtype=torch.float64)
    step = ftp.shard(
        loss,
        ftp.simulated_mesh((2, 4), ("dp", "tp")),
        [SPECS] * 9,
        batch_specs=P("dp"),
        certify=True,
    )
    lowered = step.lower(params, x)
    assert lowered.plan.alike > 2
    grads, value = torch.func.grad_and_value(loss)(params, x)
    torch.testing.assert_close(step(params, x), (value, grads), rtol=1e-11, atol=1e-11)


def test_figures_of_two_heads_of_keys_on_four_ranks():
    """3.2 times one device's matmuls with ``enable_gqa``; with repeated keys, their gradients were
    gathered, 4 times the bytes.
    """

    def meta(*shape):
        return torch.empty(*shape, dtype=torch.bfloat16, device="meta")

    def loss(attend):
        def of(p, x):
            q, k, v = ((x @ p[n]).unflatten(-1, (-1, 128)).transpose(1, 2) for n in "qkv")
            return (attend(q, k, v).transpose(1, 2).flatten(2) @ p["o"]).float().square().mean()

        return of

    def repeated(q, k, v):
        k, v = (x.repeat_interleave(16, 1) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    params = {"q": meta(4096, 4096), "k": meta(4096, 256), "v": meta(4096, 256)}
    params["o"] = meta(4096, 4096)
    mesh = ftp.AbstractMesh((4,), ("tp",), device_type="cuda")
    for attend in (grouped, repeated):
        step = ftp.shard(loss(attend), mesh, SPECS)
        lowered = step.lower(params, meta(1, 8192, 4096))
        assert float(lowered.work) < 1.1
        weight = params["k"].nbytes
        assert sorted(sent(lowered))[:2] == [("all_reduce", weight)] * 2
        assert not any(op == "all_gather" for op, _ in sent(lowered))
