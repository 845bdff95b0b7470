"""Define a torch op in the namespace ``ftp``."""

from collections.abc import Callable
from typing import Any

import torch
from torch._library.simple_registry import singleton

from ftp.torch_internals.op_types import OpOverload

_LIBRARY = torch.library.Library("ftp", "FRAGMENT")


def like(name: str, op: OpOverload) -> str:
    """The schema of an op called ``name`` with the arguments and results of another.

    >>> like("plus", torch.ops.aten.add.Tensor)
    'plus(Tensor self, Tensor other, *, Scalar alpha=1) -> Tensor'
    """
    schema = str(op._schema)
    return name + schema[schema.index("(") :]


def define(schema: str) -> OpOverload:
    """Define the op of a schema in the namespace ``ftp`` and return its overload.

    Args:
        schema: as torch writes it, such as ``"moments(Tensor x, int[] dim) -> (Tensor, Tensor)"``;
            a name may have an overload, ``"fused_adam.tensor_lr(...) -> ..."``.
    """
    full = schema[: schema.index("(")]
    tags = (torch.Tag.pt2_compliant_tag,)
    torch.library.define(f"ftp::{full}", schema.removeprefix(full), tags=tags)
    name, _, overload = full.partition(".")
    return getattr(getattr(torch.ops.ftp, name), overload or "default")


def register_fake(op: str | OpOverload, fn: Callable[..., Any] | None = None) -> Any:
    """``torch.library.register_fake`` for an op of ftp's. torch's own looks for the caller among
    all loaded modules, at each registration.
    """
    if fn is None:
        return lambda fn: register_fake(op, fn)
    name = op if isinstance(op, str) else op._name
    singleton.find(name).fake_impl.register(fn, __name__, _LIBRARY)
    return fn
