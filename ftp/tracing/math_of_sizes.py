"""Functions of Python's math of symbolic numbers, which are formulas then."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import SymFloat, SymInt
from torch.fx.experimental.proxy_tensor import get_proxy_mode, handle_sym_dispatch
from torch.fx.experimental.sym_node import SymNode
from torch.utils._sympy import functions as sizes_functions

from ftp.dynamic_float import FUNCTIONS


def of_sizes(name: str) -> Callable[..., Any]:
    """A function of Python's math that takes symbolic numbers too."""
    plain = getattr(math, name)

    def of(x: Any, *more: Any) -> Any:
        if not isinstance(x, SymInt | SymFloat):
            return plain(x, *more)
        if more:  # log(x, base)
            return of(x) / plain(*more)
        if get_proxy_mode():
            return handle_sym_dispatch(_SYMBOLIC[name], (x,), {})
        return function_of(name, x)

    return of


def function_of(name: str, x: Any) -> Any:
    """One of `FUNCTIONS` of a symbolic number."""
    node: Any = torch.sym_float(x).node  # type: ignore[attr-defined]
    expr = getattr(sizes_functions, f"OpaqueUnaryFn_{name}")(node.expr)
    return SymFloat(SymNode(expr, node.shape_env, float, getattr(math, name)(node.hint)))


def _named(name: str) -> Callable[[Any], Any]:
    def of(x: Any) -> Any:
        return function_of(name, x)

    of.__name__ = of.__qualname__ = name  # fx names nodes by it
    return of


_SYMBOLIC = {name: _named(name) for name in FUNCTIONS}
