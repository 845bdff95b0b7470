"""Draws: torch's random functions draw from a key while a model or an initializer runs.

A call's key is that of its module's path with the number of draws made there before folded in:
layers do not depend on one another, and a module that is called again draws anew.
"""

import contextlib
import functools
import hashlib
import inspect
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ftp.errors import TraceError
from ftp.ops.choose import current_branch
from ftp.random.distributions import check_key, fold_in
from ftp.random.torch_functions import DRAWN
from ftp.source import user_line
from ftp.torch_internals.functorch import (
    add_batch_dim,
    is_mapped_by,
    maps_around,
    temporarily_clear_interpreter_stack,
)


class Draws(TorchFunctionMode):
    """Within the block torch's random functions draw from ``key``; with None they raise.

    Args:
        name: of the model, for messages.
        path: of the module that runs.
        counts: how many draws each module has made.
    """

    def __init__(
        self, key: Tensor | None, name: str, *, path: str = "", counts: dict[str, int] | None = None
    ):
        super().__init__()
        self.key, self.name = key, name
        self.path = [path]
        self.counts: dict[str, int] = {} if counts is None else counts
        self._keys: dict[str, Tensor] = {}
        self._outer: Draws | None = None
        self._tokens: list[Any] = []  # several: it is entered again inside of composite functions

    def __enter__(self):
        if (around := _current.get()) is not self:
            self._outer = around
        self._tokens.append(_current.set(self))
        return super().__enter__()

    def __exit__(self, *error):
        _current.reset(self._tokens.pop())
        return super().__exit__(*error)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        drawn = DRAWN.get(func)
        if drawn is not None:
            result = drawn(self, func, *args, **kwargs)
            return func(*args, **kwargs) if result is NotImplemented else result
        if func in OF_INDICES:  # torch passes all arguments after the second by name
            with self:
                found = OF_INDICES[func](*args, **kwargs)
            return found if kwargs.get("return_indices") else found[0]
        if func in COMPOSITE:
            with self:
                return _reentrant(func)(*args, **kwargs)
        return func(*args, **kwargs)

    def next_key(self, what: str) -> Tensor:
        """The key of a draw that is made now.

        Raises:
            TraceError: there is no key to draw from.
        """
        if current_branch():
            raise TraceError(
                f"{what} draws random numbers at {user_line() or 'an unknown line'}, in a branch of"
                " torch.cond: the numbers of later draws would depend on the branch"
                " taken. Draw before the cond, and pass the result as an operand."
            )
        path = self.path[-1]
        if self.key is None and self._outer is not None:
            return self._outer.next_key(what)
        if self.key is None:
            line = user_line()
            raise TraceError(
                f"{what} draws random numbers{f' at {line}' if line else ''}, in"
                f" {f'module {path!r} of ' if path else ''}{self.name}, which"
                " has no key to draw them from. Call fn(params, ..., rng=key), with key ="
                " ftp.random.key(seed) and a new key for each"
                " step. If it is dropout that should be off, call model.eval() before"
                " ftp.functionalize."
            )
        if path not in self._keys:
            self._keys[path] = fold_in(self.key, path_number(path))
        count = self.counts.get(path, 0)
        self.counts[path] = count + 1
        return _of_each_lane(fold_in(self._keys[path], count), what)

    @contextmanager
    def at(self, path: str) -> Iterator[None]:
        """Draw as the module at ``path``."""
        self.path.append(path)
        try:
            yield
        finally:
            self.path.pop()


class DrawsNoMore(Draws):
    """Within the block modules draw no random numbers: it runs after the call of ``draws``, whose
    draws the code would draw again, or go on with; torch's generator has no part in them.
    """

    def __init__(self, draws: Draws):
        super().__init__(draws.key, draws.name)
        self._of = draws

    def __enter__(self):
        return TorchFunctionMode.__enter__(self)

    def __exit__(self, *error):
        return TorchFunctionMode.__exit__(self, *error)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if len(self._of.path) == 1:  # in no module
            return func(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)

    def next_key(self, what: str) -> Tensor:
        raise TraceError(
            f"{what} draws random numbers at {user_line() or 'an unknown line'}, in module"
            f" {self._of.path[-1]!r} of {self.name}, which the backward pass calls: by backward of"
            " a torch.autograd.Function, a hook, or torch.utils.checkpoint outside of a step. They"
            " would not be those of the forward pass. Draw before, and save what is drawn, or use"
            " ftp.remat."
        )


