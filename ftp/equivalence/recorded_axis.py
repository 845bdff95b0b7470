"""Record the collectives of ``ftp.axis`` as exchanges of tensors between the ranks of an axis."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ftp.equivalence.recorded_call import RecordedCall
from ftp.ops.axis_collectives import OPS


def _axis_exchange(
    call: RecordedCall,
    axis: str,
    kind: str,
    sent: Sequence[Tensor],
    into: Sequence[Tensor],
    option: str = "",
) -> None:
    ranks, group = call.of.group(call.of.mesh.get_group(axis))
    call.wait(call.issue(kind, sent, into, ranks, group, option))


def _axis_all_reduce(call: RecordedCall, x: Tensor, op: str, axis: str) -> Tensor:
    out = call.fresh(x)
    _axis_exchange(call, axis, "all_reduce", [x], [out], op)
    return out


def _axis_all_gather(call: RecordedCall, x: Tensor, axis: str, n: int, dim: int) -> Tensor:
    parts = [call.fresh(x) for _ in range(n)]
    _axis_exchange(call, axis, "all_gather", [x], parts)
    return torch.cat(parts, dim)


def _axis_reduce_scatter(call: RecordedCall, x: Tensor, axis: str, n: int, dim: int) -> Tensor:
    sent = x.chunk(n, dim)
    out = call.fresh(sent[0])
    _axis_exchange(call, axis, "reduce_scatter", sent, [out], "sum")
    return out


def _axis_all_to_all(
    call: RecordedCall, x: Tensor, axis: str, n: int, split: int, concat: int
) -> Tensor:
    sent = x.chunk(n, split)
    parts = [call.fresh(sent[0]) for _ in range(n)]
    _axis_exchange(call, axis, "all_to_all", sent, parts)
    return torch.cat(parts, concat)


def _axis_permute(call: RecordedCall, x: Tensor, axis: str, n: int, perm: Sequence[int]) -> Tensor:
    me = call.of.mesh.get_local_rank(axis)
    to = dict(zip(perm[::2], perm[1::2], strict=True))
    out = torch.zeros_like(x)
    parts = [call.fresh(x) for _ in range(n)]
    sent = [x if to.get(me) == t else torch.zeros_like(x) for t in range(n)]
    _axis_exchange(call, axis, "all_to_all", sent, parts)
    for part in parts:
        out = out + part
    return out


def _axis_own_part(call: RecordedCall, x: Tensor, axis: str, n: int, dim: int) -> Tensor:
    return x.chunk(n, dim)[call.of.mesh.get_local_rank(axis)].clone()


def _axis_contribute(call: RecordedCall, x: Tensor, axis: str) -> Tensor:
    return x.clone() if call.of.mesh.get_local_rank(axis) == 0 else torch.zeros_like(x)


def _axis_exchange_rows(
    call: RecordedCall, x: Tensor, counts: Tensor, axis: str, n: int, bound: int, back: bool
) -> Tensor:
    """An exchange of rows whose counts are values. Each part has room for all rows, as a proof has
    no values.
    """
    me = call.of.mesh.get_local_rank(axis)
    if counts.ndim == 3:
        return _by_groups(call, x, counts, axis, n, bound, back, me)
    sizes = counts.t() if back else counts
    ends = sizes[me].cumsum(0)
    at = torch.arange(x.shape[0], device=x.device)
    sent = []
    for to in range(n):
        place = (at + (ends[to] - sizes[me, to])).clamp(max=max(x.shape[0] - 1, 0))
        sent.append(_held(at < sizes[me, to], x.index_select(0, place)))
    parts = [call.fresh(x) for _ in range(n)]
    _axis_exchange(call, axis, "all_to_all", sent, parts)
    arrived = sizes[:, me].cumsum(0)
    at = torch.arange(bound, device=x.device)
    out = x.new_zeros([bound, *x.shape[1:]])
    for source, part in enumerate(parts):
        place = at - (arrived[source] - sizes[source, me])
        has = (place >= 0) & (at < arrived[source])
        out = out + _held(has, part.index_select(0, place.clamp(0, max(x.shape[0] - 1, 0))))
    return out


def _by_groups(
    call: RecordedCall,
    x: Tensor,
    counts: Tensor,
    axis: str,
    n: int,
    bound: int,
    back: bool,
    me: int,
) -> Tensor:
    """Rows that arrive sorted by rank, then by group, are sorted by group."""
    of_pairs, groups = counts.sum(2), counts.shape[2]
    at = torch.arange(x.shape[0] if back else bound, device=x.device)
    place = torch.searchsorted(counts[:, me].reshape(-1).cumsum(0), at, right=True)
    own = torch.where(place < n * groups, place % groups, groups)
    order = own.argsort(stable=True)
    if back:
        x = x.index_select(0, order.argsort())
    made = _axis_exchange_rows(call, x, of_pairs, axis, n, bound, back)
    return made if back else made.index_select(0, order)


def _held(has: Tensor, rows: Tensor) -> Tensor:
    return torch.where(has.view(-1, *(1,) * (rows.ndim - 1)), rows, torch.zeros_like(rows))


AXIS = {
    OPS.exchange_rows.default: _axis_exchange_rows,
    OPS.all_reduce.default: _axis_all_reduce,
    OPS.all_gather.default: _axis_all_gather,
    OPS.reduce_scatter.default: _axis_reduce_scatter,
    OPS.all_to_all.default: _axis_all_to_all,
    OPS.ppermute.default: _axis_permute,
    OPS.own_part.default: _axis_own_part,
    OPS.contribute.default: _axis_contribute,
}
