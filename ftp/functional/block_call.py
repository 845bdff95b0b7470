"""A call of a block that runs again in the backward pass, as a function of tensors.

A block is Python code: besides its arguments it may read and write captured variables, globals,
attributes, lists and random generators. ``torch.autograd.Function`` needs a function of tensors
that can run any number of times. A `BlockCall` makes one of the other:

1. It notes the block's **state** (block_state.py, contents.py): what every variable, container,
   object and generator that the block can reach holds at the call.
2. Its **inputs** are the tensors of the arguments, and those of the state that the block is known
   to read. `run`, a function of the inputs, puts the tensors that it is given in their places, in
   the arguments and in the state, and calls the block.
3. `BlockWatch` (captures.py) sees the functions of torch that the block calls, and so the tensors
   of the state that may have a gradient and are no inputs: after such a run the state is put back,
   and the call begins again with more inputs. It also begins again before the block writes to an
   input, of which the next run has a copy.
4. **Results** are the new tensors in what the block returns or raises, and in what it has written
   to the state. `run` gives them to autograd, or to a transform of torch.func, and `finish` puts
   what that has made of them in their places, in the same lists and objects.
5. For a gradient `run_again` puts the state of the call in place, runs the block, picks the same
   results, and puts the present state back.
6. In both runs each value has a number (block_values.py), from the function and the values that it
   is computed of. Results that have other numbers in the second run come of something that has
   changed and is no part of the state: an error, where the gradient would be wrong.
"""

import gc
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, MappingView, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from ftp.dataclass import dataclass
from ftp.errors import InputError, TraceError
from ftp.functional.attributes import is_of_library
from ftp.functional.backward_code import surrounding_backward_code
from ftp.functional.block_state import BlockState, in_value, tensors_in, with_tensors
from ftp.functional.block_values import ValueNumbering, are_same, numbering_now
from ftp.functional.captures import (
    BlockWatch,
    ReadsState,
    on_top,
    outer_transforms,
    transforms_around,
)
from ftp.functional.contents import Content, contents_of
from ftp.functional.held_values import put_in
from ftp.functional.modes_of_blocks import ModeOfBlocks
from ftp.sharding.pytree import flatten, kind_of


