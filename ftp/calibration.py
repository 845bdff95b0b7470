"""This machine's own rates, measured: products by dtype, memory, what issuing an op costs, and the links of a mesh of processes."""

import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from ftp.cost import Hardware, Link
from ftp.mesh import AnyMesh, resolve

MATMUL = 384  # rows and columns of the products that are timed
CACHED, LARGE = 6 << 20, 1 << 25  # bytes of the tensors that are in cache, and that are not
WIRE = (1 << 10, 1 << 22)  # bytes of the collectives that are timed
DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def calibrate(
    mesh: AnyMesh | None = None, *, device_type: str | None = None, dtypes: Sequence[torch.dtype] = DTYPES, seconds: float = 0.05
) -> Hardware:
    """The ``Hardware`` that this machine is, for ``lowered.cost``; call it on all ranks of a mesh, or with none.

    Args:
        mesh: of processes: its links are measured too, axis by axis. On any other, or none, ranks are taken to share one memory.
        device_type: default the mesh's, else ``cpu``.
        dtypes: of the products that are timed.
        seconds: for each measurement, about.

    >>> import ftp
    >>> machine = ftp.calibrate(dtypes=[torch.float32], seconds=0.001)
    >>> machine.flops_of(torch.float32) > 0 and machine.memory > 0 and machine.overhead > 0
    True
    """
    m = resolve(mesh) if mesh is not None else None
    kind = device_type or (m.device_type if m is not None else "cpu")
    device = torch.device(kind)
    clock = _Clock(device, seconds)
    rates = {dtype: _products(clock, dtype, device) for dtype in dtypes}
    overhead = _overhead(clock, device)
    memory = _stream(clock, LARGE, device, overhead)
    cache = max(memory, _stream(clock, CACHED, device, overhead))
    shared = Link(overhead, memory / 2)
    links = {}
    if m is not None and m.kind == "process" and m.torch is not None:
        links = {axis: _link(m.torch.get_group(axis), n, device, seconds) for axis, n in m.axes.items() if n > 1}
    link = min(links.values(), key=lambda one: one.bandwidth, default=shared)
    attention = min(1.0, _attention(clock, dtypes[0], device) / rates[dtypes[0]])
    name = f"this machine ({kind})"
    return Hardware(max(rates.values()), memory, link, links, rates, cache, 2 * CACHED, overhead, kind != "cpu", name, attention)


class _Clock:
    """Medians of repeated calls; on one thread of a CPU in seconds of the processor, which other work beside it changes little."""

    def __init__(self, device: torch.device, seconds: float):
        self.device, self.seconds = device, seconds
        self._now = time.process_time if device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter

    def __call__(self, run: Callable[[], object], least: int = 5) -> float:
        run()
        self._wait()
        times = []
        until = time.perf_counter() + self.seconds
        while len(times) < least or (time.perf_counter() < until and len(times) < 10_000):
            began = self._now()
            run()
            self._wait()
            times.append(self._now() - began)
        return statistics.median(times)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def _products(clock: _Clock, dtype: torch.dtype, device: torch.device) -> float:
    size = MATMUL if device.type == "cpu" else 8192
    a, b = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
    return 2 * size**3 / clock(lambda: torch.ops.aten.mm.default(a, b))


def _attention(clock: _Clock, dtype: torch.dtype, device: torch.device) -> float:
    """Floating-point operations a second of causal attention, forward and backward."""
    heads, seq, dim = (8, 256, 64) if device.type == "cpu" else (64, 2048, 128)
    q, k, v = (torch.ones(1, heads, seq, dim, dtype=dtype, device=device, requires_grad=True) for _ in range(3))

    def run() -> None:
        with torch.enable_grad():
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        torch.autograd.grad(out, (q, k, v), torch.ones_like(out))

    return (2 + 5) * 2 * heads * seq * seq * dim / clock(run)  # products of the forward and of the backward pass


def _overhead(clock: _Clock, device: torch.device) -> float:
    """The mean of a few kinds of op on tensors of next to no size."""
    aten = torch.ops.aten
    a = torch.ones(8, 8, device=device)
    many = 20

    def run() -> None:
        for _ in range(many):
            aten.add.Tensor(a, a)
            aten.mm.default(a, a)
            aten.t.default(a)
            aten.sum.dim_IntList(a, [0])
            aten.mul.Tensor(a, a)

    return clock(run) / (5 * many)


def _stream(clock: _Clock, nbytes: int, device: torch.device, overhead: float) -> float:
    """Bytes a second of an addition whose three tensors have ``nbytes`` together."""
    a, b = (torch.ones(nbytes // 12, device=device) for _ in range(2))
    return nbytes / max(clock(lambda: torch.ops.aten.add.Tensor(a, b)) - overhead, 1e-9)


def _link(group: dist.ProcessGroup, n: int, device: torch.device, seconds: float) -> Link:
    """A line through the times of a small and a large all-reduce, and how much dearer than a ring the other kinds are."""
    small, large = (_collective("all_reduce", group, n, nbytes, device, seconds) for nbytes in WIRE)
    share = (n - 1) / n
    bandwidth = 2 * share * (WIRE[1] - WIRE[0]) / max(large - small, 1e-9)
    factors = {}
    rings = {"all_gather": share, "reduce_scatter": share, "all_to_all": share / n}
    for kind, ring in rings.items():
        took = _collective(kind, group, n, WIRE[1], device, seconds)
        factors[kind] = max(took - small, 1e-9) / (ring * WIRE[1] / bandwidth)
    return Link(small, bandwidth, factors)


def _collective(kind: str, group: dist.ProcessGroup, n: int, nbytes: int, device: torch.device, seconds: float) -> float:
    """Seconds of one collective of ``nbytes`` on the larger side; ranks agree on the median, and on how often they try."""
    whole = torch.ones(nbytes // 4, device=device)
    part = torch.ones(nbytes // 4 // n, device=device)
    c10d, name = torch.ops._c10d_functional, group.group_name

    def run() -> None:
        match kind:
            case "all_reduce":
                out = c10d.all_reduce.default(whole, "sum", name)
            case "all_gather":
                out = c10d.all_gather_into_tensor.default(part, n, name)
            case "reduce_scatter":
                out = c10d.reduce_scatter_tensor.default(whole, "sum", n, name)
            case _:
                split = [part.numel()] * n
                out = c10d.all_to_all_single.default(whole[: part.numel() * n].contiguous(), split, split, name)
        c10d.wait_tensor.default(out)
        if device.type == "cuda":
            torch.cuda.synchronize()

    times = []
    for _ in range(max(5, min(100, int(seconds / 1e-3)))):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    agreed = torch.tensor([statistics.median(times)], device=device)
    dist.all_reduce(agreed, group=group)
    return float(agreed) / n
