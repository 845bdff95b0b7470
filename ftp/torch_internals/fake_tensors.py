"""Tensors without values, and the errors of ops that read values. Read at torch 2.13."""

from typing import Any

import torch
from torch._C import _set_throw_on_mutable_data_ptr
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
    is_fake,
)


def mode_for(env: Any) -> FakeTensorMode:
    """A mode for ops on sizes of a ``ShapeEnv``, None for plain sizes. It keeps no results of ops
    on symbolic sizes, whose comparison takes longer than the op.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=env)
    mode.cache_enabled = mode.cache_enabled and env is None
    return mode


def index_in_slice(size: Any, index: Any) -> Any:
    """torch's place of a slice's bound within a dim. Where sizes leave it open, as in
    ``x[: s - 1]`` for an ``s`` that may be zero, comparisons of sizes decide: they become guards.
    """
    found = _index_in_slice(size, index)
    if found is not None:
        return found
    index = index if index >= 0 else index + size
    return 0 if index < 0 else index if index <= size else size


_index_in_slice = fake_impls._compute_slice_index
SLICES = fake_impls, {"_compute_slice_index": index_in_slice}


def list_at_once(x: FakeTensor) -> Any:
    """``x.tolist()`` as one call, which function modes see. torch lists a tensor without values an
    item at a time, and refuses the call where no mode answers it.
    """
    try:
        return torch.Tensor.tolist(x)
    except RuntimeError:
        return _list_by_items(x)


_list_by_items = FakeTensor.tolist
LISTS = FakeTensor, {"tolist": list_at_once}
