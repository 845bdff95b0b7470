"""``copy.deepcopy`` of traced tensors, as of a tree of parameters: torch copies their memory."""

from typing import Any

from torch import Tensor

from ftp.errors import TraceError
from ftp.source import at_line
from ftp.torch_internals.fake_tensors import is_fake
from ftp.torch_internals.functorch import unwrapped


def deepcopy(x: Tensor, memo: dict[Any, Any]) -> Tensor:
    """A copy that no gradient goes through. Views of one tensor, whose copies share memory in
    torch, are refused.
    """
    if not is_fake(unwrapped(x)):
        return x.__deepcopy__(memo)
    storage = "ftp", unwrapped(x).untyped_storage()._cdata
    if storage in memo:
        raise TraceError(
            f"{at_line()}copy.deepcopy of several views of one tensor: their copies would share its"
            " memory. Copy the tensor, and take the views of the copy."
        )
    memo[storage] = True
    memo[id(x)] = x.detach().clone()
    return memo[id(x)]
