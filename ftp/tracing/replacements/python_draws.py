"""Random numbers of Python and numpy, which are drawn once, when a function is traced: a warning
names the line.
"""

import random
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from ftp.errors import StaleCaptureWarning
from ftp.source import user_line
from ftp.tracing.replacements.replaced import replaced

_PYTHON = (
    "random", "uniform", "randint", "randrange", "getrandbits", "choice", "choices", "sample",
    "shuffle", "gauss", "normalvariate", "betavariate", "expovariate", "triangular",
)  # fmt: skip
_NUMPY = (
    "rand", "randn", "random", "random_sample", "uniform", "normal", "standard_normal", "randint",
    "choice", "permutation", "shuffle", "beta", "binomial", "exponential", "poisson",
)  # fmt: skip


@contextmanager
def python_draws() -> Iterator[None]:
    """Warn of the first line of the trace that draws numbers from ``random`` or ``numpy.random``.
    Other threads may draw.
    """
    found: list[tuple[str, str]] = []
    thread = threading.get_ident()

    def noting(name: str, draw: Callable[..., Any]) -> Callable[..., Any]:
        def drawn(*args: Any, **kwargs: Any) -> Any:
            if not found and threading.get_ident() == thread:
                found.append((name, user_line()))
            return draw(*args, **kwargs)

        return drawn

    with ExitStack() as stack:
        modules: list[tuple[Any, Sequence[str]]] = [(random, _PYTHON)]
        if "numpy.random" in sys.modules:
            modules.append((sys.modules["numpy.random"], _NUMPY))
        for module, names in modules:
            new = {n: noting(f"{module.__name__}.{n}", getattr(module, n)) for n in names}
            stack.enter_context(replaced(module, new))
        yield
    for name, line in found:
        warnings.warn(
            f"{line or 'The function'} draws numbers with {name}. They are drawn once, when the"
            " function is traced, and all calls of the program have the same. Draw from a key with"
            " ftp.random, or pass the numbers as arguments.",
            StaleCaptureWarning,
            stacklevel=2,
        )