def _of_each_lane(key: Tensor, what: str) -> Tensor:
    """The key folded with the index along each ``torch.vmap`` around the draw that asks for
    different numbers and does not map the key itself.

    Raises:
        TraceError: such a vmap says nothing of random numbers; torch refuses the draw too.
    """
    for mapped in maps_around():
        if mapped.randomness() == "same" or is_mapped_by(key, mapped.level()):
            continue
        if mapped.randomness() == "error":
            line = user_line()
            raise TraceError(
                f"{what} draws random numbers{f' at {line}' if line else ''}, under a torch.vmap"
                " that does not say whether all its slices draw the same. Give it"
                " randomness='different' or 'same', or map over a key for each slice."
            )
        with temporarily_clear_interpreter_stack():  # the index belongs to no inner transform
            lanes = torch.arange(mapped.batch_size(), device=key.device)
        key = fold_in(key, add_batch_dim(lanes, 0, mapped.level()))
    return key


_current: ContextVar[Draws | None] = ContextVar("draws", default=None)


def surrounding_key(name: str) -> Tensor | None:
    """A key for the model ``name`` from the surrounding `Draws`; None without one."""
    around = _current.get()
    return None if around is None or around.key is None else around.next_key(name)


def keyed(fn: Callable[..., Any]) -> Callable[..., Any]:
    """``fn`` with one more argument, the last: the key for all its random draws.

    >>> from ftp.random import key
    >>> noise = keyed(lambda n: torch.randn(n))
    >>> torch.equal(noise(3, key(0)), noise(3, key(0)))
    True

    Raises:
        InputError: a last argument that is no key.
    """
    name = getattr(fn, "__name__", type(fn).__name__)

    def with_key(*args: Any) -> Any:
        given, key = args[:-1], args[-1] if args else torch.empty(0)
        check_key(key, f"{name}(..., rng)")
        with Draws(key, name):
            return fn(*given)

    with_key.__name__ = with_key.__qualname__ = name
    with contextlib.suppress(TypeError, ValueError):
        own = inspect.signature(fn)
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        before = [p for p in own.parameters.values() if p.kind in kinds]
        is_open = any(p.kind is p.VAR_POSITIONAL for p in own.parameters.values())
        # Python has no signature in which arguments before the last may be left out.
        left_out = (
            None if any(p.default is not p.empty for p in before) else inspect.Parameter.empty
        )
        last = inspect.Parameter("rng", inspect.Parameter.POSITIONAL_ONLY, default=left_out)
        whole = [p.replace(kind=inspect.Parameter.POSITIONAL_ONLY) for p in before]
        if not is_open:
            signature = own.replace(parameters=[*whole, last])
            with_key.__signature__ = signature
    return with_key


def path_number(path: str) -> int:
    """The number folded into a key for a path: the first 61 bits of its BLAKE2b hash.

    >>> path_number("layers.0.dropout")
    1857243124633355296
    """
    return int.from_bytes(hashlib.blake2b(path.encode(), digest_size=8).digest(), "big") >> 3


def _never(*args: Any) -> bool:
    return False


class _TorchModule:
    """Stands for the module ``torch`` in the globals of a composite function."""

    overrides = types.SimpleNamespace(
        has_torch_function=_never,
        has_torch_function_unary=_never,
        has_torch_function_variadic=_never,
    )

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@functools.cache
def _reentrant(func: types.FunctionType) -> Callable[..., Any]:
    """``func`` without its own check for overrides: what it calls is seen by the mode, which
    torch leaves out otherwise.
    """
    own = {
        "has_torch_function": _never,
        "has_torch_function_unary": _never,
        "has_torch_function_variadic": _never,
        "torch": _TorchModule(),
    }
    copy = types.FunctionType(
        func.__code__,
        {**func.__globals__, **own},
        func.__name__,
        func.__defaults__,
        func.__closure__,
    )
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


# Functions that return the first result of others.
OF_INDICES: dict[Any, Any] = {
    F.fractional_max_pool2d: F.fractional_max_pool2d_with_indices,
    F.fractional_max_pool3d: F.fractional_max_pool3d_with_indices,
}
# Python functions that draw through others.
COMPOSITE = {
    F.alpha_dropout, F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.feature_alpha_dropout,
    F.fractional_max_pool2d_with_indices, F.fractional_max_pool3d_with_indices, F.gumbel_softmax,
    F.multi_head_attention_forward, F.rrelu, nn.init.constant_, nn.init.kaiming_uniform_,
    nn.init.normal_, nn.init.uniform_,
}  # fmt: skip
