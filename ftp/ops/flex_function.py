"""flex_attention as a function with derivatives. Those of higher order and in forward mode use the
full score matrix.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ftp.dataclass import dataclass
from ftp.ops.attention import sum_dtype
from ftp.ops.attention_flex import FLEX, FLEX_BACKWARD
from ftp.ops.dense_attention import jvp_of, one_by_one, scores_of, weighted
from ftp.ops.listed_blocks import listed
from ftp.ops.philox import contiguous_strides, drawn_below, kept_scale, random_bits
from ftp.ops.score_functions import evaluate

WHOLE = 1 << 30  # the size of a block that stands for all of a sequence


@dataclass(frozen=True)
class Kept:
    """The arguments of a call that are no tensors, and how its tensors divide.

    Attributes:
        counts: the numbers of block tables, of tensors that ``score_mod`` captures, of tensors that
            ``mask_mod`` captures, and of keys of dropout.
        wants: which tensors of ``score_mod`` need a gradient.
    """

    counts: tuple[int, int, int, int]
    block: tuple[int, int]
    scale: float
    score: str
    mask: str
    known: str
    dropout: float = 0.0
    wants: tuple[bool, ...] = ()

    def call(self, op: Any, tensors: Sequence[Tensor], *first: Tensor) -> Any:
        q, k = first[:2] if op is FLEX else first[1:3]
        drawn = [*q.shape[1:3], k.shape[2]] if self.dropout else []
        rest = list(self.block), self.scale, self.score, self.mask, self.known, self.dropout, drawn
        more = [] if op is FLEX else [list(self.wants)]
        return op(*first, *self.split(tensors), [], [], [], [], *rest, *more)

    def split(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], ...]:
        found = iter(tensors)
        return tuple([next(found) for _ in range(count)] for count in self.counts)

    def dense(
        self, q: Tensor, k: Tensor, v: Tensor, *tensors: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Attention by the full score matrix, for derivatives of higher order."""
        tables, of_score, of_mask, keys = self.split(tensors)
        scores = scores_of(q, k, self.scale)
        at = [torch.arange(n, device=q.device) for n in scores.shape]
        if self.score:
            scores = evaluate(self.score, scores, at, at, of_score).to(scores.dtype)
        if self.mask:
            sees = evaluate(self.mask, None, at, at, of_mask)
        else:
            sees = torch.ones((), dtype=torch.bool, device=q.device)
        if tables:
            row, column = (x // n for x, n in zip(at[2:], self.block, strict=True))
            some, *full = (
                listed(count, index, tables[1].shape[-1])
                .index_select(2, row)
                .index_select(3, column)
                for count, index in zip(tables[::2], tables[1::2], strict=True)
            )
            sees = sees & some
            sees = sees | full[0] if full else sees

        def dropped(weights: Tensor) -> Tensor:
            sizes = tuple(weights.shape)
            bits = random_bits(keys[0], sizes, contiguous_strides(sizes), 0)
            kept = weights.masked_fill(drawn_below(bits, self.dropout), 0)
            return kept * kept_scale(self.dropout)

        return weighted(scores, sees, v, q.dtype, *([dropped] if keys else []))


class Flex(torch.autograd.Function):
    """Attention by tiles, forward and backward."""

    @staticmethod
    def forward(q, k, v, kept, *tensors):
        return kept.call(FLEX, tensors, q, k, v)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        q, k, v, ctx.kept, *tensors = inputs
        out, logsumexp, top = output
        ctx.mark_non_differentiable(top)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, out, logsumexp, *tensors)
        ctx.save_for_forward(q, k, v, *tensors)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, of_weights: Tensor | None, _: Any) -> Any:
        q, k, v, out, logsumexp, *tensors = ctx.saved_tensors
        if grad is None and of_weights is None:
            return (None,) * (4 + len(tensors))
        grad = torch.zeros_like(out) if grad is None else grad
        tables, of_score, *others = ctx.kept.split(tensors)
        needed = ctx.needs_input_grad[4 + len(tables) :]
        wants = [x.dtype.is_floating_point and n for x, n in zip(of_score, needed, strict=False)]
        kept = replace(ctx.kept, wants=tuple(wants))
        of_q, of_k, of_v, *made = _FlexGradient.apply(
            grad, of_weights, q, k, v, out, logsumexp, kept, *tensors
        )
        found = iter(made)
        of_captured = [next(found) if is_wanted else None for is_wanted in wants]
        return (
            of_q,
            of_k,
            of_v,
            None,
            *[None] * len(tables),
            *of_captured,
            *[None] * sum(map(len, others)),
        )

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        q, k, v, *tensors = ctx.saved_tensors
        kept = ctx.kept
        moving = _moving(tensors)
        given = [q, k, v, *(tensors[i] for i in moving)]
        known = [*tangents[:3], *(tangents[4 + i] for i in moving)]

        def dense(*x: Tensor) -> Any:
            return kept.dense(*x[:3], *_with(tensors, moving, x[3:]))[:2]

        return *jvp_of(dense, given, known), None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        return one_by_one(Flex, info, in_dims, args)


