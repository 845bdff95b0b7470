"""Values known while tracing: recorded ops compute them from Python numbers alone, such as a loop's
counter.
"""

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from ftp.ops.mapped_arguments import mapped_arguments
from ftp.ops.written import writes
from ftp.torch_internals.functorch import (
    get_unwrapped,
    is_batchedtensor,
    is_functorch_wrapped_tensor,
    temporarily_clear_interpreter_stack,
    unwrap_if_dead,
)
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
    """The values of the nodes of one trace, each computed once."""

    def __init__(self) -> None:
        self._of: dict[fx.Node, Any] = {}
        self._written: dict[fx.Graph, tuple[fx.Node | None, set[int]]] = {}

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
            if held is None or not self._is_constant(held.proxy.node):
                return None
        with computing():
            return func(self._computed(held.proxy.node, tracer.root))

    def _is_constant(self, node: fx.Node) -> bool:
        producers: dict[fx.Node, None] = {}
        stack = [node]
        while stack:
            if (at := stack.pop()) in producers:
                continue
            if not (self._is_given(at) or _is_computable(at)):
                return False
            producers[at] = None
            if at not in self._of:
                stack += at.all_input_nodes
        written = self._written_so_far(node.graph)
        return not any(storage in written for n in producers for storage in storages(n))

    def _written_so_far(self, graph: fx.Graph) -> set[int]:
        """The storages that the ops so far write to. Each op is visited once."""
        last, written = self._written.get(graph, (None, set[int]()))
        newest = at = graph._root._prev
        while at is not last and at is not graph._root:
            written.update(storage for v in writes(at) for storage in storages(v))
            at = at._prev
        self._written[graph] = newest, written
        return written

    def _is_given(self, node: fx.Node) -> bool:
        """Whether `_given` has the value of a node that no op computes."""
        return node.op == "get_attr"

    def _given(self, node: fx.Node, root: torch.nn.Module) -> Any:
        return getattr(root, str(node.target))

    def _computed(self, node: fx.Node, root: torch.nn.Module) -> Any:
        stack = [node]
        while stack:
            at = stack[-1]
            missing = [x for x in at.all_input_nodes if x not in self._of]
            if missing:
                stack += missing
                continue
            stack.pop()
            if at in self._of:
                continue
            if self._is_given(at):
                self._of[at] = self._given(at, root)
                continue
            args, kwargs = mapped_arguments(at, self._of.__getitem__)
            if kwargs.get("device") is not None:
                kwargs = {**kwargs, "device": torch.device("cpu")}
            self._of[at] = at.target(*args, **kwargs)  # type: ignore[operator]
        return self._of[node]


def _is_computable(node: fx.Node) -> bool:
    target = node.target
    if target is operator.getitem:
        return True
    if node.op != "call_function" or not isinstance(target, OpOverload):
        return False
    val = node.meta.get("val")
    results = val if isinstance(val, list | tuple) else (val,)
    return (
        target.namespace == "aten"
        and not target._schema.is_mutable
        and not op_facts(target).is_random
        and all(isinstance(x, Tensor) and x.numel() <= MOST for x in results)
    )


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
