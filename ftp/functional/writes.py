"""Which tensors a torch function writes to."""

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch.nn.functional as F
from torch import Tensor


def tensors_of(args: Iterable[Any]) -> Iterator[Tensor]:
    for x in args:
        if isinstance(x, Tensor):
            yield x
        elif type(x) in (list, tuple):
            yield from (item for item in x if isinstance(item, Tensor))


_INPLACE_DUNDERS = re.compile(
    r"__(i(add|sub|mul|truediv|floordiv|mod|pow|and|or|xor|lshift|rshift|matmul)|setitem|set)__"
)


def written_by(func: Callable, args: tuple, kwargs: dict[str, Any]) -> list[Tensor]:
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
    elif writes_statistics(func) and (
        args[5] if len(args) > 5 else kwargs.get("training", kwargs.get("use_input_stats"))
    ):
        at = 1 if func in (F.batch_norm, F.instance_norm) else 3
        targets += [*args[at : at + 2], kwargs.get("running_mean"), kwargs.get("running_var")]
    return [t for t in targets if isinstance(t, Tensor)]


def writes_statistics(func: Callable) -> bool:
    """Whether a function's writes are running statistics, which have no gradient."""
    return getattr(func, "__name__", "") in ("batch_norm", "instance_norm")
