"""Record a rank's step, its collectives included, as one CUDA graph, and replay it by one call.

Recorded kernels read and write fixed addresses. An input at its recorded address is used in place.
An input with a new address at each call, as a batch, is first copied to the recording's memory.
Donated inputs that the step updates in place come back in the same memory without a copy. Any other
output is copied, because the next replay overwrites it.
"""

import gc
import warnings
import weakref
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from ftp.dataclass import dataclass
from ftp.errors import InputError
from ftp.paused_gc import collection_paused
from ftp.sharding.process_group import endings

# Calls before the recording: they compile kernels, connect communicators, and show which inputs
# change their address.
WARM_UP = 2
PATIENCE = 8  # recordings before a step warns that its state has a new address at each call

Run = Callable[[Sequence[Any]], Sequence[Tensor]]
AddressAndStrides = tuple[int, tuple[int, ...]]  # address and strides


class Graphs(Protocol):
    """The interface of a recorder of kernels."""

    def aside(self, run: Run, given: Sequence[Any]) -> Sequence[Tensor]:
        """Run on the stream of the later recording: libraries allocate their workspaces there."""
        ...

    def record(self, run: Run, given: Sequence[Any]) -> tuple[Callable[[], None], Sequence[Tensor]]:
        """Record a run without executing it. Returns a function that replays it, and the outputs
        that each replay writes to.
        """
        ...


