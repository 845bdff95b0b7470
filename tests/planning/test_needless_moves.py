"""Nothing is moved that need not be: exact collectives of programs that once moved more."""

import torch

import ftp
from ftp import P


def ops(lowered):
    return [c.op for c in lowered.collectives]


def test_a_loss_that_is_not_returned_is_not_reduced():
    def grad(w, x):
        return torch.func.grad(lambda w: (x @ w).square().sum())(w)

    w, x = torch.randn(6, 8, dtype=torch.float64), torch.randn(5, 6, dtype=torch.float64)
    cut = P(None, "tp")
    step = ftp.spmd(grad, ftp.simulated_mesh((2,), ("tp",)), (cut, P()), cut)
    assert ops(step.lower(w, x)) == []
    torch.testing.assert_close(step(w, x), grad(w, x), rtol=1e-12, atol=1e-12)


def test_equal_layers_of_a_sequential_are_planned_as_one():
    def layer():
        return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()).double()

    layers = torch.nn.Sequential(*(layer() for _ in range(12)))
    fn, params = ftp.functionalize(layers)
    mesh, x = ftp.simulated_mesh((2,), ("tp",)), torch.randn(2, 8, dtype=torch.float64)

    def loss(p, x):
        return fn(p, x).square().mean()

    step = ftp.shard(loss, mesh, ftp.plan(params, {"*.0.weight": P("tp")}))
    assert step.lower(params, x).plan.alike == 7  # all but those at both ends
    grads, value = torch.func.grad_and_value(loss)(params, x)
    torch.testing.assert_close(step(params, x), (value, grads), rtol=1e-12, atol=1e-12)


def test_pooling_of_a_permuted_tensor_keeps_the_batch_cut():
    def loss(w, x):
        pooled = torch.nn.functional.adaptive_avg_pool2d((x @ w).permute(0, 3, 1, 2), 1)
        return pooled.flatten(1).square().mean()

    w = torch.randn(8, 8, dtype=torch.float64)
    x = torch.randn(4, 5, 5, 8, dtype=torch.float64)
    step = ftp.shard(loss, ftp.simulated_mesh((2,), ("dp",)), P(), batch_specs=P("dp"))
    assert ops(step.lower(w, x)) == ["all_reduce"] * 2
    grad, value = torch.func.grad_and_value(loss)(w, x)
    torch.testing.assert_close(step(w, x), (value, grad), rtol=1e-12, atol=1e-12)
