"""Interrupt the collectives of this rank."""

import contextlib
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import distributed_c10d as c10d

from ftp.sharding.mesh import Mesh
from ftp.sharding.mesh_groups import process_groups

interrupts: list[Callable[[], None]] = []
"""Called to interrupt collectives that are not torch's."""


def interrupt(mesh: Mesh) -> None:
    """Make this rank's collectives on the mesh raise, including the one that it waits in."""
    assert mesh.torch is not None
    for other in interrupts:
        other()
    for group in process_groups(mesh):
        backends: dict[int, Any] = {id(b): b for b in map(group._get_backend, group._device_types)}
        for backend in backends.values():
            if not isinstance(backend, c10d.ProcessGroupGloo):
                # An abort waits for CUDA graphs that hold the group's collectives.
                threading.Thread(target=backend.abort, name="ftp-abort", daemon=True).start()
            elif group.size() > 1:
                # Gloo has no abort; a receive that times out closes the group's connections.
                source, tag = (group.rank() + 1) % group.size(), 2**20 + group.rank()
                with contextlib.suppress(RuntimeError):
                    group.recv([torch.empty(1)], source, tag).wait(timedelta(milliseconds=1))
