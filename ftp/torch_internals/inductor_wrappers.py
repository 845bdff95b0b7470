"""Inductor's code for a CPU as text, so that a later process runs it without importing inductor.

Inductor writes a Python function for each graph. It allocates buffers and calls C++ kernels and
ops, by names of its module. A function is taken only if each name means the same without inductor.
Read at torch 2.13.
"""

import ast
import builtins
import contextlib
import importlib
import importlib.util
import math
import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from types import BuiltinFunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import torch

from ftp.dataclass import dataclass

Compiled = Callable[[list[Any]], Sequence[Any]]  # takes a list and empties it
_GUARDS: Any = importlib.import_module("torch._C._dynamo.guards")
_OPTIONS = "torch._inductor.config"
_ADDRESS = "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"  # of a function that kernels call


@dataclass(frozen=True)
class WrapperText:
    """A function of inductor as text.

    Attributes:
        source: of a function ``call``.
        kernels: by name in the source, their names in the library.
    """

    source: str
    kernels: Mapping[str, str]


@cache
def _meanings() -> Mapping[str, Any]:
    """What names of inductor's modules mean, without inductor."""
    return {
        "torch": torch,
        "aten": torch.ops.aten,
        "device": torch.device,
        "empty_strided": torch.empty_strided,
        "empty_strided_cpu": _GUARDS._empty_strided_cpu,
        "reinterpret_tensor": _GUARDS._reinterpret_tensor,
        "assert_size_stride": _GUARDS.assert_size_stride,
        "assert_alignment": _GUARDS.assert_alignment,
        "math": math,
        "inf": math.inf,
        "nan": math.nan,
        "extern_kernels": SimpleNamespace(
            addmm=torch.addmm,
            baddbmm=torch.baddbmm,
            bmm=torch.bmm,
            convolution=torch.convolution,
            mm=torch.mm,
        ),
    }


def settings() -> dict[str, Any] | None:
    """What inductor's code depends on beside the graph and the processor; None if it must not be
    kept: options of inductor are set, or they ask for no cache.
    """
    caching: Any = torch.compiler.config
    deterministic: Any = torch.utils.deterministic
    options: Any = sys.modules.get(_OPTIONS)
    if caching.force_disable_caches:
        return None
    if _given() or options is not None:
        options = options or importlib.import_module(_OPTIONS)
        for name, option in options._config.items():
            if not (options._is_default(name) or getattr(options, name) == option.default):
                return None
    return {
        "torch": f"{torch.__version__} {torch.version.git_version}",
        "Python": sys.implementation.cache_tag,
        "machine": platform.machine(),
        "vector extension": torch.backends.cpu.get_cpu_capability(),
        "number of threads": torch.get_num_threads(),
        "default dtype": str(torch.get_default_dtype()),
        "use of deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "filling of uninitialized memory": deterministic.fill_uninitialized_memory,
        "precision of matmuls": torch.get_float32_matmul_precision(),
        "use of oneDNN": torch.backends.mkldnn.enabled,
        "tag of compiled code": caching.cache_key_tag,
    }


def _given() -> dict[str, str]:
    """The environment variables that inductor or its compiler reads."""
    given = {
        name: value
        for name, value in os.environ.items()
        if ("INDUCTOR" in name and name != _ADDRESS) or name in _VARIABLES
    }
    given.pop("TORCHINDUCTOR_CACHE_DIR", None)  # inductor sets it
    return given


