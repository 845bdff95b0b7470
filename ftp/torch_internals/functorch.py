"""The transforms of ``torch.func`` that a tensor or a call is in. Read at torch 2.13."""

from torch import Tensor
from torch._C._functorch import (
    TransformType,
    get_interpreter_stack,
    get_unwrapped,
    is_batchedtensor,
    is_functorch_wrapped_tensor,
    is_gradtrackingtensor,
    maybe_get_level,
    peek_interpreter_stack,
    unwrap_if_dead,
)
from torch._C._functorch import _add_batch_dim as add_batch_dim
from torch._C._functorch import _unwrap_batched as unwrap_batched
from torch._functorch.autograd_function import custom_function_call
from torch._functorch.pyfunctorch import (
    VmapInterpreter,
    retrieve_all_functorch_interpreters,
    retrieve_current_functorch_interpreter,
    temporarily_clear_interpreter_stack,
)


def unwrapped(x: Tensor) -> Tensor:
    """The tensor inside all wrappers of ``torch.func``; under vmap it has the mapped dims too."""
    while is_functorch_wrapped_tensor(x):
        x = get_unwrapped(x)
    return x


def maps_around() -> list[VmapInterpreter]:
    """The calls of ``torch.vmap`` that are running, the outermost first."""
    return [
        one for one in retrieve_all_functorch_interpreters() if isinstance(one, VmapInterpreter)
    ]


def is_mapped_by(x: Tensor, level: int) -> bool:
    """Whether the ``vmap`` of a level maps over a tensor."""
    while is_functorch_wrapped_tensor(x):
        if is_batchedtensor(x) and maybe_get_level(x) == level:
            return True
        x = get_unwrapped(x)
    return False


def is_batched(x: Tensor) -> bool:
    """Whether a tensor is mapped by ``vmap``, at any level."""
    while is_functorch_wrapped_tensor(x):
        if is_batchedtensor(x):
            return True
        x = get_unwrapped(x)
    return False
