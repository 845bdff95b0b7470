"""The plans that a search tries: well-known ones, plans at prices of memory, and small changes."""

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from ftp.paused_gc import collection_paused
from ftp.planning.graph import Value
from ftp.planning.solver.reduce import Infeasible
from ftp.searching.axis_networks import Price, entry_of
from ftp.searching.candidates import Candidate, Searching
from ftp.searching.marks import constrained_axes, marked_shapes
from ftp.searching.open_layouts import open_layouts, shared_heads
from ftp.searching.opened import Opened
from ftp.searching.prepared_loss import Patterns
from ftp.sharding.layout import Layout, nominal
from ftp.sharding.spec import PartitionSpec

STEPS = 4  # prices tried between one that saves no memory and one that saves all it can
DEAREST = 1e4
MOST_AXES = 3  # searched in every order
PAIRS = 16  # most pairs of changes tried from one plan
SMALL = 1 / 256  # of all parameters' bytes: too few to cut over a data axis in a plan that fits


@collection_paused()
def explore(task: Searching) -> None:
    """Try plans at no price of memory, also with constraints; if these do not fit, try prices."""
    name_plans(task)
    least = min(
        (task.candidate({}, order, Price(0.0)) for order in orders(task)),
        key=lambda c: c.estimate.seconds,
    )
    cut_heads(task, least)
    task.free = [least]
    task.free += [task.candidate(along, least.order, Price(0.0)) for along in alongs(task)]
    fit(task)


def fit(task: Searching) -> None:
    """Try plans with less memory, if plans at no price of memory do not fit."""
    for low in sorted(task.free, key=lambda c: c.estimate.seconds):
        if not task.fits(low) and not _is_outdone(low, task.free):
            _raise_price(task, low)
    best = min(task.tried.values(), key=partial(_rank, task))
    if not task.fits(best) and task.bucket and not task.is_small:
        task.leave_buckets()
        fit(task)
        return
    fastest = min(task.free, key=lambda c: c.estimate.seconds)
    is_least = task.fits(best) and best.estimate.seconds <= fastest.estimate.seconds
    # Networks know no buckets: a small program may fit, or be faster, by changes of single specs.
    if task.is_small or not is_least:
        best = refined(task, improved(task, best))
    if not task.fits(best) and task.bucket:
        task.leave_buckets()
        fit(task)
    elif task.is_small and not task.fits(fastest):
        refined(task, fastest)


def _is_outdone(one: Candidate, others: Sequence[Candidate]) -> bool:
    """Whether another candidate takes less time and holds no more: constraints that save nothing
    are not worth a separate search.
    """
    return any(
        c.estimate.seconds < one.estimate.seconds and c.estimate.nbytes <= one.estimate.nbytes
        for c in others
    )


def name_plans(task: Searching) -> None:
    """Try the well-known plans: whole parameters, and all parameters cut that the data axes can
    cut.
    """
    patterns = dict.fromkeys(task.net.patterns.values())
    whole = {p: PartitionSpec(*[None] * task.net.members(p)[0].results[0].ndim) for p in patterns}
    cuts = [a for a in task.axes if a in task.data_axes]
    known = [whole]
    if cuts:
        n = math.prod(task.axes[axis] for axis in cuts)
        known.append({p: cut_first(task.net, p, cuts, n) for p in patterns})
    order = tuple(task.axes)
    for found in known:
        task.noted(Candidate(found, {}, order, Price(0.0), None, task.estimate_of(found, {})))


def cut_heads(task: Searching, low: Candidate) -> None:
    """Try cuts in whole heads where the ranks do not divide them, and cuts of packed tensors in
    packs, all at once: a network would have to change them one by one. Under a limit also try heads
    that adjacent ranks share.
    """
    patterns = dict(low.patterns)
    for axis, n in task.axes.items():
        for pattern, spec in low.patterns.items() if axis not in task.data_axes else ():
            layouts = [c for c in open_layouts(task.net, pattern, n, False) if c.inner != 1]
            shared = shared_heads(task.net, pattern, n)
            layouts += [shared] if shared and task.memory is not None else []
            layouts += task.primitives(low.along).packs.get((axis, pattern), ())
            if layouts and axis not in spec.axes and spec[layouts[0].dim] is None:
                entries = list(spec)
                entries[layouts[0].dim] = entry_of(axis, layouts[0])
                patterns[pattern] = PartitionSpec(*entries)
    if patterns != low.patterns:
        task.with_patterns(low, patterns)


