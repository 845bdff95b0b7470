"""Seconds for an op or a collective: latency plus work over rate."""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any

import torch

from ftp.dataclass import dataclass
from ftp.ops.windows import Exchange
from ftp.rules.call import Meta
from ftp.rules.op_kinds import STACKS, VIEWS, is_matmul, multiplications
from ftp.rules.rule import BoundRule

Curve = tuple[tuple[float, float], ...]
"""Measured points, the first numbers rising and positive."""


def on_curve(curve: Curve, x: float) -> float:
    """The curve at ``x``: straight between points where x is on a logarithmic scale, flat beyond
    the outermost.

    >>> on_curve(((1, 0.0), (100, 2.0)), 10), on_curve(((1, 0.0), (100, 2.0)), 1e6)
    (1.0, 2.0)
    """
    at = bisect_left(curve, x, key=lambda point: point[0])
    if at in (0, len(curve)):
        return curve[min(at, len(curve) - 1)][1]
    (x0, y0), (x1, y1) = curve[at - 1], curve[at]
    return y0 + (y1 - y0) * math.log(x / x0) / math.log(x1 / x0)


HOPPER_RATES = {  # dense, in FLOP/s
    torch.bfloat16: 989e12,
    torch.float16: 989e12,
    torch.float32: 67e12,
    torch.float64: 67e12,
    **dict.fromkeys((torch.float8_e4m3fn, torch.float8_e5m2, torch.int8), 1979e12),
}


@dataclass(frozen=True)
class Link:
    """The connection between the ranks of a mesh axis.

    Attributes:
        latency: seconds that a collective costs however small it is.
        bandwidth: bytes a second that a rank sends.
        factors: a backend's time for a collective relative to a ring's, where it uses no ring:
            ``{"reduce_scatter": 2.0}``.
        measured: measured times by kind of collective: pairs of (seconds that the ranks computed
            since their last collective, curve of seconds over bytes of the whole tensor). Ranks
            that have computed arrive at different times, and the thread that sends waits for a
            core.
        hidden: the share of a collective's time in which the ranks can compute.
        shared: whether the ranks of a host share one port to other hosts, as CPUs do; GPUs have one
            each.

    >>> Link(latency=2e-6, bandwidth=450e9).bandwidth
    450000000000.0
    """

    latency: float = 1e-5
    bandwidth: float = 1e11
    factors: Mapping[str, float] = field(default_factory=dict, hash=False)
    measured: Mapping[str, tuple[tuple[float, Curve], ...]] = field(
        default_factory=dict, hash=False
    )
    hidden: float = 1.0
    shared: bool = False


