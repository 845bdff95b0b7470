"""Surroundings of a call for code that autograd runs later: ``backward`` of functions, hooks.

Such code may call modules of the model. When it runs, the call has ended: a module has its own
parameters again, of which a gradient would be None. It is given the surroundings of the call again.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

from ftp.context import set_within
from ftp.dataclass import dataclass
from ftp.functional.modes_of_blocks import ModeOfBlocks, entered, surrounding_modes
from ftp.torch_internals.backward_code import BackwardCode

Enter = Callable[[], AbstractContextManager[Any]]
_around: ContextVar[tuple[Enter, ...]] = ContextVar("around", default=())


@dataclass(frozen=True, eq=False)
class LaterCode:
    """Code that runs as within the calls that are running now. It equals the code itself."""

    code: Callable[..., Any]
    around: tuple[Enter, ...]
    modes: tuple[ModeOfBlocks, ...]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            if _around.get() is not self.around:
                stack.enter_context(_code.changed())
                for enter in self.around:
                    stack.enter_context(enter())
                stack.enter_context(set_within(_around, self.around))
            stack.enter_context(entered(self.modes))
            return self.code(*args, **kwargs)

    def __eq__(self, other: object) -> bool:
        return self.code == (other.code if isinstance(other, LaterCode) else other)

    def __hash__(self) -> int:
        return hash(self.code)


def as_now(code: Callable[..., Any]) -> Callable[..., Any]:
    """``code``, to run later in the surroundings of now."""
    around, modes = _around.get(), tuple(mode.later for mode in surrounding_modes())
    return LaterCode(code, around, modes) if around or modes else code


_code = BackwardCode(as_now, leaves=("ftp.ops", "ftp.per_rank"))
backward_code_as_now = _code.changed


@contextmanager
def surrounding_backward_code(enter: Enter) -> Iterator[None]:
    """Within the block, code that autograd will run later runs within ``enter()`` then."""
    with _code.changed(), set_within(_around, (*_around.get(), enter)):
        yield
