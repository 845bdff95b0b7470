"""Reads of a tensor's data that reach no op: numpy, DLPack, addresses, formatted numbers."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from ftp.errors import TraceError
from ftp.source import user_line

READS_VALUE = (
    "which depends on the data. A proof is for all inputs: compute with tensors, with a mask as"
    " torch.where does in place of a selection, or pass the number as an argument that is no"
    " tensor."
)
_READS: dict[Any, str] = {
    Tensor.numpy: ".numpy()",
    Tensor.__array__: "as an array of numpy",
    Tensor.__dlpack__: "through DLPack",
}


class RefusedReads(TorchFunctionMode):
    """Refuse them within the block."""

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
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
        return func(*args, **(kwargs or {}))
