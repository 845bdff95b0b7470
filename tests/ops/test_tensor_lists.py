"""Ops of lists of tensors are ops of each: no rank computes a list whole."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import ftp
from ftp import P

MESH = ftp.simulated_mesh((3,), ("tp",))
lists: Any = torch  # whose names they are
HALF = torch.tensor(0.5, dtype=torch.float64)


def _given() -> list[Tensor]:
    shapes = (5, 3), (4,), (2, 3)
    draws = torch.Generator().manual_seed(0)
    return [torch.rand(shape, generator=draws, dtype=torch.float64) + 0.1 for shape in shapes]


def _sharded(fn: Callable[..., Sequence[Tensor]]) -> Sequence[Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step = ftp.spmd(fn, MESH, (P("tp"), P("tp"), P(None, "tp")))
        return step(*_given())


def _sines(xs: Sequence[Tensor]) -> list[Tensor]:
    return [x.sin() for x in xs]


CASES: dict[str, Callable[[list[Tensor]], Any]] = {
    "add": lambda xs: lists._foreach_add(xs, _sines(xs), alpha=2),
    "add_tensor": lambda xs: lists._foreach_add_(xs, HALF, alpha=3),
    "mul_": lambda xs: lists._foreach_mul_(xs, HALF),
    "div_numbers": lambda xs: lists._foreach_div_(xs, [2, 3, 4]),
    "lerp_": lambda xs: lists._foreach_lerp_(xs, _sines(xs), 0.1),
    "lerp_tensors": lambda xs: lists._foreach_lerp_(xs, _sines(xs), tuple(xs)),
    "addcmul_": lambda xs: lists._foreach_addcmul_(xs, xs, _sines(xs), 0.1),
    "addcdiv_numbers": lambda xs: lists._foreach_addcdiv(xs, xs, _sines(xs), [1, 2, 3]),
    "addcdiv_tensor": lambda xs: lists._foreach_addcdiv_(
        xs, xs, _sines(xs), torch.tensor([1.0, 2.0, 3.0])
    ),
    "norm": lambda xs: lists._foreach_norm(xs),
    "norm_inf": lambda xs: lists._foreach_norm(xs, float("inf"), torch.float64),
    "lerp_by_name": lambda xs: lists._foreach_lerp_(xs, _sines(xs), weight=0.2),
    "mul_by_name": lambda xs: lists._foreach_mul(self=xs, scalars=[1.0, 2.0, 3.0]),
    "addcdiv_by_name": lambda xs: lists._foreach_addcdiv(
        xs, tensor1=xs, tensor2=_sines(xs), scalars=torch.tensor([1.0, 2.0, 3.0])
    ),
    "lerp_by_names": lambda xs: lists._foreach_lerp_(xs, tensors1=_sines(xs), weights=tuple(xs)),
    "max": lambda xs: lists._foreach_max(xs),
    "pow_of_number": lambda xs: lists._foreach_pow(2.0, xs),
    "maximum": lambda xs: lists._foreach_maximum(xs, _sines(xs)),
    "minimum_of_number": lambda xs: lists._foreach_minimum_(xs, 0.5),
    "clamp_max_": lambda xs: lists._foreach_clamp_max_(xs, [0.2, 0.3, 0.4]),
    "copy_": lambda xs: lists._foreach_copy_(xs, _sines(xs)),
    "zero_": lambda xs: lists._foreach_zero_(xs),
    "sqrt": lambda xs: lists._foreach_sqrt(xs),
}  # fmt: skip


@pytest.mark.cases_by_default(2)
@pytest.mark.parametrize("name", CASES)
def test_each_is_computed_on_shards(name: str):
    def fn(*xs: Tensor) -> Sequence[Tensor]:
        copies = [x * 1 for x in xs]
        made = CASES[name](copies)
        return copies if made is None else made

    torch.testing.assert_close(list(_sharded(fn)), list(fn(*_given())))


def test_gradients():
    def loss(*xs: Tensor) -> Tensor:
        products = lists._foreach_mul(lists._foreach_sin(xs), xs)
        return torch.stack(lists._foreach_norm(products)).sum()

    def fn(*xs: Tensor) -> Sequence[Tensor]:
        return torch.func.grad(loss, (0, 1, 2))(*xs)

    torch.testing.assert_close(_sharded(fn), fn(*_given()))


def test_gradients_of_many_parameters_are_clipped():
    """More dims than the alphabet has letters: 14 weights, by torch's own clipping by lists."""

    def fn(*xs: Tensor) -> list[Tensor]:
        params = [torch.zeros_like(x) for x in xs * 5]
        for param, grad in zip(params, xs * 5, strict=True):
            param.grad = grad * 2
        norm = torch.nn.utils.clip_grad_norm_(params, 0.5, foreach=True)
        return [norm, *(param.grad for param in params if param.grad is not None)]

    torch.testing.assert_close(_sharded(fn), fn(*_given()))


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (lambda xs: lists._foreach_add(xs, xs[:2]), "same number of tensors, got 3 and 2"),
        (lambda xs: lists._foreach_add(xs, other=xs + xs), "same number of tensors, got 3 and 6"),
        (lambda xs: lists._foreach_mul(xs, HALF[None]), "expected to be 0 dim"),
        (lambda xs: lists._foreach_addcmul(xs, xs, xs, torch.ones(4)), "3 scalars"),
        (lambda xs: lists._foreach_maximum_([x.int() for x in xs], xs), "can't be cast"),
    ],
    ids=["short", "long", "dims", "scalars", "dtypes"],
)
def test_lists_that_torch_refuses(fn: Callable[..., Any], words: str):
    with pytest.raises(RuntimeError, match=words):
        _sharded(lambda *xs: fn(xs))
