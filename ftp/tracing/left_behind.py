"""Tensors of a trace that the function leaves in variables, containers and attributes: a program
does not renew them, so that the function must not read them at its next call.
"""

import functools
import gc
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import field
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from ftp.dataclass import dataclass
from ftp.errors import TraceError
from ftp.ops.written import writes
from ftp.torch_internals.fake_tensors import (
    FakeTensor,
    _set_throw_on_mutable_data_ptr,
    is_fake,
)
from ftp.torch_internals.functorch import temporarily_clear_interpreter_stack, unwrapped
from ftp.torch_internals.modes import disable_current_modes
from ftp.torch_internals.pytree import tree_leaves
from ftp.torch_internals.storages import storage_number
from ftp.tracing.captured import kept_by_traces
from ftp.tracing.captured_tensors import node_of
from ftp.tracing.constant_values import values_of
from ftp.tracing.explain_errors import typed
from ftp.tracing.functionalize_graph import storages
from ftp.tracing.places import StatePlace, caches_around, tensors_around
from ftp.tracing.recorder import Recorder

if TYPE_CHECKING:
    from ftp.tracing.trace import Traced


@dataclass
class LeftBehind:
    """The places where a function finds tensors of its trace.

    Attributes:
        places: of tensors that depend on the arguments.
        kept: places of tensors that are the same at each call, such as a mask that is made once,
            each with its value.
        constants: such places where the value is not known, each with a tensor like it.
    """

    places: list[StatePlace] = field(default_factory=list)
    kept: list[tuple[StatePlace, Tensor]] = field(default_factory=list)
    constants: list[tuple[StatePlace, Tensor]] = field(default_factory=list)

    @property
    def all(self) -> list[StatePlace]:
        return [*self.places, *(place for place, _ in (*self.kept, *self.constants))]

    def end(self) -> None:
        """Put what says so when it is used in the places of tensors that never have values."""
        for place in (*self.places, *(place for place, _ in self.constants)):
            if place.is_unchanged:
                with suppress(Exception):  # a container that takes no other value
                    place.put(_without_values(place))

    def keep(self) -> None:
        """Put values in the places of constants: the next trace reads them, as a call would."""
        for place, value in self.kept:
            if place.is_unchanged:
                place.put(value)
                kept_by_traces[value] = None


class _Left(FakeTensor):
    """A tensor of a trace that has ended.

    Attributes:
        left_in: the name of the place.
    """

    left_in: str

    def refuse(self, *_: Any, **__: Any) -> Any:
        raise TraceError(
            f"{self.left_in}, holds a tensor of a trace, which has no values: a step's calls do not"
            " go through Python. Return it from the function (has_aux=True) instead."
        )

    numpy = __array__ = __reduce_ex__ = refuse

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Left":
        return self  # a copy of its container, such as a model, may never use it

    __copy__ = functools.partialmethod(__deepcopy__, {})

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        next(x for x in tree_leaves((args, kwargs)) if isinstance(x, cls)).refuse()

    def __repr__(self, **_: Any) -> str:
        return f"<{typed(self)} of a trace, without values>"


@contextmanager
def ending(*lefts: list[LeftBehind]) -> Iterator[None]:
    """After the block, what its traces left has no use."""
    try:
        yield
    finally:
        for left in itertools.chain(*lefts):
            left.end()


def _without_values(place: StatePlace) -> _Left:
    own: Any = unwrapped(place.value)
    with disable_current_modes(), temporarily_clear_interpreter_stack():
        like = torch.empty(_sizes(own), dtype=own.dtype, device="meta")
        left = _Left(own.fake_mode, like, own.device)
    _set_throw_on_mutable_data_ptr(left)
    left.left_in = place.name
    return left


def left_behind(fn: Callable[..., Any], recorder: Recorder) -> LeftBehind:
    """While ``fn`` is traced: what it leaves behind."""
    around = tensors_around(getattr(fn, "__wrapped__", fn))
    found = [(place, node) for place in around if (node := node_of(place.value)) is not None]
    found = [(place, node) for place, node in found if not isinstance(place.holder, tuple)]
    if not found:
        return LeftBehind()
    depends = _of_arguments(found[0][1].graph)
    values = values_of(dict.fromkeys(n for _, n in found if n not in depends), recorder)
    left = LeftBehind()
    for place, node in found:
        if node in depends:
            left.places.append(place)
        elif place.is_cached and place.key == "":
            continue  # `forget_cached` clears it
        elif node in values:
            left.kept.append((place, values[node]))
        else:
            left.constants.append((place, _zeros_like(place.value)))
    return left


