"""All-to-all of rows whose counts are values.

There are two ops: ``exchange_rows`` stands for the exchange in a trace, with its gradient and its
vmap rule; ``all_to_all_rows`` runs it in a rank's graph. Both take the counts of all ranks, so that
every rank can check all of them: rank i sends ``counts[i, j]`` rows to rank j. Counts of groups,
``counts[i, j, g]``, are for group g of rank j, such as one of its experts: rows are sent sorted by
rank, then by group, and arrive sorted by group, then by rank.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ftp.errors import InputError
from ftp.ops.define import define, register_fake
from ftp.ops.linear import TRANSPOSES
from ftp.torch_internals.process_groups import resolve_process_group

Counts = list[list[int]]
EXCHANGE_ROWS = define(
    "exchange_rows(Tensor x, Tensor counts, str axis, int n, SymInt bound, bool back) -> Tensor"
)
# ``fits``: the tensor that receives rows, or sends them back, has exactly these rows rather than
# room for ``bound``. ``source`` is the user's line, for errors.
ALL_TO_ALL_ROWS = define(
    "all_to_all_rows"
    "(Tensor x, Tensor counts, SymInt bound, bool back, bool fits, str source, str group) -> Tensor"
)
# The same for an axis of one rank.
FIRST_ROWS = define(
    "first_rows(Tensor x, Tensor counts, SymInt bound, bool back, str source) -> Tensor"
)


# While a program is traced.


@torch.library.impl("ftp::exchange_rows", "CompositeExplicitAutograd")
def _exchanged_shape(
    x: Tensor, counts: Tensor, axis: str, n: int, bound: int, back: bool
) -> Tensor:
    return x.new_empty([bound, *x.shape[1:]])


def _batched(info: Any, in_dims: tuple[Any, ...], x: Tensor, counts: Tensor, *rest: Any) -> Any:
    of_x, of_counts = in_dims[:2]
    if of_counts is None:  # the rows of all batch members are sent together
        return EXCHANGE_ROWS(x.movedim(of_x, 1), counts, *rest), 1
    xs = [x] * info.batch_size if of_x is None else x.unbind(of_x)
    made = [EXCHANGE_ROWS(a, c, *rest) for a, c in zip(xs, counts.unbind(of_counts), strict=True)]
    return torch.stack(made), 0


torch.library.register_vmap("ftp::exchange_rows", _batched)


# The gradient is the exchange in the opposite direction.
TRANSPOSES[EXCHANGE_ROWS] = lambda shape, counts, axis, n, bound, back: (
    EXCHANGE_ROWS, counts, axis, n, shape[0], not back,
)  # fmt: skip


# In a rank's graph.


@register_fake("ftp::all_to_all_rows")
@register_fake("ftp::first_rows")
def _received_shape(x: Tensor, counts: Tensor, bound: int, *_: Any) -> Tensor:
    return x.new_empty([bound, *x.shape[1:]])


@torch.library.impl("ftp::all_to_all_rows", ("cpu", "cuda"))
def _all_to_all_rows(
    x: Tensor, counts: Tensor, bound: int, back: bool, fits: bool, source: str, group: Any
) -> Tensor:
    sizes = checked_counts(counts, x.shape[0], bound, back, source, fits)
    over = resolve_process_group(group)
    mine = over.rank()
    sent, received = sizes[mine], [row[mine] for row in sizes]
    rows, count = x[: sum(sent)], sum(received)
    groups = counts[:, mine].tolist() if counts.ndim == 3 else []
    if back and groups:
        rows = by_rank(rows, groups)
    out = x.new_empty([count if fits and not back else bound, *x.shape[1:]])
    out[count:].zero_()
    sorts = bool(groups) and not back
    into = x.new_empty([count, *x.shape[1:]]) if sorts else out[:count]
    dist.all_to_all_single(as_bytes(into), as_bytes(rows.contiguous()), received, sent, group=over)
    if sorts:
        by_group(into, groups, out[:count])
    return out


def by_group(rows: Tensor, groups: Counts, out: Tensor | None = None) -> Tensor:
    """Rows that arrived sorted by rank, then by group, sorted by group, then by rank.

    Args:
        groups: ``groups[i][g]`` rows of group g came from rank i.

    >>> by_group(torch.tensor([0, 1, 2, 3, 4]), [[1, 2], [2, 0]])
    tensor([0, 3, 4, 1, 2])
    """
    parts = rows.split([count for row in groups for count in row])
    n, g = len(groups), len(groups[0])
    return torch.cat([parts[i * g + at] for at in range(g) for i in range(n)], out=out)


def by_rank(rows: Tensor, groups: Counts) -> Tensor:
    """The inverse of ``by_group``.

    >>> by_rank(torch.tensor([0, 3, 4, 1, 2]), [[1, 2], [2, 0]])
    tensor([0, 1, 2, 3, 4])
    """
    parts = rows.split([count for column in zip(*groups, strict=True) for count in column])
    n, g = len(groups), len(groups[0])
    return torch.cat([parts[at * n + i] for i in range(n) for at in range(g)])


@torch.library.impl("ftp::first_rows", ("cpu", "cuda"))
def _first_rows(x: Tensor, counts: Tensor, bound: int, back: bool, source: str) -> Tensor:
    ((count,),) = checked_counts(counts, x.shape[0], bound, back, source)
    out = x.new_zeros([bound, *x.shape[1:]])
    out[:count] = x[:count]
    return out


def exchanged(calls: Sequence[tuple[Any, ...]]) -> list[Tensor]:
    """The result on each rank of a group, from the arguments of ``all_to_all_rows`` on each."""
    x, counts, bound, back, fits, source, _ = calls[0]
    sizes = checked_counts(counts, x.shape[0], bound, back, source, fits)
    held = [call[0][: sum(sent)] for call, sent in zip(calls, sizes, strict=True)]
    groups = counts.transpose(0, 1).tolist() if counts.ndim == 3 else None
    if groups and back:
        held = [by_rank(rows, of) for rows, of in zip(held, groups, strict=True)]
    parts = [rows.split(sent) for rows, sent in zip(held, sizes, strict=True)]
    found = []
    for rank in range(len(calls)):
        rows = torch.cat([p[rank] for p in parts])
        if groups and not back:
            rows = by_group(rows, groups[rank])
        if back or not fits:
            rows = torch.cat([rows, rows.new_zeros([bound - len(rows), *x.shape[1:]])])
        found.append(rows)
    return found


def checked_counts(
    counts: Tensor, rows: int, bound: int, back: bool, source: str, fits: bool = False
) -> Counts:
    """The number of rows from each rank to each rank, checked.

    Raises:
        InputError: on all ranks, as all see all counts: a rank sends more rows than its tensor has,
            or receives more than ``bound``; a negative count.
    """
    totals = counts.sum(2) if counts.ndim == 3 else counts
    sizes: Counts = (totals.mT if back else totals).tolist()
    at = f"{source}: " if source else ""
    for rank, sent in enumerate(sizes):
        if min(sent) < 0 or (sum(sent) > rows and not (fits and back)):
            raise InputError(
                f"{at}ftp.axis.all_to_all: rank {rank} of the axis has send_counts {sent}, but"
                f" its tensor has {rows} rows. No row was sent."
            )
    for rank in range(len(sizes)):
        received = sum(sent[rank] for sent in sizes)
        if received > bound:
            raise InputError(
                f"{at}ftp.axis.all_to_all: rank {rank} of the axis would receive {received} rows,"
                f" more than bound={bound}. No row was sent. Give bound={received} or more; with"
                f" bound=None it is the rows of all ranks, {len(sizes) * rows}."
            )
    return sizes


def as_bytes(x: Tensor) -> Tensor:
    """``x``, contiguous, as rows of bytes."""
    rows = x.shape[0]
    width = x.numel() // rows if rows else 0
    return (
        x.reshape(rows, width).view(torch.uint8)
        if width
        else x.new_empty((rows, 0), dtype=torch.uint8)
    )
