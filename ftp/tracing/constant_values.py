"""The values of tensors that a trace computes from constants and captured tensors alone, such as a
table of angles: the ops are run again, in-place ones too.
"""

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx

from ftp.ops.written import writes
from ftp.torch_internals.op_types import OpOverload
from ftp.tracing.data_dependent.known_values import computed, computing
from ftp.tracing.functionalize_graph import storages
from ftp.tracing.op_facts import op_facts
from ftp.tracing.recorder import Recorder


def values_of(nodes: Iterable[fx.Node], recorder: Recorder) -> dict[fx.Node, Tensor]:
    """The values of those nodes whose values are known, as they are now; they do not depend on the
    function's arguments. Values that share memory in the function share it here, also with captured
    tensors that it does not write to.
    """
    needed = {node: _needed(node) for node in nodes}
    known = {node: ops for node, ops in needed.items() if _is_known(ops, recorder)}
    if not known:
        return {}
    asked = set().union(*known.values())
    ordered = [node for node in next(iter(known)).graph.nodes if node in asked]
    written = {s for at in ordered for x in writes(at) for s in storages(x)}
    values: dict[fx.Node, Any] = {}
    with computing():
        for at in ordered:
            values[at] = _value(at, values, recorder, written)
        moved = _Moved()
        return {node: moved.to_device_of(node.meta["val"], values[node]) for node in known}


def _is_known(ops: list[fx.Node], recorder: Recorder) -> bool:
    """Whether no op is random or not torch's, and all captured tensors have values."""
    captured = [n.meta["ftp_constant"] for n in ops if n.op == "placeholder"]
    return all(map(_is_computable, ops)) and all(n in recorder.with_values for n in captured)


class _Moved:
    """Copies of storages on other devices, one of each."""

    def __init__(self) -> None:
        self._copies: dict[tuple[int, torch.device], torch.UntypedStorage] = {}

    def to_device_of(self, fake: Tensor, x: Tensor) -> Tensor:
        device = x.device if fake.device.type == "meta" else fake.device
        if x.device == device:
            return x
        storage = x.untyped_storage()
        key = storage._cdata, device
        if key not in self._copies:
            self._copies[key] = storage.to(device=device)
        return x.new_empty(0, device=device).set_(
            self._copies[key], x.storage_offset(), x.shape, x.stride()
        )


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


def _value(node: fx.Node, values: dict[fx.Node, Any], recorder: Recorder, written: set[int]) -> Any:
    if node.op == "placeholder":
        value = recorder.with_values[node.meta["ftp_constant"]].detach().cpu()
        return value.clone() if written & storages(node) else value
    if node.op == "get_attr":
        return getattr(recorder.tracer.root, str(node.target)).clone()
    return computed(node, values, "cpu")
