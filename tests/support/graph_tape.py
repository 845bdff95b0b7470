"""CUDA graphs on a CPU: what is recorded is not done until it is replayed, on the very memory of
the recording.
"""

import sys
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Run = Callable[[Sequence[Any]], Sequence[Tensor]]
REFUSED = "CUDA error: operation not permitted when stream is capturing"
SPOILED = "CUDA error: operation failed due to a previous error during capture"


def poison(x: Tensor) -> None:
    """What memory holds that nothing has been written to."""
    x.fill_(float("nan") if x.is_floating_point() else 77)


class Tape:
    """Notes every op with its tensors; a replay runs the same ops on the same tensors and writes to
    the same results.

    Attributes:
        replays: of each recording.
        waiting: ops that wait for the device, which no recording takes.
    """

    def __init__(self, waiting: Collection[Any] = ()):
        self.replays: list[int] = []
        self.waiting = {
            torch.ops.aten._local_scalar_dense.default,
            torch.ops.aten.nonzero.default,
            *waiting,
        }

    def aside(self, run: Run, given: Sequence[Any]) -> Sequence[Tensor]:
        return run(given)

    def record(self, run: Run, given: Sequence[Any]) -> tuple[Callable[[], None], Sequence[Tensor]]:
        noted = _Noted(self.waiting)
        with noted:
            outputs = run(given)
        noted.undo()
        return self._counted(noted.replay), outputs

    def _counted(self, replay: Callable[[], None]) -> Callable[[], None]:
        number = len(self.replays)
        self.replays.append(0)

        def counted() -> None:
            self.replays[number] += 1
            replay()

        return counted


class Again(Tape):
    """Runs the whole again, for code that is not made of torch's ops."""

    def record(self, run: Run, given: Sequence[Any]) -> tuple[Callable[[], None], Sequence[Tensor]]:
        tensors = [x for x in given if isinstance(x, Tensor)]
        held = {x.untyped_storage().data_ptr() for x in tensors}
        before = [x.clone() for x in tensors]
        outputs = list(run(given))
        for x, old in zip(tensors, before, strict=True):
            x.copy_(old)
        fresh = [i for i, out in enumerate(outputs) if out.untyped_storage().data_ptr() not in held]
        for i in fresh:
            outputs[i] = outputs[i].clone()
            poison(outputs[i])

        def replay() -> None:
            found = run(given)
            for i in fresh:
                outputs[i].copy_(found[i])

        return self._counted(replay), outputs


class Spoiled(Tape):
    """Raises once more where a recording that has failed ends, as torch's do."""

    def record(self, run: Run, given: Sequence[Any]) -> tuple[Callable[[], None], Sequence[Tensor]]:
        done = None
        try:
            done = super().record(run, given)
        finally:
            if done is None:
                raise RuntimeError(SPOILED)
        return done


class Driver:
    """What torch asks of CUDA and of its allocator as it records; `install` puts it in their place.

    Source: torch 2.13, ``CUDAGraph.cpp`` and ``CUDACachingAllocator.cpp``.

    Attributes:
        spoils: whether an error inside a recording is one of CUDA's, so that the recording cannot
            be ended.
        pools: those that an allocation may go to now.
        done: what was done, in order.
    """

    def __init__(self) -> None:
        self.spoils = True
        self.pools: set[tuple[int, int]] = set()
        self.done: list[str] = []
        self.graphs: list[weakref.ref] = []
        self._made = 0
        self._stream: Any = SimpleNamespace(device=torch.device("cpu"))

    def install(self, patch: Any) -> None:
        driver = self

        class Graph:
            def __init__(self) -> None:
                driver.graphs.append(weakref.ref(self))

            def capture_begin(self, pool: tuple[int, int], **how: Any) -> None:
                if pool in driver.pools:
                    raise RuntimeError(
                        f"beginAllocateToPool: already recording to mempool_id {pool}"
                    )
                if driver._stream.is_spoiled:
                    raise RuntimeError("CUDA error: the stream is capturing")
                driver.pools.add(pool)
                self.pool = pool

            def capture_end(self) -> None:
                if sys.exc_info()[0] is not None and driver.spoils:
                    driver._stream.is_spoiled = True
                    raise RuntimeError(SPOILED)
                driver.pools.remove(self.pool)

            def replay(self) -> None:
                driver.done.append("replay")

        def end(device: int, pool: tuple[int, int]) -> None:
            if pool not in driver.pools:
                raise RuntimeError(f"endAllocatePool: not currently recording to mempool_id {pool}")
            driver.pools.remove(pool)

        @contextmanager
        def stream(new: Any) -> Iterator[None]:
            old, driver._stream = driver._stream, new
            yield
            driver._stream = old

        patch.setattr("torch.cuda.CUDAGraph", Graph)
        patch.setattr("torch.cuda.MemPool", lambda: SimpleNamespace(id=self._number()))
        patch.setattr("torch.cuda.graph_pool_handle", self._number)
        patch.setattr("torch.cuda.Stream", lambda device: SimpleNamespace(is_spoiled=False))
        patch.setattr("torch.cuda.stream", stream)
        patch.setattr("torch.cuda.current_stream", lambda device: self._stream)
        patch.setattr("torch.cuda.set_stream", lambda new: setattr(self, "_stream", new))
        patch.setattr("torch.cuda.synchronize", lambda: self.done.append("synchronize"))
        patch.setattr("torch.cuda.is_initialized", lambda: True)
        patch.setattr("torch._C._host_emptyCache", lambda: None, raising=False)
        patch.setattr("torch._C._cuda_endAllocateToPool", end, raising=False)
        patch.setattr("torch._C._cuda_releasePool", lambda device, pool: None, raising=False)

    def _number(self) -> tuple[int, int]:
        self._made += 1
        return 0, self._made


class _Noted(TorchDispatchMode):
    def __init__(self, waiting: Collection[Any]):
        super().__init__()
        self.waiting = waiting
        self.calls: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self.made: dict[int, Tensor] = {}
        self.before: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in self.waiting:
            raise RuntimeError(REFUSED)
        operands = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if func._schema.is_mutable:
            for x in operands:
                at = x.untyped_storage().data_ptr()
                if at not in self.made and at not in self.before:
                    whole = torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage())
                    self.before[at] = whole, whole.clone()
        out = func(*args, **kwargs)
        shared = {x.untyped_storage().data_ptr() for x in operands}
        results = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        fresh = [x for x in results if x.untyped_storage().data_ptr() not in shared]
        self.made |= {x.untyped_storage().data_ptr(): x for x in fresh}
        self.calls.append((func, args, kwargs, results))
        return out

    def undo(self) -> None:
        for whole, old in self.before.values():
            whole.copy_(old)
        for x in self.made.values():
            poison(x)

    def replay(self) -> None:
        for func, args, kwargs, results in self.calls:
            found = [x for x in tree_leaves(func(*args, **kwargs)) if isinstance(x, Tensor)]
            for x, new in zip(results, found, strict=True):
                if func.namespace == "_c10d_functional":
                    torch.ops._c10d_functional.wait_tensor.default(new)
                if x.untyped_storage().data_ptr() != new.untyped_storage().data_ptr():
                    x.copy_(new)
