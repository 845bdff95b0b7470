"""device_put and device_get without processes: copies, any dtype and layout, and nothing cut
twice.
"""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.fx.experimental.proxy_tensor import make_fx

import ftp
from ftp import P
from ftp.tensors.placement import placement_of
from ftp.tensors.replicas import compare_copies, digest

MESH = ftp.simulated_mesh((2, 2), ("dp", "tp"))


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.bfloat16, torch.int16, torch.bool, torch.complex64]
)
def test_there_and_back_is_the_identity(dtype):
    x = (torch.arange(24).reshape(4, 6) % 3).to(dtype)
    tree = {
        "plain": x,
        "strided": x.T,
        "expanded": x[:1].expand(4, 6),
        "empty": x[:0],
        "scalar": x[0, 0],
        "n": 3,
        "none": None,
    }
    specs = {
        "plain": P("dp", "tp"),
        "strided": P("tp"),
        "expanded": P("dp"),
        "empty": P("dp"),
        "scalar": P(),
        "n": P(),
        "none": None,
    }
    placed = ftp.device_put(tree, MESH, specs)
    back = ftp.device_get(placed, MESH, specs)
    for name in ("plain", "strided", "expanded", "empty", "scalar"):
        assert torch.equal(back[name], tree[name]) and back[name].dtype == dtype
        assert name == "empty" or (
            placed[name].is_contiguous() and placed[name].data_ptr() != tree[name].data_ptr()
        )
    assert back["n"] == 3 and back["none"] is None


def test_what_is_placed_is_returned_as_it_is():
    placed = ftp.device_put(torch.ones(4), MESH, P("tp"))
    assert ftp.device_put(placed, MESH, P("tp")) is placed
    where = placement_of(placed)
    assert where is not None and where.shape == (4,) and where.spec == P("tp")


@pytest.mark.parametrize(
    "mesh", [MESH, ftp.AbstractMesh((2,), ("tp",))], ids=["simulated", "abstract"]
)
def test_what_requires_a_gradient_still_does(mesh):
    tree = {
        "trained": nn.Parameter(torch.ones(4)),
        "frozen": nn.Parameter(torch.ones(4), requires_grad=False),
        "leaf": torch.ones(4, requires_grad=True),
        "plain": torch.ones(4),
        "meta": nn.Parameter(torch.ones(4, device="meta"), requires_grad=False),
    }
    placed = ftp.device_put(tree, mesh, P("tp"))
    for name, x in tree.items():
        assert (
            type(placed[name]) is type(x)
            and placed[name].requires_grad == x.requires_grad
            and placed[name].is_leaf
        )
        assert placed[name] is not x and x.grad is None
    if isinstance(mesh, ftp.AbstractMesh) and not isinstance(mesh, type(MESH)):
        return
    real = {name: x for name, x in placed.items() if name != "meta"}
    for name, x in ftp.reshard(real, mesh, P("tp"), P("dp")).items():
        assert (
            type(x) is type(tree[name])
            and x.requires_grad == tree[name].requires_grad
            and x.is_leaf
        )


def test_what_cannot_be_placed_is_refused():
    with pytest.raises(
        ftp.errors.InputError,
        match=r"tree\['a'\] is computed from tensors that require a gradient"
        r" \(MulBackward0\).*ftp.constrain",
    ):
        ftp.device_put({"a": torch.ones(4, requires_grad=True) * 2}, MESH, P("tp"))
    with pytest.raises(
        ftp.errors.InputError,
        match=r"belongs to a trace and has no values; pin values inside a function with"
        r" ftp.constrain",
    ):
        torch.func.grad(lambda x: ftp.device_put(x, MESH, P("tp")).sum())(torch.ones(4))
    with pytest.raises(ftp.errors.InputError, match=r"belongs to a trace"):
        make_fx(lambda x: ftp.device_put(x, MESH, P("tp")), tracing_mode="fake")(torch.ones(4))
    placed = ftp.device_put(torch.ones(4, 4), MESH, P("tp"))
    with pytest.raises(
        ftp.errors.PlacementError,
        match=r"Reshard it with ftp.reshard\(tree, mesh, P\('tp'\), P\('tp', 'dp'\)\)",
    ):
        ftp.device_put(placed, MESH, P("tp", "dp"))
    with pytest.raises(
        ftp.errors.MeshError, match=r"src=9 is no rank of the mesh .*, which holds ranks 0 to"
    ):
        ftp.device_put(torch.ones(4, 4), MESH, P("tp"), src=9)


