"""Check what a traced function takes, returns and writes to."""

import dataclasses
import functools
import io
import types
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterator,
    Mapping,
    MappingView,
    Sequence,
)
from typing import Any

import torch
from torch import SymInt, Tensor, fx

from ftp.errors import InputError, TraceError, raise_all
from ftp.functional.attributes import has_parts, parts_of
from ftp.ops.written import writes, writing
from ftp.sharding.pytree import kind_of, leaf_names
from ftp.sharding.torch_nodes import how_to_give
from ftp.torch_internals.fake_tensors import is_fake
from ftp.torch_internals.functorch import unwrapped
from ftp.torch_internals.modes import is_wrapper
from ftp.tracing.explain_errors import COPY, located
from ftp.tracing.functionalize_graph import storages
from ftp.tracing.python_numbers import plain_number
from ftp.tracing.selected_rows.selected import Selected
from ftp.tracing.selected_rows.unsqueezed import UnsqueezedRows


def check_leaves(leaves: Sequence[Any], names: Sequence[str]) -> None:
    failures = []
    for leaf, name in zip(leaves, names, strict=True):
        if not isinstance(leaf, Tensor):
            failures += _unfit_static(leaf, name)
        elif is_wrapper(type(leaf)):
            failures.append(
                f"{name} is a {type(leaf).__name__}, a tensor that holds others. Give those,"
                f" {_held(leaf)}, and make it of them in the function; of a model's frozen"
                " parameters ftp.functionalize(model, buffers=True) does."
            )
        elif leaf.layout is not torch.strided or leaf.is_quantized:
            failures.append(
                f"{name} is a {leaf.layout} tensor of {leaf.dtype}; ftp takes dense ones, and"
                " sparse matrices in COO or CSR with one number per entry. Pass its indices and"
                " values, and add rows up: y.index_add(0, rows, values[:, None] * x[columns])."
            )
    raise_all(InputError, failures)


def _held(wrapper: Any) -> str:
    return " and ".join(wrapper.__tensor_flatten__()[0])


def checked_results(leaves: Sequence[Any], out: Any) -> list[Any]:
    """The leaves of a result, with numbers for symbolic floats and bools."""
    leaves = [leaf if type(leaf) is SymInt else plain_number(leaf) for leaf in leaves]
    if all(isinstance(leaf, Tensor) and not is_wrapper(type(leaf)) for leaf in leaves):
        return leaves
    failures = []
    for leaf, name in zip(leaves, leaf_names(out, "the result"), strict=True):
        if is_wrapper(type(leaf)):
            failures.append(
                f"{name} is a {type(leaf).__name__}, a tensor that holds others. Return those:"
                f" {_held(leaf)}."
            )
        if isinstance(leaf, Tensor | SymInt):
            continue
        failures += (unfit := _unfit_static(leaf, name))
        if not unfit and _has_tensor(_parts_of_function(leaf), _is_traced):
            failures.append(
                f"{name} is {kind_of(leaf)} that holds tensors of the trace, which have no values"
                " when it is called. Return the tensors."
            )
    raise_all(TraceError, failures)
    return leaves


def _parts_of_function(x: Any) -> list[Any]:
    """What a function, a method or a ``functools.partial`` holds."""
    if isinstance(x, functools.partial):
        return [*_parts_of_function(x.func), *x.args, *x.keywords.values()]
    if isinstance(x, types.FunctionType):
        cells = [cell.cell_contents for cell in x.__closure__ or () if _is_filled(cell)]
        return [*cells, *(x.__defaults__ or ()), *(x.__kwdefaults__ or {}).values()]
    return [getattr(x, "__self__", None)]


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is cell.cell_contents
    except ValueError:
        return False


def _is_traced(x: Tensor) -> bool:
    return is_fake(unwrapped(x))


def _unfit_static(leaf: Any, name: str) -> list[str]:
    """The reasons why a leaf cannot be a static value; none if it can."""
    if isinstance(leaf, Selected | UnsqueezedRows):
        return [leaf.refused_as(name)]
    if isinstance(leaf, torch.nn.Module):
        return [
            f"{name} is a module, {type(leaf).__name__}. Give its parameters: fn, params ="
            " ftp.functionalize(module)."
        ]
    if isinstance(leaf, Iterator | MappingView | Awaitable | AsyncIterator) and not isinstance(
        leaf, io.IOBase
    ):
        return [
            f"{name} is {kind_of(leaf)}, which gives its items after the trace, or only once. Give"
            " a list or a tuple of them, from a function without async."
        ]
    if held := _held_tensors(leaf):
        return [
            f"{name} is {kind_of(leaf)}, which optree does not know, and holds tensors"
            f" ({', '.join(held)}) that would be baked in as constants."
            f" {how_to_give(leaf)}"
        ]
    try:
        hash(leaf)
    except TypeError:
        return [
            f"{name} is {kind_of(leaf)}, neither a tensor, nor a container that optree knows, nor"
            f" a hashable static value. {how_to_give(leaf)}"
        ]
    return []


def _held_tensors(leaf: Any) -> list[str]:
    fields = dict(getattr(leaf, "__dict__", {}))
    for kind in type(leaf).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        fields |= {
            s: getattr(leaf, s)
            for s in ((slots,) if isinstance(slots, str) else slots)
            if hasattr(leaf, s)
        }
    if dataclasses.is_dataclass(leaf):
        fields |= {f.name: getattr(leaf, f.name, None) for f in dataclasses.fields(leaf)}
    if isinstance(leaf, set | frozenset):
        fields |= {f"member {i}": v for i, v in enumerate(leaf)}
    if isinstance(leaf, Mapping):
        fields |= {str(k): v for k, v in leaf.items()}
    return [name for name, value in fields.items() if _has_tensor(value)]


def _has_tensor(value: Any, asked: Callable[[Tensor], bool] = lambda _: True) -> bool:
    """Whether a value is such a tensor, or reaches one through containers and attributes."""
    stack, seen = [value], set()
    while stack and len(seen) < _VISITED:
        value = stack.pop()
        if isinstance(value, Tensor):
            if asked(value):
                return True
        elif id(value) not in seen and has_parts(value):
            seen.add(id(value))
            stack += [part for _, part in parts_of(value) or ()]
    return False


_VISITED = 10_000  # most objects to look into


def _as_well(names: Sequence[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - 3} more" if names[3:] else ""
    return f", and so {'are' if names[1:] else 'is'} {', '.join(names[:3])}{more}"


def check_unwritten(gm: fx.GraphModule, names: Mapping[fx.Node, str]) -> None:
    writers = [n for n in writing(gm.graph.nodes) if writes(n)]
    if not writers:
        return
    placeholders = {s: n for n in gm.graph.nodes if n.op == "placeholder" for s in storages(n)}
    changed: dict[str, tuple[list[str], Any]] = {}  # by line: names, and the first op that writes
    for node in writers:
        for storage in sorted({s for v in writes(node) for s in storages(v)} & placeholders.keys()):
            placeholder = placeholders[storage]
            name = names.get(placeholder)
            if name is None:
                shape = tuple(placeholder.meta["val"].shape)
                name = f"a captured tensor of shape {shape}"
            of_line, _ = changed.setdefault(located(node.meta["source"]), ([], node.target))
            if name not in of_line:
                of_line.append(name)
    failures = (
        f"{of_line[0]} is changed in place{line} by {op}{_as_well(of_line[1:])}. {COPY}"
        for line, (of_line, op) in changed.items()
    )
    raise_all(TraceError, failures)
