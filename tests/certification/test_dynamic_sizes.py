"""Certificates of programs that serve many sizes: each size is proven, and no change is."""

from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from models import LlamaConfig, build
from mutants import check_mutants_of
from sized_steps import (
    LAYOUTS,
    MOST,
    arguments,
    loss_fn,
    moved,
    moving,
    on,
    program_at,
    step_of,
    tokens,
    weights,
)

import ftp
from ftp import P
from ftp.api import certify as certify_module
from ftp.api import dynamic_programs
from ftp.api.certify import certificate_of, certified
from ftp.api.graph_checks import check_certified
from ftp.certification.checker import check
from ftp.errors import CertificateError

STEPS = {name: step_of(name) for name in LAYOUTS}


def check_size(step, size):
    loss, grads = step(weights(), tokens(size))
    want_grads, want = torch.func.grad_and_value(loss_fn)(weights(), tokens(size))
    torch.testing.assert_close((loss, grads), (want, want_grads), rtol=1e-12, atol=1e-12)
    # Each axis cuts a dim evenly, unevenly or into fewer parts. Two axes on one dim: 12 plans for
    # sizes 1 to 96, the last one made at size 15.
    most = 12 if step is STEPS["two axes on a dim"] else 3
    assert step.shapes.traces == 1 and step.shapes.plans <= most and not step.shapes.one_by_one


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
@settings(max_examples=20)
@given(size=st.integers(1, 64))
@example(size=1)
@example(size=4)  # the width too
def test_a_step_is_certified_and_what_one_device_computes(name, size):
    check_size(STEPS[name], size)


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_all_sizes(name):
    for size in range(1, MOST + 1 if name == "context" else 65):
        check_size(STEPS[name], size)


def test_sizes_are_certified_and_what_one_device_computes():
    step = moving(certify=True)
    for size in (7, 8, 6, 4, 1, 25):
        torch.testing.assert_close(step(*arguments(size)), moved(*arguments(size)))
    assert step.shapes.traces == 1 and step.shapes.plans <= 3 and not step.shapes.one_by_one


@pytest.mark.parametrize(
    ("spec", "size", "most"),
    [
        (P("cp"), 7, 12),
        (P("cp"), 6, 6),
        *(
            pytest.param(spec, size, 10_000, marks=pytest.mark.slow)
            for spec in (P("cp"), P())
            for size in (1, 2, 6, 7, 8)
        ),
    ],
    ids=str,
)
def test_changed_programs_are_refused_at_each_size(spec, size, most):
    """Even, uneven, shorter than the axis."""
    step = moving(spec)
    for first in (size + 3, size):
        step(*arguments(first))
    changed, _, _ = check_mutants_of(program_at(step, size), arguments(size), size, most)
    assert changed > 1


def off_by_one(numbers, at, size):
    def wrong(values):
        found = list(numbers(values))
        found[at] += tuple(values) == (size,)
        return tuple(found)

    return wrong


def test_a_number_that_is_wrong_at_one_size_is_refused_there():
    """An offset, or a size that a formula gives."""
    step = moving()
    for size in (7, 8):
        step(*arguments(size))
    wrong = program_at(step, 8)
    for index in range(3):
        rank = wrong.ranks.at({"cp": index}, (8,))
        right = rank.numbers
        for at in range(len(rank.taken)):
            rank.numbers = off_by_one(right, at, 8)
            certified(program_at(step, 7))
            with pytest.raises(CertificateError):
                certified(wrong)
        rank.numbers = right
    certified(wrong)


def test_a_size_whose_certificate_is_refused_is_planned_alone():
    step = moving(certify=True)
    step(*arguments(7))
    rank = program_at(step, 8).ranks.at({"cp": 1}, (8,))
    rank.numbers = off_by_one(rank.numbers, 0, 8)
    with pytest.warns(UserWarning, match=r"sizes of S is refused .*: CertificateError"):
        found = step(*arguments(8))
    torch.testing.assert_close(found, moved(*arguments(8)))
    torch.testing.assert_close(step(*arguments(10)), moved(*arguments(10)))


