"""Hand-written parallel programs are proven, real bugs refused on their line."""

import pytest

from ftp.errors import CertificateError
from tests.museum.bugs import BUGS, Bug
from tests.museum.proven import CASES, Case

pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_proven(case: Case):
    case.prove()


@pytest.mark.parametrize("bug", BUGS, ids=lambda b: b.thread)
def test_refused_on_its_line(bug: Bug):
    with pytest.raises(CertificateError) as refused:
        bug.case(is_mended=False).prove()
    error = refused.value
    assert error.output is not None and error.inputs is not None
    assert "# BUG" in (error.line or ""), str(error)


@pytest.mark.parametrize("bug", BUGS, ids=lambda b: b.thread)
def test_mended_form_is_proven(bug: Bug):
    bug.case(is_mended=True).prove()


def test_threads():
    assert len({b.thread.split(" ")[0] for b in BUGS}) >= 15
