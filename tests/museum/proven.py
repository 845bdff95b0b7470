"""Parallel programs as people write them by hand, each with its single-device reference.

A program gets this rank's shards; ``dist.group.WORLD`` is its one mesh axis unless it asks for
another. A catalogue: long, and each entry by itself.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

import ftp
from ftp import P

N = 2
MESH = ftp.AbstractMesh((N,), ("tp",))
GRID = ftp.AbstractMesh((N, N), ("dp", "tp"))


@dataclass(frozen=True)
class Case:
    """A reference, a rank program, and what ``ftp.equivalent`` takes beside them."""

    name: str
    reference: Callable[..., Any]
    program: Callable[..., Any]
    in_specs: Any
    out_specs: Any
    args: tuple[Any, ...]
    grad: bool = True
    mesh: Any = MESH

    def prove(self) -> ftp.Certificate:
        return ftp.equivalent(
            self.reference,
            self.program,
            self.mesh,
            self.in_specs,
            self.out_specs,
            *self.args,
            grad=self.grad,
        )


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


# Megatron-LM: Shoeybi et al. (2019), section 3; Korthikanti et al. (2022), section 4.2.2.


class Copy(torch.autograd.Function):
    """Megatron's f: identity, then the sum of gradients."""

    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad


class Reduce(torch.autograd.Function):
    """Megatron's g: the sum, then the identity."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


def all_gather(x):
    out = x.new_empty(dist.get_world_size() * x.shape[0], *x.shape[1:])
    dist.all_gather_into_tensor(out, x.contiguous())
    return out


def reduce_scatter(x):
    out = x.new_empty(x.shape[0] // dist.get_world_size(), *x.shape[1:])
    dist.reduce_scatter_tensor(out, x.contiguous())
    return out


class GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return all_gather(x)

    @staticmethod
    def backward(ctx, grad):
        return reduce_scatter(grad)


class ScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return reduce_scatter(x)

    @staticmethod
    def backward(ctx, grad):
        return all_gather(grad)


def linear(x, w, b):
    return x @ w.t() + b


def column_linear(x, w, b):
    return Copy.apply(x) @ w.t() + b


def row_linear(x, w, b):
    return Reduce.apply(x @ w.t()) + b


def column_linear_sp(x, w, b):
    return GatherSequence.apply(x) @ w.t() + b


class ReplicatedBias(torch.autograd.Function):
    """A parameter that sequence parallelism uses on every rank: its gradients are summed."""

    @staticmethod
    def forward(ctx, b):
        return b

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


def row_linear_sp(x, w, b):
    return ScatterSequence.apply(x @ w.t()) + ReplicatedBias.apply(b)


def embedding(ids, table):
    return F.embedding(ids, table)


def vocab_parallel_embedding(ids, table):
    first = dist.get_rank() * table.shape[0]
    outside = (ids < first) | (ids >= first + table.shape[0])
    found = F.embedding((ids - first).masked_fill(outside, 0), table)
    return Reduce.apply(found.masked_fill(outside[..., None], 0.0))


def cross_entropy(logits, target):
    return F.cross_entropy(logits, target, reduction="none")


class VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, target):
        largest = logits.max(dim=-1).values
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        logits = logits - largest[:, None]
        first = dist.get_rank() * logits.shape[-1]
        outside = (target < first) | (target >= first + logits.shape[-1])
        local = (target - first).masked_fill(outside, 0)
        picked = logits.gather(1, local[:, None])[:, 0].masked_fill(outside, 0.0)
        dist.all_reduce(picked)
        exp = logits.exp()
        total = exp.sum(-1)
        dist.all_reduce(total)
        ctx.save_for_backward(exp / total[:, None], outside, local)
        return total.log() - picked

    @staticmethod
    def backward(ctx, grad):
        softmax, outside, local = ctx.saved_tensors
        found = softmax.clone()
        rows = torch.arange(len(local))
        found[rows, local] -= (~outside).to(found.dtype)
        return found * grad[:, None], None


# Data parallelism. DDP: Li et al. (2020); FSDP: Zhao et al. (2023).


def training_loss(w, v, x, y):
    return (torch.relu(x @ w) @ v - y).square().mean()


def train(w, v, x, y):
    w, v = (p.detach().requires_grad_() for p in (w, v))
    loss = training_loss(w, v, x, y)
    return loss.detach(), torch.autograd.grad(loss, (w, v))


def ddp(w, v, x, y):
    loss, grads = train(w, v, x, y)
    works: list[Any] = [dist.all_reduce(g, async_op=True) for g in grads]
    for work in works:
        work.wait()
    for g in grads:
        g.div_(dist.get_world_size())
    dist.all_reduce(loss, op=dist.ReduceOp.AVG)
    return loss, grads


def fsdp(w, v, x, y):
    loss, grads = train(all_gather(w), all_gather(v), x, y)
    n = dist.get_world_size()
    dist.all_reduce(loss)
    return loss / n, tuple(reduce_scatter(g) / n for g in grads)


# Both at once: DDP over dp, column and row linear over tp.


def reduced_over(axis, forward):
    class Sum(torch.autograd.Function):
        @staticmethod
        def run(x, is_summed):
            x = x.clone(memory_format=torch.contiguous_format)
            if is_summed:
                dist.all_reduce(x, group=GRID.get_group(axis))
            return x

        @staticmethod
        def forward(ctx, x):
            return Sum.run(x, forward)

        @staticmethod
        def backward(ctx, grad):
            return Sum.run(grad, not forward)

    return Sum.apply


def ddp_and_megatron(w, v, x, y):
    w, v, x = (p.detach().requires_grad_() for p in (w, v, x))
    hidden = torch.relu(reduced_over("tp", forward=False)(x) @ w)
    loss = (reduced_over("tp", forward=True)(hidden @ v) - y).square().mean()
    *grads, of_x = torch.autograd.grad(loss, (w, v, x))
    loss = loss.detach()
    for g in (*grads, loss):
        dist.all_reduce(g, group=GRID.get_group("dp"))
        g /= N
    return loss, tuple(grads), of_x / N


def train_with_inputs(w, v, x, y):
    w, v, x = (p.detach().requires_grad_() for p in (w, v, x))
    loss = training_loss(w, v, x, y)
    *grads, of_x = torch.autograd.grad(loss, (w, v, x))
    return loss.detach(), tuple(grads), of_x


# Attention over a sequence that is cut. Ring: Liu et al. (2023); Ulysses: Jacobs et al. (2023).


def attention(q, k, v):
    """Of shape (sequence, heads, dim)."""
    scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[-1])
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)


class Shift(torch.autograd.Function):
    """Send to the next rank of the ring, gradients to the one before."""

    @staticmethod
    def forward(ctx, x, by):
        ctx.by = by
        me, n = dist.get_rank(), dist.get_world_size()
        out = torch.empty_like(x)
        sends = dist.P2POp(dist.isend, x.contiguous(), (me + by) % n)
        receives = dist.P2POp(dist.irecv, out, (me - by) % n)
        for work in dist.batch_isend_irecv([sends, receives]):
            work.wait()
        return out

    @staticmethod
    def backward(ctx, grad):
        return Shift.apply(grad, -ctx.by), None


def ring_attention(q, k, v):
    largest: Any = None
    total: Any = None
    out: Any = None
    for step in range(dist.get_world_size()):
        if step:
            k, v = Shift.apply(k, 1), Shift.apply(v, 1)
        scores = torch.einsum("qhd,khd->qhk", q, k) / math.sqrt(q.shape[-1])
        now = scores.amax(-1, keepdim=True).detach()
        if largest is not None:
            now = torch.maximum(now, largest)
        weights = (scores - now).exp()
        part = torch.einsum("qhk,khd->qhd", weights, v)
        if largest is None:
            total, out = weights.sum(-1, keepdim=True), part
        else:
            scale = (largest - now).exp()
            total = total * scale + weights.sum(-1, keepdim=True)
            out = out * scale + part
        largest = now
    return out / total


class Swap(torch.autograd.Function):
    """An all-to-all that gathers one dim and cuts another."""

    @staticmethod
    def forward(ctx, x, cut, gather):
        ctx.dims = gather, cut
        parts = [p.contiguous() for p in x.chunk(dist.get_world_size(), cut)]
        found = [torch.empty_like(p) for p in parts]
        send, receive = torch.stack(parts), torch.stack(found)
        dist.all_to_all_single(receive, send)
        return torch.cat(list(receive), gather)

    @staticmethod
    def backward(ctx, grad):
        return Swap.apply(grad, *ctx.dims), None, None


def ulysses(q, k, v):
    q, k, v = (Swap.apply(x, 1, 0) for x in (q, k, v))
    return Swap.apply(attention(q, k, v), 0, 1)


# Experts with a capacity: Lepikhin et al. (2020), algorithm 1.

CAPACITY = 2


def dispatch(scores):
    """Which token goes to which expert and slot, (tokens, experts, slots), and its weight."""
    weight, expert = scores.softmax(-1).max(-1)
    chosen = F.one_hot(expert, scores.shape[-1])
    slot = (chosen.cumsum(0) - 1) * chosen
    kept = chosen * (slot < CAPACITY)
    slots = F.one_hot(slot.clamp(max=CAPACITY - 1), CAPACITY) * kept[..., None]
    return slots.to(scores.dtype), weight


def moe(x, gate, up):
    """Tokens of shape (groups, tokens, dim); each group has slots of its own."""
    found = []
    for group in x:
        slots, weight = dispatch(group @ gate)
        sent = torch.einsum("tec,td->ecd", slots, group)
        made = torch.relu(torch.einsum("ecd,edf->ecf", sent, up))
        found.append(torch.einsum("tec,ecf->tf", slots, made) * weight[:, None])
    return torch.stack(found)


class AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x.contiguous())
        return out

    @staticmethod
    def backward(ctx, grad):
        return AllToAll.apply(grad)


def expert_parallel(x, gate, up):
    (group,) = x
    slots, weight = dispatch(group @ Copy.apply(gate))
    sent = AllToAll.apply(torch.einsum("tec,td->ecd", slots, group))
    sent = sent.unflatten(0, (dist.get_world_size(), -1))
    made = torch.relu(torch.einsum("recd,edf->recf", sent, up))
    back = AllToAll.apply(made.flatten(0, 1))
    return (torch.einsum("tec,ecf->tf", slots, back) * weight[:, None])[None]


# A pipeline of two stages: Huang et al. (2019).

MICROBATCHES = 2


def two_layers(w, x, y):
    w = w.detach().requires_grad_()
    loss = (torch.tanh(torch.tanh(x @ w[0]) @ w[1]) - y).square().mean()
    return loss.detach(), torch.autograd.grad(loss, w)[0]


def gpipe(w, x, y):
    stage, w = dist.get_rank(), w[0].detach().requires_grad_()
    grad, loss, kept = torch.zeros_like(w), x.new_zeros(()), []
    for xs, ys in zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True):
        if stage == 0:
            out = torch.tanh(xs @ w)
            dist.send(out.detach(), 1)
            kept.append(out)
        else:
            received = torch.empty_like(xs)
            dist.recv(received, 0)
            received.requires_grad_()
            out = (torch.tanh(received @ w) - ys).square().mean() / MICROBATCHES
            loss += out.detach()
            kept.append((received, out))
    for held in kept:
        if stage == 0:
            back = torch.empty_like(held)
            dist.recv(back, 1)
            grad += torch.autograd.grad(held, w, back)[0]
        else:
            back, mine = torch.autograd.grad(held[1], (held[0], w))
            dist.send(back, 0)
            grad += mine
    dist.broadcast(loss, 1)
    return loss, grad[None]


TOKENS, IN, OUT, VOCAB = 4, 6, 4, 8
_LINEAR = (randn(TOKENS, IN), randn(OUT, IN), randn(OUT))
_IDS = torch.arange(VOCAB)[torch.randperm(VOCAB)]
_DATA = (randn(IN, 4), randn(4, 2), randn(TOKENS, IN), randn(TOKENS, 2))
_QKV = tuple(randn(4, 2, 2) for _ in range(3))
CASES = [
    Case("column_linear", linear, column_linear, (P(), P("tp"), P("tp")), P(None, "tp"), _LINEAR),
    Case("row_linear", linear, row_linear, (P(None, "tp"), P(None, "tp"), P()), P(), _LINEAR),
    Case(
        "column_linear_sp",
        linear,
        column_linear_sp,
        (P("tp"), P("tp"), P("tp")),
        P(None, "tp"),
        _LINEAR,
    ),
    Case(
        "row_linear_sp",
        linear,
        row_linear_sp,
        (P(None, "tp"), P(None, "tp"), P()),
        P("tp"),
        _LINEAR,
    ),
    Case(
        "vocab_parallel_embedding",
        embedding,
        vocab_parallel_embedding,
        (P(), P("tp")),
        P(),
        (_IDS, randn(VOCAB, 3)),
    ),
    Case(
        "vocab_parallel_cross_entropy",
        cross_entropy,
        VocabParallelCrossEntropy.apply,
        (P(None, "tp"), P()),
        P(),
        (randn(VOCAB, VOCAB), _IDS),
    ),
    Case(
        "ddp",
        train,
        ddp,
        (P(), P(), P("tp"), P("tp")),
        P(),
        _DATA,
        grad=False,
    ),
    Case(
        "fsdp",
        train,
        fsdp,
        (P("tp"), P("tp"), P("tp"), P("tp")),
        (P(), P("tp")),
        _DATA,
        grad=False,
    ),
    Case(
        "ddp_and_megatron",
        train_with_inputs,
        ddp_and_megatron,
        (P(None, "tp"), P("tp"), P("dp"), P("dp")),
        (P(), (P(None, "tp"), P("tp")), P("dp")),
        _DATA,
        grad=False,
        mesh=GRID,
    ),
    Case("ring_attention", attention, ring_attention, P("tp"), P("tp"), _QKV),
    Case("ulysses", attention, ulysses, P("tp"), P("tp"), _QKV),
    Case(
        "expert_parallel",
        moe,
        expert_parallel,
        (P("tp"), P(), P("tp")),
        P("tp"),
        (randn(2, 5, 3), randn(3, 4), randn(4, 3, 2)),
    ),
    Case(
        "gpipe",
        two_layers,
        gpipe,
        (P("tp"), P(), P()),
        (P(), P("tp")),
        (randn(2, 3, 3), randn(4, 3), randn(4, 3)),
        grad=False,
    ),
]
