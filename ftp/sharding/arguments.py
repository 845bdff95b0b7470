"""Arguments' names and specs."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from ftp.errors import InputError, SpecError
from ftp.sharding.pytree import broadcast_specs, flatten, kind_of
from ftp.sharding.spec import PartitionSpec

Shape = tuple[int, ...]


def argument_names(fn: Callable[..., Any]) -> tuple[str, ...]:
    """The names of a function's positional arguments."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return ()
    return tuple(
        p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    )


def check_signature(fn: Callable[..., Any], args: Sequence[Any], step: str) -> None:
    """Raises if ``fn`` does not take this many arguments."""
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*args)
    except TypeError as e:
        name = getattr(fn, "__name__", kind_of(fn))
        raise InputError(
            f"{name}{signature} does not take the {len(args)} arguments of {step}: {e}."
        ) from None


def padded_names(names: Sequence[str], count: int) -> list[str]:
    """The names of ``count`` arguments; those without a name are called by position.

    >>> padded_names(["x"], 2)
    ['x', 'args[1]']
    """
    return [*names[:count], *(f"args[{i}]" for i in range(len(names), count))]


def argument_specs(
    specs: Any, args: tuple[Any, ...], roots: Sequence[str], where: str
) -> list[PartitionSpec]:
    """A spec for each leaf, from a prefix tree of the tuple of arguments, or of a single one."""
    names = padded_names(roots, len(args))
    if isinstance(specs, PartitionSpec):
        return [specs] * len(flatten(args)[0])
    if len(args) == 1 and not (isinstance(specs, tuple) and len(specs) == 1):
        return broadcast_specs(specs, args[0], names[0])
    if not isinstance(specs, tuple | list):
        raise SpecError(
            f"{where} is {kind_of(specs)}, for the {len(args)} arguments {', '.join(names)}. Give"
            " a tuple of specs, or one P for all."
        )
    if len(specs) != len(args):
        listed = f" ({', '.join(names)})" if names else ""
        raise SpecError(
            f"{where} has {len(specs)} entries for {len(args)} arguments{listed}. Give one for"
            " each, or one P for all."
        )
    return [
        spec
        for given, arg, name in zip(specs, args, names, strict=True)
        for spec in broadcast_specs(given, arg, name)
    ]