def _raise_price(task: Searching, low: Candidate) -> None:
    """Raise the price of memory until the program fits, and then find the least price at
    which it does.
    """
    along = low.along
    if _is_best(task, low):
        return
    share, scale = low.estimate.share, low.estimate.seconds / low.estimate.nbytes
    high = task.candidate(along, low.order, Price(DEAREST * scale, share))
    if not task.fits(high):
        cut_heads(task, high)
        return
    for _ in range(STEPS):
        if _is_best(task, low):
            return
        least, most = low.price.seconds, min(high.price.seconds, scale * 100)
        # At this price both plans cost the same: a plan that the network finds now is better than
        # both, if there is one.
        even = (high.estimate.seconds - low.estimate.seconds) / (
            low.estimate.nbytes - high.estimate.nbytes
        )
        is_between = least * 1.001 < even < high.price.seconds * 0.999
        price = even if is_between else (least * most) ** 0.5 if least else most / 100
        middle = task.candidate(along, low.order, Price(price, share))
        if middle.key in (low.key, high.key) and is_between:
            return
        low, high = (low, middle) if task.fits(middle) else (middle, high)


def _is_best(task: Searching, low: Candidate) -> bool:
    """Whether a candidate that fits is as fast as every one that does not."""
    fitting = task.fitting()
    return bool(fitting) and fitting[0].estimate.seconds <= low.estimate.seconds


def improved(task: Searching, best: Candidate) -> Candidate:
    """Search one axis after another again, the others fixed, until no step is faster."""
    is_better = best.solved is not None and len(task.axes) > 1 and task.fits(best)
    while is_better:
        is_better = False
        for axis in task.axes:
            assert best.solved is not None
            if axis == best.order[-1]:
                continue  # it was searched with the other axes as they are
            others = tuple(a for a in best.order if a != axis)
            forced = {a: best.solved.choice[a] for a in others}
            try:
                found = task.candidate(best.along, (*others, axis), best.price, forced)
            except Infeasible:
                continue
            if (
                task.fits(found)
                and found.key not in task.refused
                and found.estimate.seconds < best.estimate.seconds * (1 - 1e-6)
            ):
                best, is_better = found, True
    return best


def refined(task: Searching, best: Candidate) -> Candidate:
    """Change one pattern's spec on one axis at a time while that makes the program fit, or makes a
    program that fits faster.

    Prices may leave memory below a limit unused. The largest parameters come first; the number of
    plans tried depends on the size of the program. Of a small program the best of all changes is
    made each time, and where no change helps, the best pair of changes, as of the two weights of
    an MLP; of a large one, for which few plans are tried, every change that helps. A change that
    made a plan that fits slower is not tried again.
    """
    budget, base = task.tries, None
    in_vain: set[tuple[str, PartitionSpec]] = set()
    while base is not best:
        base = best
        for pattern in task.net.sizes:
            start = base if task.is_small else best
            for spec in _promising_specs(task, pattern, start):
                patterns = {**start.patterns, pattern: spec}
                key = tuple(patterns.items()), tuple(start.along.items())
                if key in task.tried or (pattern, spec) in in_vain or budget == 0:
                    continue
                budget -= 1
                found = task.with_patterns(start, patterns)
                if task.fits(start) and found.estimate.seconds >= start.estimate.seconds:
                    in_vain.add((pattern, spec))
                best = min(best, found, key=partial(_rank, task))
        if best is base and task.is_small and task.memory is not None:
            for patterns in _pairs(task, base)[: min(budget, PAIRS)]:
                budget -= 1
                best = min(best, task.with_patterns(base, patterns), key=partial(_rank, task))
    return best


def _pairs(task: Searching, base: Candidate) -> list[Patterns]:
    """The plans not tried yet that differ from one in two specs: first those whose two changes do
    best one by one.
    """
    along, fits = tuple(base.along.items()), task.fits(base)
    changes = [(p, s) for p in task.net.sizes for s in _promising_specs(task, p, base)]
    alone: dict[tuple[str, PartitionSpec], Candidate] = {}
    for pattern, spec in changes:
        key = tuple({**base.patterns, pattern: spec}.items()), along
        if (one := task.tried.get(key)) is not None:
            alone[pattern, spec] = one

    def rank(two: Sequence[tuple[str, PartitionSpec]]) -> tuple[float, float]:
        seconds = sum(alone[one].estimate.seconds for one in two)
        return seconds if fits else sum(alone[one].estimate.nbytes for one in two), seconds

    pairs = [(a, b) for a, b in itertools.combinations(alone, 2) if a[0] != b[0]]
    plans = [{**base.patterns, **dict(two)} for two in sorted(pairs, key=rank)]
    return [plan for plan in plans if (tuple(plan.items()), along) not in task.tried]


def _rank(task: Searching, candidate: Candidate) -> tuple[bool, float]:
    """Sort key of candidates: lower is better."""
    fits = task.fits(candidate) and candidate.key not in task.refused
    return not fits, candidate.estimate.seconds if fits else candidate.estimate.nbytes


