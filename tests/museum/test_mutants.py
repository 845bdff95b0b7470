"""Changed programs: none is proven that a simulation tells from the reference, and none is refused
that it does not tell.

``python -m tests.museum.test_mutants FIRST LAST`` runs these seeds and adds them to the record,
tests/results/mutants.json.
"""

import json
import sys
import time
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from ftp.certification.certificate import Certificate
from ftp.certification.checker import check
from ftp.certification.lockstep.run import RunError
from ftp.equivalence.decide import simulate
from ftp.errors import CertificateError
from tests.museum.mutants import CHANGES, mutant
from tests.museum.proven import CASES

pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")
RECORD = Path(__file__).parents[1] / "results" / "mutants.json"
NAMES = [c.name for c in CASES]


@cache
def proven(name: str) -> Certificate:
    return next(c for c in CASES if c.name == name).prove()


def outcome(certificate: Certificate) -> str:
    """``refused``: and a simulation tells it from the reference, or cannot run it. ``proven``: and
    no simulation tells it. ``wrong``: proven and told apart. ``undecided``: neither of both.
    """
    try:
        check(certificate)
        is_proven = True
    except RunError:
        return "refused"  # a deadlock, or a result that is read before it arrives
    except CertificateError as error:
        if str(error).startswith("The certificate states what no program has"):
            return "refused"  # an op does not take its changed arguments
        is_proven = False
    is_told = simulate(certificate) is not None
    if is_proven:
        return "wrong" if is_told else "proven"
    return "refused" if is_told else "undecided"


def sweep(names: list[str], seeds: range) -> tuple[Counter[str], list[str]]:
    """How many mutants came to what, by kind of change too; and those that should not be."""
    found: Counter[str] = Counter()
    bad: list[str] = []
    for seed in seeds:
        made = mutant(proven(names[seed % len(names)]), seed)
        if made is None:
            continue
        title, certificate = made
        told = outcome(certificate)
        found[told] += 1
        found[f"{title.split(' on ')[0]}: {told}"] += 1
        found["on all ranks" if "all" in title else "on one rank"] += 1
        if told in ("wrong", "undecided"):
            bad.append(f"{told}: {names[seed % len(names)]}, seed {seed}: {title}")
    return found, bad


@pytest.mark.cases_by_default(1)
@pytest.mark.parametrize("name", ["row_linear", "column_linear_sp", "ddp"])
def test_a_few_mutants(name: str):
    found, bad = sweep([name], range(10))
    assert not bad
    assert found["refused"] > found["proven"]


@pytest.mark.slow
def test_more_mutants():
    _, bad = sweep(NAMES, range(20_000, 20_130))
    assert not [b for b in bad if b.startswith("wrong")]
    # Numbers that are at most zero, as their maximum was subtracted, are so without a proof.
    assert len(bad) <= 3, bad


def test_the_record():
    """What the record says was run and found; ``test_more_mutants`` runs other seeds."""
    record = json.loads(RECORD.read_text())
    assert record["mutants"] >= 1000
    assert record["proven, and told from the reference"] == 0
    assert len(record["undecided"]) <= 2
    changes = {line.split(":")[0] for line in record["by change"]}
    assert changes == {change.__name__ for change in CHANGES}


def main(first: int, last: int) -> None:
    seconds = time.process_time()
    found, bad = sweep(NAMES, range(first, last))
    seconds = time.process_time() - seconds
    old: dict[str, Any] = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    kinds = Counter(old.get("by change", {}))
    kinds.update({k: v for k, v in found.items() if ": " in k})
    ran = ("refused", "proven", "wrong", "undecided")
    record = {
        "seeds": [*old.get("seeds", []), [first, last]],
        "programs": NAMES,
        "mutants": old.get("mutants", 0) + sum(found[k] for k in ran),
        "CPU seconds": round(old.get("CPU seconds", 0) + seconds, 1),
    }
    titles = {
        "refused": "refused",
        "proven": "proven, and not told from the reference",
        "wrong": "proven, and told from the reference",
        "on one rank": "on one rank",
        "on all ranks": "on all ranks",
    }
    record |= {title: old.get(title, 0) + found[k] for k, title in titles.items()}
    undecided = [b.removeprefix("undecided: ") for b in bad if b.startswith("undecided")]
    record["undecided"] = old.get("undecided", []) + undecided
    record["by change"] = dict(sorted(kinds.items()))
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record, indent=1), *bad, sep="\n")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]))
