"""Values known while tracing: recorded ops compute them from Python numbers alone, such as a loop's
counter.
"""

import operator
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from ftp.ops.kernel_strides import kernel_of
from ftp.ops.mapped_arguments import mapped_arguments
from ftp.ops.written import is_in_place, writes
from ftp.torch_internals.functorch import (
    get_unwrapped,
    is_batchedtensor,
    is_functorch_wrapped_tensor,
    temporarily_clear_interpreter_stack,
    unwrap_if_dead,
)
from ftp.torch_internals.graph_nodes import since
from ftp.torch_internals.modes import DisableTorchFunction, disable_current_modes
from ftp.torch_internals.op_types import OpOverload
from ftp.tracing.functionalize_graph import storages
from ftp.tracing.op_facts import op_facts
from ftp.tracing.settings import uncast

MOST = 1024  # elements of a tensor that is computed


@contextmanager
def computing() -> Iterator[None]:
    """Within the block torch computes values: neither the trace nor its transforms see the ops."""
    with (
        disable_current_modes(),
        temporarily_clear_interpreter_stack(),
        DisableTorchFunction(),
        torch.no_grad(),
        uncast(),
    ):
        yield


class KnownValues:
    """The values of the nodes of one trace, each computed once, writes included."""

    most = MOST  # elements of a tensor that is computed
    device = "cpu"  # where it is computed

    def __init__(self) -> None:
        self._begin(None)

    def _begin(self, graph: fx.Graph | None) -> None:
        self._graph, self._newest, self._root = graph, None, torch.nn.Module()
        self._of: dict[fx.Node, Any] = {}
        self._last_writes: dict[int, fx.Node] = {}  # that were done, per storage
        self._known: set[fx.Node] = set()
        self._fixed: set[int] = set()  # storages that may not be written to
        self._lost: set[int] = set()  # storages that hold unknown values by now
        self._writes: dict[int, list[fx.Node]] = {}

    def of(self, condition: Any) -> bool | None:
        """The truth of a condition of one element; None where it depends on the program's inputs
        or on captured tensors.
        """
        return self.all_of(condition) if isinstance(condition, Tensor) else bool(condition)

    def all_of(self, conditions: Tensor) -> bool | None:
        """Whether all conditions of a tensor hold; None as for ``of``."""
        return self.read(conditions, lambda value: bool(value.all()))

    def read(self, tensor: Tensor, func: Callable[[Tensor], Any]) -> Any:
        """``func`` of the value of a tensor; None as for ``of``."""
        node = self.known_node(tensor)
        if node is None:
            return None
        with computing():
            return func(self._computed(node))

    def known_node(self, tensor: Tensor) -> fx.Node | None:
        """The node of a tensor whose value is known; None as for ``of``."""
        tensor = unwrap_if_dead(tensor)
        while is_functorch_wrapped_tensor(tensor):
            if is_batchedtensor(tensor):
                return None
            tensor = get_unwrapped(tensor)
        mode = get_proxy_mode()
        assert mode is not None
        tracer: Any = mode.tracer
        with DisableTorchFunction():
            held = tracer.tensor_tracker.get(tensor)
            if held is None:
                return None
            node: fx.Node = held.proxy.node
            self._look(node.graph)
            self._root = tracer.root
            is_known = node in self._known and self._lost.isdisjoint(storages(node))
            return node if is_known else None

    def needed(self, node: fx.Node) -> list[fx.Node]:
        """The ops that compute a value as it is now, and the writes to them, in order; without
        those that were done.
        """
        found, stack = dict[fx.Node, None](), [node]
        pushed: dict[int, int] = {}

        def push_writes(storage: int, before: fx.Node | None) -> None:
            if (written := self._writes.get(storage)) is None:
                return
            end = len(written) if before is None else bisect_left(written, before)
            stack.extend(written[pushed.get(storage, 0) : end])
            pushed[storage] = max(end, pushed.get(storage, 0))

        for storage in storages(node) if self._writes else ():
            push_writes(storage, None)
        while stack:
            if (at := stack.pop()) in found or at in self._of:
                continue
            found[at] = None
            for x in at.all_input_nodes:
                stack.append(x)
                for storage in storages(x) if self._writes else ():
                    push_writes(storage, at)
        return sorted(found)

    def _look(self, graph: fx.Graph) -> None:
        """Find which of the new nodes have known values. Each node is visited once."""
        if self._graph is not graph:
            self._begin(graph)
        last, self._newest = self._newest, graph._root._prev
        for at in since(last, graph._root):
            is_known = self._is_known(at)
            for value in writes(at):
                for storage in storages(value):
                    self._writes.setdefault(storage, []).append(at)
                    if not is_known:
                        self._lost.add(storage)
            if is_known:
                self._known.add(at)

    def _is_known(self, node: fx.Node) -> bool:
        if self.is_given(node):
            self._fixed |= storages(node)
            return True
        inputs = node.all_input_nodes
        if not (all(x in self._known for x in inputs) and self.is_computable(node)):
            return False
        if self._lost and not all(self._lost.isdisjoint(storages(x)) for x in inputs):
            return False
        return all(self._fixed.isdisjoint(storages(value)) for value in writes(node))

    def is_computable(self, node: fx.Node) -> bool:
        """Whether a node's op gives the same values at each call."""
        target = node.target
        if target is operator.getitem:
            return True
        if node.op != "call_function" or not isinstance(target, OpOverload):
            return False
        val = node.meta.get("val")
        results = val if isinstance(val, list | tuple) else (val,)
        return (
            self.is_known_op(target)
            and (not target._schema.is_mutable or is_in_place(target))
            and not op_facts(target).is_random
            and all(isinstance(x, Tensor) and x.numel() <= self.most for x in results)
        )

    def is_known_op(self, target: OpOverload) -> bool:
        return target.namespace == "aten"

    def is_given(self, node: fx.Node) -> bool:
        """Whether `given` has the value of a node that no op computes."""
        return node.op == "get_attr"

    def given(self, node: fx.Node) -> Any:
        return getattr(self._root, str(node.target)).clone()

    def _computed(self, node: fx.Node) -> Any:
        missing = self.needed(node)
        if any(self._is_overwritten(at) for at in missing):
            self._of.clear()
            self._last_writes.clear()
            missing = self.needed(node)
        for at in missing:
            self._compute(at)
        return self._of[node]

    def _compute(self, node: fx.Node) -> None:
        is_given, device = self.is_given(node), self.device
        self._of[node] = self.given(node) if is_given else computed(node, self._of, device)
        for value in writes(node):
            self._last_writes.update(dict.fromkeys(storages(value), node))

    def _is_overwritten(self, node: fx.Node) -> bool:
        """Whether a later write was done to what a node reads."""
        if not self._last_writes:
            return False
        held = (storage for x in node.all_input_nodes for storage in storages(x))
        return any((at := self._last_writes.get(s)) is not None and node < at for s in held)


