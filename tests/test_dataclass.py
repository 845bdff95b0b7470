"""ftp's dataclasses are the standard library's, with methods that are compiled when used."""

import copy
import dataclasses
import inspect
import pickle
import re
from pathlib import Path
from typing import Any, ClassVar

import pytest

import ftp
from ftp.dataclass import dataclass

METHODS = ("__init__", "__repr__", "__eq__", "__hash__", "__lt__", "__le__", "__gt__", "__ge__")
OPTIONS: list[dict[str, bool]] = [
    {},
    {"frozen": True},
    {"eq": False},
    {"frozen": True, "eq": False},
    {"repr": False},
    {"order": True},
    {"frozen": True, "order": True},
]


def made_by(decorator: Any, **options: bool) -> Any:
    """A class with fields of all kinds, and a subclass of it."""

    @decorator(**options)
    class Base:
        x: int
        shared: ClassVar[int] = 3
        y: float = 0.5
        parts: tuple[int, ...] = dataclasses.field(default_factory=tuple)
        note: str = dataclasses.field(default="", compare=False, repr=False)
        seen: list[int] = dataclasses.field(default_factory=list, init=False, compare=False)
        last: int = dataclasses.field(default=1, kw_only=True)

        def __post_init__(self) -> None:
            self.seen.append(self.x)

    @decorator(**options)
    class Derived(Base):
        z: int = 7

    return Base, Derived


def answers(cls: Any) -> list[Any]:
    """What the class and its instances say; an error is its type."""
    a, b, c = cls(1), cls(1, note="b"), cls(2, 1.5, (1,), last=2)
    asked = (
        lambda: (a == b, a == c, a != b, a == 1, a.__eq__(1)),
        lambda: hash(a) == hash(b),
        lambda: (cls.__hash__ is None, cls.__match_args__, cls.shared, cls.y),
        lambda: (a < c, a <= b, c > a, a >= c),
        lambda: None if cls.__repr__ is object.__repr__ else (repr(a), str(c)),
        lambda: (a.seen, c.seen, a.seen is not b.seen),
        lambda: [(f.name, f.default, f.kw_only, f.compare) for f in dataclasses.fields(cls)],
        lambda: (dataclasses.asdict(c), dataclasses.astuple(c), vars(dataclasses.replace(c, x=5))),
        lambda: (vars(copy.copy(c)), vars(copy.deepcopy(c))),
        lambda: inspect.signature(cls),
        lambda: repr(cls.__dataclass_params__),
        lambda: setattr(a, "x", 2),
        lambda: delattr(b, "y"),
        lambda: cls(),
        lambda: cls(1, unknown=2),
        lambda: sorted([c, a])[0] is a,
    )
    found: list[Any] = []
    for ask in asked:
        try:
            found.append(ask())
        except Exception as error:
            found.append(type(error))
    return found


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("which", [0, 1], ids=["base", "derived"])
def test_classes_are_those_of_the_standard_library(options: dict[str, bool], which: int) -> None:
    found = answers(made_by(dataclass, **options)[which])
    assert found == answers(made_by(dataclasses.dataclass, **options)[which])


def test_a_method_is_compiled_when_it_is_looked_up() -> None:
    cls, _ = made_by(dataclass, frozen=True)

    def compiled() -> list[str]:
        return [name for name in METHODS if inspect.isfunction(vars(cls).get(name))]

    assert compiled() == []
    one = cls(1)
    assert compiled() == ["__init__"]
    assert one == cls(1)
    assert compiled() == ["__init__", "__eq__"]


def test_methods_of_the_class_itself_stay() -> None:
    @dataclass(frozen=True)
    class Named:
        x: int

        def __repr__(self) -> str:
            return f"<{self.x}>"

        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = None  # type: ignore[assignment]

    assert (repr(Named(1)), Named(1) == Named(2), Named.__hash__) == ("<1>", True, None)


def test_a_class_that_only_inherits_is_of_its_own_type() -> None:
    base, _ = made_by(dataclass, frozen=True)

    class Plain(base):
        pass

    assert Plain(1) == Plain(1) and Plain(1) != base(1)
    assert repr(Plain(1)).startswith(f"{Plain.__qualname__}(x=1")


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("decorator", [dataclass, dataclasses.dataclass])
def test_a_user_derives_a_dataclass(decorator: Any, frozen: bool) -> None:
    base, _ = made_by(decorator, frozen=frozen)

    @dataclasses.dataclass(frozen=frozen)
    class Mine(base):
        own: int = 3

    assert Mine(1, own=4) == Mine(1, own=4) != Mine(1) and Mine(1, own=4).own == 4
    with pytest.raises(TypeError, match="frozen"):
        dataclasses.dataclass(frozen=not frozen)(type("Other", (base,), {}))


@pytest.mark.parametrize("decorator", [dataclass, dataclasses.dataclass])
@pytest.mark.parametrize("which", [0, 1], ids=["base", "derived"])
def test_a_subclass_of_a_frozen_class_has_attributes_of_its_own(decorator: Any, which: int) -> None:
    class Named(made_by(decorator, frozen=True)[which]):
        def __init__(self, x: int, name: str):
            super().__init__(x)
            self.name = name

    one = Named(1, "a")
    assert one.name == "a"
    del one.name
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign to field 'x'"):
        one.x = 2
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot delete field 'y'"):
        del one.y


def test_a_hash_of_the_class_itself_stays() -> None:
    @dataclass
    class Hashed:
        x: int

        def __hash__(self) -> int:
            return 5

    assert hash(Hashed(1)) == 5


@dataclass(frozen=True)
class Kept:
    x: int


def test_instances_are_pickled() -> None:
    assert pickle.loads(pickle.dumps(Kept(3))) == Kept(3)


def test_options_without_parentheses() -> None:
    @dataclass
    class Bare:
        x: int

    assert Bare(1) == Bare(1)
    assert Bare.__hash__ is None


def test_ftp_defines_its_classes_so() -> None:
    """But a subclass of torch's frozen class, which the standard library's must make."""
    root = Path(str(ftp.__file__)).parent
    imports = re.compile(r"^ *from dataclasses import .*\bdataclass\b", re.M)
    others = {path.name for path in root.rglob("*.py") if imports.search(path.read_text())}
    assert others == {"dataclass.py", "deferred_compiler.py"}
