"""Rank, world size and rendezvous, from the variables of torchrun, SLURM's srun or Open MPI's
mpirun.
"""

import os
import re
import socket
import zlib
from collections.abc import Mapping, Sequence

from ftp.dataclass import dataclass
from ftp.errors import MeshError


@dataclass(frozen=True)
class Launched:
    """
    Attributes:
        local_rank: this process' number on its host.
        meets_at: the URL of the rendezvous.
    """

    rank: int
    world: int
    local_rank: int
    meets_at: str


def launched(environment: Mapping[str, str] | None = None) -> Launched | None:
    """How a launcher started this process; None without a launcher, or with one task of srun or
    mpirun.

    Under SLURM the store is on the step's first host, at a port derived from the job's number;
    under Open MPI on this host, if all ranks are here. MASTER_ADDR and MASTER_PORT override both.

    >>> slurm = {"SLURM_STEP_NODELIST": "gpu[07-09,12]"}
    >>> slurm |= {"SLURM_JOB_ID": "4242", "SLURM_STEP_ID": "0"}
    >>> task = {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "32", "SLURM_LOCALID": "1"}
    >>> launched({**slurm, **task})
    Launched(rank=5, world=32, local_rank=1, meets_at='tcp://gpu07:63606?rank=5&world_size=32')

    Source: JAX, ``jax/_src/clusters/slurm_cluster.py``.
    """
    given = os.environ if environment is None else environment
    if "RANK" in given and "WORLD_SIZE" in given:
        rank = int(given["RANK"])
        return Launched(rank, int(given["WORLD_SIZE"]), int(given.get("LOCAL_RANK", "0")), "env://")
    # A batch script has SLURM's ranks too, but no step: nothing has launched the others.
    if {"SLURM_STEP_NODELIST", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"} <= given.keys():
        job = f"{given.get('SLURM_JOB_ID', '')}.{given.get('SLURM_STEP_ID', '')}"
        found = (given["SLURM_PROCID"], given["SLURM_STEP_NUM_TASKS"], given.get("SLURM_LOCALID"))
        host = _first_host(given["SLURM_STEP_NODELIST"])
    elif {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"} <= given.keys():
        job = given.get("PMIX_NAMESPACE", "")
        names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
        *found, here = (given.get(f"OMPI_COMM_WORLD_{name}") for name in names)
        is_one_host = here == found[1]
        host = "127.0.0.1" if is_one_host else ""
    else:
        return None
    rank, world, local_rank = (int(n or 0) for n in found)
    if world == 1:
        return None
    host, port = given.get("MASTER_ADDR", host), given.get("MASTER_PORT") or _port(job)
    if not host:
        raise MeshError(
            f"mpirun has launched {world} ranks on several hosts, and does not say which is first."
            " Give all of them the first host's name: mpirun -x MASTER_ADDR=HOST ..."
        )
    return Launched(rank, world, local_rank, f"tcp://{host}:{port}?rank={rank}&world_size={world}")


def host_name() -> str:
    """The host of this process: its number in torchrun or SLURM, else its name."""
    node = os.environ.get("GROUP_RANK", os.environ.get("SLURM_NODEID"))
    return socket.gethostname() if node is None else f"node {node}"


def known_hosts(
    ranks: Sequence[int], world: int, environment: Mapping[str, str] | None = None
) -> tuple[str, ...]:
    """The hosts of some ranks, which torchrun tells every rank; empty if unknown, or if all ranks
    are on one host.

    >>> torchrun = {"LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "2"}
    >>> known_hosts(range(4), 4, torchrun)
    ('node 0', 'node 0', 'node 1', 'node 1')
    """
    given = os.environ if environment is None else environment
    each, hosts = (int(given.get(name, "0")) for name in ("LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"))
    if hosts < 2 or each * hosts != world:  # unequal hosts are exchanged at the first call
        return ()
    return tuple(f"node {rank // each}" for rank in ranks)


def _first_host(nodes: str) -> str:
    """
    >>> [_first_host(n) for n in ("a1", "a1,a2", "rack3-n[001-004,9],b", "x[2,4]-ib")]
    ['a1', 'a1', 'rack3-n001', 'x2-ib']
    """
    found = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", found.group() if found else nodes)


def _port(job: str) -> int:
    """One of the last 4096 ports, which Linux never assigns by itself."""
    return 65536 - 4096 + zlib.crc32(job.encode()) % 4096