def surroundings() -> list[Any]:
    """Where inductor's code is compiled: its cache, its environment variables, this processor."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return [cache_dir(), sorted(_given().items()), sorted(torch.cpu.get_capabilities().items())]


def instructions() -> list[str]:
    """The instruction sets of this processor that a compiler for it may use."""
    found = {name for name, has in torch.cpu.get_capabilities().items() if has is True}
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as lines:
        # Words of one processor: all are alike.
        line = next((x for x in lines if x.startswith(("flags", "Features"))), "")
        words = line.partition(":")[2].split()
        found |= {x for x in words if x in _BESIDE or line.startswith("Features")}
    return sorted(found)


# Those of x86 that torch does not list, by Linux' names.
_BESIDE = frozenset(
    (
        "3dnowprefetch", "adx", "apxf", "cmpccxadd", "cx16", "fsgsbase", "gfni", "lahf_lm", "lwp",
        "movbe", "movdir64b", "movdiri", "pclmulqdq", "rdpid", "rdrand", "rdseed", "rtm", "sha512",
        "sm3", "sm4", "tbm", "vaes", "vpclmulqdq", "xop", "xsave",
    )
)  # fmt: skip
_VARIABLES = ("ATEN_CPU_CAPABILITY", "CXX", "TORCH_COMPILE_DEBUG", "TORCH_LOGS", "TORCH_TRACE")


def written(graph: Any) -> tuple[WrapperText, Path | None] | None:
    """The function of a compiled graph, and the library of its kernels; None if it needs inductor.

    Args:
        graph: a ``CompiledFxGraph``.
    """
    call = graph.current_callable
    if not isinstance(call, MethodType) or graph.constants:
        return None
    scope = call.__func__.__globals__
    for node in ast.walk(ast.parse(graph.source_code)):
        if isinstance(node, ast.FunctionDef) and node.name == call.__name__:
            break
    else:
        return None
    node.args.args = node.args.args[1:]  # a method of an object that holds nothing
    kernels: dict[str, str] = {}
    files: set[str] = set()
    for path in _global_names(node):
        (name, *rest), value = path, scope.get(path[0])
        owner = getattr(value, "__self__", None)
        if isinstance(value, BuiltinFunctionType) and isinstance(owner, ModuleType) and not rest:
            file = getattr(owner, "__file__", None)
            if file is not None:
                kernels[name] = value.__name__
                files.add(file)
                continue
        if not _means_the_same(path, scope):
            return None
    if len(files) > 1:
        return None
    return WrapperText(ast.unparse(node), kernels), next(map(Path, files), None)


def _global_names(function: ast.FunctionDef) -> Iterator[tuple[str, ...]]:
    """The names that a function reads beside its own, each with the attributes read of it."""
    own = {arg.arg for arg in function.args.args}
    own |= {
        node.id
        for node in ast.walk(function)
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)
    }
    inner = {node.value for node in ast.walk(function) if isinstance(node, ast.Attribute)}
    for node in ast.walk(function):
        attributes: list[str] = []
        if node in inner:
            continue
        while isinstance(node, ast.Attribute):
            attributes.append(node.attr)
            node = node.value
        if isinstance(node, ast.Name) and node.id not in own:
            yield (node.id, *reversed(attributes))


def _means_the_same(path: Sequence[str], scope: Mapping[str, Any]) -> bool:
    """Whether a name has the same meaning in inductor's module and without inductor."""
    name, *rest = path
    if name not in scope:
        return hasattr(builtins, name)
    if name not in _meanings() or (name == "torch" and not _is_loaded_with_torch(rest)):
        return False
    here, there = _meanings()[name], scope[name]
    for part in rest:
        here, there = getattr(here, part, None), getattr(there, part, None)
    return here is not None and (here is there or here == there or here != here)


def _is_loaded_with_torch(path: Sequence[str]) -> bool:
    """Whether an attribute of torch is there without inductor."""
    if path[:1] == ["ops"]:
        return path[1:2] in (["aten"], ["ftp"])
    return len(path) == 1 and not path[0].startswith("_")


def run_by(functions: Mapping[str, WrapperText], library: str | None) -> dict[str, Compiled]:
    """The functions, ready to call.

    Args:
        library: a path to the library of their kernels.

    Raises:
        ImportError, AttributeError: a library that is not theirs.
    """
    module = _loaded(library) if library is not None else None
    made = {}
    for key, function in functions.items():
        kernels = {name: getattr(module, kernel) for name, kernel in function.kernels.items()}
        scope = {"__name__": __name__, **_meanings(), **kernels}
        exec(compile(function.source, "<compiled by inductor>", "exec"), scope)
        made[key] = scope["call"]
    return made


def _loaded(library: str) -> ModuleType:
    """The library's module, as inductor loads it."""
    os.environ[_ADDRESS] = str(_GUARDS._torchinductor_pyobject_tensor_data_ptr)
    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()  # as inductor does when it chooses the vector extension
    loader = ExtensionFileLoader("kernel", library)
    spec = importlib.util.spec_from_file_location("kernel", library, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module
