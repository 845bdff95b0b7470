"""``x.narrow(dim, start, length)`` with a tensor as ``start``: JAX's ``dynamic_slice``.

torch gives a view, whose place in memory depends on the value. A trace makes a copy by indices, and
refuses a program that writes to the copy or to ``x`` afterwards: there view and copy differ.
"""

from typing import Any

import torch
from torch import Tensor, fx

from ftp.axis import is_inside
from ftp.errors import TraceError, raise_all
from ftp.ops.assume import assume, is_listening
from ftp.ops.written import writes
from ftp.tracing.captured_tensors import node_of
from ftp.tracing.data_dependent.values_read import Level, is_reading
from ftp.tracing.explain_errors import located
from ftp.tracing.functionalize_graph import storages
from ftp.tracing.selected_rows.slices import is_traced_int, read_traced_slice, slices_read


def narrow(input: Tensor, dim: int, start: Any, length: Any) -> Any:
    """As ``torch.narrow``."""
    if is_reading(Level.INTEGERS):
        read = slices_read(slice(start, length))
        start, length = read.start, read.stop
    if not (_is_index(start) or is_traced_int(length)) or not input.ndim:
        return torch.narrow(input, dim, start, length)
    if not is_listening() or is_inside():
        return torch.narrow(input, dim, start, length)
    size = input.shape[dim]
    start = torch.as_tensor(start, device=input.device)
    start = torch.where(start < 0, start + size, start)
    if is_traced_int(length):
        fits = (start >= 0) & (length >= 0) & (start + length <= size)
        assume(fits, f"narrow() takes elements from its start on, of the dim's {size}")
        key = (*(slice(None),) * (dim % input.ndim), slice(start, start + length))
        return read_traced_slice(input, key)
    fits = (start >= 0) & (start + length <= size)
    assume(fits, f"narrow() takes {length} elements from its start on, of the dim's {size}")
    copy = input.index_select(dim, start + torch.arange(length, device=input.device))
    if (node := node_of(copy)) is not None:
        node.meta["copied_view"] = True
    return copy


def _is_index(x: Any) -> bool:
    return isinstance(x, Tensor) and not x.ndim and not x.is_floating_point()


def check_copied_views(graph: fx.Graph) -> None:
    """Refuse writes to a copy that is a view in torch, and writes to its base; and reads of a
    traced slice (``Selected.base``) after a write to its base.
    """
    watched: dict[int, fx.Node] = {}
    slices: list[tuple[fx.Node, frozenset[int]]] = []
    outdated: dict[int, fx.Node] = {}
    failures = []
    for node in graph.nodes:
        failures += [
            f"A slice between values{located(outdated[storage].meta['source'])} is read"
            f"{located(node.meta['source'])} after a write to its tensor, as it was before. Slice"
            " again after the write, or take a copy before it: x[start:stop].clone()."
            for operand in (node.all_input_nodes if outdated else ())
            for storage in storages(operand) & outdated.keys()
        ]
        if (base := node.meta.get("slice_of")) is not None:
            slices.append((node, frozenset(storages(base))))
        if slices and (into := {s for value in writes(node) for s in storages(value)}):
            outdated |= {s: rows for rows, base in slices if base & into for s in storages(rows)}
        if node.meta.get("copied_view"):
            for storage in storages(node) | storages(node.args[0]):
                watched.setdefault(storage, node)
        failures += [
            f"narrow() with a tensor as its start{located(watched[storage].meta['source'])} gives a"
            f" copy here, where torch gives a view, and {node.target}{located(node.meta['source'])}"
            " writes to one of the two. Write by indices: x.index_copy(dim, start +"
            " torch.arange(length), value)."
            for value in (writes(node) if watched else ())
            for storage in storages(value) & watched.keys()
        ]
    raise_all(TraceError, dict.fromkeys(failures))
