"""Shapes and strides of an op's result, by the op's kernel for meta tensors.

Fake tensors find the same, but ask a dozen tables first, and from inside of their kernels they load
DTensor. Here are ops whose result depends only on shapes, strides and dtypes of operands, of the
same kind on every device.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ftp.ops.fused_optimizer import UPDATES, replacements
from ftp.ops.windows import JOIN_WINDOWS, WINDOWS
from ftp.torch_internals.dispatch import dispatch_has_kernel_for_dispatch_key
from ftp.torch_internals.fake_tensors import FakeTensor, FakeTensorMode
from ftp.torch_internals.modes import DisableTorchDispatch, DisableTorchFunction
from ftp.torch_internals.op_types import OpOverload

aten = torch.ops.aten
META = torch.device("meta")  # which torch would make of the text in each call


@functools.cache
def is_plain(func: OpOverload) -> bool:
    """Whether `meta_result` finds the op's result."""
    return func in _OURS or (
        func.namespace == "aten"
        and (func.overloadpacket in _OTHERS or torch.Tag.pointwise in func.tags)
        and torch.Tag.nondeterministic_seeded not in func.tags
        and not dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
    )


_OURS = frozenset((*UPDATES, WINDOWS, JOIN_WINDOWS))
_OTHERS = frozenset(
    (
        aten._log_softmax, aten._log_softmax_backward_data, aten._softmax,
        aten._softmax_backward_data, aten._unsafe_view, aten.alias, aten.amax, aten.amin, aten.bmm,
        aten.cat, aten.copy_, aten.cumsum, aten.detach, aten.diagonal, aten.embedding,
        aten.embedding_dense_backward, aten.empty_like, aten.expand, aten.fill_, aten.gather,
        aten.index_select, aten.mm, aten.new_full, aten.nll_loss_backward, aten.nll_loss_forward,
        aten.ones_like, aten.permute, aten.scatter_add, aten.select, aten.slice, aten.split,
        aten.split_with_sizes, aten.squeeze, aten.sum, aten.t, aten.transpose, aten.unfold,
        aten.unsqueeze, aten.view, aten.zeros_like,
    )
)  # fmt: skip


class FakeOf:
    """Makes a fake tensor of a meta tensor, as ``FakeTensor(mode, meta, device)``, which looks at
    each of its twenty attributes.
    """

    def __init__(self, mode: FakeTensorMode):
        self._mode = mode
        self._fresh: dict[torch.device, dict[str, Any]] = {}  # the attributes of a new fake tensor
        unsafe = mode._allow_unsafe_data_ptr_access
        self._guard = (
            torch._C._set_warn_deprecated_on_mutable_data_ptr
            if unsafe
            else torch._C._set_throw_on_mutable_data_ptr
        )

    def __call__(self, meta: Tensor, device: torch.device) -> FakeTensor:
        fresh = self._fresh.get(device)
        if fresh is None:
            one = FakeTensor(self._mode, torch.empty(0, device=META), device)
            fresh = self._fresh[device] = dict(one.__dict__)
        made = Tensor._make_subclass(
            FakeTensor, meta, False, dispatch_device=True, device_for_backend_keys=device
        )
        self._guard(made)
        made.__dict__.update(fresh)  # type: ignore[attr-defined]
        return made

    def like(self, x: Tensor, device: torch.device | None = None) -> FakeTensor:
        """A fake tensor of another tensor's shape, strides and dtype, on a device, by default the
        tensor's.
        """
        return self.strided(x.shape, x.stride(), x.dtype, device or x.device)

    def strided(
        self,
        shape: Sequence[int],
        stride: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> FakeTensor:
        with DisableTorchDispatch(), DisableTorchFunction():
            return self(torch.empty_strided(shape, stride, dtype=dtype, device=META), device)

    def contiguous(
        self, shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> FakeTensor:
        with DisableTorchDispatch(), DisableTorchFunction():
            return self(torch.empty(tuple(shape), dtype=dtype, device=META), device)


class _NotPlain(Exception):
    """An argument that fake tensors must look at."""


# Of floats of one layout these make floats of that layout. The kernels for meta tensors are Python,
# which takes ten times as long.
_OF_ONE_LAYOUT = frozenset(
    (
        aten.add.Scalar, aten.add.Tensor, aten.cos.default, aten.div.Scalar, aten.div.Tensor,
        aten.exp.default, aten.mul.Scalar, aten.mul.Tensor, aten.neg.default,
        aten.pow.Tensor_Scalar, aten.reciprocal.default, aten.relu.default, aten.rsqrt.default,
        aten.sigmoid.default, aten.silu.default, aten.sin.default, aten.sqrt.default,
        aten.sub.Scalar, aten.sub.Tensor, aten.tanh.default,
    )
)  # fmt: skip


def _of_one_layout(args: Sequence[Any]) -> Tensor | None:
    """The result of such an op; None if an operand is neither a number nor of the first one's
    shape, dtype and device, and dense in order.
    """
    tensors = [x for x in args if type(x) not in (int, float)]
    if any(type(x) is not FakeTensor or x._has_symbolic_sizes_strides for x in tensors):
        return None
    first = tensors[0]
    if args[0] is not first or not (first.is_floating_point() and first.numel()):
        return None
    made = torch.empty(first.shape, dtype=first.dtype, device="meta")
    layout = made.shape, made.stride(), made.dtype, first.fake_device
    is_one = all((x.shape, x.stride(), x.dtype, x.fake_device) == layout for x in tensors)
    return made if is_one and not any(x.is_neg() for x in tensors) else None


def meta_result(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The result of a call of fake tensors, on meta; a view is in its operand's memory. None if an
    argument is of another kind, or the call fails, which fake tensors explain better.
    """
    if func in _OF_ONE_LAYOUT and not kwargs:
        with DisableTorchDispatch(), DisableTorchFunction():
            if (made := _of_one_layout(args)) is not None:
                return made
    devices: set[torch.device] = set()
    with DisableTorchDispatch(), DisableTorchFunction():
        try:
            given = [_on_meta(x, devices) for x in args]
            named = {name: _on_meta(x, devices) for name, x in kwargs.items()}
            if len(devices) != 1:
                return None
            return replacements(*given) if func in UPDATES else func(*given, **named)
        except (_NotPlain, RuntimeError, IndexError, TypeError, ValueError, AssertionError):
            return None


def _on_meta(x: Any, devices: set[torch.device]) -> Any:
    if isinstance(x, Tensor):
        if type(x) is not FakeTensor or x._has_symbolic_sizes_strides:
            raise _NotPlain
        if x.layout is not torch.strided or x.is_conj() or x.is_neg():
            raise _NotPlain
        if not x.numel():  # fake tensors give views of nothing other strides
            raise _NotPlain
        devices.add(x.fake_device)
        plain = torch.empty(0, dtype=x.dtype, device="meta")
        return plain.set_(x.untyped_storage(), x.storage_offset(), x.shape, x.stride())
    if isinstance(x, list | tuple):
        return [_on_meta(one, devices) for one in x]
    if isinstance(x, torch.device | torch.layout | torch.SymInt | torch.SymFloat):
        raise _NotPlain
    return x
