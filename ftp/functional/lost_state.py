"""Refuse models that keep tensors in attributes from one call to the next: ``fn`` is pure, so its
next call would not have them.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from ftp.errors import StaleCaptureWarning, TraceError
from ftp.functional.attributes import (
    OF_MODULES,
    REGISTERED,
    Held,
    Modules,
    Root,
    attributes_of,
    has_parts,
    is_of_library,
    of_class,
)
from ftp.functional.modes_of_blocks import ModeOfBlocks
from ftp.functional.purity import COPIES, WriteGuard, impure
from ftp.functional.writes import tensors_of, written_by


def check_state(
    model: str,
    modules: Modules,
    before: Mapping[str, Held],
    guard: WriteGuard,
    kept: "KeptAttributes",
) -> None:
    """Refuse attributes that carry a tensor to the next call, or one of an earlier call's graph;
    warn of counters.
    """
    now = {held.path: held for held in attributes_of(modules)}
    kept.check_new(model, before, now)
    for path, (_, value, _) in before.items():
        new = now[path].value if path in now else value
        if isinstance(value, Tensor):
            if id(value) not in guard.read:
                continue
            if new is not value and not guard.is_moved(new, value):
                raise TraceError(impure(model, f"attribute {path!r}", "replaces"))
            if value.grad_fn is not None and id(value) in guard.followed:
                raise TraceError(_of_earlier_call(model, path))
        elif _is_counter(path, value) and not (_is_counter(path, new) and new == value):
            to = f"a tensor of shape {tuple(new.shape)}" if isinstance(new, Tensor) else repr(new)
            _warn(model, f"changes attribute {path!r} from {value!r} to {to}", repr(value))


def _of_earlier_call(model: str, path: str) -> str:
    return (
        f"{model} reads attribute {path!r}, which an earlier call of the model, or its __init__,"
        " computed with a gradient, as from its parameters. fn would keep those values, and"
        " parameters would lose the gradient that flows through it. Compute it in forward; empty"
        " what an earlier call left, or give functionalize a model that has not run; where no"
        " gradient is meant, read it under torch.no_grad() or detach it."
    )


def _is_counter(path: str, value: Any) -> bool:
    return type(value) in (int, float, bool) and path.rpartition(".")[2] != "training"


def _warn(model: str, does: str, first: str) -> None:
    warnings.warn(
        f"{model} {does} while it runs. fn is pure: each call, and a traced step, begins with"
        f" {first}. If a call reads it before it writes it, make it a buffer, a tensor, and use"
        " functionalize(model, buffers=True).",
        StaleCaptureWarning,
        stacklevel=3,
    )


class KeptAttributes:
    """Within the block, watch the attributes of modules that may carry a tensor to the next call:
    those that are None or missing, and those that hold a container or a plain object. Any code may
    read and assign them: the model's, a function's that is given the module, a hook's.

    Args:
        constants: tensors that are the same in each call.
    """

    def __init__(self, modules: Modules, constants: Iterable[Tensor]) -> None:
        self._first: dict[Root, tuple[nn.Module, Any]] = {}  # what each held before the call
        for _, module in modules:
            held = module.__dict__
            for name, value in held.items():
                if name not in OF_MODULES and (value is None or _fills(value)):
                    self._first[id(module), name] = module, value
            for name, value in (*of_class(type(module)), *_nones_of_class(type(module))):
                if name not in held and not any(name in held[kind] for kind in REGISTERED):
                    self._first[id(module), name] = module, value
        self._modules = {id(module) for _, module in modules}
        self._read: set[Root] = set()
        self._assigned: set[Root] = set()
        self._constants = _OfConstants(constants)
        self._stack = ExitStack()

    def __enter__(self) -> "KeptAttributes":
        for root, (module, _) in self._first.items():
            kind, name = type(module), root[1]
            of_class = next((vars(k)[name] for k in kind.__mro__ if name in vars(k)), _MISSING)
            if of_class is _MISSING or of_class is None:
                self._stack.callback(_restore, kind, name, vars(kind).get(name, _MISSING))
                setattr(kind, name, _NotedAttribute(name, of_class))
            elif not isinstance(of_class, _NotedAttribute):  # it may be read without a word
                self._read.add(root)
        if not _watching:
            modules: Any = nn.Module  # a method of it is replaced
            self._stack.callback(setattr, modules, "__getattr__", modules.__getattr__)
            modules.__getattr__ = _noting_missing(modules.__getattr__)
        _watching.append(self)
        self._stack.callback(_watching.remove, self)
        self._stack.enter_context(self._constants)
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    def note(self, module: nn.Module, name: str) -> None:
        """A module's attribute is read: note it if it still holds what it held before the call."""
        root = id(module), name
        if root not in self._first or root in self._assigned:
            return
        if module.__dict__.get(name) is self._first[root][1]:
            self._read.add(root)

    def note_missing(self, module: nn.Module, name: str) -> None:
        """A module is asked for an attribute that it lacks, as by ``hasattr``."""
        root = id(module), name
        if id(module) in self._modules and root not in self._assigned:
            self._first.setdefault(root, (module, None))
            self._read.add(root)

    def note_assigned(self, module: nn.Module, name: str) -> None:
        """A module's attribute is assigned: later reads see what this call put there."""
        self._assigned.add((id(module), name))

    def check_new(self, model: str, before: Mapping[str, Held], now: Mapping[str, Held]) -> None:
        """Refuse attributes that were read while they were None, and now hold a tensor that depends
        on the arguments. Warn of such tensors in containers and objects that were read: the call
        may have written each place before it read it.
        """
        old = {id(held.value) for held in before.values()}
        held_tensors = {path for path, held in before.items() if isinstance(held.value, Tensor)}
        for path, value, root in now.values():
            if not isinstance(value, Tensor) or id(value) in old or value in self._constants.known:
                continue
            if path in held_tensors or root not in self._first:
                continue
            if not self._is_read(root, before.values()):
                continue
            if self._first[root][1] is None:
                raise TraceError(impure(model, f"attribute {path!r}", "fills"))
            _warn(model, f"leaves a tensor in attribute {path!r}", "what it held before")

    def _is_read(self, root: Root, before: Iterable[Held]) -> bool:
        """Whether an attribute was read, or another attribute that shares a container with it."""
        roots: dict[int, set[Root]] = {}
        for _, value, of in before:
            if not isinstance(value, tuple) and has_parts(value):
                roots.setdefault(id(value), set()).add(of)
        sharing = (each for each in roots.values() if root in each)
        return not self._read.isdisjoint({root}.union(*sharing))


