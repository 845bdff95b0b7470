"""Buckets on gloo processes: ranks issue the same ones, or none runs."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launch import Rank, launch
from torch.distributed.device_mesh import DeviceMesh

import ftp
from ftp import P
from ftp.errors import MismatchError
from ftp.runtime import decided

pytestmark = pytest.mark.dist
NAMES = [f"{i}.{name}" for i in range(3) for name in ("up", "bias", "down")]


def loss_fn(params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    for i in range(3):
        x = x + torch.tanh(x @ params[f"{i}.up"] + params[f"{i}.bias"]) @ params[f"{i}.down"]
    return x.square().mean()


def arguments() -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    shapes = {"up": (4, 6), "bias": (6,), "down": (6, 4)}
    return {name: drawn(*shapes[name[2:]]) for name in NAMES}, drawn(8, 4)


def expected() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    params, x = arguments()
    grads, loss = torch.func.grad_and_value(loss_fn)(params, x)
    return loss, grads


def _one_rank_estimates_otherwise() -> None:
    chosen = decided.faster_buckets

    def others(*args: Any) -> Any:
        found = chosen(*args)
        assert found.groups, "all buckets are kept where a collective costs its latency"
        return replace(found, groups=found.groups[1:])

    if dist.get_rank() == 1:
        decided.faster_buckets = others  # type: ignore[assignment]


def _estimating_otherwise(form: str) -> str:
    mesh = ftp.make_mesh((2,), ("dp",), device_type="cpu")
    _one_rank_estimates_otherwise()
    step = ftp.shard(loss_fn, mesh, P(), batch_specs=P("dp"))
    params, x = arguments()
    placed = ftp.device_put(params, mesh, P()), ftp.device_put(x, mesh, P("dp"))
    found = ""
    try:
        run = step.lower(*placed).compile() if form == "compiled" else step
        loss, grads = run(*placed)
        wanted, by_torch = expected()
        torch.testing.assert_close(loss, wanted)
        torch.testing.assert_close(grads, by_torch)
        members = [len(c.members) for c in step.lower(*placed).collectives]
        assert dist.get_rank() == 1 or max(members) > 1
    except MismatchError as e:
        found = str(e)
    ftp.destroy_process_group()
    return found


def _said(ranks: list[Rank]) -> set[str]:
    assert [r.exit for r in ranks] == [0, 0], ranks
    assert max(r.seconds for r in ranks) < 60
    return {r.value for r in ranks}


def test_ranks_that_plan_for_themselves_and_choose_other_buckets_are_told():
    (said,) = _said(launch(_estimating_otherwise, 2, "step", env={"FTP_PLANS": "0"}))
    assert "Ranks disagree on the program of call 1: rank 1 differs from rank 0" in said
    assert "bucket(%" in said


def test_ranks_that_choose_other_buckets_ahead_of_time_are_told():
    (said,) = _said(launch(_estimating_otherwise, 2, "compiled", env={"FTP_PLANS": "0"}))
    assert "Ranks disagree on the program of call 1: rank 1 differs from rank 0" in said


def test_ranks_of_one_host_run_the_buckets_that_one_of_them_chose(tmp_path):
    env = {"FTP_CACHE": str(tmp_path)}
    for _ in range(2):
        assert _said(launch(_estimating_otherwise, 2, "step", env=env)) == {""}


def _wrong_numbers(folder: str) -> list[str]:
    """The forms of a step whose buckets give other numbers than torch: on two ranks, or on four
    whose order over both axes is not ascending.
    """
    wanted, by_torch = expected()
    params, x = arguments()
    dist.init_process_group("gloo")
    ranks = [0, 1] if dist.get_world_size() == 2 else [[0, 2], [1, 3]]
    axes = ("dp", "cp")[: torch.tensor(ranks).dim()]
    mesh = DeviceMesh("cpu", ranks, mesh_dim_names=axes)
    wrong = []

    def check(form: str, run: Any, given: Any, rtol: float) -> None:
        loss, grads = run(*given)
        whole = ftp.device_get(grads)
        near = [torch.allclose(loss, wanted, rtol=rtol)]
        near += [torch.allclose(whole[n], by_torch[n], rtol=rtol, atol=rtol) for n in by_torch]
        if not all(near):
            wrong.append(form)

    for zero in (P(), P(axes), P(None, axes)):
        specs = {n: zero if v.dim() >= len(zero) else P("dp") for n, v in params.items()}
        placed = ftp.device_put(params, mesh, specs), ftp.device_put(x, mesh, P(axes))
        for options in ({}, {"reduce_dtype": torch.bfloat16}, {"compile": True}):
            form, rtol = f"{zero} {options}", 1e-2 if "reduce_dtype" in options else 1e-12
            if "compile" in options and (len(axes) > 1 or len(zero) < 2):
                continue
            step = ftp.shard(loss_fn, mesh, specs, batch_specs=P(axes), **options)
            check(form, step, placed, rtol)
            lowered = step.lower(*placed)
            if max(len(c.members) for c in lowered.collectives) < 2:
                wrong.append(f"{form}: no bucket")
            path = f"{folder}/{len(zero)}{len(options)}{dist.get_rank()}"
            lowered.save(path)
            check(f"{form} from a file", ftp.load_program(path, mesh), placed, rtol)
    ftp.destroy_process_group()
    return wrong


@pytest.mark.parametrize("n", [2, 4])
def test_numbers_are_those_of_torch(n: int, tmp_path):
    ranks = launch(_wrong_numbers, n, str(tmp_path), env={"FTP_PLANS": "0"})
    assert [r.exit for r in ranks] == [0] * n, ranks
    assert [r.value for r in ranks] == [[]] * n
