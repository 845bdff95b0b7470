"""Selected rows with a leading dim of size one, ``x[None, index]``: loops over experts read their
tokens so, before ``.reshape(-1, n)``.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ftp.tracing.selected_rows.group import SelectionGroup, broadcast_mask, group_of
from ftp.tracing.selected_rows.reductions import index_rows
from ftp.tracing.selected_rows.refused import refused
from ftp.tracing.selected_rows.selected import OF_ALL_ROWS, Selected, apply, select


class UnsqueezedRows:
    """``rows[None]``: only functions that drop the first dim accept it."""

    def __init__(self, rows: Selected):
        self._rows = rows

    @property
    def dtype(self) -> torch.dtype:
        return self._rows.dtype

    def refused_as(self, name: str) -> str:
        """The message that the function cannot return it."""
        return self._rows.refused_as(name)

    def reshape(self, *sizes: Any) -> Selected:
        return apply(Tensor.reshape, (self._rows, *sizes), {})

    view = reshape

    def squeeze(self, dim: int) -> Selected:
        if dim not in (0, -1 - self._rows.ndim):
            raise refused("squeeze")
        return self._rows

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Selected:
        if (start_dim, end_dim) != (0, 1):
            raise refused("flatten")
        return self._rows

    def __getitem__(self, key: Any) -> Selected:
        if type(key) is not int or key not in (0, -1):
            raise refused("__getitem__")
        return self._rows

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise refused(name)

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = getattr(func, "__name__", str(func))
        if name in ("reshape", "squeeze", "flatten") and args and isinstance(args[0], cls):
            return getattr(args[0], name)(*args[1:], **(kwargs or {}))
        raise refused(name)


def _refusing(name: str) -> Any:
    def method(self: UnsqueezedRows, *args: Any) -> Any:
        raise refused(name)

    return method


_OPERATORS = """
    add sub mul truediv floordiv mod pow matmul and or xor
    radd rsub rmul rtruediv rfloordiv rmod rpow rmatmul rand ror rxor
    neg invert abs bool len iter lt le gt ge eq ne
"""
for _name in _OPERATORS.split():
    setattr(UnsqueezedRows, f"__{_name}__", _refusing(_name))
UnsqueezedRows.__hash__ = object.__hash__


def _read(group: SelectionGroup, x: Any, key: Any) -> Any:
    if isinstance(x, Selected) and isinstance(key, Selected) and key.dtype is torch.bool:
        if key.rows.shape != x.rows.shape[: key.rows.ndim]:
            return None
        return select(x.rows, group_of(broadcast_mask(group.valid, key.rows) & key.rows))
    is_unsqueezed = isinstance(key, tuple) and len(key) == 2 and key[0] is None
    if is_unsqueezed and isinstance(key[1], Selected) and isinstance(x, Tensor):
        return UnsqueezedRows(apply(Tensor.__getitem__, (x, key[1]), {}))
    return index_rows(group, x, key)


OF_ALL_ROWS["__getitem__"] = _read
