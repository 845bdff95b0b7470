"""Load sympy, and torch's module of symbolic sizes, when a size is symbolic.

torch asks that module about the sizes of every trace, and importing sympy takes as long as
importing ftp. About plain numbers the answers below are the module's own. A stand-in never becomes
its module: it steps aside and imports it, so that threads which ask at once wait for each other as
in any import.
"""

import importlib
import importlib.util
import operator
import sys
import threading
from collections.abc import Callable
from functools import reduce
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils._ordered_set import OrderedSet

SHAPES = "torch.fx.experimental.symbolic_shapes"
_ASKED_OF_PACKAGE = ("sympy.__path__", "sympy.__version__", "sympy.__all__")
_leaving = threading.Lock()  # held while a stand-in leaves sys.modules, never during an import


class _StandIn(ModuleType):
    """Stands in for a module that has not been imported yet."""

    def __getattr__(self, name: str) -> Any:
        own = self.__name__
        if name == "__path__" and own == SHAPES:  # asked at each ``from ... import``
            raise AttributeError(name)
        if sys.modules.get(own) is self:
            full = f"{own}.{name}"
            # The import system asks for the path of a package before it imports a part of it.
            if name.startswith("__") and full not in _ASKED_OF_PACKAGE:
                raise AttributeError(f"module {own!r} has no attribute {name!r}")
            asks = str(sys._getframe(1).f_globals.get("__name__")), full
            if asks in _CLASSES:
                return _CLASSES[asks]
        return getattr(_imported(self), name)


def _imported(stand_in: ModuleType) -> ModuleType:
    """The module itself. sympy comes first and whole, for whichever module it is asked."""
    with _leaving:
        for name in ("sympy", SHAPES):
            if type(sys.modules.get(name)) is _StandIn:
                del sys.modules[name]
    importlib.import_module("sympy")
    return importlib.import_module(stand_in.__name__)


class _PartsOfSympy(MetaPathFinder):
    """Finds the parts of sympy that were imported with it, after ``import sympy.part`` has asked
    the stand-in for the path.
    """

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        found = sys.modules.get(fullname) if fullname.startswith("sympy.") else None
        if found is None or target is not None:
            return None
        return ModuleSpec(fullname, _AsImported(found))


class _AsImported(Loader):
    """A loader that returns an imported module."""

    def __init__(self, module: ModuleType):
        self.module, self.spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self.module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.spec


def defer() -> None:
    """Let imports of the two modules load them at the first use of one of their names."""
    if "sympy" in sys.modules or SHAPES in sys.modules:
        return
    sys.meta_path.insert(0, _PartsOfSympy())
    for full in ("sympy", SHAPES):
        stand_in = sys.modules[full] = _StandIn(full)
        stand_in.__spec__ = ModuleSpec(full, None)
    vars(sys.modules[SHAPES]).update(_OF_NUMBERS)
    parent: Any = importlib.import_module("torch.fx.experimental")
    parent.symbolic_shapes = sys.modules[SHAPES]


def keep_unused_numbers() -> Any:
    """Within a function that make_fx traces: the tracer, which will not look for unused symbolic
    numbers. To look for them loads sympy, and visits each node twice.
    """
    mode: Any = get_proxy_mode()
    mode.tracer.graph.eliminate_dead_code = lambda *_: False
    return mode.tracer


class _NoExpression:
    """Stands for the class of sympy's expressions, of which there are none yet."""


class _Unraised(Exception):
    """Stands for errors about symbolic sizes."""


def _environment(*args: Any, **kwargs: Any) -> Any:
    return _of_shapes("ShapeEnv")(*args, **kwargs)


_CLASSES = {
    ("torch._prims_common", "sympy.Basic"): _NoExpression,
    ("torch._higher_order_ops.triton_kernel_wrap", "sympy.Expr"): _NoExpression,
    ("torch._subclasses.fake_tensor", f"{SHAPES}.GuardOnDataDependentSymNode"): _Unraised,
    ("torch.fx.experimental.proxy_tensor", f"{SHAPES}.ShapeEnv"): _environment,
}  # by the module that asks


def _of_shapes(name: str) -> Any:
    """A name of torch's module itself."""
    module = sys.modules[SHAPES]
    return getattr(_imported(module) if type(module) is _StandIn else module, name)


# What torch's module answers about plain numbers. A caller may keep such a function, and ask it
# about symbolic sizes later.


def _is_plain(x: Any) -> bool:
    kind = type(x)
    if kind in (int, bool, float, type(None)):
        return True
    if kind in (tuple, list, torch.Size):
        return all(map(_is_plain, x))
    return isinstance(x, torch.Tensor) and not x._has_symbolic_sizes_strides


def _of_numbers(name: str, answer: Callable[..., Any]) -> Callable[..., Any]:
    def ask(*args: Any, **kwargs: Any) -> Any:
        if not kwargs and all(map(_is_plain, args)):
            return answer(*args)
        return _of_shapes(name)(*args, **kwargs)

    return ask


def _equal(x: Any, y: Any) -> bool:
    if isinstance(x, tuple | list):
        return len(x) == len(y) and all(map(_equal, x, y))
    return x == y


_ANSWERS: dict[str, Callable[..., Any]] = {
    "_iterate_exprs": lambda x: iter(()),
    "_iterate_nodes": lambda x: iter(()),
    "expect_true": lambda x, *skipped: x,
    "free_unbacked_symbols": lambda x: OrderedSet(),
    "guard_int": lambda x: x,
    "guard_or_false": bool,
    "guard_or_true": bool,
    "guard_scalar": lambda x: x,
    "guard_size_oblivious": bool,
    "guarding_hint_or_throw": lambda x: x,
    "has_free_symbols": lambda x: False,
    "has_free_unbacked_symbols": lambda x: False,
    "has_guarding_hint": lambda x: True,
    "is_nested_int": lambda x: False,
    "is_symbolic": lambda x: False,
    "statically_known_true": lambda x: x,
    "sym_and": lambda *xs: reduce(operator.and_, xs),
    "sym_eq": _equal,
    "sym_or": lambda *xs: reduce(operator.or_, xs),
}


def _without_environment(name: str) -> Callable[..., Any]:
    def ask(environment: Any, *args: Any, **kwargs: Any) -> Any:
        return None if environment is None else _of_shapes(name)(environment, *args, **kwargs)

    return ask


_OF_NUMBERS = {name: _of_numbers(name, said) for name, said in _ANSWERS.items()}
_OF_NUMBERS |= {
    name: _without_environment(name) for name in ("compute_unbacked_bindings", "rebind_unbacked")
}
