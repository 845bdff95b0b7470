"""``x.narrow(dim, start, length)`` from a start that is a value: JAX's ``dynamic_slice``.

torch gives a view, but its place in memory depends on the value. A trace takes a copy by indices,
and refuses a program in which the two would differ: one that writes to either afterwards.
"""

from typing import Any

import torch
from torch import Tensor, fx

from ftp.axis import is_inside
from ftp.errors import TraceError, join_failures
from ftp.ops.assume import assume, is_listening
from ftp.ops.written import writes
from ftp.tracing.captured_tensors import node_of
from ftp.tracing.explain_errors import located
from ftp.tracing.functionalize_graph import storages


def narrow(input: Tensor, dim: int, start: Any, length: int) -> Tensor:
    """As ``torch.narrow``."""
    is_index = isinstance(start, Tensor) and not start.ndim and not start.is_floating_point()
    if not is_index or not input.ndim or not is_listening() or is_inside():
        return torch.narrow(input, dim, start, length)
    size = input.shape[dim]
    start = torch.where(start < 0, start + size, start)
    fits = (start >= 0) & (start + length <= size)
    assume(fits, f"narrow() takes {length} elements from its start on, of the dim's {size}")
    copy = input.index_select(dim, start + torch.arange(length, device=input.device))
    if (node := node_of(copy)) is not None:
        node.meta["copied_view"] = True
    return copy


def check_copied_views(graph: fx.Graph) -> None:
    """Refuse writes to a copy that is a view in torch, and to what it views."""
    watched: dict[int, fx.Node] = {}
    failures = []
    for node in graph.nodes:
        if node.meta.get("copied_view"):
            for storage in storages(node) | storages(node.args[0]):
                watched.setdefault(storage, node)
        failures += [
            f"narrow() with a tensor as its start{located(watched[storage].meta['source'])} gives a"
            f" copy here, where torch gives a view, and {node.target}{located(node.meta['source'])}"
            " writes to one of the two. Write by indices: x.index_copy(dim, start +"
            " torch.arange(length), value)."
            for value in writes(node)
            for storage in storages(value) & watched.keys()
        ]
    if failures:
        raise TraceError(join_failures(dict.fromkeys(failures)))
