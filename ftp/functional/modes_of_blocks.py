"""Modes that are also active inside of recomputed blocks."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar

from torch import Tensor
from torch.overrides import TorchFunctionMode

from ftp.torch_internals.modes import get_current_function_mode_stack


class ModeOfBlocks(TorchFunctionMode):
    """A function mode that is also active inside blocks: torch runs autograd functions, and their
    backward passes, without the modes in which they are called. It is entered several times, so it
    keeps no state of where it was entered.
    """

    def __enter__(self):
        _surrounding.set((*_surrounding.get(), self))
        return super().__enter__()

    def __exit__(self, *error):
        _surrounding.set(_surrounding.get()[:-1])
        return super().__exit__(*error)

    def stands_for(self, new: Tensor, old: Tensor) -> None:
        """Take ``new`` for ``old``: inside of a block other tensors stand for those outside."""

    @property
    def later(self) -> "ModeOfBlocks":
        """The mode for code that autograd runs later, which no block repeats."""
        return self


_surrounding: ContextVar[tuple[ModeOfBlocks, ...]] = ContextVar("surrounding", default=())


def surrounding_modes() -> tuple[ModeOfBlocks, ...]:
    """The modes of blocks that are active around this code, also where one of them handles a call,
    as of an autograd function under torch.func, and is off meanwhile.
    """
    return tuple({id(mode): mode for mode in _surrounding.get()}.values())


def present_modes() -> tuple[ModeOfBlocks, ...]:
    """The modes of blocks that are active now."""
    return tuple(m for m in get_current_function_mode_stack() if isinstance(m, ModeOfBlocks))


@contextmanager
def entered(modes: Sequence[ModeOfBlocks]) -> Iterator[None]:
    """Within the block these modes are active."""
    active = {id(mode) for mode in get_current_function_mode_stack()}
    with ExitStack() as stack:
        for mode in modes:
            if id(mode) not in active:
                stack.enter_context(mode)
        yield
