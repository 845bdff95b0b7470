"""Measure this machine's rates: matmuls by dtype, memory, the cost of issuing an op, and the links
of a mesh of processes.
"""

import math
import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist

from ftp.distributed.calls import calls
from ftp.errors import MeshError
from ftp.ops.philox import random_bits
from ftp.partitioning.collectives import gather_of
from ftp.planning.cost import Curve, Hardware, Link
from ftp.runtime.process_groups import memory_of
from ftp.runtime.shared_memory import SharedGroup
from ftp.runtime.shared_pages import is_asked_for
from ftp.sharding.mesh import AnyMesh, resolve

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
MATMUL = 512  # rows and columns of the matmuls that are timed
CACHED, LARGE = 6 << 20, 96 << 20  # bytes of tensors that fit in the cache, and that do not
# Bytes of results: allocators ask the system for the pages of large ones.
FRESH = (1 << 18, 1 << 21, 1 << 23, 40 << 20)
# Bytes of other live results, so that a new one does not get memory that was just freed.
BESIDE = 64 << 20
BEFORE = (128, 512, 1024)  # rows and columns of the matmuls after which an op is issued
WIRE = (1 << 10, 1 << 16, 1 << 19, 1 << 21, 1 << 23)  # bytes of the collectives that are timed
BETWEEN = (2e-4, 5e-3)  # seconds that ranks compute between collectives
DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def calibrate(
    mesh: AnyMesh | None = None,
    *,
    device_type: str | None = None,
    dtypes: Sequence[torch.dtype] = DTYPES,
    seconds: float = 0.05,
) -> Hardware:
    """Measure this machine: its ``Hardware``, for ``lowered.cost``. Call it on all ranks of a mesh,
    or without a mesh.

    Args:
        mesh: of processes: all ranks are timed at the same time, as in a step, and the links
            between them axis by axis; every rank gets the mean. On any other mesh, or without one,
            ranks are assumed to share one memory.
        device_type: default the mesh's, else ``cpu``.
        dtypes: of the matmuls that are timed.
        seconds: for each measurement, of which there are about twenty, and about forty per axis.

    Raises:
        MeshError: on a mesh of processes, a rank that is missing; a device or a time that cannot be
            measured.

    >>> import ftp
    >>> machine = ftp.calibrate(dtypes=[torch.float32], seconds=0.001)
    >>> machine.flops_of(torch.float32) > 0 and machine.memory > 0 and machine.overhead > 0
    True
    >>> machine.capacity > 1e6  # bytes
    True
    """
    m = resolve(mesh) if mesh is not None else None
    kind = device_type or (m.device_type if m is not None else "cpu")
    if kind not in ("cpu", "cuda") or not seconds > 0:
        raise MeshError(
            f"calibrate(device_type={kind!r}, seconds={seconds!r}) measures 'cpu' or 'cuda', for a"
            " positive time."
        )
    device, is_cpu = torch.device(kind), kind == "cpu"
    groups: dict[str, tuple[dist.ProcessGroup, SharedGroup | None]] = {}
    if m is not None and m.kind == "process" and m.torch is not None:
        record = calls(m)
        record.agree(record.next(), {"environment": f"FTP_SHM={int(is_asked_for())}"})
        shared = memory_of(m)
        groups = {
            axis: (m.torch.get_group(axis), shared.get(m.group_name(axis)))
            for axis, n in m.axes.items()
            if n > 1
        }
    clock = _Clock(device, seconds, [group for group, _ in groups.values()])
    rates = {dtype: _matmuls(clock, dtype) for dtype in dtypes}
    overhead = clock(_small_ops(device)) / len(_KINDS)
    memory = _stream(clock, LARGE, overhead)
    cache = max(memory, _stream(clock, CACHED, overhead))
    links = {axis: _link(clock, *group) for axis, group in groups.items()}
    return Hardware(
        max(rates.values()),
        memory,
        min(links.values(), key=lambda one: one.bandwidth, default=Link(overhead, memory / 2)),
        links,
        rates,
        cache,
        2 * CACHED,
        overhead,
        not is_cpu,
        f"this machine ({kind})",
        min(1.0, _attention(clock, dtypes[0]) / rates[dtypes[0]]),
        tuple((size, _fresh(clock, size)) for size in FRESH) if is_cpu else (),
        _cold(clock, overhead) if is_cpu else (),
        _elements(clock) if is_cpu else {},
        min(1.0, _convolution(clock, dtypes[0]) / rates[dtypes[0]]),
        capacity=clock.mean(_capacity(device)),
    )


