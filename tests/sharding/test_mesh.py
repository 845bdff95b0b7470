"""Meshes as values, and what is refused; process meshes of more than one rank are in tests/dist."""

import os
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from ftp.errors import MeshError
from ftp.sharding.launcher import launched
from ftp.sharding.make_mesh import make_mesh, simulated_mesh
from ftp.sharding.mesh import (
    AbstractMesh,
    SimulatedMesh,
    mesh_device,
    require_coordinate,
    resolve,
    use_mesh,
)
from ftp.sharding.process_group import (
    _own_device,
    default_device_type,
    gpu_uuid,
    init_process_group,
)


@pytest.fixture
def fake_world():
    """Rank 1 of a world of 4 whose collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    yield
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch):
    for name in list(os.environ):
        if name in ("RANK", "WORLD_SIZE") or name.startswith(("SLURM_", "OMPI_")):
            monkeypatch.delenv(name)


def test_meshes_are_values():
    mesh = AbstractMesh((2, 4), ("dp", "tp"))
    assert mesh == AbstractMesh((2, 4), ("dp", "tp"), device_type="cpu")
    assert hash(mesh) == hash(AbstractMesh((2, 4), ("dp", "tp")))
    assert mesh != AbstractMesh((2, 4), ("dp", "tp"), device_type="cuda")
    assert mesh != simulated_mesh((2, 4), ("dp", "tp"))
    assert resolve(mesh) == resolve(AbstractMesh((2, 4), ("dp", "tp")))
    assert resolve(mesh) != resolve(simulated_mesh((2, 4), ("dp", "tp")))
    assert AbstractMesh([3], ["tp"]).shape == (3,)  # type: ignore[arg-type]


def test_resolved_view():
    mesh = resolve(simulated_mesh((2, 3), ("dp", "tp")))
    assert mesh.axes == {"dp": 2, "tp": 3}
    assert (mesh.kind, mesh.coordinate, mesh.torch, mesh.size()) == ("simulated", None, None, 6)
    assert mesh.coordinates()[4] == {"dp": 1, "tp": 1}
    assert mesh.group_name("tp") == "sim:tp"
    assert resolve(mesh) is mesh
    assert resolve(AbstractMesh((7,), ("tp",), device_type="meta")).kind == "abstract"


def test_without_processes_a_mesh_is_simulated():
    mesh = make_mesh((2, 2), ("dp", "tp"), device_type="cpu")
    assert mesh == simulated_mesh((2, 2), ("dp", "tp"))
    assert isinstance(mesh, SimulatedMesh)


def test_use_mesh_supplies_the_mesh_and_nests():
    outer, inner = simulated_mesh((2,), ("dp",)), AbstractMesh((3,), ("tp",))
    with use_mesh(outer) as given:
        assert given is outer
        with use_mesh(inner):
            assert resolve(None).axes == {"tp": 3}
        assert resolve(None).axes == {"dp": 2}
    with pytest.raises(
        MeshError,
        match=r"No mesh is given\. Pass one, .* or call inside `with ftp\.use_mesh\(mesh\):`",
    ):
        resolve(None)


@pytest.mark.parametrize(
    ("shape", "names", "message"),
    [
        ((2, 2), ("tp", "tp"), "axis name 'tp' is used 2 times. Give each axis its own name."),
        ((2, 0), ("dp", "tp"), "axis 'tp' has size 0. A size is at least 1."),
        ((2,), ("dp", "tp"), "1 sizes but 2 names. Give each axis one size and one name."),
        ((2.0,), ("dp",), "a mesh takes ints for its shape"),
        ((2,), ("",), "non-empty strings for its axis names"),
    ],
)
@pytest.mark.parametrize("make", [AbstractMesh, simulated_mesh, make_mesh])
def test_malformed(make, shape, names, message):
    with pytest.raises(MeshError) as failure:
        make(shape, names)
    assert message in str(failure.value)


def test_unsupported_device_types():
    with pytest.raises(MeshError) as failure:
        AbstractMesh((2,), ("tp",), "xla")
    assert (
        str(failure.value)
        == "AbstractMesh: device type 'xla' is not supported. Supported are 'cpu', 'cuda', 'meta'."
    )
    with pytest.raises(
        MeshError,
        match=r"make_mesh: device type 'xla' is not supported. Supported are 'cpu', 'cuda'.",
    ):
        make_mesh((2,), ("tp",), device_type="xla")
    with pytest.raises(
        MeshError, match=r"'meta' is for ftp.AbstractMesh, which plans without devices"
    ):
        make_mesh((2,), ("tp",), device_type="meta")
    with pytest.raises(MeshError, match="DeviceMesh: device type 'xla' is not supported"):
        resolve(DeviceMesh("xla", [0], mesh_dim_names=("tp",), _init_backend=False))


def test_not_a_mesh():
    with pytest.raises(MeshError, match="not a tuple"):
        resolve((2, 4))  # type: ignore[arg-type]


@pytest.mark.usefixtures("fake_world")
def test_device_mesh_resolves_to_an_equal_value():
    mesh = make_mesh((2, 2), ("dp", "tp"))
    assert isinstance(mesh, DeviceMesh)
    resolved = resolve(mesh)
    assert (resolved.kind, resolved.ranks, resolved.rank, resolved.torch) == (
        "process",
        (0, 1, 2, 3),
        1,
        mesh,
    )
    assert resolved.coordinate == require_coordinate(resolved) == {"dp": 0, "tp": 1}
    again = resolve(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")))
    assert again == resolved
    assert {resolved: 1}[again] == 1
    assert resolve(mesh["tp"]).ranks == (0, 1)
    assert resolve(mesh["tp"]).group_name("tp") == resolved.group_name("tp")
    with pytest.raises(MeshError, match=r"no axis 'pp'; its axes are \(dp 2, tp 2\)"):
        resolved.group_name("pp")


def test_a_mesh_of_an_earlier_world_is_another_value():
    seen = []
    for _ in range(2):
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
        mesh = make_mesh(2, "tp")
        seen.append(resolve(mesh))
        dist.destroy_process_group()
    assert seen[0] != seen[1]
    with pytest.raises(MeshError, match="The process group of this DeviceMesh is destroyed"):
        resolve(mesh)


@pytest.mark.usefixtures("fake_world")
def test_mesh_is_not_the_size_of_the_world():
    with pytest.raises(MeshError) as failure:
        make_mesh((2, 4), ("dp", "tp"))
    assert str(failure.value) == (
        "The mesh (dp 2, tp 4) takes 8 ranks, but the world has 4.\n"
        "  Launch 8 processes (torchrun --nproc-per-node=8), or give shape (2, 2)."
    )
    with pytest.raises(MeshError, match="or give sizes whose product is 4"):
        make_mesh((3, 3), ("dp", "tp"))


def test_size_is_checked_before_processes_meet(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(MeshError, match=r"takes 3 ranks, but the world has 4"):
        make_mesh((3,), ("tp",), device_type="cpu")
    assert not dist.is_initialized()


@pytest.mark.usefixtures("fake_world")
def test_rank_outside_the_mesh():
    mesh = resolve(DeviceMesh("cpu", [0, 2, 3], mesh_dim_names=("tp",)))
    assert mesh.coordinate is None
    with pytest.raises(MeshError) as failure:
        require_coordinate(mesh)
    assert str(failure.value) == (
        "Rank 1 is not on the mesh (tp 3) on cpu, which holds ranks [0, 2, 3]."
        " Call the step on those ranks only, or make a mesh that includes rank 1."
    )


@pytest.mark.usefixtures("fake_world")
def test_device_meshes_that_cannot_be_used():
    with pytest.raises(
        MeshError, match=r"has no axis names. Make it with mesh_dim_names=\('dp', 'tp'\)"
    ):
        resolve(init_device_mesh("cpu", (2, 2)))
    with pytest.raises(
        MeshError,
        match=r"holds ranks \[3, 2, 1, 0\], but their process group has them as \[0, 1, 2, 3\]",
    ):
        resolve(DeviceMesh("cpu", [3, 2, 1, 0], mesh_dim_names=("tp",)))


@pytest.mark.parametrize("ranks", [[[3, 1], [0, 2]], [[0, 1], [3, 2]], [[2, 3], [0, 1]]])
def test_ranks_out_of_order_are_refused_on_every_rank(ranks):
    """Also where this rank's own groups ascend: it would wait for the others, which have raised."""
    said = set()
    for rank in range(4):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=4)
        try:
            with pytest.raises(MeshError) as failure:
                resolve(DeviceMesh("cpu", ranks, mesh_dim_names=("dp", "tp")))
        finally:
            dist.destroy_process_group()
        said.add(str(failure.value))
    assert len(said) == 1 and "out of order" in said.pop()


