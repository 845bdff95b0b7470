"""Live trees between meshes of gloo processes: any specs, more and fewer ranks, and no more
memory than was allowed.
"""

import os
import time

import pytest
import torch
import torch.distributed as dist
from launch import launch
from torch.distributed.device_mesh import DeviceMesh
from torch.profiler import ProfilerActivity, profile

import ftp
from ftp import P, units
from ftp.sharding.pytree import flatten

pytestmark = pytest.mark.dist

SHAPES = {
    "even": (8, 4),
    "odd": (7, 5),
    "packed": (12, 3),
    "shared": (6, 2),
    "scalar": (),
    "empty": (0, 3),
    "bias": (3,),
}
DTYPES = {
    "odd": torch.bfloat16,
    "packed": torch.float8_e4m3fn,
    "scalar": torch.int64,
    "bias": torch.complex128,
}
WHOLE = dict.fromkeys(SHAPES, P())


def _full():
    generator = torch.Generator().manual_seed(0)
    made = {
        name: torch.randn(shape, generator=generator, dtype=torch.float64)
        for name, shape in SHAPES.items()
    }
    return {name: x.mul(9).to(DTYPES.get(name, torch.float32)) for name, x in made.items()}


def _places():
    """Meshes over some of four ranks, and specs."""
    rank = int(os.environ["RANK"])

    def mesh(ranks, axes):
        return DeviceMesh("cpu", torch.tensor(ranks), mesh_dim_names=axes), rank in torch.tensor(
            ranks
        )

    return {
        "two": (
            *mesh([0, 1], ("tp",)),
            {**WHOLE, "even": P("tp"), "packed": P(units("tp", 2, pack=2)), "odd": P(None, "tp")},
        ),
        "three": (
            *mesh([1, 2, 3], ("tp",)),
            {**WHOLE, "even": P(None, "tp"), "odd": P("tp"), "shared": P("tp"), "empty": P("tp")},
        ),
        "four": (
            *mesh([[0, 1], [2, 3]], ("dp", "tp")),
            {**WHOLE, "even": P("tp", "dp"), "odd": P(("tp", "dp")), "shared": P(units("dp", 3))},
        ),
        "one": (*mesh([2], ("tp",)), WHOLE),
        "simulated": (ftp.simulated_mesh((3,), ("tp",)), True, {**WHOLE, "even": P("tp")}),
    }


def _same(a, b):
    return a.dtype == b.dtype and torch.equal(
        a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8)
    )


def _moves():
    dist.init_process_group("gloo")
    rank, full, places, bad = dist.get_rank(), _full(), _places(), []
    meta = {name: x.to("meta") for name, x in full.items()}
    placed = {
        place: ftp.device_put(full, mesh, specs) if is_on else meta
        for place, (mesh, is_on, specs) in places.items()
    }
    for source, (old, is_old, before) in places.items():
        for target, (new, is_new, after) in places.items():
            on_processes = [
                is_on
                for place, is_on in ((source, is_old), (target, is_new))
                if place != "simulated"
            ]
            if source == target or not any(on_processes):
                continue
            for max_bytes in (None, 64):
                given = placed[source]
                if is_old and max_bytes and source != "four":  # as if nobody had placed them
                    given = {name: x.clone() for name, x in given.items()}
                moved = ftp.reshard(given, old, before, after, new_mesh=new, max_bytes=max_bytes)
                for name, x in moved.items():
                    is_right = (
                        _same(x, placed[target][name])
                        if is_new
                        else x.is_meta and x.shape == full[name].shape
                    )
                    bad += [] if is_right else [f"{name} from {source} to {target}, {max_bytes}"]
                bad += (
                    []
                    if not is_new or ftp.specs_of(moved) == after
                    else [f"specs from {source} to {target}"]
                )
    on_one = ftp.reshard(placed["four"], places["four"][0], places["four"][2], WHOLE, max_bytes=256)
    bad += [f"{name} on one mesh" for name, x in on_one.items() if not _same(x, full[name])]
    dist.barrier()
    errors = [
        _message(
            lambda: ftp.reshard(
                placed["four"],
                places["four"][0],
                places["four"][2],
                P("dp") if rank == 2 else P(),
                max_bytes=64,
            )
        ),
        _message(
            lambda: ftp.reshard(
                {"v" if rank == 3 else "w": torch.ones(2)},
                places["four"][0],
                P(),
                P(),
                max_bytes=64,
            )
        ),
        _message(
            lambda: ftp.reshard(torch.ones(2), places["four"][0], P(), P(), max_bytes=64 + rank)
        ),
    ]
    peaks = _peaks()
    dist.barrier()
    dist.destroy_process_group()
    return bad, errors, peaks


def _message(attempt):
    start = time.monotonic()
    try:
        attempt()
    except ftp.FtpError as e:
        assert time.monotonic() - start < 20
        return f"{type(e).__name__}: {e}"
    return ""


def _values(ranks):
    for rank in ranks:
        assert rank.exit == 0, rank.error or rank.stderr[-3000:]
    return [rank.value for rank in ranks]


def _peaks():
    """Per bound, the most bytes held beside what is given and returned, and those left of them
    at the end.
    """
    two, four = (DeviceMesh("cpu", torch.arange(n), mesh_dim_names=("tp",)) for n in (2, 4))
    tree = {"a": torch.randn(256, 128), "b": torch.randn(3, 1000)}
    meta = {k: x.to("meta") for k, x in tree.items()}
    given = ftp.device_put(tree, two, P("tp")) if dist.get_rank() < 2 else meta
    found = []
    for max_bytes, new in ((4096, {"a": P(None, "tp"), "b": P()}), (50_000, P())):
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as p:
            moved = ftp.reshard(given, two, P("tp"), new, new_mesh=four, max_bytes=max_bytes)
        held = sum(x.untyped_storage().nbytes() for x in flatten(moved)[0])
        events = sorted(
            (e.start_ns(), e.nbytes())
            for e in p.profiler.kineto_results.events()
            if e.name() == "[memory]"
        )  # type: ignore[union-attr]
        live = peak = 0
        for _, nbytes in events:
            live += nbytes
            peak = max(peak, live)
        found.append((max_bytes, (peak - held, live - held)))
        del moved
    return found


def test_any_mesh_to_any_other_in_bounded_memory():
    for at, (bad, (other_specs, other_tree, other_bytes), peaks) in enumerate(
        _values(launch(_moves, 4, timeout=120))
    ):
        assert bad == []
        assert ("Rank 2 failed" in other_specs) == (at != 2)
        assert (
            "tree['scalar']" in other_specs
            and "of 1 entries, but its shape () has 0 dims" in other_specs
        )
        assert (
            "on rank 0 tree['w'] is a tensor" in other_tree
            and "on rank 3 tree['v'] is a tensor" in other_tree
        )
        assert "rank 0 has max_bytes: 64; rank 1 max_bytes: 65" in other_bytes
        for max_bytes, (beside, left) in peaks:
            assert left == 0 and max_bytes // 2 < beside <= max_bytes  # what is allowed is used
