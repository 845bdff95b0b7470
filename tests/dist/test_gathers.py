"""All-gathers over gloo go by the call that neither corrupts the heap nor takes a GPU's tensors for
the host's.
"""

from types import SimpleNamespace

import pytest
import torch
from launch import launch
from models import LlamaConfig, build, cuts, lm_batch, lm_loss, sequence_parallel, specs
from seen_ops import SeenOps

import ftp
from ftp import P
from ftp.partitioning.collectives import OVER_GLOO, gather_of
from ftp.runtime import compile

pytestmark = pytest.mark.dist


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_gathers_go_by_an_op_for_their_backend(
    monkeypatch: pytest.MonkeyPatch, device: str, backend: str
):
    group = SimpleNamespace(_get_backend=lambda device: SimpleNamespace(name=lambda: backend))
    monkeypatch.setattr("ftp.partitioning.collectives.resolve_process_group", lambda name: group)
    assert (gather_of("0", torch.device(device)) is OVER_GLOO) == (backend == "gloo")


def _gathers(how: str, compiled: bool, is_gpu: bool) -> set[str]:
    """The ops by which a step on two ranks gathers; as it does on GPUs if ``is_gpu``."""
    if is_gpu:
        compile.call_directly = lambda graph: None
    mesh = ftp.make_mesh((2,), ("tp",), device_type="cpu")
    cfg = LlamaConfig(vocab=64, layers=1)
    constraints = sequence_parallel() if how == "sequence" else None
    fn, full = ftp.functionalize(build(cfg, dtype=torch.float64), constraints=constraints)
    of_params = ftp.plan(full, {"**": P("tp")} if how == "fsdp" else specs(cuts(cfg), tp="tp"))
    of_batch = P("tp") if how == "fsdp" else P()
    step = ftp.shard(lm_loss(fn), mesh, of_params, batch_specs=of_batch, compile=compiled)
    batch = lm_batch(cfg, 4, 8)
    params, data = ftp.device_put(full, mesh, of_params), ftp.device_put(batch, mesh, of_batch)
    step(params, data)
    with SeenOps() as seen:
        loss, grads = step(params, data)
    due, expected = torch.func.grad_and_value(lm_loss(fn))(full, batch)[::-1]
    torch.testing.assert_close(loss, due)
    torch.testing.assert_close(ftp.device_get(grads, mesh, of_params), expected)
    ftp.destroy_process_group()
    return {op for op in seen.ops if "allgather" in op or "all_gather" in op}


@pytest.mark.cases_by_default(2)
@pytest.mark.parametrize("how", ["fsdp", "sequence"])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("is_gpu", [False, True])
def test_steps_gather_by_the_call_that_keeps_memory_whole(how: str, compiled: bool, is_gpu: bool):
    op = "ftp.all_gather_over_gloo.default" if is_gpu else "c10d._allgather_base_.default"
    for rank in launch(_gathers, 2, how, compiled, is_gpu):
        assert rank.exit == 0, rank.error
        assert rank.value == {op}


def _many_gathers() -> None:
    mesh = ftp.make_mesh((2,), ("tp",), device_type="cpu")
    x = torch.arange(192.0)
    step = ftp.spmd(
        lambda *xs: tuple(x * 2 for x in xs), mesh, (P("tp"),) * 30, out_specs=(P(),) * 30,
        bucket=False,
    )  # fmt: skip
    given = ftp.device_put((x,) * 30, mesh, (P("tp"),) * 30)
    for _ in range(4000):
        for y in step(*given):
            assert torch.equal(y, x * 2)
    ftp.destroy_process_group()


@pytest.mark.slow
def test_a_hundred_thousand_gathers_leave_the_memory_of_others_as_it_is():
    for rank in launch(_many_gathers, 2):
        assert rank.exit == 0, rank.error
