"""Real bugs from public threads, each cut down to its arithmetic: a reference, the buggy form with
its line marked, and the mended form. The thread says what the numbers did. A catalogue: long, and
each entry by itself.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ftp import P
from tests.museum.proven import (
    GRID,
    MESH,
    AllToAll,
    Case,
    Reduce,
    ScatterSequence,
    all_gather,
    randn,
    reduce_scatter,
    reduced_over,
)


@dataclass(frozen=True)
class Bug:
    """A bug; ``make(is_mended)`` gives the rank program."""

    thread: str
    reference: Callable[..., Any]
    make: Callable[[bool], Callable[..., Any]]
    in_specs: Any
    out_specs: Any
    args: tuple[Any, ...]
    grad: bool = True
    mesh: Any = MESH

    def case(self, is_mended: bool) -> Case:
        return Case(
            self.thread,
            self.reference,
            self.make(is_mended),
            self.in_specs,
            self.out_specs,
            self.args,
            self.grad,
            self.mesh,
        )


class SumGradient(torch.autograd.Function):
    """The identity; its gradient is summed over ranks."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad)
        return grad


def matmul_bias(x, w, b):
    return x @ w + b


def bias_on_partial(is_mended):
    """A replicated bias added to a pending sum is summed as often as there are ranks."""

    def program(x, w, b):
        if is_mended:
            return Reduce.apply(x @ w) + b
        return Reduce.apply(x @ w + b)  # BUG

    return program


def bias_on_partial_divided(is_mended):
    """The forward pass is right; the gradient of the bias that is divided is divided too."""

    def program(x, w, b):
        if is_mended:
            return Reduce.apply(x @ w) + b
        share = b / dist.get_world_size()  # BUG
        return Reduce.apply(x @ w + share)

    return program


def routed(x, gate, up):
    return (x @ gate).softmax(-1) @ up


def router_gradient(is_mended):
    """Each rank runs its experts: the router's gradient, one term of a sum, was not summed."""

    def program(x, gate, up):
        if is_mended:
            gate, x = SumGradient.apply(gate), SumGradient.apply(x)
        first = dist.get_rank() * up.shape[0]
        scores = (x @ gate).softmax(-1)  # BUG
        return Reduce.apply(scores[:, first : first + up.shape[0]] @ up)

    return program


def expert_inputs(is_mended):
    """The experts' common input meets other weights on each rank: its gradient was not summed."""

    def program(x, up, down):
        if is_mended:
            x = SumGradient.apply(x)
        return Reduce.apply(torch.relu(x @ up) @ down)  # BUG

    return program


def mlp(x, up, down):
    return torch.relu(x @ up) @ down


class AllToAllSummed(torch.autograd.Function):
    """An all-to-all whose backward pass sends each gradient once for every rank."""

    @staticmethod
    def forward(ctx, x):
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x.contiguous())
        return out

    @staticmethod
    def backward(ctx, grad):
        return AllToAll.apply(grad) * dist.get_world_size()  # BUG


def experts(x, up):
    """Tokens of shape (groups, experts, tokens, dim)."""
    return torch.einsum("getd,edf->getf", x, up)


def doubled_expert_gradients(is_mended):
    """The backward pass of an all-to-all sends each gradient once for every rank."""

    exchange = AllToAll if is_mended else AllToAllSummed

    def program(x, up):
        mine = exchange.apply(x[0])
        mine = mine.unflatten(0, (dist.get_world_size(), -1))
        made = torch.einsum("getd,edf->getf", mine, up)
        return AllToAll.apply(made.flatten(0, 1))[None]

    return program


def chunked_loss(x, w):
    return torch.stack([(part @ w).square().sum() for part in x.chunk(2)]).sum()


