"""Scans on windows of their dim: each window is scanned, and then joined with what all windows
before it come to. These totals, one element of each window, are all that ranks exchange.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ftp.ops.reverse_scans import FROM_START, REVERSE_CUMSUM, REVERSE_LOGCUMSUMEXP, REVERSED
from ftp.rules.overloads import aten
from ftp.rules.windows.registry import FarApart, joined, places, split, windowed

_HALVES = (torch.float16, torch.bfloat16)  # scanned in float32, as in the kernels


def _chunks(n: int, over: int, x: Tensor, dim: int) -> Tensor:
    """The windows of a scan."""
    chunk = -(-x.shape[over] // n)
    if dim % x.ndim != over:
        raise FarApart
    return split(x, over, n, 0, chunk, chunk)


def _before(totals: Tensor, dim: int, fill: Any, reverse: bool = False) -> Tensor:
    """What the windows before each one come to, from what all up to each one do; after, if
    ``reverse``. ``fill`` is what no windows come to.
    """
    shift = [-1, 1] if reverse else [1, -1]
    around = [*[0, 0] * (totals.ndim - 1), *shift]
    return aten.constant_pad_nd.default(totals, around, fill).unsqueeze(1 + dim)


def _scan(
    op: Any, join: Callable[[Tensor, Tensor], Tensor], nothing: float,
    n: int, over: int, x: Tensor, dim: int, *, dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    """A scan by ``join``, to which ``nothing`` adds nothing."""
    held, size, reverse = _chunks(n, over, x, dim), x.shape[over], op in FROM_START
    held = held if dtype is None else held.to(dtype)
    made, chunk, scan = held.dtype, held.shape[1 + over], op
    if made in _HALVES:
        held = held.float()
    elif dtype is not None:
        scan = functools.partial(op, dtype=dtype)
    if reverse and nothing and chunk * n != size:
        held = held.masked_fill(places(held, over, 0, chunk) >= size, nothing)
    inside = scan(held, 1 + over)
    totals = scan(inside.select(1 + over, 0 if reverse else -1), 0)
    found = joined(join(inside, _before(totals, over, nothing, reverse)), over, size)
    return found.to(made) if made in _HALVES else found


for _op, _join, _nothing in (
    (aten.cumsum.default, torch.add, 0),
    (REVERSE_CUMSUM, torch.add, 0),
    (aten.logcumsumexp.default, torch.logaddexp, -math.inf),
    (REVERSE_LOGCUMSUMEXP, torch.logaddexp, -math.inf),
):
    windowed(_op)(functools.partial(_scan, _op, _join, _nothing))


def _extreme(
    op: Any, order: Callable[[Tensor, Tensor], Tensor], n: int, over: int, x: Tensor, dim: int
) -> tuple[Tensor, Tensor]:
    """The running extreme and where it last is: NaN is more extreme than numbers."""
    held = _chunks(n, over, x, dim)
    values, index = op(held, 1 + over)
    of_window = torch.arange(n, device=x.device).reshape([n, *[1] * (x.ndim - 1)])
    first = of_window.unsqueeze(1 + over)
    index = index + first * held.shape[1 + over]
    totals, window = op(values.select(1 + over, -1), 0)
    # Where the running extreme of the totals changes, it is the window's own.
    at = torch.where(window == of_window, index.select(1 + over, -1), -1)
    earlier = _before(totals, over, 0), _before(at.cummax(0).values, over, -1)
    is_inside = (first == 0) | order(values, earlier[0])
    if x.is_floating_point():
        is_inside = is_inside | values.isnan()
    return tuple(  # type: ignore[return-value]
        joined(torch.where(is_inside, own, other), over, x.shape[over])
        for own, other in zip((values, index), earlier, strict=True)
    )


for _op, _order in ((aten.cummax.default, torch.ge), (aten.cummin.default, torch.le)):
    windowed(_op)(functools.partial(_extreme, _op, _order))
SCANS = frozenset((*REVERSED, aten.cummax.default, aten.cummin.default))
