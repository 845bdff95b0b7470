"""A call of a block that runs again in the backward pass, as a function of the tensors that it
reads: its arguments, and those of the state that it can reach.
"""

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import Tensor
from torch.overrides import TorchFunctionMode

from ftp.errors import InputError, TraceError
from ftp.functional.block_state import BlockState, tensors_in, with_tensors
from ftp.functional.closures import Content, contents_of, put_in
from ftp.functional.differentiable import is_differentiable
from ftp.functional.writes import written_by
from ftp.sharding.pytree import flatten
from ftp.source import user_line
from ftp.torch_internals.autograd_state import get_sequence_nr
from ftp.torch_internals.functorch import (
    TransformType,
    get_interpreter_stack,
    get_unwrapped,
    is_batchedtensor,
    is_functorch_wrapped_tensor,
    maybe_get_level,
)
from ftp.torch_internals.modes import DisableTorchFunction
from ftp.torch_internals.pytree import tree_leaves, tree_map_only
from ftp.torch_internals.storages import storage_number

_T = TypeVar("_T")
Transforms = Mapping[int, TransformType | None]
_outer_transforms: list[Transforms] = [{}]


def _transforms() -> Transforms:
    """By level, the transforms inside which a block is called, also those that a surrounding block
    runs without; None for a level of two kinds.
    """
    found = dict(_outer_transforms[-1])
    for level, key in _running().items():
        found[level] = key if found.get(level, key) == key else None
    return found


def is_transforming() -> bool:
    """Whether a transform of torch.func is running."""
    return bool(get_interpreter_stack())


def _running() -> dict[int, TransformType]:
    """The transforms that run, by level."""
    return {one.level(): one.key() for one in get_interpreter_stack() or ()}


class ReadsState(BaseException):
    """A block reads a tensor of its state that is not among its inputs, or writes to an input: it
    has to be called once more. (Not an Exception, which a model may catch.)
    """

    def __init__(self, call: "BlockCall", x: Tensor, is_written: bool) -> None:
        super().__init__()
        self.call, self.x, self.is_written = call, x, is_written