def test_init_process_group_without_a_launcher():
    with pytest.raises(
        MeshError, match=r"RANK and WORLD_SIZE are not in the environment. Launch with torchrun"
    ):
        init_process_group()


# Launchers, and GPUs that are not there.

OPEN_MPI = {"RANK": "2", "SIZE": "4", "LOCAL_RANK": "0", "LOCAL_SIZE": "4"}


def test_open_mpi_and_slurm():
    mpi = {f"OMPI_COMM_WORLD_{name}": value for name, value in OPEN_MPI.items()}
    found = launched(mpi)
    assert found is not None and (found.rank, found.world, found.local_rank) == (2, 4, 0)
    assert found.meets_at.startswith("tcp://127.0.0.1:") and found.meets_at.endswith(
        "?rank=2&world_size=4"
    )
    apart = {**mpi, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    with pytest.raises(
        MeshError, match=r"mpirun has launched 4 ranks on several hosts.*mpirun -x MASTER_ADDR=HOST"
    ):
        launched(apart)
    found = launched({**apart, "MASTER_ADDR": "first", "MASTER_PORT": "1234"})
    assert found is not None and found.meets_at == "tcp://first:1234?rank=2&world_size=4"
    torchrun = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}
    found = launched({**mpi, **torchrun})
    assert found is not None and (found.rank, found.meets_at) == (1, "env://"), (
        "torchrun inside of it has the word"
    )
    batch = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "7"}
    step = {**batch, "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_STEP_NUM_TASKS": "1"}
    assert launched({}) is launched(batch) is launched(step) is None