class ChunkGradient(torch.autograd.Function):
    """A loss in chunks that keeps the gradient of the hidden states itself."""

    @staticmethod
    def forward(ctx, x, w, is_mended):
        logits = x @ w
        hidden = 2 * logits @ w.t()
        if is_mended:
            dist.all_reduce(hidden)
        ctx.save_for_backward(hidden, 2 * x.t() @ logits)
        loss = logits.square().sum()
        dist.all_reduce(loss)
        return loss

    @staticmethod
    def backward(ctx, grad):
        hidden, weight = ctx.saved_tensors
        return grad * hidden, grad * weight, None  # BUG


def chunked(is_mended):
    """A loss in chunks keeps the gradient of the hidden states, a term of a sum, as if summed."""

    return lambda x, w: ChunkGradient.apply(x, w, is_mended)


def routing_bias(counts, bias):
    total = counts.sum(0)
    return bias + (total.mean() - total).sign()


def routing_bias_local(is_mended):
    """The bias followed this rank's tokens, not those of all ranks."""

    def program(counts, bias):
        total = counts.sum(0)  # BUG
        if is_mended:
            dist.all_reduce(total)
        return bias + (total.mean() - total).sign()

    return program


def smoothed(logits, target):
    """``F.cross_entropy`` with label smoothing, written out."""
    picked = logits.gather(1, target[:, None])[:, 0]
    return logits.exp().sum(-1).log() - 0.9 * picked - 0.1 * logits.mean(-1)


def label_smoothing(is_mended):
    """The mean of the log probabilities ran over this rank's part of the vocabulary."""

    def program(logits, target):
        total = Reduce.apply(logits.exp().sum(-1))
        first, n = dist.get_rank() * logits.shape[-1], logits.shape[-1]
        hit = F.one_hot(target, n * dist.get_world_size())[:, first : first + n]
        picked = Reduce.apply((logits * hit).sum(-1))
        mean = logits.mean(-1)  # BUG
        if is_mended:
            mean = Reduce.apply(mean) / dist.get_world_size()
        return total.log() - 0.9 * picked - 0.1 * mean

    return program


def sum_of_logs(logits):
    return logits.exp().sum(-1).log()


def gathered_logits(is_mended):
    """Logits that are gathered already go into a loss that sums over ranks: log(ranks) too much."""

    def program(logits):
        total = logits.exp().sum(-1)
        if not is_mended:
            total = Reduce.apply(total)  # BUG
        return total.log()

    return program


def token_mean(x, mask):
    return (x * mask).sum() / mask.sum()


def local_token_counts(is_mended):
    """A mean of the ranks' means, though they hold different numbers of tokens."""

    def program(x, mask):
        count = mask.sum()
        if is_mended:
            dist.all_reduce(count)
            return (x * mask).sum() / count
        return (x * mask).sum() / count / dist.get_world_size()  # BUG

    return program


def normed(x, weight):
    return x / x.square().mean(-1, keepdim=True).sqrt() * weight


def norm_weight(is_mended):
    """A norm's weight is whole while tokens or heads are cut: its gradient was not summed."""

    def program(x, weight):
        if is_mended:
            weight = SumGradient.apply(weight)
        return x / x.square().mean(-1, keepdim=True).sqrt() * weight  # BUG

    return program


def microbatch_loss(w, x, y):
    w = w.detach().requires_grad_()
    loss = (x @ w - y).square().sum() / len(x)
    return loss.detach(), torch.autograd.grad(loss, w)[0]


def unscaled_pipeline(is_mended):
    """The reported loss was divided by the number of tokens, the differentiated one was not."""

    def program(w, x, y):
        w = w.detach().requires_grad_()
        count = len(x) * dist.get_world_size()
        loss = (x @ w - y).square().sum()  # BUG
        grad = torch.autograd.grad(loss / count if is_mended else loss, w)[0]
        dist.all_reduce(grad)
        loss = loss.detach() / count
        dist.all_reduce(loss)
        return loss, grad

    return program


def mean_loss(w, x):
    w = w.detach().requires_grad_()
    return torch.autograd.grad((x @ w).square().mean(), w)[0]


