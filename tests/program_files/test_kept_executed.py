"""Graphs that are prepared once for the ranks of a host: found for the same graph and layouts only,
and right whatever the cache holds.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from few_or_many import few_or_many
from programs import AXES, Drawn, programs

import ftp
from ftp import P
from ftp.program_files import kept
from ftp.program_files.graphs import read_graph, write_executed
from ftp.program_files.kept import KEEP, KeptProgram
from ftp.program_files.kept_executed import _is_of_any_offset
from ftp.program_files.plain import Reader, Writer
from ftp.runtime.compile import executed, running
from ftp.runtime.executed import local_inputs
from ftp.runtime.mesh_groups import axes_of_groups
from ftp.sharding.pytree import flatten

ONE = ftp.simulated_mesh((1,), ("tp",))
CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FTP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv(KEEP, "1")
    return tmp_path / "cache" / "plans"


def same(a: Any, b: Any) -> bool:
    return all(torch.equal(x, y) for x, y in zip(flatten(a)[0], flatten(b)[0], strict=True))


def run(made: ftp.Step, *args: Any) -> tuple[Any, bool]:
    """What a step returns, and whether its plan was found."""
    result = made(*args)
    (planned,) = made._cache.programs.values()
    return result, isinstance(planned.program, KeptProgram)


@few_or_many(programs(gradients=False, longest=14), few=1, many=150)
def test_a_graph_is_read_as_it_was_written(drawn: Drawn):
    mesh = ftp.simulated_mesh(drawn.mesh, AXES[: len(drawn.mesh)])
    specs = tuple(i.spec for i in drawn.inputs)
    lowered = ftp.spmd(drawn.function, mesh, specs, drawn.out_specs).lower(*drawn.values)
    program, mesh = lowered._program, lowered._program.mesh
    for coordinate in mesh.coordinates():
        local = program.local(coordinate)
        given: list[Any] = [
            torch.empty(shape, dtype=dtype) for shape, dtype in local_inputs(program, coordinate)
        ]
        graph = executed(local.gm.graph, [*given, *local.offsets_at(coordinate)], program.donated)
        writer = Writer(CPU)
        nodes = write_executed(writer, graph, axes_of_groups(mesh))
        found = read_graph(Reader(writer.pool, CPU), nodes, mesh.group_name)
        assert str(found) == str(graph)
        for a, b in zip(found.nodes, graph.nodes, strict=True):
            assert a.op == b.op and (a.target is b.target or a.op != "call_function")
            assert {k: b.meta[k] for k in ("source", "collective") if k in b.meta} == a.meta


def update(params: dict[str, Any], x: torch.Tensor) -> tuple[Any, Any]:
    fn = lambda p: ((x @ p["w"]).sin() * 2 + p["b"]).square().sum()  # noqa: E731
    grads, loss = torch.func.grad_and_value(fn)(params)
    return {k: params[k] - 0.1 * grads[k] for k in params}, loss


def arguments(**layout: Any) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(3, 4, generator=generator, dtype=torch.float64)
    x = torch.randn(5, 3, generator=generator, dtype=torch.float64)
    if layout.get("transposed"):
        x = x.T.contiguous().T
    return {"w": w, "b": torch.ones(4, dtype=torch.float64)}, x


def step() -> ftp.Step:
    return ftp.spmd(update, ONE, (P(), P()), (P(), P()), donate=(0,))


def graphs(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.executed"))


def test_ranks_prepare_a_graph_once(folder: Path, monkeypatch: pytest.MonkeyPatch):
    expected, prepared = update(*arguments()), []
    monkeypatch.setattr(kept, "executed", lambda *given: prepared.append(1) or executed(*given))

    def found(**layout: Any) -> int:
        result, is_found = run(step(), *arguments(**layout))
        assert is_found and same(result, expected)
        return len(prepared)

    assert same(run(step(), *arguments())[0], expected)
    assert found() == 1 and found() == 1 and len(graphs(folder)) == 1
    assert found(transposed=True) == 2 and found(transposed=True) == 2
    assert len(graphs(folder)) == 2


def test_another_default_dtype_is_another_program(folder: Path):
    """Integers times a float have it: a product of floats may be written over one of them only if
    both have the result's dtype.
    """
    fn, x, y = lambda x, y: x.sin() * (y * 0.1), torch.ones(5), torch.arange(5)
    before = torch.get_default_dtype()
    try:
        for dtype in (torch.float32, torch.float32, torch.float64, torch.float64):
            torch.set_default_dtype(dtype)
            result, _ = run(ftp.spmd(fn, ONE, (P(), P()), P()), x, y)
            assert result.dtype == dtype and same(result, fn(x, y))
    finally:
        torch.set_default_dtype(before)
    assert len(graphs(folder)) == len(list(folder.glob("*.ftp"))) == 2


def test_what_is_wrong_with_a_file_costs_a_preparation(folder: Path):
    expected = update(*arguments())

    def again() -> None:
        assert same(run(step(), *arguments())[0], expected)

    again()
    again()
    (path,) = graphs(folder)
    whole = path.read_bytes()
    for content in (b"", whole[:100], whole[:-1], whole[:200] + b"?" + whole[201:], b"other"):
        path.write_bytes(content)
        again()
        assert path.read_bytes() == whole
    path.chmod(0o622)
    again()
    assert path.read_bytes() == whole and not path.stat().st_mode & 0o022
    if not os.geteuid():
        os.chown(path, 4242, -1)
        again()
        assert not path.stat().st_uid


def test_the_offsets_that_decide_shapes():
    """A graph that slices a value at its rank's offset is that of one offset."""
    mesh, x = ftp.AbstractMesh((2,), ("tp",)), torch.ones(8, 4)

    def is_of_any(fn: Any, *specs: P, given: tuple[Any, ...] = (x,)) -> bool:
        local = ftp.spmd(fn, mesh, specs, P("tp")).lower(*given)._program.local()
        assert local.offsets
        return _is_of_any_offset(local)

    at = torch.tensor([[1], [7]])
    looked_up = ftp.spmd(lambda x, at: x[at], mesh, (P("tp"), P()), P()).lower(x, at)
    local = looked_up._program.local()
    assert local.offsets and _is_of_any_offset(local)
    assert not is_of_any(lambda x: x.sin(), P())


def test_a_graph_that_was_run_is_that_of_the_file():
    """`running` of what `executed` made is `eager`."""
    program = step().lower(*arguments())._program
    params, x = arguments()
    given = [params["b"], params["w"], x]
    graph = executed(program.local().gm.graph, given, program.donated)
    out = running(graph, program.donated)(given)
    assert torch.allclose(out[-1], update(*arguments())[1])
