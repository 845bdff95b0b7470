"""Pad rows with zeros until the ranks of an axis hold equal numbers, and remove the padding."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ftp.ops.define import define


def _define(name: str, kernel: Callable[[Tensor, int], Tensor]) -> Any:
    """Define an op over the ``n`` ranks of ``axis``; on each rank ``rows`` is its own number."""
    target = define(f"{name}(Tensor x, str axis, int n, int rows) -> Tensor")
    torch.library.impl(f"ftp::{name}", "CompositeExplicitAutograd")(
        lambda x, axis, n, rows: kernel(x, rows)
    )

    def batched(info: Any, in_dims: tuple[Any, ...], x: Tensor, *rest: Any) -> tuple[Tensor, int]:
        return target(x.movedim(in_dims[0], 1), *rest), 1

    torch.library.register_vmap(f"ftp::{name}", batched)
    return target


def _filled(x: Tensor, rows: int) -> Tensor:
    made = x.new_zeros([rows, *x.shape[1:]])
    made[: x.shape[0]] = x
    return made


FILL_UP = _define("fill_up", _filled)
CUT_OFF = _define("cut_off", lambda x, rows: x[:rows].clone())
_REVERSE = {FILL_UP: CUT_OFF, CUT_OFF: FILL_UP}


class _Resized(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(  # type: ignore[override]
        x: Tensor, target: Any, axis: str, n: int, rows: int
    ) -> Tensor:
        return target(x, axis, n, rows)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, *ctx.call = inputs
        ctx.rows = x.shape[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        target, axis, n, _ = ctx.call
        found = _Resized.apply(grad, _REVERSE[target], axis, n, ctx.rows)
        return found, None, None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Any:  # type: ignore[override]
        return _Resized.apply(tangent, *ctx.call)


def filled_up(x: Tensor, axis: str, n: int) -> Tensor:
    """``x`` with zeros after its rows, so that the ``n`` ranks of ``axis`` hold equal numbers of
    rows. Each rank keeps its rows, and nothing is sent.

    >>> filled_up(torch.ones(5), "ep", 3)
    tensor([1., 1., 1., 1., 1., 0.])
    """
    rows = -(-x.shape[0] // n) * n
    applied: Any = x if rows == x.shape[0] else _Resized.apply(x, FILL_UP, axis, n, rows)
    return applied
