"""PyTorch's operator database, sharded at random: every case right, or refused with an error
that says why.
"""

import json
import statistics
import warnings
from pathlib import Path

import op_shares
import op_sweep
import pytest
import torch
from op_sweep import Outcome, cases, op_names, run_case, summary, sweep

from ftp.__main__ import OpRow, main, rows
from ftp.rules.own import RULES
from ftp.rules.proof.case import call_of
from ftp.rules.proof.discover import discover
from ftp.rules.registry import make

RESULTS = Path(__file__).parent.parent / "results" / "ops.json"
SHARES = Path(__file__).parent.parent / "results" / "op_shares.json"
FINE = ("right", "on a copy", "refused", "assumed")
EVERY = 45  # of the ops, for the subset that runs by default


def _report(outcomes: list[Outcome]) -> str:
    counts = summary(outcomes)
    judged = sum(n for status, n in counts.items() if status != "skipped")
    shares = ", ".join(
        f"{n} {status} ({100 * n / judged:.1f} %)"
        for status, n in counts.most_common()
        if status != "skipped"
    )
    return (
        f"{judged} cases of {len({o.op for o in outcomes})} ops: {shares}; {counts['skipped']}"
        " skipped"
    )


def _failures(outcomes: list[Outcome]) -> list[str]:
    bad = [o for o in outcomes if o.status not in (*FINE, "skipped")]
    return [
        f"{o.op}, sample {o.sample}, mesh {o.mesh}, {o.specs}: {o.status}: {o.message[:300]}"
        for o in bad
    ]


@pytest.mark.filterwarnings("ignore")
def test_a_part_of_the_database(capsys: pytest.CaptureFixture[str]):
    torch.set_num_threads(1)
    outcomes = [run_case(*case) for case in cases(op_names()[::EVERY], count=1, every_mesh=False)]
    with capsys.disabled():
        print(f"\n{_report(outcomes)}")
    assert not _failures(outcomes)
    refused = {o.op for o in outcomes if o.status == "refused"}
    assert refused <= set(json.loads(RESULTS.read_text())["refused"]), (
        "more ops are refused than the whole database's results name"
    )
    assert summary(outcomes)["right"] > len(outcomes) / 2


@pytest.mark.cases_by_default(1)
@pytest.mark.parametrize("name", ["_segment_reduce.lengths", "masked.prod"])
@pytest.mark.filterwarnings("ignore")
def test_ops_of_which_a_case_was_wrong(name: str):
    """Cut over two axes at once, with gradients."""
    outcomes = [run_case(name, i, sample, "2x2") for i, sample in op_sweep.samples(name, 4)]
    assert not _failures(outcomes) and summary(outcomes)["right"] == len(outcomes) > 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_whole_database(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    outcomes = sweep(op_names(), tmp_path / "ops.jsonl", count=3, every_mesh=True)
    write(outcomes)
    with capsys.disabled():
        print(f"\n{_report(outcomes)}")
    assert not _failures(outcomes)
    counts = summary(outcomes)
    assert counts["right"] > 0.95 * (sum(counts.values()) - counts["skipped"])


def test_the_work_of_a_part_of_the_database_is_divided():
    found = op_shares.shares(op_names()[::60], count=1)
    assert len(found) > 5
    assert statistics.median(found.values()) <= 0.55
    above = json.loads(SHARES.read_text())["above"]
    assert {name for name, share in found.items() if share > 0.55} <= set(above), (
        "ops are divided less than the reviewed results say"
    )


@pytest.mark.slow
def test_the_work_of_the_database_is_divided(capsys: pytest.CaptureFixture[str]):
    found = op_shares.shares(op_names(), count=2)
    write_shares(found)
    median = statistics.median(found.values())
    with capsys.disabled():
        print(
            f"\n{len(found)} ops cut in two: median share {median:.3f},"
            f" {sum(s <= 0.55 for s in found.values())} at most 0.55"
        )
    assert median <= 0.55


def write_shares(found: dict[str, float], path: Path = SHARES) -> None:
    table = {
        "torch": torch.__version__.split("+")[0],
        "ops": len(found),
        "median": round(statistics.median(found.values()), 4),
        "at most 0.55": sum(s <= 0.55 for s in found.values()),
        "above": {name: round(s, 3) for name, s in sorted(found.items()) if s > 0.55},
    }
    path.write_text(json.dumps(table, indent=1) + "\n")


def write(outcomes: list[Outcome], path: Path = RESULTS) -> None:
    """Counts by status and by mesh, and which ops were replicated or ever refused."""
    judged = [o for o in outcomes if o.status != "skipped"]
    table = {
        "torch": torch.__version__.split("+")[0],
        "ops": len({o.op for o in judged}),
        "cases": len(judged),
        "counts": dict(summary(judged).most_common()),
        "by mesh": {
            mesh: dict(summary(o for o in judged if o.mesh == mesh).most_common())
            for mesh in op_sweep.MESHES
        },
        "replicated": sorted({op for o in judged for op in o.replicated}),
        "on a copy": sorted({o.op for o in judged if o.status == "on a copy"}),
        "refused": sorted({o.op for o in judged if o.status == "refused"}),
        "failed": sorted({o.op for o in judged if o.status not in FINE}),
    }
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(table, indent=1) + "\n")


