"""Compiled code that is kept: it gives the same bits without torch's compiler, and only where it
was made for.
"""

import hashlib
import os
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import own_process  # type: ignore[import-not-found]
import pytest
import torch
from torch.nn.functional import conv1d, gelu, layer_norm, scaled_dot_product_attention

import ftp
from ftp.runtime import compile as compiling
from ftp.runtime import kept_code
from ftp.torch_internals.inductor_wrappers import settings, written

MESH = ftp.simulated_mesh((1,), ("tp",))


def many_ops(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    rows = layer_norm(gelu(x @ w), (16,))
    heads = (x + 1).view(1, 2, 8, 16)
    return (
        torch.where(rows > 0, rows, -torch.inf).softmax(-1),
        torch.bmm(heads[0], w.expand(2, 16, 16) + 1).exp(),
        scaled_dot_product_attention(heads, heads, heads, is_causal=True) * 2,
        conv1d(x[None], w[:, :, None]).relu(),
        (x.float() * 2).double(),
        (x * 10).long() // 3,
        (x + 1).topk(3)[0].exp(),
        torch.zeros_like(x).scatter_add(0, (x > 0).long(), x.exp()),
        torch.linalg.solve(w @ w.T + torch.eye(16).double(), w) + 1,
        (x + 1).cumsum(-1) * 2,
    )


def small(x: torch.Tensor) -> torch.Tensor:
    return (x.exp() * 3).sum()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FTP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kernels"


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many subgraphs each use of inductor compiled."""
    found: list[int] = []
    divided = compiling._divided

    def counted(subgraphs: Any) -> Any:
        found.append(len(subgraphs))
        return divided(subgraphs)

    monkeypatch.setattr(compiling, "_divided", counted)
    return found


def run(fn: Any, *args: torch.Tensor) -> Any:
    return ftp.spmd(fn, MESH, (ftp.P(),) * len(args), ftp.P(), compile=True)(*args)


@pytest.mark.slow
def test_kept_code_gives_the_bits_of_new_code(folder: Path, compilations: list[int]):
    x, w = torch.randn(2, 16, 16, dtype=torch.float64)
    x[0, 0] = torch.nan
    new, kept = run(many_ops, x, w), run(many_ops, x, w)
    assert compilations == [1]
    for a, b, plain in zip(new, kept, many_ops(x, w), strict=True):
        assert a.dtype == b.dtype and a.stride() == b.stride()
        assert a.numpy().tobytes() == b.numpy().tobytes()
        torch.testing.assert_close(b, plain, equal_nan=True)


@pytest.mark.slow
def test_code_is_kept_for_what_it_was_compiled_for(
    folder: Path, compilations: list[int], monkeypatch: pytest.MonkeyPatch
):
    x = torch.randn(8, 16)
    expected = run(small, x)

    def is_found() -> bool:
        del compilations[:]
        torch.testing.assert_close(run(small, x), expected)
        return not compilations

    (kept,) = folder.iterdir()
    whole = kept.read_bytes()
    for damaged in (b"", whole[:-1], whole[:1000] + b"!" + whole[1001:]):
        kept.unlink()  # the loaded file is in use
        kept.write_bytes(damaged)
        assert not is_found()
        assert kept.read_bytes() == whole and is_found()
    kept.chmod(0o620)  # others can write to it
    assert not is_found()
    assert is_found()
    with monkeypatch.context() as patch:
        patch.setenv("ATEN_CPU_CAPABILITY", "avx2")
        assert not is_found()
        assert is_found()
    from torch._inductor import config

    count = len(list(folder.iterdir()))
    for options in ({"inplace_buffers": False}, {"force_disable_caches": True}):
        with config.patch(options):
            assert settings() is None and not is_found()
    with monkeypatch.context() as patch:
        patch.setattr(kept_code, "own_code", lambda: "another")
        assert not is_found()
    with monkeypatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder.parent / "another"))
        assert not is_found()
    assert len(list(folder.iterdir())) == count + 2
    del compilations[:]
    run(small, x[:, :8])
    assert compilations == [1]  # other shapes, other code
    assert is_found()
    monkeypatch.setattr(kept_code, "LIMIT", len(whole) + 1)
    monkeypatch.setattr(kept_code, "own_code", lambda: "third")
    assert not is_found()
    assert len(list(folder.iterdir())) == 1  # the others were used before


@pytest.mark.slow
def test_code_is_kept_under_a_loose_umask(
    folder: Path, compilations: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Others can write to what the compiler makes then, until it is taken over."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    x = torch.randn(8, 24)
    before = os.umask(0o002)
    try:
        for _ in range(2):
            torch.testing.assert_close(run(small, x), small(x))
    finally:
        os.umask(before)
    assert compilations == [1]
    assert {path.stat().st_mode & 0o077 for path in folder.iterdir()} == {0}
    (library,) = (tmp_path / "inductor").rglob("*.so")
    assert not library.stat().st_mode & 0o022


@pytest.mark.slow
def test_kept_code_runs_where_its_last_use_cannot_be_noted(
    folder: Path, compilations: list[int], monkeypatch: pytest.MonkeyPatch
):
    """In a cache that is read only, or from which another process has just deleted the file."""
    x = torch.rand(8, 16)
    functions = (small, lambda x: (x.sqrt() + 7).sum())
    for fn in functions:
        run(fn, x)

    def refused(*_: Any) -> None:
        raise PermissionError

    del compilations[:]
    for times in (os.utime, refused, os.utime):
        monkeypatch.setattr(os, "utime", times)
        for fn in functions:
            torch.testing.assert_close(run(fn, x), fn(x))
    assert not compilations


@pytest.mark.slow
def test_a_file_that_is_found_often_is_open_once(folder: Path):
    x = torch.rand(8, 16)
    run(small, x)
    run(small, x)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        run(small, x)
        run(lambda x: x.exp() @ x.T, x)
    assert len(os.listdir("/proc/self/fd")) <= before + 1


def graph(line: str, **scope: Any) -> SimpleNamespace:
    """A compiled graph whose function has this line."""
    source = f"class Runner:\n    def call(self, args):\n        {line}\n"
    given = {"torch": torch, "aten": torch.ops.aten, "inf": float("inf"), **scope}
    exec(source, given)
    call = given["Runner"]().call
    return SimpleNamespace(source_code=source, current_callable=call, constants={})


def test_code_is_kept_if_its_names_mean_the_same_without_the_compiler():
    kernel = ModuleType("kernel")
    known: Any = SimpleNamespace(mm=torch.mm, bias_addmm=torch.addmm)
    for line in (
        "x, = args; return (torch.ops.aten.exp.default(x),)",
        "x, = args; return (torch.ops.ftp.mm_by_onednn.default(x, x),)",
        "return [x.view(torch.int32) for x in args]",
        "return (inf, range(len(args)))",
        "return (aten.exp(args[0]), extern_kernels.mm(*args))",
    ):
        assert written(graph(line, extern_kernels=known)) is not None, line
    for line in (
        "return (extern_kernels.bias_addmm(*args),)",
        "return (extern_kernels,)",
        "return self.partitions[0](args)",
        "return (constant,)",
        "return (torch._inductor.config,)",
        "return (torch.ops.inductor.seeds.default(1),)",
        "return (kernel.call(args),)",
        "return (math.inf,)",
    ):
        other = {"extern_kernels": known, "constant": torch.ones(()), "kernel": kernel}
        assert written(graph(line, **other, math=SimpleNamespace(inf=0.0))) is None, line
    with_constants = graph("return ()")
    with_constants.constants = {"a": torch.ones(())}
    assert written(with_constants) is None


PROGRAM = """
import hashlib, sys, torch, ftp
from ftp import P
from ftp.torch_internals import deferred_compiler

torch.manual_seed(0)
mesh = ftp.simulated_mesh((1,), ("tp",))
model = torch.nn.Sequential(torch.nn.Linear(40, 60), torch.nn.GELU(), torch.nn.Linear(60, 20))
fn, params = ftp.functionalize(model)
opt = ftp.optim.from_torch(torch.optim.AdamW, fused=True)
state, x = opt.init(params), torch.randn(30, 40)

def train(params, state, x):
    grads, loss = torch.func.grad_and_value(lambda p: fn(p, x).square().mean())(params)
    return (*opt.update(grads, state, params), loss)

step = ftp.spmd(train, mesh, (P(), P(), P()), (P(), P(), P()), compile=True, donate=(0, 1))
for _ in range(3):
    params, state, loss = step(params, state, x)
found = hashlib.sha256(loss.numpy().tobytes())
for path in sorted(params):
    found.update(params[path].detach().numpy().tobytes())
heavy = {"torch._dynamo.convert_frame", "torch._inductor.graph", "sympy.core",
    "torch._inductor.config", "torch.distributed.tensor"}
print(found.hexdigest(), sorted(heavy & set(sys.modules)), deferred_compiler.is_deferred())
"""


@pytest.mark.slow
def test_a_second_start_imports_no_compiler(tmp_path: Path):
    folders = {"FTP_CACHE": str(tmp_path), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    first, second = (own_process.run(PROGRAM, env={**os.environ, **folders}) for _ in range(2))
    assert not first.returncode and not second.returncode, first.stderr + second.stderr
    bits, *rest = second.stdout.split(maxsplit=1)
    assert bits == first.stdout.split()[0] and len(bits) == len(hashlib.sha256().hexdigest())
    assert rest == ["[] True\n"]
    assert first.stdout.endswith(" False\n")
