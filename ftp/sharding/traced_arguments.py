"""The specs of a step's arguments while its function is traced."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

from torch import Tensor

from ftp.context import set_within
from ftp.sharding.spec import P

_specs: ContextVar[dict[int, P]] = ContextVar("specs of traced arguments", default={})  # noqa: B039


def arguments_with(leaves: Sequence[Any], specs: Sequence[P]) -> AbstractContextManager[Any]:
    """Within the block ``spec_of_argument`` knows the leaves' specs."""
    known = {id(x): spec for x, spec in zip(leaves, specs, strict=True) if isinstance(x, Tensor)}
    return set_within(_specs, known)


def spec_of_argument(x: Tensor) -> P | None:
    """The spec of a tensor that is an argument of the step being traced; None for any other.

    A spec may decide which ops a function uses, never what it computes: a traced program is planned
    for other specs too.
    """
    return _specs.get().get(id(x))
