"""Dataclasses whose methods are compiled when they are first looked up.

The standard library compiles up to six methods of each class as it is defined, which was a third of
the time of importing ftp: a start defines two hundred classes and uses one method in twenty.
"""

import dataclasses
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
        cls, name = self.cls, self.name
        names = {
            "__doc__": cls.__doc__,
            "__qualname__": cls.__qualname__,
            "__module__": cls.__module__,
        }
        if hasattr(cls, "__post_init__"):
            names["__post_init__"] = ""  # `__init__` calls it where there is one
        made = dataclasses.make_dataclass(
            cls.__name__,
            [(field.name, field.type, field) for field in dataclasses.fields(cls)],
            namespace=names,
            frozen=self.is_frozen and name == "__init__",
            **{**_OFF, **_COMPILED_BY[name]},
        )
        method = vars(made)[name]
        setattr(cls, name, method)
        return method.__get__(instance, owner)


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
