"""The README's tour and the examples run, and the examples learn what one device learns."""

import importlib.util
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from own_process import run_file  # type: ignore[import-not-found]

import ftp
from ftp import P

ROOT = Path(__file__).resolve().parents[1]
TINY = [
    "--dim",
    "16",
    "--layers",
    "1",
    "--heads",
    "2",
    "--context",
    "16",
    "--batch",
    "4",
    "--corpus-bytes",
    "200000",
]
TINY += ["--eval-every", "2", "--eval-batches", "1", "--sample-bytes", "3"]


def environment() -> dict[str, str]:
    own = {k: v for k, v in os.environ.items() if k not in {"RANK", "WORLD_SIZE", "LOCAL_RANK"}}
    return own | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def python(script: str, *arguments: str, cwd: Path) -> str:
    """What the script prints; its name is relative to ``cwd``."""
    done = run_file(cwd / script, *arguments, folder=cwd, env=environment())
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def torchrun(processes: int, *arguments: str, cwd: Path) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*command, f"--nproc-per-node={processes}", *arguments],
        cwd=cwd,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def tour() -> str:
    found = re.findall(
        r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), flags=re.M | re.S
    )
    assert found, "the README has no python block"
    return found[0]


def test_the_tour_runs_as_it_stands_and_learns(tmp_path):
    (tmp_path / "tour.py").write_text(tour())
    lines = python("tour.py", cwd=tmp_path).splitlines()
    assert any("all_reduce" in line for line in lines)
    losses = [float(line) for line in lines[-5:]]
    assert losses[-1] < losses[0]


def test_the_train_step_of_the_readme(tmp_path):
    (block,) = [
        b
        for b in re.findall(
            r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), flags=re.M | re.S
        )
        if "def train_step" in b
    ]
    wide = "import torch; torch.set_default_dtype(torch.float64)"  # where roundings do not count
    plain = (
        "whole = ftp.functionalize(model)[1]; *_, here = train_step(whole, opt.init(whole),"
        " batch, ftp.random.key(0))"
    )
    shown = "print(metrics['loss'].item(), here['loss'].item())"
    script = "\n".join([wide, tour(), block, plain, shown])
    (tmp_path / "train.py").write_text(script)
    sharded, one_device = map(float, python("train.py", cwd=tmp_path).splitlines()[-1].split())
    assert sharded == pytest.approx(one_device, rel=1e-9)


def test_the_printed_program_is_what_the_readme_shows(tmp_path):
    text = (ROOT / "README.md").read_text()
    found = re.search(
        r"^```python\n([^`]*?step\.lower[^`]*?)^```\n\nprints\n\n```text\n(.*?)^```",
        text,
        flags=re.M | re.S,
    )
    assert found is not None
    code, shown = found.groups()
    (tmp_path / "mlp.py").write_text(code)
    assert python("mlp.py", cwd=tmp_path) == shown


def test_the_tour_is_about_thirty_lines():
    assert sum(bool(line.strip()) for line in tour().splitlines()) <= 32


def test_the_readme_lists_every_public_name():
    names = set(
        re.findall(
            r"`(\w+)`", (ROOT / "README.md").read_text().split("## Names")[1].split("## Limits")[0]
        )
    )
    assert {n for n in ftp.__all__ if n not in names} <= {"__version__", "errors"}


def toy_losses(output: str) -> list[list[float]]:
    return [
        [float(x) for x in m]
        for m in re.findall(r"^ *\d+ +([\d.]+) +([\d.]+)$", output, flags=re.M)
    ]


def test_toy_mlp_equals_one_device(tmp_path):
    losses = toy_losses(python(str(ROOT / "examples/toy_mlp.py"), cwd=tmp_path))
    assert len(losses) == 10
    assert all(one == pytest.approx(sharded, abs=2e-7) for one, sharded in losses)  # as printed
    assert losses[-1][0] < losses[0][0]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 3])
def test_toy_mlp_on_other_meshes(tmp_path, ranks):
    assert (
        len(
            toy_losses(
                python(
                    str(ROOT / "examples/toy_mlp.py"),
                    "--tp",
                    str(ranks),
                    "--steps",
                    "3",
                    cwd=tmp_path,
                )
            )
        )
        == 3
    )


def test_long_context_equals_one_device(tmp_path):
    small = ["--tokens", "96", "--dim", "16", "--layers", "1", "--heads", "2", "--steps", "3"]
    printed = python(str(ROOT / "examples/long_context.py"), *small, cwd=tmp_path)
    rows = [list(map(float, line.split())) for line in printed.splitlines()[1:]]
    assert len(rows) == 3 and all(one == cut for _, one, cut in rows)
    assert rows[-1][1] < rows[0][1]


