"""Matmuls that are one op with the reshard beside them: simulated, and by torch's plain forms on
gloo; the kernels are test_cuda.py's.
"""

import os
from collections import Counter
from typing import Any

import pytest
import torch
from launch import launch
from models import LlamaConfig, build, cuts, lm_batch, lm_loss, sequence_parallel, specs

import ftp
from ftp import P
from ftp.ops.symmetric_memory import gather_matmuls, lack, matmul_scatter
from ftp.report.lowered import Lowered
from tests.api.test_programs import compare


def decoder(mesh: Any, **options: Any) -> tuple[ftp.Step, Any, Any, Any]:
    cfg = LlamaConfig(vocab=64, layers=1)
    fn, params = ftp.functionalize(build(cfg, dtype=torch.float64), constraints=sequence_parallel())
    of_params = ftp.plan(params, specs(cuts(cfg), tp="tp"))
    return (
        ftp.shard(lm_loss(fn), mesh, of_params, **options),
        params,
        lm_batch(cfg, 4, 8),
        (lm_loss(fn), of_params),
    )


@pytest.mark.cases_by_default(1)
@pytest.mark.parametrize(("ranks", "bucket", "batch"), [(2, False, 4), (4, True, 1)])
def test_joined_products_equal_one_device(ranks: int, bucket: bool, batch: int):
    step, params, _, (loss_fn, _) = decoder(
        ftp.simulated_mesh((ranks,), ("tp",)), async_tp=True, bucket=bucket
    )
    data = lm_batch(LlamaConfig(vocab=64, layers=1), batch, 8)
    grads, loss = torch.func.grad_and_value(loss_fn)(params, data)
    compare(step(params, data), (loss, grads))
    joined = step.lower(params, data)
    plain = Lowered(joined._program.with_options(async_tp=False))
    targets = Counter(node.target for node in joined.graph.graph.nodes)
    # A layer has the gathers before q, k and v and before w1 and w3, and the gradients' of wo and
    # w2; the matmuls wo and w2 are summed.
    assert targets[gather_matmuls] == 4 + 1, "one for the head"
    assert targets[matmul_scatter] == 2 + 1, "one for the head's gradient"
    matmuls = torch.ops.aten.mm.default
    assert targets[matmuls] < Counter(node.target for node in plain.graph.graph.nodes)[matmuls] - 8
    for op in ("all_gather", "reduce_scatter"):
        before, after = (
            Counter((c.nbytes, c.axes) for c in found.collectives if c.op == op)
            for found in (plain, joined)
        )
        assert before == after, "the same bytes are moved, and counted"
    assert joined.cost().flops == plain.cost().flops
    assert joined.collectives.wire_nbytes == plain.collectives.wire_nbytes


def test_what_does_not_divide_is_left_as_it_is():
    mesh = ftp.AbstractMesh((3,), ("tp",), device_type="cuda")
    step, params, batch, _ = decoder(mesh, async_tp=True)
    targets = {node.target for node in step.lower(params, batch).graph.graph.nodes}
    assert gather_matmuls not in targets and matmul_scatter not in targets


def test_reshards_of_parameters_are_left_as_they_are():
    mesh = ftp.AbstractMesh((2,), ("dp",), device_type="cuda")
    step = ftp.shard(
        lambda p, x: (x @ p["w"]).sum(), mesh, P("dp"), batch_specs=P("dp"), async_tp=True
    )
    lowered = step.lower({"w": torch.ones(4, 4)}, torch.ones(4, 4))
    assert gather_matmuls not in {node.target for node in lowered.graph.graph.nodes}


@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_torchs_plain_forms_equal_one_device(compile: bool):
    for rank in launch(_on_gloo, 2, compile, timeout=120):
        assert rank.exit == 0, rank.error
        assert rank.value == (5, 3)


def _on_gloo(compile: bool) -> tuple[int, int]:
    import ftp.api.shard
    import ftp.runtime.program

    ftp.api.options._check_async_tp = lambda options, mesh: None
    ftp.runtime.program.check_symmetric = lambda graph, mesh: None
    os.environ["FTP_SHM"] = "0"
    mesh = ftp.make_mesh((2,), ("tp",), device_type="cpu")
    step, full, batch, (loss_fn, of_params) = decoder(mesh, async_tp=True, compile=compile)
    params = ftp.device_put(full, mesh, of_params)
    targets = Counter(node.target for node in step.lower(params, batch).graph.graph.nodes)
    grads, loss = torch.func.grad_and_value(loss_fn)(full, batch)
    for _ in range(2):
        found, sharded = step(params, batch)
        torch.testing.assert_close(found, loss)
        torch.testing.assert_close(ftp.device_get(sharded, mesh, of_params), grads)
    ftp.destroy_process_group()
    return targets[gather_matmuls], targets[matmul_scatter]


# Where it cannot be.


def test_processes_without_gpus_are_refused():
    (rank, *_) = launch(_refused, 1)
    assert rank.value == (
        "async_tp=True, but the mesh (tp 1) on cpu has no GPUs with symmetric memory."
        " Leave it out; chunks=n hides the same"
        " reshards behind matmuls with ordinary collectives."
    ), rank.error


def _refused() -> str:
    mesh = ftp.make_mesh((1,), ("tp",), device_type="cpu")
    try:
        ftp.shard(lambda p, x: x.sum(), mesh, P(), async_tp=True)
    except ftp.errors.MeshError as error:
        return str(error)
    return "nothing"


def test_chunks_as_well_are_refused():
    with pytest.raises(
        ftp.errors.InputError,
        match=r"async_tp=True and chunks=2 both take the reshards beside matmuls\. Leave one out\.",
    ):
        ftp.shard(
            lambda p, x: x.sum(), ftp.AbstractMesh((2,), ("tp",)), P(), async_tp=True, chunks=2
        )


def test_what_is_lacking_is_said(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert lack([("a", "x"), ("a", "y")], 0) == "it takes GPUs, and a build of torch with NCCL"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr("ftp.ops.symmetric_memory.gpu_uuid", lambda i: "xyz"[i])
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: {a, b} != {0, 2})
    assert lack([("a", "x"), ("a", "y")], 0) == ""
    assert lack([("a", "x"), ("b", "y")], 0) == "the group is on hosts a, b, and works within one"
    assert lack([("a", "x"), ("a", "z")], 1) == "GPU z of a cannot read the memory of GPU x"
    assert lack([("a", "x"), ("a", "x")], 1) == "GPU x of a is another rank's too"
    # Each process sees its own GPU only, as number 0.
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert lack([("a", "x"), ("a", "y")], 0) == ""
