"""What gloo moves for experts that stay: rows, as many bytes as the formula says, and counts; no
byte of an expert's weight.
"""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from launch import launch
from torch.profiler import ProfilerActivity, profile

import ftp
from ftp import P

pytestmark = pytest.mark.dist

TOKENS, K, DIM, HIDDEN, EXPERTS = 16, 2, 6, 10, 4
_BYTES = {"float": 4, "double": 8, "long int": 8, "unsigned char": 1}


def _chosen(x, count):
    """Each token's experts, by the number that it has first: all get as many rows."""
    return (x[:, :1].round().to(torch.int64) * K + torch.arange(K)) % count


def _layer(p, x):
    count = p["gate"].shape[0]
    chosen = _chosen(x, count)
    weights = (x @ p["router"]).softmax(-1).gather(1, chosen)
    order = chosen.flatten().argsort(stable=True)
    offs = F.one_hot(chosen.flatten(), count).sum(0).cumsum(0).to(torch.int32)
    rows = x[order // K]
    h = F.silu(F.grouped_mm(rows, p["gate"], offs=offs))
    h = h * F.grouped_mm(rows, p["up"], offs=offs)
    made = F.grouped_mm(h, p["down"], offs=offs) * weights.flatten()[order][:, None]
    return torch.zeros_like(x).index_add(0, order // K, made)


def _moved():
    mesh = ftp.make_mesh((2,), ("ep",), device_type="cpu")
    shapes = {
        "gate": (EXPERTS, DIM, HIDDEN),
        "up": (EXPERTS, DIM, HIDDEN),
        "down": (EXPERTS, HIDDEN, DIM),
    }
    specs = {**dict.fromkeys(shapes, P("ep")), "router": P(), "in": P()}
    generator = torch.Generator().manual_seed(0)
    full = {
        name: torch.randn(shape, generator=generator, dtype=torch.float64)
        for name, shape in {**shapes, "router": (DIM, EXPERTS), "in": (DIM, DIM)}.items()
    }
    full["in"] = torch.eye(DIM, dtype=torch.float64)
    x = torch.randn(TOKENS, DIM, generator=generator, dtype=torch.float64)
    x[:, 0] = torch.arange(TOKENS)

    def loss(layer):
        return lambda p, x: layer(p, x @ p["in"]).square().sum()

    def experts(p, x):
        count = p["gate"].shape[0]
        chosen = _chosen(x, count)
        weights = (x @ p["router"]).softmax(-1).gather(1, chosen)
        made = torch.stack(
            [(F.silu(x @ p["gate"][e]) * (x @ p["up"][e])) @ p["down"][e] for e in range(count)], 1
        )
        return (made.gather(1, chosen[..., None].expand(-1, -1, DIM)) * weights[..., None]).sum(1)

    step = ftp.shard(loss(ftp.plans.send_tokens(_layer, "ep")), mesh, specs, batch_specs=P("ep"))
    given = ftp.device_put(full, mesh, specs), ftp.device_put(x, mesh, P("ep"))
    found, grads = step(*given)
    expected_grads, expected = torch.func.grad_and_value(loss(experts))(full, x)
    grads = ftp.device_get(grads, mesh, specs)
    torch.testing.assert_close((found, grads), (expected, expected_grads), rtol=1e-10, atol=1e-10)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
        step(*given)
    moved = []
    for event in seen.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name().startswith("gloo:"):
            (shape, *_), (dtype, *_) = event.shapes(), event.dtypes()
            moved.append((event.name(), torch.Size(shape).numel() * _BYTES[dtype]))
    said = [
        (c.op, c.nbytes, c.wire_nbytes, c.worst_nbytes is not None)
        for c in step.lower(*given).collectives
    ]
    odd = {name: full[name][:3] for name in shapes} | {
        "router": full["router"][:, :3],
        "in": full["in"],
    }
    step = ftp.shard(loss(ftp.plans.send_tokens(_layer, "ep")), mesh, specs, batch_specs=P("ep"))
    found, grads = step(ftp.device_put(odd, mesh, specs), given[1])
    by_rank = loss(lambda p, x: torch.cat([experts(p, part) for part in x.chunk(2)]))
    expected_grads, expected = torch.func.grad_and_value(by_rank)(odd, x)
    torch.testing.assert_close(
        (found, ftp.device_get(grads, mesh, specs)),
        (expected, expected_grads),
        rtol=1e-10,
        atol=1e-10,
    )
    dist.barrier()
    dist.destroy_process_group()
    return moved, said


def test_gloo_moves_rows_and_counts_and_no_weight():
    rows = TOKENS // 2 * K * DIM * 8  # of a rank, each way; half of them to the other rank
    for rank in launch(_moved, 2, env={"FTP_SHM": "0"}):
        assert rank.exit == 0, rank.error or rank.stderr[-2000:]
        moved, said = rank.value
        sent = [nbytes for name, nbytes in moved if name == "gloo:all_to_all"]
        assert sent == [rows] * 4
        assert [wire for _, _, wire, is_rows in said if is_rows] == [rows // 2] * 4
        assert sum(wire for *_, wire, is_rows in said if is_rows) == 2 * (
            2 * TOKENS // 2 * K * DIM * 8 // 2
        )
        # All else: the gather of counts, and the gradients of router and first layer.
        assert (
            sum(nbytes for name, nbytes in moved if name != "gloo:all_to_all")
            < 2 * DIM * HIDDEN * 8
        )