_watching: list[KeptAttributes] = []  # the calls that run now


def _noting_missing(own: Callable[[nn.Module, str], Any]) -> Callable[[nn.Module, str], Any]:
    """``nn.Module.__getattr__`` that notes attributes which modules lack."""

    def __getattr__(self: nn.Module, name: str) -> Any:
        try:
            return own(self, name)
        except AttributeError:
            for each in _watching:
                each.note_missing(self, name)
            raise

    return __getattr__


_MISSING = object()


def _restore(kind: type, name: str, value: Any) -> None:
    if value is _MISSING:
        delattr(kind, name)
    else:
        setattr(kind, name, value)


class _NotedAttribute:
    """An attribute of a class that notes for which objects it is read."""

    def __init__(self, name: str, default: Any) -> None:
        self._name, self._default = name, default

    def __get__(self, module: Any, owner: type) -> Any:
        if module is not None:
            for each in _watching:
                each.note(module, self._name)
            if self._name in module.__dict__:
                return module.__dict__[self._name]
        if self._default is _MISSING:
            raise AttributeError(f"{owner.__name__!r} object has no attribute {self._name!r}")
        return self._default

    def __set__(self, module: Any, value: Any) -> None:
        for each in _watching:
            each.note_assigned(module, self._name)
        module.__dict__[self._name] = value

    def __delete__(self, module: Any) -> None:
        if self._name not in module.__dict__:
            raise AttributeError(self._name)
        del module.__dict__[self._name]


class _OfConstants(ModeOfBlocks):
    """Note which tensors are computed from constants alone: a mask, a table of angles."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self.known = WeakIdKeyDictionary(dict.fromkeys(known))

    def stands_for(self, new: Tensor, old: Tensor) -> None:
        if old in self.known:
            self.known[new] = None

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        given = args[:1] if func in COPIES else (*args, *kwargs.values())
        takes_shape = name.startswith("new_") or name.endswith("_like")
        if takes_shape or all(x in self.known for x in tensors_of(given)):
            out = func(*args, **kwargs)
            self.known.update(dict.fromkeys(tensors_of([out])))
            return out
        for x in written_by(func, args, kwargs):
            self.known.pop(x, None)
        return func(*args, **kwargs)


def _nones_of_class(kind: type[nn.Module]) -> Iterator[tuple[str, None]]:
    """The attributes of a user's module class that are None until a module assigns its own."""
    for owner in kind.__mro__:
        if not is_of_library(owner):
            own = vars(owner).items()
            yield from ((name, x) for name, x in own if x is None and not name.startswith("__"))


def _fills(value: Any) -> bool:
    """Whether a value may come to hold a tensor."""
    return any(map(_fills, value)) if isinstance(value, tuple) else has_parts(value)
