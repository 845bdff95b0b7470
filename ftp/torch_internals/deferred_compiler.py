"""Load torch's compiler, ``torch._dynamo`` and ``torch._inductor``, when one of its names is used
rather than when it is imported.

torch imports it for each fake mode, trace and optimizer, to keep them out of compilation: a second
of processor time at each start. The two packages are deferred: each loads as a whole at the first
use of one of its names. `importlib.util.LazyLoader` would also load a package when a module inside
it is imported.
"""

import importlib
import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch._guards import GuardSource, Source
from torch.utils import _config_module
from torch.utils._config_module import get_assignments_with_compile_ignored_comments

from ftp.torch_internals import deferred_symbols

PACKAGES = ("torch._dynamo", "torch._inductor")
_LIGHT = frozenset(
    (
        "torch._dynamo.config", "torch._inductor.config", "torch._inductor.custom_graph_pass",
        "torch._inductor.fx_passes", "torch._inductor.fx_passes.dedupe_symint_uses",
    )
)  # fmt: skip
_loading = threading.RLock()
_is_loading = False
_unmarked: list[Any] = []
_deferred: dict[str, ModuleType] = {}


class _Deferred(ModuleType):
    """A package that has not run yet."""

    def __getattribute__(self, name: str) -> Any:
        own = ModuleType.__getattribute__(self, "__dict__")
        full = f"{own['__name__']}.{name}"
        # To import a module of the package, the import system reads dunder names and sets the
        # module as an attribute.
        if name.startswith("__") or (name in own and full in sys.modules):
            return own[name] if name in own else ModuleType.__getattribute__(self, name)
        if not _is_loading:
            frame = sys._getframe(1)
            if frame.f_globals.get("__name__") == "importlib._bootstrap":
                # ``from package import name`` asks for the name first.
                frame = frame.f_back or frame
            asks = frame.f_globals.get("__name__"), full
            if asks in _STAND_INS:
                return _STAND_INS[asks]
            if full in _LIGHT:
                return importlib.import_module(full)
        load()
        return ModuleType.__getattribute__(self, name)


class _Loader(Loader):
    """A loader that returns an existing module."""

    def __init__(self, module: ModuleType, run: Loader | None):
        self.module, self.run, self.spec = module, run, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self.module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.spec
        if self.run is not None:
            self.run.exec_module(module)


@dataclass(frozen=True)
class _ConstantOfTrace(Source):
    """The name of a tensor that a traced function makes itself."""

    source_name: str

    @property
    def _name_template(self) -> str:
        return self.source_name

    @property
    def guard_source(self) -> GuardSource:
        return GuardSource.CONSTANT


class _RandomValue(Source):
    """A source that only the compiler makes: no tensor of a trace has it."""


class _NoBisection:
    """Stands for the tool that searches for a fault of the compiler by leaving out its parts, which
    `make_fx` asks before it decomposes an op. What else is asked of the tool loads the compiler.
    """

    @staticmethod
    def disable_subsystem(*_: Any) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        load()
        return getattr(importlib.import_module(_BISECTOR).CompilerBisector, name)


_BISECTOR = "torch._inductor.compiler_bisector"


class _FewNames(ModuleType):
    """A module of the compiler of which torch needs few names while nothing is compiled; any other
    name loads the compiler.
    """

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        load()
        return getattr(importlib.import_module(self.__name__), name)


class _NoCall:
    """Stands for the calls of Triton kernels, which the compiler alone makes: no node is one."""


class _NoTritonCalls(ModuleType):
    """A module that make_fx takes for loaded, to ask of each node whether it calls a kernel of
    Triton; any other name loads it.
    """

    TritonKernelWrapperFunctional = TritonKernelWrapperMutation = _NoCall

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(importlib.import_module(self.__name__), name)


_TRITON_CALLS = "torch._higher_order_ops.triton_kernel_wrap"


# Fake tensors need two names for each constant of a trace.
_NEEDED: dict[str, dict[str, Any]] = {
    "torch._dynamo.source": {
        "ConstantSource": _ConstantOfTrace,
        "RandomValueSource": _RandomValue,
    },
    _BISECTOR: {"CompilerBisector": _NoBisection()},
}


class _Finder(MetaPathFinder):
    """Finds the deferred packages, and runs a package before one of its modules is imported, except
    light modules.
    """

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname in _deferred:
            found = _deferred[fullname].__spec__
            assert found is not None
            module = _deferred[fullname]
            return ModuleSpec(fullname, _Loader(module, found.loader), origin=found.origin)
        if fullname in _NEEDED and _deferred and not _is_loading:
            made = _FewNames(fullname)
            vars(made).update(_NEEDED[fullname])
            return ModuleSpec(fullname, _Loader(made, None))
        is_inside = fullname.startswith(tuple(f"{full}." for full in _deferred))
        if not is_inside or _is_loading or fullname in _LIGHT:
            return None
        load()
        there = sys.modules.get(fullname)
        return None if there is None else ModuleSpec(fullname, _Loader(there, None))


