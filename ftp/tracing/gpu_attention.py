"""Replace the CPU's fused attention in a trace for a GPU by the GPU's.

A build of torch without CUDA traces programs for GPUs with the CPU's kernels. The CPU's attention
takes other arguments and saves other tensors for the backward pass than the GPU's.
"""

import operator
from typing import Any

import torch
from torch import fx

from ftp.ops.mapped_arguments import mapped_arguments
from ftp.ops.tile_kernels import ALIGNED, WIDEST_HEAD
from ftp.torch_internals.fake_tensors import FakeTensorMode

aten = torch.ops.aten
CPU = aten._scaled_dot_product_flash_attention_for_cpu.default
CPU_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
FLASH = aten._scaled_dot_product_flash_attention.default
FLASH_BACKWARD = aten._scaled_dot_product_flash_attention_backward.default
EFFICIENT = aten._scaled_dot_product_efficient_attention.default
EFFICIENT_BACKWARD = aten._scaled_dot_product_efficient_attention_backward.default
MASK_ALIGNED = 16  # a mask's row must be a multiple of this, in elements


def with_gpu_attention(graph: fx.Graph, mode: FakeTensorMode) -> None:
    """Replace the CPU's fused attention by the kernel that torch picks on a GPU: flash attention in
    half precision without a mask, else the memory-efficient one.

    Calls that neither takes (float64, sizes that are not aligned) stay as they are.
    """
    forward = {n: kernel for n in graph.nodes if n.target is CPU and (kernel := _kernel(n))}
    backward = [n for n in graph.nodes if n.target is CPU_BACKWARD]
    for node in backward:
        made = _forward_of(node)
        if made is None:  # then its forward op keeps the kernel too
            for out in (x for x in node.args[1:4] if isinstance(x, fx.Node)):
                for user in out.users:
                    forward.pop(user, None)
    for node, kernel in forward.items():
        _replace(node, kernel, mode)
    for node in backward:
        made = _forward_of(node)
        if made is not None and made in forward:
            _replace_backward(node, made, mode)


def _kernel(node: fx.Node) -> Any:
    """The kernel that torch picks on a GPU; None if neither takes the call."""
    q, k, v = (x.meta["val"] for x in node.args[:3])  # type: ignore[union-attr]
    mask: Any = node.kwargs.get("attn_mask")
    is_aligned = q.shape[3] % ALIGNED == v.shape[3] % ALIGNED == 0
    if not is_aligned or q.dtype is torch.float64:
        return None
    is_half = q.dtype in (torch.float16, torch.bfloat16)
    if is_half and mask is None and q.shape[3] == v.shape[3] <= WIDEST_HEAD:
        return FLASH
    if q.shape[1] != k.shape[1]:
        return None
    if mask is not None:
        val = mask.meta["val"]
        if val.dtype is not q.dtype or val.shape[-1] % MASK_ALIGNED:
            return None
    return EFFICIENT


def _forward_of(node: fx.Node) -> fx.Node | None:
    out: Any = node.args[4]
    if not isinstance(out, fx.Node) or out.target is not operator.getitem:
        return None
    made: Any = out.args[0]
    return made if made.target in (CPU, FLASH, EFFICIENT) else None


def _replace(node: fx.Node, kernel: Any, mode: FakeTensorMode) -> None:
    q, k, v, *rest = node.args
    mask: Any = node.kwargs.get("attn_mask")
    options = [*rest, *(0.0, False)[len(rest) :]][:2]  # dropout, is_causal
    more = [] if kernel is FLASH else [_expanded(node, mask, q, k, mode), True]
    _call_instead(node, kernel, (q, k, v, *more, *options), mode)


def _call_instead(node: fx.Node, kernel: Any, args: tuple[Any, ...], mode: FakeTensorMode) -> None:
    scale: Any = node.kwargs.get("scale")
    node.target, node.args = kernel, args
    node.kwargs = {} if scale is None else {"scale": scale}
    node.meta["val"] = _ran(node, mode)
    for user in node.users:
        user.meta["val"] = node.meta["val"][user.args[1]]


def _expanded(node: fx.Node, mask: Any, q: Any, k: Any, mode: FakeTensorMode) -> Any:
    """A broadcast mask, expanded: the kernel reads it by strides."""
    if mask is None:
        return None
    b, h, s, _ = q.meta["val"].shape
    shape = [b, h, s, k.meta["val"].shape[2]]
    if list(mask.meta["val"].shape) == shape:
        return mask
    with node.graph.inserting_before(node):
        made = node.graph.call_function(aten.expand.default, (mask, shape))
    made.meta = {**node.meta, "val": _ran(made, mode)}
    return made


def _replace_backward(node: fx.Node, made: fx.Node, mode: FakeTensorMode) -> None:
    grad, q, k, v, out, lse, *rest = node.args
    dropout, causal = [*rest, *(0.0, False)[len(rest) :]][:2]

    def result(index: int) -> fx.Node:
        for user in made.users:
            if user.target is operator.getitem and user.args[1] == index:
                return user
        with node.graph.inserting_after(made):
            item = node.graph.call_function(operator.getitem, (made, index))
        item.meta = {**made.meta, "val": made.meta["val"][index]}
        return item

    if made.target is FLASH:
        sizes = made.meta["val"][2:6]  # none, none, queries, keys
        args = (grad, q, k, v, out, lse, *sizes, dropout, causal, result(6), result(7))
        _call_instead(node, FLASH_BACKWARD, args, mode)
    else:
        args = (
            grad, q, k, v, made.args[3], out, lse, result(2), result(3), dropout,
            [True, True, True, False], causal,
        )  # fmt: skip
        _call_instead(node, EFFICIENT_BACKWARD, args, mode)


def _ran(node: fx.Node, mode: FakeTensorMode) -> Any:
    """The fake result of a call."""
    args, kwargs = mapped_arguments(node, lambda x: x.meta["val"])
    with mode:
        return node.target(*args, **kwargs)  # type: ignore[operator]
