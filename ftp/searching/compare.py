"""The report of a search on a plan: its common name, the costs of other layouts, bounds."""

import math
from dataclasses import replace

from ftp.planning.cost_network import VIOLATION
from ftp.searching.axis_networks import Choice, Price, Solved, axis_step, planned_seconds
from ftp.searching.candidates import Candidate, Searching
from ftp.searching.marks import Along
from ftp.searching.open_layouts import open_layouts, shared_heads
from ftp.searching.prepared_loss import Patterns
from ftp.sharding.layout import Layout, R


def common_name(task: Searching, candidate: Candidate) -> str:
    """The common name of a plan, such as plain data parallelism."""
    cut = {axis for spec in candidate.patterns.values() for axis in spec.axes}
    names = []
    for axis, n in task.axes.items():
        if axis in task.data_axes:
            could = sum(bool(open_layouts(task.net, p, n, True)) for p in candidate.patterns)
            does = sum(axis in spec.axes for spec in candidate.patterns.values())
            names.append(
                f"data parallel over {axis}"
                if not does
                else f"ZeRO-3 over {axis}{'' if does >= could else ', in part'}"
            )
        else:
            names.append(
                f"tensor parallel over {axis}" if axis in cut else f"replicated over {axis}"
            )
    names += [f"sequence parallel over {axis}" for axis in candidate.along]
    return ", ".join(names)


def choice_of(task: Searching, patterns: Patterns) -> Choice:
    """The layouts that specs ask for, per axis."""
    found: dict[str, dict[str, Layout | None]] = {
        axis: dict.fromkeys(patterns) for axis in task.axes
    }
    for pattern, spec in patterns.items():
        for dim in range(len(spec)):
            for cut in spec.cuts(dim):
                packs = cut.pack if isinstance(cut.pack, int) else len(cut.pack)
                shared = shared_heads(task.net, pattern, task.axes[cut.axis])
                if shared and (shared.dim, shared.inner) == (dim, cut.size):
                    continue  # stored cut, and used as if it were whole
                found[cut.axis][pattern] = Layout("S", dim, packs, cut.size, zigzag=cut.zigzag)
    return found


def paid(task: Searching, best: Candidate, planned: float) -> Price:
    """The price of a byte: the price at which the plan was found, or, if it is less, the seconds
    lost per byte saved compared with the plan without a limit.

    Args:
        planned: seconds of the plan, as the networks count them.
    """
    free = min(task.free, key=lambda c: c.estimate.seconds)
    saved = free.estimate.nbytes - best.estimate.nbytes
    if task.memory is None or task.fits(free) or saved <= 0 or free.solved is None:
        return replace(best.price, seconds=0.0)
    lost = max(0.0, planned - planned_seconds(free.solved, task.hardware))
    return replace(best.price, seconds=min(best.price.seconds or math.inf, lost / saved))


def alternatives(
    task: Searching, best: Candidate, solved: Solved
) -> dict[tuple[str, str], dict[str, float]]:
    """Per axis and pattern, the extra cost of the axis' network with each other layout, given the
    axes folded before it.
    """
    found: dict[tuple[str, str], dict[str, float]] = {}
    for at, axis in enumerate(best.order):
        net = task.solve(best.along, best.order[:at], best.price, solved.choice).net
        step = axis_step(net, axis, best.order[:at], task.axes, task.data_axes, task.hardware)
        costs = step.network.open_costs(best.price.of_bytes())
        of_pattern = {net.patterns[first]: each for first, each in costs.items()}
        for pattern, chosen in solved.choice[axis].items():
            layouts = open_layouts(task.net, pattern, task.axes[axis], axis in task.data_axes)
            others = {
                described(layout): in_seconds_of(of_pattern[pattern].get(layout or R, math.inf))
                - in_seconds_of(solved.axes[axis].solution.cost)
                for layout in dict.fromkeys((None, *layouts))
                if layout != chosen
            }
            if others:
                found[axis, pattern] = others
    return found


def gaps(task: Searching, best: Candidate, solved: Solved) -> dict[str, float]:
    """Per axis, the most seconds by which its network may have a cheaper plan, given the axes
    folded before it.

    With a limit, the price of the bytes that are still free is added: a plan that uses them could
    cost that much less.
    """
    free = best.price.seconds * max(0, (task.memory or 0) - best.estimate.nbytes)
    found = {}
    for at, axis in enumerate(best.order):
        optimum = task.solve(
            best.along,
            best.order[: at + 1],
            best.price,
            {a: solved.choice[a] for a in best.order[:at]},
        )
        found[axis] = (
            max(
                0.0,
                in_seconds_of(solved.axes[axis].solution.cost)
                - in_seconds_of(optimum.axes[axis].solution.bound),
            )
            + free
        )
    return found


def bound(task: Searching, price: Price) -> float:
    """A lower bound, in the networks' seconds, of all plans that keep the placement constraints
    and fit.

    The problem of each single axis is a relaxation: the other axes cut everything at no cost, and
        share the ops' time evenly. With a price of memory, the minimum minus the price of the limit
        is still a bound (Lagrange). Every set of constraints that was tried is a program of its
        own: the bound is the smallest of theirs.
    """
    alongs = dict.fromkeys(tuple(c.along.items()) for c in task.tried.values())
    return max(
        min(_bound_of(task, dict(along), replace(price, seconds=p)) for along in alongs)
        for p in sorted({0.0, price.seconds})
    )


def _bound_of(task: Searching, along: Along, price: Price) -> float:
    axes = task.axes
    total = -price.seconds * (task.memory or 0)
    for axis, n in axes.items():
        others = math.prod(axes.values()) // n
        each = len(axes) * others
        h = task.hardware
        links = {a: replace(link, bandwidth=link.bandwidth * others) for a, link in h.links.items()}
        link = replace(h.link, bandwidth=h.link.bandwidth * others)
        rates = {dtype: rate * each for dtype, rate in h.rates.items()}
        fast = replace(
            h, flops=h.flops * each, memory=h.memory * each, rates=rates, link=link, links=links
        )
        share = replace(price, seconds=price.seconds / each)
        found = task.solve(along, (axis,), share, hardware=fast, is_bare=True).axes[axis]
        total += found.solution.bound if found.kept_rules else 0.0
    return total


def in_seconds_of(cost: float) -> float:
    """A network's cost without its prices of violations, for a plan that breaks placement
    constraints.

    >>> in_seconds_of(0.25), in_seconds_of(2000.25)
    (0.25, 0.25)
    """
    return cost if cost == math.inf else cost % VIOLATION


def described(layout: Layout | None) -> str:
    """
    >>> described(None), described(Layout("S", 1))
    ('whole', 'dim 1')
    """
    if layout is None:
        return "whole"
    units = "" if layout.inner == 1 else f" in units of {layout.inner}"
    packs = "" if layout.outer == 1 else f" in {layout.outer} packs"
    return f"dim {layout.dim}{units}{packs}"