def sequence_scaling(is_mended):
    """Each rank's loss is the mean over its part of the sequence; the gradients were summed."""

    def program(w, x):
        w = w.detach().requires_grad_()
        loss = (x @ w).square().mean()
        grad = torch.autograd.grad(loss, w)[0]
        op = dist.ReduceOp.AVG if is_mended else dist.ReduceOp.SUM
        dist.all_reduce(grad, op=op)  # BUG
        return grad

    return program


class LostSum(torch.autograd.Function):
    """The all-reduce runs on a copy that ``contiguous`` made, and its result is dropped."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        dist.all_reduce(grad.contiguous())
        return grad


def contiguous_copy(is_mended):
    """The all-reduce ran on a copy that ``contiguous`` made, and its result was dropped."""

    copy = SumGradient if is_mended else LostSum

    def program(x, w):
        return (copy.apply(x.t()).t() @ w).t().contiguous()  # BUG

    return program


def transposed(x, w):
    return (x @ w).t().contiguous()


def nn_all_reduce(is_mended):
    """The gradient of ``torch.distributed.nn``'s all-reduce is an all-reduce: once per rank."""

    def program(x, w):
        from torch.distributed.nn.functional import all_reduce

        y = x @ w
        return Reduce.apply(y) if is_mended else all_reduce(y)  # BUG

    return program


class IdentityLogSoftmax(torch.autograd.Function):
    """Right for a cross entropy that brings the whole gradient, wrong for any other reader."""

    @staticmethod
    def forward(ctx, logits, is_mended):
        total = logits.exp().sum(-1, keepdim=True)
        dist.all_reduce(total)
        out = logits - total.log()
        ctx.save_for_backward(out)
        ctx.is_mended = is_mended
        return out

    @staticmethod
    def backward(ctx, grad):
        if not ctx.is_mended:
            return grad.clone(), None  # BUG
        total = grad.sum(-1, keepdim=True)
        dist.all_reduce(total)
        return grad - ctx.saved_tensors[0].exp() * total, None


def identity_log_softmax(is_mended):
    """The gradient of any log-softmax was that which one cross entropy needs: the identity."""

    return lambda logits: IdentityLogSoftmax.apply(logits, is_mended)


def context_loss(w, x):
    w = w.detach().requires_grad_()
    return torch.autograd.grad((x @ w).square().sum(), w)[0]


def context_scaling(is_mended):
    """The loss was multiplied by the ranks for an average that had become a sum."""

    def program(w, x):
        w = w.detach().requires_grad_()
        loss = (x @ w).square().sum()
        if not is_mended:
            loss = loss * dist.get_world_size()  # BUG
        grad = torch.autograd.grad(loss, w)[0]
        dist.all_reduce(grad)
        return grad

    return program


def to_local_partial(is_mended):
    """``to_local`` of a pending sum and back: the gradient passes as a pending sum, and is summed
    again.
    """

    def program(x, w):
        y = x @ w
        y = y if is_mended else SumGradient.apply(y)  # BUG
        return Reduce.apply(y)

    return program


class GatherTokens(torch.autograd.Function):
    """Tokens of all ranks; each rank's experts make one term of their gradient."""

    @staticmethod
    def forward(ctx, x, is_mended):
        ctx.is_mended = is_mended
        return all_gather(x)

    @staticmethod
    def backward(ctx, grad):
        if ctx.is_mended:
            return reduce_scatter(grad), None
        return grad.chunk(dist.get_world_size())[dist.get_rank()].clone(), None  # BUG


def lost_reduce_scatter(is_mended):
    """``to_local`` without ``grad_placements``: the gradient of gathered tokens is cut, not
    reduced.
    """

    def program(x, up, down):
        tokens = GatherTokens.apply(x, is_mended)
        return ScatterSequence.apply(torch.relu(tokens @ up) @ down)

    return program


