"""What a function keeps outside of its arguments, such as a cache: a trace with symbolic sizes
leaves tensors and sizes there that are those of no call.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CellType
from typing import Any

from torch import Tensor

from ftp.tracing.captured import SYMBOLIC, held_around

_MISSING = object()


@contextmanager
def kept_state(fn: Callable[..., Any]) -> Iterator[None]:
    """After the block the variables and containers around ``fn`` hold what they held before, if
    any of them holds a new tensor or a symbolic number.
    """
    before: dict[int, tuple[Any, Any]] = {}
    known: dict[int, Any] = {}
    for holder, key, value in held_around(fn):
        known[id(value)] = value
        for each in (holder, value):
            if type(each) in (dict, list, deque) and not _is_module(each):
                before.setdefault(id(each), (each, each.copy()))
        if isinstance(holder, CellType) or _is_module(holder):
            _, kept = before.setdefault(id(holder), (holder, {}))
            kept[key] = _now(holder, key)
    try:
        yield
    finally:
        after = [value for *_, value in held_around(fn) if isinstance(value, (Tensor, *SYMBOLIC))]
        if any(id(value) not in known for value in after):
            for holder, kept in before.values():
                _restore(holder, kept)


def _is_module(x: Any) -> bool:
    """Whether ``x`` has the globals of a module, of which a function's code names those it uses."""
    return type(x) is dict and "__builtins__" in x


def _now(holder: Any, key: Any) -> Any:
    if not isinstance(holder, CellType):
        return holder.get(key, _MISSING)
    try:
        return holder.cell_contents
    except ValueError:
        return _MISSING


def _restore(holder: Any, kept: Any) -> None:
    if type(holder) is list:
        holder[:] = kept
    elif type(holder) is deque:
        holder.clear()
        holder.extend(kept)
    elif isinstance(holder, CellType):
        (value,) = kept.values()
        if value is not _MISSING:
            holder.cell_contents = value
        elif _now(holder, "") is not _MISSING:
            del holder.cell_contents
    else:
        new = () if _is_module(holder) else set(holder) - set(kept)
        for key in new:
            del holder[key]
        for key, value in kept.items():
            if value is _MISSING:
                holder.pop(key, None)
            elif holder.get(key, _MISSING) is not value:
                holder[key] = value
