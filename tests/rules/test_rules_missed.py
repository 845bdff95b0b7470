"""Placements that hold, found by trying them all, and that no rule states: each is in a reviewed
file with the reason it is left.
"""

import json
from pathlib import Path

import pytest
import torch
from op_calls import ELSEWHERE, NAMESPACES, missed
from strategies import samples
from torch._ops import OpOverload

from ftp.rules.own import RULES
from ftp.rules.proof.sandbox import Ended, apart
from ftp.rules.registry import make

REVIEWED = Path(__file__).parent.parent / "results" / "rules_missed.json"
OPS = sorted((op for op in set(RULES) - ELSEWHERE if op.namespace in NAMESPACES), key=str)
EVERY = 16  # of the ops, for the subset that runs by default


def new_misses(ops: list[OpOverload]) -> list[str]:
    reviewed = json.loads(REVIEWED.read_text())
    found = []
    for op in ops:
        answer = apart(lambda op=op: missed(op, samples(op)), cpu_seconds=60, seconds=180)
        if isinstance(answer, Ended):
            if str(op) not in reviewed["not tried"]:
                found.append(f"{op}: {answer.how}")
            continue
        known = reviewed["missed"].get(str(op), {}).get("placements", {})
        found += [
            f"{op}: {placement} for {shapes}"
            for placement, shapes in answer.items()
            if placement not in known
        ]
    return found


def test_no_new_placement_is_missed_in_a_part_of_the_registry():
    assert not new_misses(OPS[::EVERY])


@pytest.mark.slow
def test_no_new_placement_is_missed():
    assert not new_misses(OPS)


def test_every_miss_has_a_reason():
    reviewed = json.loads(REVIEWED.read_text())
    names = {str(op) for op in RULES}
    assert all(
        op in names and entry["placements"] and len(entry["reason"]) > 20
        for op, entry in reviewed["missed"].items()
    )
    assert all(op in names and reason for op, reason in reviewed["not tried"].items())


def test_a_rule_that_states_too_little_is_seen(monkeypatch: pytest.MonkeyPatch):
    mm = torch.ops.aten.mm.default
    monkeypatch.setitem(RULES, mm, make("m [k], [k] [n] -> m [n]", linear=[(0,), (1,)]))
    assert [line.split(" for ")[0] for line in new_misses([mm])] == [
        "aten.mm.default: R, S(1) -> S(1)",
        "aten.mm.default: S(1), S(0) -> P(sum)",
    ]
