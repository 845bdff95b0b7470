"""Bind a rank's graph to process groups: groups over several axes, shared memory, and checks that
ranks make together.
"""

import json
import math
import socket
from collections.abc import Collection, Mapping

import torch
import torch.distributed as dist
from torch import fx

from ftp.distributed.calls import exchange
from ftp.errors import MeshError
from ftp.ops.native import cache_folder
from ftp.ops.symmetric_memory import gather_matmuls, lack, matmul_scatter
from ftp.partitioning.collectives import OVER_GLOO, is_over_gloo
from ftp.passes.aliasing import ALL_GATHER, ALL_REDUCE
from ftp.passes.copy_elimination import copied
from ftp.passes.onednn_matmuls import Matmul, measured
from ftp.runtime.shared_memory import SharedGroup, shared_groups
from ftp.sharding.mesh import Mesh
from ftp.sharding.mesh_groups import product_group
from ftp.sharding.process_group import gpu_uuid, releases
from ftp.torch_internals.process_groups import resolve_process_group


def for_backends(
    graph: fx.Graph,
    device: torch.device,
    *,
    host: bool,
    is_crowded: bool = False,
    is_own: bool = False,
) -> fx.Graph:
    """The graph with each all-gather by the op for its backend, and with a CPU's collectives over
    gloo marked ``direct``: see `gloo_calls.call_directly`.

    Args:
        host: the host runs the graph; else a recording of its ops, which no direct call is, runs.
        is_crowded: of the mesh.
        is_own: the caller owns the graph, which is changed in place.
    """

    def is_over(node: fx.Node) -> bool:
        is_kind = node.target in (ALL_REDUCE, ALL_GATHER)
        return is_kind and is_over_gloo(node.args[-1], device)

    if not any(map(is_over, graph.nodes)):
        return graph
    new = graph if is_own else copied(graph)[0]
    for node in filter(is_over, new.nodes):
        node.meta["direct"] = host and device.type == "cpu"
        node.meta["is_crowded"] = is_crowded
        if node.target is ALL_GATHER:
            node.target = OVER_GLOO
    return new


def check_recordable(graph: fx.Graph, device: torch.device) -> None:
    """Raise where a collective of a rank's graph runs on the host: a CUDA graph cannot hold it."""
    found: dict[str, None] = {}
    for node in graph.nodes:
        if "collective" in node.meta:
            backend = resolve_process_group(node.args[-1])._get_backend(device).name()
            if backend != "nccl":
                found[
                    f"those over {', '.join(node.meta['collective'].axes)} go through {backend}"
                ] = None
    if found:
        raise MeshError(
            f"cuda_graph=True, but of the step's collectives {'; '.join(found)}, which works on"
            " the host and cannot be recorded."
            " Initialise the process group with NCCL, as ftp.make_mesh does where every process"
            " has a GPU of its own, or leave cuda_graph out."
        )


def check_symmetric(graph: fx.Graph, mesh: Mesh) -> None:
    """Raise on every rank where two GPUs of a group cannot access each other's memory."""
    here = json.dumps(
        [
            socket.gethostname(),
            gpu_uuid(torch.cuda.current_device()) if mesh.device_type == "cuda" else "",
        ]
    )
    devices = [tuple(json.loads(text)) for text in exchange(mesh, "GPUs", here)]
    mine = ""
    for group in dict.fromkeys(
        node.args[-1] for node in graph.nodes if node.target in (gather_matmuls, matmul_scatter)
    ):
        ranks = dist.get_process_group_ranks(resolve_process_group(group))
        mine = mine or lack(
            [devices[mesh.ranks.index(rank)] for rank in ranks], ranks.index(mesh.rank)
        )
    reasons = exchange(mesh, "symmetric memory", mine)
    if any(reasons):
        rank, why = next((rank, why) for rank, why in zip(mesh.ranks, reasons, strict=True) if why)
        raise MeshError(
            f"async_tp=True, but rank {rank} has no symmetric memory with the others: {why}."
            " Leave it out; chunks=n hides the same reshards behind matmuls with ordinary"
            " collectives."
        )


def with_product_groups(graph: fx.Graph, mesh: Mesh) -> fx.Graph:
    """The graph with each collective over several axes on a process group for these axes. All ranks
    call it together.
    """
    if all(len(_axes_of(node)) < 2 for node in graph.nodes):
        return graph
    new, _ = copied(graph)
    for node in new.nodes:
        if len(axes := _axes_of(node)) > 1:
            node.args = (*node.args[:-1], product_group(mesh, axes).group_name)
    return new


def _axes_of(node: fx.Node) -> tuple[str, ...]:
    return node.meta["collective"].axes if "collective" in node.meta else ()


def memory_of(mesh: Mesh, graph: fx.Graph | None = None) -> dict[str, SharedGroup]:
    """Shared memory by name of process group, for the groups that the graph's collectives use, or
    without a graph for every axis.
    """
    assert mesh.torch is not None
    wanted = (
        ((axis,) for axis in mesh.axis_names)
        if graph is None
        else filter(None, map(_axes_of, graph.nodes))
    )
    groups = {
        " × ".join(axes): mesh.torch.get_group(axes[0])
        if len(axes) == 1
        else product_group(mesh, axes)
        for axes in dict.fromkeys(wanted)
        if math.prod(mesh.axes[axis] for axis in axes) > 1
    }
    known = _memory.setdefault(mesh, {})
    if missing := {axes: group for axes, group in groups.items() if axes not in known}:
        made = shared_groups(mesh, missing)
        known.update({axes: made.get(group.group_name) for axes, group in missing.items()})
    return {found.group.group_name: found for found in known.values() if found is not None}


_memory: dict[Mesh, dict[str, SharedGroup | None]] = {}
releases.append(_memory.clear)


def faster_by_onednn(
    mesh: Mesh, matmuls: Collection[Matmul], known: dict[Matmul, bool] | None = None
) -> Collection[Matmul]:
    """The matmuls that oneDNN computes faster, as measured on the first rank: all ranks use the
    same kernels, so that replicas stay equal.

    Args:
        known: answers that the first rank gives without measuring; those of this call are added.
    """
    known = {} if known is None else known
    if mesh.device_type != "cpu":
        return ()
    # A rank without oneDNN sends None: the others wait for its answer.
    mine = list(matmuls) if torch.backends.mkldnn.is_available() else None
    everyone = [json.loads(text) for text in exchange(mesh, "matmuls", json.dumps(mine))]
    if any(of_rank is None for of_rank in everyone):
        return ()
    wanted = sorted({p for of_rank in everyone for p in of_rank})
    found = faster(wanted, known) if mesh.rank in (mesh.ranks or (0,))[:1] else []
    chosen = json.loads(exchange(mesh, "matmuls by oneDNN", json.dumps(found))[0])
    known.update({p: p in chosen for p in wanted})
    return chosen


def faster(matmuls: Collection[Matmul], known: Mapping[Matmul, bool]) -> list[Matmul]:
    """The matmuls that oneDNN computes faster; those that are not ``known`` are measured here."""
    found = measured([p for p in matmuls if p not in known], cache_folder())
    return [p for p in matmuls if known.get(p) or p in found]