def _capacity(device: torch.device) -> float:
    """Bytes of a device's memory; a rank's share of the host's memory on a CPU."""
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return whole / int(os.environ.get("LOCAL_WORLD_SIZE", 1))


class _Clock:
    """Typical seconds of repeated calls: the mean over the ranks of some groups, which are timed at
    the same time.

    On one thread of a CPU these are seconds of processor time, which other work on the machine
    changes little; they are longer if ranks share a core.
    """

    def __init__(
        self, device: torch.device, seconds: float, groups: Sequence[dist.ProcessGroup] = ()
    ):
        self.device, self.seconds, self.groups = device, seconds, groups
        here = math.prod(group.size() for group in groups)
        here = min(here, int(os.environ.get("LOCAL_WORLD_SIZE", here)))
        self._share = max(1.0, here / (os.cpu_count() or 1))
        is_threaded = device.type != "cpu" or torch.get_num_threads() > 1
        self._now = time.perf_counter if is_threaded else lambda: self._share * time.process_time()

    def __call__(
        self, run: Callable[[], object], before: Callable[[], object] | None = None, least: int = 5
    ) -> float:
        """Median seconds of ``run``. ``before`` is called before each call, and is not timed."""
        self._timed(run, before)
        self.mean(0.0)  # ranks begin together
        times: list[float] = []
        until = time.perf_counter() + self.seconds
        while len(times) < least or (time.perf_counter() < until and len(times) < 10_000):
            times.append(self._timed(run, before, self._now))
        return self.mean(statistics.median(times))

    def together(
        self, run: Callable[[], object], before: Callable[[], object] | None = None
    ) -> float:
        """Seconds of a ``run`` that ranks do together, all equally often: the mean of the middle
        half rather than the median, because a step's time is a sum of such times.
        """
        self._timed(run, before)
        began = time.perf_counter()
        self._timed(run, before)
        count = 2 * self.seconds / max(self.mean(time.perf_counter() - began), 1e-9)
        times = sorted(self._timed(run, before) for _ in range(int(max(8, min(200, count)))))
        quarter = len(times) // 4
        return self.mean(statistics.fmean(times[quarter : len(times) - quarter]))

    def mean(self, x: float) -> float:
        """The mean over the ranks of all groups, which are the axes of a mesh."""
        held = torch.tensor(
            [x], dtype=torch.float64, device=self.device if self.device.type == "cuda" else "cpu"
        )
        for group in self.groups:
            dist.all_reduce(held, group=group)
            held /= group.size()
        return float(held)

    def _timed(
        self,
        run: Callable[[], object],
        before: Callable[[], object] | None,
        now: Callable[[], float] = time.perf_counter,
    ) -> float:
        if before is not None:
            before()
        began = now()
        run()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return now() - began

    def ones(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.ones(shape, dtype=dtype, device=self.device)


def _matmuls(clock: _Clock, dtype: torch.dtype) -> float:
    """Floating-point operations a second of a linear layer's matmuls, forward and backward."""
    size = MATMUL if clock.device.type == "cpu" else 8192
    x, w = (
        torch.rand(size, size, generator=torch.Generator().manual_seed(0)).to(clock.device, dtype)
        for _ in range(2)
    )

    def run() -> None:
        y = aten.mm.default(x, w.t())
        aten.mm.default(y.t(), x)
        aten.mm.default(y, w)

    return 3 * 2 * size**3 / clock(run)


def _attention(clock: _Clock, dtype: torch.dtype) -> float:
    """Floating-point operations a second of causal attention, forward and backward."""
    heads, seq, dim = (8, 256, 64) if clock.device.type == "cpu" else (64, 2048, 128)
    q, k, v = (clock.ones(1, heads, seq, dim, dtype=dtype).requires_grad_() for _ in range(3))

    def run() -> None:
        with torch.enable_grad():
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        torch.autograd.grad(out, (q, k, v), torch.ones_like(out))

    matmuls = 2 + 5  # of the forward and of the backward pass
    return matmuls * 2 * heads * seq * seq * dim / clock(run)


def _convolution(clock: _Clock, dtype: torch.dtype) -> float:
    """Floating-point operations a second of a convolution, forward and backward."""
    batch, channels, size = (8, 32, 16) if clock.device.type == "cpu" else (64, 256, 56)
    x, w = (
        clock.ones(batch, channels, size, size, dtype=dtype),
        clock.ones(channels, channels, 3, 3, dtype=dtype),
    )
    how = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)

    def run() -> None:
        y = aten.convolution.default(x, w, None, *how)
        aten.convolution_backward.default(y, x, w, None, *how, [True, True, False])

    return 3 * 2 * 9 * batch * channels**2 * size**2 / clock(run)