def test_the_sweep_finds_a_wrong_rule(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(RULES, torch.ops.aten.cumsum.default, make("a b c -> a b c"))
    monkeypatch.setattr(op_sweep, "draw_spec", lambda draw, t, axes: op_sweep.P(*axes))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outcomes = [
            run_case("cumsum", i, s, "2")
            for i, s in op_sweep.samples("cumsum", 24)
            if s.input.ndim == 3
        ]
    assert any(o.status == "wrong" for o in outcomes), outcomes


def test_the_table_of_ops(capsys: pytest.CaptureFixture[str]):
    assert main(["ops", "aten.transpose.int", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [
        {
            "op": "aten.transpose.int",
            "rule": "i j k -> j i k, such as for (2, 3, 5)",
            "source": "rule",
            "proven": True,
        }
    ]
    assert main(["ops", "aten.mm.default"]) == 0
    out = capsys.readouterr().out
    assert "m k, k n -> m n {k}" in out
    assert "1 of 1 proven" in out
    assert main(["ops", "no such op"]) == 1
    assert capsys.readouterr().err == "No op's name has 'no such op' in it.\n"


@pytest.mark.slow
def test_the_table_has_what_was_found_by_trial(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("FTP_CACHE", str(tmp_path))
    x = torch.randn(6, 4)
    op = torch.ops.aten.special_hermite_polynomial_h.n_scalar
    found = discover(call_of(op, (x, 2), {}, (x,)))
    (row,) = rows(str(op))
    assert row == OpRow(str(op), f"{found.rule}, found by trial", "discovered", True)
    assert rows("aten.nonzero.default") == [OpRow("aten.nonzero.default", "", "replicated", False)]


def test_what_was_proven_with_another_torch_is_not_proven(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    assert not rows("aten.mm.default")[0].proven


def test_a_worker_that_dies_costs_one_case(tmp_path: Path):
    out = tmp_path / "out.jsonl"
    out.write_text(
        '{"begin": {"op": "add", "sample": 0, "mesh": "2"}}\n{"ended": "crashed", "code": -11}\n'
        '{"begin": {"op": "add", "sample": 1, "mesh": "3"}}\n'
        '{"op": "add", "sample": 1, "mesh": "3", "status": "right", "message": "", "specs": "",'
        ' "replicated": [], "seconds": 0.1}\n'
    )
    assert [(o.sample, o.status) for o in op_sweep.read(out)] == [(0, "crashed"), (1, "right")]
