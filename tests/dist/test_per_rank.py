"""Per-rank code on gloo processes equals one device."""

import os

import pytest
import torch
import torch.distributed as dist
from launch import launch

import ftp
from ftp import P

pytestmark = pytest.mark.dist


def _values(ranks):
    assert [r.exit for r in ranks] == [0] * len(ranks), [r.error or r.stderr[-2000:] for r in ranks]
    return [r.value for r in ranks]


def _local_code(compile):
    from tests.per_rank.test_local import experts_of_all_ranks, experts_plain, ring_attention

    mesh = ftp.make_mesh((int(os.environ["WORLD_SIZE"]),), ("tp",), device_type="cpu")
    attend = ftp.local(lambda q: ring_attention(q, q, q, "tp"), mesh, P(None, "tp"), P(None, "tp"))
    experts = ftp.local(
        lambda x, router, up, down: experts_of_all_ranks(x, router, up, down, "tp"),
        mesh,
        (P("tp"), P(), P("tp"), P("tp")),
        P("tp"),
    )
    # Parts of 3, 3 and 1 of 7 hidden units.
    mlp = ftp.local(
        lambda x, up, down: ftp.axis.all_reduce((x @ up).relu() @ down, "tp"),
        mesh,
        (P(), P(None, "tp"), P("tp")),
        P(),
    )

    def loss_of(attend, experts, mlp):
        def loss(p, x):
            y = (
                attend((x @ p["q"]).unflatten(-1, (2, 2)).transpose(0, 1))
                .transpose(0, 1)
                .flatten(1)
            )
            y = y + mlp(y, p["wide"], p["narrow"]).tanh()
            return experts(y, p["router"], p["up"], p["down"]).square().sum()

        return loss

    shapes = {"q": (5, 4), "router": (4, 6), "up": (6, 4, 3), "down": (6, 3, 4)}
    shapes |= {"wide": (4, 7), "narrow": (7, 4)}
    generator = torch.Generator().manual_seed(0)
    full = {
        name: torch.randn(shape, dtype=torch.float64, generator=generator)
        for name, shape in shapes.items()
    }
    x = torch.randn(12, 5, dtype=torch.float64, generator=generator)
    specs = {"q": P(), "router": P(), "up": P("tp"), "down": P("tp")}
    specs |= {"wide": P(None, "tp"), "narrow": P("tp")}
    step = ftp.shard(
        loss_of(attend, experts, mlp), mesh, specs, batch_specs=P("tp"), compile=compile
    )
    loss, grads = step(ftp.device_put(full, mesh, specs), ftp.device_put(x, mesh, P("tp")))
    grads = ftp.device_get(grads, mesh, specs)

    def plain(q):
        return torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)

    def mlp_plain(x, up, down):
        return (x @ up).relu() @ down

    of_plain = loss_of(plain, experts_plain, mlp_plain)
    expected, expected_loss = torch.func.grad_and_value(of_plain)(full, x)
    dist.barrier()
    dist.destroy_process_group()
    pairs = [(loss, expected_loss), *((grads[k], g) for k, g in expected.items())]
    return max(float((found - due).abs().max() / due.abs().max()) for found, due in pairs)


def test_per_rank_code_equals_one_device():
    for error in _values(launch(_local_code, 3, False)):
        assert error < 1e-13


@pytest.mark.slow
def test_compiled_per_rank_code_equals_one_device():
    for error in _values(launch(_local_code, 2, True, timeout=300)):
        assert error < 1e-13


def _unequal_parts():
    from tests.per_rank.test_unequal_parts import exchanged  # type: ignore[import-not-found]

    n = int(os.environ["WORLD_SIZE"])
    mesh = ftp.make_mesh((n,), ("ep",), device_type="cpu")

    def loss_of(send):
        return lambda w, c: (send(w.sin(), c) * torch.arange(1.0, 1 + n * 7)[:, None]).sum()

    def swap(x, c):
        return ftp.axis.all_to_all(x, "ep", send_counts=c, bound=7)

    generator = torch.Generator().manual_seed(0)
    w = torch.randn(n * 4, 3, dtype=torch.float64, generator=generator)
    worst = 0.0
    step = ftp.shard(
        loss_of(ftp.local(swap, mesh, P("ep"), P("ep"))), mesh, P("ep"), batch_specs=P("ep")
    )
    for counts in ([1, 0, 3, 0, 0, 0, 2, 2, 0], [4, 0, 0, 1, 3, 0, 0, 0, 4], [0] * 9):
        c = torch.tensor(counts)
        plain = loss_of(lambda x, c: exchanged(x, c.view(n, n), 7))
        expected_grad, expected = torch.func.grad_and_value(plain)(w, c)
        loss, grad = step(ftp.device_put(w, mesh, P("ep")), ftp.device_put(c, mesh, P("ep")))
        grad = ftp.device_get(grad, mesh, P("ep"))
        worst = max(
            worst, float((loss - expected).abs()), float((grad - expected_grad).abs().max())
        )
    try:
        too_many = torch.tensor([4, 0, 0, 4, 0, 0, 0, 0, 0])
        step(ftp.device_put(w, mesh, P("ep")), ftp.device_put(too_many, mesh, P("ep")))
        said = "nothing"
    except ftp.errors.InputError as error:
        said = str(error)
    loss, _ = step(ftp.device_put(w, mesh, P("ep")), ftp.device_put(c, mesh, P("ep")))  # goes on
    dist.barrier()
    dist.destroy_process_group()
    return worst, said, float(loss)


@pytest.mark.parametrize("shared", ["0", "1"])
def test_unequal_parts_and_too_many_rows_on_one_rank(shared):
    for error, said, loss in _values(launch(_unequal_parts, 3, env={"FTP_SHM": shared})):
        assert error < 1e-12
        assert (
            "rank 0 of the axis would receive 8 rows, more than bound=7. No row was sent." in said
        )
        assert loss == 0.0
