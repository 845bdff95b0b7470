"""Python numbers that a step's function changes outside of its arguments, such as a count of its
calls: a program has the ones of its trace at each call.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ftp.errors import StaleCaptureWarning
from ftp.tracing.captured import NUMBERS, Captured, places_around

if TYPE_CHECKING:
    from ftp.tracing.trace import Traced


def numbers_around(fn: Callable[..., Any]) -> list[Captured]:
    """The numbers that ``fn`` and the objects that it refers to hold."""
    fn = getattr(fn, "__wrapped__", fn)
    return [place for place in places_around(fn) if type(place.value) in NUMBERS]


def warn_of_counted(
    before: Sequence[Captured], traced: "Traced", again: "Callable[[], Traced]"
) -> None:
    """Warn if the function changed numbers while it was traced, and its next trace is another one.

    Args:
        before: what the numbers were.
        again: traces the function anew; what it counts then is undone.
    """
    counted = [(place, now) for place in before if (now := place.now()) is not place.value]
    counted = [(place, now) for place, now in counted if now != place.value]
    if not counted:
        return
    try:
        first = traced if traced.symbolic is None else again()
        is_same = _is_same(first, again())
    except Exception:
        is_same = False
    for place, now in counted:
        place.put(now)
    if not is_same:
        place, now = counted[0]
        warnings.warn(
            f"{place.name}, went from {place.value!r} to {now!r} while the function was traced, and"
            " the function computes something else when it runs again. A step is traced once: each"
            " call computes what the first one does. Pass such a number as an argument, as a tensor"
            " if it changes often.",
            StaleCaptureWarning,
            stacklevel=2,
        )


def _is_same(a: "Traced", b: "Traced") -> bool:
    if (str(a.gm.graph), a.out_tree, a.out_leaves) != (str(b.gm.graph), b.out_tree, b.out_leaves):
        return False
    return len(a.constants) == len(b.constants) and all(
        x is y or (x.shape == y.shape and x.dtype == y.dtype and torch.equal(x, y))
        for x, y in zip(a.constants, b.constants, strict=True)
    )
