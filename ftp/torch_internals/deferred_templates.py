"""Import inductor without compiling its Triton templates: each is compiled at its first use, which
is on GPUs only. Compiling them takes a tenth of the start of a program whose code is in the cache.
Read at torch 2.13.
"""

import importlib
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any
from unittest.mock import patch

COMPILER = "torch._inductor.compile_fx"


class _Template:
    """A template that is compiled at its first use."""

    def __init__(self, make: Callable[[str], Any], source: str):
        self._make, self._source = make, source

    @cached_property
    def _compiled(self) -> Any:
        return self._make(self._source)

    def __bool__(self) -> bool:
        return self._compiled is not None  # as it is without jinja

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._compiled, name)


def compiler() -> Any:
    """Inductor's module that compiles a graph."""
    from torch._inductor.codegen.common import KernelTemplate

    made = KernelTemplate._template_from_string
    with patch.object(KernelTemplate, "_template_from_string", partial(_Template, made)):
        return importlib.import_module(COMPILER)
