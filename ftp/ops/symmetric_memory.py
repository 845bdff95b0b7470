"""Matmuls fused with an adjacent collective: one part is computed while another is sent.

``gather_matmuls`` is a gather and the matmuls that read it, ``matmul_scatter`` a matmul and its
reduce-scatter. On GPUs they are torch's ops on symmetric memory, which copy from GPU to GPU over
NVLink; elsewhere, for tests, torch's own plain forms of these.
"""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ftp.ops.define import define, register_fake
from ftp.sharding.process_group import gpu_uuid

# The gathered tensor (of ``n`` ranks' shards along ``dim``), if ``keeps``, and its matmuls with the
# weights.
gather_matmuls = define(
    "gather_matmuls"
    "(Tensor shard, Tensor[] weights, int dim, bool keeps, int n, str group) -> Tensor[]"
)
# This rank's part along ``dim`` of the sum over ``n`` ranks of a matmul.
matmul_scatter = define(
    "matmul_scatter(Tensor left, Tensor right, int dim, int n, str group) -> Tensor"
)


@register_fake("ftp::gather_matmuls")
def _gathered_shapes(
    shard: Tensor, weights: list[Tensor], dim: int, keeps: bool, n: int, group: str
) -> list[Tensor]:
    size = [*shard.shape]
    size[dim] *= n
    matmuls = [shard.new_empty([*size[:-1], w.shape[1]]) for w in weights]
    return [shard.new_empty(size), *matmuls] if keeps else matmuls


@register_fake("ftp::matmul_scatter")
def _scattered_shape(left: Tensor, right: Tensor, dim: int, n: int, group: str) -> Tensor:
    size = [*left.shape[:-1], right.shape[1]]
    size[dim] //= n
    return left.new_empty(size)


@torch.library.impl("ftp::gather_matmuls", "CUDA")
def _gather_matmuls(
    shard: Tensor, weights: list[Tensor], dim: int, keeps: bool, n: int, group: str
) -> list[Tensor]:
    whole, matmuls = torch.ops.symm_mem.fused_all_gather_matmul.default(
        shard, weights, dim, group, return_A=keeps
    )
    return [t.contiguous() for t in ((whole, *matmuls) if keeps else matmuls)]


@torch.library.impl("ftp::matmul_scatter", "CUDA")
def _matmul_scatter(left: Tensor, right: Tensor, dim: int, n: int, group: str) -> Tensor:
    return torch.ops.symm_mem.fused_matmul_reduce_scatter.default(
        left, right, "sum", dim, group
    ).contiguous()


@torch.library.impl("ftp::gather_matmuls", "CPU")
def _plain_gather_matmuls(
    shard: Tensor, weights: list[Tensor], dim: int, keeps: bool, n: int, group: Any
) -> list[Tensor]:
    from torch.distributed._symmetric_memory import _fused_all_gather_matmul_fallback

    whole, matmuls = _fused_all_gather_matmul_fallback(shard, weights, dim, group, return_A=keeps)
    return [t.contiguous() for t in ((whole, *matmuls) if whole is not None else matmuls)]


@torch.library.impl("ftp::matmul_scatter", "CPU")
def _plain_matmul_scatter(left: Tensor, right: Tensor, dim: int, n: int, group: Any) -> Tensor:
    from torch.distributed._symmetric_memory import _fused_matmul_reduce_scatter_fallback

    return _fused_matmul_reduce_scatter_fallback(left, right, "sum", dim, group).contiguous()


def multiplications(target: Any, args: Any) -> int:
    """The number of multiplications of one of these ops; shapes stand for tensors in ``args``."""
    if target is gather_matmuls:
        shard, weights, _, _, n, _ = args
        return n * math.prod(shard) * sum(columns for _, columns in weights)
    left, right, *_ = args
    return math.prod(left) * right[1]


def lack(devices: list[tuple[str, str]], mine: int) -> str:
    """Why this rank cannot copy from and to the GPUs of a group (host, UUID); "" if it can.

    For a GPU that this process does not see, torch finds out when it connects them.
    """
    if not torch.cuda.is_available() or not dist.is_nccl_available():
        return "it takes GPUs, and a build of torch with NCCL"
    if len({host for host, _ in devices}) > 1:
        return (
            f"the group is on hosts {', '.join(sorted({host for host, _ in devices}))}, and"
            " works within one"
        )
    seen = {gpu_uuid(i): i for i in range(torch.cuda.device_count())}
    host, here = devices[mine]
    for i, (_, device) in enumerate(devices):
        if i != mine and device == here:
            return f"GPU {here} of {host} is another rank's too"
        if i == mine or device not in seen:
            continue
        if not torch.cuda.can_device_access_peer(seen[here], seen[device]):
            return f"GPU {here} of {host} cannot read the memory of GPU {device}"
    return ""
