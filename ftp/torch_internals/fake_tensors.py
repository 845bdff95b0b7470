"""Tensors without values, and the errors of ops that read values. Read at torch 2.13."""

from typing import Any

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
