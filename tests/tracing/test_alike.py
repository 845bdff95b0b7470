"""Recordings that differ in numbers alone: a number that does not fit its formula is seen."""

from dataclasses import dataclass, field

import pytest
import torch

from ftp.sharding.pytree import flatten
from ftp.tracing.alike import Alike, are_alike
from ftp.tracing.trace import trace


def recorded(fn, size):
    leaves, tree = flatten((torch.ones(2, size, 4),))
    made = trace(fn, leaves, tree, "cpu", names=["x"], recognises=lambda _: False).recording
    assert made is not None
    return (size,), made


def test_a_trace_ends_with_the_recording_that_is_recognised():
    seen, holder = [], {}

    def fn(x):
        return x[:, : int(0.75 * x.shape[1])].sum()

    def leaves_a_tensor(x):
        holder["last"] = x.sum()
        return fn(x)

    def recognises(recording):
        seen.append(len(recording.graph.nodes))
        return True

    leaves, tree = flatten((torch.ones(2, 8, 4),))
    made = trace(fn, leaves, tree, "cpu", names=["x"], recognises=recognises)
    assert made.is_recognised and seen and made.constants == ()
    # What a call may leave for the next one is looked for in a whole trace.
    made = trace(leaves_a_tensor, leaves, tree, "cpu", names=["x"], recognises=recognises)
    assert not made.is_recognised and len(seen) == 1


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


W, OTHER = torch.ones(4, 4), torch.ones(4, 4)


def in_mode(x, n):
    with torch.set_grad_enabled(n > 9):
        y = x.sin()
    return y * x


CHANGED = {
    "an op more": lambda x, n: x[:, :n].sin().cos() if n > 9 else x[:, :n].sin(),
    "a float": lambda x, n: x[:, :n] * (0.5 if n > 9 else 0.25),
    "a sign of zero": lambda x, n: x[:, :n] + (0.0 if n > 9 else -0.0),
    "a number": lambda x, n: x[:, : n - (n > 9)],
    "an int or a float": lambda x, n: x * (n if n > 9 else float(n)),
    "a dtype": lambda x, n: x.to(torch.float16 if n > 9 else torch.bfloat16),
    "an operand": lambda x, n: (x.sin() if n > 9 else x.cos()) + x.sin() + x.cos(),
    "the order of operands": lambda x, n: x.sin() - x if n > 9 else x - x.sin(),
    "the order of results": lambda x, n: (x, x.sin()) if n > 9 else (x.sin(), x),
    "a result that is no tensor": lambda x, n: (x.sin(), n > 9),
    "a captured tensor": lambda x, n: x @ (W if n > 9 else OTHER),
    "a write": lambda x, n: x.clone().mul_(n) if n > 9 else x.clone().mul(n),
    "a gradient cut": lambda x, n: (x.sin().detach() if n > 9 else x.sin()) * x,
    "a gradient not taken": in_mode,
    "a hook": lambda x, n: hooked(x.sin(), n) * x,
}


def hooked(x, n):
    if n > 9 and x.requires_grad:
        x.register_hook(lambda grad: grad * 2)
    return x


@pytest.mark.parametrize("name", CHANGED)
def test_another_program_is_never_taken_for_the_same(name):
    changed = CHANGED[name]

    def fn(x):
        n = int(1.0 * x.shape[1])
        if "gradient" not in name and "hook" not in name:
            return changed(x, n)
        return torch.func.grad(lambda x: changed(x, n).sum())(x)

    alike = Alike([recorded(fn, size) for size in (5, 6, 8)])
    for size in (4, 7, 9, 10, 11, 24):
        assert (alike.numbers(*recorded(fn, size)) is not None) == (size <= 9)
