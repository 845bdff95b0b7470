"""State that a call of a model leaves in its attributes: ``fn`` is pure, so the next call would not
have it.
"""

import dis
import warnings
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import lru_cache
from types import CodeType, FunctionType
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from ftp.errors import StaleCaptureWarning, TraceError
from ftp.functional.purity import COPIES, impure, tensors_of, written_by

Modules = Sequence[tuple[str, nn.Module]]  # by path


def attributes_of(modules: Modules) -> Iterator[tuple[str, Any]]:
    """What the modules' attributes hold, also in plain containers, by path."""
    for path_of_module, module in modules:
        for name, value in module.__dict__.items():
            if name in _REGISTERED:
                continue
            path, kind = join(path_of_module, name), type(value)
            if kind is dict or kind is OrderedDict:
                yield from ((f"{path}[{key!r}]", item) for key, item in value.items())
            elif kind is list or kind is tuple:
                yield from ((f"{path}[{i}]", item) for i, item in enumerate(value))
            else:
                yield path, value


def join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def check_state(
    model: str,
    modules: Modules,
    before: Mapping[str, Any],
    read: Collection[int],
    empty: "EmptyAttributes",
) -> None:
    """Refuse attributes by which a tensor goes from call to call, and warn of those that count."""
    for path in empty.filled():
        raise TraceError(impure(model, f"attribute {path!r}", "fills"))
    now = dict(attributes_of(modules))
    for path, value in before.items():
        new = now.get(path, value)
        if isinstance(value, Tensor):
            if new is not value and id(value) in read:
                raise TraceError(impure(model, f"attribute {path!r}", "replaces"))
        elif _counts(path, value) and not (_counts(path, new) and new == value):
            warnings.warn(
                f"{model} changes attribute {path!r} from {value!r} to {new!r} while it runs. fn is"
                f" pure: each call, and a traced step, begins with {value!r}. Make it a buffer, a"
                " tensor, and use functionalize(model, buffers=True).",
                StaleCaptureWarning,
                stacklevel=2,
            )


def _counts(path: str, value: Any) -> bool:
    return type(value) in (int, float, bool) and path.rpartition(".")[2] != "training"


class EmptyAttributes:
    """Watches, within the block, the attributes of modules that hold nothing, and that the code of
    their classes both reads and assigns.

    Args:
        constants: tensors that are the same in each call.
    """

    def __init__(self, modules: Modules, constants: Iterable[Tensor]) -> None:
        self._watched = {
            (id(module), name): (join(path, name), module)
            for path, module in modules
            for name in _kept(type(module))
            if module.__dict__.get(name) is None
            and not any(name in module.__dict__[kind] for kind in _REGISTERED)
        }
        self._read: set[tuple[int, str]] = set()
        self._constants = _OfConstants(constants)
        self._stack = ExitStack()

    def __enter__(self) -> "EmptyAttributes":
        for (_, name), (_, module) in self._watched.items():
            kind = type(module)
            if not any(name in vars(owner) for owner in kind.__mro__):  # another call watches it
                setattr(kind, name, _EmptyAttribute(name, self._read))
                self._stack.callback(delattr, kind, name)
        if self._watched:
            self._stack.enter_context(self._constants)
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    def filled(self) -> Iterator[str]:
        """The paths of attributes that were read while they were empty, and that hold now what
        depends on the arguments.
        """
        for key, (path, module) in self._watched.items():
            found = tensors_of([module.__dict__.get(key[1])]) if key in self._read else ()
            if any(x not in self._constants.known for x in found):
                yield path


_REGISTERED = ("_parameters", "_buffers", "_modules")


class _EmptyAttribute:
    """An attribute of a class that notes for which objects it is read while it holds nothing."""

    def __init__(self, name: str, read: set[tuple[int, str]]) -> None:
        self._name, self._read = name, read

    def __get__(self, module: Any, owner: type) -> Any:
        held = {} if module is None else module.__dict__
        if module is not None and held.get(self._name) is None:
            self._read.add((id(module), self._name))
        if self._name in held:
            return held[self._name]
        raise AttributeError(f"{owner.__name__!r} object has no attribute {self._name!r}")

    def __set__(self, module: Any, value: Any) -> None:
        module.__dict__[self._name] = value

    def __delete__(self, module: Any) -> None:
        if self._name not in module.__dict__:
            raise AttributeError(self._name)
        del module.__dict__[self._name]


class _OfConstants(TorchFunctionMode):
    """Notes which tensors are made of constants alone: a mask, a table of angles."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self.known = WeakIdKeyDictionary(dict.fromkeys(known))

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


@lru_cache(maxsize=1024)
def _kept(kind: type[nn.Module]) -> tuple[str, ...]:
    """The attributes that methods of a class assign, other than ``__init__``, and read."""
    stored: set[str] = set()
    loaded: set[str] = set()
    for owner in kind.__mro__:
        if owner in (nn.Module, object):
            continue
        for name, held in vars(owner).items():
            if (function := _function_of(held)) is not None and name != "__init__":
                _attributes(function.__code__, stored, loaded)
    return tuple(sorted(name for name in stored & loaded if not hasattr(kind, name)))


def _function_of(held: Any) -> FunctionType | None:
    if isinstance(held, property):
        held = held.fget
    while (inner := getattr(held, "__wrapped__", getattr(held, "__func__", None))) is not None:
        held = inner
    return held if isinstance(held, FunctionType) else None


def _attributes(code: CodeType, stored: set[str], loaded: set[str]) -> None:
    for each in dis.get_instructions(code):
        if each.opname == "STORE_ATTR":
            stored.add(each.argval)
        elif each.opname.startswith("LOAD_"):  # a name, or a string as in hasattr(self, "cache")
            loaded.update([each.argval] if isinstance(each.argval, str) else ())
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            _attributes(inner, stored, loaded)
