"""The value of a tensor that a trace computes from constants and captured tensors alone, such as a
table of angles: the ops are run again, in-place ones too.
"""

import operator
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx

from ftp.ops.mapped_arguments import mapped_arguments
from ftp.ops.written import writes
from ftp.torch_internals.op_types import OpOverload
from ftp.tracing.data_dependent.known_values import computing
from ftp.tracing.functionalize_graph import storages
from ftp.tracing.op_facts import op_facts
from ftp.tracing.recorder import Recorder


def value_of(node: fx.Node, recorder: Recorder) -> Tensor | None:
    """The value of a node that does not depend on the function's arguments, as it is now; None
    where it is random or of an op that is not torch's.
    """
    needed = _needed(node)
    if not all(map(_is_computable, needed)):
        return None
    captured = [n for n in needed if n.op == "placeholder"]
    if not all(n.meta["ftp_constant"] in recorder.with_values for n in captured):
        return None
    values: dict[fx.Node, Any] = {}
    with computing():
        for at in needed:
            with _default_dtype_of(at):
                values[at] = _computed(at, values, recorder)
        device = node.meta["val"].device
        return values[node].to("cpu" if device.type == "meta" else device, copy=True)


@contextmanager
def _default_dtype_of(node: fx.Node) -> Iterator[None]:
    """Within the block torch's default dtype is the one that a node was recorded under, as far as
    its result tells: the function may have changed it.
    """
    val, before = node.meta.get("val"), torch.get_default_dtype()
    if isinstance(val, Tensor) and val.is_complex():
        torch.set_default_dtype(val.dtype.to_real())
    elif isinstance(val, Tensor) and val.dtype in _DEFAULTS:
        torch.set_default_dtype(val.dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


_DEFAULTS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def _needed(node: fx.Node) -> list[fx.Node]:
    """The nodes that a value is computed from, and the writes to them, in order."""
    nodes, held, found = {node}, storages(node), list[fx.Node]()
    for at in reversed(node.graph.nodes):
        if at in nodes or any(storages(x) & held for x in writes(at)):
            found.append(at)
            for x in at.all_input_nodes:
                nodes.add(x)
                held |= storages(x)
    return found[::-1]


def _is_computable(node: fx.Node) -> bool:
    target = node.target
    if node.op in ("get_attr", "placeholder") or target is operator.getitem:
        return True
    return (
        isinstance(target, OpOverload)
        and target.namespace == "aten"
        and not op_facts(target).is_random
    )


def _computed(node: fx.Node, values: dict[fx.Node, Any], recorder: Recorder) -> Any:
    if node.op == "placeholder":
        return recorder.with_values[node.meta["ftp_constant"]].detach().cpu().clone()
    if node.op == "get_attr":
        return getattr(recorder.tracer.root, str(node.target)).clone()
    args, kwargs = mapped_arguments(node, values.__getitem__)
    if kwargs.get("device") is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    return node.target(*args, **kwargs)  # type: ignore[operator]
