"""Graphs in the form that the eager runner takes, stored in ftp's cache: ranks of a host that run
one graph on inputs of one layout prepare it once.
"""

import contextlib
import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

from ftp.errors import FtpError
from ftp.ops.native import cache_folder
from ftp.partitioning.collectives import is_over_gloo
from ftp.partitioning.local_program import LocalProgram
from ftp.program_files.container import pack, read_file, write_file
from ftp.program_files.graphs import read_graph, write_executed
from ftp.program_files.plain import Reader, Writer
from ftp.program_files.saved import LoadedProgram, decoding, versions
from ftp.runtime.mesh_groups import axes_of_groups
from ftp.runtime.shared_pages import is_asked_for
from ftp.sharding.mesh import Mesh, mesh_device
from ftp.torch_internals.op_types import OpOverload
from ftp.version import own_code


def executed_path(
    about: list[Any], program: LocalProgram, given: Sequence[Any], of: LoadedProgram
) -> Path | None:
    """The file for a rank's graph and the layouts of its inputs: its name is a hash of all that the
    form depends on. None for a graph whose form must not be stored: ranks make process groups or
    shared memory for it together, or it has a cond.

    Args:
        about: what tells the rank's graph from all others.
        given: the inputs.
        of: whose graph it is.
    """
    mesh, options = of.mesh, of.options
    if options.async_tp or options.cuda_graph or is_asked_for() or mesh.device_type != "cpu":
        return None
    nodes = program.gm.graph.nodes
    if any(n.meta.get("branch") or len(_axes_of(n)) > 1 for n in nodes):
        return None
    layouts = [_layout(x) for x in given[: len(given) - len(program.offsets)]]
    if None in layouts:
        return None
    numbers = [] if _is_of_any_offset(program) else list(given[len(layouts) :])
    is_process, device = mesh.kind == "process", mesh_device(mesh)
    groups = [is_over_gloo(mesh.group_name(axis), device) for axis in mesh.axes if is_process]
    dtype = str(torch.get_default_dtype())  # of ops of integers, which may write in place
    beside = list(of.donated), groups, mesh.is_crowded, dtype
    content = [versions(), own_code(), about, layouts, numbers, *beside]
    name = hashlib.sha256(json.dumps(content).encode()).hexdigest()[:32]
    return cache_folder("plans") / f"{name}.executed"


def _axes_of(node: fx.Node) -> tuple[str, ...]:
    return node.meta["collective"].axes if "collective" in node.meta else ()


def _layout(x: Any) -> list[Any] | None:
    """What the form of a graph depends on, of a dense tensor; None for other inputs."""
    is_plain = type(x) in (torch.Tensor, torch.nn.Parameter) and x.layout is torch.strided
    if not is_plain or x.is_conj() or x.is_neg():
        return None
    return [list(x.shape), list(x.stride()), str(x.dtype), str(x.device)]


def _is_of_any_offset(program: LocalProgram) -> bool:
    """Whether no shape in the graph depends on the offsets of the rank's shards: elementwise ops
    alone read them, and numbers that are computed from them.
    """
    inputs = list(program.gm.graph.find_nodes(op="placeholder"))
    numbers = inputs[len(inputs) - len(program.offsets) :]
    for number in numbers:
        for user in number.users:
            if not isinstance(user.target, OpOverload):
                numbers.append(user)
            elif torch.Tag.pointwise not in user.target.tags:
                return False
    return True


def read_executed(path: Path, mesh: Mesh) -> fx.Graph | None:
    """The graph of a file; None if there is no file of this user's own, or it is damaged."""
    try:
        container = read_file(path)
        with decoding(container):
            data = container.json("graph")
            graph = read_graph(
                Reader(data["pool"], mesh_device(mesh)), data["nodes"], mesh.group_name
            )
    except FtpError:
        return None
    with contextlib.suppress(OSError):
        os.utime(path)  # used last
    return graph


def keep_executed(path: Path, graph: fx.Graph, mesh: Mesh) -> None:
    """Store a graph, if it is plain data and the disk takes it."""
    writer = Writer(mesh_device(mesh))
    with contextlib.suppress(FtpError, OSError):
        nodes = write_executed(writer, graph, axes_of_groups(mesh))
        content = json.dumps({"nodes": nodes, "pool": writer.pool}, separators=(",", ":"))
        write_file(path, pack({**versions(), "key": "executed"}, {"graph": content.encode()}))