def _of_arguments(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that depend on the function's arguments, also by what is written to them."""
    found, written = set[fx.Node](), set[int]()
    for node in graph.nodes:
        is_input = node.op == "placeholder" and "ftp_constant" not in node.meta
        if is_input or any(x in found or storages(x) & written for x in node.all_input_nodes):
            found.add(node)
            written.update(storage for x in writes(node) for storage in storages(x))
    return found | {node for node in graph.nodes if storages(node) & written}


def forget_cached(fn: Callable[..., Any], left: Iterable[LeftBehind] = ()) -> None:
    """Clear the caches of `functools.lru_cache` around ``fn`` that hold tensors of a trace, apart
    from what is ``left``, which the next call may read.
    """
    apart = {id(place.value) for each in left for place in each.places}
    for cache in caches_around(getattr(fn, "__wrapped__", fn)):
        if cache.cache_info().currsize and _holds_traced(cache, apart):
            cache.cache_clear()


def _holds_traced(cache: Any, apart: set[int]) -> bool:
    seen, stack = set[int](), gc.get_referents(cache)
    while stack:
        if id(held := stack.pop()) in seen:
            continue
        seen.add(id(held))
        if isinstance(held, Tensor):
            if is_fake(unwrapped(held)) and id(held) not in apart:
                return True
        elif isinstance(held, dict | list | tuple) or type(held).__name__ == "_lru_list_elem":
            stack += gc.get_referents(held)
        elif not isinstance(held, type | ModuleType | FunctionType):
            stack += getattr(held, "__dict__", {}).values()
    return False


def _zeros_like(x: Tensor) -> Tensor:
    with disable_current_modes(), temporarily_clear_interpreter_stack():
        return torch.zeros(_sizes(x), dtype=x.dtype)


def _sizes(x: Tensor) -> list[int]:
    """The sizes of a tensor; a dynamic one as its trace has it, which is no decision about it."""
    return [n if isinstance(n, int) else n.node.hint for n in x.shape]


def check_unread(left: LeftBehind, again: Callable[[], Any]) -> None:
    """Refuse a function that reads what its trace left behind: ``again`` traces it anew."""
    try:
        with _filled(left.constants):
            again()
    except Exception as error:
        raise _read_by_next_call(left.places[0]) from error


def _read_by_next_call(place: StatePlace) -> TraceError:
    return TraceError(
        f"{place.name}, holds a tensor that the function computed and left there for its next call."
        " A step is traced once, and its calls do not go through Python: each would begin with"
        " what was there at first. Pass such a tensor as an argument, and return it"
        " (has_aux=True)."
    )


def as_next_call(
    first: "Traced",
    left: list[LeftBehind],
    check: Callable[[], Any],
    again: Callable[[], "Traced"],
) -> "Traced":
    """The trace of a function's next call, if that reads what its first one keeps, such as a table:
    the program then has the table as it is when it runs. Otherwise ``first``.

    Args:
        left: what each trace leaves behind; ``again``, a trace like ``first``, adds to it.
        check: traces the function anew.

    Raises:
        TraceError: the next call reads what depends on the arguments of this one, or replaces what
            it reads, as a count of calls.
    """
    if left[-1].places:
        check_unread(left[-1], check)
    constants = left[-1].constants if first.symbolic is None else []
    kept = dict[int, list[StatePlace]]()
    for place, value in (*left[-1].kept, *constants):
        for number in {id(value), storage_number(value)}:  # another tensor may get its memory
            kept.setdefault(number, []).append(place)
    if not kept:
        return first
    try:
        with _filled(constants):
            anew = again()
    except TraceError as error:
        if not error.is_of_earlier_trace:
            raise
        return first  # it is in a place that is not searched
    numbers = (n for x in anew.captured for n in (id(x), storage_number(x)))
    read = [place for number in numbers for place in kept.get(number, ())]
    names = {place.name for place in read}
    lists = {id(place.holder) for place in read if isinstance(place.holder, list | deque)}
    for place in left[-1].all:
        if place.name in names or id(place.holder) in lists:
            raise _read_by_next_call(place)
    unknown = {place.name for place, _ in constants}
    return anew if read and unknown.isdisjoint(names) else first


@contextmanager
def _filled(constants: list[tuple[StatePlace, Tensor]]) -> Iterator[None]:
    """Within the block the places hold tensors that any trace can read."""
    for place, tensor in constants:
        place.put(tensor)
    try:
        yield
    finally:
        for place, _ in constants:
            place.put(place.value)
