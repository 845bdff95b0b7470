"""Seconds for an op or a collective: latency plus work over rate."""

import math
from dataclasses import dataclass
from typing import Any

import torch

from ftp.registry import BoundRule, Meta

aten = torch.ops.aten


@dataclass(frozen=True)
class Link:
    """What connects the ranks of a mesh axis.

    Attributes:
        latency: seconds that a collective costs however small it is.
        bandwidth: bytes a second that a rank sends.
    """

    latency: float = 1e-5
    bandwidth: float = 1e11


@dataclass(frozen=True)
class Hardware:
    """Rates of one device and its links; the defaults are of the order of an 8-GPU H100 node (datasheet, bf16 dense and HBM3).

    Attributes:
        flops: floating-point operations a second.
        memory: bytes a second to and from device memory.
    """

    flops: float = 5e14
    memory: float = 2.5e12
    link: Link = Link()


DEFAULT = Hardware()


def collective_seconds(op: str, nbytes: float, n: int, link: Link) -> float:
    """Seconds for collective ``op`` over ``n`` ranks, as a ring.

    Args:
        nbytes: bytes of the whole tensor: what is reduced, the gathered result, all the shards together.

    >>> collective_seconds("all_gather", 8, 2, Link(latency=0.0, bandwidth=4.0))
    1.0

    Source: Thakur, Rabenseifner and Gropp (2005), sections 4.1 to 4.5.
    """
    share = (n - 1) / n
    factor = {"all_reduce": 2 * share, "all_gather": share, "reduce_scatter": share, "all_to_all": share / n}.get(op)
    return 0.0 if factor is None else link.latency + factor * nbytes / link.bandwidth


VIEWS = frozenset(
    {
        aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.t.default, aten.transpose.int, aten.permute.default,
        aten.expand.default, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default, aten.slice.Tensor,
        aten.select.int, aten.alias.default, aten.detach.default, aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int,
    }
)  # fmt: skip
PRODUCTS = frozenset(
    {aten.mm.default, aten.bmm.default, aten.convolution.default, aten.convolution_backward.default, aten.mv.default, aten.dot.default}
)


def is_product(target: Any) -> bool:
    return target in PRODUCTS or "scaled_dot_product" in str(target)


def op_seconds(target: Any, rule: BoundRule, sizes: dict[str, int], results: tuple[Meta, ...], hardware: Hardware) -> float:
    """Seconds of one op on tensors of the given factor sizes; the larger of its arithmetic and its memory traffic."""
    if target in VIEWS:
        return 0.0
    elements = sum(math.prod(sizes[f] for dim in dims for f in dim) for dims in (*rule.operands, *rule.results))
    seconds = elements * results[0].dtype.itemsize / hardware.memory if results else 0.0
    if is_product(target):
        operations = 2 * math.prod(sizes.values()) * (2 if "scaled_dot_product" in str(target) else 1)
        seconds = max(seconds, operations / hardware.flops)
    return seconds
