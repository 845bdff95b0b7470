"""A call after ``lower`` traces its function, and takes the report's plan if the trace is equal."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from few_or_many import few_or_many
from programs import AXES, Drawn, programs

import ftp
from ftp import P
from ftp.planning import prepare

MESH = ftp.simulated_mesh((2,), ("tp",))
X = torch.linspace(-2, 3, 24, dtype=torch.float64).view(4, 6)


@few_or_many(programs(gradients=False, longest=14), few=6, many=300)
def test_the_program_is_that_of_a_call_alone(drawn: Drawn):
    def step() -> Any:
        return ftp.spmd(
            drawn.function,
            ftp.simulated_mesh(drawn.mesh, AXES[: len(drawn.mesh)]),
            tuple(i.spec for i in drawn.inputs),
            drawn.out_specs,
        )

    alone, reported = step(), step()
    lowered = reported.lower(*drawn.values)
    due = drawn.function(*drawn.values)
    for made in (alone, reported):
        found = made(*drawn.values)
        torch.testing.assert_close(found, due, rtol=1e-9, atol=1e-9, check_stride=False)
        program = made._known(*drawn.values).program
        assert program.fingerprint == lowered._program.fingerprint


class Scaled:
    """A function whose code depends on an attribute."""

    def __init__(self) -> None:
        self.factor = 1.0

    def __call__(self, x: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
        return (x * scale * self.factor).sin().sum(0)


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One item for each plan that is made."""
    made: list[int] = []
    plan = prepare.plan_prepared
    monkeypatch.setattr(
        prepare, "plan_prepared", lambda *args, **options: made.append(1) or plan(*args, **options)
    )
    return made


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_one_plan(device: str, plans: list[int]):
    step = ftp.spmd(Scaled(), MESH, P("tp"), P())
    step.lower(X.to(device))
    for _ in range(2):
        torch.testing.assert_close(step(X), (X * 2).sin().sum(0))
    assert len(plans) == 1


def _three_times(fn: Scaled) -> None:
    fn.factor = 3.0


CHANGES: dict[str, tuple[Callable[[Scaled], Any], tuple[Any, ...]]] = {
    "shape": (id, (X[:2],)),
    "dtype": (id, (X.float(),)),
    "an attribute that the function reads": (_three_times, (X,)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_another_program_is_planned_anew(name: str, plans: list[int]):
    fn = Scaled()
    step = ftp.spmd(fn, MESH, P("tp"), P())
    step.lower(X)
    change, args = CHANGES[name]
    change(fn)
    torch.testing.assert_close(step(*args), fn(*args))
    assert len(plans) == 2


def test_a_rule_that_is_stated_between(plans: list[int]):
    """The report shows that an op has no rule; its user states one, and calls."""
    with torch.library._scoped_library("after_lower", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: 2 * x, "CompositeExplicitAutograd")
        twice = torch.ops.after_lower.twice.default
        step = ftp.spmd(twice, MESH, P("tp"), P("tp"))
        with pytest.warns(UserWarning, match="has no sharding rule"):
            step.lower(X)
        ftp.rule(twice, "a b -> a b")
        torch.testing.assert_close(step(X), 2 * X)
        assert len(plans) == 2
        assert not step.lower(X).collectives


@pytest.mark.parametrize("options", [{"certify": True}, {"strict": True}], ids=str)
def test_programs_that_are_checked_are_planned_each_time(
    options: dict[str, bool], plans: list[int]
):
    step = ftp.spmd(Scaled(), MESH, P("tp"), P(), **options)
    step.lower(X)
    torch.testing.assert_close(step(X), (X * 2).sin().sum(0))
    assert len(plans) == 2
