"""Hand-written parallel programs are proven, real bugs refused on their line.

``python -m tests.museum.test_museum`` writes the CPU seconds of each to tests/results/museum.json,
and the table to docs/prove.md.
"""

import json
import re
import time
from contextlib import suppress
from pathlib import Path

import pytest
from few_or_many import slow_after

from ftp.errors import CertificateError
from tests.museum.bugs import BUGS, Bug
from tests.museum.proven import CASES, Case

pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")


@pytest.mark.cases_by_default(2)
@pytest.mark.parametrize("case", slow_after(6, CASES), ids=lambda c: c.name)
def test_proven(case: Case):
    case.prove()


@pytest.mark.parametrize("bug", BUGS, ids=lambda b: b.thread)
def test_refused_on_its_line(bug: Bug):
    with pytest.raises(CertificateError) as refused:
        bug.case(is_mended=False).prove()
    error = refused.value
    assert error.output is not None and error.inputs is not None
    assert "# BUG" in (error.line or ""), str(error)


@pytest.mark.slow
def test_the_line_is_found_whatever_is_drawn():
    """A draw that turned a ReLU off on one rank named another line, one time in eight."""
    (bug,) = (b for b in BUGS if b.thread == "pytorch/torchtitan#4054")
    for _ in range(12):
        test_refused_on_its_line(bug)


@pytest.mark.cases_by_default(6)
@pytest.mark.parametrize("bug", BUGS, ids=lambda b: b.thread)
def test_mended_form_is_proven(bug: Bug):
    bug.case(is_mended=True).prove()


RECORD = Path(__file__).parents[1] / "results" / "museum.json"
PAGE = Path(__file__).parents[2] / "docs" / "prove.md"
# Their text could not be read anywhere; the page says why, and what stands in their place.
UNREAD = "pytorch/torchtitan#4332, and findings 6, 12 and 13 of NVIDIA/Megatron-LM#7452"
IN_THEIR_PLACE = ("pytorch/torchtitan#3822", "NVIDIA/Megatron-LM#1699")


def test_the_record_and_the_page():
    record = json.loads(RECORD.read_text())
    assert list(record) == [c.name for c in CASES] + [b.thread for b in BUGS]
    assert table(record) in PAGE.read_text()
    (unread,) = (part for part in PAGE.read_text().split("\n\n") if UNREAD in part)
    threads = {b.thread.split(" ")[0] for b in BUGS}
    assert all(t in unread and t in threads for t in IN_THEIR_PLACE)
    findings = {
        b.thread.split(" ")[1] for b in BUGS if b.thread.startswith("NVIDIA/Megatron-LM#7452")
    }
    assert findings == {f"({n})" for n in (1, 2, 3, 4, 5, 7, 8, 9, 10, 11)}
    named = {f"pytorch/torchtitan#{n}" for n in (1805, 2106, 2217, 2416, 3412, 4054, 4154, 4245)}
    named |= {"NVIDIA/Megatron-LM#7452", "pytorch/pytorch#160285", "pytorch/pytorch#172932"}
    assert named <= threads and len(threads) >= 15


def table(record: dict[str, list[float]]) -> str:
    rows = ["| thread | what was wrong | refused in | mended, proven in |", "|---|---|---|---|"]
    for bug in BUGS:
        what = re.sub(r"\s+", " ", bug.make.__doc__ or "").strip().rstrip(".")
        what = what.replace("``", "`")
        refused, mended = record[bug.thread]
        rows.append(f"| {bug.thread} | {what} | {refused:.2f} s | {mended:.2f} s |")
    return "\n".join(rows) + "\n"


def main() -> None:
    def seconds(case: Case) -> float:
        start = time.process_time()
        with suppress(CertificateError):
            case.prove()
        return round(time.process_time() - start, 2)

    seconds(CASES[0])
    record = {case.name: [seconds(case)] for case in CASES}
    record |= {b.thread: [seconds(b.case(is_mended=m)) for m in (False, True)] for b in BUGS}
    RECORD.write_text(json.dumps(record, indent=0) + "\n")
    head, *_ = table(record).splitlines()
    page, rest = PAGE.read_text().split(head + "\n")
    after = rest[len(rest.split("\n\n")[0]) + 1 :]
    PAGE.write_text(page + table(record) + after)


if __name__ == "__main__":
    main()
