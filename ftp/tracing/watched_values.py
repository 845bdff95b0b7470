"""Python values that a step's function finds outside of its arguments, and that its caller changes
between calls, such as a number in a dict: a program has the ones of its trace.
"""

import re
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import cycle
from typing import TYPE_CHECKING, Any

import numpy as np

from ftp.errors import StaleCaptureWarning
from ftp.functional.attributes import CONSTANTS
from ftp.tracing.changed_state import is_same_program
from ftp.tracing.kept_state import given_back
from ftp.tracing.places import LARGE, StatePlace, functions_around, places_around

if TYPE_CHECKING:
    from ftp.tracing.trace import Traced

_BEFORE = ("__init__", "__new__", "__post_init__")  # methods that have run before a step does


class WatchedValues:
    """The values around a function whose names its code has, as they were when it was traced.

    >>> scale = [2.0]
    >>> watched = WatchedValues(eval("lambda x: x * scale[0]", {"scale": scale}))
    >>> watched.has_changed(), scale.append(1.0), any(watched.has_changed() for _ in range(2))
    (False, None, True)
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        self._fn = getattr(fn, "__wrapped__", fn)
        self._places = list(_places_read(self._fn))
        self._turns = cycle(self._places)

    def __bool__(self) -> bool:
        return bool(self._places)

    def has_changed(self) -> bool:
        """Whether a value is another one. Each call looks at the next one, to cost little."""
        place = next(self._turns, None)
        return place is not None and place.now() is not place.value and _is_changed(place)

    def check(self, again: "Callable[[], Traced]", *, stacklevel: int) -> None:
        """Warn of values that are others now, once, if the function computes something else.

        Args:
            again: traces the function.
        """
        changed = list(filter(_is_changed, self._places))
        if not changed:
            return
        self._places = [place for place in self._places if place not in changed]
        self._turns = cycle(self._places)
        try:
            with warnings.catch_warnings(), given_back(self._fn):
                warnings.simplefilter("ignore")
                now = again()
                with _as_before(changed):
                    is_same = is_same_program(now, again())
        except Exception:
            is_same = False
        if is_same:
            return
        found = "; ".join(map(_described, changed[:3]))
        warnings.warn(
            f"{found} since the step was traced, and the step still computes what it did then. Pass"
            " such a value as an argument, as a tensor if it changes often, or make the step anew.",
            StaleCaptureWarning,
            stacklevel=stacklevel + 1,
        )


class _Contents(StatePlace):
    """The items of a list, or the elements of an array of NumPy, of which the place holds a copy. A
    dict may be a cache, which grows.
    """

    def now(self) -> Any:
        return self.holder

    def put(self, value: Any) -> None:
        self.holder[... if isinstance(value, np.ndarray) else slice(None)] = value


def _is_changed(place: StatePlace) -> bool:
    now, was = place.now(), place.value
    if not isinstance(place, _Contents):
        return now is not was and (type(now) is not type(was) or now != was)
    if isinstance(now, np.ndarray):
        return now.tobytes() != was.tobytes()
    return len(now) != len(was)


def _described(place: StatePlace) -> str:
    now, was = place.now(), place.value
    if not isinstance(place, _Contents):
        return f"{place.name}, went from {was!r} to {now!r}"
    if isinstance(now, np.ndarray):
        return f"{place.name}, an array of NumPy, has got other elements"
    return f"{place.name}, went from {len(was)} items to {len(now)}"


@contextmanager
def _as_before(places: list[StatePlace]) -> Iterator[None]:
    now = [place.now().copy() if isinstance(place, _Contents) else place.now() for place in places]
    try:
        for place in places:
            place.put(place.value)
        yield
    finally:
        for place, value in zip(places, now, strict=True):
            place.put(value)


def _places_read(fn: Callable[..., Any]) -> Iterator[StatePlace]:
    """The constants, lists and arrays around a function, if its code may read them: it has the
    names of all attributes on the way there.
    """
    names = _names_read(fn)
    for place in places_around(fn):
        value, path = place.value, place.name.rpartition(", which ")[0]
        has_contents = _has_contents(value)
        if not has_contents and type(value) not in CONSTANTS:
            continue
        if place.is_fixed:
            continue
        if all(name in names for name in re.findall(r"\.([^\W\d]\w*)", path)):
            yield _Contents(place.name, value.copy(), value, "") if has_contents else place


def _has_contents(value: Any) -> bool:
    if type(value) is list:
        return len(value) <= LARGE
    return type(value) is np.ndarray and value.size <= LARGE and value.flags.writeable


def _names_read(fn: Callable[..., Any]) -> set[str]:
    """The names of attributes in the code of ``fn``, and of the functions around it whose name is
    in such code, or which Python calls by itself.
    """
    own = fn.__func__ if isinstance(fn, types.MethodType) else fn
    around = {f.__code__: f.__name__ for f in functions_around(fn)}
    codes = [own.__code__] if isinstance(own, types.FunctionType) else list(around)
    names = {"forward"}
    seen = set(codes)
    for code in codes:  # the loop appends to it
        names.update(code.co_names, (c for c in code.co_consts if isinstance(c, str)))
        inner = [c for c in code.co_consts if isinstance(c, types.CodeType)]
        called = [c for c, name in around.items() if name in names or _is_implicit(name)]
        new = [c for c in (*inner, *called) if c not in seen]
        seen.update(new)
        codes += new
    return names


def _is_implicit(name: str) -> bool:
    return name.startswith("__") and name not in _BEFORE
