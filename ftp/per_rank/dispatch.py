"""Send rows to the ranks that own their experts, and results back: one rank's code."""

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ftp.axis import all_gather, axis_index
from ftp.dataclass import dataclass
from ftp.ops.exchange_rows import EXCHANGE_ROWS
from ftp.ops.fill_up import filled_up
from ftp.ops.linear import linear
from ftp.per_rank.local import local
from ftp.sharding.mesh import Mesh
from ftp.sharding.spec import P

Experts = Callable[[Tensor, Tensor, Sequence[Tensor]], Tensor]


def dispatch(
    experts: Experts,
    mesh: Mesh,
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    parameters: Sequence[Tensor],
    *,
    axis: str,
    token_axes: Sequence[str],
    capacity: float | None = None,
) -> Tensor:
    """The weighted sum of the results of each token's experts. Tokens are sent to the ranks of
    ``axis`` that own their experts, and results back; no parameters are sent.

    Args:
        experts: takes rows (rows, dim), each row's expert among those that the rank owns (one more
            than the last for rows without a token), and the rank's part of ``parameters``; returns
            the result of each row.
        x: (tokens, dim).
        chosen, weights: (tokens, k), each token's experts and the weights of their results.
        parameters: each with the experts as dim 0.
        token_axes: the mesh axes that shard the tokens, ``axis`` among them.
        capacity: the rows that a rank has room for, as a multiple of those of an equal load. More
            rows raise an InputError on all ranks before any row is sent. Default: room for all.
    """
    count = parameters[0].shape[0]
    n, shards = mesh.axes[axis], math.prod(mesh.axes[a] for a in token_axes)
    # Padding tokens of the last shard are spread over all experts; their results are dropped.
    tokens, missing = x.shape[0], -x.shape[0] % shards
    if missing:
        filled = torch.arange(missing * chosen.shape[1], device=x.device) % count
        chosen = torch.cat([chosen, filled.to(chosen.dtype).view(missing, -1)])
        x, weights = F.pad(x, (0, 0, 0, missing)), F.pad(weights, (0, 0, 0, missing))
    rows = P(tuple(token_axes))
    of_rank = local(
        partial(_of_rank, experts, axis=axis, n=n, count=count, capacity=capacity),
        mesh,
        (rows, rows, rows, P(axis)),
        rows,
        axes=token_axes,
    )
    parts = [filled_up(p, axis, n) for p in parameters]
    return of_rank(x, chosen, weights, parts)[:tokens]


def _of_rank(
    experts: Experts,
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    parameters: Sequence[Tensor],
    axis: str,
    n: int,
    count: int,
    capacity: float | None,
) -> Tensor:
    """``dispatch`` on one of ``n`` ranks, with ``count`` experts in all."""
    k = chosen.shape[1]
    slots = chosen.reshape(-1).to(torch.int64)
    order = slots.argsort(stable=True)  # by expert, so by the rank that owns it
    of_expert = torch.zeros(count, dtype=torch.int64, device=x.device)
    of_expert = of_expert.scatter_add(0, slots, torch.ones_like(slots))
    route = route_of(of_expert, slots.shape[0], axis, n, capacity)
    made = experts(route.send(x[order // k]), route.own, parameters)
    back = route.bring_back(made) * weights.reshape(-1)[order][:, None]
    return back[order.argsort()].view(-1, k, back.shape[1]).sum(1)


@dataclass(frozen=True)
class Route:
    """Which of a rank's rows, sorted by expert, go to which rank of ``axis``.

    Attributes:
        rows: number of this rank's rows; rows without an expert are not sent, and come back as
            zeros.
        bound: number of rows that there is room for.
        counts: (ranks, ranks, own experts), the rows from each rank to each expert of each rank.
            Rows arrive sorted by expert, then by rank.
        ends: (own experts,), int32, the end of each expert's rows among those that arrive.
    """

    axis: str
    rows: int
    bound: int
    counts: Tensor
    ends: Tensor

    @property
    def own(self) -> Tensor:
        """Each arrived row's expert, counted from the rank's first; for rows without a token one
        more than the rank's last.
        """
        at = torch.arange(self.bound, dtype=torch.int32, device=self.ends.device)
        return torch.searchsorted(self.ends, at, right=True)

    def send(self, x: Tensor) -> Tensor:
        return self._exchanged(x, self.bound, False)

    def bring_back(self, made: Tensor) -> Tensor:
        return self._exchanged(made, self.rows, True)

    def _exchanged(self, x: Tensor, bound: int, back: bool) -> Tensor:
        n = self.counts.shape[0]
        return linear(x, EXCHANGE_ROWS, self.counts, self.axis, n, bound, back)


def route_of(of_expert: Tensor, rows: int, axis: str, n: int, capacity: float | None) -> Route:
    """The route of ``rows`` rows, of which ``of_expert`` (experts,) are for each expert. Ranks
    exchange the counts here. If ``n`` does not divide the experts, the last ranks own fewer, or
    none, like ``torch.chunk``; in the route all own equal numbers, and missing experts get no rows.
    """
    of_expert = F.pad(of_expert, (0, -of_expert.shape[0] % n))
    bound = n * rows if capacity is None else min(n * rows, _room(capacity, rows))
    counts = all_gather(of_expert.view(1, n, -1), axis)
    arrived = counts.index_select(1, axis_index(axis)[None])
    ends = arrived.sum((0, 1)).cumsum(0).to(torch.int32)
    return Route(axis, rows, bound, counts, ends)


def _room(capacity: float, rows: int) -> int:
    """``ceil(capacity * rows)``, for a short fraction such as 1.5 by integers: of a dynamic number
    of rows it is a formula.
    """
    exact = Fraction(capacity)
    if exact.denominator > _SHORT:
        return math.ceil(capacity * rows)
    return -(-exact.numerator * rows // exact.denominator)


_SHORT = 1024  # the product is exact in floats too
