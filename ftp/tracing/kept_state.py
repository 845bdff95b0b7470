"""What a function keeps outside of its arguments, such as a cache: a trace with symbolic sizes
leaves tensors and sizes there that are those of no call.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from ftp.functional.contents import contents_of, is_same
from ftp.functional.held_values import now_in
from ftp.functional.module_program import ModuleProgram
from ftp.tracing.places import SYMBOLIC, places_around


@contextmanager
def kept_state(fn: Callable[..., Any]) -> Iterator[None]:
    """After the block what is around ``fn`` holds what it held before, if any of it holds a new
    tensor or a symbolic number.
    """
    known = {id(place.value): place.value for place in places_around(fn)}

    def has_new() -> bool:
        found = (place.value for place in places_around(fn))
        found = (x for x in found if isinstance(x, (Tensor, *SYMBOLIC)))
        return any(id(x) not in known for x in found)

    with given_back(fn, has_new):
        yield


@contextmanager
def given_back(fn: Callable[..., Any], asked: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """After the block what is around ``fn`` holds what it held before, if that is ``asked``."""
    programs = [x for place in places_around(fn) if isinstance(x := place.value, ModuleProgram)]
    modules = [(m.attributes, m.module) for program in programs for m in program.modules]
    before = contents_of((fn, modules))
    try:
        yield
    finally:
        if asked():
            for content in before:
                if not is_same(content.held, now_in(content.of)):
                    content.give_back()
