"""Programs as people write them by hand, right and wrong, the reference one of torch's own
functions: the right form is proven, the wrong one refused on the line that is wrong.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from few_or_many import slow_after
from torch.distributed.tensor import DTensor, Replicate, Shard

import ftp
from ftp import P
from ftp.errors import CertificateError, TraceError
from tests.museum.proven import GRID, MESH, GatherSequence, ScatterSequence, randn


class Summed(torch.autograd.Function):
    """The sum over a group; the gradient passes."""

    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class SummedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


# Cross entropy with label smoothing, tokens over dp, the vocabulary over tp.


def cross_entropy(x, w, target):
    return F.cross_entropy(x @ w.t(), target, label_smoothing=0.1, reduction="none")


def parallel_cross_entropy(wrong):
    def program(x, w, target):
        tp, dp = GRID.get_group("tp"), GRID.get_group("dp")
        x = SummedGradient.apply(x, tp)
        w = w if wrong == "gradient" else SummedGradient.apply(w, dp)
        logits = x @ w.t()  # gradient
        largest = logits.detach().amax(-1)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=tp)
        logits = logits - largest[:, None]
        n = logits.shape[-1]
        total = Summed.apply(logits.exp().sum(-1), tp).log()
        at = target - dist.get_rank(tp) * n
        is_mine = (at >= 0) & (at < n)
        picked = logits.gather(1, at.clamp(0, n - 1)[:, None])[:, 0]
        picked = Summed.apply(torch.where(is_mine, picked, 0.0), tp)
        share = logits.mean(-1) if wrong == "mean" else logits.sum(-1) / (2 * n)
        mean = Summed.apply(share, tp)  # mean
        return total - 0.9 * picked - 0.1 * mean

    return program


# FSDP whose gradients are accumulated over microbatches before they are reduced.


def mean_gradient(w, x, y):
    w = w.detach().requires_grad_()
    loss = ((x @ w - y).square().sum(-1)).mean()
    return torch.autograd.grad(loss, w)[0]


def accumulated(wrong):
    def program(w, x, y):
        whole = w.new_empty(2 * w.shape[0], w.shape[1])
        dist.all_gather_into_tensor(whole, w)
        whole.requires_grad_()
        gradient = torch.zeros_like(whole)
        for i, (a, b) in enumerate(zip(x.chunk(2), y.chunk(2), strict=True)):
            loss = (a @ whole - b).square().sum() / len(x)
            gradient = gradient + torch.autograd.grad(loss, whole)[0]
            if wrong == "sync" and i == 0:
                dist.all_reduce(gradient)  # sync
        part = torch.empty_like(w)
        op = dist.ReduceOp.SUM if wrong == "sum" else dist.ReduceOp.AVG
        dist.reduce_scatter_tensor(part, gradient, op=op)  # sum
        return part

    return program


# A block under sequence parallelism, its bias outside of the reduction.


def block(x, norm, up, down, bias):
    return x + F.gelu(F.rms_norm(x, (3,), norm) @ up) @ down + bias


def sequence_parallel(wrong):
    def program(x, norm, up, down, bias):
        norm = norm if wrong == "norm" else SummedGradient.apply(norm, None)
        bias = bias if wrong == "outside" else SummedGradient.apply(bias, None)
        h = F.rms_norm(x, (3,), norm)  # norm
        y = F.gelu(GatherSequence.apply(h) @ up) @ down  # inside
        if wrong == "inside":
            return x + ScatterSequence.apply(y + bias)
        return x + ScatterSequence.apply(y) + bias  # outside

    return program


# Rows sent to their owners in parts of different sizes.


def permuted(x, w):
    return torch.cat([x[0:1], x[4:7], x[1:4], x[7:8]]) @ w


class Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, received, sent):
        ctx.sizes = sent, received
        out = x.new_empty(sum(received), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), received, sent)
        return out

    @staticmethod
    def backward(ctx, grad):
        return Exchange.apply(grad, *ctx.sizes), None, None


def exchanged(wrong):
    def program(x, w):
        sizes = [1, 3] if dist.get_rank() == 0 else [3, 1]
        if wrong == "sizes":
            sizes = sizes[::-1]
        y = Exchange.apply(x, sizes, sizes)
        w = w if wrong == "gradient" else SummedGradient.apply(w, None)
        return y @ w  # sizes, gradient

    return program


CASES: dict[str, Any] = {
    "cross entropy": (
        cross_entropy,
        parallel_cross_entropy,
        (GRID, (P("dp"), P("tp"), P("dp")), P("dp")),
        (randn(4, 3), randn(6, 3), torch.tensor([0, 5, 2, 3])),
        ("mean", "gradient"),
    ),
    "accumulated": (
        mean_gradient,
        accumulated,
        (MESH, P("tp"), P("tp")),
        (randn(4, 3), randn(8, 4), randn(8, 3)),
        ("sync", "sum"),
    ),
    "sequence parallel": (
        block,
        sequence_parallel,
        (MESH, (P("tp"), P(), P(None, "tp"), P("tp"), P()), P("tp")),
        (randn(4, 3), randn(3), randn(3, 6), randn(6, 3), randn(3)),
        ("norm", "inside", "outside"),
    ),
    "all-to-all": (
        permuted,
        exchanged,
        (MESH, (P("tp"), P()), P("tp")),
        (randn(8, 3), randn(3, 2)),
        ("sizes", "gradient"),
    ),
}


@pytest.mark.cases_by_default(1)
@pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")
@pytest.mark.parametrize("name", slow_after(2, CASES))
def test_the_right_form_is_proven_and_each_wrong_one_refused(name: str):
    reference, make, setting, args, wrongs = CASES[name]
    options = {"grad": reference is not mean_gradient}
    ftp.equivalent(reference, make(None), *setting, *args, **options)
    for wrong in wrongs:
        with pytest.raises(CertificateError) as e:
            ftp.equivalent(reference, make(wrong), *setting, *args, **options)
        assert wrong in (e.value.line or "").split("# ")[-1], str(e.value)
        inputs: Any = e.value.inputs
        assert [x.shape for x in inputs] == [x.shape for x in args]


def test_a_layer_norm_of_dtensors():
    def program(x, w, b):
        return F.layer_norm(x, (6,), w, b)

    def local(x, w, b):
        y = F.layer_norm(x.to_local(), (6,), w.to_local(), b.to_local())  # wrong
        return DTensor.from_local(y, x.device_mesh, [Shard(1)], run_check=False)

    specs = ([Shard(1)], [Replicate()], [Replicate()]), [Shard(1)]
    args = randn(2, 4, 6), randn(6), randn(6)
    ftp.equivalent(program, program, MESH, *specs, *args, grad=True)
    with pytest.raises(CertificateError, match="the gradient of w on rank 0") as e:
        ftp.equivalent(program, local, MESH, *specs, *args, grad=True)
    assert (e.value.line or "").endswith("# wrong")


# Signs.


def test_signs_multiply():
    """A comparison with zero is that of a positive multiple, a square is not negative."""
    x = randn(4, 6)

    def prove(reference, program, **options):
        ftp.equivalent(reference, program, MESH, P("tp"), P("tp"), x, **options)

    prove(torch.relu, lambda x: torch.where(3 * x > 0, x, 0.0), grad=True)
    prove(torch.abs, lambda x: (x * x).sqrt())
    prove(lambda x: -(-x).relu(), lambda x: torch.minimum(x / 2, x.new_zeros(())) * 2)
    prove(torch.relu, lambda x: torch.where(x * x * x > 0, x, 0.0))
    for wrong in (
        lambda x: torch.where(-x > 0, x, 0.0),
        lambda x: torch.where(x * x > 0, x, 0.0),
        lambda x: torch.where(x - 0.5 > 0, x, 0.0),
        lambda x: torch.where(-7 * x > 0, x, 0.0),
        lambda x: (x * x).sqrt(),
    ):
        with pytest.raises(CertificateError):
            prove(torch.relu, wrong)


def test_an_argument_with_a_gradient_that_is_written():
    def program(x):
        return x.mul_(2)

    with pytest.raises(TraceError, match="writes to one of its inputs"):
        ftp.equivalent(lambda x: 2 * x, program, MESH, P("tp"), P("tp"), randn(4), grad=True)


# Norms.


def clipped(*grads):
    norms = [torch.linalg.vector_norm(g) for g in grads]
    total = torch.stack([n.square() for n in norms]).sum().sqrt()
    return tuple(g / total for g in grads)


@pytest.mark.parametrize("square", [torch.square, lambda n: n**2, lambda n: n * n])
def test_the_square_of_a_norm_is_the_sum_of_squares(square):
    """Gradients are clipped by a norm whose square is summed over ranks."""

    def program(*grads):
        total = sum(square(torch.linalg.vector_norm(g)) for g in grads)
        dist.all_reduce(total)
        return tuple(g / total.sqrt() for g in grads)

    def wrong(*grads):
        total = sum(torch.linalg.vector_norm(g) for g in grads)
        dist.all_reduce(total)  # norms do not add up
        return tuple(g / total for g in grads)

    def by_torch(*grads):
        total = square(torch.nn.utils.get_total_norm(grads))
        dist.all_reduce(total)
        return tuple(g / total.sqrt() for g in grads)

    given = (MESH, P("tp"), P("tp"), randn(4, 3), randn(6))
    ftp.equivalent(clipped, program, *given)
    ftp.equivalent(clipped, by_torch, *given)
    with pytest.raises(CertificateError):
        ftp.equivalent(clipped, wrong, *given)


def test_a_norm_that_is_changed_is_no_root_of_its_sum():
    def program(g):
        norm = torch.linalg.vector_norm(g)
        norm.view(1).mul_(2)
        return g / norm.square()

    given = (ftp.AbstractMesh((1,), ("tp",)), P(), P(), randn(4))
    with pytest.raises(CertificateError):
        ftp.equivalent(lambda g: g / g.square().sum(), program, *given)
