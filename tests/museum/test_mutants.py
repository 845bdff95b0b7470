"""Changed programs: none is proven that a simulation tells from the reference."""

from collections import Counter
from functools import cache

import pytest

from ftp.certification.certificate import Certificate
from ftp.certification.checker import check
from ftp.equivalence.decide import simulate
from ftp.errors import CertificateError
from tests.museum.mutants import mutant
from tests.museum.proven import CASES

pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")


@cache
def proven(name: str) -> Certificate:
    return next(c for c in CASES if c.name == name).prove()


def outcome(certificate: Certificate) -> str:
    """``refused``, ``proven``, or ``wrong``: proven though a simulation tells it apart."""
    try:
        check(certificate)
    except CertificateError:
        return "refused"
    except Exception as e:  # an op that does not take its changed arguments
        return f"refused by {type(e).__name__}"
    return "proven" if simulate(certificate) is None else "wrong"


def sweep(names: list[str], seeds: range) -> Counter[str]:
    found: Counter[str] = Counter()
    for seed in seeds:
        made = mutant(proven(names[seed % len(names)]), seed)
        if made is None:
            continue
        title, certificate = made
        told = outcome(certificate)
        assert told != "wrong", f"{names[seed % len(names)]}, seed {seed}: {title}"
        found[told.split(" by ")[0]] += 1
    return found


@pytest.mark.parametrize("name", ["row_linear", "column_linear_sp", "ddp"])
def test_a_few_mutants(name: str):
    found = sweep([name], range(24))
    assert found["refused"] > found["proven"]


@pytest.mark.slow
def test_a_thousand_mutants():
    names = [c.name for c in CASES]
    found = sweep(names, range(1600))
    assert sum(found.values()) >= 1000
