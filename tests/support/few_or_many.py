"""Tests of few examples or cases by default, and of many among the slow tests."""

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

LOOSE = settings(
    print_blob=False, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


def few_or_many(
    *strategies: Any, few: int, many: int, **named: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """`hypothesis.given`, as two tests of one body: ``few`` examples are drawn by default, ``many``
    in a slow test.
    """

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        tests = {
            count: settings(LOOSE, max_examples=count)(given(*strategies, **named)(body))
            for count in (few, many)
        }
        signature = inspect.signature(tests[few])  # the body's, without what is drawn
        examples = inspect.Parameter("examples", inspect.Parameter.KEYWORD_ONLY)

        @pytest.mark.parametrize("examples", [few, pytest.param(many, marks=pytest.mark.slow)])
        @functools.wraps(body)
        def test(examples: int, **arguments: Any) -> None:
            tests[examples](**arguments)

        test.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[*signature.parameters.values(), examples]
        )
        return test

    return decorate


def slow_unless(kept: Callable[..., bool], cases: Iterable[Any]) -> list[Any]:
    """A test's parameters, of which those that are not ``kept`` run among the slow tests.

    >>> [getattr(case, "marks", "by default") for case in slow_unless(lambda n: n < 2, [1])]
    ['by default']
    """
    rows = [(case, case if isinstance(case, tuple) else (case,)) for case in cases]
    return [
        case if kept(*row) else pytest.param(*row, marks=pytest.mark.slow) for case, row in rows
    ]


def slow_after(few: int, cases: Iterable[Any]) -> list[Any]:
    """A test's parameters, of which those after the first ``few`` run among the slow tests.

    >>> [getattr(case, "marks", "by default") for case in slow_after(1, "a")]
    ['by default']
    """
    rows = list(cases)
    return [*rows[:few], *slow_unless(lambda *row: False, rows[few:])]
