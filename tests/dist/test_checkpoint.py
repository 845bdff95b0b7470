"""Checkpoints on gloo processes: other meshes, specs and numbers of ranks; faults that all ranks
learn of.
"""

import math
import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from launch import launch
from torch.distributed.device_mesh import DeviceMesh

import ftp
from ftp import P, units

pytestmark = pytest.mark.dist

SHAPES = {
    "even": (8, 4),
    "odd": (7, 5),
    "packed": (12, 3),
    "shared": (6, 2),
    "bias": (3,),
    "scalar": (),
    "empty": (0, 3),
    "big": (600, 601),
}
DTYPES = {
    "odd": torch.bfloat16,
    "packed": torch.float8_e4m3fn,
    "bias": torch.complex128,
    "scalar": torch.int64,
    "big": torch.float64,
}
LAYOUTS = {
    "pair": (
        (2,),
        ("tp",),
        {
            "even": P("tp"),
            "odd": P(None, "tp"),
            "packed": P(units("tp", 2, pack=2)),
            "big": P("tp"),
        },
    ),
    "four": (
        (4,),
        ("tp",),
        {
            "even": P("tp"),
            "odd": P("tp"),
            "packed": P(units("tp", 2, pack=(8, 4))),
            "shared": P(units("tp", 3)),
            "bias": P("tp"),
        },
    ),
    "square": (
        (2, 2),
        ("dp", "tp"),
        {
            "even": P("dp", "tp"),
            "odd": P(("tp", "dp")),
            "packed": P(None, "dp"),
            "big": P(None, "tp"),
            "empty": P("dp"),
        },
    ),
    "first two": ((2,), ("tp",), {"even": P(None, "tp"), "odd": P("tp"), "shared": P("tp")}),
}


def _full():
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64)
        .mul(9)
        .to(DTYPES.get(name, torch.float32))
        for name, shape in SHAPES.items()
    }


def _on(layout):
    """The mesh over all processes, or over the first ones, and whether this process is on it."""
    shape, axes, specs = LAYOUTS[layout]
    specs = {"params": {name: specs.get(name, P()) for name in SHAPES}, "step": P()}
    ranks = torch.arange(math.prod(shape)).view(shape)
    return (
        DeviceMesh("cpu", ranks, mesh_dim_names=axes),
        specs,
        int(os.environ["RANK"]) < ranks.numel(),
    )


def _same(a, b):
    return a.dtype == b.dtype and torch.equal(
        a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8)
    )


def _end():
    dist.barrier()
    dist.destroy_process_group()


def _there_and_back(folder, layouts, saved):
    """Saves under each layout, the second time while training goes on; then loads under each
    what all have saved.
    """
    dist.init_process_group("gloo")
    bad = []
    for layout in layouts:
        mesh, specs, is_on = _on(layout)
        if not is_on:
            continue
        local = ftp.device_put({"params": _full(), "step": 5}, mesh, specs)
        ftp.save(f"{folder}/{layout}", local, mesh, specs, step=5)
        # Nobody has placed these; of units that ranks share, shards alone do not tell the global
        # size.
        unplaced = {
            "params": {k: x if k == "shared" else x.clone() for k, x in local["params"].items()},
            "step": 6,
        }
        saving = ftp.save(f"{folder}/{layout}", unplaced, mesh, specs, step=6, wait=False)
        for x in unplaced["params"].values():
            x.zero_()
        bad += [] if saving.result().name == "00000001-step-6" and saving.done() else ["name"]
    dist.barrier()
    for layout in layouts:
        mesh, specs, is_on = _on(layout)
        if not is_on:
            continue
        due = ftp.device_put(_full(), mesh, specs["params"])
        meta = {"params": {k: x.to("meta") for k, x in _full().items()}, "step": 0}
        for source in saved:
            for step, like in ((None, meta), (5, {"params": due, "step": 0})):
                found = ftp.load(f"{folder}/{source}", like, mesh, specs, step=step)
                bad += [
                    f"{source} on {layout}: {k}"
                    for k, x in found["params"].items()
                    if not _same(x, due[k])
                ]
                bad += (
                    []
                    if found["step"] == (step or 6) and ftp.specs_of(found) == specs
                    else ["step or specs"]
                )
    bad += _models(Path(folder, "models"), *_on(layouts[0])[:2]) if len(layouts) == 1 else []
    _end()
    return bad