def computed(node: fx.Node, values: Mapping[fx.Node, Any], device: str) -> Any:
    """The result of a node's op."""
    args, kwargs = mapped_arguments(node, values.__getitem__)
    if kwargs.get("device") is not None:
        kwargs = {**kwargs, "device": torch.device(device)}
    with default_dtype_of(node):
        return kernel_of(node.target)(*args, **kwargs)


@contextmanager
def default_dtype_of(node: fx.Node) -> Iterator[None]:
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


def are_written(reads: Iterable[tuple[fx.Node, Sequence[fx.Node]]], graph: fx.Graph) -> bool:
    """Whether any op so far writes to the memory of a node after its first read.

    Args:
        reads: nodes, with the ops that read them; none: any write counts.
    """
    left: dict[int, set[fx.Node]] = {}
    held: dict[Any, set[int]] = {}  # per storage the reads that it counts for
    read_at: dict[fx.Node, list[int]] = {}
    for i, (node, readers) in enumerate(reads):
        left[i] = set(readers)
        for storage in storages(node):
            held.setdefault(storage, set()).add(i)
        for reader in readers:
            read_at.setdefault(reader, []).append(i)
    for op in reversed(graph.nodes):
        if any(held.get(storage) for v in writes(op) for storage in storages(v)):
            return True
        for i in read_at.get(op, ()):
            left[i].discard(op)
            if not left[i]:
                for of in held.values():
                    of.discard(i)
        if not any(held.values()):
            break
    return False
