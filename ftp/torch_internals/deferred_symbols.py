"""Load sympy, and torch's module of symbolic sizes, when a size is symbolic.

torch asks that module about the sizes of every trace, and importing sympy takes as long as
importing ftp. About plain numbers the answers below are the module's own.
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
from torch.utils._ordered_set import OrderedSet

SHAPES = "torch.fx.experimental.symbolic_shapes"
_lock = threading.RLock()
_running: dict[str, int] = {}  # the thread that runs a module


class _Deferred(ModuleType):
    """A module that has not run yet."""

    def __getattribute__(self, name: str) -> Any:
        get = ModuleType.__getattribute__
        own = get(self, "__name__")
        # The import system reads other dunder names.
        is_of_system = name.startswith("__") and name not in ("__version__", "__all__")
        if is_of_system or _running.get(own) == threading.get_ident():
            return get(self, name)
        full = f"{own}.{name}"
        asks = str(sys._getframe(1).f_globals.get("__name__")), full
        if asks in _CLASSES:
            return _CLASSES[asks]
        if full in _OF_NUMBERS:
            return _OF_NUMBERS[full]
        _run(self)
        return get(self, name)


class _Expression:
    """Stands for the class of sympy's expressions, of which there are none yet."""


class _Unraised(Exception):
    """Stands for errors about symbolic sizes."""


def _environment(*args: Any, **kwargs: Any) -> Any:
    return _of_shapes("ShapeEnv")(*args, **kwargs)


_CLASSES = {
    ("torch._prims_common", "sympy.Basic"): _Expression,
    ("torch._higher_order_ops.triton_kernel_wrap", "sympy.Expr"): _Expression,
    ("torch._subclasses.fake_tensor", f"{SHAPES}.GuardOnDataDependentSymNode"): _Unraised,
    ("torch.fx.experimental.proxy_tensor", f"{SHAPES}.ShapeEnv"): _environment,
}  # by the module that asks


class _Loader(Loader):
    """A loader that returns an existing module."""

    def __init__(self, module: ModuleType):
        self.module, self.spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self.module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.spec


class _Finder(MetaPathFinder):
    """Runs sympy before one of its modules is imported."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        package = sys.modules.get("sympy")
        if not fullname.startswith("sympy.") or type(package) is not _Deferred:
            return None
        if "sympy" in _running:
            return None
        _run(package)
        found = sys.modules.get(fullname)
        return None if found is None else ModuleSpec(fullname, _Loader(found))


def defer() -> None:
    """Let imports of the two modules load them at the first use of one of their names."""
    if "sympy" in sys.modules or SHAPES in sys.modules:
        return
    sys.meta_path.insert(0, _Finder())
    for full in ("sympy", SHAPES):
        spec = importlib.util.find_spec(full)
        assert spec is not None, full
        module = sys.modules[full] = importlib.util.module_from_spec(spec)
        module.__class__ = _Deferred
    parent: Any = importlib.import_module("torch.fx.experimental")
    parent.symbolic_shapes = sys.modules[SHAPES]


def _run(module: ModuleType) -> None:
    """Run a module now. Another thread that asks for one of its names waits."""
    with _lock:
        name = module.__name__
        if type(module) is not _Deferred or name in _running:
            return
        _running[name] = threading.get_ident()
        try:
            spec = module.__spec__
            assert spec is not None and spec.loader is not None
            spec.loader.exec_module(module)
            module.__class__ = ModuleType  # pyright: ignore[reportAttributeAccessIssue]
        finally:
            del _running[name]


def _of_shapes(name: str) -> Any:
    """A name of torch's module itself."""
    module = importlib.import_module(SHAPES)
    _run(module)
    return getattr(module, name)


# What torch's module answers about plain numbers. A caller may keep such a function, and ask it
# about symbolic sizes later.


def _is_plain(x: Any) -> bool:
    kind = type(x)
    if kind in (int, bool, float, type(None)):
        return True
    if kind in (tuple, list, torch.Size):
        return all(map(_is_plain, x))
    return isinstance(x, torch.Tensor) and not x._has_symbolic_sizes_strides  # type: ignore[attr-defined]


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


_OF_NUMBERS = {f"{SHAPES}.{name}": _of_numbers(name, said) for name, said in _ANSWERS.items()}
_OF_NUMBERS |= {
    f"{SHAPES}.{name}": _without_environment(name)
    for name in ("compute_unbacked_bindings", "rebind_unbacked")
}
