"""Elements that are repeated along a dim: keys of fewer heads than queries.

In views, and within attention, repeated elements are cut only as the elements are. By an op that
repeats them they are cut in more parts than there are elements, as query heads are over more ranks
than there are heads of keys: each rank picks from all keys those of its query heads, and their
gradients are pending sums.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ftp.ops.attention_varlen import VARLEN, VARLEN_BACKWARD
from ftp.ops.repeat_each import REPEAT_EACH, SUM_EACH
from ftp.rules.op_kinds import BACKWARD
from ftp.rules.overloads import MissingOp, aten
from ftp.torch_internals.op_types import OpOverload


def _with_keys_of_each_head(op: OpOverload) -> Callable[..., Any]:
    def attention(q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Any:
        times = q.shape[1] // k.shape[1]
        k, v = (REPEAT_EACH(x, times, 1) for x in (k, v))
        return op(q, k, v, *args, **kwargs)

    return attention


def _with_keys_of_each_head_backward(op: OpOverload) -> Callable[..., Any]:
    def backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Any:
        times = q.shape[1] // k.shape[1]
        k, v = (REPEAT_EACH(x, times, 1) for x in (k, v))
        dq, dk, dv, *rest = op(grad, q, k, v, *args, **kwargs)
        return dq, SUM_EACH(dk, times, 1), SUM_EACH(dv, times, 1), *rest

    return backward


# Attention whose keys may have fewer heads than its queries, as attention to the keys of each head.
OF_HEADS: dict[OpOverload, Callable[..., Any]] = {
    op: by(op)
    for by, ops in (
        (
            _with_keys_of_each_head,
            (
                aten._scaled_dot_product_flash_attention_for_cpu.default,
                aten._scaled_dot_product_flash_attention.default,
                aten._scaled_dot_product_cudnn_attention.default,
                VARLEN,
            ),
        ),
        (
            _with_keys_of_each_head_backward,
            (
                aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
                aten._scaled_dot_product_flash_attention_backward.default,
                aten._scaled_dot_product_cudnn_attention_backward.default,
                VARLEN_BACKWARD,
            ),
        ),
    )
    for op in ops
    if not isinstance(op, MissingOp)
}


def shares_keys(target: Any, operands: Sequence[tuple[int, ...]]) -> bool:
    """Whether an op on operands of these sizes is attention of ``OF_HEADS`` with fewer heads of
    keys than of queries.
    """
    at = int(target in BACKWARD)
    return target in OF_HEADS and 0 < operands[at + 1][1] < operands[at][1]


def merged_dim(apart: tuple[int, ...], merged: tuple[int, ...]) -> int | None:
    """The dim of ``merged`` that a view makes of this dim and the next one of ``apart``; None if
    that is not all it does.

    >>> merged_dim((4, 2, 3, 5), (4, 6, 5))
    1
    """
    if len(apart) != len(merged) + 1:
        return None
    dim = next((d for d, (a, b) in enumerate(zip(apart, merged, strict=False)) if a != b), None)
    if dim is None or apart[dim] * apart[dim + 1] != merged[dim]:
        return None
    return dim if apart[dim + 2 :] == merged[dim + 1 :] else None


def repeated_dim(
    few: tuple[int, ...], many: tuple[int, ...], merged: tuple[int, ...]
) -> int | None:
    """The dim whose elements an expansion of ``few`` to ``many``, viewed as ``merged``, repeats."""
    dim = merged_dim(many, merged)
    if dim is None or few != (*many[: dim + 1], 1, *many[dim + 2 :]):
        return None
    return dim
