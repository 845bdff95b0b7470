"""Modes that see each call or op, and how to be without them. Read at torch 2.13."""

from functools import cache

from torch._C import DisableTorchFunction
from torch._C import _DisableTorchDispatch as DisableTorchDispatch
from torch._dispatch.python import enable_python_dispatcher
from torch.overrides import _get_current_function_mode_stack as get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes
from torch.utils._python_dispatch import (
    _get_current_dispatch_mode_stack as get_current_dispatch_mode_stack,
)


@cache
def is_wrapper(kind: type) -> bool:
    """Whether tensors of this class hold other tensors, with which it computes."""
    return is_traceable_wrapper_subclass_type(kind)
