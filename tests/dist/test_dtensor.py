"""Shards become DTensors and come back as they are; what DTensor gathers is the tensor that was
cut.
"""

import os
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launch import launch
from torch import nn

import ftp
from ftp import P

pytestmark = pytest.mark.dist


def _mesh():
    return ftp.make_mesh((2, 2), ("dp", "tp"), device_type="cpu")


def _end():
    dist.barrier()
    dist.destroy_process_group()


SPECS = {
    "major": P(("dp", "tp")),
    "strided": P(None, ("tp", "dp")),
    "both": P("tp", "dp"),
    "one": P("tp"),
    "packed": P(ftp.units("tp", 1, pack=2)),
    "whole": P(),
}


def _there_and_back():
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor
    from torch.distributed.tensor.debug import CommDebugMode

    warnings.simplefilter("ignore")
    mesh: Any = _mesh()
    bad = []
    for rows, columns in ((8, 4), (6, 5), (10, 3)):
        full = {
            name: torch.arange(rows * columns, dtype=torch.float64).reshape(rows, columns)
            for name in SPECS
        }
        local = ftp.device_put(full, mesh, SPECS)
        plain = {name: x.clone() for name, x in local.items()}  # nobody has placed these
        with CommDebugMode() as comm:
            made = ftp.to_dtensor(local, mesh, SPECS)
            again = ftp.from_dtensor(made)
            unknown = ftp.to_dtensor(plain, mesh, SPECS)
        bad += ["collectives"] * comm.get_total_counts()
        for name, whole in full.items():
            is_like = (
                isinstance(made[name], DTensor)
                and made[name].shape == whole.shape
                and made[name].stride() == whole.stride()
            )
            is_same = (
                made[name].to_local().data_ptr() == local[name].data_ptr() == again[name].data_ptr()
            )
            is_whole = torch.equal(made[name].full_tensor(), whole) and torch.equal(
                unknown[name].full_tensor(), whole
            )
            bad += (
                []
                if is_like and is_same and is_whole
                else [f"{name} {rows}x{columns} {is_like} {is_same} {is_whole}"]
            )
        found = ftp.specs_of(again)
        for name, x in ftp.device_get(again, mesh, found).items():
            bad += [] if torch.equal(x, full[name]) else [f"back {name}"]
        theirs = distribute_tensor(full["one"], mesh, (Shard(0), Shard(-1)))
        ours = ftp.device_put(full["one"], mesh, (Shard(0), Shard(-1)))
        bad += (
            []
            if torch.equal(theirs.to_local(), ours) and torch.equal(ftp.from_dtensor(theirs), ours)
            else ["theirs"]
        )
    frozen = ftp.device_put(nn.Parameter(torch.ones(4, 4), requires_grad=False), mesh, P("tp"))
    d = ftp.to_dtensor(frozen, mesh, P("tp"))
    bad += (
        []
        if isinstance(d, nn.Parameter)
        and not d.requires_grad
        and isinstance(ftp.from_dtensor(d), nn.Parameter)
        else ["frozen"]
    )
    leaf = ftp.to_dtensor(torch.ones(2, 4, requires_grad=True), mesh, P("tp"))
    bad += (
        []
        if leaf.is_leaf and leaf.requires_grad and ftp.from_dtensor(leaf).requires_grad
        else ["leaf"]
    )
    _end()
    return bad


def test_there_and_back_without_communication():
    for rank in launch(_there_and_back, 4):
        assert rank.exit == 0, rank.error or rank.stderr[-2000:]
        assert rank.value == []


def _messages(attempts):
    found = []
    for attempt in attempts:
        try:
            attempt()
            found.append("")
        except ftp.FtpError as e:
            found.append(str(e))
    return found


def _wrong():
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    mesh: Any = ftp.make_mesh((4,), ("tp",), device_type="cpu")
    rank = int(os.environ["RANK"])

    def dtensor(placement, **options):
        return DTensor.from_local(torch.ones(2, 3), mesh, (placement,), run_check=False, **options)

    return _messages(
        [
            lambda: ftp.from_dtensor({"w": dtensor(Partial())}),
            lambda: ftp.from_dtensor(
                {"w": dtensor(Shard(0), shape=torch.Size((5, 3)), stride=(3, 1))}
            ),
            lambda: ftp.device_put(dtensor(Replicate()), mesh, P()),
            lambda: ftp.to_dtensor({"w": torch.ones((2, 1, 1, 1)[rank], 3)}, mesh, P("tp")),
            lambda: ftp.to_dtensor({"w": torch.ones(3 if rank == 2 else 2, 3)}, mesh, P("tp")),
            lambda: ftp.to_dtensor({"w": torch.ones(2, 3)}, mesh, P("pp" if rank == 1 else "tp")),
        ]
    )


