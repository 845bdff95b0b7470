"""Positions as sums are what the same steps give on arrays of all ranks' positions."""

from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ftp.certification.positions import (
    Positions,
    concatenated,
    holes,
    is_same,
    overlaid,
    sum_of,
    whole,
)
from ftp.certification.progression import Progression
from ftp.certification.ragged import Ragged
from ftp.certification.terms import Term

HOLE = -(1 << 60)
LEAD = 2  # mesh axes
SOME = settings(max_examples=150, deadline=None)


@st.composite
def drawn(draw: Any) -> tuple[Positions, list[int]]:
    """Positions over two mesh axes and two atoms, and the sizes of these dims."""
    sizes = [draw(st.integers(1, 4)) for _ in range(LEAD + 2)]
    terms, left = [], list(range(len(sizes)))
    while left and draw(st.booleans()):
        dims = tuple(sorted(draw(st.sets(st.sampled_from(left), min_size=1, max_size=2))))
        left = [d for d in left if d not in dims]
        shape = [sizes[d] for d in dims]
        step = draw(st.integers(-3, 7))
        if len(dims) == 1 and step and draw(st.booleans()):
            digits = ((step, shape[0]),)
            if shape[0] == 4 and draw(st.booleans()):
                digits = (draw(st.integers(-3, 7)), 2), (step, 2)
            terms.append(Term(dims, Progression(0, digits)))
            continue
        count = int(np.prod(shape))
        number = st.one_of(st.integers(0, 9), st.just(HOLE))
        values = draw(st.lists(number, min_size=count, max_size=count))
        terms.append(Term(dims, np.array(values).reshape(shape)))
    return sum_of(len(sizes), draw(st.sampled_from((30, 30, 30, HOLE))), terms), sizes


def full_of(x: Positions, sizes: list[int]) -> np.ndarray:
    return np.broadcast_to(x.dense(), sizes)