def _promising_specs(task: Searching, pattern: str, best: Candidate) -> list[PartitionSpec]:
    """The specs to try for a pattern, those with fewest cuts first: with another cut on one axis,
    of a large program, for which few plans are tried, on two.

    For a plan that fits, those with no more bytes than are free or than copies that are gathered
    for their use may hold, of a large program those with as many or more; for one that does not
    fit, those with as many or fewer.
    """
    whole, own, fits = task.net.sizes[pattern], best.patterns[pattern], task.fits(best)

    def held(spec: PartitionSpec) -> int:
        return whole // math.prod(task.axes.get(axis, 1) for axis in spec.axes)

    axes = list(task.axes)
    if fits and whole < SMALL * sum(task.net.sizes.values()):
        axes = [axis for axis in axes if axis not in task.data_axes or axis in own.axes]
    specs = _other_specs(task, pattern, own, axes)
    if not task.is_small:
        specs += [two for one in specs for two in _other_specs(task, pattern, one, axes)]
    specs = sorted(
        (s for s in dict.fromkeys(specs) if s != own and _divides(task, pattern, s)),
        key=lambda s: (len(s.axes), len({*s.axes}.intersection(task.data_axes))),
    )
    if not fits:
        return [spec for spec in specs if held(spec) <= held(own)]
    gathered = max(Value(node).nbytes(nominal) for node in task.net.members(pattern))
    free = (task.memory or math.inf) - best.estimate.nbytes - task.excess + gathered
    least = 0 if not task.is_small else -math.inf
    return [spec for spec in specs if least <= held(spec) - held(own) <= free]


def _other_specs(
    task: Searching, pattern: str, own: PartitionSpec, axes: Sequence[str]
) -> list[PartitionSpec]:
    """The specs that cut a pattern on one of the axes as ``own`` does not."""
    ndim = task.net.members(pattern)[0].results[0].ndim
    found = []
    for axis in axes:
        others = [
            tuple(part for part in own.parts(d) if getattr(part, "axis", part) != axis)
            for d in range(ndim)
        ]
        found.append(PartitionSpec(*others))
        for layout in _layouts(task, pattern, axis):
            cuts = others[layout.dim]
            for at in range(len(cuts) + 1):
                dims = list(others)
                dims[layout.dim] = (*cuts[:at], entry_of(axis, layout), *cuts[at:])
                found.append(PartitionSpec(*dims))
    return found


def _layouts(task: Searching, pattern: str, axis: str) -> dict[Layout, None]:
    """The cuts of a pattern that one axis may make."""
    n, is_data = task.axes[axis], axis in task.data_axes
    shared = shared_heads(task.net, pattern, n)
    layouts = open_layouts(task.net, pattern, n, True) if is_data else []
    layouts += open_layouts(task.net, pattern, n, False)
    layouts += [shared] if shared and not is_data else []
    return dict.fromkeys(layouts)


def _divides(task: Searching, pattern: str, spec: PartitionSpec) -> bool:
    shapes = [node.results[0].shape for node in task.net.members(pattern)]
    parts = [math.prod(task.axes[c.axis] for c in spec.cuts(d)) for d in range(len(spec))]
    whole = [math.prod(c.size for c in spec.cuts(d)) for d in range(len(spec))]
    return all(
        u > 1 or shape[d] % n == 0
        for shape in shapes
        for d, (n, u) in enumerate(zip(parts, whole, strict=True))
    )


def orders(task: Searching) -> list[tuple[str, ...]]:
    return (
        list(itertools.permutations(task.axes))
        if len(task.axes) <= MOST_AXES
        else [tuple(task.axes)]
    )


def alongs(task: Searching) -> Iterator[dict[str, int]]:
    """For each axis that does not cut the batch, the choices of an inner dim of blocks' outputs.
    None where the program constrains these itself.
    """
    shapes = list(marked_shapes(task.traced).values())
    decided = {*task.data_axes, *constrained_axes(task.traced)}
    for axis, n in task.axes.items():
        if axis not in decided and shapes:
            for dim in range(1, min(map(len, shapes)) - 1):
                if all(shape[dim] % n == 0 for shape in shapes):
                    yield {axis: dim}


def cut_first(net: Opened, pattern: str, axes: Sequence[str], n: int) -> PartitionSpec:
    """A spec that cuts the first dim which divides over all the axes, as ZeRO-3 does."""
    spec: list[Any] = [None] * net.members(pattern)[0].results[0].ndim
    for layout in open_layouts(net, pattern, n, True)[:1]:
        spec[layout.dim] = tuple(axes)
    return PartitionSpec(*spec)
