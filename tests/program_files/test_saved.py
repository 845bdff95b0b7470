"""Programs that are saved and loaded run as they were planned, and refuse what is not theirs."""

import enum
import json
import os
import re
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from few_or_many import few_or_many
from programs import AXES, Drawn, programs

import ftp
from ftp import P
from ftp.errors import (
    DonationError,
    InputError,
    MeshError,
    PlacementError,
    ProgramFileError,
    ReportError,
)
from ftp.optim.slots import Slots
from ftp.program_files import saved
from ftp.program_files.container import pack, unpack
from ftp.sharding.pytree import flatten

TP = ftp.simulated_mesh((2,), ("tp",))
W, X = torch.ones(3, 4), torch.ones(2, 3)


def same(a: Any, b: Any) -> bool:
    (xs, of_a), (ys, of_b) = flatten(a), flatten(b)
    alike = [
        torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y
        for x, y in zip(xs, ys, strict=True)
    ]
    return of_a == of_b and all(alike)


def facts(lowered: ftp.Lowered) -> list[Any]:
    made = ftp.certify(lowered)
    return [
        lowered.text(fold=False),
        list(lowered.collectives),
        int(lowered.memory),
        float(lowered.cost()),
        float(lowered.work),
        list(map(str, lowered.lint)),
        str(lowered.by_layer),
        [o.name for o in made.operations],
        lowered.assumptions,
    ]


def check(step: ftp.Step, args: tuple[Any, ...], path: Path) -> ftp.Step:
    """The program of a file gives the bits and the reports of the step, and so does the one that is
    compiled ahead of time.
    """
    lowered = step.lower(*args)
    lowered.save(path)
    wanted = step(*args)
    loaded = ftp.load_program(path, step.mesh)
    for run in (loaded, loaded, lowered.compile()):
        assert same(run(*args), wanted)
    assert facts(loaded.lowered) == facts(lowered)
    return loaded


def spmd(drawn: Drawn) -> ftp.Step:
    mesh = ftp.simulated_mesh(drawn.mesh, AXES[: len(drawn.mesh)])
    specs = tuple(i.spec for i in drawn.inputs)
    return ftp.spmd(
        drawn.function,
        mesh,
        specs,
        drawn.out_specs,
        data_axes=drawn.data_axes,
        reshard_after_forward=drawn.reshard_after_forward,
    )


def check_gradients(drawn: Drawn, path: Path) -> None:
    count = sum(i.is_parameter for i in drawn.inputs)
    mesh = ftp.simulated_mesh(drawn.mesh, AXES[: len(drawn.mesh)])
    step = ftp.shard(
        lambda params, *batch: drawn.function(*params, *batch)[0],
        mesh,
        tuple(i.spec for i in drawn.inputs[:count]),
        batch_specs=tuple(i.spec for i in drawn.inputs[count:]),
        data_axes=drawn.data_axes,
        reshard_after_forward=drawn.reshard_after_forward,
        bucket=True,
    )
    check(step, (tuple(drawn.values[:count]), *drawn.values[count:]), path)


@few_or_many(programs(gradients=False, longest=14), few=3, many=150)
def test_values(tmp_path: Path, drawn: Drawn):
    check(spmd(drawn), tuple(drawn.values), tmp_path / "program")


@few_or_many(programs(gradients=True, longest=14), few=3, many=150)
def test_gradients(tmp_path: Path, drawn: Drawn):
    check_gradients(drawn, tmp_path / "program")


def test_a_train_step(tmp_path: Path):
    """Uneven shards of three ranks, a captured tensor, donated state in containers of ftp's own, an
    optimizer's static results.
    """
    mesh = ftp.simulated_mesh((3,), ("tp",))
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.ReLU(), torch.nn.Linear(7, 3))
    fn, params = ftp.functionalize(model.double())
    specs = ftp.plan(params, {"0.*": P("tp"), "2.weight": P(None, "tp"), "2.bias": P()})
    opt = ftp.optim.from_torch(torch.optim.AdamW, lr=0.1)
    state, offset = opt.init(params), torch.randn(3, dtype=torch.float64)

    def train(params, state, x):
        grads, loss = torch.func.grad_and_value(lambda p: (fn(p, x) + offset).square().mean())(
            params
        )
        params, state = opt.update(grads, state, params)
        return params, state, {"loss": loss, "kind": "mean", "none": None}

    of_state = opt.specs(params, specs)
    step = ftp.spmd(
        train, mesh, (specs, of_state, P()), (specs, of_state, P()), donate=(0, 1), bucket=True
    )
    x, path = torch.randn(5, 5, dtype=torch.float64), tmp_path / "train"
    step.lower(params, state, x).save(path)
    # Steps one after another, so that what one returned is donated to the next.
    runs = [ftp.load_program(path, mesh), step]
    placed = [
        (ftp.device_put(params, mesh, specs), ftp.device_put(state, mesh, of_state)) for _ in runs
    ]
    for _ in range(3):
        results = [run(*held, x) for run, held in zip(runs, placed, strict=True)]
        placed = [result[:2] for result in results]
        assert same(*results)
    assert results[0][2]["kind"] == "mean"
    runs[0](placed[0][0], placed[0][1], x)
    with pytest.raises(DonationError, match="was donated, as state of an earlier call"):
        runs[0](*placed[0], x)