class BlockCall:
    """One call of a block.

    Args:
        name: for messages.
        root: refers to the state that the block may read and write.
        around: modes that have to know which tensor takes the place of which.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        name: str,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        root: Any,
        around: Sequence[ModeOfBlocks],
    ) -> None:
        self._fn, self.name, self._around = fn, name, around
        self._numbering = numbering_now()
        self.transforms = transforms_around()
        self._keywords = tuple(kwargs)
        self._leaves, self._treedef = flatten((args, tuple(kwargs.values())), _keeps_identity)
        others = tuple(x for x in self._leaves if not isinstance(x, Tensor))
        self._state = BlockState((root, others, _generators()))
        self._inputs = {id(x): x for x in self._leaves if isinstance(x, Tensor)}
        self._copied: list[int] = []  # the inputs that the block writes to,
        self._replaced: set[int] = set()  # and those of which the state gets another tensor
        self._first: _First | None = None
        self.reads(*(x for content in contents_of(others) for x in tensors_in(content.held)))

    def reads(self, *tensors: Tensor) -> None:
        """Take tensors of the state as inputs."""
        self._inputs.update((id(x), x) for x in tensors)

    def replaces(self, *tensors: Tensor) -> None:
        """Take tensors of the state as inputs, and give it others, to which the block has written,
        in their place.
        """
        self.reads(*tensors)
        self._replaced.update(map(id, tensors))

    def learn(self, found: ReadsState) -> None:
        """Prepare for another call, after one that has raised ``found``."""
        self.reads(*found.read)
        if found.written is not None:
            self.reads(found.written)
            self._copied.append(id(found.written))

    @property
    def inputs(self) -> list[Tensor]:
        # What a block writes to changes after autograd has saved its inputs.
        return [x.clone() if key in self._copied else x for key, x in self._inputs.items()]

    def holds(self, x: Tensor) -> bool:
        """Whether a tensor is of the state."""
        return id(x) in self._state.tensors

    def may_read(self, x: Tensor) -> bool:
        """Whether a tensor is of the state, and no input."""
        return self.holds(x) and id(x) not in self._inputs

    def untouched(self, tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """The tensors that the block must not write to, each with that outside for which it stands:
        inputs without a copy, and the rest of the state.
        """
        for x, inner in zip(self._inputs.values(), tensors, strict=True):
            if id(x) not in self._replaced and id(x) not in self._copied:
                yield inner, x
        yield from ((x, x) for key, x in self._state.tensors.items() if key not in self._inputs)

    def run(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Run the block with its inputs as they are inside of transforms. What it writes to the
        state stays.
        """
        before = self._first
        watch = BlockWatch(self, tensors, before and before.values, self._numbering)
        self._result = result = self._run(tensors, watch)
        known = self._state.tensors.keys() | self._inputs.keys()
        picked: dict[int, int] = {}
        for i, x in enumerate(result.tensors):
            if id(x) not in known:
                picked.setdefault(id(x), i)
        self._picked = tuple(picked.values())
        still = {
            id(x)
            for key, x in zip(self._copied, result.copies, strict=True)
            if not self._inputs[key].requires_grad and watch.lacks_gradient(x)
        }
        self.without_gradient = [
            n for n, i in enumerate(self._picked) if id(result.tensors[i]) in still
        ]
        self._check_given(result, watch)
        self._first = _First(result, watch, self._picked)
        if before is not None and not are_same(before.numbers[1:], self._first.numbers[1:]):
            raise self._differs(" at its call", result.error)
        if watch.read:
            if result.error is not None:  # maybe of an inner block that was given what it may not
                self._first = None
            raise ReadsState(self, tuple(watch.read.values()), None)
        if result.error is not None and not picked:
            raise result.error
        return tuple(result.tensors[i] for i in self._picked)

    def run_again(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Run the block as in the call, and leave the state as it is now."""
        first = self._first
        assert first is not None
        numbering = ValueNumbering(self.holds, first.values)
        result = self._run(tensors, numbering)
        if not isinstance(result.error, StopIteration | None) and not first.has_error:
            raise result.error
        if not are_same(first.numbers, _numbers(result, self._picked, numbering)):
            where = f", from {numbering.differs} on" if numbering.differs else ""
            raise self._differs(f" for the gradient{where}", result.error)
        return tuple(result.tensors[i] for i in self._picked)

    def finish(self, results: Sequence[Tensor]) -> Any:
        """Put the block's results in the place of the tensors of its run, in the state too.

        Raises:
            BaseException: that of the block.
        """
        result = self._result
        del self._result
        by_id: dict[int, Tensor] = {}
        for i, outer in zip(self._picked, results, strict=True):
            inner = result.tensors[i]
            by_id[id(inner)] = outer
            self._passes(outer, inner)
        for content in result.written:
            put_in(content.of, with_tensors(content.held, by_id))
        plain = {id(results[n]) for n in self.without_gradient if not results[n].requires_grad}
        for key, x in zip(self._copied, result.copies, strict=True):
            new = by_id[id(x)]
            with torch.no_grad() if id(new) in plain else nullcontext():
                self._inputs[key].copy_(new)
        self._numbering = None
        if result.error is not None:
            raise result.error
        return result.treedef.unflatten([in_value(x, by_id) for x in result.leaves])

    def _run(self, tensors: Sequence[Tensor], numbering: ValueNumbering) -> "_Result":
        inside: dict[int, Tensor] = {}
        seen: set[int] = set()
        for key, x in zip(self._inputs, tensors, strict=True):
            if key in self._replaced or key in self._copied:
                x = x.clone()
            elif id(x) in seen:  # inside of transforms two inputs may be one tensor
                x = x.view_as(x)
            seen.add(id(x))
            inside[key] = x
        for key, x in inside.items():
            numbering.stands_for(x, self._inputs[key])
            self._passes(x, self._inputs[key])
        filled = [inside[id(x)] if isinstance(x, Tensor) else x for x in self._leaves]
        args, values = self._treedef.unflatten(filled)
        run = self._state.enter(inside)
        error = None
        try:
            with (
                on_top(outer_transforms, self.transforms),
                numbering,
                surrounding_backward_code(run.later),
            ):
                out = self._fn(*args, **dict(zip(self._keywords, values, strict=True)))
        except BaseException as raised:
            if not isinstance(raised, Exception) and is_of_library(type(raised)):
                run.leave({}, keeps=False)
                raise
            out, error = None, raised
        back = {id(x): self._inputs[k] for k, x in inside.items() if k not in self._replaced}
        leaves, treedef = flatten(out, _keeps_identity)
        new = leaves if error is None else [error]
        fresh = {id(inside[key]) for key in self._replaced}
        keeps = isinstance(numbering, BlockWatch) and not numbering.read
        written = run.leave(back, fresh, new, keeps=keeps)
        leaves = [x if id(x) in self._copied else in_value(x, back) for x in leaves]
        copies = [inside[key] for key in self._copied]
        found = [*tensors_in(leaves, numbering.in_order), *copies]
        for content in written:
            found += tensors_in(content.held, numbering.in_order)
        return _Result(leaves, treedef, error, copies, written, found)

    def _check_given(self, result: "_Result", watch: BlockWatch) -> None:
        """Refuse an iterator over tensors of the run, which cannot be put in it."""
        for given in result.leaves:
            if isinstance(given, Iterator | MappingView) and any(map(watch.has_seen, _held(given))):
                raise InputError(
                    f"remat({self.name}) returns {kind_of(given)} over tensors, which would have no"
                    " gradient. Return a list or a tuple of them."
                )

    def _passes(self, new: Tensor, old: Tensor) -> None:
        """Take ``new`` for ``old`` around the block."""
        for mode in self._around:
            mode.stands_for(new, old)
        if self._numbering is not None:
            self._numbering.passes(new, old)

    def _differs(self, when: str, error: BaseException | None) -> TraceError:
        raised = f", where it raises {type(error).__name__}: {error}" if error else ""
        found = TraceError(
            f"remat({self.name}) computes other values when it runs again{when}{raised}. It"
            " depends on something that has changed meanwhile, such as an iterator, a file, or a"
            " tensor that was written to. What is put back are the variables, attributes, lists and"
            " dicts that the block can reach. Pass other things as arguments, as they are at the"
            " call."
        )
        found.__cause__ = error
        return found


@dataclass(frozen=True)
class _Result:
    """What a run gives and writes.

    Attributes:
        leaves: of what the block returns.
        copies: the tensors that stand for the inputs that it writes to.
        tensors: those in the leaves, the copies, and those that the written contents hold.
    """

    leaves: list[Any]
    treedef: Any
    error: BaseException | None
    copies: list[Tensor]
    written: list[Content]
    tensors: list[Tensor]


class _First:
    """What is kept of the first run."""

    def __init__(self, result: _Result, numbering: ValueNumbering, picked: Sequence[int]) -> None:
        self.has_error = result.error is not None
        self.numbers = _numbers(result, picked, numbering)
        self.values = numbering.numbers
        self.values.end()


def _numbers(result: _Result, picked: Sequence[int], numbering: ValueNumbering) -> list[Any]:
    """What has to be the same in each run: how many tensors it gives, whether it raises an error,
    and the numbers of the picked tensors.
    """
    n = len(result.tensors)
    return [n, type(result.error), *(numbering.of(result.tensors[i]) for i in picked if i < n)]


def _keeps_identity(x: Any) -> bool:
    """Whether a container is part of the state: the block may write to it, or return it."""
    return type(x) in (dict, OrderedDict, defaultdict, list, deque)


def _held(by: Any) -> Iterator[Tensor]:
    """The tensors that an iterator or a view of a dict refers to."""
    queue: list[Any] = [by]
    for _ in range(4):
        queue = gc.get_referents(*queue)
        yield from (x for x in queue if isinstance(x, Tensor))


def _generators() -> Sequence[torch.Generator]:
    """torch's generators; of a program that is traced, none."""
    if get_proxy_mode() is not None:
        return ()
    cuda = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
    return (torch.default_generator, *cuda)
