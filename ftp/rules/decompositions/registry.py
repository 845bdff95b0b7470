"""Registry of decompositions, and the helpers that they share."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ftp.rules.overloads import MissingOp
from ftp.torch_internals.op_types import OpOverload, decomposition_table

# Of a call, in the planner's graph or a traced one, and the shapes of its tensors.
HoldsForCall = Callable[[Any, Sequence[Sequence[Any]]], bool]
DECOMPOSITIONS: dict[OpOverload, Callable[..., Any]] = {}
_OF_CALLS: dict[OpOverload, tuple[HoldsForCall, Callable[..., Any]]] = {}
HALF = (torch.float16, torch.bfloat16)
NONE, MEAN = 0, 1


def decomposition(
    *ops: OpOverload, where: HoldsForCall | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function of the op's signature that computes it from other ops. Ops that torch
    lacks are skipped.

    Args:
        where: of which calls, in place of the decomposition of all others.
    """

    def register(fn: Callable[..., Any]) -> Callable[..., Any]:
        known = [op for op in ops if not isinstance(op, MissingOp)]
        if where is None:
            DECOMPOSITIONS.update((op, fn) for op in known)
        else:
            _OF_CALLS.update((op, (where, fn)) for op in known)
        return fn

    return register


def decomposition_of(node: Any, shapes: Sequence[Sequence[Any]]) -> Callable[..., Any] | None:
    """The decomposition of a call on tensors of these shapes; None if it has none."""
    where, by = _OF_CALLS.get(node.target, (None, None))
    is_of_call = where is not None and where(node, shapes)
    return by if is_of_call else DECOMPOSITIONS.get(node.target)


def from_torch(*ops: OpOverload) -> None:
    """Register torch's own decompositions, if they cost as few collectives as ours would and lose
    no precision.
    """
    DECOMPOSITIONS.update((op, decomposition_table[op]) for op in ops if op in decomposition_table)


def widened(x: Tensor) -> Tensor:
    return x.to(torch.float32) if x.dtype in HALF else x


def largest(x: Tensor, dim: Any) -> Tensor:
    """The maximum along ``dim`` (kept dim); ``-inf`` if there is no element."""
    dims = wrapped_dims(x, dim)
    if any(x.shape[d] == 0 for d in dims):
        return x.new_full([1 if d in dims else size for d, size in enumerate(x.shape)], -math.inf)
    return torch.amax(x, dims, True)


def element_count(x: Tensor, dims: Sequence[int]) -> int:
    return math.prod(x.shape[d] for d in dims) if x.ndim else 1


def wrapped_dims(x: Tensor, dim: Any) -> list[int]:
    if dim is None or (isinstance(dim, list | tuple) and not dim):
        return list(range(x.ndim))
    return [d % max(x.ndim, 1) for d in ([dim] if isinstance(dim, int) else dim)] if x.ndim else []