@dataclass(frozen=True)
class Hardware:
    """Rates of one device and its links; the defaults are of the order of an 8-GPU H100 node
    (datasheet, bf16 dense and HBM3).

    Attributes:
        flops: floating-point operations a second of dtypes that ``rates`` does not list.
        memory: bytes a second to and from device memory.
        link: the link of an axis that ``links`` does not name.
        links: per mesh axis; a step refuses one that its mesh does not have.
        rates: floating-point operations a second of matmuls, per dtype.
        cache: bytes a second of an op whose tensors fit in ``cache_size`` bytes; 0 if unknown.
        overhead: seconds that issuing an op costs, however small it is.
        attention: share of the matmuls' rate that fused attention reaches.
        hides_overhead: whether ops are issued ahead while the device computes, as on a GPU, so that
            an op costs the larger of ``overhead`` and its work instead of their sum.
        name: for reports.
        fresh: curve of bytes a second over a result's bytes: the rate at which a CPU provides new
            memory for it (from main memory, or page by page from the system), in addition to
            writing it. Empty: no cost.
        cold: curve of seconds over the bytes of a matmul's tensors, which fill the caches: the
            cost to issue the next op, in addition to ``overhead``.
        elements: elements a second of ops that are limited by arithmetic, by name (``exp``), and of
            any op on tensors that are not dense (``strided``).
        convolution: share of the matmuls' rate that convolutions reach.
        ring_step: seconds that each step of a ring adds to its work: an op in parts starts
            more kernels, and merges their results.
        network: link between hosts, for axes that leave a host and that ``links`` does not name.
        capacity: bytes of a device's memory, in which gathered keys and values must fit; 0 if
            unknown.

    >>> hardware = Hardware(flops=1e12, links={"dp": Link(bandwidth=1e9)})
    >>> hardware.link_of(["tp", "dp"]).bandwidth
    1000000000.0
    """

    flops: float = 5e14
    memory: float = 2.5e12
    link: Link = Link()
    links: Mapping[str, Link] = field(default_factory=dict, hash=False)
    rates: Mapping[torch.dtype, float] = field(default_factory=dict, hash=False)
    cache: float = 0.0
    cache_size: int = 0
    overhead: float = 0.0
    hides_overhead: bool = False
    name: str = "default"
    attention: float = 1.0
    fresh: Curve = ()
    cold: Curve = ()
    elements: Mapping[str, float] = field(default_factory=dict, hash=False)
    convolution: float = 1.0
    network: Link = Link(2e-5, 5e10)
    ring_step: float = 5e-5
    capacity: float = 8e10

    def link_of(self, axes: Sequence[str]) -> Link:
        """The slowest of the axes' links."""
        return min(
            (self.links.get(axis, self.link) for axis in axes),
            key=lambda link: link.bandwidth,
            default=self.link,
        )

    def flops_of(self, dtype: torch.dtype) -> float:
        """Floating-point operations a second of matmuls in ``dtype``."""
        return self.rates.get(dtype, self.flops)

    def matmul(self, computing: float, moving: float) -> float:
        """Seconds of an op that computes matmuls from its arithmetic's and its memory traffic's: on
        a CPU it first packs its operands.
        """
        return max(computing, moving) if self.hides_overhead else computing + moving

    def issued(self, seconds: float) -> float:
        """Seconds of an op whose work takes ``seconds``, with what it costs to issue it."""
        return max(seconds, self.overhead) if self.hides_overhead else seconds + self.overhead

    @classmethod
    def h100(cls, links: Mapping[str, Link] | None = None) -> "Hardware":
        """H100 SXM, 8 in a node. Source: NVIDIA H100 datasheet (dense rates: half of those with
        sparsity), 3.35 TB/s HBM3, NVLink 900 GB/s in both directions together, one port of 400
        Gb/s to other hosts.

        >>> Hardware.h100().flops_of(torch.bfloat16)
        989000000000000.0
        """
        return cls._node("H100", 989e12, HOPPER_RATES, 3.35e12, 450e9, 80e9, links)

    @classmethod
    def h200(cls, links: Mapping[str, Link] | None = None) -> "Hardware":
        """H200 SXM: an H100's rates and links with 4.8 TB/s HBM3e. Source: NVIDIA H200
        datasheet.
        """
        return cls._node("H200", 989e12, HOPPER_RATES, 4.8e12, 450e9, 141e9, links)

    @classmethod
    def b200(cls, links: Mapping[str, Link] | None = None) -> "Hardware":
        """B200 SXM: dense bf16 2.25 PFLOP/s, float8 4.5, 8 TB/s HBM3e, NVLink 5 with 1.8 TB/s in
        both directions together, one port of 400 Gb/s to other hosts. Source: NVIDIA DGX B200
        datasheet and Blackwell architecture brief, per GPU.
        """
        rates = {
            torch.bfloat16: 2250e12,
            torch.float16: 2250e12,
            torch.float32: 75e12,
            torch.float64: 37e12,
            **dict.fromkeys((torch.float8_e4m3fn, torch.float8_e5m2, torch.int8), 4500e12),
        }
        return cls._node("B200", 2250e12, rates, 8e12, 900e9, 180e9, links)

    @classmethod
    def cpu(cls, links: Mapping[str, Link] | None = None) -> "Hardware":
        """One core of a current server with gloo between processes of one host;
        ``ftp.calibrate()`` measures the real one.
        """
        gloo = Link(latency=1e-4, bandwidth=1.5e9, factors={"reduce_scatter": 2.0})
        return cls(
            1e11,
            1.2e10,
            gloo,
            dict(links or {}),
            {torch.float64: 5e10},
            cache=4e10,
            cache_size=1 << 20,
            overhead=4e-6,
            name="CPU core",
            network=Link(2e-4, 1e9, factors={"reduce_scatter": 2.0}, shared=True),
            capacity=0.0,
        )

    @classmethod
    def _node(
        cls,
        name: str,
        flops: float,
        rates: Mapping[torch.dtype, float],
        memory: float,
        bandwidth: float,
        capacity: float,
        links: Mapping[str, Link] | None,
    ) -> "Hardware":
        return cls(
            flops,
            memory,
            Link(1e-5, bandwidth),
            dict(links or {}),
            rates,
            overhead=4e-6,
            hides_overhead=True,
            name=name,
            capacity=capacity,
        )


