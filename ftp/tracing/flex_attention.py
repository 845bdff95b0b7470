"""``flex_attention`` by tiles while a program is traced.

torch's own kernel needs whole sequences, and on a CPU has no backward pass. ``score_mod`` and
``mask_mod`` become graphs of their own, which run on one tile of scores at a time. Derivatives of
higher order and in forward mode use the full score matrix.
"""

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ftp.ops.attention import sum_dtype
from ftp.ops.attention_flex import FLEX, FLEX_BACKWARD
from ftp.ops.listed_blocks import known_of, listed
from ftp.ops.score_functions import evaluate
from ftp.torch_internals.functorch import (
    is_functorch_wrapped_tensor,
    temporarily_clear_interpreter_stack,
)
from ftp.torch_internals.modes import disable_current_modes
from ftp.tracing.dense_attention import jvp_of, one_by_one, replaced, scores_of, weighted
from ftp.tracing.score_functions import as_program

_WHOLE = 1 << 30  # the size of a block that stands for all of a sequence


@contextmanager
def flex_attention() -> Iterator[None]:
    """``flex_attention`` by tiles."""
    module: Any = sys.modules.get("torch.nn.attention.flex_attention")
    new = {
        "flex_attention_hop": _flex,
        "_validate_device": lambda *_: None,  # it refuses gradients on a CPU
        "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG": True,
    }
    with replaced(module, new):
        yield


def _flex(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor],
    block_mask: tuple[Any, ...],
    scale: float,
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """The result, and the scores' log-sum-exp and maximum, in base 2 like the kernel's."""
    module: Any = sys.modules["torch.nn.attention.flex_attention"]
    *block, mask_mod = block_mask[-3:]
    tables = [x for x in block_mask[2:6] if x is not None] if min(block) < _WHOLE else []
    key, value = (x.expand(query.shape[0], *x.shape[1:]) for x in (key, value))
    sizes = *query.shape[:3], key.shape[2]
    given: Any = sizes, sum_dtype(query.dtype), query.device
    score, of_score = "", []
    if score_mod is not module._identity:
        score, of_score = as_program(score_mod, False, *given)
    mask, of_mask = "", []
    if mask_mod is not module.noop_mask:
        mask, of_mask = as_program(mask_mod, True, *given)
    counts = len(tables), len(of_score), len(of_mask)
    kept = Kept(counts, tuple(block), scale, score, mask, _known(tables))
    out, logsumexp, top = _Flex.apply(query, key, value, kept, *tables, *of_score, *of_mask)
    return out, logsumexp / math.log(2), top / math.log(2)


def _known(tables: Sequence[Tensor]) -> str:
    """Facts about block tables that were made before the trace."""
    if not tables or not all(map(_is_given, tables)):
        return ""
    with disable_current_modes(), temporarily_clear_interpreter_stack():
        return known_of(tables)


def _is_given(x: Tensor) -> bool:
    is_wrapped = is_functorch_wrapped_tensor(x)
    return type(x) is Tensor and not is_wrapped and x.device.type != "meta"