def test_an_explicit_program(tmp_path: Path):
    def fn(w, x):
        return torch.softmax(ftp.constrain(x @ w, P()), -1)

    mesh = ftp.simulated_mesh((2,), ("tp",))
    step = ftp.spmd(fn, mesh, (P("tp"), P(None, "tp")), P(), explicit=True)
    check(step, (torch.randn(4, 3), torch.randn(2, 4)), tmp_path / "program")


def test_code_of_one_rank_random_draws_and_checked_inputs(tmp_path: Path):
    mesh = ftp.simulated_mesh((2, 2), ("dp", "tp"))

    def softened(x, table, ids):
        summed = ftp.local(
            lambda x: ftp.axis.all_reduce(x.sum(-1, keepdim=True), "tp"),
            None,
            P(None, "tp"),
            P(),
            axes=("tp",),
        )(x)
        return torch.dropout(x - summed, 0.5, True).sum() + table[ids].sum()

    step = ftp.spmd(
        softened,
        mesh,
        (P("dp", "tp"), P("tp"), P("dp")),
        P(),
        check_inputs=True,
        rng=True,
        data_axes=("dp",),
    )
    x, table = torch.randn(4, 6, dtype=torch.float64), torch.randn(5, 2, dtype=torch.float64)
    ids = torch.tensor([0, 4, 2, 1])
    loaded = check(step, (x, table, ids, ftp.random.key(1)), tmp_path / "program")
    with pytest.raises(InputError, match="ids"):
        loaded(x, table, ids + 3, ftp.random.key(1))


def test_a_program_of_a_mesh_without_ranks(tmp_path: Path):
    lowered = ftp.lower(
        lambda x: x.cumsum(0).mean(), ftp.AbstractMesh((2,), ("tp",)), P("tp"), torch.empty(5)
    )
    lowered.save(tmp_path / "program")
    with ftp.use_mesh(TP):
        loaded = ftp.load_program(tmp_path / "program")
    x = torch.randn(5)
    assert torch.equal(loaded(x), ftp.spmd(lambda x: x.cumsum(0).mean(), TP, P("tp"))(x))
    with pytest.raises(MeshError, match="abstract: it plans programs and runs none"):
        lowered.compile()


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("programs") / "small"
    step = ftp.shard(lambda p, x, k: (x @ p["w"]).sum() * k, TP, {"w": P(None, "tp")})
    step.lower({"w": torch.ones(3, 4)}, torch.ones(2, 3), 2).save(path)
    return path


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (({"w": W}, torch.ones(3, 3), 2), r"x is float32\[3, 3\]; .* made for float32\[2, 3\]"),
        (({"w": W.double()}, X, 2), r"params\['w'\] is float64\[3, 4\]"),
        (({"w": W}, X, 2.0), r"k is 2.0, a float; .* was made for 2, an int"),
        (({"v": W}, X, 2), r"no params\['w'\]; the program has no params\['v'\]"),
        (([W], X, 2), "another structure"),
    ],
)  # fmt: skip
def test_other_arguments(small: Path, args: tuple[Any, ...], text: str):
    with pytest.raises(InputError, match=text):
        ftp.load_program(small, TP)(*args)


def test_another_default_dtype(tmp_path: Path):
    """Ops of integers give the default dtype: those of the program would give another one."""
    step = ftp.spmd(lambda x: x / 3, TP, P("tp"), P("tp"))
    x = torch.arange(8)
    lowered = step.lower(x)
    lowered.save(tmp_path / "ints.ftp")
    loaded, compiled = ftp.load_program(tmp_path / "ints.ftp", TP), lowered.compile()
    wanted = step(x)
    torch.set_default_dtype(torch.float64)
    try:
        for call in (lambda: loaded(x), lambda: compiled(x), lowered.compile):
            with pytest.raises(InputError) as failure:
                call()
            assert "under the default dtype torch.float32; it is torch.float64 now" in str(
                failure.value
            )
        assert step(x).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(loaded(x), wanted) and torch.equal(compiled(x), wanted)


def test_other_placements(small: Path):
    loaded = ftp.load_program(small, TP)
    params = ftp.device_put({"w": torch.ones(3, 4)}, TP, P("tp"))
    with pytest.raises(PlacementError, match="placed with spec"):
        loaded(params, torch.ones(2, 3), 2)
    assert (
        float(
            loaded(ftp.device_put({"w": torch.ones(3, 4)}, TP, P(None, "tp")), torch.ones(2, 3), 2)[
                0
            ]
        )
        == 48
    )