class _FlexGradient(torch.autograd.Function):
    """The gradients of queries, keys, values and captured tensors; their own derivatives use the
    full score matrix.
    """

    @staticmethod
    def forward(grad, of_weights, q, k, v, out, logsumexp, kept, *tensors):
        wide = sum_dtype(q.dtype)
        delta = (grad.to(wide) * out.to(wide)).sum(-1)
        delta = delta if of_weights is None else delta - of_weights
        return tuple(kept.call(FLEX_BACKWARD, tensors, grad, q, k, v, logsumexp, delta))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        grad, of_weights, q, k, v, _, _, ctx.kept, *tensors = inputs
        ctx.has_weights = of_weights is not None
        weights = [of_weights] if ctx.has_weights else []
        ctx.save_for_backward(grad, q, k, v, *weights, *tensors)
        ctx.save_for_forward(grad, q, k, v, *weights, *tensors)

    @staticmethod
    def _dense(ctx: Any) -> tuple[Callable[..., Any], list[Tensor], list[int], int]:
        """The gradients as a function of the differentiable arguments, these arguments, the
        positions of those among ``tensors``, and the number of ``tensors``.
        """
        grad, q, k, v, *tensors = ctx.saved_tensors
        weights = [tensors.pop(0)] if ctx.has_weights else []
        moving, kept = _moving(tensors), ctx.kept
        first = 4 + len(weights)
        at = range(kept.counts[0], kept.counts[0] + kept.counts[1])
        wanted = [i for i, is_wanted in zip(at, kept.wants, strict=True) if is_wanted]

        def gradients(*x: Tensor) -> Any:
            found = list(_with(tensors, moving, x[first:]))

            def attend(q: Tensor, k: Tensor, v: Tensor, *captured: Tensor) -> Any:
                return kept.dense(q, k, v, *_with(found, wanted, captured))[:2]

            run: Any = torch.func.vjp(attend, *x[1:4], *(found[i] for i in wanted))
            made, vjp = run
            return vjp((x[0], x[4] if weights else torch.zeros_like(made[1])))

        given = [grad, q, k, v, *weights, *(tensors[i] for i in moving)]
        return gradients, given, moving, len(tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        # The result and log-sum-exps get no gradient: they are functions of the other arguments.
        run, given, moving, count = _FlexGradient._dense(ctx)
        found: Any = torch.func.vjp(run, *given)
        of_grad, of_q, of_k, of_v, *more = found[1](grads)
        of_weights = more.pop(0) if ctx.has_weights else None
        of_tensors: list[Any] = [None] * count
        for i, x in zip(moving, more, strict=True):
            of_tensors[i] = x
        return of_grad, of_weights, of_q, of_k, of_v, None, None, None, *of_tensors

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        run, given, moving, _ = _FlexGradient._dense(ctx)
        weights = [tangents[1]] if ctx.has_weights else []
        known = [tangents[0], *tangents[2:5], *weights, *(tangents[8 + i] for i in moving)]
        return jvp_of(run, given, known)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        return one_by_one(_FlexGradient, info, in_dims, args)


def _moving(tensors: Sequence[Tensor]) -> list[int]:
    """Which tensors may have derivatives."""
    return [i for i, x in enumerate(tensors) if x.dtype.is_floating_point]


def _with(tensors: Sequence[Tensor], at: Sequence[int], new: Sequence[Tensor]) -> list[Tensor]:
    found = list(tensors)
    for i, x in zip(at, new, strict=True):
        found[i] = x
    return found