@dataclass(frozen=True)
class Kept:
    """The arguments of a call that are no tensors. ``counts``: numbers of block tables and of
    tensors that ``score_mod`` and ``mask_mod`` capture. ``wants``: which tensors of ``score_mod``
    need a gradient.
    """

    counts: tuple[int, int, int]
    block: tuple[int, int]
    scale: float
    score: str
    mask: str
    known: str
    wants: tuple[bool, ...] = ()

    def call(self, op: Any, tensors: Sequence[Tensor], *first: Tensor) -> Any:
        tables, of_score, of_mask = self.split(tensors)
        rest = list(self.block), self.scale, self.score, self.mask, self.known
        more = [] if op is FLEX else [list(self.wants)]
        return op(*first, tables, of_score, of_mask, [], [], [], [], *rest, *more)

    def split(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        a, b, _ = self.counts
        return list(tensors[:a]), list(tensors[a : a + b]), list(tensors[a + b :])

    def dense(
        self, q: Tensor, k: Tensor, v: Tensor, *tensors: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """By the full score matrix, for derivatives of higher order."""
        tables, of_score, of_mask = self.split(tensors)
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
        return weighted(scores, sees, v, q.dtype)


class _Flex(torch.autograd.Function):
    """Attention by tiles, forward and backward."""

    @staticmethod
    def forward(q, k, v, kept, *tensors):  # type: ignore[override]
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
    def backward(  # type: ignore[override]
        ctx: Any, grad: Tensor | None, of_weights: Tensor | None, _: Any
    ) -> Any:
        q, k, v, out, logsumexp, *tensors = ctx.saved_tensors
        if grad is None and of_weights is None:
            return (None,) * (4 + len(tensors))
        grad = torch.zeros_like(out) if grad is None else grad
        tables, of_score, of_mask = ctx.kept.split(tensors)
        needed = ctx.needs_input_grad[4 + len(tables) :]
        wants = [x.dtype.is_floating_point and n for x, n in zip(of_score, needed, strict=False)]
        kept = replace(ctx.kept, wants=tuple(wants))
        of_q, of_k, of_v, *made = _FlexGradient.apply(
            grad, of_weights, q, k, v, out, logsumexp, kept, *tensors
        )
        found = iter(made)
        of_captured = [next(found) if is_wanted else None for is_wanted in wants]
        return of_q, of_k, of_v, None, *[None] * len(tables), *of_captured, *[None] * len(of_mask)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:  # type: ignore[override]
        q, k, v, *tensors = ctx.saved_tensors
        kept = ctx.kept
        moving = _moving(tensors)
        given = [q, k, v, *(tensors[i] for i in moving)]
        known = [*tangents[:3], *(tangents[4 + i] for i in moving)]

        def dense(*x: Tensor) -> Any:
            return kept.dense(*x[:3], *_with(tensors, moving, x[3:]))[:2]

        return *jvp_of(dense, given, known), None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:  # type: ignore[override]
        return one_by_one(_Flex, info, in_dims, args)


class _FlexGradient(torch.autograd.Function):
    """The gradients of queries, keys, values and captured tensors; their own derivatives use the
    full score matrix.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        grad, of_weights, q, k, v, out, logsumexp, kept, *tensors
    ):
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
    def backward(ctx: Any, *grads: Tensor) -> Any:  # type: ignore[override]
        # The result and the log-sum-exps are functions of the others: theirs are in those.
        run, given, moving, count = _FlexGradient._dense(ctx)
        found: Any = torch.func.vjp(run, *given)
        of_grad, of_q, of_k, of_v, *more = found[1](grads)
        of_weights = more.pop(0) if ctx.has_weights else None
        of_tensors: list[Any] = [None] * count
        for i, x in zip(moving, more, strict=True):
            of_tensors[i] = x
        return of_grad, of_weights, of_q, of_k, of_v, None, None, None, *of_tensors

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:  # type: ignore[override]
        run, given, moving, _ = _FlexGradient._dense(ctx)
        weights = [tangents[1]] if ctx.has_weights else []
        known = [tangents[0], *tangents[2:5], *weights, *(tangents[8 + i] for i in moving)]
        return jvp_of(run, given, known)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:  # type: ignore[override]
        return one_by_one(_FlexGradient, info, in_dims, args)


def _moving(tensors: Sequence[Tensor]) -> list[int]:
    """Which tensors may have derivatives."""
    return [i for i, x in enumerate(tensors) if x.dtype.is_floating_point]


def _with(tensors: Sequence[Tensor], at: Sequence[int], new: Sequence[Tensor]) -> list[Tensor]:
    found = list(tensors)
    for i, x in zip(at, new, strict=True):
        found[i] = x
    return found