@pytest.mark.parametrize(
    "mesh",
    [
        ftp.simulated_mesh((3,), ("tp",)),
        ftp.simulated_mesh((2,), ("dp",)),
        ftp.simulated_mesh((1, 2), ("dp", "tp")),
    ],
)
def test_other_meshes(small: Path, mesh: ftp.AbstractMesh):
    with pytest.raises(MeshError, match="for a mesh of tp 2 on cpu; this mesh is"):
        ftp.load_program(small, mesh)


@pytest.mark.parametrize("at", [0, 20, 60, 200, -100, -1])
def test_an_altered_file(small: Path, tmp_path: Path, at: int):
    content = bytearray(small.read_bytes())
    content[at] ^= 1
    (tmp_path / "program").write_bytes(content)
    with pytest.raises(ProgramFileError, match=r"is no program|is damaged"):
        ftp.load_program(tmp_path / "program", TP)


@pytest.mark.parametrize("length", [0, 5, 40, 300])
def test_a_truncated_file(small: Path, tmp_path: Path, length: int):
    (tmp_path / "program").write_bytes(small.read_bytes()[:length])
    with pytest.raises(ProgramFileError, match=r"is empty|is no program|is damaged"):
        ftp.load_program(tmp_path / "program", TP)


def forged(small: Path, path: Path, section: str, change: Any) -> Path:
    """The file with one section changed, and its hashes made anew."""
    found = unpack(small.read_bytes(), "small")
    sections = {name: found.section(name) for name in found.sections}
    content = json.loads(sections[section])
    change(content)
    path.write_bytes(pack(found.header, {**sections, section: json.dumps(content).encode()}))
    path.chmod(0o600)
    return path


def test_a_forged_file_runs_no_code_and_is_refused(small: Path, tmp_path: Path):
    def run(target: list[Any]) -> None:
        def change(content: Any) -> None:
            next(n for n in content["programs"][0][1] if n[2])[2] = target

        path = forged(small, tmp_path / "forged", "ranks", change)
        ftp.load_program(path, TP)

    with pytest.raises(ProgramFileError, match="opens files: it is refused"):
        run([saved.Writer().of(torch.ops.aten.from_file.default)[0], "aten::from_file"])
    with pytest.raises(ProgramFileError, match="not registered here: import the module"):
        run([saved.Writer().of(torch.ops.aten.mm.default)[0], "nowhere::op"])
    with pytest.raises(ProgramFileError, match="damaged"):
        run([11, "os.system"])  # a function that is not of the table
    path = forged(small, tmp_path / "forged", "call", lambda content: content.update(signature=[]))
    with pytest.raises(ProgramFileError, match="damaged"):
        ftp.load_program(path, TP)


def test_other_versions(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(saved, "__version__", "0.0.1")
    with pytest.raises(ProgramFileError, match=r"was saved with ftp .*; this is ftp 0.0.1, torch"):
        ftp.load_program(small, TP)


def test_files_of_others(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "program"
    path.write_bytes(small.read_bytes())
    path.chmod(0o666)
    with pytest.raises(ProgramFileError, match=r"can be written by others.*Copy it"):
        ftp.load_program(path, TP)
    with pytest.raises(ProgramFileError, match="cannot be read: No such file"):
        ftp.load_program(tmp_path / "absent", TP)
    with pytest.raises(ProgramFileError, match="cannot be written"):
        ftp.lower(torch.sin, TP, P(), torch.ones(2)).save(tmp_path / "absent" / "program")
    assert stat.S_IMODE(small.stat().st_mode) == 0o600
    (tmp_path / "link").symlink_to(small)
    ftp.load_program(tmp_path / "link", TP)
    path.chmod(0o600)
    if os.geteuid():
        monkeypatch.setattr(os, "geteuid", lambda: 4242)
    else:
        os.chown(path, 4242, -1)
    with pytest.raises(ProgramFileError, match="belongs to user"):
        ftp.load_program(path, TP)


class Kind(enum.Enum):
    A = 1


class Pair(dict):
    """A container that no argument holds."""


def test_what_cannot_be_saved(tmp_path: Path):
    with pytest.raises(ProgramFileError, match=r"Kind\.A.*of type Kind, cannot be saved"):
        ftp.spmd(lambda x, kind: x, TP, P()).lower(torch.ones(2), Kind.A).save(tmp_path / "program")
    step = ftp.spmd(lambda x: Slots({"a": x}), TP, P())
    with pytest.raises(ProgramFileError, match="a structure that no argument has"):
        step.lower(torch.ones(2)).save(tmp_path / "program")
    part = ftp.Lowered(step.lower(torch.ones(2))._program)
    with pytest.raises(ReportError, match="Call the step"):
        part.save(tmp_path / "program")
    assert not list(tmp_path.iterdir())


def test_the_page():
    page = (Path(__file__).resolve().parents[2] / "docs/starting.md").read_text()
    scope: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", page, re.S):
        exec(compile(block, "docs/starting.md", "exec"), scope)