def test_a_mesh_on_a_gpu_has_its_number(monkeypatch):
    assert mesh_device(resolve(AbstractMesh((2,), ("tp",), "cuda"))) == torch.device("cuda")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 1)
    assert mesh_device(resolve(simulated_mesh((2,), ("tp",), device_type="cuda"))) == torch.device(
        "cuda", 1
    )


@pytest.mark.usefixtures("fake_world")
def test_a_group_made_without_a_backend_is_of_gpus_where_they_are(monkeypatch):
    """torch gives it gloo and NCCL, and calls its backend undefined."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.distributed.get_backend", lambda: "undefined")
    monkeypatch.setattr(
        "torch.distributed.distributed_c10d.get_backend_config", lambda: "cpu:gloo,cuda:nccl"
    )
    assert default_device_type() == "cuda"
    monkeypatch.setattr(
        "torch.distributed.distributed_c10d.get_backend_config", lambda: "cpu:gloo,cuda:gloo"
    )
    assert default_device_type() == "cpu"


@pytest.mark.parametrize(
    ("devices", "local_rank", "own"), [(1, 0, 0), (1, 3, 0), (4, 3, 3), (2, 3, None)]
)
def test_the_gpu_of_a_process(monkeypatch, devices, local_rank, own):
    """One alone is its own, as srun --gpus-per-task=1 shows it."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: devices)
    launch = launched({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": str(local_rank)})
    assert launch is not None
    if own is not None:
        assert _own_device(launch) == own
        return
    with pytest.raises(MeshError, match="LOCAL_RANK is 3, but this host shows 2 CUDA devices"):
        _own_device(launch)


def test_gpus_are_told_apart_by_their_uuid(monkeypatch: pytest.MonkeyPatch):
    """Processes that see one GPU each all call it 0."""
    of_index = {0: "b5c3", 1: "09aa"}
    monkeypatch.setattr(
        "torch.cuda.get_device_properties", lambda index: SimpleNamespace(uuid=of_index[index])
    )
    assert [gpu_uuid(0), gpu_uuid(1)] == ["b5c3", "09aa"]