@pytest.mark.dist
def test_toy_mlp_under_torchrun(tmp_path):
    printed = torchrun(2, str(ROOT / "examples/toy_mlp.py"), "--steps", "3", cwd=tmp_path)
    assert len(toy_losses(printed)) == 3


def test_diloco_crosses_replicas_in_outer_steps_alone(tmp_path):
    said = python(str(ROOT / "examples/diloco.py"), "--rounds", "1", cwd=tmp_path)
    assert "an inner step issues collectives over: {'dp': 1}" in said
    assert "an outer step issues collectives over: {'replica': 2}" in said


def test_diloco_equals_its_replicas_on_one_device():
    spec = importlib.util.spec_from_file_location("diloco", ROOT / "examples/diloco.py")
    assert spec is not None and spec.loader is not None
    diloco = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(diloco)
    opt, rounds, steps, rows = ftp.optim.from_torch(torch.optim.AdamW, lr=0.02), 2, 2, 4
    mesh = ftp.simulated_mesh((3, 2), ("replica", "dp"))
    losses, params, _ = diloco.train(mesh, 3, opt, rounds, steps, rows)

    start, velocity, stacked = diloco.start_of(3, opt)
    replicas = [diloco.tree_map(lambda t, i=i: t[i], stacked) for i in range(3)]
    feed = diloco.batches(3, rounds, steps, rows)
    for round_ in range(rounds):
        for _ in range(steps):
            x, y = next(feed)
            found = []
            for i, (own, state) in enumerate(replicas):
                grads, loss = torch.func.grad_and_value(diloco.loss_fn)(own, x[i], y[i])
                replicas[i] = opt.update(grads, state, own)
                found.append(float(loss))
        learned = [
            torch.cat([(start[k] - p).flatten() for k, p in own.items()]) for own, _ in replicas
        ]
        mean = torch.stack(learned).mean(0)
        velocity = diloco.MOMENTUM * velocity + mean
        parts = (mean + diloco.MOMENTUM * velocity).split([p.numel() for p in start.values()])
        start = {
            k: p - diloco.OUTER_LR * part.view_as(p)
            for (k, p), part in zip(start.items(), parts, strict=True)
        }
        replicas = [(dict(start), state) for _, state in replicas]
        assert losses[round_] == pytest.approx(sum(found) / 3, rel=1e-4)
    for name, p in start.items():
        torch.testing.assert_close(params[name], p, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.dist
def test_diloco_under_torchrun(tmp_path):
    said = torchrun(4, str(ROOT / "examples/diloco.py"), "--rounds", "1", cwd=tmp_path)
    assert "an outer step issues collectives over: {'replica': 2}" in said


EXAMPLE = ROOT / "examples/train_gpt.py"


@pytest.fixture
def example():
    spec = importlib.util.spec_from_file_location("train_gpt", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    threads = torch.get_num_threads()
    yield module
    torch.set_num_threads(threads)


def numbers(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def of(records: list[dict], name: str) -> list[float]:
    return [r[name] for r in records if name in r]


@pytest.fixture
def in_float64():
    """Where roundings, of which each machine's kernels make others, do not count."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


IN_FLOAT64 = """
import runpy, sys, torch

torch.set_default_dtype(torch.float64)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_train_gpt_does_not_depend_on_the_mesh(tmp_path, example, in_float64):
    """From the first step on, or from a checkpoint that another number of ranks wrote."""
    call = [*TINY, "--steps", "4", "--save-every", "2", "--dropout", "0.1"]
    example.main([*call, "--out", str(tmp_path / "four")])
    shutil.copytree(tmp_path / "four", tmp_path / "moved")
    shutil.rmtree(ftp.checkpoints(tmp_path / "moved/checkpoints")[-1].folder)
    example.main([*call, "--out", str(tmp_path / "moved"), "--dp", "1", "--tp", "3"])
    for name in ("loss", "val_loss", "norm", "lr"):
        torch.testing.assert_close(
            of(numbers(tmp_path / "moved"), name),
            of(numbers(tmp_path / "four"), name),
            rtol=1e-9,
            atol=0,
        )
    example.main([*call, "--out", str(tmp_path / "one"), "--dp", "1", "--tp", "1"])
    four, one = numbers(tmp_path / "four"), numbers(tmp_path / "one")
    assert [r["step"] for r in four if "val_loss" in r] == [0, 2, 4] and len(of(four, "loss")) == 4
    for name in ("loss", "val_loss", "norm", "lr"):
        torch.testing.assert_close(of(four, name), of(one, name), rtol=1e-9, atol=0)
    val = of(four, "val_loss")
    assert val[-1] < val[0]
    assert (tmp_path / "four/loss.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "four/sample.txt").read_text().startswith("def ")


@pytest.mark.slow
def test_train_gpt_goes_on_where_it_was_stopped(tmp_path, example, monkeypatch, capsys):
    """A signal in the third step, a disk that is full in the fifth: the same command goes on,
    and the losses are those of one run.
    """
    call = [*TINY, "--steps", "6", "--save-every", "2", "--dropout", "0.1"]
    example.main([*call, "--out", str(tmp_path / "whole")])
    call += ["--out", str(tmp_path / "parts")]
    draw, drawn = example.batch_at, []

    def signalled(*args, **kwargs):
        drawn.append(1)
        if len(drawn) == 1 + 3:  # one batch of held-out text, then the third step
            signal.raise_signal(signal.SIGTERM)
        return draw(*args, **kwargs)

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(example, "batch_at", signalled)
    example.main(call)
    assert signal.getsignal(signal.SIGTERM) is before
    assert [r["step"] for r in numbers(tmp_path / "parts") if "loss" in r] == [1, 2, 3]
    assert "stopped after step 3" in capsys.readouterr().out
    assert [c.step for c in ftp.checkpoints(tmp_path / "parts/checkpoints")] == [2, 3]

    monkeypatch.setattr(example, "batch_at", draw)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, hard))
    try:
        with pytest.raises(ftp.errors.CheckpointError, match="File too large"):
            example.main(call)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [c.step for c in ftp.checkpoints(tmp_path / "parts/checkpoints")] == [2, 3]

    example.main(call)
    assert numbers(tmp_path / "parts") == numbers(tmp_path / "whole")
    assert (tmp_path / "parts/sample.txt").read_bytes() == (
        tmp_path / "whole/sample.txt"
    ).read_bytes()


def test_train_gpt_samples_as_one_device_does(example):
    """Past the end of its context, by two programs; the reference is torch's, with the whole
    window for every byte.
    """
    torch.manual_seed(0)
    context, count, prompt = 8, 20, b"def "
    model = example.GPT(12, 2, 3, context, 0.0).double().eval()
    fn, params = ftp.functionalize(model)
    mesh, traces = ftp.simulated_mesh((2, 2), ("dp", "tp")), []
    step = example.make_generate_step(fn, 0.5)

    def traced(*args):
        traces.append(1)
        return step(*args)

    specs = ftp.plan(params, example.SPECS)
    step_on_mesh = ftp.spmd(
        traced,
        mesh,
        (specs, example.CACHE_SPEC, *[P()] * 4),
        (example.CACHE_SPEC, P()),
        donate=(1,),
    )
    cache = [(torch.zeros(1, 3, context, 4, dtype=torch.float64),) * 2 for _ in range(2)]
    cache = ftp.device_put(cache, mesh, example.CACHE_SPEC)
    options = {"count": count, "context": context, "seed": 1, "device": "cpu"}
    text = example.sample(
        step_on_mesh, ftp.device_put(params, mesh, specs), cache, prompt, **options
    )
    assert len(traces) == 2

    expected, start, key = list(prompt), 0, ftp.random.key(1)
    for i in range(count):
        start = start if len(expected) - start <= context else len(expected) - context // 2
        logits = model(torch.tensor([expected[start:]]))[:, -1] / 0.5
        expected.append(int(ftp.random.categorical(ftp.random.fold_in(key, i), logits)))
    assert text == bytes(expected)


@pytest.mark.slow
@pytest.mark.dist
def test_train_gpt_under_torchrun_has_the_simulated_losses(tmp_path, example, in_float64):
    call = [*TINY, "--steps", "3"]
    example.main([*call, "--out", str(tmp_path / "simulated")])
    (tmp_path / "in_float64.py").write_text(IN_FLOAT64)
    run = [str(tmp_path / "in_float64.py"), str(EXAMPLE), *call]
    torchrun(4, *run, "--out", str(tmp_path / "processes"), cwd=tmp_path)
    here, there = numbers(tmp_path / "simulated"), numbers(tmp_path / "processes")
    for name in ("loss", "val_loss"):
        torch.testing.assert_close(of(there, name), of(here, name), rtol=1e-9, atol=0)


KILLED = """
import os, signal, sys
sys.path.insert(0, {folder!r})
import train_gpt

draw, drawn = train_gpt.batch_at, []

def striking(*args, **kwargs):
    drawn.append(1)
    restarts = os.environ["TORCHELASTIC_RESTART_COUNT"]
    if os.environ["RANK"] == "1" and restarts == "0" and len(drawn) == 1 + 4:
        os.kill(os.getpid(), signal.{signal})
    return draw(*args, **kwargs)

train_gpt.batch_at = striking
train_gpt.main(sys.argv[1:])
"""


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("kind", ["SIGKILL", "SIGTERM"])
def test_train_gpt_restarts_by_itself(tmp_path, kind):
    """A rank killed in the fourth step, or given a signal that all stop for; the losses are
    those of a run where nothing happens.
    """
    call = [*TINY, "--steps", "6", "--save-every", "2", "--dropout", "0.1"]
    torchrun(2, str(EXAMPLE), *call, "--out", str(tmp_path / "whole"), cwd=tmp_path)
    (tmp_path / "killed.py").write_text(KILLED.format(folder=str(EXAMPLE.parent), signal=kind))
    torchrun(
        2,
        "--max-restarts=1",
        str(tmp_path / "killed.py"),
        *call,
        "--out",
        str(tmp_path / "parts"),
        cwd=tmp_path,
    )
    if kind == "SIGTERM":
        assert [c.step for c in ftp.checkpoints(tmp_path / "parts/checkpoints")] == [2, 4]
        assert len(of(numbers(tmp_path / "parts"), "loss")) == 4
        torchrun(2, str(EXAMPLE), *call, "--out", str(tmp_path / "parts"), cwd=tmp_path)
    assert numbers(tmp_path / "parts") == numbers(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.dist
def test_train_moe_under_torchrun_has_the_simulated_losses(tmp_path):
    """Every token goes to two experts of each layer."""
    pytest.importorskip("transformers")
    example, found = str(ROOT / "examples/train_moe.py"), []
    options = ["--steps", "3", "--dim", "16", "--batch", "4", "--context", "16"]
    for run, name in ((python, "simulated"), (lambda *a, **k: torchrun(4, *a, **k), "torchrun")):
        run(example, *options, "--out", name, cwd=tmp_path)
        found.append(json.loads((tmp_path / name / "load.json").read_text()))
    here, there = found
    assert here["loss"] == pytest.approx(there["loss"], rel=1e-5)
    assert here["loss"][-1] < here["loss"][0]
    assert all(sum(layer) == 4 * 16 * 2 for step in here["load"] for layer in step)


@pytest.mark.slow
def test_a_pipeline_goes_on_with_tensor_parallelism(tmp_path):
    """transformers' Llama in two stages, then on another mesh: the losses of one run."""
    pytest.importorskip("transformers", reason="of the extra 'models'")
    path = ROOT / "examples/train_pipeline.py"
    spec = importlib.util.spec_from_file_location("train_pipeline", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    whole = module.main(["--steps", "4", "--out", str(tmp_path / "whole")])
    first = module.main(["--steps", "2", "--out", str(tmp_path / "parts")])
    rest = module.main(["--steps", "4", "--mesh", "dp,tp", "--out", str(tmp_path / "parts")])
    torch.testing.assert_close(first + rest, whole, rtol=1e-4, atol=1e-4)
    assert whole[-1] < whole[0]


@pytest.mark.slow
@pytest.mark.dist
def test_a_pipeline_under_torchrun_goes_on_with_tensor_parallelism(tmp_path):
    """Four processes in two stages, then on (dp 2, tp 2): the losses of one simulated run."""
    pytest.importorskip("transformers", reason="of the extra 'models'")
    example = str(ROOT / "examples/train_pipeline.py")
    whole = python(example, "--steps", "4", "--out", "whole", cwd=tmp_path)
    parts = torchrun(4, example, "--steps", "2", "--out", "parts", cwd=tmp_path)
    parts += torchrun(4, example, "--steps", "4", "--mesh", "dp,tp", "--out", "parts", cwd=tmp_path)
    there, here = (
        [float(loss) for loss in re.findall(r"step \d+: loss (\S+)", said)]
        for said in (parts, whole)
    )
    assert len(here) == 4 and here[-1] < here[0]
    assert there == pytest.approx(here, abs=2e-4)
