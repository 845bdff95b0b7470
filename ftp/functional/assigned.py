"""Attributes that a model assigns while it runs, which a block of `remat` takes and gives."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from ftp.functional.attributes import OF_MODULES, join

FormerAttributes = Iterable[
    tuple[str, nn.Module, Mapping[str, Any]]
]  # by path, with former attributes
# Attributes that hold hooks and slots, and that a call of a program changes.
OWN_BY_CALL = OF_MODULES - {"training"} | {"forward", "flatten_parameters"}


def assigned_before(modules: FormerAttributes) -> dict[str, Tensor]:
    """The tensors that were assigned before a block: its arguments, as what it captures has no
    gradient.
    """
    return {
        f"attribute {join(path, name)}": value
        for path, module, former in modules
        for name, value in module.__dict__.items()
        if isinstance(value, Tensor) and value is not former.get(name)
    }


def assigned_since(modules: FormerAttributes) -> dict[str, dict[str, Any]]:
    """The tensors and plain values that a block has assigned, by the paths of its modules. Other
    objects are left out: they may hold tensors that end with it.
    """
    return {
        path: {
            name: value
            for name, value in module.__dict__.items()
            if name not in OWN_BY_CALL
            and (value is None or isinstance(value, Tensor | bool | int | float | str))
            and not (name in former and former[name] is value)
        }
        for path, module, former in modules
    }
