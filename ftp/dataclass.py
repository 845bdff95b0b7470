"""Dataclasses whose methods are compiled when they are first looked up.

The standard library compiles up to six methods of each class as it is defined, which was a third of
the time of importing ftp: a start defines two hundred classes and uses one method in twenty.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

_OFF: dict[str, Any] = {"init": False, "repr": False, "eq": False}
_COMPILED_BY: dict[str, dict[str, Any]] = {
    "__init__": {"init": True},
    "__repr__": {"repr": True},
    "__eq__": {"eq": True},
    "__hash__": {"unsafe_hash": True},
    **{f"__{name}__": {"eq": True, "order": True} for name in ("lt", "le", "gt", "ge")},
}  # method: the options of the standard library that compile it


def _dataclass(
    cls: Any = None,
    /,
    *,
    frozen: bool = False,
    eq: bool = True,
    order: bool = False,
    repr: bool = True,
    kw_only: bool = False,
) -> Any:
    """`dataclasses.dataclass`, but that fields in a wrong order are told at the first instance.

    >>> @dataclass(frozen=True)
    ... class Point:
    ...     x: int
    ...     y: int = 0
    >>> Point(1) == Point(1, 0), Point(1)
    (True, Point(x=1, y=0))
    """

    def define(cls: Any) -> Any:
        cls.__doc__ = cls.__doc__ or cls.__name__  # else it would be the signature of ``__init__``
        # The standard library compares a class with its bases, and compiles what freezes it.
        is_compared = any(map(dataclasses.is_dataclass, cls.__mro__[1:]))
        dataclasses.dataclass(**_OFF, frozen=frozen and is_compared, kw_only=kw_only)(cls)
        params = cls.__dataclass_params__
        params.init, params.repr, params.eq = True, repr, eq
        params.order, params.frozen = order, frozen
        asked = {"__init__": True, "__repr__": repr, "__eq__": eq, "__hash__": eq and frozen}
        for name in _COMPILED_BY:
            if asked.get(name, order) and name not in vars(cls):
                setattr(cls, name, _LazyMethod(cls, name, frozen))
        if eq and not frozen and "__hash__" not in vars(cls):
            cls.__hash__ = None
        if frozen and not is_compared:
            _freeze(cls)
        return cls

    return define if cls is None else define(cls)


if TYPE_CHECKING:  # checkers know the standard library's by name
    from dataclasses import dataclass
else:
    dataclass = _dataclass


class _LazyMethod:
    """A method of a dataclass, which is compiled and takes this place when it is looked up."""

    def __init__(self, cls: type, name: str, is_frozen: bool):
        self.cls, self.name, self.is_frozen = cls, name, is_frozen

    def __get__(self, instance: Any, owner: type) -> Any:
        own = {"__init__": _init, "__eq__": _eq, "__hash__": _hash}.get(self.name)
        method = own(self.cls, self.is_frozen) if own else self._by_library()
        setattr(self.cls, self.name, method)
        return method.__get__(instance, owner)

    def _by_library(self) -> Any:
        cls, name = self.cls, self.name
        names = {
            "__doc__": cls.__doc__,
            "__qualname__": cls.__qualname__,
            "__module__": cls.__module__,
        }
        made = dataclasses.make_dataclass(
            cls.__name__,
            [(field.name, field.type, field) for field in dataclasses.fields(cls)],
            namespace=names,
            **{**_OFF, **_COMPILED_BY[name]},
        )
        return vars(made)[name]


# The default of a parameter whose field has a factory.
_FACTORY = vars(dataclasses)["_HAS_DEFAULT_FACTORY"]


def _init(cls: Any, is_frozen: bool) -> Any:
    """The method that the standard library compiles, in a fifth of its time."""
    fields = dataclasses.fields(cls)
    given = [field for field in fields if field.init]
    positional = [_parameter(field) for field in given if not field.kw_only]
    by_name = [_parameter(field) for field in given if field.kw_only]
    for before, after in itertools.pairwise(positional):
        if "=" in before and "=" not in after:
            raise TypeError(f"non-default argument {after!r} follows default argument")
    assigned = [(f.name, value) for f in fields if (value := _assigned(f))]
    form = "__set(self, {0!r}, {1})" if is_frozen else "self.{0} = {1}"
    body = [form.format(name, value) for name, value in assigned]
    body += ["self.__post_init__()"] * hasattr(cls, "__post_init__")
    known = {f"__{kind}_{f.name}": getattr(f, kind) for f in fields for kind in _DEFAULTS}
    known |= {"__set": object.__setattr__, "__factory": _FACTORY}
    star = ["*"] * bool(by_name)
    method = _method(cls, "__init__", [*positional, *star, *by_name], body or ["pass"], known)
    method.__annotations__ = {f.name: f.type for f in given} | {"return": None}
    return method


_DEFAULTS = ("default", "default_factory")


def _has(field: Any, kind: str) -> bool:
    return getattr(field, kind) is not dataclasses.MISSING


def _parameter(field: Any) -> str:
    name = field.name
    if _has(field, "default_factory"):
        return f"{name}=__factory"
    return f"{name}=__default_{name}" if _has(field, "default") else name


def _assigned(field: Any) -> str:
    """What a new instance gets as a field; "" if it is an attribute of the class, if any."""
    name = field.name
    if not _has(field, "default_factory"):
        return name if field.init else ""
    made = f"__default_factory_{name}()"
    return f"{made} if {name} is __factory else {name}" if field.init else made


def _eq(cls: Any, is_frozen: bool) -> Any:
    names = [field.name for field in dataclasses.fields(cls) if field.compare]
    own, theirs = (_tuple(f"{of}.{name}" for name in names) for of in ("self", "other"))
    body = [f"if other.__class__ is self.__class__: return {own} == {theirs}"]
    return _method(cls, "__eq__", ["other"], [*body, "return NotImplemented"], {})


def _hash(cls: Any, is_frozen: bool) -> Any:
    fields = dataclasses.fields(cls)
    names = [f.name for f in fields if (f.compare if f.hash is None else f.hash)]
    own = _tuple(f"self.{name}" for name in names)
    return _method(cls, "__hash__", [], [f"return hash({own})"], {})


def _tuple(items: Iterable[str]) -> str:
    return f"({''.join(f'{item}, ' for item in items)})"


def _method(
    cls: Any, name: str, parameters: Sequence[str], body: Sequence[str], known: dict[str, Any]
) -> Any:
    """A method of a class from its code.

    Args:
        known: its global names.
    """
    head = f"def {name}({', '.join(('self', *parameters))}):"
    exec("\n ".join((head, *body)), known)
    method = known[name]
    method.__qualname__, method.__module__ = f"{cls.__qualname__}.{name}", cls.__module__
    return method


def _freeze(cls: Any) -> None:
    """Let instances refuse to change, and those of a subclass to change the fields."""
    fields = {field.name for field in dataclasses.fields(cls)}

    def __setattr__(self: Any, name: str, value: Any) -> None:
        if type(self) is cls or name in fields:
            raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")
        super(cls, self).__setattr__(name, value)

    def __delattr__(self: Any, name: str) -> None:
        if type(self) is cls or name in fields:
            raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")
        super(cls, self).__delattr__(name)

    cls.__setattr__, cls.__delattr__ = __setattr__, __delattr__