def test_wrong_shapes_are_named_on_all_ranks():
    for at, rank in enumerate(launch(_wrong, 4)):
        assert rank.exit == 0, rank.error or rank.stderr[-2000:]
        partial, short, double, five, odd, axis = rank.value
        assert (
            partial.startswith("tree['w'] is Partial(sum) over 'tp', a pending sum")
            and "a DTensor, a shard already" in double
        )
        assert ("on rank" in short) == (at in (2, 3))  # of 5 rows in chunks of 2
        assert five == (
            "tree['w'], of spec P('tp'), is not the shards of one tensor: rank 0 holds (2, 3),"
            " rank 1 (1, 3)."
            " Of a global (5, 3), rank 1 should hold (2, 3). Place it with ftp.device_put(tree,"
            " mesh, specs)."
        )
        assert (
            "tree['w'], of spec P('tp'), is not the shards of one tensor" in odd
            and "rank 2 (3, 3)" in odd
        )
        assert "no axis 'pp'" in axis


def _given_dtensors():
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh: Any = ftp.make_mesh((2,), ("tp",), device_type="cpu")
    found = []
    for rows in (4, 5):
        tree = {
            "w": distribute_tensor(torch.arange(rows * 2.0).reshape(rows, 2), mesh, [Shard(0)]),
            "b": torch.ones(2),
        }
        x = torch.ones(3, rows)
        step = ftp.shard(lambda p, x: (x @ p["w"] + p["b"]).sum(), mesh, {"w": P("tp"), "b": P()})
        if rows == 4:
            step(ftp.from_dtensor(tree), x)  # a program that a DTensor must not be given to
        specs = {"w": P("tp"), "b": P()}
        found += _messages(
            [
                lambda tree=tree, x=x, step=step: step(tree, x),
                lambda tree=tree, x=x, step=step: step.lower(tree, x),
                lambda tree=tree, x=x: ftp.lower(lambda p, x: x @ p["w"], mesh, P(), tree, x),
                lambda tree=tree, specs=specs: ftp.device_get(tree, mesh, specs),
                lambda tree=tree, specs=specs: ftp.device_put(tree, mesh, specs),
                lambda tree=tree, specs=specs: ftp.reshard(tree, mesh, specs, P()),
                lambda tree=tree, specs=specs: ftp.reshard(
                    tree, mesh, specs, P(), max_bytes=1 << 20
                ),
            ]
        )
    model = parallelize_module(nn.Sequential(nn.Linear(4, 4)), mesh, {"0": ColwiseParallel()})
    captured = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    found += _messages(
        [
            lambda: ftp.functionalize(model),
            lambda: ftp.shard(lambda w: (w * captured).sum(), mesh, P("tp")).lower(torch.ones(2)),
        ]
    )
    return found


def test_a_dtensor_is_refused_with_the_way_to_its_shard():
    for rank in launch(_given_dtensors, 2):
        assert rank.exit == 0, rank.error or rank.stderr[-2000:]
        *calls, of_model, captured = rank.value
        assert len(calls) == 14
        for message in calls:
            root = message.partition("[")[0]
            assert root in ("params", "p", "tree")
            assert message == (
                f"{root}['w'] is a DTensor, a shard already. Take its shard with"
                " ftp.from_dtensor(tree)."
            )
        assert of_model == (
            "parameter '0.weight', parameter '0.bias' of Sequential are DTensors, as"
            " parallelize_module, fully_shard and"
            " distribute_module make them, with hooks of theirs on modules. Give the model before"
            " that, its plan to"
            " ftp.from_parallelize_plan, and to the step its shards,"
            " ftp.from_dtensor(dict(model.named_parameters()))."
        )
        assert captured.startswith("The function captures a DTensor at ")
        assert captured.endswith(
            ", but ftp takes plain tensors only. Pass a DTensor's shard, ftp.from_dtensor(x),"
            " as an argument."
        )


def test_the_page_runs():
    page = (Path(__file__).resolve().parents[2] / "docs/dtensor.md").read_text()
    for rank in launch(re.findall(r"^```python\n(.*?)^```", page, flags=re.M | re.S)[0], 2):
        assert rank.exit == 0, rank.error or rank.stderr[-2000:]
