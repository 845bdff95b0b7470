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
    "choice", "permutation", "shuffle", "beta", "binomial", "exponential", "poisson", "default_rng",
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
            seeds = [x for x in (*args, *kwargs.values()) if x is not None]
            is_seeded = name == "numpy.random.default_rng" and seeds
            if not (found or is_seeded) and threading.get_ident() == thread:
                found.append((name, user_line()))
            return draw(*args, **kwargs)

        return drawn

    with ExitStack() as stack:

        def watch(module: Any, names: Sequence[str]) -> None:
            new = {n: noting(f"{module.__name__}.{n}", getattr(module, n)) for n in names}
            stack.enter_context(replaced(module, new))

        watch(random, _PYTHON)
        numpy = sys.modules.get("numpy")
        if "numpy.random" in sys.modules:
            watch(sys.modules["numpy.random"], _NUMPY)
        elif load := getattr(numpy, "__getattr__", None):

            def loaded(name: str) -> Any:
                """``np.random``, which numpy loads when it is first asked for it."""
                found = load(name)
                if name == "random" and threading.get_ident() == thread:
                    watch(found, _NUMPY)
                return found

            stack.enter_context(replaced(numpy, {"__getattr__": loaded}))
        yield
    for name, line in found:
        warnings.warn(
            f"{line or 'The function'} draws numbers with {name}. They are drawn once, when the"
            " function is traced, and all calls of the program have the same. Draw from a key with"
            " ftp.random, or pass the numbers as arguments.",
            StaleCaptureWarning,
            stacklevel=2,
        )