_KINDS: tuple[Callable[[torch.Tensor], object], ...] = (
    lambda a: aten.add.Tensor(a, a),
    lambda a: aten.mm.default(a, a),
    lambda a: aten.t.default(a),
    lambda a: aten.sum.dim_IntList(a, [0]),
    lambda a: aten.mul.Tensor(a, a),
    lambda a: aten.reshape.default(a, [4, 16]),
)


def _small_ops(device: torch.device) -> Callable[[], object]:
    """A few kinds of ops on tiny tensors."""
    a = torch.ones(8, 8, device=device)

    def run() -> None:
        for kind in _KINDS:
            kind(a)

    return run


def _cold(clock: _Clock, overhead: float) -> Curve:
    """Seconds beside ``overhead`` that a small op takes after a matmul, by the bytes of the
    matmul's tensors.
    """
    a, found = clock.ones(8, 8), []
    for size in BEFORE:
        x = clock.ones(size, size)
        took = [
            clock(lambda kind=kind: kind(a), lambda x=x: aten.mm.default(x, x))
            for kind in _KINDS[:4]
        ]
        found.append((3 * 4 * size**2, max(0.0, statistics.fmean(took) - overhead)))
    return tuple(found)


def _stream(clock: _Clock, nbytes: int, overhead: float) -> float:
    """Bytes a second of an addition in place that reads two tensors and writes one, ``nbytes``
    together.
    """
    a, b = (clock.ones(nbytes // 12) for _ in range(2))
    return nbytes / max(clock(lambda: aten.add_.Tensor(a, b)) - overhead, 1e-9)


def _fresh(clock: _Clock, nbytes: int) -> float:
    """Bytes a second at which new memory is provided: by the extra time of an op over its in-place
    form.
    """
    a, b = (clock.ones(nbytes // 4) for _ in range(2))
    results: deque[torch.Tensor] = deque(maxlen=max(2, BESIDE // nbytes))
    for _ in range(results.maxlen or 0):
        results.append(a + b)
    more = clock(lambda: results.append(aten.add.Tensor(a, b))) - clock(
        lambda: aten.add_.Tensor(a, b)
    )
    return nbytes / max(more, 1e-9)


def _elements(clock: _Clock) -> dict[str, float]:
    """Elements a second of ops that are limited by arithmetic, and of one on tensors that are
    not dense, ``strided``.
    """
    x, column = clock.ones(256, 1024), clock.ones(256, 1).expand(256, 1024)
    key = torch.zeros(2, dtype=torch.int64)
    heads = x.view(256, 8, 128).transpose(0, 1)
    kinds: dict[str, Callable[[], object]] = {
        op.__name__: lambda op=op: op(x)
        for op in (aten.exp, aten.log, aten.tanh, aten.erf, aten.sigmoid, aten.silu, aten.gelu)
    }
    kinds["_softmax"] = lambda: aten._softmax.default(x, 1, False)
    kinds["_log_softmax"] = lambda: aten._log_softmax.default(x, 1, False)
    kinds["sum"] = lambda: aten.sum.dim_IntList(x, [1])
    kinds["native_layer_norm"] = lambda: aten.native_layer_norm.default(x, [1024], None, None, 1e-5)
    kinds["random_bits"] = lambda: random_bits(key, [256, 1024], [1024, 1], 0)
    found = {name: x.numel() / clock(run) for name, run in kinds.items()}
    strided = clock(heads.contiguous) + clock(lambda: aten.mul.Scalar(column, 2.0))
    return found | {"strided": 2 * x.numel() / strided}


def _link(clock: _Clock, group: dist.ProcessGroup, shared: SharedGroup | None) -> Link:
    """A link, by timing collectives of each kind at several sizes, with some computation before
    each, and the share of their time that computation can hide.
    """
    n, a = group.size(), clock.ones(128, 128)
    each = clock(lambda: aten.mm.default(a, a))

    def computing(seconds: float) -> Callable[[], None]:
        def run() -> None:
            for _ in range(max(1, round(seconds / each))):
                aten.mm.default(a, a)

        return run

    measured: dict[str, tuple[tuple[float, Curve], ...]] = {}
    for op in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
        times: dict[float, list[tuple[float, float]]] = {seconds: [] for seconds in BETWEEN}
        for nbytes in WIRE:
            issue, wait = _collective(op, group, shared, clock.ones(nbytes // 4 // n * n))
            for seconds, points in times.items():
                run = partial(_issue_and_wait, issue, wait)
                points.append((nbytes, clock.together(run, computing(seconds))))
        measured[op] = tuple((seconds, tuple(points)) for seconds, points in times.items())
    large = _collective("all_reduce", group, shared, clock.ones(WIRE[-2] // 4))
    hidden = 0.0 if shared is not None else _hidden(clock, computing(BETWEEN[-1]), *large)
    latency, bandwidth = _line(measured["all_reduce"][0][1], 2 * (n - 1) / n)
    factors = {
        op: bandwidth / _line(measured[op][0][1], (n - 1) / n)[1]
        for op in ("all_gather", "reduce_scatter", "all_to_all")
    }
    return Link(latency, bandwidth, factors, measured, hidden)


def _issue_and_wait(
    issue: Callable[[], torch.Tensor], wait: Callable[[torch.Tensor], object]
) -> None:
    wait(issue())


def _hidden(
    clock: _Clock,
    compute: Callable[[], object],
    issue: Callable[[], torch.Tensor],
    wait: Callable[..., object],
) -> float:
    """The share of a collective's time that is hidden if ranks compute meanwhile."""

    def overlapped() -> None:
        out = issue()
        compute()
        wait(out)

    computing = clock.together(compute)
    one_by_one = clock.together(lambda: (compute(), wait(issue())))
    saved, most = one_by_one - clock.together(overlapped), min(computing, one_by_one - computing)
    return max(0.0, min(1.0, saved / most)) if most > 0 else 1.0


def _line(points: Curve, ring: float) -> tuple[float, float]:
    """Latency and bandwidth by a line through the points. A rank sends ``ring`` times the bytes."""
    (_, latency), (nbytes, seconds) = points[0], points[-1]
    return latency, ring * (nbytes - points[0][0]) / max(seconds - latency, 1e-9)


def _collective(
    op: str, group: dist.ProcessGroup, shared: SharedGroup | None, whole: torch.Tensor
) -> tuple[Callable[[], torch.Tensor], Callable[[torch.Tensor], object]]:
    """Two functions: to issue a collective with ``whole`` on the larger side, to wait for it."""
    n, name = group.size(), group.group_name
    part, split = whole[: whole.numel() // n].clone(), [whole.numel() // n] * n
    if shared is not None:
        in_memory: dict[str, Callable[[], torch.Tensor]] = {
            "all_reduce": lambda: shared.all_reduce(whole, "sum"),
            "all_gather": lambda: shared.all_gather(part),
            "reduce_scatter": lambda: shared.reduce_scatter(whole, "sum"),
            "all_to_all": lambda: shared.all_to_all(whole),
        }
        return in_memory[op], lambda out: None
    issued: dict[str, Callable[[], torch.Tensor]] = {
        "all_reduce": lambda: c10d.all_reduce.default(whole, "sum", name),
        "all_gather": lambda: gather_of(name, part.device)(part, n, name),
        "reduce_scatter": lambda: c10d.reduce_scatter_tensor.default(whole, "sum", n, name),
        "all_to_all": lambda: c10d.all_to_all_single.default(whole, split, split, name),
    }

    def wait(out: torch.Tensor) -> None:
        c10d.wait_tensor.default(out)
        if whole.device.type == "cuda":
            torch.cuda.synchronize()

    return issued[op], wait
