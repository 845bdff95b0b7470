"""One tile's attention with its log-sum-exps by a kernel of its device, and the tile's gradients
from the merged result and log-sum-exps.

A CPU's kernel takes any tile. On a GPU flash attention takes tiles in half precision, and
memory-efficient attention those in single precision. Tiles that have a mask on a GPU, or that no
kernel takes (float64, other dims of values than of queries on a CPU), are computed by their scores.
"""

import math

import torch
from torch import Tensor

aten = torch.ops.aten
WIDEST_HEAD = 256  # of flash attention, in elements
ALIGNED = 8  # a head's size must be a multiple of this on a GPU, in elements
_PADDED = 32  # memory-efficient attention pads log-sum-exps to a multiple of this


def kernel_of(q: Tensor, v: Tensor, has_mask: bool) -> str:
    """``"cpu"``, ``"flash"`` or ``"efficient"``; ``""`` where no kernel takes a tile."""
    device, is_half = device_of(q), q.dtype in (torch.float16, torch.bfloat16)
    if device == "cpu":
        return "cpu" if q.shape[3] == v.shape[3] else ""
    if device != "cuda" or has_mask or q.shape[3] % ALIGNED or v.shape[3] % ALIGNED:
        return ""
    if is_half and q.shape[3] == v.shape[3] <= WIDEST_HEAD:
        return "flash"
    return "efficient" if q.dtype == torch.float32 else ""


def device_of(x: Tensor) -> str:
    return x.device.type


def forward(
    kernel: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """The result and its log-sum-exps (batch, heads, queries) of contiguous tensors."""
    if kernel == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, is_causal, attn_mask=mask, scale=scale
        )
    if kernel == "flash":
        return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal, scale=scale)[:2]
    k, v = (repeated_heads(x, q.shape[1]) for x in (k, v))
    out, logsumexp, *_ = aten._scaled_dot_product_efficient_attention(
        q, k, v, None, True, 0.0, is_causal, scale=scale
    )
    return out, logsumexp[:, :, : q.shape[2]]


def backward(
    kernel: str,
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of contiguous queries, keys and values."""
    given = grad, q, k, v
    if kernel == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *given, out, logsumexp, 0.0, is_causal, attn_mask=mask, scale=scale
        )
    if kernel == "flash":  # without dropout the kernel does not read the generator's state
        state = (torch.zeros(n, dtype=torch.uint64, device=q.device) for n in ([2], []))
        sizes = None, None, q.shape[2], k.shape[2]
        return aten._scaled_dot_product_flash_attention_backward(
            *given, out, logsumexp, *sizes, 0.0, is_causal, *state, scale=scale
        )
    near = (repeated_heads(x, q.shape[1]) for x in (k, v))
    padding = -q.shape[2] % _PADDED
    padded = torch.nn.functional.pad(logsumexp, (0, padding), value=math.inf)
    state = (torch.zeros((), dtype=torch.int64, device=q.device) for _ in range(2))
    wanted = [True, True, True, False]
    of_q, of_k, of_v, _ = aten._scaled_dot_product_efficient_attention_backward(
        grad, q, *near, None, out, padded, *state, 0.0, wanted, is_causal, scale=scale
    )
    return of_q, over_heads(of_k, k), over_heads(of_v, v)


def repeated_heads(x: Tensor, heads: int) -> Tensor:
    """Keys or values, with each head repeated for the heads of queries that share it."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def over_heads(x: Tensor, like: Tensor) -> Tensor:
    """The sum over the heads of queries that share a head of keys."""
    if x.shape[1] == like.shape[1]:
        return x
    return x.unflatten(1, (like.shape[1], -1)).sum(2)