class BlockCall:
    """One call of a block.

    Args:
        name: for messages.
        root: refers to the state that the block may read and write.
        stands_for: called for each tensor that takes the place of another one.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        name: str,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        root: Any,
        stands_for: Callable[[Tensor, Tensor], None],
    ) -> None:
        self._fn, self.name, self._stands_for = fn, name, stands_for
        self.transforms = _transforms()
        self._keywords = tuple(kwargs)
        # Lists and dicts are part of the state: the block may write to them.
        self._leaves, self._treedef = flatten((args, tuple(kwargs.values())), _may_be_written)
        others = tuple(x for x in self._leaves if not isinstance(x, Tensor))
        self.state = BlockState((root, others))
        self._inputs = {id(x): x for x in self._leaves if isinstance(x, Tensor)}
        self._copied: list[int] = []  # the inputs that the block writes to,
        self._replaced: set[int] = set()  # and those of which the state gets another tensor
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
        self.reads(found.x)
        if found.is_written:
            self._copied.append(id(found.x))

    @property
    def inputs(self) -> list[Tensor]:
        # What a block writes to changes after autograd has saved its inputs.
        return [x.clone() if key in self._copied else x for key, x in self._inputs.items()]

    def is_input(self, x: Tensor) -> bool:
        return id(x) in self._inputs

    def untouched(self, tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """The tensors that the block must not write to, each with that outside for which it stands:
        inputs without a copy, and the rest of the state.
        """
        for x, inner in zip(self._inputs.values(), tensors, strict=True):
            if id(x) not in self._replaced and id(x) not in self._copied:
                yield inner, x
        yield from ((x, x) for key, x in self.state.tensors.items() if key not in self._inputs)

    def run(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Run the block with its inputs as they are inside of transforms. What it writes to the
        state stays.
        """
        self._result = result = self._run(tensors, keeps=True)
        picked = {id(x): i for i, x in reversed([*enumerate(result.given)])}
        known = self.state.tensors.keys() | self._inputs.keys() | picked.keys()
        for i, x in enumerate(result.set, len(result.given)):
            if id(x) not in known:
                picked.setdefault(id(x), i)
        at = {*range(len(result.given)), *picked.values()}
        self._picked, self._index = sorted(at), picked
        if result.error is not None and not at:
            raise result.error
        return self._fresh(result, tensors)

    def run_again(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Run the block as in the call, and leave the state as it is now."""
        result, first = self._run(tensors, keeps=False), self._result
        if result.error is not None and first.error is None:
            raise result.error
        if (len(result.given), len(result.set)) != (len(first.given), len(first.set)):
            raise TraceError(
                f"remat({self.name}) gives {len(result.given)} tensors and sets {len(result.set)}"
                f" when it is computed again; its first run gave {len(first.given)} and set"
                f" {len(first.set)}. What it does may depend on its arguments and on attributes,"
                " lists, dicts and variables that it can reach."
            )
        return self._fresh(result, tensors)

    def finish(self, results: Sequence[Tensor]) -> Any:
        """Put the block's results in the place of the tensors of its run, in the state too.

        Raises:
            Exception: that of the block.
        """
        result, outer = self._result, dict(zip(self._picked, results, strict=True))
        by_id = {key: outer[i] for key, i in self._index.items()}
        for key, x in by_id.items():
            self._stands_for(x, result.by_id[key])
        for content in result.written:
            put_in(content.of, with_tensors(content.held, by_id))
        n = len(result.given) - len(self._copied)
        for i, key in enumerate(self._copied):
            self._inputs[key].copy_(outer[n + i])
        at = iter(range(n))
        leaves = [outer[next(at)] if isinstance(x, Tensor) else x for x in result.leaves]
        out = result.treedef.unflatten(leaves)
        if (error := result.error) is not None:
            if n:
                error.args, attributes = out
                vars(error).update(attributes)
            raise error
        return out

    def _run(self, tensors: Sequence[Tensor], *, keeps: bool) -> "_Result":
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
            self._stands_for(x, self._inputs[key])
        filled = [inside[id(x)] if isinstance(x, Tensor) else x for x in self._leaves]
        args, values = self._treedef.unflatten(filled)
        run = self.state.enter(inside)
        error = None
        try:
            with on_top(_outer_transforms, self.transforms):
                out = self._fn(*args, **dict(zip(self._keywords, values, strict=True)))
        except Exception as raised:
            out, error = (raised.args, vars(raised)), raised
        except BaseException:
            run.leave({}, keeps=False)
            raise
        leaves, treedef = flatten(out)
        back = {id(x): self._inputs[k] for k, x in inside.items() if k not in self._replaced}
        fresh = {id(inside[key]) for key in self._replaced}
        written = run.leave(back, fresh, keeps=keeps)
        given = [x for x in leaves if isinstance(x, Tensor)]
        given += [inside[key] for key in self._copied]
        return _Result(leaves, treedef, error, given, written)

    def _fresh(self, result: "_Result", tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The picked tensors of a run. An input that is returned unchanged would lose its place in
        autograd's graph.
        """
        own, everything = set(map(id, tensors)), [*result.given, *result.set]
        found = (everything[i] for i in self._picked)
        return tuple(x.view_as(x) if id(x) in own else x for x in found)


class _Result:
    """What a run gives and writes.

    Attributes:
        leaves: of what the block returns, or of the arguments and attributes of its error.
        given: the tensors among the leaves, and those that stand for inputs that it writes to.
        set: the tensors that the written contents hold.
    """

    def __init__(
        self,
        leaves: list[Any],
        treedef: Any,
        error: Exception | None,
        given: list[Tensor],
        written: list[Content],
    ) -> None:
        self.leaves, self.treedef, self.error = leaves, treedef, error
        self.given, self.written = given, written
        self.set = [x for content in written for x in tensors_in(content.held)]
        self.by_id = {id(x): x for x in (*self.given, *self.set)}


class CapturesCheck(TorchFunctionMode):
    """In a block's first run, find the tensors of its state that may have a gradient, refuse other
    captured ones, and unwrap the rest from the transforms from which the block's inputs were
    unwrapped.
    """

    def __init__(self, call: BlockCall, own: Sequence[Tensor]):
        super().__init__()
        self.call, self.own = call, {id(x): x for x in own}
        self.running = _running()
        self._start = get_sequence_nr()
        self._inner_inputs = own
        self._untouched: dict[int, Tensor] | None = None  # by the numbers of storages

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _running() == self.running:
            for x in () if func is Tensor.requires_grad_ else written_by(func, args, kwargs):
                self._check_written(x)
            args, kwargs = tree_map_only(Tensor, self._inner, (args, kwargs))
        else:
            self._check_inside((args, kwargs))
        made = func(*args, **kwargs)
        if not self.running:  # what the block asks autograd for
            leaves = (x for x in tree_leaves(made) if isinstance(x, Tensor) and x.requires_grad)
            self.own.update((id(x), x) for x in leaves)
        return made

    def _check_inside(self, tree: Any) -> None:
        """Within a transform that the block itself runs, which may have the level of one around the
        block: take every tensor of the state that may have a gradient.
        """
        for x in tree_leaves(tree):
            if (
                isinstance(x, Tensor)
                and id(x) in self.call.state.tensors
                and not self.call.is_input(x)
                and (is_functorch_wrapped_tensor(x) or x.requires_grad)
            ):
                raise ReadsState(self.call, x, is_written=False)

    def _check_written(self, x: Tensor) -> None:
        if self._untouched is None:
            pairs = self.call.untouched(self._inner_inputs)
            self._untouched = {storage_number(inner): outer for inner, outer in pairs}
        outer = self._untouched.get(storage_number(x))
        if outer is not None:
            raise ReadsState(self.call, outer, is_written=True)

    def _inner(self, given: Tensor) -> Tensor:
        """A tensor at the level at which the block runs."""
        x = given
        while is_functorch_wrapped_tensor(x) and not self._is_at_hand(x):
            is_grad = self.call.transforms.get(maybe_get_level(x)) == TransformType.Grad
            if is_batchedtensor(x) or (is_differentiable(x) and (x.requires_grad or not is_grad)):
                self._take(given)
            x = get_unwrapped(x)
        if not self.running and x.requires_grad and id(x) not in self.own and self._is_older(x):
            self._take(given)
        return x

    def _is_older(self, x: Tensor) -> bool:
        """Whether a tensor was made before the block was called."""
        with DisableTorchFunction():
            return x.grad_fn is None or x.grad_fn._sequence_nr() < self._start

    def _is_at_hand(self, x: Tensor) -> bool:
        """Whether the transform that wrapped a tensor is running."""
        key = self.running.get(maybe_get_level(x))
        return key is not None and (key == TransformType.Vmap) == is_batchedtensor(x)

    def _take(self, x: Tensor) -> None:
        """Make a tensor of the state an input of the block; refuse others."""
        if id(x) in self.call.state.tensors and not self.call.is_input(x):
            raise ReadsState(self.call, x, is_written=False)
        why = (
            "that it was not given, of which vmap maps elements"
            if is_batchedtensor(x)
            else "that it was not given, and a gradient is asked for, which would not flow"
        )
        raise InputError(
            f"remat({self.call.name}) uses a tensor of shape {tuple(x.shape)} at"
            f" {user_line() or 'an unknown line'} {why}. Pass it as an argument: block(params, x)."
        )


def _may_be_written(x: Any) -> bool:
    return type(x) in (dict, OrderedDict, defaultdict, list, deque)


@contextmanager
def on_top(stack: list[_T], value: _T) -> Iterator[None]:
    """Within the block ``value`` is the last item of ``stack``. (A context variable would be unset
    in the threads in which torch runs backward passes.)
    """
    stack.append(value)
    try:
        yield
    finally:
        stack.pop()
