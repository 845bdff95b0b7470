"""``backward`` of ``torch.autograd.Function`` in a trace."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode

from ftp.tracing.replacements.replaced import replaced


@contextmanager
def backward_under(mode: TorchFunctionMode) -> Iterator[None]:
    """Within the block the code of ``backward`` runs under ``mode``. A mode that is asked to run
    ``torch.autograd.grad`` is off meanwhile, and with it what it replaces.
    """
    plain: Any = BackwardCFunction.apply
    if getattr(plain, "mode", None) is mode:
        yield
        return

    def apply(self: Any, *args: Any) -> Any:
        with mode:
            return plain(self, *args)

    apply.mode = mode  # type: ignore[attr-defined]
    with replaced(BackwardCFunction, {"apply": apply}):
        yield
