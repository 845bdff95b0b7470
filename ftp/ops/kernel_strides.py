"""Kernels that misread operands of some strides, or refuse them. A trace calls them with strides
that fit; a rank's operands may have others, as after a gather, and are copied first.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def kernel_of(target: Any) -> Any:
    """A function that calls an op with the strides that its kernels take; for other targets,
    themselves.

    >>> q = torch.randn(1, 2, 4, 5)  # attention takes heads whose elements are neighbours
    >>> op = aten._scaled_dot_product_flash_attention_for_cpu.default
    >>> other = q.mT.contiguous().mT
    >>> torch.allclose(kernel_of(op)(other, other, other)[0], op(q, q, q)[0])
    True
    """
    return _KERNELS.get(target, target)


def laid_out(args: Sequence[Any], at: Sequence[int], fits: Callable[[Tensor], bool]) -> list[Any]:
    """The arguments, of which those at some positions are copied if their strides do not fit."""
    found = list(args)
    for i in at:
        if i < len(found) and found[i] is not None and not fits(found[i]):
            found[i] = found[i].contiguous()
    return found


def traced_kernels() -> dict[Any, Callable[..., Any]]:
    """Decompositions of the ops into copies, where strides do not fit, and the op."""
    return {op: _decomposition(op, *takes) for op, takes in _TAKES.items()}


def _kernel(op: Any, at: Sequence[int], fits: Callable[[Tensor], bool]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return op(*laid_out(args, at, fits), **kwargs)

    call.__name__ = op.__name__
    return call


def _decomposition(op: Any, at: Sequence[int], fits: Callable[[Tensor], bool]) -> Any:
    def decomposed(*args: Any, **kwargs: Any) -> Any:
        found = laid_out(args, at, fits)
        is_same = all(x is y for x, y in zip(found, args, strict=True))
        return NotImplemented if is_same else op(*found, **kwargs)

    return decomposed


def _has_rows(x: Tensor) -> bool:
    """Whether the elements along the last dim are neighbours in memory."""
    return not x.ndim or x.stride(-1) == 1


def _has_channels(x: Tensor) -> bool:
    """Whether a 3D image is contiguous, or its channels are neighbours."""
    return x.is_contiguous() or x.is_contiguous(memory_format=torch.channels_last_3d)


# Per op the positions of operands, and which strides of them its kernels take. Other operands of
# norms are made contiguous by their rules (`ftp.rules.local_forms`), as shapes are followed too.
_TAKES: dict[Any, tuple[tuple[int, ...], Callable[[Tensor], bool]]] = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: ((0, 1, 2), _has_rows),
    aten._scaled_dot_product_flash_attention.default: ((0, 1, 2), _has_rows),
    aten._scaled_dot_product_efficient_attention.default: ((0, 1, 2), _has_rows),
    aten._scaled_dot_product_cudnn_attention.default: ((0, 1, 2), _has_rows),
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: (
        (0, 1, 2, 3, 4),
        _has_rows,
    ),
    aten._scaled_dot_product_flash_attention_backward.default: ((0, 1, 2, 3, 4), _has_rows),
    aten._scaled_dot_product_efficient_attention_backward.default: ((0, 1, 2, 3, 5), _has_rows),
    aten._scaled_dot_product_cudnn_attention_backward.default: ((0, 1, 2, 3, 4), _has_rows),
    aten._embedding_bag.default: ((1, 2), Tensor.is_contiguous),
    aten._embedding_bag_forward_only.default: ((1, 2), Tensor.is_contiguous),
    aten._embedding_bag_backward.default: ((1, 2, 3, 4), Tensor.is_contiguous),
    aten._embedding_bag_per_sample_weights_backward.default: ((2, 3, 4), Tensor.is_contiguous),
    aten._pdist_forward.default: ((0,), Tensor.is_contiguous),
    aten._pdist_backward.default: ((1, 3), Tensor.is_contiguous),
    aten._weight_norm_interface.default: ((1,), Tensor.is_contiguous),
    aten._weight_norm_interface_backward.default: ((2, 3), Tensor.is_contiguous),
    aten.adaptive_max_pool3d_backward.default: ((2,), Tensor.is_contiguous),
    aten.max_pool3d_with_indices.default: ((0,), _has_channels),
    aten.max_pool3d_with_indices_backward.default: ((0, 1), _has_channels),
    aten.native_group_norm.default: ((1, 2), Tensor.is_contiguous),
    aten.native_group_norm_backward.default: ((2, 3, 4), Tensor.is_contiguous),
    aten.native_layer_norm_backward.default: ((3, 4, 5), Tensor.is_contiguous),
    aten.nll_loss2d_backward.default: ((1,), Tensor.is_contiguous),
}
_KERNELS = {op: _kernel(op, *takes) for op, takes in _TAKES.items()}
