"""The state of a block that may run again: what it reads and writes outside of its arguments."""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from copy import copy
from functools import cached_property
from operator import is_
from typing import Any

from torch import Tensor

from ftp.functional.contents import (
    Content,
    contents_of,
    is_same,
    restored,
    values_in,
)
from ftp.functional.held_values import now_in, put_in


class BlockState:
    """What code that refers to ``root`` can reach and change, as it is now.

    >>> import torch
    >>> seen = [torch.ones(2)]
    >>> state = BlockState((seen,))
    >>> run = state.enter({id(seen[0]): torch.zeros(2)})
    >>> seen[0].tolist()
    [0.0, 0.0]
    >>> seen.append(3)
    >>> written = run.leave({}, keeps=False)
    >>> seen, [content.held for content in written]
    ([tensor([1., 1.])], [[tensor([0., 0.]), 3]])
    """

    def __init__(self, root: Any) -> None:
        self.seen: dict[int, Any] = {}
        self.contents = contents_of(root, self.seen)

    @cached_property
    def tensors(self) -> dict[int, Tensor]:
        """The tensors that it holds, by id."""
        return {id(x): x for content in self.contents for x in tensors_in(content.held)}

    def enter(self, new: Mapping[int, Tensor]) -> "StateOfRun":
        """Make it as it was, with other tensors in place of those of the ids."""
        return StateOfRun(self, new)


class StateOfRun:
    """The state while a block runs."""

    def __init__(self, state: BlockState, new: Mapping[int, Tensor]) -> None:
        self._state = state
        self._before = [now_in(content.of) for content in state.contents]
        self._given = [with_tensors(content.held, new) for content in state.contents]
        for content, before, given in zip(state.contents, self._before, self._given, strict=True):
            if not is_same(before, given):
                put_in(content.of, given)
        self._at_end: list[Content] = []

    def leave(
        self,
        back: Mapping[int, Tensor],
        fresh: Collection[int] = (),
        out: Any = (),
        *,
        keeps: bool,
    ) -> list[Content]:
        """End the run.

        Args:
            back: the tensors to put in place of those of the ids.
            fresh: ids of given tensors that count as written.
            out: what the run returns or raises.
            keeps: whether what the run has written stays.

        Returns:
            What the run has written, and what new objects hold in it and in ``out``.
        """
        written: list[Content] = []
        for content, before, given in zip(
            self._state.contents, self._before, self._given, strict=True
        ):
            now = Content(content.of)
            if given is not content.held:
                self._at_end.append(Content(content.of))
            is_written = not is_same(now.held, given) or any(
                id(x) in fresh for x in (tensors_in(given) if given is not content.held else ())
            )
            if is_written:
                written.append(now)
            if not (keeps and is_written) and not is_same(now.held, before):
                put_in(content.of, before)
        held = tuple(value for content in written for value in content.values)
        written += contents_of((held, out), dict(self._state.seen))
        for content in written:
            content.held = with_tensors(content.held, back)
            if keeps:
                content.give_back()
        return written

    def later(self) -> AbstractContextManager[None]:
        """A context in which what holds tensors that the run was given holds them as at its end."""
        return restored(self._at_end)


def tensors_in(held: Any, order: Callable[[list[Tensor]], list[Tensor]] = list) -> Iterator[Tensor]:
    """The tensors that a content holds itself, or in tuples; those of a set in ``order``."""
    if isinstance(held, set | frozenset):
        held = order([x for x in held if isinstance(x, Tensor)])
    for value in values_in(held):
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | frozenset):
            yield from tensors_in(value, order)


def with_tensors(held: Any, new: Mapping[int, Tensor]) -> Any:
    """A content with other tensors in place of those of the ids; itself if it has none of them."""
    if isinstance(held, dict):
        changed = {
            name: other
            for name, value in held.items()
            if (other := in_value(value, new)) is not value
        }
        return {**held, **changed} if changed else held
    items = [in_value(value, new) for value in values_in(held)]
    if all(map(is_, items, values_in(held))):
        return held
    filled = copy(held)
    filled.clear()
    (filled.update if isinstance(filled, set) else filled.extend)(items)
    return filled


def in_value(value: Any, new: Mapping[int, Tensor]) -> Any:
    """A value with other tensors, itself or in tuples, in place of those of the ids."""
    if isinstance(value, Tensor):
        return new.get(id(value), value)
    if not isinstance(value, tuple | frozenset):
        return value
    items = [in_value(item, new) for item in value]
    if all(map(is_, items, value)):
        return value
    kind: Any = type(value)
    return kind._make(items) if hasattr(kind, "_make") else kind(items)
