"""Rows sent to the ranks that own their experts, and back to their tokens: one rank's code."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ftp.axis import all_gather, all_to_all
from ftp.errors import SpecError
from ftp.ops.exchange_rows import ExchangeRows
from ftp.per_rank.local import local
from ftp.sharding.mesh import Mesh
from ftp.sharding.spec import P
from ftp.source import at_line

Experts = Callable[[Tensor, Tensor, Sequence[Tensor]], Tensor]


def travelling(
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
    """The weighted sum of what each token's experts make of it; tokens travel to the ranks of
    ``axis`` that own their experts, whose parameters stay.

    Args:
        experts: takes rows (rows, dim), each row's expert among those that the rank owns (one more
            than the last for rows that hold no token), and the rank's part of ``parameters``;
            returns the rows that they make.
        x: (tokens, dim).
        chosen, weights: (tokens, k), each token's experts and what their results are multiplied by.
        parameters: each with the experts as dim 0.
        token_axes: the mesh axes that cut the tokens, ``axis`` among them.
        capacity: the rows that a rank has room for, as a multiple of those of an equal load. More
            raise an InputError on all ranks before a row moves. Default room for all rows.
    """
    count = parameters[0].shape[0]
    n, shards = mesh.axes[axis], math.prod(mesh.axes[a] for a in token_axes)
    if count % n:
        raise SpecError(
            f"{at_line()}{count} experts are cut over axis {axis!r} of size {n}, which does not"
            " divide them. Take an axis whose size does, or leave the experts whole."
        )
    # Tokens that fill up the last shard go to all experts alike, and their results are dropped.
    tokens, missing = x.shape[0], -x.shape[0] % shards
    if missing:
        filled = torch.arange(missing * chosen.shape[1], device=x.device) % count
        chosen = torch.cat([chosen, filled.to(chosen.dtype).view(missing, -1)])
        x, weights = F.pad(x, (0, 0, 0, missing)), F.pad(weights, (0, 0, 0, missing))
    rows = P(tuple(token_axes))
    of_rank = local(
        lambda x, chosen, weights, parameters: _of_rank(
            experts, x, chosen, weights, parameters, axis, n, count, capacity
        ),
        mesh,
        (rows, rows, rows, P(axis)),
        rows,
        axes=tuple(token_axes),
    )
    return of_rank(x, chosen, weights, list(parameters))[:tokens]


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
    k = chosen.shape[1]
    slots = chosen.reshape(-1).to(torch.int64)
    total = slots.shape[0]
    bound = n * total if capacity is None else min(n * total, math.ceil(capacity * total))
    order = slots.argsort(stable=True)  # by expert, so by the rank that owns it
    of_expert = torch.zeros(count, dtype=torch.int64, device=x.device)
    of_expert = of_expert.scatter_add(0, slots, torch.ones_like(slots))
    sent = all_gather(of_expert.view(n, -1).sum(1)[None], axis)
    arrived: Any = ExchangeRows.apply(x[order // k], sent, axis, n, bound, False)
    ends = all_to_all(of_expert, axis).cumsum(0)  # rows arrive by rank, then by expert
    at = torch.arange(bound, device=x.device)
    place = torch.searchsorted(ends, at, right=True)
    own = torch.where(place < count, place % (count // n), count // n)
    made = experts(arrived, own, parameters)
    back: Any = ExchangeRows.apply(made, sent, axis, n, total, True)
    back = back * weights.reshape(-1)[order][:, None]
    return back[order.argsort()].view(-1, k, back.shape[1]).sum(1)
