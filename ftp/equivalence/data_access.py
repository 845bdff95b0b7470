"""Accesses to a tensor's data that no op shows: numpy, DLPack, addresses, formatted numbers, and
``x.data = y``.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from ftp.errors import TraceError
from ftp.source import user_line
from ftp.torch_internals.fake_tensors import FakeTensor

READS_VALUE = (
    "which depends on the data. A proof is for all inputs: compute with tensors, with a mask as"
    " torch.where does in place of a selection, or pass the number as an argument that is no"
    " tensor."
)
_SET_DATA: Any = Tensor.data.__set__  # type: ignore[attr-defined]
_READS: dict[Any, str] = {
    Tensor.numpy: ".numpy()",
    Tensor.__array__: "as an array of numpy",
    Tensor.__dlpack__: "through DLPack",
}


class DataAccess(TorchFunctionMode):
    """Refuse such accesses within the block; after ``x.data = y``, ``x`` stands for ``y``."""

    def __init__(self, recorder: Any):
        super().__init__()
        self.recorder = recorder

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func == _SET_DATA:
            self.recorder.refuse_write(args[0], ".data =")
        how = _READS.get(func, "")
        if func is Tensor.__format__ and args[1:] != ("",):
            how = "in a format string"
        if how:
            raise TraceError(
                f"{user_line()}\n  The program reads the value of a tensor ({how}), {READS_VALUE}"
            )
        if func is Tensor.data_ptr and isinstance(args[0], FakeTensor):
            raise TraceError(
                f"{user_line()}\n  The program reads the address of a tensor (.data_ptr()); a"
                " recorded tensor has none."
            )
        found = func(*args, **(kwargs or {}))
        if func == _SET_DATA:
            self.recorder.rebind(*args)
        return found