DEFAULT = Hardware()


def exchange_seconds(exchange: Exchange, each: float, link: Link) -> float:
    """Seconds to send what other ranks' windows have of a rank's elements, of ``each`` bytes."""
    if not exchange.most:
        return 0.0
    seconds = collective_seconds("halo_exchange", exchange.most * each, exchange.n, link)
    return seconds + (len(exchange.places) - 1) * link.latency


def collective_seconds(op: str, nbytes: float, n: int, link: Link) -> float:
    """Seconds for collective ``op`` over ``n`` ranks, as a ring.

    Args:
        nbytes: bytes of the whole tensor: the reduced tensor, the gathered result, or all shards
            together (also of an all-to-all); for a ring or an exchange
            of halos, the bytes that one rank sends.

    >>> collective_seconds("all_gather", 8, 2, Link(latency=0.0, bandwidth=4.0))
    1.0

    Source: Thakur, Rabenseifner and Gropp (2005), sections 4.1 to 4.5.
    """
    share = (n - 1) / n
    factor = {
        "all_reduce": 2 * share,
        "all_gather": share,
        "reduce_scatter": share,
        "all_to_all": share / n,
        "ring": 1.0,
        "halo_exchange": 1.0,
    }.get(op)
    if factor is None:
        return 0.0
    return link.latency + link.factors.get(op, 1.0) * factor * nbytes / link.bandwidth


def measured_seconds(op: str, nbytes: float, n: int, link: Link, computed: float = 0.0) -> float:
    """As `collective_seconds`, interpolated from measurements of the link if there are any.

    Args:
        nbytes: of a rank's buffer on the larger side, as in a record (`lowered.collectives`). In an
            all-to-all all ranks together send ``n`` times as much.
        computed: seconds that the ranks have computed since they last waited for one another.

    >>> alone, beside = ((1e3, 1e-4), (1e6, 1e-3)), ((1e3, 1e-3), (1e6, 2e-3))
    >>> link = Link(measured={"all_reduce": ((1e-4, alone), (1e-2, beside))})
    >>> [round(measured_seconds("all_reduce", 1e6, 2, link, c), 9) for c in (0.0, 1e-3, 1.0)]
    [0.001, 0.0015, 0.002]
    """
    if op not in link.measured:
        return collective_seconds(op, nbytes * n if op == "all_to_all" else nbytes, n, link)
    return on_curve(
        tuple((after, _through(curve, nbytes)) for after, curve in link.measured[op]), computed
    )


def _through(points: Curve, x: float) -> float:
    """Interpolate linearly between the points: constant before the first, and beyond the last along
    the last line.
    """
    at = min(max(1, bisect_left(points, x, key=lambda point: point[0])), len(points) - 1)
    (x0, y0), (x1, y1) = points[at - 1], points[at]
    return y0 + max(0.0, x - x0) * (y1 - y0) / (x1 - x0)


def op_seconds(
    target: Any,
    rule: BoundRule,
    sizes: dict[str, int],
    results: tuple[Meta, ...],
    hardware: Hardware,
) -> float:
    """Seconds of one op on tensors of the given factor sizes; the larger of its arithmetic and
    its memory traffic.
    """
    if target in VIEWS or target in STACKS:
        return 0.0
    elements = sum(math.prod(sizes[f] for dim in dims for f in dim) for dims in rule.dims)
    seconds = elements * results[0].dtype.itemsize / hardware.memory if results else 0.0
    if is_matmul(target):
        operations = 2 * multiplications(target, sizes, [len(dims) > 0 for dims in rule.results])
        seconds = max(seconds, operations / hardware.flops)
    return seconds
