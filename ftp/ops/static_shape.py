"""Replacements for torch ops whose result shapes depend on values, which a trace does not have: the
same ops with static shapes. Also grouped matmuls, for all dtypes.

`FIXED` maps an op to the function that is recorded in its place.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ftp.ops.define import define, register_fake
from ftp.ops.grouped_mm import recorded as recorded_grouped_mm
from ftp.torch_internals.op_types import OpOverload

aten = torch.ops.aten

lstsq = define(
    "lstsq(Tensor a, Tensor b, float? rcond, str driver) -> (Tensor, Tensor, Tensor, Tensor)"
)
ctc_loss = define(
    "ctc_loss"
    "(Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths, int blank,"
    " bool zero_infinity) -> (Tensor, Tensor)"
)
ctc_loss_backward = define(
    "ctc_loss_backward"
    "(Tensor grad, Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths,"
    " Tensor loss, Tensor log_alpha, int blank,"
    " bool zero_infinity) -> Tensor"
)


@torch.library.impl("ftp::lstsq", "CompositeExplicitAutograd")
def _lstsq(a: Tensor, b: Tensor, rcond: float | None, driver: str) -> tuple[Tensor, ...]:
    return tuple(aten.linalg_lstsq.default(a, b, rcond, driver=driver))


@register_fake("ftp::lstsq")
def _fake_lstsq(a: Tensor, b: Tensor, rcond: float | None, driver: str) -> tuple[Tensor, ...]:
    m, n = a.shape[-2:]
    vectors = _are_vectors(a, b)
    columns = () if vectors else b.shape[-1:]
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[: -1 if vectors else -2])
    real = a.real if a.is_complex() else a
    return (
        a.new_empty((*batch, n, *columns)),
        real.new_empty((*batch, *columns) if driver == "gels" and m > n else (0,)),
        a.new_empty((0,) if driver == "gels" else batch, dtype=torch.int64),
        real.new_empty((*batch, min(m, n)) if driver in ("gelsd", "gelss") else (0,)),
    )


def _are_vectors(a: Tensor, b: Tensor) -> bool:
    return b.ndim == 1 or (b.ndim == a.ndim - 1 and b.shape == a.shape[:-1])


def _fixed_lstsq(
    a: Tensor, b: Tensor, rcond: float | None = None, *, driver: str | None = None
) -> Any:
    """``lstsq`` without residuals if the driver finds the rank: they are returned for matrices of
    full rank only, which depends on values.
    """
    driver = driver or ("gelsy" if a.device.type in ("cpu", "meta") else "gels")
    more_rows = a.shape[-2] > a.shape[-1]
    if more_rows and (driver in ("gelsd", "gelss") or (driver == "gels" and _are_vectors(a, b))):
        return aten.linalg_lstsq.default(a, b, rcond, driver=driver)
    return lstsq(a, b, rcond, driver)


@torch.library.impl("ftp::ctc_loss", "CompositeExplicitAutograd")
def _ctc_loss(
    log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, *options: Any
) -> tuple[Tensor, Tensor]:
    loss, log_alpha = aten._ctc_loss.Tensor(
        log_probs, targets, input_lengths, target_lengths, *options
    )
    times, places = (torch.arange(n, device=log_alpha.device) for n in log_alpha.shape[1:])
    inputs, labels = (x.to(log_alpha.device).unsqueeze(1) for x in (input_lengths, target_lengths))
    known = (times < inputs).unsqueeze(2) & (places < 2 * labels + 1).unsqueeze(1)
    # The kernel leaves the rest of its table undefined.
    log_alpha = torch.where(known, log_alpha, 0)
    return loss, torch.nn.functional.pad(log_alpha, (0, _width(targets) - log_alpha.shape[-1]))


@register_fake("ftp::ctc_loss")
def _fake_ctc_loss(log_probs: Tensor, targets: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    time, batch = log_probs.shape[:2]
    return log_probs.new_empty((batch,)), log_probs.new_empty((batch, time, _width(targets)))


@torch.library.impl("ftp::ctc_loss_backward", "CompositeExplicitAutograd")
def _ctc_loss_backward(
    grad: Tensor,
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    loss: Tensor,
    log_alpha: Tensor,
    *options: Any,
) -> Tensor:
    longest = int(target_lengths.max()) if target_lengths.numel() else 0
    log_alpha = log_alpha[..., : 2 * longest + 1].contiguous()
    lengths = input_lengths, target_lengths
    return aten._ctc_loss_backward.Tensor(
        grad, log_probs, targets, *lengths, loss, log_alpha, *options
    )


@register_fake("ftp::ctc_loss_backward")
def _fake_ctc_loss_backward(grad: Tensor, log_probs: Tensor, *rest: Any) -> Tensor:
    return torch.empty_like(log_probs, memory_format=torch.contiguous_format)


def _width(targets: Tensor) -> int:
    """The width of the table: the labels of the longest possible target, with blanks before,
    between and after them.
    """
    return 2 * targets.shape[-1] + 1


FIXED: dict[OpOverload, Callable[..., Any]] = {
    aten.linalg_lstsq.default: _fixed_lstsq,
    aten._ctc_loss.Tensor: lambda p, t, i, n, blank=0, zero_infinity=False: ctc_loss(
        p, t, i, n, blank, zero_infinity
    ),
    aten._ctc_loss_backward.Tensor: lambda g, p, t, i, n, loss, alpha, blank, zero_infinity=False: (
        ctc_loss_backward(g, p, t, i, n, loss, alpha, blank, zero_infinity)
    ),
    aten._grouped_mm.default: recorded_grouped_mm,
}
