"""The memory of tensors. Read at torch 2.13."""

import torch


def is_shared(storage: torch.UntypedStorage) -> bool:
    """Whether several tensors use a storage.

    >>> x = torch.zeros(2)
    >>> is_shared(x.untyped_storage())
    False
    >>> y = x.detach()
    >>> is_shared(x.untyped_storage())
    True
    """
    return torch._C._storage_Use_Count(storage._cdata) > 2  # one tensor, and the object given
