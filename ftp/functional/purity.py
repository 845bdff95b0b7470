"""Refuse in-place changes of a model's parameters, constants and attributes while it runs."""

import re
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ftp.errors import TraceError


def version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def impure(model: str, name: str, does: str) -> str:
    if name.startswith("buffer"):
        todo = (
            "With fn, params, buffers = functionalize(model, buffers=True) it comes back"
            " updated; in eval mode most modules leave it alone."
        )
        return f"{model} {does} {name} while it runs, but buffers are constants of fn. {todo}"
    if name.startswith("attribute"):
        return (
            f"{model} {does} {name} while it runs; fn is pure. Make it a buffer and use"
            " functionalize(model, buffers=True)."
        )
    return (
        f"{model} {does} {name} in place while it runs; fn is pure and leaves its inputs"
        " as they are. Compute with a new tensor, weight = self.weight * mask, or change the"
        " parameters between steps."
    )


class WriteGuard(TorchFunctionMode):
    """Refuse an op that writes to a tensor in ``names`` {id: its name}, before it runs.

    Comparing versions afterwards is not enough: batch_norm does not bump the version of its running
    statistics, and torch.func's own error for a write to a captured tensor does not name it.
    """

    def __init__(self, model: str, names: dict[int, str]):
        super().__init__()
        self.model = model
        self.names = names

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        for tensor in _written(func, args, kwargs):
            base = tensor if id(tensor) in self.names or not tensor._is_view() else tensor._base
            if id(base) in self.names:
                raise TraceError(impure(self.model, self.names[id(base)], "modifies"))
        return func(*args, **kwargs)


_INPLACE_DUNDERS = re.compile(
    r"__(i(add|sub|mul|truediv|floordiv|mod|pow|and|or|xor|lshift|rshift|matmul)|setitem|set)__"
)


def _written(func: Callable, args: tuple, kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that a torch function writes to, by its name and arguments."""
    name = getattr(func, "__name__", "")
    out = kwargs.get("out")
    targets = list(out) if isinstance(out, tuple | list) else [out]
    if (
        (name.endswith("_") and not name.endswith("__"))
        or _INPLACE_DUNDERS.fullmatch(name)
        or kwargs.get("inplace") is True
    ):
        first = args[0] if args else kwargs.get("input")
        targets += first if isinstance(first, tuple | list) else [first]
    elif name in ("batch_norm", "instance_norm") and (
        args[5] if len(args) > 5 else kwargs.get("training", kwargs.get("use_input_stats"))
    ):
        at = 1 if func in (F.batch_norm, F.instance_norm) else 3
        targets += [*args[at : at + 2], kwargs.get("running_mean"), kwargs.get("running_var")]
    return [t for t in targets if isinstance(t, Tensor)]
