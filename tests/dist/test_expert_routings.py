"""Experts that stay, on gloo processes and in shared memory: routings that leave ranks without
rows or send them all, and a capacity that does not suffice, which all ranks refuse.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from dropless import FORMS, drawn, loop
from few_or_many import slow_after
from launch import launch

import ftp
from ftp import P

pytestmark = pytest.mark.dist
TOKENS = 8  # of both ranks
ROUTINGS = ((7, 2, None), (4, 1, 0), (4, 1, 3), (8, 8, None))  # experts, k, favoured


def _step(k: int, mesh: Any, capacity: float | None = None) -> tuple[Any, Any]:
    specs = {"router": P(), "favour": P(), "up": P("ep"), "down": P("ep")}
    layer = ftp.plans.send_tokens(
        lambda p, x: FORMS["torchtitan_form"](p, x, k), "ep", capacity=capacity
    )
    loss = lambda p, x: layer(p, x.sin()).square().sum()  # noqa: E731
    return ftp.shard(loss, mesh, specs, batch_specs=P("ep")), specs


def _job() -> tuple[list[float], str, bool]:
    mesh = ftp.make_mesh((2,), ("ep",), device_type="cpu")
    off = []
    for count, k, favoured in ROUTINGS:
        params, x = drawn(count, TOKENS, favoured, 0)
        step, specs = _step(k, mesh)
        value, grads = step(ftp.device_put(params, mesh, specs), ftp.device_put(x, mesh, P("ep")))
        alone = lambda p, k=k, x=x: loop(p, x.sin(), k).square().sum()  # noqa: E731
        right, expected = torch.func.grad_and_value(alone)(params)
        pairs = [(value, expected)]
        pairs += [(g, right[name]) for name, g in ftp.device_get(grads, mesh, specs).items()]
        off.append(max(float((a - b).abs().max() / (1 + b.abs().max())) for a, b in pairs))
    params, x = drawn(4, TOKENS, 0, 0)
    step, specs = _step(1, mesh, capacity=1.5)
    with pytest.raises(ftp.errors.InputError) as said:
        step(ftp.device_put(params, mesh, specs), ftp.device_put(x, mesh, P("ep")))
    params["favour"].zero_()
    params["router"] = torch.eye(4, dtype=torch.float64)
    balanced = torch.eye(4, dtype=torch.float64).repeat(2, 1)
    given = ftp.device_put(params, mesh, specs), ftp.device_put(balanced, mesh, P("ep"))
    goes_on = bool(step(*given)[0].isfinite())
    dist.barrier()
    dist.destroy_process_group()
    return off, str(said.value), goes_on


@pytest.mark.parametrize("shared", slow_after(1, ["0", "1"]))
def test_routings_and_a_capacity_that_does_not_suffice(shared: str):
    """After the refusal no row has moved, so that the ranks go on with the next batch."""
    for rank in launch(_job, 2, env={"FTP_SHM": shared}, timeout=300):
        assert rank.exit == 0, rank.error or rank.stderr[-2000:]
        off, said, goes_on = rank.value
        assert max(off) < 1e-10
        assert "rank 0 of the axis would receive 8 rows, more than bound=6. No row was sent" in said
        assert goes_on
