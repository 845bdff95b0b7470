"""``@pytest.mark.cases_by_default(n)``: of a test's cases n run by default, the others are slow."""

import itertools
from typing import Any

import pytest


def mark_cases(items: list[Any]) -> None:
    """Marks as slow all cases of a test but n, the first of each of n equal parts."""
    for _, group in itertools.groupby(items, lambda item: item.nodeid.partition("[")[0]):
        cases = [case for case in group if not case.get_closest_marker("slow")]
        mark = cases and cases[0].get_closest_marker("cases_by_default")
        if mark:
            kept = spread(len(cases), *mark.args)
            for i in set(range(len(cases))) - kept:
                cases[i].add_marker(pytest.mark.slow)


def spread(count: int, kept: int) -> set[int]:
    """The first of each of ``kept`` equal parts of ``range(count)``.

    >>> sorted(spread(10, 3)), spread(2, 5)
    ([0, 3, 6], {0, 1})
    """
    return {i * count // kept for i in range(kept)} if kept < count else set(range(count))