def _models(folder, mesh, specs):
    """Whole tensors in safetensors files, and those that torch.distributed.checkpoint cuts."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    full = {name: x for name, x in _full().items() if name not in ("bias", "empty")}
    specs = {name: spec for name, spec in specs["params"].items() if name in full}
    other = {name: P(None, "tp") if x.ndim > 1 else P() for name, x in full.items()}
    local = ftp.device_put(full, mesh, specs)
    meta = {name: x.to("meta") for name, x in full.items()}
    ftp.save_safetensors(folder / "ours", local, mesh, specs, max_file_bytes=200)
    # It has no placements for packs, and sizes that do not divide are written as they are.
    plain = {name: x for name, x in local.items() if name not in ("packed", "scalar")}
    save(
        ftp.to_dtensor(plain, mesh, {name: specs[name] for name in plain}),
        storage_writer=HuggingFaceStorageWriter(str(folder / "theirs"), save_distributed=True),
    )
    bad = [] if len(list((folder / "ours").glob("*.safetensors"))) > 2 else ["files"]
    for source, names in (("ours", full), ("theirs", plain)):
        for layout in (specs, other):
            these = {name: layout[name] for name in names}
            found = ftp.load_safetensors(
                folder / source, {name: meta[name] for name in names}, mesh, these
            )
            due = ftp.device_put({name: full[name] for name in names}, mesh, these)
            bad += [f"{name} of {source}" for name, x in found.items() if not _same(x, due[name])]
    text, _ = _message(lambda: ftp.save_safetensors(folder / "ours", local, mesh, specs))
    bad += [] if "ours holds model-" in text else [text]
    return bad


def _values(ranks):
    for rank in ranks:
        assert rank.exit == 0, rank.error or rank.stderr[-3000:]
    return [rank.value for rank in ranks]


def test_any_number_of_ranks_to_any_other(tmp_path):
    folder = str(tmp_path)
    simulated = ftp.simulated_mesh((2, 3), ("dp", "tp"))
    ftp.save(f"{folder}/simulated", {"params": _full(), "step": 5}, simulated, step=5)
    ftp.save(f"{folder}/simulated", {"params": _full(), "step": 6}, simulated, step=6)
    saved = ["simulated", "pair"]
    assert _values(launch(_there_and_back, 2, folder, ["pair"], saved, timeout=120)) == [[]] * 2
    saved += ["four", "square", "first two"]
    assert _values(launch(_there_and_back, 4, folder, saved[2:], saved, timeout=120)) == [[]] * 4
    size = sum(x.numel() * x.itemsize for x in _full().values())
    meta = {"params": {k: x.to("meta") for k, x in _full().items()}, "step": 0}
    for source in saved:
        found = ftp.load(f"{folder}/{source}", meta, simulated)
        assert all(_same(x, _full()[k]) for k, x in found["params"].items())
        # What several ranks hold is written once.
        written = sum(
            os.path.getsize(f)
            for f in Path(folder, source, "00000001-step-6").glob("*.safetensors")
        )
        assert written < size + 20_000


def _message(attempt):
    start = time.monotonic()
    try:
        attempt()
    except ftp.FtpError as e:
        return f"{type(e).__name__}: {e}", time.monotonic() - start
    return "", time.monotonic() - start


def _faults(folder):
    import resource

    rank = int(os.environ["RANK"])
    mesh = ftp.make_mesh((2,), ("tp",), device_type="cpu")
    big, like = (
        {"w": torch.full((1 << 19,), float(rank))},
        {"w": torch.empty(1 << 20, device="meta")},
    )
    specs = {"w": P("tp")}
    ftp.save(folder, big, mesh, specs)
    found = []
    # The disk is full, for rank 1 alone.
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
    found.append(_message(lambda: ftp.save(folder, big, mesh, specs)))
    saving = ftp.save(folder, big, mesh, specs, wait=False)
    while not saving.done():
        time.sleep(0.01)
    found.append(_message(lambda: ftp.save(folder, big, mesh, specs)))
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    # A folder where nothing may be written, known to the leading rank alone at first.
    os.chmod(folder, 0o555)
    os.seteuid(65534)
    found.append(_message(lambda: ftp.save(folder, big, mesh, specs)))
    os.seteuid(0)
    os.chmod(folder, 0o755)
    found.append(
        _message(
            lambda: ftp.save(folder if rank == 0 else folder + "x", {"w": 1 if rank else 2}, mesh)
        )
    )
    found.append(_message(lambda: ftp.save(folder, big, mesh, specs, step=rank)))
    found.append(
        _message(
            lambda: ftp.load(
                folder, {"w" if rank else "v": like["w"]}, mesh, {"w" if rank else "v": P("tp")}
            )
        )
    )
    found.append(_message(lambda: ftp.load(folder, like, mesh, {"w": P("tp" if rank else None)})))
    # Shards that torch made of shards, under a spec that says that they are copies.
    moments = {"w": ftp.device_put(torch.arange(8.0), mesh, P("tp")).square()}
    found.append(_message(lambda: ftp.save(folder, moments, mesh)))
    back = ftp.load(folder, like, mesh, specs)["w"]
    left = os.listdir(folder)
    _end()
    return found, torch.equal(back, big["w"]), left


@pytest.mark.skipif(os.geteuid() != 0, reason="gives up rights for a while")
def test_faults_are_errors_on_all_ranks_and_the_last_checkpoint_stays(tmp_path):
    os.chmod(tmp_path, 0o755)
    folder = tmp_path / "c"
    values = _values(launch(_faults, 2, str(folder), timeout=90))
    for at, (found, is_back, left) in enumerate(values):
        assert is_back and sorted(left) == [".lock-00000000", "00000000"]
        full, later, readonly, other_tree, other_step, missing, other_specs, copies = [
            text for text, _ in found
        ]
        assert max(seconds for _, seconds in found) < 20
        assert "rank-00001.safetensors cannot be written" in full and "File too large" in full
        assert full.startswith("CheckpointError: Rank 1 failed") == (at == 0)
        assert (
            "An earlier save, of which nobody has asked the result, failed" in later
            and "File too large" in later
        )
        assert f"No checkpoint can be written in {folder}: Permission denied" in readonly
        assert (
            "Ranks hold different trees: on rank 0 tree['w'] is 2; on rank 1 tree['w'] is 1"
            in other_tree
        )
        assert f"saves with step={at}" in other_step
        assert "like['v'] is missing" in missing
        assert other_specs == (
            "MismatchError: Rank 1 loads another tree than rank 0, or with"
            " other specs. Give all ranks the same."
        )
        assert copies.startswith(
            "ReplicaError: tree['w'] is not the same at this save on ranks that share it: rank 1"
        ) and copies.endswith("the moments of an optimizer of torch have those of the parameters.")


def _interrupted(folder, donate):
    """Saves after interrupts: in a call on both ranks, and between a call and the assignment of
    its result, on both or on one.
    """
    from ftp.runtime.program import Program

    rank = int(os.environ["RANK"])
    mesh = ftp.make_mesh((2,), ("dp",), device_type="cpu")
    specs = {"w": P("dp")}
    step = ftp.spmd(
        lambda p, x: {"w": p["w"] + 1 + 0 * x.sum()},
        mesh,
        (specs, P("dp")),
        specs,
        donate=(0,) if donate else (),
    )
    p, x = (
        ftp.device_put({"w": torch.zeros(4)}, mesh, specs),
        ftp.device_put(torch.ones(4), mesh, P("dp")),
    )
    for _ in range(12):
        p = step(p, x)
    found, store = [], dist.distributed_c10d._get_default_store()

    def save():
        said = _message(lambda: ftp.save(folder, p, mesh, specs))[0]
        newest = (
            ftp.load(folder, {"w": torch.empty(4)}, ftp.simulated_mesh((1,), ("z",)))["w"].tolist()
            if ftp.checkpoints(folder)
            else None
        )
        found.append((said.replace(folder, ""), newest))
        # Not a barrier: the groups of a mesh on which a call was cut short are aborted.
        met = f"{folder} {len(found)}"
        store.set(f"{met} {rank}", "")
        store.wait([f"{met} {1 - rank}"])

    if rank == 0:
        p = step(p, x)
    else:
        step(p, x)
    save()
    if rank == 1:
        p = ftp.device_put({"w": torch.full((4,), 13.0)}, mesh, specs)  # as if made by no call
    save()
    p = ftp.device_put({"w": torch.full((4,), 14.0)}, mesh, specs)
    save()
    p = step(p, x)
    run = Program.run

    def cut_short(program):
        def call(inputs):
            vars(program)["run"](inputs)
            raise KeyboardInterrupt

        return call

    Program.run = property(cut_short)  # type: ignore[assignment]
    try:
        step(p, x)
    except KeyboardInterrupt:
        save()
    Program.run = run
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("donate", [False, True])
def test_an_interrupt_makes_no_checkpoint_of_two_steps(tmp_path, donate):
    values = _values(launch(_interrupted, 2, str(tmp_path), donate))
    for rank, ((mixed, none), (unlike, still), (fresh, fourteen), (after, last)) in enumerate(
        values
    ):
        donated = (
            "tree['w'] was donated, as p of an earlier call, which may have reused its memory."
        )
        if donate:
            assert (
                mixed.startswith(
                    "CheckpointError: Rank 1 failed" if rank == 0 else f"DonationError: {donated}"
                )
                and donated in mixed
            )
        else:
            assert mixed.startswith(
                "MismatchError: Rank 0 holds the state after call 13 on the mesh (dp 2) on cpu,"
                " but rank 1 after call 12: the checkpoint"
                " would be a mix of two steps, so none is made."
            )
        assert (
            unlike.startswith("MismatchError: Rank 0 holds the state after call 13")
            and "but rank 1 after no call" in unlike
        )
        assert none is None and still is None
        assert fresh == "" and fourteen == [14.0] * 4
        # In the middle of a call on all: what was given to it is whole, unless it was donated.
        assert donated in after if donate else after == ""
        assert last == ([14.0] * 4 if donate else [15.0] * 4)
