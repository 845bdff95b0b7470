"""Learning-rate schedules as functions of the step: the closed forms of torch.optim.lr_scheduler.

A schedule takes the number of updates done so far, a 0-d float tensor, and returns the rate of the
next update; the schedules of this module take a number too, to print or plot. Any such function in
tensor code can be an optimizer's ``lr``.
"""

import math
from collections.abc import Callable, Sequence
from functools import wraps
from typing import ParamSpec

import torch
from torch import Tensor

from ftp.errors import InputError

Schedule = Callable[[Tensor], Tensor]
_P = ParamSpec("_P")


def _of_numbers(make: Callable[_P, Schedule]) -> Callable[_P, Schedule]:
    """A function that makes schedules, of which each takes a Python number as well."""

    @wraps(make)
    def made(*args: _P.args, **kwargs: _P.kwargs) -> Schedule:
        schedule = make(*args, **kwargs)
        return lambda step: schedule(
            step if isinstance(step, Tensor) else torch.tensor(float(step))
        )

    return made


def _part(step: Tensor, total: int) -> Tensor:
    """The part of ``total`` steps that is done, at most 1; it is 1 if ``total`` is 0."""
    return torch.clamp(step / total, max=1.0) if total else torch.ones_like(step)


@_of_numbers
def linear(lr: float, total: int, *, start: float = 1.0 / 3, end: float = 1.0) -> Schedule:
    """From ``start * lr`` to ``end * lr`` in ``total`` steps, then constant (``LinearLR``); with
    ``start < end`` a warm-up.

    >>> float(linear(1.0, 10, start=0.0)(torch.tensor(5.0)))
    0.5
    """
    return lambda step: lr * (start + (end - start) * _part(step, total))


@_of_numbers
def constant(lr: float, total: int, *, factor: float = 1.0 / 3) -> Schedule:
    """``factor * lr`` for ``total`` steps, then ``lr`` (``ConstantLR``).

    >>> rate = constant(1.0, 5, factor=0.5)
    >>> float(rate(torch.tensor(4.0))), float(rate(torch.tensor(5.0)))
    (0.5, 1.0)
    """
    return lambda step: lr * (factor + (1 - factor) * (step >= total).to(step.dtype))


@_of_numbers
def exponential(lr: float, gamma: float) -> Schedule:
    """``lr * gamma ** step`` (``ExponentialLR``).

    >>> float(exponential(1.0, 0.5)(torch.tensor(2.0)))
    0.25
    """
    return lambda step: lr * gamma**step


@_of_numbers
def steps(lr: float, milestones: int | Sequence[int], gamma: float = 0.1) -> Schedule:
    """Multiply by ``gamma`` at each milestone (``MultiStepLR``); with an int, every so many steps
    (``StepLR``).

    >>> float(steps(1.0, [3, 6], 0.5)(torch.tensor(6.0)))
    0.25
    >>> float(steps(1.0, 2, 0.5)(torch.tensor(6.0)))
    0.125
    """
    if isinstance(milestones, int):
        return lambda step: lr * gamma ** torch.floor(step / milestones)
    return lambda step: (
        lr * gamma ** sum(((step >= m).to(step.dtype) for m in milestones), torch.zeros_like(step))
    )


@_of_numbers
def polynomial(lr: float, total: int, power: float = 1.0) -> Schedule:
    """``lr * (1 - step / total) ** power``, then zero (``PolynomialLR``).

    >>> float(polynomial(1.0, 4, 2.0)(torch.tensor(2.0)))
    0.25
    """
    return lambda step: lr * (1 - _part(step, total)) ** power


@_of_numbers
def cosine(lr: float, total: int, *, end: float = 0.0) -> Schedule:
    """Half a cosine from ``lr`` to the rate ``end`` in ``total`` steps, then constant
    (``CosineAnnealingLR`` up to there).

    >>> round(float(cosine(1.0, 10, end=0.5)(torch.tensor(5.0))), 6)
    0.75
    """
    return lambda step: _half_cosine(lr, end, math.pi * _part(step, total))


def _half_cosine(lr: float, end: float, angle: Tensor) -> Tensor:
    return end + (lr - end) * (1 + torch.cos(angle)) / 2


@_of_numbers
def cosine_restarts(lr: float, period: int, *, end: float = 0.0) -> Schedule:
    """Half a cosine from ``lr`` to the rate ``end``, restarted every ``period`` steps
    (``CosineAnnealingWarmRestarts`` with ``T_mult=1``).

    >>> float(cosine_restarts(1.0, 10)(torch.tensor(20.0)))
    1.0
    """
    return lambda step: _half_cosine(lr, end, math.pi * torch.remainder(step, period) / period)


@_of_numbers
def sequence(schedules: Sequence[Schedule], milestones: Sequence[int]) -> Schedule:
    """One schedule after another (``SequentialLR``).

    Args:
        milestones: the steps at which the second and later schedules begin. Each schedule counts
            steps from its beginning.

    Raises:
        InputError: the number of milestones is not one less than that of schedules.

    >>> rate = sequence([linear(1.0, 10, start=0.0), cosine(1.0, 100)], [10])
    >>> float(rate(torch.tensor(5.0))), float(rate(torch.tensor(10.0)))
    (0.5, 1.0)
    """
    if len(schedules) != len(milestones) + 1:
        raise InputError(
            f"{len(schedules)} schedules need {len(schedules) - 1} milestones between them, not"
            f" {len(milestones)}."
        )

    def rate(step: Tensor) -> Tensor:
        value = schedules[0](step)
        for schedule, milestone in zip(schedules[1:], milestones, strict=True):
            value = torch.where(
                step >= milestone, schedule(torch.clamp(step - milestone, min=0)), value
            )
        return value

    return rate