@st.composite
def steps(draw: Any, sizes: list[int]) -> tuple[str, Callable[[Any], Any], Callable[[Any], Any]]:
    """A step on positions and the same on an array; sizes are those before."""
    dim = draw(st.integers(LEAD, len(sizes) - 1))
    n = sizes[dim]
    kind = draw(st.sampled_from(("take", "starts", "pad", "split", "merge", "swap", "scale")))
    match kind:
        case "take":
            places = draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=4))
            return kind, lambda x: x.taken(dim, places), lambda a: a.take(places, dim)
        case "starts":
            length = draw(st.integers(1, n))
            count = sizes[0] * sizes[1]
            at = st.lists(st.integers(0, n - length), min_size=count, max_size=count)
            begins = np.array(draw(at)).reshape(sizes[0], sizes[1])

            def moved(a: np.ndarray) -> np.ndarray:
                lead = begins.reshape(*begins.shape, *(1,) * (a.ndim - LEAD))
                line = np.arange(length).reshape([length if d == dim else 1 for d in range(a.ndim)])
                return np.take_along_axis(a, lead + line, dim)

            return kind, lambda x: x.from_starts(dim, begins, length), moved
        case "pad":
            margins = st.lists(st.integers(0, 2), min_size=sizes[0], max_size=sizes[0])
            before = np.array(draw(st.one_of(margins, st.just([0] * sizes[0]))))
            total = n + 2

            def padded(a: np.ndarray) -> np.ndarray:
                rows = []
                for rank, first in enumerate(before.tolist()):
                    margin = [(first, 2 - first) if d == dim else (0, 0) for d in range(a.ndim)]
                    rows.append(np.pad(a[rank : rank + 1], margin, constant_values=-1))
                return np.concatenate(rows)

            return kind, lambda x: x.padded(dim, n, before.reshape(-1, 1), total), padded
        case "split":
            major = draw(st.sampled_from([m for m in range(1, n + 1) if n % m == 0]))

            def parted(a: np.ndarray) -> np.ndarray:
                return a.reshape(*a.shape[:dim], major, n // major, *a.shape[dim + 1 :])

            return kind, lambda x: x.split(dim, major, n // major), parted
        case "merge" if dim + 1 < len(sizes):
            more = sizes[dim + 1]

            def joined(a: np.ndarray) -> np.ndarray:
                return a.reshape(*a.shape[:dim], n * more, *a.shape[dim + 2 :])

            return kind, lambda x: x.merged(dim, n, more), joined
        case "swap":
            places = list(range(len(sizes)))
            places[0], places[dim] = dim, 0
            return kind, lambda x: x.renamed(places, len(sizes)), lambda a: a.swapaxes(0, dim)
    return "scale", lambda x: x.scaled(3), lambda a: np.where(a < 0, -1, 3 * a)


@SOME
@given(st.data())
def test_steps(data: Any):
    x, sizes = data.draw(drawn())
    array = full_of(x, sizes)
    for _ in range(4):
        _, on_positions, on_array = data.draw(steps(sizes))
        x, array = on_positions(x), on_array(array)
        sizes = list(array.shape)
        assert np.array_equal(full_of(x, sizes), array)
        assert all(not x.varies(d) or sizes[d] > 1 for d in range(len(sizes)))


@SOME
@given(st.data())
def test_comparison(data: Any):
    """Equal and unequal ones, one element changed among them."""
    x, sizes = data.draw(drawn())
    array = full_of(x, sizes)
    dims = tuple(range(len(sizes)))

    def of(values: np.ndarray) -> Positions:
        return sum_of(len(sizes), 0, [Term(dims, np.where(values < 0, HOLE, values))])

    assert is_same(x, of(array)) and is_same(of(array), x)
    at = tuple(data.draw(st.integers(0, n - 1)) for n in sizes)
    other = array.copy()
    other[at] = data.draw(st.sampled_from((-1, 5, 200)))
    assert is_same(x, of(other)) == np.array_equal(array, other)
    y, of_sizes = data.draw(drawn())
    if of_sizes == sizes:
        assert is_same(x, y) == np.array_equal(array, full_of(y, sizes))


@SOME
@given(st.data())
def test_concatenation(data: Any):
    x, sizes = data.draw(drawn())
    parts = [x]
    for _ in range(data.draw(st.integers(1, 2))):
        y, of_sizes = data.draw(drawn())
        parts.append(y if of_sizes == sizes else x.plus(sum_of(x.ndim, 7, [])))
    dim = data.draw(st.integers(0, len(sizes) - 1))
    arrays, counts = [full_of(p, sizes) for p in parts], [sizes[dim]] * len(parts)
    if data.draw(st.booleans()):  # some places of each part
        places = st.lists(st.integers(0, sizes[dim] - 1), min_size=1, max_size=4)
        of_parts = [data.draw(places) for _ in parts]
        parts = [p.taken(dim, at) for p, at in zip(parts, of_parts, strict=True)]
        arrays = [a.take(at, dim) for a, at in zip(arrays, of_parts, strict=True)]
        counts = [len(at) for at in of_parts]
    found = concatenated(parts, dim, counts)
    sizes[dim], expected = sum(counts), np.concatenate(arrays, dim)
    assert np.array_equal(full_of(found, sizes), expected)


@SOME
@given(st.data())
def test_overlay(data: Any):
    """Where no two ranks hold an element, each is kept."""
    n = data.draw(st.integers(2, 4))
    size = data.draw(st.integers(1, 6))
    owner = np.array(data.draw(st.lists(st.integers(-1, n - 1), min_size=size, max_size=size)))
    held = np.where(owner == np.arange(n)[:, None], np.arange(size) * 2, HOLE)
    x = sum_of(2, 1, [Term((0, 1), held)])
    if not x.varies(0):
        return
    (found,) = overlaid([x], 0) or (None,)
    expected = np.where(owner < 0, -1, np.arange(size) * 2 + 1)
    assert found is not None and np.array_equal(full_of(found, [1, size])[0], expected)
    held[:2, data.draw(st.integers(0, size - 1))] = 3  # on two ranks
    twice = sum_of(2, 1, [Term((0, 1), held)])
    assert not twice.varies(0) or overlaid([twice], 0) is None


@SOME
@given(st.data())
def test_uneven_shards(data: Any):
    """Padded to one size and beside each other they are the whole, with holes after it."""
    n, size = data.draw(st.integers(2, 5)), data.draw(st.integers(2, 20))
    k = -(-size // n)
    counts = [max(min(k, size - r * k), 0) for r in range(n)]
    x = whole(3, 1, size).plus(whole(3, 2, 3).scaled(100))
    shards = [
        x.within(1, r * k, 1, c).padded(1, c, np.array(0), k) if c < k else x.within(1, r * k, 1, k)
        for r, c in enumerate(counts)
        if c
    ]
    shards += [holes(3)] * (n - len(shards))
    full = sum(c == k for c in counts)
    parts = [x.within(1, 0, 1, k).plus(whole(3, 0, full).scaled(k)), *shards[full:]]
    beside = concatenated(parts, 0, [full, *[1] * (n - full)])
    expected = np.stack([np.broadcast_to(s.dense(), (1, k, 3))[0] for s in shards])
    assert np.array_equal(full_of(beside, [n, k, 3]), expected)
    whole_again = beside.merged(0, n, k).within(0, 0, 1, size)
    assert is_same(whole_again, x.without_dim(0))
    scattered = whole_again.padded(0, size, np.array(0), n * k).split(0, n, k)
    assert is_same(scattered, beside)
    r = data.draw(st.integers(0, n - 1))
    assert is_same(scattered.taken(0, (r,)), shards[r])
    assert np.array_equal(full_of(scattered.within(0, 1, 1, n - 1), [n - 1, k, 3]), expected[1:])
    if 1 not in counts:
        assert all(isinstance(t.values, Progression | Ragged) for t in beside.terms)