def scored_experts(x, gate, up, down):
    scores = (x @ gate).sigmoid()
    return torch.einsum("te,etf->tf", scores, torch.relu(torch.einsum("td,edh->eth", x, up)) @ down)


def dropped_grad_placements(is_mended):
    """Experts whose hidden dim is cut: the gradients of their tokens and scores are terms of a sum,
    and the placements that say so were passed on with expert parallelism alone.
    """

    def program(x, gate, up, down):
        scores = (x @ gate).sigmoid()
        if is_mended:
            x, scores = SumGradient.apply(x), SumGradient.apply(scores)
        hidden = torch.relu(torch.einsum("td,edh->eth", x, up))  # BUG
        return Reduce.apply(torch.einsum("te,etf->tf", scores, hidden @ down))  # BUG

    return program


def biased_experts(x, up, bias):
    return torch.einsum("eth,ehf->etf", x, up) + bias[:, None]


class Share(torch.autograd.Function):
    """One rank's share of a value that is summed; its gradient is whole."""

    @staticmethod
    def forward(ctx, x, ranks):
        return x / ranks

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def expert_bias(is_mended):
    """The number of ranks was read from a DTensor, which the weights were no more: it stayed 1."""

    def program(x, up, bias):
        ranks = dist.get_world_size() if is_mended else 1
        made = torch.einsum("eth,ehf->etf", x, up)
        return Reduce.apply(made + Share.apply(bias, ranks)[:, None])  # BUG

    return program


