"""Recordings that differ in numbers alone: a number that does not fit its formula is seen."""

from dataclasses import dataclass, field

import torch

from ftp.sharding.pytree import flatten
from ftp.tracing.alike import Alike, are_alike
from ftp.tracing.trace import trace


def recorded(fn, size):
    leaves, tree = flatten((torch.ones(2, size, 4),))
    made = trace(fn, leaves, tree, "cpu", names=["x"], keeps_recording=True).recording
    assert made is not None
    return (size,), made


def test_a_number_is_unknown_or_a_formula_of_others():
    def fn(x):
        n = int(0.75 * x.shape[1])
        return x[:, :n].flatten(0, 1), x.new_zeros(n * x.shape[1])

    alike = Alike([recorded(fn, size) for size in (8, 12, 7)])
    assert len(alike.unknown) == 1  # n; its products and the rest are formulas
    for size in (9, 16, 40):
        assert alike.numbers(*recorded(fn, size)) == (int(0.75 * size),)


def test_a_number_that_does_not_fit_its_formula_is_seen():
    def fn(x):
        n = x.shape[1]
        return x[:, : n - (n > 12)].sum()

    alike = Alike([recorded(fn, size) for size in (8, 12, 7)])
    assert alike.numbers(*recorded(fn, 11)) == ()
    assert alike.numbers(*recorded(fn, 13)) is None


def test_another_op_line_or_captured_tensor_is_no_other_number():
    scales = [torch.ones(4), torch.ones(4)]

    def fn(x):
        n = x.shape[1]
        if n > 20:
            return x.exp()
        return x.sin() * scales[n > 10]

    small, middle, large = (recorded(fn, size)[1] for size in (8, 12, 24))
    assert are_alike(small, recorded(fn, 9)[1])
    assert not are_alike(small, middle) and not are_alike(small, large)


def test_another_static_result_is_seen_where_it_prints_alike():
    @dataclass(frozen=True)
    class Kept:
        tokens: int = field(repr=False)

    def fn(x):
        n = x.shape[1] // 2
        return x[:, :n].sum(), Kept(n)

    small, large = (recorded(fn, size)[1] for size in (8, 12))
    assert are_alike(small, recorded(fn, 9)[1])
    assert not are_alike(small, large)
