"""Fused ops in a trace: those that torch computes from primitives where it lacks one of their
derivatives, and those with another kernel on the device that the program will run on.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.nn.attention import SDPBackend, sdpa_kernel

from ftp.dataclass import dataclass
from ftp.rules.op_kinds import ATTENTION
from ftp.torch_internals.fake_tensors import FakeTensorMode
from ftp.tracing.gpu_attention import with_gpu_attention


@dataclass(frozen=True)
class Fused:
    """Fused ops of one kind.

    Attributes:
        as_primitives: context in which torch computes the ops from primitives, which have all
            derivatives.
        on_device: by device type, a pass that replaces the CPU's ops by that device's.
    """

    ops: frozenset[Any]
    as_primitives: Callable[[], AbstractContextManager[Any]]
    on_device: dict[str, Callable[[fx.Graph, FakeTensorMode], None]]


KINDS = (Fused(ATTENTION, partial(sdpa_kernel, SDPBackend.MATH), {"cuda": with_gpu_attention}),)


FUSED = frozenset[Any]().union(*(kind.ops for kind in KINDS))


@contextmanager
def as_primitives() -> Iterator[None]:
    """Within the block, torch computes fused ops of all kinds from primitives."""
    with ExitStack() as stack:
        for kind in KINDS:
            stack.enter_context(kind.as_primitives())
        yield


def as_on_device(
    graph: fx.Graph, mode: FakeTensorMode, traced_on: torch.device, device_type: str
) -> None:
    """Replace the fused ops of a traced graph by those of the device that will run it."""
    if traced_on.type != device_type:
        for kind in KINDS:
            if device_type in kind.on_device:
                kind.on_device[device_type](graph, mode)
