"""Any mesh and specs to any other, with uneven sizes and packs; the ranks are threads here, so
that many cases can be tried.
"""

import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from math import prod
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ftp
from ftp import P
from ftp.checkpoint.safetensors_io import BYTES, STORED
from ftp.sharding.check_spec import check_spec
from ftp.sharding.local_pieces import local_pieces
from ftp.sharding.mesh import Mesh
from ftp.sharding.process_group import Timeouts
from ftp.tensors.boxes import parts_on
from ftp.tensors.device_put import put, take
from ftp.tensors.placement import placement, remember
from ftp.tensors.transfer import ALIGNMENT, ReshardedTensor, Transfer, rounds, routes
from tests.checkpoint.test_checkpoint import drawn, same  # type: ignore[import-not-found]


class Threads:
    """A store for ranks that are threads: all meet in each exchange."""

    def __init__(self, n):
        self.barrier, self.texts = threading.Barrier(n, timeout=30), [""] * n

    def exchange(self, key, value, timeout, rank=0):
        self.texts[rank] = value
        self.barrier.wait()
        everyone = list(self.texts)
        self.barrier.wait()
        return everyone


def ranks_as_threads(monkeypatch):
    """What runs ``job(mesh)`` as every rank of a mesh, and gives the results."""
    stores = {}

    def record(mesh):
        exchange = lambda *args: stores[mesh.shape].exchange(*args, rank=mesh.rank)  # noqa: E731
        return SimpleNamespace(
            exchange=exchange, timeouts=Timeouts(), call=0, check_results=lambda: None
        )

    for module in ("ftp.distributed.shared_errors", "ftp.checkpoint.save"):
        monkeypatch.setattr(f"{module}.calls", record)
    monkeypatch.setattr("ftp.checkpoint.background._thread", lambda: ThreadPoolExecutor(1))
    monkeypatch.setattr("torch.distributed.get_backend", lambda: "gloo")

    def run(mesh, job):
        shape, axes = mesh
        n = prod(shape)
        stores[shape] = Threads(n)
        meshes = [Mesh(shape, axes, "cpu", "process", tuple(range(n)), rank) for rank in range(n)]
        with ThreadPoolExecutor(n) as pool:
            return list(pool.map(job, meshes))

    return run


@st.composite
def meshes(draw):
    a = draw(st.integers(1, 4))
    return ((a, draw(st.integers(1, 3))), ("a", "b")) if draw(st.booleans()) else ((a,), ("a",))


@st.composite
def specs(draw, mesh, shape):
    """Each axis cuts one dim or none, in units and packs where they fit."""
    axes = dict(zip(mesh[1], mesh[0], strict=True))
    entries = [[] for _ in shape]
    for axis in draw(st.permutations(mesh[1])):
        dim = draw(st.integers(-1, len(shape) - 1))
        if dim >= 0:
            cuts = [
                axis,
                ftp.units(axis, 2),
                ftp.units(axis, 1, pack=2),
                ftp.units(axis, 2, pack=3),
                ftp.units(axis, 1, pack=(1, 2)),
            ]
            fitting = [
                c
                for c in cuts
                if not check_spec(P(*(None,) * dim, (*entries[dim], c)), shape, axes, "x")
            ]
            entries[dim].append(draw(st.sampled_from(fitting)))
    return P(*(tuple(e) or None for e in entries))


@st.composite
def cases(draw):
    shape = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
    old, new = draw(meshes()), draw(meshes())
    return shape, old, draw(specs(old, shape)), new, draw(specs(new, shape))


def shard(full, spec, mesh):
    return take(
        full, local_pieces(spec, full.shape, mesh.axes, mesh.coordinates()[mesh.rank])
    ).clone()


@settings(max_examples=40, derandomize=True)
@given(cases(), st.sampled_from([*STORED, *BYTES]), st.booleans())
def test_any_mesh_and_specs_to_any_other(tmp_path_factory, case, dtype, wait):
    shape, old, before, new, after = case
    folder = tmp_path_factory.mktemp("c")
    full = drawn(shape, dtype)
    with pytest.MonkeyPatch.context() as patch:
        run = ranks_as_threads(patch)

        def save(mesh):
            placed = remember(shard(full, before, mesh), placement(mesh, before, shape))
            ftp.save(
                folder, {"x": placed, "n": 1}, mesh, {"x": before, "n": P()}, wait=wait
            ).result()

        def load(mesh):
            like = {"x": torch.empty(shape, dtype=dtype, device="meta"), "n": 0}
            return ftp.load(folder, like, mesh, {"x": after, "n": P()})["x"], shard(
                full, after, mesh
            )

        run(old, save)
        size = sum(os.path.getsize(f) for f in folder.glob("*/*.safetensors"))
        files = len(list(folder.glob("*/*.safetensors")))
        assert size <= full.numel() * full.itemsize + files * 400  # once each, and headers
        assert all(same(found, due) for found, due in run(new, load))
    shutil.rmtree(folder)


@settings(max_examples=150, derandomize=True)
@given(
    cases(),
    st.sampled_from([torch.float32, torch.uint8, torch.complex128]),
    st.sampled_from([16, 48, 100, 10_000]),
)
def test_rounds_bring_everything_in_bounded_messages(case, dtype, max_bytes):
    shape, old, before, new, after = case
    full = drawn(shape, dtype)
    sides = []
    for (sizes, axes), spec in ((old, before), (new, after)):
        n = prod(sizes)
        mesh = Mesh(sizes, axes, "cpu", "process", tuple(range(n)), 0)
        pieces = [local_pieces(spec, shape, mesh.axes, at) for at in mesh.coordinates()]
        sides.append((mesh, pieces))
    (a, held), (b, due) = sides
    world = tuple(range(max(a.size(), b.size())))
    tensor = ReshardedTensor(shape, dtype, before, after)
    ways = routes(a, b, before, after, shape, world)
    arrived = [torch.zeros_like(take(full, p)) for p in due]
    sent = [[Transfer(0, box, s, t) for box, s, t in ways if s == t]]
    sent += rounds([Transfer(0, box, s, t) for box, s, t in ways if s != t], [tensor], max_bytes)
    for at, turn in enumerate(sent):
        load = dict.fromkeys(world, 0)
        for p in turn:
            # What the source really holds, at the place where it is.
            known = torch.zeros_like(full)
            put(known, take(full, held[p.source]), held[p.source])
            part = next(
                x for x in parts_on(b, after, shape)[p.target] if x.box.meet(p.box) == p.box
            )
            arrived[p.target][part.slices(p.box)] = known[p.box.slices((0,) * len(shape))]
            load[p.source] += tensor.nbytes(p.box)
            load[p.target] += tensor.nbytes(p.box)
        assert at == 0 or max(load.values()) <= max_bytes
        assert all(tensor.nbytes(p.box) % ALIGNMENT == 0 for p in turn)
    assert all(same(x, take(full, p)) for x, p in zip(arrived, due, strict=True))
