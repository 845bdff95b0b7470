"""The memory of tensors. Read at torch 2.13."""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ftp.torch_internals.functorch import is_functorch_wrapped_tensor, unwrapped
from ftp.torch_internals.modes import DisableTorchFunction


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


def version(x: Tensor) -> int:
    """A number that rises with each write to the memory of a tensor. No mode takes this for a use
    of the tensor.
    """
    with DisableTorchFunction():
        return 0 if x.is_inference() else x._version


def storage_of(x: Tensor) -> torch.UntypedStorage | None:
    """The storage of a plain strided tensor; None of others."""
    is_plain = x.layout is torch.strided and not is_functorch_wrapped_tensor(x)
    return x.untyped_storage() if is_plain else None


def storage_number(x: Tensor) -> int:
    """A number of the memory that a tensor, or the one inside its wrappers, lies in; of tensors
    that are not plain and strided, of itself.
    """
    with DisableTorchFunction():
        x = unwrapped(x)
        storage = storage_of(x)
    return id(x) if storage is None else storage._cdata


class Storages:
    """Storages by their tensors' names, none of them kept alive.

    >>> x = torch.zeros(2)
    >>> Storages({"x": x}).name(x[1:]), Storages({"x": x}).name(x + 1)
    ('x', None)
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        of = {name: storage_of(x) for name, x in tensors.items()}
        self._references = [StorageWeakRef(s) for s in of.values() if s is not None]
        self._names = {s._cdata: name for name, s in of.items() if s is not None}

    def name(self, x: Tensor) -> str | None:
        """The name of the tensor in whose storage a plain tensor lies; None if of none."""
        if not self._names:
            return None
        with DisableTorchFunction():
            storage = storage_of(x)
        return None if storage is None else self._names.get(storage._cdata)


def overlaps(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Of each tensor between whose first and last element in memory another one has some: the name
    of one such.

    >>> x = torch.zeros(6)
    >>> overlaps({"a": x[:4], "b": x[2:], "c": x.clone(), "d": x[5:]})
    {'a': 'b', 'b': 'a', 'd': 'b'}
    """
    spans: dict[str, tuple[int, int]] = {}
    for name, x in tensors.items():
        if (storage := storage_of(x)) is not None and x.numel() and storage.data_ptr():
            last = sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
            spans[name] = x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()
    found: dict[str, str] = {}
    furthest = ""
    for name in sorted(spans, key=lambda name: spans[name]):
        if furthest and spans[name][0] < spans[furthest][1]:
            found.setdefault(furthest, name)
            found[name] = furthest
        if not furthest or spans[name][1] > spans[furthest][1]:
            furthest = name
    return {name: found[name] for name in tensors if name in found}
