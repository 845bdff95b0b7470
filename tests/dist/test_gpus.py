"""What processes on GPUs do that are not there: gloo's collectives in place of NCCL's, and fakes of what torch asks of a device."""

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dist.launch import launch  # type: ignore[import-not-found]

import ftp

pytestmark = pytest.mark.dist


# Launchers.


def _under_slurm(uuids: list[str]) -> Any:
    """A process that sees one GPU, as under srun --gpus-per-task=1, and the rank and device it takes."""
    rank, world = os.environ.pop("RANK"), os.environ.pop("WORLD_SIZE")
    os.environ |= {"SLURM_PROCID": rank, "SLURM_LOCALID": os.environ.pop("LOCAL_RANK"), "SLURM_STEP_NUM_TASKS": world}
    os.environ["SLURM_STEP_NODELIST"] = "elsewhere[1-2]"  # MASTER_ADDR is given
    taken: list[int] = []
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: 1
    torch.cuda.current_device = lambda: 0
    torch.cuda.set_device = taken.append
    ftp.mesh.talks_nccl = lambda: True
    ftp.mesh.gpu_uuid = lambda index: uuids[int(rank)]
    try:
        ftp.init_process_group(device_type="cuda", timeout=30)
    except ftp.errors.MeshError as error:
        return str(error)
    return dist.get_rank(), dist.get_world_size(), taken


def test_one_visible_gpu_a_process_under_slurm():
    ranks = launch(_under_slurm, 2, ["GPU-a", "GPU-b"])
    assert [rank.value for rank in ranks] == [(0, 2, [0]), (1, 2, [0])], [rank.error for rank in ranks]


def test_processes_with_one_gpu_between_them_are_told():
    for rank in launch(_under_slurm, 2, ["GPU-a", "GPU-a"]):
        assert rank.value == (
            "Ranks 0, 1 have one GPU. Launch at most one process for each GPU, or have them share it, slowly:"
            " torch.distributed.init_process_group('gloo') first."
        ), rank.error