class CudaGraphs:
    """torch's CUDA graphs on one device. All recordings share a memory pool, as no two are replayed
    at the same time.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._failed: list[Any] = []
        self._renew()

    def _renew(self) -> None:
        # A reference to the pool keeps it alive while no recording uses it.
        self.stream, self.pool = torch.cuda.Stream(self.device), torch.cuda.MemPool()

    def aside(self, run: Run, given: Sequence[Any]) -> Sequence[Tensor]:
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            outputs = run(given)
        current.wait_stream(self.stream)
        return outputs

    def record(self, run: Run, given: Sequence[Any]) -> tuple[Callable[[], None], Sequence[Tensor]]:
        graph, before = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self.device)
        pool: Any = self.pool.id
        try:
            # NCCL's watchdog thread and ftp's own threads go on while this thread records.
            with torch.cuda.graph(graph, pool, self.stream, capture_error_mode="thread_local"):
                outputs = run(given)
        except BaseException:
            torch.cuda.set_stream(before)  # a failed recording does not restore it
            with suppress(RuntimeError):  # if the recording has ended already
                torch._C._cuda_endAllocateToPool(self.device.index, pool)
                torch._C._cuda_releasePool(self.device.index, pool)
                # The allocator of pinned memory keeps querying the graph; no call ends that.
                self._failed.append((graph, self.stream, self.pool))
            self._renew()
            raise
        return graph.replay, outputs


@cache
def graphs_of(device: torch.device) -> Graphs:
    return CudaGraphs(device)


@dataclass(frozen=True)
class _Alias:
    """An output in the memory of donated input ``of``, ``offset`` elements after its start."""

    of: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def seen(self, given: Tensor) -> Tensor:
        alias = given.detach()
        if not self.offset and (alias.shape, alias.stride()) == (self.size, self.stride):
            return alias
        return alias.as_strided(self.size, self.stride, int(alias.storage_offset()) + self.offset)


@dataclass(frozen=True)
class _Recording:
    """A recorded run. ``buffers``: positions of inputs, and the memory that each is copied to.
    ``outputs``: tensors that the next replay overwrites, or aliases of inputs.
    """

    replay: Callable[[], None]
    buffers: tuple[tuple[int, Tensor], ...]
    outputs: tuple[Tensor | _Alias, ...]

    def __call__(self, given: Sequence[Any]) -> list[Tensor]:
        if self.buffers:
            torch.ops.aten._foreach_copy_.default(
                [buffer for _, buffer in self.buffers], [given[i] for i, _ in self.buffers]
            )
        self.replay()
        return [
            out.seen(given[out.of]) if isinstance(out, _Alias) else out.clone()
            for out in self.outputs
        ]


class RecordedRun:
    """A run that is recorded at its third call and replayed from then on. It takes tensors, always
    of the same shapes and strides, and numbers that never change.

    An input seen at two addresses is copied from then on. Donated inputs that come back in place
    are recorded at their addresses. If these change, as after a checkpoint is loaded, the run is
    recorded once more, and both recordings are kept.

    Args:
        donated: positions of inputs whose memory a run may use for its outputs.
        names: of the inputs, for messages.
        explain: names the op that raised an error; "" if unknown.
    """

    def __init__(
        self,
        run: Run,
        donated: Collection[int],
        names: Sequence[str],
        graphs: Graphs,
        explain: Callable[[BaseException], str],
    ):
        self._run, self._donated = run, frozenset(donated)
        self._names, self._graphs, self._explain = names, graphs, explain
        self._warmed = 0
        self._places: list[AddressAndStrides | None] = []
        self._elsewhere: set[int] = set()
        self._in_place: tuple[int, ...] = ()
        self._made: dict[tuple[AddressAndStrides | None, ...], _Recording] = {}
        self._count = 0
        _alive.add(self)

    def __call__(self, given: Sequence[Any]) -> Sequence[Tensor]:
        places = [_place(x) for x in given]
        moved = {
            i
            for i, (now, before) in enumerate(zip(places, self._places, strict=False))
            if now != before
        }
        moved -= {*self._in_place, *self._elsewhere}
        if moved:
            self._elsewhere |= moved
            self._made.clear()
        self._places = places
        if self._warmed < WARM_UP:
            self._warmed += 1
            outputs = self._graphs.aside(self._run, given)
            self._in_place = tuple(
                i for i in sorted(self._donated) if any(_shares(given[i], out) for out in outputs)
            )
            self._elsewhere.difference_update(self._in_place)
            return outputs
        key = tuple(places[i] for i in self._in_place)
        if key not in self._made:
            self._made[key] = self._record(given)
        return self._made[key](given)

    def _record(self, given: Sequence[Any]) -> _Recording:
        self._count += 1
        if self._count == PATIENCE:
            named = ", ".join(self._names[i] for i in self._in_place[:4]) or "inputs"
            warnings.warn(
                f"The step has been recorded {PATIENCE} times as a CUDA graph, as donated"
                f" arguments ({named}, ...) have new addresses at each"
                " call. Pass each call the last call's results in their place, or leave out"
                " cuda_graph=True.",
                stacklevel=2,
            )
        buffers = {
            i: torch.empty_like(given[i], memory_format=torch.contiguous_format)
            for i in sorted(self._elsewhere)
        }
        fixed = [buffers.get(i, x) for i, x in enumerate(given)]
        errors: list[Exception] = []

        def run(given: Sequence[Any]) -> Sequence[Tensor]:
            try:
                return self._run(given)
            except Exception as error:
                errors.append(error)
                raise

        try:
            with collection_paused():  # freeing GPU memory would end the recording
                replay, outputs = self._graphs.record(run, fixed)
        except RuntimeError as error:
            first = errors[0] if errors else error  # a failed recording raises again when it ends
            what = self._explain(first)
            raise InputError(
                f"The step cannot be recorded as a CUDA graph{f', for {what}' if what else ''}:"
                f" {str(first).splitlines()[0]}\n"
                "  Recorded ops may not wait for the GPU, nor copy from or to the host. Leave"
                " out cuda_graph=True, or the op."
            ) from first
        if len(self._made) > 1:  # keep the newest two, and free the memory of the others
            self._made.pop(next(iter(self._made)))
        return _Recording(
            replay, tuple(buffers.items()), tuple(self._kept(out, fixed) for out in outputs)
        )

    def _kept(self, out: Tensor, fixed: Sequence[Any]) -> Tensor | _Alias:
        for i in self._in_place:
            if _shares(fixed[i], out) and out.dtype == fixed[i].dtype:
                return _Alias(
                    i,
                    tuple(out.shape),
                    out.stride(),
                    int(out.storage_offset() - fixed[i].storage_offset()),
                )
        return out


_alive: weakref.WeakSet[RecordedRun] = weakref.WeakSet()


def forget_recordings() -> None:
    """Free the recordings of all steps once the GPU has finished them.

    NCCL does not destroy a communicator while a graph holds its collectives (pytorch#115388).
    """
    held = [recorded for recorded in _alive if recorded._made]
    if not held:
        return
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    for recorded in held:
        recorded._made.clear()
    gc.collect()


endings.append(forget_recordings)


def _place(x: Any) -> AddressAndStrides | None:
    return (x.data_ptr(), x.stride()) if isinstance(x, Tensor) else None


def _shares(x: Any, out: Tensor) -> bool:
    return bool(out.numel()) and x.untyped_storage().data_ptr() == out.untyped_storage().data_ptr()
