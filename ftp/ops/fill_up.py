"""Pad rows with zeros until the ranks of an axis hold equal numbers, and remove the padding."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ftp.ops.define import define
from ftp.ops.linear import TRANSPOSES, linear


def _define(name: str, kernel: Callable[[Tensor, int], Tensor]) -> Any:
    """Define an op over the ``n`` ranks of ``axis``; on each rank ``rows`` is its own number."""
    target = define(f"{name}(Tensor x, str axis, int n, SymInt rows) -> Tensor")
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
TRANSPOSES[FILL_UP] = lambda shape, axis, n, _: (CUT_OFF, axis, n, shape[0])
TRANSPOSES[CUT_OFF] = lambda shape, axis, n, _: (FILL_UP, axis, n, shape[0])


def filled_up(x: Tensor, axis: str, n: int) -> Tensor:
    """``x`` with zeros after its rows, so that the ``n`` ranks of ``axis`` hold equal numbers of
    rows. Each rank keeps its rows, and nothing is sent.

    >>> filled_up(torch.ones(5), "ep", 3)
    tensor([1., 1., 1., 1., 1., 0.])
    """
    rows = -(-x.shape[0] // n) * n
    return x if rows == x.shape[0] else linear(x, FILL_UP, axis, n, rows)


def cut_off(x: Tensor, axis: str, n: int, rows: int) -> Tensor:
    """The first ``rows`` of ``x``, without the padding of ``filled_up``."""
    return linear(x, CUT_OFF, axis, n, rows)
