"""Trace one rank's code on local shapes, apart from the surrounding trace and transforms."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import FunctionType
from typing import Any

import optree
import torch
from torch import Tensor

from ftp.axis import Inside, entered
from ftp.dynamic_int import Sizes
from ftp.errors import TraceError
from ftp.ops.microbatch_means import noting_none
from ftp.per_rank.sizes import (
    as_symbolic,
    at_hand,
    meta,
    numbers_from,
    shape_of,
    sizes_in,
    with_formulas,
)
from ftp.sharding.pytree import flatten
from ftp.source import at_line
from ftp.torch_internals.autograd_state import (
    pop_saved_tensors_default_hooks,
    push_saved_tensors_default_hooks,
    top_saved_tensors_default_hooks,
)
from ftp.torch_internals.functorch import (
    is_functorch_wrapped_tensor,
    temporarily_clear_interpreter_stack,
)
from ftp.torch_internals.modes import disable_current_modes
from ftp.tracing.explain_errors import SURROUNDING
from ftp.tracing.index_ranges import index_range
from ftp.tracing.selected_rows.selected import Selected
from ftp.tracing.trace import Traced, trace


def run_inside(
    fn: Callable[..., Any],
    tree: optree.PyTreeSpec,
    axes: Mapping[str, int],
    leaves: Sequence[Any],
    index: Sequence[Tensor],
) -> Any:
    with entered(Inside(axes, dict(zip(axes, index, strict=True)))):
        result = fn(*tree.unflatten(leaves))
    for x in flatten(result)[0]:
        if isinstance(x, Selected):
            raise TraceError(x.refused_as("the result of ftp.local's function"))
    return result


def traced_locally(
    fn: Callable[..., Any],
    axes: Mapping[str, int],
    leaves: Sequence[Any],
    device_type: str,
    names: Sequence[str],
) -> Traced:
    """Trace one rank's code separately from the surrounding trace, to inspect its ops."""
    leaves, tree = flatten(tuple(leaves))
    parts = [meta(shape_of(x), x.dtype) if isinstance(x, Tensor) else x for x in leaves]
    sizes = sizes_in(shape_of(x) for x in parts if isinstance(x, Tensor))
    run = partial(run_inside, fn, tree, axes)
    return trace_apart(run, (parts, index_of(axes)), device_type, names, sizes)


def trace_apart(
    fn: Callable[..., Any],
    args: Any,
    device_type: str,
    names: Sequence[str],
    sizes: Sizes | None = None,
) -> Traced:
    """Trace ``fn(*args)``; ``names`` of the first leaves are for errors. With ``sizes`` the graph
    has formulas in place of numbers.
    """
    leaves, tree = flatten(args)
    names = [*names, *(f"input {i}" for i in range(len(names), len(leaves)))]
    if sizes is not None:
        return _with_sizes(fn, args, device_type, names, sizes)
    with _hidden():
        return trace(fn, leaves, tree, device_type, names=names)


def _with_sizes(
    fn: Callable[..., Any], args: Any, device_type: str, names: Sequence[str], sizes: Sizes
) -> Traced:
    """As `trace_apart`, with the dynamic sizes as the sizes of further inputs, without users in the
    end.
    """
    counts = [meta((sizes.count(s),), torch.bool) for s in sizes.symbols]
    leaves, tree = flatten((args, counts))
    shapes = [shape_of(x) if isinstance(x, Tensor) else None for x in leaves]
    leaves = list(map(at_hand, leaves))
    names = [*names, *(s.name for s in sizes.given)]

    def known(args: Any, counts: Sequence[Tensor]) -> Any:
        with numbers_from(sizes, counts):
            return fn(*args)

    symbolic = as_symbolic(sizes)
    with _hidden(), symbolic.inner_trace():
        traced = trace(
            known, leaves, tree, device_type, names=names, shapes=shapes, symbolic=symbolic
        )
    graph = traced.gm.graph
    end = sum(isinstance(x, Tensor) for x in leaves)
    for node in [n for n in graph.nodes if n.op == "placeholder"][end - len(counts) : end]:
        graph.erase_node(node)
    with_formulas(graph)
    return traced


@contextmanager
def _hidden() -> Iterator[None]:
    """Hide the surrounding trace and transforms, which have global tensors; this has local ones."""
    with (
        disable_current_modes(),
        temporarily_clear_interpreter_stack(),
        _without_saved_hooks(),
        noting_none(),
    ):
        yield


@contextmanager
def _without_saved_hooks() -> Iterator[None]:
    """Remove hooks of saved tensors, such as torch.utils.checkpoint's, within the block."""
    hooks = []
    while (pair := top_saved_tensors_default_hooks(True)) is not None:
        hooks.append(pair)
        pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(hooks):
            push_saved_tensors_default_hooks(pack, unpack)


def showing_range(x: Any) -> Callable[[Any], Any]:
    """A function for a rank's part of ``x``. If the surrounding trace knows a range of the indices
    ``x``, such as a router's, it clamps the part to it: a trace of the part then knows it too.
    """
    n = index_range(x) if isinstance(x, Tensor) else None
    return lambda part: part if n is None else part.clamp(0, n - 1)


def check_captured(fn: Callable[..., Any]) -> None:
    """Refuse a function that captures a tensor that a surrounding torch.func transform
    differentiates or maps: it must be an argument.
    """
    seen: set[int] = set()
    waiting: list[tuple[str, Any]] = [("", fn)]
    while waiting:
        name, value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Tensor) and is_functorch_wrapped_tensor(value):
            raise TraceError(
                f"{at_line()}The function given to ftp.local uses {name}, {SURROUNDING}"
            )
        if isinstance(value, partial):
            waiting += [(name, v) for v in (value.func, *value.args, *value.keywords.values())]
        elif isinstance(value, FunctionType):
            waiting += list(inspect.getclosurevars(value).nonlocals.items())
            waiting += [(name, v) for v in value.__defaults__ or ()]
        elif isinstance(value, dict | list | tuple):
            waiting += [(name, v) for v in flatten(value)[0]]


def index_of(axes: Mapping[str, int]) -> list[Tensor]:
    return [meta((), torch.int64) for _ in axes]
