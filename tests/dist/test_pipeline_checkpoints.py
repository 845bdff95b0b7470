"""Checkpoints and reshards of parameters in stages, from mesh to mesh on gloo processes."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optree
import pytest
import torch

import ftp
from ftp import P
from tests.pipeline.test_steps import tensor_parallel, zero_with_tp
from tests.pipeline.test_train_steps import adamw, train_step
from tests.support.launch import launch
from tests.support.staged_models import Model, plan_of

MODEL = Model(4, scaled=True)
TABLE = (520, 257)  # 1.02 MiB: replicas read a part each
# The mesh, the plan of its other axes and the stages, where it has a pipeline.
PLACES: dict[str, Any] = {
    "pp 2, dp 2": ((2, 2), ("pp", "dp"), zero_with_tp, ftp.Pipeline("pp", 2)),
    "dp 2, tp 2": ((2, 2), ("dp", "tp"), tensor_parallel, None),
    "pp 4": ((4,), ("pp",), lambda name: P(), ftp.Pipeline("pp", 2)),
    "tp 2, 2 stages on each pp": (
        (2, 2),
        ("tp", "pp"),
        tensor_parallel,
        ftp.Pipeline("pp", 2, "interleaved", chunks=2),
    ),
}


def made() -> tuple[Any, Any, Any]:
    """Parameters, AdamW's state, and a table for each of four layers."""
    params = MODEL.params()
    g = torch.Generator().manual_seed(3)
    tables = [torch.randn(TABLE, generator=g, dtype=torch.float64) for _ in range(4)]
    return params, adamw().init(params), {"layers": [{"table": x} for x in tables]}


def placed_on(name: str) -> tuple[Any, Any]:
    shape, axes, plan, pipe = PLACES[name]
    mesh, (params, _, tables) = ftp.make_mesh(shape, axes, device_type="cpu"), made()
    specs: Any = plan_of(params, lambda name: at_axes(plan(name), axes))
    of_tables: Any = P()
    if pipe is not None:
        specs, of_tables = pipe.place(params, specs, mesh), pipe.place(tables, P(), mesh)
    return mesh, (specs, adamw().specs(params, specs), of_tables)


def at_axes(spec: P, axes: tuple[str, ...]) -> P:
    """The spec without axes that the mesh lacks."""
    kept = ((e,) if isinstance(e, str) else e or () for e in spec.entries)
    return P(*(tuple(a for a in e if a in axes) or None for e in kept))


def moving(folder: str) -> Any:
    """A step and a checkpoint on the first place; from it to every other one and back.

    Returns:
        Whole trees, by what was done.
    """
    ftp.init_process_group()
    home, *others = PLACES
    mesh, specs = placed_on(home)
    held: Any = ftp.device_put(made(), mesh, specs)
    step = ftp.spmd(
        train_step(MODEL.loss, adamw(), None),
        mesh,
        (*specs[:2], P("dp"), P("dp")),
        pipeline=PLACES[home][3],
    )
    params, state, *_ = step(*held[:2], *ftp.device_put(MODEL.batch(8), mesh, P("dp")))
    held = params, state, held[2]
    ftp.save(f"{folder}/{home}", held, mesh, specs, step=1)
    found = {"trained": ftp.device_get(held, mesh, specs)}
    for name in others:
        there, cut = placed_on(name)
        loaded = ftp.load(f"{folder}/{home}", made(), there, cut)
        found[f"loaded on {name}"] = ftp.device_get(loaded, there, cut)
        moved = ftp.reshard(held, mesh, specs, cut, new_mesh=there)
        found[f"moved to {name}"] = ftp.device_get(moved, there, cut)
        ftp.save(f"{folder}/{name}", loaded, there, cut)
        back = ftp.load(f"{folder}/{name}", held, mesh, specs)
        same = [
            torch.equal(a, b) for a, b in zip(*map(optree.tree_leaves, (held, back)), strict=True)
        ]
        assert all(same), (name, same)
        back = ftp.reshard(moved, there, cut, specs, new_mesh=mesh)
        found[f"moved back from {name}"] = ftp.device_get(back, mesh, specs)
    ftp.destroy_process_group()
    return found


@pytest.mark.slow
def test_from_stages_to_any_mesh_and_back(tmp_path: Path):
    """Parameters, AdamW's state after a step and tables: the same bits everywhere."""
    ranks = launch(moving, 4, str(tmp_path), timeout=240)
    for rank in ranks:
        assert rank.error is None, rank.error
    due = optree.tree_leaves(ranks[0].value["trained"])
    params, opt = MODEL.params(), adamw()
    first = train_step(MODEL.loss, opt, 2)(params, opt.init(params), *MODEL.batch(8))
    for a, b in zip(due, optree.tree_leaves(first[:2]), strict=False):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
    one_device = ftp.simulated_mesh((1,), ("dp",))
    trees: dict[str, Any] = {
        f"alone from {name}": ftp.load(tmp_path / name, made(), one_device) for name in PLACES
    }
    for number, rank in enumerate(ranks):
        trees |= {f"{name} on rank {number}": tree for name, tree in rank.value.items()}
    for name, tree in trees.items():
        for a, b in zip(optree.tree_leaves(tree), due, strict=True):
            assert torch.equal(a, b), name
    check_files(tmp_path / "pp 2, dp 2")


