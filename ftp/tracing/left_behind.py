"""Tensors of a trace that the function leaves in variables, containers and attributes: a program
does not renew them, so that the function must not read them at its next call.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import field
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, fx

from ftp.dataclass import dataclass
from ftp.errors import TraceError
from ftp.torch_internals.fake_tensors import is_fake
from ftp.torch_internals.functorch import temporarily_clear_interpreter_stack, unwrapped
from ftp.torch_internals.modes import disable_current_modes
from ftp.tracing.captured import Captured, caches_around, tensors_around
from ftp.tracing.captured_tensors import node_of
from ftp.tracing.data_dependent.known_values import KnownValues


@dataclass
class LeftBehind:
    """The places where a function finds tensors of its trace.

    Attributes:
        places: of tensors that depend on the arguments.
        constants: places of tensors that are the same at each call, such as a mask that is made
            once, each with a tensor like it.
    """

    places: list[Captured] = field(default_factory=list)
    constants: list[tuple[Captured, Tensor]] = field(default_factory=list)


def left_behind(fn: Callable[..., Any]) -> LeftBehind:
    """While ``fn`` is traced: what it leaves behind."""
    left, depends, known = LeftBehind(), dict[fx.Node, bool](), KnownValues()
    like: dict[fx.Node, Tensor] = {}
    for place in tensors_around(getattr(fn, "__wrapped__", fn)):
        if (node := node_of(place.value)) is None:
            continue
        if _is_of_arguments(node, depends):
            left.places.append(place)
            continue
        if isinstance(place.holder, tuple):
            return LeftBehind()  # a second trace would read it
        if node not in like:
            value = known.read(place.value, torch.clone)
            like[node] = _zeros_like(place.value) if value is None else value
        left.constants.append((place, like[node]))
    return left


def forget_cached(fn: Callable[..., Any]) -> None:
    """Clear the caches of `functools.lru_cache` around ``fn`` that hold tensors of a trace."""
    for cache in caches_around(getattr(fn, "__wrapped__", fn)):
        if cache.cache_info().currsize and _holds_traced(cache):
            cache.cache_clear()


def _holds_traced(cache: Any) -> bool:
    seen, stack = set[int](), gc.get_referents(cache)
    while stack:
        if id(held := stack.pop()) in seen:
            continue
        seen.add(id(held))
        if isinstance(held, Tensor):
            if is_fake(unwrapped(held)):
                return True
        elif isinstance(held, dict | list | tuple) or type(held).__name__ == "_lru_list_elem":
            stack += gc.get_referents(held)
        elif not isinstance(held, type | ModuleType | FunctionType):
            stack += getattr(held, "__dict__", {}).values()
    return False


def _zeros_like(x: Tensor) -> Tensor:
    with disable_current_modes(), temporarily_clear_interpreter_stack():
        return torch.zeros([int(n) for n in x.shape], dtype=x.dtype)


def _is_of_arguments(node: fx.Node, depends: dict[fx.Node, bool]) -> bool:
    for each in node.graph.nodes if node not in depends else ():
        depends[each] = (
            "ftp_constant" not in each.meta
            if each.op == "placeholder"
            else any(depends[operand] for operand in each.all_input_nodes)
        )
    return depends[node]


def check_unread(left: LeftBehind, again: Callable[[], Any]) -> None:
    """Refuse a function that reads what its trace left behind: ``again`` traces it anew."""
    try:
        with _filled(left.constants):
            again()
    except Exception as error:
        raise TraceError(
            f"{left.places[0].name}, holds a tensor that the function computed and left there for"
            " its next call. A step is traced once, and its calls do not go through Python: each"
            " would begin with what was there at first. Pass such a tensor as an argument, and"
            " return it (has_aux=True)."
        ) from error


@contextmanager
def _filled(constants: list[tuple[Captured, Tensor]]) -> Iterator[None]:
    """Within the block the places hold tensors that any trace can read."""
    for place, tensor in constants:
        place.put(tensor)
    try:
        yield
    finally:
        for place, _ in constants:
            place.put(place.value)
