"""Programs that are saved with their compiled code: if it is trusted, it runs where it was made
for; elsewhere the program is compiled, with a warning.
"""

import json
import warnings
from pathlib import Path
from typing import Any

import own_process  # type: ignore[import-not-found]
import pytest
import torch

import ftp
from ftp import P
from ftp.errors import CodeWarning, ProgramFileError
from ftp.program_files.container import pack, unpack
from ftp.runtime import code_of_ranks, saved_code
from ftp.runtime import compile as compiling

MESH = ftp.simulated_mesh((1,), ("tp",))
PARAMS = {"w": torch.linspace(0, 1, 12).view(3, 4)}
X = torch.linspace(-1, 1, 6).view(2, 3)


def loss(params: Any, x: torch.Tensor) -> torch.Tensor:
    return ((x @ params["w"]).exp() + 3).log().sum()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.Tensor, torch.Tensor]:
    """A file with code; the loss and the gradient of the compiled program."""
    folder = tmp_path_factory.mktemp("saved")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FTP_CACHE", str(folder / "cache"))
        step = ftp.shard(loss, MESH, {"w": P(None, "tp")}, compile=True)
        compiled = step.lower(PARAMS, X).compile()
        compiled.save(folder / "program")
        value, grads = compiled(PARAMS, X)
    return folder / "program", value, grads["w"]


