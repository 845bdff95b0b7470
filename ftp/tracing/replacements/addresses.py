"""Addresses of traced tensors: stand-ins for ``data_ptr()``, as a traced tensor has no memory.

Code compares addresses to see whether two arguments are one tensor (``q.data_ptr() ==
k.data_ptr()``), uses them as cache keys, and asks for their alignment.
"""

from typing import Any, Never

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ftp.errors import TraceError
from ftp.source import at_line
from ftp.torch_internals.fake_tensors import is_fake
from ftp.torch_internals.functorch import unwrapped

_ALIGNED = 64  # bytes: where memory of its own begins


class Address:
    """Equal for tensors that begin at one place. Code that needs the number raises TraceError."""

    def __init__(self, storage: int, offset: int):
        self._place = storage, offset

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Address) and self._place == other._place

    def __hash__(self) -> int:
        return hash(self._place)

    def __bool__(self) -> bool:
        return True

    def __mod__(self, n: int) -> int:
        if _ALIGNED % n:
            self._refuse()
        return self._place[1] % n

    def _refuse(self, *_: Any) -> Never:
        raise TraceError(
            f"{at_line()}The function needs a tensor's address as a number. A traced tensor has no"
            " memory: x.data_ptr() may be compared, used as a key, or checked for alignment."
            " Wrap code that reads memory in torch.library.custom_op."
        )

    __index__ = __int__ = __float__ = __format__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __floordiv__ = __and__ = __rshift__ = (
        _refuse
    )
    __lt__ = __le__ = __gt__ = __ge__ = _refuse


class Addresses:
    """The addresses of one trace; two storages never share one."""

    def __init__(self) -> None:
        # The weak references keep a storage's place in memory from being used again.
        self._known: dict[int, tuple[StorageWeakRef, int]] = {}

    def of(self, x: Tensor) -> Any:
        if not is_fake(x):
            return x.data_ptr()
        x = unwrapped(x)
        storage = x.untyped_storage()
        _, number = self._known.setdefault(
            storage._cdata, (StorageWeakRef(storage), len(self._known))
        )
        return Address(number, int(x.storage_offset()) * x.itemsize)
