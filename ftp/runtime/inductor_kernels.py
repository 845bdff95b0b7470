"""Compile inductor's C++ kernels of several graphs as one file.

Inductor compiles each kernel separately, and each time the compiler spends most of a second on
headers.
"""

import re
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

import torch

from ftp.dataclass import dataclass


@dataclass(frozen=True)
class _Pending:
    """A kernel that is not compiled yet."""

    argtypes: tuple[str, ...]
    source: str


@contextmanager
def compiled_together() -> Iterator[None]:
    """Within the block, kernels for CPUs are collected; at its end they are compiled together."""
    from torch._inductor import config
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.cpu_vec_isa import VecISA

    scopes: list[dict[str, Any]] = []
    wait, tried = AsyncCompile.wait, VecISA.check_build

    def keep(self: Any, argtypes: Sequence[str], source: str) -> _Pending:
        return _Pending(tuple(argtypes), with_numbers_read_once(source))

    def note(self: Any, scope: dict[str, Any]) -> None:
        scopes.append(scope)
        wait(self, scope)

    def builds(self: Any, code: str) -> bool:
        return ("fp16" not in code and _knows_extensions()) or tried(self, code)

    # torch's own vector extensions need no trial, and one file needs no precompiled headers.
    changes: dict[str, Any] = {"cpp_cache_precompile_headers": False}
    if torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512"):
        changes["cpp.vec_isa_ok"] = True
    with (
        config.patch(changes),
        patch.object(AsyncCompile, "cpp_pybinding", keep),
        patch.object(AsyncCompile, "wait", note),
        patch.object(VecISA, "check_build", builds),
    ):
        yield
        # Ranks of a host find each other's file by its text, and compile subgraphs in any order.
        found = {x for scope in scopes for x in scope.values() if isinstance(x, _Pending)}
        pending = sorted(found, key=lambda kernel: (kernel.source, kernel.argtypes))
        made = dict(zip(pending, _load(pending), strict=True))
    for scope in scopes:
        scope.update(
            {name: made[value] for name, value in scope.items() if isinstance(value, _Pending)}
        )


_SIGNATURE = re.compile(r"\bvoid\s+kernel\(([^()]*)\)\s*\{")


def with_numbers_read_once(source: str) -> str:
    """A kernel that reads inputs which are one integer, such as a rank's offsets, before its loops:
    the compiler does not know that no store of a loop changes them.
    """
    found = _SIGNATURE.search(source)
    # A kernel that writes integers may write to the memory of such an input.
    if found is None or re.search(r"(?<!const )\bint64_t\s*\*", found[1]):
        return source
    head, body = source[: found.end()], source[found.end() :]
    for name in re.findall(r"\bconst int64_t\* (\w+)", found[1]):
        read = f"{name}[static_cast<int64_t>(0L)]"
        if 0 < body.count(read) == len(re.findall(rf"\b{name}\b", body)):
            # A tensor without elements, which no loop reads, has no memory.
            head += f"\n    const int64_t {name}_0 = {name} ? *{name} : 0;"
            body = body.replace(read, f"{name}_0")
    return head + body


@cache
def _knows_extensions() -> bool:
    """Whether the compiler is a GCC with the vector extensions that inductor tests for. GCC 11 has
    all but AMX for fp16.

    Inductor tests each by compiling, linking and loading a file, which takes 1.5 seconds in all.
    """
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        version = subprocess.run(
            [get_cpp_compiler(), "-dumpfullversion"],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
        return int(version.split(".")[0]) >= 11
    # Another compiler, or none.
    except (OSError, RuntimeError, ValueError, subprocess.SubprocessError):
        return False


_TABLE = "static PyMethodDef py_methods[] = {"


def _load(kernels: list[_Pending]) -> list[Any]:
    from torch._inductor.codecache import CppPythonBindingsCodeCache as Cache

    if not kernels:
        return []
    try:
        module: Any = Cache.load_async(_joined(kernels, Cache.suffix_template))()
        return [getattr(module, f"kernel{i}") for i in range(len(kernels))]
    except (RuntimeError, AttributeError, ValueError):  # definitions that conflict in one file
        return [Cache.load_pybinding(list(kernel.argtypes), kernel.source) for kernel in kernels]


def _joined(kernels: list[_Pending], template: str) -> str:
    """One source in which each kernel has its own name and binding, by inductor's template for one
    kernel.
    """
    ending = template.format(
        arg_len=0, call_entry_func="Py_RETURN_NONE;", entry_func="kernel", extra_parse_arg=""
    )
    before, table, after = ending.partition(_TABLE)
    if not table:
        raise ValueError("inductor's template for bindings has changed")
    includes: dict[str, None] = {}
    sources, bindings, rows = [], [], []
    for i, kernel in enumerate(kernels):
        lines = kernel.source.splitlines()
        includes |= dict.fromkeys(line for line in lines if line.startswith("#include"))
        body = "\n".join(line for line in lines if not line.startswith("#include"))
        sources.append(f"#define kernel kernel{i}\n{body}\n#undef kernel")
        arguments = ", ".join(
            f"parse_arg<{t.replace('const ', '')}>(args, {n})"
            for n, t in enumerate(kernel.argtypes)
        )
        bindings.append(_BINDING.format(i=i, n=len(kernel.argtypes), arguments=arguments))
        rows.append(f'{{"kernel{i}", kernel{i}_py, METH_VARARGS, ""}},')
    return "\n".join([*includes, *sources, before, *bindings, table, *rows, after])


_BINDING = """
static PyObject* kernel{i}_py(PyObject* self, PyObject* args) {{
    try {{
        if (!PyTuple_CheckExact(args) || PyTuple_GET_SIZE(args) != {n})
            throw std::runtime_error("requires {n} args");
        kernel{i}({arguments});
        Py_RETURN_NONE;
    }} catch (std::exception const& e) {{
        PyErr_SetString(PyExc_RuntimeError, e.what());
        return nullptr;
    }}
}}
"""
