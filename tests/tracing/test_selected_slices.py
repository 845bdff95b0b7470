"""Slices between values, ``x[i, :n]``, are views, as in torch: read, written to, and read again."""

# Numbers that are read by .item() and tensors of one integer stand where torch's types have ints.
# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import ftp
from ftp import P
from ftp.errors import TraceError

X = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
LENGTHS = torch.tensor([4, 3, 6, 2])
MESH = ftp.simulated_mesh((2,), ("tp",))


def mask_of_lengths(x: Tensor, lengths: Tensor) -> Tensor:
    """By numbers, and by tensors of one integer."""
    mask, above = torch.zeros(4, 6, dtype=torch.bool), x.new_zeros(4, 6)
    for i, length in enumerate(lengths[:2]):
        mask[i, : length.item()] = True
        above[i][length:] = 2.0
    return (x.masked_fill(mask, 0.5) * above).square().sum()


def deep_speech_2(x: Tensor, lengths: Tensor) -> Tensor:
    mask = torch.zeros(4, 6, dtype=torch.bool)
    for i, length in enumerate(lengths[:2]):
        length = length.item()
        if mask[i].size(0) - length > 0:
            mask[i].narrow(0, length, mask[i].size(0) - length).fill_(1)
    return x.masked_fill(mask, 0).square().sum()


def means(x: Tensor, lengths: Tensor) -> Tensor:
    rows = [x[i, :length].mean() for i, length in enumerate(lengths[:2].tolist())]
    last = [x[i, -length:].softmax(0).max() for i, length in enumerate(lengths[2:])]
    return torch.stack(rows + last).square().sum() + x[1:3, lengths[1] : lengths[0] + 9].sum()


def written_through(x: Tensor, lengths: Tensor) -> Tensor:
    n, m = lengths[1].item(), lengths[3].item()
    y = x.clone()
    rows = y[m:]
    rows += 1
    rows.mul_(n)
    rows[:, 0] = 2
    y[1:3, m:n] *= 3
    y[..., -m:] -= 1
    y[:, :n].add_(x[:, :n])
    y[0, n:] = y[1, n:].exp()
    y[:2, n:] = x[:2, :1]
    y[m:, :n] = 0.25
    y.narrow(1, lengths[3], lengths[1]).zero_()
    return (y * x).square().sum() + y.sum()


def read_after_a_write(x: Tensor, lengths: Tensor) -> Tensor:
    y = x.clone()
    rows, before = y[lengths[3].item() :], y[lengths[3].item() :].clone()
    y.mul_(2)
    first, second = y.split([lengths[3].item(), 4 - lengths[3].item()])
    return rows.square().sum() + before.sum() + (first.sum() + second.exp().sum()).sin()


def other_names(x: Tensor, lengths: Tensor) -> Tensor:
    """A mask's rows are a copy, but one tensor under its two names."""
    rows = x[x[:, 0] > 0]
    other = rows
    rows += 1
    rows[:, 1:] -= 3
    return other.square().sum()


FUNCTIONS = (mask_of_lengths, means, written_through, read_after_a_write, other_names)


def _all(x: Tensor, lengths: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    return {f.__name__: torch.func.grad_and_value(f)(x, lengths) for f in FUNCTIONS}


@pytest.mark.parametrize(
    ("fn", "spec", "n"),
    [
        (_all, P("tp"), 2),
        *[
            pytest.param(torch.func.grad_and_value(f), P(None, "tp"), 3, marks=pytest.mark.slow)
            for f in (*FUNCTIONS, deep_speech_2)
        ],
    ],
)
def test_slices_between_values_are_views(fn: Callable[..., Any], spec: P, n: int):
    mesh = ftp.simulated_mesh((n,), ("tp",))
    step = ftp.spmd(fn, mesh, (spec, P()), P(), certify=n == 3)
    for lengths in (LENGTHS, torch.tensor([6, 2, 5, 3])):
        torch.testing.assert_close(step(X, lengths), fn(X, lengths))


def test_a_captured_tensor_is_a_number_that_is_known():
    end = torch.tensor(3)
    step = ftp.spmd(
        lambda x: x[: torch.tensor(2), :end] @ x.narrow(0, 0, end)[:, :1], MESH, P("tp"), P()
    )
    torch.testing.assert_close(step(X), X[:2, :3] @ X[:3, :1])


REFUSED: dict[Callable[..., Any], str] = {
    lambda x, n: x.clone()[n:][:, 0].fill_(2): "a write to a view of a slice between values",
    lambda x, n: _stale(x, n): "is read .*after a write to its tensor, as it was before",
    lambda x, n: _set(x, n, x[:, :3]): r"a write of a tensor of shape \(4, 3\) to a slice",
    lambda x, n: _set(x, n, x[:, n : n + 1]): "a write but to the places of the same rows",
}


def _stale(x: Tensor, n: Any) -> Tensor:
    y = x.clone()
    part = y[n:][:, 1:]
    y.mul_(2)
    return part.sum()


def _set(x: Tensor, n: Any, value: Any) -> Tensor:
    y = x.clone()
    y[:, :n] = value
    return y


@pytest.mark.parametrize("fn", REFUSED)
def test_what_no_copy_can_be_is_refused(fn: Callable[..., Any]):
    step = ftp.spmd(lambda x, n: fn(x, n.item()), MESH, P(), P(), strict=True)
    with pytest.raises(TraceError, match=REFUSED[fn]):
        step(X, LENGTHS[3])


def test_tensors_of_a_row_for_each_selected_one():
    def fn(x: Tensor, n: Tensor) -> Tensor:
        rows = x[x[:, 0] > 0]
        target = rows.new(rows.size(0)).fill_(1)
        places = torch.arange(rows.shape[0])[:, None] + torch.zeros((rows.shape[0], 6))
        first = x[:, : n[0].item()]
        if len(rows) == 0:
            return first.sum()
        beside = (
            rows.new_full((rows.shape[0], 6), 0.5) * places
            + (first * torch.arange(first.shape[1])).sum()
        )
        count = np.mean([n.sum().item(), 1, 2])
        return F.cosine_embedding_loss(rows, rows * 2 + beside, target) + count * beside.sum()

    step = ftp.spmd(fn, MESH, (P("tp"), P()), P())
    for x in (X, -X.abs()):
        torch.testing.assert_close(step(x, LENGTHS), fn(x, LENGTHS))


@pytest.mark.filterwarnings("ignore:(.|\\n)*as a Python number:ftp.errors.ReadWarning")
def test_a_result_that_ends_at_a_value_along_a_later_dim_reads_it():
    """As transformers' beam search returns its sequences."""

    def ended(x, lengths):
        longest = (lengths + 1).max().clamp(max=x.shape[1])
        return {"sequences": x[:, :longest], "scores": x[:, 0]}

    step = ftp.spmd(ended, ftp.simulated_mesh((2,), ("dp",)), (P("dp"), P("dp")))
    x = torch.randn(4, 6)
    for lengths in (torch.tensor([1, 3, 2, 3]), torch.tensor([1, 0, 2, 1])):
        out = step(x, lengths)
        torch.testing.assert_close(out, ended(x, lengths))