@pytest.fixture
def compilations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many subgraphs each use of inductor compiled, with a cache that is empty at first."""
    monkeypatch.setenv("FTP_CACHE", str(tmp_path / "cache"))
    found: list[int] = []
    real = compiling.by_inductor

    def counted(subgraphs: Any) -> Any:
        found.append(len(subgraphs))
        return real(subgraphs)

    monkeypatch.setattr(compiling, "by_inductor", counted)
    return found


ELSEWHERE = """
import os, torch, ftp
from ftp.torch_internals import deferred_compiler
torch.set_num_threads(int(os.environ["THREADS"]))
x = torch.linspace(-1, 1, 6).view(2, 3)
params = {"w": torch.linspace(0, 1, 12).view(3, 4)}
step = ftp.load_program(os.environ["PROGRAM"], ftp.simulated_mesh((1,), ("tp",)), trust_code=True)
value, grads = step(params, x)
assert grads["w"].numpy().tobytes().hex() == os.environ["GRADIENT"]
print(deferred_compiler.is_deferred())
"""


@pytest.mark.slow
def test_another_process_starts_the_file_without_the_compiler(
    saved: tuple[Path, torch.Tensor, torch.Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path, _, gradient = saved
    for name in ("FTP_CACHE", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("PROGRAM", str(path))
    monkeypatch.setenv("GRADIENT", gradient.numpy().tobytes().hex())
    monkeypatch.setenv("THREADS", str(torch.get_num_threads()))
    found = own_process.run(ELSEWHERE)
    assert found.stdout.strip() == "True", found.stderr
    assert "Warning" not in found.stderr
    assert not (tmp_path / "TORCHINDUCTOR_CACHE_DIR").exists()


@pytest.mark.slow
def test_code_runs_where_it_was_made_for(
    saved: tuple[Path, torch.Tensor, torch.Tensor],
    compilations: list[int],
    monkeypatch: pytest.MonkeyPatch,
):
    path, *expected = saved

    def run(**options: Any) -> None:
        value, grads = ftp.load_program(path, MESH, **options)(PARAMS, X)
        for got, wanted in zip((value, grads["w"]), expected, strict=True):
            torch.testing.assert_close(got, wanted, rtol=0, atol=0)

    run(trust_code=True)
    assert not compilations
    with pytest.warns(CodeWarning, match="was not given trust_code=True"):
        run()
    assert len(compilations) == 1
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    with pytest.warns(CodeWarning, match=f"threads is {threads + 1} here and was {threads}"):
        run(trust_code=True)
    torch.set_num_threads(threads)
    monkeypatch.setattr(saved_code, "instructions", lambda: ["sse2"])
    with pytest.warns(CodeWarning, match=r"this processor lacks .*avx"):
        run(trust_code=True)
    from torch._inductor import config

    with (
        config.patch(inplace_buffers=False),
        pytest.warns(CodeWarning, match="inductor's options differ from its defaults"),
    ):
        run(trust_code=True)


@pytest.mark.slow
def test_altered_code_is_refused(
    saved: tuple[Path, torch.Tensor, torch.Tensor], compilations: list[int], tmp_path: Path
):
    whole, copy = saved[0].read_bytes(), tmp_path / "program"
    found = unpack(whole, "program")
    at = whole.index(found.sections["code"]) + 100
    copy.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    with pytest.raises(ProgramFileError, match="is damaged"):
        ftp.load_program(copy, MESH, trust_code=True)

    def changed(**changes: bytes) -> Any:
        sections = {name: found.section(name) for name in found.sections}
        copy.write_bytes(pack(found.header, {**sections, **changes}))
        return ftp.load_program(copy, MESH, trust_code=True)

    code = found.section("code")
    with pytest.raises(ProgramFileError, match="is damaged"):
        changed(code=code[:-1])(PARAMS, X)
    with pytest.raises(ProgramFileError, match="is damaged"):
        changed(**{"facts of code": json.dumps({}).encode()})(PARAMS, X)
    assert not compilations
    with pytest.warns(CodeWarning, match="its library cannot be loaded"):
        value, _ = changed(code=b"\0" * 64 + code[64:])(PARAMS, X)
    assert torch.equal(value, saved[1])


@pytest.mark.slow
def test_a_loaded_program_is_saved_with_its_code(
    saved: tuple[Path, torch.Tensor, torch.Tensor], compilations: list[int], tmp_path: Path
):
    """A plan that was saved elsewhere gets the code of this machine."""
    step = ftp.shard(loss, MESH, {"w": P(None, "tp")}, compile=True)
    step.lower(PARAMS, X).save(tmp_path / "plan")
    ftp.load_program(tmp_path / "plan", MESH).save(tmp_path / "program")
    del compilations[:]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = ftp.load_program(tmp_path / "program", MESH, trust_code=True)
        assert torch.equal(loaded(PARAMS, X)[0], saved[1])
    assert not compilations
    assert loaded.lowered.text() == step.lower(PARAMS, X).text()


def test_a_program_that_runs_eagerly_is_saved_without_code(tmp_path: Path):
    compiled = ftp.shard(loss, MESH, {"w": P(None, "tp")}).lower(PARAMS, X).compile()
    compiled.save(tmp_path / "program")
    assert "code" not in unpack((tmp_path / "program").read_bytes(), "program").sections
    loaded = ftp.load_program(tmp_path / "program", MESH)
    assert torch.equal(loaded(PARAMS, X)[0], compiled(PARAMS, X)[0])
    loaded.save(tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == (tmp_path / "program").read_bytes()


def test_code_that_must_not_be_kept_is_not_saved(tmp_path: Path):
    mesh = ftp.simulated_mesh((2,), ("tp",))
    step = ftp.shard(loss, mesh, {"w": P(None, "tp")}, compile=True)
    compiled = step.lower(PARAMS, X).compile()
    caching: Any = torch.compiler.config
    with (
        caching.patch(force_disable_caches=True),
        pytest.raises(ProgramFileError, match=r"caches are switched off.*by lowered\.save"),
    ):
        compiled.save(tmp_path / "program")
    assert not list(tmp_path.iterdir())


def looked_up(table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return (table[ids] + 1).tanh().square().mean()


def test_ranks_of_equal_shapes_have_the_same_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Where a rank's rows begin is an input of it."""
    kept: list[int] = []
    splits: list[Any] = []
    split = code_of_ranks.subgraphs_of

    def save(subgraphs: Any, by_onednn: Any) -> tuple[dict[str, Any], bytes]:
        kept.append(len(subgraphs))
        return {}, b""

    def noted(*given: Any) -> Any:
        splits.append(split(*given))
        return splits[-1]

    monkeypatch.setattr(code_of_ranks, "save_code", save)
    monkeypatch.setattr(code_of_ranks, "subgraphs_of", noted)
    mesh, given = ftp.simulated_mesh((4,), ("tp",)), (torch.ones(12, 2), torch.arange(5))
    step = ftp.shard(looked_up, mesh, P("tp"), compile=True)
    step.lower(*given).compile().save(tmp_path / "program")
    assert len(splits) == 1 and kept == [len(splits[0][1])]
    step = ftp.spmd(lambda x: x.exp() * 2, mesh, P(), P("tp"), compile=True)  # slices a value
    step.lower(given[0]).compile().save(tmp_path / "program")
    assert len(splits) == 5 and kept[1] == 4
