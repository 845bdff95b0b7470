"""All-to-all of rows whose part sizes are values.

Two ops: ``exchange_rows`` stands for the exchange while a program is traced, with its gradient and
its rule for vmap; ``all_to_all_rows`` runs it in a rank's graph. Both take the counts of all ranks:
``counts[i, j]`` rows travel from rank i to rank j, so that every rank can check every other's.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group

from ftp.errors import InputError

Counts = list[list[int]]
_TAGS = (torch.Tag.pt2_compliant_tag,)
torch.library.define(
    "ftp::exchange_rows",
    "(Tensor x, Tensor counts, str axis, int n, int bound, bool back) -> Tensor",
    tags=_TAGS,
)
# ``source`` is the user's line, for errors.
torch.library.define(
    "ftp::all_to_all_rows",
    "(Tensor x, Tensor counts, int bound, bool back, str source, str group) -> Tensor",
    tags=_TAGS,
)
# The same where a rank is alone on its axis.
torch.library.define(
    "ftp::first_rows",
    "(Tensor x, Tensor counts, int bound, bool back, str source) -> Tensor",
    tags=_TAGS,
)
EXCHANGE_ROWS = torch.ops.ftp.exchange_rows.default
ALL_TO_ALL_ROWS = torch.ops.ftp.all_to_all_rows.default
FIRST_ROWS = torch.ops.ftp.first_rows.default


# While a program is traced.


@torch.library.impl("ftp::exchange_rows", "CompositeExplicitAutograd")
def _exchanged_shape(
    x: Tensor, counts: Tensor, axis: str, n: int, bound: int, back: bool
) -> Tensor:
    return x.new_empty([bound, *x.shape[1:]])


def _batched(info: Any, in_dims: tuple[Any, ...], x: Tensor, counts: Tensor, *rest: Any) -> Any:
    of_x, of_counts = in_dims[:2]
    if of_counts is None:  # the rows of all batch members travel together
        return EXCHANGE_ROWS(x.movedim(of_x, 1), counts, *rest), 1
    xs = [x] * info.batch_size if of_x is None else x.unbind(of_x)
    made = [EXCHANGE_ROWS(a, c, *rest) for a, c in zip(xs, counts.unbind(of_counts), strict=True)]
    return torch.stack(made), 0


torch.library.register_vmap("ftp::exchange_rows", _batched)


class ExchangeRows(torch.autograd.Function):
    """The exchange with its gradient, which goes back the same way."""

    generate_vmap_rule = True

    @staticmethod
    def forward(  # type: ignore[override]
        x: Tensor, counts: Tensor, axis: str, n: int, bound: int, back: bool
    ) -> Tensor:
        return EXCHANGE_ROWS(x, counts, axis, n, bound, back)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, counts, *rest = inputs
        ctx.rest, ctx.rows = tuple(rest), x.shape[0]
        ctx.save_for_backward(counts)
        ctx.save_for_forward(counts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        (counts,) = ctx.saved_tensors
        axis, n, _, back = ctx.rest
        found = ExchangeRows.apply(grad, counts, axis, n, ctx.rows, not back)
        return found, None, None, None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Any:  # type: ignore[override]
        return ExchangeRows.apply(tangent, *ctx.saved_tensors, *ctx.rest)


# In a rank's graph.


@torch.library.register_fake("ftp::all_to_all_rows")
def _received_shape(
    x: Tensor, counts: Tensor, bound: int, back: bool, source: str, group: str
) -> Tensor:
    return x.new_empty([bound, *x.shape[1:]])


@torch.library.impl("ftp::all_to_all_rows", ("cpu", "cuda"))
def _all_to_all_rows(
    x: Tensor, counts: Tensor, bound: int, back: bool, source: str, group: Any
) -> Tensor:
    sizes = checked_counts(counts, x.shape[0], bound, back, source)
    over = _resolve_process_group(group)
    mine = over.rank()
    sent, received = sizes[mine], [row[mine] for row in sizes]
    out = x.new_empty([bound, *x.shape[1:]])
    out[sum(received) :].zero_()
    rows = as_bytes(x[: sum(sent)].contiguous())
    dist.all_to_all_single(as_bytes(out)[: sum(received)], rows, received, sent, group=over)
    return out


@torch.library.register_fake("ftp::first_rows")
def _first_shape(x: Tensor, counts: Tensor, bound: int, back: bool, source: str) -> Tensor:
    return x.new_empty([bound, *x.shape[1:]])


@torch.library.impl("ftp::first_rows", ("cpu", "cuda"))
def _first_rows(x: Tensor, counts: Tensor, bound: int, back: bool, source: str) -> Tensor:
    ((count,),) = checked_counts(counts, x.shape[0], bound, back, source)
    out = x.new_zeros([bound, *x.shape[1:]])
    out[:count] = x[:count]
    return out


def exchanged(calls: Sequence[tuple[Any, ...]]) -> list[Tensor]:
    """The result on each rank of a group, from the arguments of ``all_to_all_rows`` on each."""
    x, counts, bound, back, source, _ = calls[0]
    sizes = checked_counts(counts, x.shape[0], bound, back, source)
    parts = [call[0][: sum(s)].split(s) for call, s in zip(calls, sizes, strict=True)]
    found = []
    for rank in range(len(calls)):
        out = x.new_zeros([bound, *x.shape[1:]])
        rows = torch.cat([p[rank] for p in parts])
        out[: len(rows)] = rows
        found.append(out)
    return found


def checked_counts(counts: Tensor, rows: int, bound: int, back: bool, source: str) -> Counts:
    """The number of rows from each rank to each rank, checked.

    Raises:
        InputError: on all ranks alike, as all see all counts: a rank sends more rows than its
            tensor has, or receives more than ``bound``; a negative count.
    """
    sizes: Counts = (counts.mT if back else counts).tolist()
    at = f"{source}: " if source else ""
    for rank, sent in enumerate(sizes):
        if min(sent) < 0 or sum(sent) > rows:
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
