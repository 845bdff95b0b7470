"""NumPy's arrays of traced tensors. In torch ``x.numpy()`` shares the memory of ``x``; in a trace
it is a copy: code may not write to it, nor to ``x`` while it holds the array.
"""

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from ftp.errors import TraceError
from ftp.ops.written import written
from ftp.torch_internals.functorch import unwrapped
from ftp.torch_internals.op_types import OpOverload
from ftp.torch_internals.storages import storage_number
from ftp.tracing.nested_arguments import flat


class Arrays:
    """The arrays of the tensors of one trace."""

    def __init__(self) -> None:
        self._of: list[tuple[weakref.ref[np.ndarray], Tensor]] = []

    def add(self, array: np.ndarray, x: Tensor) -> np.ndarray:
        """The array to give for ``x.numpy()``."""
        array = array.copy()
        array.setflags(write=False)
        self._of.append((weakref.ref(array), unwrapped(x)))
        return array

    def check_written(
        self, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], line: str
    ) -> None:
        """Refuse a call that writes to a tensor whose array code holds."""
        if not self._of:
            return
        memory = {storage_number(x) for x in flat(written(func, args, kwargs))}
        self._of = [(array, x) for array, x in self._of if array() is not None]
        if any(storage_number(x) in memory for _, x in self._of):
            raise TraceError(
                f"The function holds an array that x.numpy() gave, and writes to the tensor"
                f"{f' at {line}' if line else ''}. In torch this changes the array; here it is a"
                " copy. Ask for x.numpy() after the write, or for x.clone().numpy() before it."
            )