def test_a_size_that_another_rank_refuses_is_planned_alone(monkeypatch):
    step = moving(certify=True)
    step(*arguments(7))

    def exchange(mesh, key, value):
        assert (key, value) == ("certificate", "")
        return [value, "output 0 differs", value]

    monkeypatch.setattr(dynamic_programs, "exchange", exchange)
    with pytest.warns(UserWarning, match=r"sizes of S is refused .*: output 0 differs"):
        found = step(*arguments(8))
    torch.testing.assert_close(found, moved(*arguments(8)))
    assert step.shapes.plans == 1 and "output 0 differs" in step.shapes.one_by_one[0]


def test_a_fault_is_told_where_the_step_found_the_dynamic_dims():
    """Other reasons to plan sizes alone are not."""
    step = ftp.spmd(moved, on(cp=3), (P(None, "cp"), P("cp")), P("cp"), certify=True)
    for size in (7, 10, 13):
        step(*arguments(size))
    rank = program_at(step, 16).ranks.at({"cp": 1}, (16,))
    right, rank.numbers = rank.numbers, off_by_one(rank.numbers, 0, 16)
    with pytest.warns(UserWarning, match="please report") as told:
        found = step(*arguments(16))
    assert len(told) == 1
    torch.testing.assert_close(found, moved(*arguments(16)))
    rank.numbers = off_by_one(right, 0, 19)
    with pytest.warns(UserWarning, match="please report"):  # also where sizes are planned alone
        step(*arguments(19))


def test_a_proof_is_of_the_graphs_that_serve_a_size():
    """Of the graphs of a rank that can, the one that was used last does."""
    step = moving(certify=True)
    for size in (7, 10):
        step(*arguments(size))
    program = program_at(step, 10)
    known = program.ranks._known[(1,)]
    check_certified(program)
    other = replace(known[0], numbers=off_by_one(known[0].numbers, 0, 10), number=-1)
    known.insert(0, other)
    with pytest.raises(CertificateError):
        check_certified(program)
    known.remove(other)
    check_certified(program)


def test_formulas_that_give_other_numbers_are_refused():
    step = moving(P())
    step(*arguments(4))
    program = program_at(step, 4)
    found = certify_module._with_formulas(certificate_of(program), program)
    with program.ranks.sizes.noting((5,)), pytest.raises(CertificateError, match="its formulas"):
        check(found)
    op = next(o for o in found.operations if o.target is torch.ops.aten.cumsum.default)
    other = replace(op, formulas=replace(op.formulas, args=(*op.args[:1], 1)))
    changed = tuple(other if o is op else o for o in found.operations)
    with program.ranks.sizes.noting((4,)), pytest.raises(CertificateError, match="its formulas"):
        check(replace(found, operations=changed))


@pytest.mark.slow
def test_random_bits_of_a_dim_of_one_element():
    """They have the form of other sizes: a size is certified by its numbers where formulas do not
    do.
    """
    fn, params = ftp.functionalize(build(LlamaConfig(vocab=8, dim=8, layers=1, heads=1, hidden=8)))
    key, mesh = ftp.random.key(3), ftp.simulated_mesh((2,), ("cp",))

    def loss(p, x):
        kept = ftp.random.dropout(key, p["emb.weight"][x], 0.3)
        return fn(p, x).square().mean() + kept.square().mean()

    dims = {1: torch.export.Dim("S", min=1, max=64)}
    step = ftp.shard(loss, mesh, P(), batch_specs=P(None, "cp"), certify=True, dynamic_shapes=dims)
    for size in (15, 1):
        x = torch.arange(2 * size).reshape(2, size) % 8
        torch.testing.assert_close(step(params, x)[0], loss(params, x))
    assert step.shapes.one_by_one == ()