def test_placements_stand_for_specs():
    tree = {"w": torch.ones(4, 6), "layers": [torch.ones(3), torch.ones(2, 4, 2)], "n": 3}
    placed = ftp.device_put(tree, MESH, (Replicate(), Shard(-1)))
    assert ftp.specs_of(placed) == {
        "w": P(None, "tp"),
        "layers": [P("tp"), P(None, None, "tp")],
        "n": P(),
    }
    placed = ftp.device_put(tree, MESH, {"w": [Shard(1), Shard(-1)], "layers": P("dp"), "n": P()})
    assert ftp.specs_of(placed)["w"] == P(None, ("dp", "tp"))
    with pytest.raises(
        ftp.errors.SpecError,
        match=r"tree\['w'\] is Shard\(dim=2\) over 'dp', but its shape \(4, 6\) has 2 dims",
    ):
        ftp.device_put({"w": torch.ones(4, 6)}, MESH, (Shard(2), Replicate()))
    with pytest.raises(ftp.errors.SpecError, match=r"has 1 placements, but the mesh is"):
        ftp.device_put({"w": torch.ones(4, 6)}, MESH, [Shard(0)])
    with pytest.raises(
        ftp.errors.PlacementError,
        match=r"tree\['w'\] is a tensor of shape \(4, 6\) that was never placed",
    ):
        ftp.specs_of({"w": torch.ones(4, 6)})


def test_meta_tensors_stay_meta():
    placed = ftp.device_put(
        torch.empty(5, 3, device="meta"), ftp.AbstractMesh((2,), ("tp",)), P("tp")
    )
    assert placed.device.type == "meta"
    assert ftp.device_get(placed, ftp.AbstractMesh((2,), ("tp",)), P("tp")).shape == (5, 3)


def test_local_slice_checks_its_spec():
    assert ftp.local_slice(MESH, P("dp"), (6, 3)) == (slice(0, 6), slice(0, 3))
    with pytest.raises(ftp.FtpError, match="of 3 entries, but its shape"):
        ftp.local_slice(MESH, P(None, None, "dp"), (6, 3))


def test_digests_tell_shapes_and_dtypes_apart():
    alike = [torch.zeros(2), torch.zeros(3), torch.zeros(1, 2), torch.zeros(2, dtype=torch.int32)]
    assert len({int(digest(x)) for x in alike}) == len(alike)


def test_digests_of_host_tensors_are_compared_on_the_device_of_the_mesh(monkeypatch):
    """A group over NCCL takes nothing else, of a tree whose leaves lie on host and GPU alike."""
    seen = []
    mesh = SimpleNamespace(
        kind="process",
        axis_names=("dp",),
        axes={"dp": 2},
        size=lambda: 2,
        torch=SimpleNamespace(get_group=lambda axis: None),
    )
    monkeypatch.setattr(
        "ftp.tensors.replicas.mesh_device", lambda mesh: torch.device("meta"), raising=False
    )
    monkeypatch.setattr("ftp.tensors.replicas.dist.get_backend", lambda: "nccl")
    monkeypatch.setattr(
        "ftp.tensors.replicas.dist.all_reduce", lambda x, op, group: seen.append(x.device.type)
    )
    leaves = [torch.ones(2), torch.arange(3)]
    with pytest.raises(RuntimeError, match="meta"):  # which has no values to read
        compare_copies(leaves, [P(), P()], ["a", "b"], mesh, None)  # type: ignore[arg-type]
    assert seen == ["meta", "meta"]


def test_device_get_takes_mesh_and_specs_of_placed_tensors():
    mesh = ftp.simulated_mesh((2, 3), ("dp", "tp"))
    tree = {"w": torch.arange(20.0).reshape(5, 4), "b": torch.ones(3), "step": 3}
    specs = {"w": P("tp", "dp"), "b": P(), "step": P()}
    placed = ftp.device_put(tree, mesh, specs)
    for got in (ftp.device_get(placed), ftp.device_get(placed, mesh)):
        assert torch.equal(got["w"], tree["w"]) and torch.equal(got["b"], tree["b"])
        assert got["step"] == 3
    # A rank's shard, or its part of a sum, would pass for the whole tensor.
    for new in (placed["w"] * 2, placed["w"].sum()):
        with pytest.raises(ftp.errors.PlacementError, match=r"tree\['new'\] .* never placed"):
            ftp.device_get({**placed, "new": new})
    beside = ftp.device_get({**placed, "new": torch.zeros(2)}, specs={**specs, "new": P()})
    assert torch.equal(beside["new"], torch.zeros(2))
    with pytest.raises(ftp.errors.PlacementError, match="placed with spec"):
        ftp.device_get(placed, mesh, P())
    with pytest.raises(ftp.errors.MeshError, match="No mesh is given"):
        ftp.device_get(tree)
