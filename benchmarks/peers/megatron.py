"""Tensor parallelism as Megatron-LM writes it, by hand: every layer knows its part, and every
collective is a line of code.

The cross-entropy packs the sum of exponentials and the target's logit into one all-reduce, so that
a step has the fewest collectives.
"""

import models  # type: ignore[import-not-found]
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as collectives
from torch.nn import functional as F

from peers.workloads import RATE, Step, Workload, module


def all_reduce(x: Tensor, op: str) -> Tensor:
    return collectives.all_reduce(x, op, dist.group.WORLD)  # type: ignore[arg-type]


def all_reduce_here(x: Tensor, op: str) -> Tensor:
    """In the tensor's own memory, as eager code does."""
    dist.all_reduce(x, getattr(dist.ReduceOp, op.upper()))
    return x


class Reduce:
    """The all-reduce that layers use: one that can be traced, or one that works in place."""

    run = staticmethod(all_reduce_here)


class Enter(torch.autograd.Function):
    """Into the parallel part: the gradient is summed."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return Reduce.run(grad.contiguous(), "sum")


class Leave(torch.autograd.Function):
    """Out of the parallel part: the value is summed."""

    @staticmethod
    def forward(ctx, x):
        return Reduce.run(x.clone() if Reduce.run is all_reduce else x, "sum")

    @staticmethod
    def backward(ctx, grad):
        return grad


class CrossEntropy(torch.autograd.Function):
    """Mean over tokens of the cross-entropy of logits (tokens, this rank's part of the
    vocabulary).
    """

    @staticmethod
    def forward(ctx, logits, targets, start):
        largest = Reduce.run(logits.amax(-1), "max")
        shifted = logits - largest[:, None]
        exponentials = shifted.exp()
        local = targets - start
        is_here = (local >= 0) & (local < logits.shape[-1])
        local = local.clamp(0, logits.shape[-1] - 1)
        of_target = shifted.gather(-1, local[:, None]).squeeze(-1) * is_here
        total, of_target = Reduce.run(
            torch.stack((exponentials.sum(-1), of_target)), "sum"
        ).unbind()
        ctx.save_for_backward(exponentials / total[:, None], local, is_here)
        return (total.log() - of_target).mean()

    @staticmethod
    def backward(ctx, grad):
        probabilities, local, is_here = ctx.saved_tensors
        here = -is_here.to(probabilities.dtype)[:, None]
        return (
            probabilities.scatter_add(-1, local[:, None], here) * (grad / probabilities.shape[0]),
            None,
            None,
        )


class Linear(nn.Module):
    """``cut`` 0 holds rows of the weight and leaves its result cut; 1 holds columns and sums the
    ranks' results.
    """

    def __init__(self, full: nn.Linear, cut: int):
        super().__init__()
        self.cut = cut
        self.weight = nn.Parameter(part(full.weight, cut))
        self.bias = (
            None
            if full.bias is None
            else nn.Parameter(part(full.bias, 0) if cut == 0 else full.bias.detach().clone())
        )

    def forward(self, x: Tensor) -> Tensor:
        if self.cut == 0:
            return F.linear(x, self.weight, self.bias)
        y = Leave.apply(F.linear(x, self.weight))
        return y if self.bias is None else y + self.bias


class Embedding(nn.Module):
    def __init__(self, full: nn.Embedding):
        super().__init__()
        self.weight = nn.Parameter(part(full.weight, 0))
        self.start = dist.get_rank() * self.weight.shape[0]

    def forward(self, tokens: Tensor) -> Tensor:
        local = tokens - self.start
        is_away = (local < 0) | (local >= self.weight.shape[0])
        return Leave.apply(
            F.embedding(local.masked_fill(is_away, 0), self.weight).masked_fill(
                is_away[..., None], 0.0
            )
        )


class Block(nn.Module):
    """One Enter for q, k and v together and one for both halves of the MLP, so that each needs
    one all-reduce.
    """

    def __init__(self, full: models.LlamaBlock):
        super().__init__()
        self.norm1, self.norm2, self.attn, self.mlp = full.norm1, full.norm2, full.attn, full.mlp
        for name in ("wq", "wk", "wv"):
            setattr(self.attn, name, Linear(getattr(self.attn, name), 0))
        self.attn.wo = Linear(self.attn.wo, 1)  # type: ignore[assignment]
        self.mlp.w1, self.mlp.w3, self.mlp.w2 = (
            Linear(self.mlp.w1, 0),
            Linear(self.mlp.w3, 0),
            Linear(self.mlp.w2, 1),
        )  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(Enter.apply(self.norm1(x)))
        return x + self.mlp(Enter.apply(self.norm2(x)))


class Decoder(nn.Module):
    def __init__(self, full: models.Llama):
        super().__init__()
        self.emb, self.norm, self.head = Embedding(full.emb), full.norm, Linear(full.head, 0)
        self.layers = nn.ModuleList(Block(layer) for layer in full.layers)  # type: ignore[arg-type]

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.emb(tokens)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(Enter.apply(self.norm(x))).flatten(0, 1)
        return CrossEntropy.apply(logits, targets.flatten(), dist.get_rank() * logits.shape[-1])


class Toy(nn.Module):
    def __init__(self, full: nn.Module):
        super().__init__()
        self.net1, self.net2 = Linear(full.net1, 0), Linear(full.net2, 1)  # type: ignore[arg-type]

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.net2(F.relu(self.net1(x))), y)


def part(full: Tensor, dim: int) -> Tensor:
    return full.detach().chunk(dist.get_world_size(), dim)[dist.get_rank()].clone()


def model_of(work: Workload) -> nn.Module:
    return Toy(module(work)) if work.cfg is None else Decoder(module(work))  # type: ignore[arg-type]


def build(work: Workload, *, compiled: bool) -> Step:
    """Eager, or each block (all of the MLP) compiled by torch.compile, as torchtitan does."""
    Reduce.run = staticmethod(all_reduce if compiled else all_reduce_here)
    model = model_of(work)
    if compiled:
        for layer in [model] if work.cfg is None else [*model.layers, model.head]:  # type: ignore[list-item]
            layer.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)

    def step(batch):
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step
