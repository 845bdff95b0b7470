"""The README's tour and the examples run, and the examples learn what one device learns."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
TINY = ["--dim", "16", "--layers", "1", "--heads", "2", "--context", "16", "--batch", "4", "--corpus-bytes", "200000"]
TINY += ["--eval-every", "2", "--eval-batches", "1", "--sample-bytes", "3"]


def python(*arguments: str, cwd: Path) -> str:
    environment = {k: v for k, v in os.environ.items() if k not in {"RANK", "WORLD_SIZE", "LOCAL_RANK"}}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def torchrun(processes: int, *arguments: str, cwd: Path) -> str:
    return python("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", *arguments, cwd=cwd)


def tour() -> str:
    found = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), flags=re.M | re.S)
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
        b for b in re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), flags=re.M | re.S) if "def train_step" in b
    ]
    plain = "whole = ftp.functionalize(model)[1]; *_, here = train_step(whole, opt.init(whole), batch, ftp.random.key(0))"
    script = "\n".join([tour(), block, plain, "print(metrics['loss'].item(), here['loss'].item())"])
    (tmp_path / "train.py").write_text(script)
    sharded, one_device = map(float, python("train.py", cwd=tmp_path).splitlines()[-1].split())
    assert sharded == pytest.approx(one_device, rel=1e-5)


def test_the_printed_program_is_what_the_readme_shows(tmp_path):
    text = (ROOT / "README.md").read_text()
    found = re.search(r"^```python\n([^`]*?step\.lower[^`]*?)^```\n\nprints\n\n```text\n(.*?)^```", text, flags=re.M | re.S)
    assert found is not None
    code, shown = found.groups()
    (tmp_path / "mlp.py").write_text(code)
    assert python("mlp.py", cwd=tmp_path) == shown


def test_the_tour_is_about_thirty_lines():
    assert sum(bool(line.strip()) for line in tour().splitlines()) <= 32


def test_the_readme_lists_every_public_name():
    import ftp

    names = set(re.findall(r"`(\w+)`", (ROOT / "README.md").read_text().split("## Names")[1].split("## Limits")[0]))
    assert {n for n in ftp.__all__ if n not in names} <= {"__version__", "errors"}


def toy_losses(output: str) -> list[list[float]]:
    return [[float(x) for x in m] for m in re.findall(r"^ *\d+ +([\d.]+) +([\d.]+)$", output, flags=re.M)]


def test_toy_mlp_equals_one_device(tmp_path):
    losses = toy_losses(python(str(ROOT / "examples/toy_mlp.py"), cwd=tmp_path))
    assert len(losses) == 10
    assert all(one == pytest.approx(sharded, rel=1e-5) for one, sharded in losses)
    assert losses[-1][0] < losses[0][0]


@pytest.mark.parametrize("ranks", [1, 3])
def test_toy_mlp_on_other_meshes(tmp_path, ranks):
    assert len(toy_losses(python(str(ROOT / "examples/toy_mlp.py"), "--tp", str(ranks), "--steps", "3", cwd=tmp_path))) == 3


@pytest.mark.dist
def test_toy_mlp_under_torchrun(tmp_path):
    assert len(toy_losses(torchrun(2, str(ROOT / "examples/toy_mlp.py"), cwd=tmp_path))) == 10


def train_gpt(tmp_path: Path, name: str, *arguments: str, processes: int = 0) -> dict:
    call = [str(ROOT / "examples/train_gpt.py"), *TINY, "--out", str(tmp_path / name), *arguments]
    (torchrun(processes, *call, cwd=tmp_path) if processes else python(*call, cwd=tmp_path))
    assert (tmp_path / name / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / name / "sample.txt").read_text().startswith("def ")
    return json.loads((tmp_path / name / "losses.json").read_text())


def test_train_gpt_does_not_depend_on_the_mesh(tmp_path):
    here = train_gpt(tmp_path, "simulated", "--steps", "4")
    one = train_gpt(tmp_path, "one", "--steps", "4", "--dp", "1", "--tp", "1")
    assert here["mesh"] == {"dp": 2, "tp": 2, "simulated": True}
    assert len(here["train"]) == 4 and [step for step, _ in here["val"]] == [0, 2, 4]
    torch.testing.assert_close(here["train"], one["train"], rtol=1e-4, atol=0)
    assert here["val"][-1][1] < here["val"][0][1]


@pytest.mark.dist
def test_train_gpt_under_torchrun_has_the_simulated_losses(tmp_path):
    here = train_gpt(tmp_path, "simulated", "--steps", "3")
    there = train_gpt(tmp_path, "processes", "--steps", "3", processes=4)
    assert there["mesh"] == {"dp": 2, "tp": 2, "simulated": False}
    torch.testing.assert_close(there["train"], here["train"], rtol=1e-4, atol=0)
    torch.testing.assert_close([x for _, x in there["val"]], [x for _, x in here["val"]], rtol=1e-4, atol=0)
