"""Writes through views, and shapes changed in place beside them: as plain torch, or refused."""

import pytest
import torch
from torch import Tensor

import ftp
from ftp import P
from ftp.errors import TraceError
from ftp.tracing.functionalize_graph import storages
from ftp.tracing.replacements import reshaped_views


def view_of_transposed(x: Tensor) -> Tensor:
    y = x.clone()
    row = y[:1]
    y.t_()
    return (row * torch.arange(4.0)).sum() + y.square().sum()


def written_view_of_transposed(x: Tensor) -> Tensor:
    y = x.clone()
    row = y[0]
    y.transpose_(0, 1)
    row.mul_(torch.arange(4.0))
    return y.square().sum()


def written_after_a_transposed_view(x: Tensor) -> Tensor:
    y = x.clone()
    z = y[:, :]
    z.t_()
    y.mul_(torch.arange(4.0))
    return (z * torch.arange(16.0).view(4, 4)).sum()


def view_taken_afterwards(x: Tensor) -> Tensor:
    y = x.clone()
    y.t_()
    row = y[:1]
    y.mul_(2)
    return (row * torch.arange(4.0)).sum() + y.square().sum()


def transposed_view(x: Tensor) -> Tensor:
    y = x.clone()
    row = y[0]
    z = y[:2]
    z.t_()
    return (z * torch.arange(8.0).view(4, 2)).sum() + (row * y).sum()


def view_used_before(x: Tensor) -> Tensor:
    y = x.clone()
    weight = (y[0] * torch.arange(4.0)).sum()
    y.t_()
    return (y * torch.arange(16.0).view(4, 4)).sum() * weight


def shape_that_stays(x: Tensor) -> Tensor:
    y = x.clone()
    row = y[0]
    y.squeeze_().mul_(2)
    return (row * torch.arange(4.0)).sum()


def view_that_is_left(x: Tensor) -> Tensor:
    y = x.clone()
    z = y[:2]
    z.t_()
    weight = (z * torch.arange(8.0).view(4, 2)).sum()
    y.mul_(torch.arange(4.0))
    return y.sum() * weight


def calls_recorded_from_memory(x: Tensor) -> Tensor:
    for _ in range(3):
        x = x + x.sin().t_().unsqueeze_(0).squeeze_(0)
    return (x * torch.arange(16.0).view(4, 4)).sum()


def windows_that_are_written(x: Tensor) -> Tensor:
    y = x.clone()
    y.T.unfold(1, 1, 2).mul_(3)  # the element behind each window stays
    y[:, 1:].unfold(-1, 2, 2).exp_()  # and so does the last column
    return (y * torch.arange(16.0).view(4, 4)).sum()


def step_of(fn):
    mesh = ftp.simulated_mesh((2,), ("tp",))
    return ftp.spmd(lambda x: torch.func.grad_and_value(fn)(x), mesh, P("tp"), certify=True)


X = torch.arange(16.0).view(4, 4).sin()


@pytest.mark.parametrize(
    "fn", [view_of_transposed, written_view_of_transposed, written_after_a_transposed_view]
)
def test_refused_where_a_gradient_would_be_that_of_another_view(fn):
    with pytest.raises(TraceError, match=r"transpose|t_.*changes a shape in place.*x = x\.t\(\)"):
        step_of(fn)(X)
    mesh = ftp.simulated_mesh((2,), ("tp",))
    torch.testing.assert_close(ftp.spmd(fn, mesh, P("tp"))(X), fn(X))  # without a gradient


@pytest.mark.parametrize(
    "fn",
    [
        view_taken_afterwards,
        transposed_view,
        view_used_before,
        shape_that_stays,
        view_that_is_left,
        calls_recorded_from_memory,
        windows_that_are_written,
    ],
)
def test_equals_plain_torch(fn):
    given = X.clone().requires_grad_()
    value = fn(given)
    (slope,) = torch.autograd.grad(value, given)
    torch.testing.assert_close(step_of(fn)(X), (slope, value.detach()))


def test_many_changes_ask_for_the_memory_of_each_node_a_few_times(monkeypatch):
    """Of each change and each node it was asked once: a diffusion sampler took minutes."""
    asked = []

    def noted(node):
        asked.append(node)
        return storages(node)

    monkeypatch.setattr(reshaped_views, "storages", noted)

    def loss(x):
        for _ in range(50):
            x = x.clone().unsqueeze_(0).sin().squeeze_(0)
        return x.sum()

    mesh = ftp.AbstractMesh((2,), ("tp",))
    nodes = ftp.shard(loss, mesh, P()).lower(torch.ones(4)).graph.graph.nodes
    assert 50 < len(asked) < 20 * len(nodes)