class _IgnoredOptions:
    """The options of a module that do not change compiled code, which torch reads from comments in
    the module's source. Only the compiler asks for them.
    """

    def __init__(self, module: ModuleType):
        self._module = module

    def __iter__(self) -> Iterator[str]:
        return iter(get_assignments_with_compile_ignored_comments(self._module))


_finder = _Finder()


def defer() -> None:
    """Let imports of torch's compiler load it at the first use of one of its names."""
    if _deferred or any(full in sys.modules for full in PACKAGES):
        return
    for full in PACKAGES:
        spec = importlib.util.find_spec(full)
        assert spec is not None, full
        module = _deferred[full] = importlib.util.module_from_spec(spec)
        module.__class__ = _Deferred
        sys.modules[full] = module
        setattr(torch, full.rpartition(".")[2], module)
    sys.meta_path.insert(0, _finder)
    deferred_symbols.defer()
    setattr(_config_module, get_assignments_with_compile_ignored_comments.__name__, _IgnoredOptions)
    if _TRITON_CALLS not in sys.modules:
        package, _, name = _TRITON_CALLS.rpartition(".")
        setattr(importlib.import_module(package), name, _NoTritonCalls(_TRITON_CALLS))


def is_deferred() -> bool:
    """Whether torch's compiler has not been loaded yet, so that nothing is being compiled."""
    return bool(_deferred) and not _is_loading


def uncompiled() -> AbstractContextManager[Any]:
    """A context in which functions that torch.compile was given run as they are: it would compile
    the modes of torch functions around them too.
    """
    if is_deferred() or "torch._dynamo" not in sys.modules or torch.compiler.is_compiling():
        return nullcontext()
    return _eagerly()


_stance_lock = threading.Lock()
_stances: list[Any] = []  # that of the first thread within, and one None for each other


@contextmanager
def _eagerly() -> Iterator[None]:
    """torch has one stance for all threads: the last one that leaves restores it."""
    with _stance_lock:
        _stances.append(None if _stances else torch.compiler.set_stance("force_eager"))
    try:
        yield
    finally:
        with _stance_lock:
            if len(_stances) == 1:
                _stances[0].__exit__(None, None, None)
            _stances.pop()


def is_lacking(error: BaseException | None) -> bool:
    """Whether an error is about a module of torch that loading the deferred compiler would load."""
    while error is not None and is_deferred():
        owner = error.obj if isinstance(error, AttributeError) else None
        if isinstance(owner, ModuleType) and owner.__name__.partition(".")[0] == "torch":
            return True
        error = error.__cause__ or error.__context__
    return False


def load() -> None:
    """Load torch's compiler now."""
    global _is_loading
    with _loading:
        if _is_loading or not _deferred:
            return
        with _outside_of_traces():
            _is_loading = True
            for full in PACKAGES:
                del sys.modules[full]
            for full in _NEEDED:
                sys.modules.pop(full, None)
            try:
                for full in (*PACKAGES, _TRITON_CALLS):
                    importlib.import_module(full)
            finally:
                _is_loading = False
                sys.meta_path.remove(_finder)
                for module in _deferred.values():
                    module.__class__ = ModuleType
                _deferred.clear()
        while _unmarked:  # torch marks later ones itself
            vars(_unmarked.pop()).pop("__dynamo_disable", None)


def _outside_of_traces() -> ExitStack:
    """A context that hides the ops that the compiler runs while it loads from traces and transforms
    of this thread.
    """
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
    from torch.overrides import _pop_mode_temporarily
    from torch.utils._python_dispatch import _disable_current_modes

    stack = ExitStack()
    stack.enter_context(temporarily_clear_interpreter_stack())
    while torch._C._len_torch_function_stack():
        stack.enter_context(_pop_mode_temporarily())
    stack.enter_context(_disable_current_modes())
    return stack


# Stand-ins for functions of the compiler that torch calls while nothing is compiled, by caller.


def _disable(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
    """The function as it is; torch keeps the answer in an attribute of it."""
    _unmarked.append(fn)
    return fn


class _InductorOptions:
    """The two options of inductor that each trace reads, as they are where no variable of the
    environment sets them; another one loads their module, which takes 0.04 s.
    """

    trace = SimpleNamespace(provenance_tracking_level=0)
    emulate_precision_casts = False

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(_OPTIONS), name)


_OPTIONS = "torch._inductor.config"
_SET_BY = (
    "INDUCTOR_PROVENANCE", "TORCH_COMPILE_DEBUG", "TORCHINDUCTOR_EMULATE_PRECISION_CASTS",
)  # fmt: skip
_STAND_INS: dict[tuple[Any, str], Any] = {
    ("torch._compile", "torch._dynamo.disable"): _disable,
    ("torch.optim.optimizer", "torch._dynamo.graph_break"): lambda: None,
    ("torch._functorch.eager_transforms", "torch._dynamo.compiled_autograd"): SimpleNamespace(
        _disable=nullcontext
    ),
    ("torch.distributed.distributed_c10d", "torch._dynamo.trace_rules"): SimpleNamespace(
        clear_lru_cache=lambda: None
    ),
}
if not any(name in os.environ for name in _SET_BY):
    _STAND_INS["torch.fx.experimental.proxy_tensor", _OPTIONS] = _InductorOptions()
