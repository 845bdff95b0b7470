"""Plans on links of unequal speed: what a link carries is what the records say, and plans take time
in the order that was estimated.
"""

import itertools
import json

import pytest
from plan_order import CONFIGS, LINKS, RESULTS, in_order, measured, pairs

pytestmark = pytest.mark.dist


@pytest.mark.slow
def test_links_carry_the_bytes_of_the_records():
    """Each axis' link sends, collective by collective, what a record says that a rank sends, and a
    step takes no less time than its links do.
    """
    names = ("dp over both", "ZeRO over tp", "TP over dp")
    rows = measured("mlp", "slow dp", 1, names)
    assert [row["plan"] for row in rows] == list(names)
    for row in rows:
        assert {axes: sorted(sizes) for axes, sizes in row["sent"].items()} == {
            axes: sorted(sizes) for axes, sizes in row["collectives"].items()
        }
        least = 0.0
        for axes, sizes in row["sent"].items():
            link = LINKS["slow dp"]["dp" if "dp" in axes else "tp"]
            least += sum(link.latency + nbytes / link.bandwidth for nbytes in sizes)
        assert least <= min(row["seconds"])
        assert least <= row["estimated"] * (1 + 1e-9)


@pytest.mark.slow
def test_plans_take_time_in_the_estimated_order():
    found = []
    for model, link in itertools.product(CONFIGS, LINKS):
        rows = measured(model, link)
        assert all(
            sum(row["sent"][axes]) == sum(sizes)
            for row in rows
            for axes, sizes in row["collectives"].items()
        )
        found += pairs(rows)
    assert len(found) >= 20
    wrong = [
        (a["model"], a["links"], a["plan"], b["plan"]) for a, b in found if not in_order((a, b))
    ]
    assert not wrong, wrong


def test_the_results_that_are_kept():
    kept = json.loads(RESULTS.read_text())
    assert kept["in order"] == kept["pairs"] >= 20
    estimated = {(r["model"], r["links"], r["plan"]): r["estimated"] for r in kept["plans"]}
    for model, axis in itertools.product(CONFIGS, ("dp", "tp")):
        slow, fast = f"slow {axis}", f"slow {'tp' if axis == 'dp' else 'dp'}"
        plan = f"ZeRO over {axis}"
        assert estimated[model, fast, plan] < estimated[model, slow, plan]
