"""Steps that a function takes for one tensor after the other, such as an optimizer's: a trace
copies the nodes of the first step for tensors like its own.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from ftp.ops.written import writes
from ftp.torch_internals.graph_nodes import since
from ftp.torch_internals.modes import (
    DisableTorchFunction,
    disable_current_modes,
    get_current_dispatch_mode_stack,
    get_current_function_mode_stack,
)
from ftp.tracing.call_cache import CALLED, TracedCall, track
from ftp.tracing.functionalize_graph import rename_writes
from ftp.tracing.recorder import Recorder, current_recorder


class RepeatedSteps:
    """Steps that differ only in their tensors."""

    def __init__(self, recorder: Recorder):
        self._recorder = recorder
        self._names: dict[Any, list[str]] = {}  # of the new tensors

    def take(
        self, key: Hashable, given: list[Tensor], step: Callable[[], Mapping[str, Tensor]]
    ) -> Mapping[str, Tensor]:
        """The results of ``step`` that are new tensors. It depends on ``key`` and reads ``given``;
        those that it writes to must be copies that nothing else reads, and have new tensors too.
        """
        recorder, tracer = self._recorder, self._recorder.tracer
        root = tracer.graph._root
        before = root._prev
        with DisableTorchFunction():
            memory = [x.untyped_storage()._cdata for x in given]
            named = self, key, tuple(map(memory.index, memory))
            call = recorder.recall.call(named, given, {}, tracer)
            if call is not None and (names := self._names.get(call.key)) is not None:
                if (again := recorder.again(call)) is not None:
                    return dict(zip(names, again, strict=True))
                call = None  # a step that cannot be copied
        results = step()
        if call is None:
            return results
        with DisableTorchFunction():
            return self._learned(call, results, since(before, root))

    def _learned(
        self, call: TracedCall, results: Mapping[str, Tensor], nodes: Sequence[fx.Node]
    ) -> Mapping[str, Tensor]:
        """The results of a step whose nodes no longer write, where they need not."""
        recorder, tracer = self._recorder, self._recorder.tracer
        called, inputs = [node.target for node in nodes], dict.fromkeys(call.inputs)
        found = {name: tracer.tensor_tracker.get(x) for name, x in results.items()}
        self._names[call.key] = []
        if None in found.values():
            return results
        makers = {name: x.proxy.node for name, x in found.items() if x.proxy.node not in inputs}
        self._names[call.key] = list(makers)
        before = [node for node in inputs if not writes(node)]  # others write to other memory
        with disable_current_modes():
            if not rename_writes([*before, *nodes], recorder.mode):
                return results
        for node, target in zip(nodes, called, strict=True):
            if node.target is not target:  # it writes no more
                node.meta |= {"val": recorder.recall.fake.like(node.meta["val"]), CALLED: target}
        made = {name: node.meta["val"] for name, node in makers.items()}
        for name, node in makers.items():
            track(made[name], node, tracer)
        recorder.recall.learn(call, tuple(made.values()), nodes, tracer)
        for node in nodes:
            node.meta.pop(CALLED, None)
        return made


def steps_of_trace() -> RepeatedSteps | None:
    """For the steps that follow one another here; None outside a trace, and where modes that the
    function has set see its ops.
    """
    recorder, mode = current_recorder(), get_proxy_mode()
    if recorder is None or mode is None or mode.tracer is not recorder.tracer:
        return None
    is_last = get_current_dispatch_mode_stack()[-1] is recorder
    is_alone = is_last and get_current_function_mode_stack() == recorder.modes
    return RepeatedSteps(recorder) if is_alone else None