def check_files(folder: Path):
    """Each rank's file holds its stage alone: ranks 0 and 1 are those of stage 0."""
    (saved,) = ftp.checkpoints(folder)
    manifest = json.loads((saved.folder / "manifest.json").read_text())
    ranks_of = {
        path: {int(re.findall(r"rank-(\d+)", chunk["file"])[0]) for chunk in tensor["chunks"]}
        for path, tensor in manifest["checkpoint"]["tensors"].items()
    }
    stages = {0: {0, 1}, 1: {2, 3}}
    for path, ranks in ranks_of.items():
        if path.endswith("step") or "scale" in path:
            continue  # 0-d: on every rank
        if (layer := re.search(r"layers\.(\d)", path)) is not None:
            assert ranks <= stages[int(layer[1]) // 2], path
        else:
            assert ranks == stages["emb" not in path], path
    assert sum("layers.3.up" in path for path in ranks_of) > 1  # AdamW's state too


def said(call: Callable[[], Any]) -> str:
    try:
        call()
    except ftp.errors.FtpError as e:
        return f"{type(e).__name__}: {e}"
    return "nothing"


def failing(folder: str) -> dict[str, str]:
    ftp.init_process_group()
    mesh = ftp.make_mesh((2, 2), ("pp", "dp"), device_type="cpu")
    square = ftp.make_mesh((2, 2), ("dp", "tp"), device_type="cpu")
    params, more, odd = MODEL.params(), Model(5).params(), os.environ["RANK"] == "2"
    pipe, four = ftp.Pipeline("pp", 2), ftp.Pipeline("pp", 2, "interleaved", chunks=2)
    specs = pipe.place(params, P(), mesh)
    held = ftp.device_put(params, mesh, specs)
    bare = optree.tree_map(torch.clone, held)
    ftp.save(folder, held, mesh, specs)
    of_four, of_five = four.place(params, P(), mesh), pipe.place(more, P(), mesh)
    other = of_four if odd else specs

    def short(tree: Any) -> Any:
        return {path: x for path, x in tree.items() if path != "head" or not odd}

    found = {
        "a leaf is missing": said(lambda: ftp.load(folder, more, mesh, of_five)),
        "placed by other stages": said(lambda: ftp.save(folder, held, mesh, of_four)),
        "shards of other stages": said(lambda: ftp.save(folder, bare, mesh, of_four)),
        "full tensors": said(lambda: ftp.save(folder, params, mesh, specs)),
        "a rank loads other stages": said(lambda: ftp.load(folder, params, mesh, other)),
        "a rank lacks a leaf": said(lambda: ftp.save(folder, short(held), mesh, short(specs))),
        "another axis": said(lambda: ftp.load(folder, params, square, of_four)),
    }
    assert len(ftp.checkpoints(folder)) == 1  # no failed save left one
    ftp.destroy_process_group()
    return found


FAILURES = {
    "a leaf is missing": (
        "CheckpointError: like['layers'][4]['bias'] is missing: ",
        "holds no 'layers.4.bias'. The nearest are 'layers.0.bias'",
        "like['layers'][4]['up'] is missing: ",
    ),
    "placed by other stages": (
        "PlacementError: ",
        "tree['head'] is placed with spec P(stage('pp', 1)), but P(stage('pp', 3)) is asked for.",
    ),
    "shards of other stages": (
        "MismatchError: tree['layers'][1]['bias'], of spec P(stage('pp', 1)), is not the shards of"
        " one tensor: rank 0 holds (12,), rank 2 (0,). Of a global (12,), rank 0 should hold (0,).",
    ),
    "full tensors": (
        "MismatchError: tree['emb'], of spec P(stage('pp', 0)), is not the shards of one tensor:"
        " rank 0 holds (11, 8), rank 2 (11, 8). Of a global (11, 8), rank 2 should hold (0, 8).",
        "tree['head'], of spec P(stage('pp', 1)), is not the shards of one tensor: rank 0 holds"
        " (11, 8). Of a global (11, 8), rank 0 should hold (0, 8).",
    ),
    "a rank loads other stages": (
        "MismatchError: Rank 2 loads another tree than rank 0, or with other specs.",
    ),
    "a rank lacks a leaf": (
        "MismatchError: Ranks hold different trees: on rank 0 tree['head'] is a tensor",
    ),
    "another axis": (
        "SpecError: like['emb'] has spec P(stage('pp', 0)), but the mesh has no axis 'pp'; its axes"
        " are 'dp' (size 2), 'tp' (size 2).",
    ),
}


def test_bad_trees_are_errors_on_every_rank(tmp_path: Path):
    for rank in launch(failing, 4, str(tmp_path), timeout=120):
        assert rank.error is None, rank.error
        for name, texts in FAILURES.items():
            assert all(text in rank.value[name] for text in texts), rank.value[name]
        assert rank.value.keys() == FAILURES.keys()