class GatherWeight(torch.autograd.Function):
    """A norm's weight, cut over dp; its gradient is a sum over dp and, with tokens cut, over tp."""

    @staticmethod
    def forward(ctx, weight, is_mended):
        ctx.is_mended = is_mended
        out = weight.new_empty(2 * len(weight))
        dist.all_gather_into_tensor(out, weight, group=GRID.get_group("dp"))
        return out

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        if ctx.is_mended:
            dist.all_reduce(grad, group=GRID.get_group("tp"))
        part = grad.new_empty(len(grad) // 2)
        dist.reduce_scatter_tensor(part, grad, group=GRID.get_group("dp"))
        return part, None  # BUG


def norm_weight_over_two_axes(is_mended):
    """``to_local`` strips both mesh dims and keeps the gradient's placement on dp alone."""

    def program(x, weight):
        weight = GatherWeight.apply(weight, is_mended)
        return x / x.square().mean(-1, keepdim=True).sqrt() * weight  # BUG

    return program


class ScatterTokens(torch.autograd.Function):
    """This rank's tokens; the gradient is that of all tokens."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.chunk(dist.get_world_size(group), 1)[dist.get_rank(group)].clone()

    @staticmethod
    def backward(ctx, grad):
        parts = [torch.empty_like(grad) for _ in range(dist.get_world_size(ctx.group))]
        dist.all_gather(parts, grad.contiguous(), group=ctx.group)
        return torch.cat(parts, 1), None


def combined_embeddings(images, text):
    return torch.cat([images, text], 1)


def scatter_over_another_grid(is_mended):
    """A model with groups of its own scatters its tokens over those of the global layout."""

    def program(images, text):
        combined = combined_embeddings(images, text)
        group = GRID.get_group("tp" if is_mended else "dp")
        return ScatterTokens.apply(combined, group)  # BUG

    return program


def clipped(sinks, weight):
    norm = (sinks.square().sum() + weight.square().sum()).sqrt()
    return sinks / norm, weight / norm


def sinks_of_one_rank(is_mended):
    """Sinks cut over heads, but not marked so: the clipped norm counted those of one rank."""

    def program(sinks, weight):
        total = sinks.square().sum()
        if not is_mended:
            total = total * (dist.get_rank() == 0)  # BUG
        dist.all_reduce(total)
        norm = (total + weight.square().sum()).sqrt()
        return sinks / norm, weight / norm

    return program


def balance_loss(probabilities, mask):
    count = mask.sum()
    load = (probabilities * mask[:, None]).sum(0) / count
    return load.square().sum() * count


def overwritten_count(is_mended):
    """The number of this rank's tokens was summed over ranks in place, then read as its own."""

    def program(probabilities, mask):
        own = mask.sum()
        count = own.clone() if is_mended else own
        dist.all_reduce(count)
        load = Reduce.apply((probabilities * mask[:, None]).sum(0)) / count
        return load.square().sum() * own  # BUG

    return program


class RecomputedLayer(torch.autograd.Function):
    """Keeps this rank's part of its input, gathers the parts and computes again in the backward
    pass.
    """

    @staticmethod
    def forward(ctx, x, w, axis):
        ctx.group = GRID.get_group(axis)
        part = x.chunk(dist.get_world_size(ctx.group))[dist.get_rank(ctx.group)]
        ctx.save_for_backward(part.clone(), w)
        return torch.tanh(x @ w)

    @staticmethod
    def backward(ctx, grad):
        part, w = ctx.saved_tensors
        x = part.new_empty(2 * len(part), part.shape[1])
        dist.all_gather_into_tensor(x, part, group=ctx.group)
        grad = grad * (1 - torch.tanh(x @ w).square())
        return grad @ w.t(), x.t() @ grad, None


def recompute_over_another_grid(is_mended):
    """A layer with groups of its own gathers the activations that it kept over those of the global
    layout: tokens of two replicas are mixed.
    """

    def program(x, w):
        w = reduced_over("dp", forward=False)(w)
        return RecomputedLayer.apply(x, w, "tp" if is_mended else "dp")  # BUG

    return program


def tanh_layer(x, w):
    return torch.tanh(x @ w)


def masked_scores(x, gate, mask):
    return (x @ gate).softmax(-1) * mask[..., None]


def mask_over_another_grid(is_mended):
    """Tokens are scattered over the model's own groups, their padding mask over those of the global
    layout.
    """

    def program(x, gate, mask):
        x = ScatterTokens.apply(x, GRID.get_group("tp"))
        mine = GRID.get_local_rank("tp" if is_mended else "dp")
        mask = mask.chunk(2, 1)[mine]
        return (x @ gate).softmax(-1) * mask[..., None]  # BUG

    return program


def masked_mean_gradient(w, x, mask):
    w = w.detach().requires_grad_()
    loss = ((x @ w).square().sum(-1) * mask).sum() / mask.sum()
    return torch.autograd.grad(loss, w)[0]


def context_token_counts(is_mended):
    """A sequence's loss is divided by the tokens of this rank's part of it, then averaged."""

    def program(w, x, mask):
        w = w.detach().requires_grad_()
        count = mask.sum().to(w.dtype)
        if is_mended:
            dist.all_reduce(count, op=dist.ReduceOp.AVG)
        loss = ((x @ w).square().sum(-1) * mask).sum() / count  # BUG
        grad = torch.autograd.grad(loss, w)[0]
        dist.all_reduce(grad, op=dist.ReduceOp.AVG)
        return grad

    return program


class GatherColumns(torch.autograd.Function):
    """The columns of all ranks; the gradient is cut, or summed over ranks and cut."""

    @staticmethod
    def forward(ctx, x, is_summed):
        ctx.is_summed = is_summed
        return all_gather(x.t()).t().contiguous()

    @staticmethod
    def backward(ctx, grad):
        if ctx.is_summed:
            return reduce_scatter(grad.t()).t(), None
        return grad.chunk(dist.get_world_size(), 1)[dist.get_rank()], None


def log_probabilities(x, w):
    return (x @ w).log_softmax(-1)


def gathered_log_probabilities(is_mended):
    """Every rank computes with all gathered logits; the gradients, whole on each, were summed."""

    def program(x, w):
        logits = SumGradient.apply(x) @ w
        logits = GatherColumns.apply(logits, not is_mended)  # BUG
        return logits.log_softmax(-1)

    return program


def position_scores(x, w, q):
    return torch.einsum("qhd,kd->qhk", q, x @ w)


def shared_position_keys(is_mended):
    """Keys that all heads share are gathered; each rank's heads make one term of their gradient,
    and it was cut, not summed.
    """

    def program(x, w, q):
        keys = GatherColumns.apply(SumGradient.apply(x) @ w, is_mended)
        return torch.einsum("qhd,kd->qhk", q, keys)  # BUG

    return program


_X, _W, _DOWN = randn(4, 6), randn(6, 4), randn(4, 3)
_TARGET = torch.tensor([1, 3, 0, 2])
_TP_ROWS = (P(None, "tp"), P("tp"))
BUGS = [
    Bug(
        "pytorch/torchtitan#1805",
        mlp,
        lost_reduce_scatter,
        (P("tp"), P(None, "tp"), P("tp")),
        P("tp"),
        (_X, _W, _DOWN),
    ),
    Bug(
        "pytorch/torchtitan#2217 (mended in #2532)",
        normed,
        norm_weight_over_two_axes,
        (P("dp", "tp"), P("dp")),
        P("dp", "tp"),
        (randn(2, 4, 2), randn(2)),
        mesh=GRID,
    ),
    Bug(
        "pytorch/torchtitan#4054",
        scored_experts,
        dropped_grad_placements,
        (P(), P(), P(None, None, "tp"), P(None, "tp")),
        P(),
        (_X, randn(6, 2), randn(2, 6, 4), randn(2, 4, 3)),
    ),
    Bug(
        "pytorch/torchtitan#4245",
        biased_experts,
        expert_bias,
        (P(None, None, "tp"), P(None, "tp"), P()),
        P(),
        (randn(2, 3, 4), randn(2, 4, 2), randn(2, 2)),
    ),
    Bug(
        "pytorch/torchtitan#2106",
        matmul_bias,
        bias_on_partial,
        (*_TP_ROWS, P()),
        P(),
        (_X, _W, randn(4)),
    ),
    Bug(
        "pytorch/torchtitan#2106 (backward)",
        matmul_bias,
        bias_on_partial_divided,
        (*_TP_ROWS, P()),
        P(),
        (_X, _W, randn(4)),
    ),
    Bug(
        "pytorch/torchtitan#2416",
        routed,
        router_gradient,
        (P(), P(), P("tp")),
        P(),
        (_X, _W, _DOWN),
    ),
    Bug(
        "pytorch/torchtitan#1878",
        mlp,
        expert_inputs,
        (P(), P(None, "tp"), P("tp")),
        P(),
        (_X, _W, _DOWN),
    ),
    Bug(
        "pytorch/pytorch#160285",
        experts,
        doubled_expert_gradients,
        (P("tp"), P("tp")),
        P("tp"),
        (randn(2, 4, 3, 2), randn(4, 2, 2)),
    ),
    Bug(
        "pytorch/torchtitan#3822",
        log_probabilities,
        gathered_log_probabilities,
        (P(), P(None, "tp")),
        P(),
        (_X, _W),
    ),
    Bug("pytorch/torchtitan#3412", chunked_loss, chunked, (P(), P(None, "tp")), P(), (_X, _W)),
    Bug(
        "pytorch/torchtitan#4154",
        routing_bias,
        routing_bias_local,
        (P("tp"), P()),
        P(),
        (randn(4, 3), randn(3)),
        grad=False,
    ),
    Bug(
        "NVIDIA/Megatron-LM#7452 (1)",
        smoothed,
        label_smoothing,
        (P(None, "tp"), P()),
        P(),
        (randn(4, 4), _TARGET),
    ),
    Bug("NVIDIA/Megatron-LM#7452 (2)", sum_of_logs, gathered_logits, P(), P(), (randn(4, 4),)),
    Bug(
        "NVIDIA/Megatron-LM#7452 (3)",
        token_mean,
        local_token_counts,
        P("tp"),
        P(unreduced=("tp",)),
        (randn(4), torch.tensor([1, 1, 1, 0])),
    ),
    Bug(
        "NVIDIA/Megatron-LM#7452 (4)",
        tanh_layer,
        recompute_over_another_grid,
        (P("dp"), P()),
        P("dp"),
        (randn(4, 3), randn(3, 2)),
        mesh=GRID,
    ),
    Bug(
        "NVIDIA/Megatron-LM#7452 (5)",
        masked_scores,
        mask_over_another_grid,
        (P("dp"), P(), P("dp")),
        P("dp", "tp"),
        (randn(2, 4, 3), randn(3, 2), torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]])),
        grad=False,
        mesh=GRID,
    ),
    Bug(
        "NVIDIA/Megatron-LM#7452 (7)",
        combined_embeddings,
        scatter_over_another_grid,
        P("dp"),
        P("dp", "tp"),
        (randn(2, 2, 3), randn(2, 4, 3)),
        mesh=GRID,
    ),
    Bug(
        "NVIDIA/Megatron-LM#7452 (8)",
        clipped,
        sinks_of_one_rank,
        (P("tp"), P()),
        (P("tp"), P()),
        (randn(4), randn(3, 2)),
        grad=False,
    ),
    Bug(
        "NVIDIA/Megatron-LM#7452 (9)",
        masked_mean_gradient,
        context_token_counts,
        (P(), P("tp"), P("tp")),
        P(),
        (randn(3, 2), randn(4, 3), torch.tensor([1, 1, 1, 0])),
        grad=False,
    ),
    Bug(
        "NVIDIA/Megatron-LM#7452 (10)",
        balance_loss,
        overwritten_count,
        (P("tp"), P("tp")),
        P(unreduced=("tp",)),
        (randn(4, 3), torch.tensor([1, 1, 1, 0])),
        grad=False,
    ),
    Bug(
        "NVIDIA/Megatron-LM#7452 (11)",
        normed,
        norm_weight,
        (P(None, "tp"), P()),
        P(None, "tp"),
        (randn(3, 4, 2), randn(2)),
    ),
    Bug(
        "NVIDIA/Megatron-LM#1699",
        position_scores,
        shared_position_keys,
        (P(), P(None, "tp"), P(None, "tp")),
        P(None, "tp"),
        (_X, _W, randn(3, 2, 4)),
    ),
    Bug(
        "NVIDIA/Megatron-LM#1446",
        normed,
        norm_weight,
        (P("tp"), P()),
        P("tp"),
        (randn(4, 3), randn(3)),
    ),
    Bug(
        "pytorch/torchtitan#2972",
        microbatch_loss,
        unscaled_pipeline,
        (P(), P("tp"), P("tp")),
        P(),
        (randn(3, 2), randn(4, 3), randn(4, 2)),
        grad=False,
    ),
    Bug(
        "deepspeedai/DeepSpeed#5248",
        mean_loss,
        sequence_scaling,
        (P(), P("tp")),
        P(),
        (randn(3, 2), randn(4, 3)),
        grad=False,
    ),
    Bug(
        "NovaSky-AI/SkyRL#1886",
        transposed,
        contiguous_copy,
        (P(), P(None, "tp")),
        P("tp"),
        (_X, _W),
    ),
    Bug("pytorch/pytorch#58005", torch.matmul, nn_all_reduce, _TP_ROWS, P(), (_X, _W)),
    Bug(
        "pytorch/pytorch#190746",
        lambda x: x.log_softmax(-1),
        identity_log_softmax,
        P(None, "tp"),
        P(None, "tp"),
        (randn(4, 4),),
    ),
    Bug(
        "NVIDIA/Megatron-LM#673",
        context_loss,
        context_scaling,
        (P(), P("tp")),
        P(),
        (randn(3, 2), randn(4, 3)),
        grad=False,
    ),
    Bug("pytorch/pytorch#172932", torch.matmul, to_local_partial, _TP_ROWS, P(), (_X, _W)),
]
