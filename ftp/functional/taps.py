"""Taps: functions that read or replace the outputs of a model's modules, as global tensors."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from ftp.dataclass import dataclass
from ftp.errors import InputError, TraceError
from ftp.functional.matched_modules import MatchedModule, matched_modules
from ftp.sharding.pytree import kind_of


@dataclass(frozen=True, eq=False)
class Tap(MatchedModule):
    """A function of one module's output.

    Attributes:
        with_path: the function takes ``(path, output)``, not ``(output)`` alone.
    """

    fn: Callable[..., Any]
    with_path: bool

    done = "tapped"
    does = "taps"


def taps_of(model: nn.Module, taps: Mapping[str, Callable[..., Any]]) -> tuple[Tap, ...]:
    return tuple(
        Tap(pattern, path, module, fn, with_path=_arguments(fn) == 2)
        for pattern, path, module, fn in matched_modules(model, taps, _problem)
    )


def tapped(tap: Tap, ran: set[str], module: nn.Module, args: tuple, out: Any) -> Any:
    """Forward hook: the output, or the tap function's replacement for it."""
    ran.add(tap.path)
    new = tap.fn(tap.path, out) if tap.with_path else tap.fn(out)
    if new is None:
        return out
    if isinstance(out, Tensor):
        if not isinstance(new, Tensor):
            raise InputError(
                f"{tap.where}: the tap returns {kind_of(new)} in place of a tensor. Return a"
                " tensor, or None to leave the output as it is."
            )
        if new.shape != out.shape:
            raise TraceError(
                f"{tap.where}: the tap returns a tensor of shape {tuple(new.shape)} in place of"
                f" one of shape {tuple(out.shape)}."
            )
    return new


def _arguments(fn: Callable[..., Any]) -> int | None:
    """How many positional arguments a function needs; None where it does not say."""
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return None
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in kinds and p.default is p.empty for p in parameters)


def _problem(pattern: str, fn: object) -> str | None:
    if not callable(fn):
        return (
            f"taps[{pattern!r}] is {fn!r}, {kind_of(fn)}; it must be a function (output) or (path,"
            " output) to a new output, or to None."
        )
    if _arguments(fn) not in (None, 1, 2):
        return (
            f"taps[{pattern!r}] takes {_arguments(fn)} arguments; it must take (output) or (path,"
            " output)."
        )
    return None
