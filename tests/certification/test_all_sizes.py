"""One certificate for all sizes that meet its conditions: it agrees with the check of each size."""

from dataclasses import replace
from itertools import islice

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mutants import mutants
from sized_certificates import is_right, proven, with_other_numbers
from sized_steps import (
    LAYOUTS,
    MOST,
    arguments,
    loss_fn,
    moved,
    moving,
    program_at,
    step_of,
    tokens,
    weights,
)

from ftp import P
from ftp.api import certify, certify_sizes
from ftp.api.certify_sizes import certificate_for_all, certified_for_all, check_sizes
from ftp.certification.ranks import Ranks


def program(name, size):
    step = step_of(name, certify=False)
    step(weights(), tokens(size))
    return program_at(step, size)


def counted(monkeypatch):
    """The sizes that are checked: for all sizes, and alone."""
    made = {"all": [], "alone": []}
    for module, name, key in (
        (certify_sizes, "certified_for_all", "all"),
        (certify, "certified", "alone"),
    ):
        check = getattr(module, name)

        def counting(program, check=check, key=key):
            made[key].append(program.values[0])
            return check(program)

        monkeypatch.setattr(module, name, counting)
    return made


@pytest.mark.parametrize("sizes", [(6, 9, 30, 300), (8, 11, 25, 301)], ids=str)
def test_a_new_size_takes_no_check(monkeypatch, sizes):
    made = counted(monkeypatch)
    step = moving(certify=True)
    for size in sizes:
        torch.testing.assert_close(step(*arguments(size)), moved(*arguments(size)))
    assert made == {"all": [sizes[0]], "alone": []}
    assert step.shapes.plans == 1


def test_conditions():
    """None of S = 3 k; otherwise that the last rank has a shard, and that it is shorter."""
    found = certified_for_all(program("context", 12))
    assert not [*found] and all(found.holds((s,)) for s in range(3, MOST, 3))
    found = certified_for_all(program("context", 7))
    held = {s for s in range(1, MOST + 1) if found.holds((s,))}
    assert held == {s for s in range(5, MOST + 1) if s % 3}


def test_a_size_that_a_check_asks_for_has_a_certificate_of_its_own(monkeypatch):
    """As C code that takes a plain int."""
    made = counted(monkeypatch)
    real = certify_sizes.check

    def asking(certificate):
        int(certificate.sizes.symbols[0])
        return real(certificate)

    monkeypatch.setattr(certify_sizes, "check", asking)
    step = moving(certify=True)
    for size in (6, 9, 6, 12):
        step(*arguments(size))
    assert made == {"all": [6], "alone": [9, 12]}  # the second time 6 is known


def test_what_is_not_known_for_all_sizes_is_certified_for_each(monkeypatch):
    made = counted(monkeypatch)

    def refuse(graph, certificate, symbolic):
        raise TypeError("no formula")

    monkeypatch.setattr(certify_sizes, "check_traced", refuse)
    step = moving(certify=True)
    for size in (6, 9, 6, 12):
        step(*arguments(size))
    assert made == {"all": [6], "alone": [6, 9, 12]}


def test_reduced_precision_is_refused():
    with pytest.raises(Exception, match="without reduce_dtype"):
        step_of("context", reduce_dtype=torch.bfloat16)(weights(), tokens(6))


def changed_programs(given, most):
    """Programs with a wrong number, or a change to collectives, data movement or writes."""
    certificate = certificate_for_all(given)
    yield from with_other_numbers(certificate)
    for mutant in mutants(certificate, 0, most):
        ranks = Ranks.of(mutant.graphs, mutant.at)
        yield mutant.what, replace(certificate, ranks=ranks)


def alike(given, sizes=range(1, 65)):
    """The sizes that a program's graphs serve."""
    ranks, graphs = given.ranks, given.ranks.served(given.values)[1]
    return [
        s for s in sizes if ranks.sizes.conditions.holds((s,)) and ranks.served((s,))[1] == graphs
    ]


def check_changes(given, sizes, most, every=1):
    """Each changed program is refused, or its certificate is limited to sizes at which it is right.
    Returns the numbers of those refused, and of those limited.

    Args:
        sizes: which its graphs may serve.
        most, every: how many changes of collectives and data movement, and which of all.
    """
    sizes, refused, limited = alike(given, sizes), 0, 0
    assert len(sizes) > 2 and given.values[0] in sizes
    with given.ranks.sizes.noting(given.values):
        for what, certificate in islice(changed_programs(given, most), 0, None, every):
            found = proven(certificate)
            refused += found is None
            if found is not None:
                held = [s for s in sizes if found.holds((s,))]
                limited += len(held) < len(sizes)
                assert given.values[0] in held
                for s in {given.values[0], *held[:2], *held[-2:]}:
                    assert is_right(certificate, (s,)), (what, s)
    return refused, limited


@pytest.mark.parametrize(
    ("spec", "size", "every"),
    [
        (P("cp"), 8, 7),
        *(
            pytest.param(spec, size, 1, marks=pytest.mark.slow)
            for spec, size in ((P("cp"), 8), (P("cp"), 6), (P(), 7))
        ),
    ],
    ids=str,
)
def test_changed_programs_are_refused_or_limited(spec, size, every):
    """Uneven, even, uncut."""
    step = moving(spec)
    step(*arguments(size))
    refused, limited = check_changes(program_at(step, size), (6, 7, 8, 9, 11, 12, 14), 20, every)
    assert refused > 10 and (limited or size != 8 or every > 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("size", [12, 16, 11])
def test_changes_of_models_are_refused_or_limited(name, size):
    check_changes(program(name, size), range(1, 65), 100, every=4)


STEPS = {}


@pytest.mark.slow
@settings(max_examples=30)
@given(st.sampled_from([*LAYOUTS]), st.integers(1, 64))
def test_a_certificate_agrees_with_the_check_of_each_size(name, size):
    """On every size of its conditions, and with one device at one of them."""
    if name not in STEPS:
        STEPS[name] = step_of(name, certify=False)
    step = STEPS[name]
    step(weights(), tokens(size))
    given = program_at(step, size)
    check_sizes(given)
    sizes = alike(given)
    for proof in given.ranks.proofs[given.ranks.served((size,))[1]]:
        for other in sizes if proof is not None else ():
            if proof.holds((other,)):
                certify.certified(program_at(step, other))
    check_step(step, size)


def check_step(step, size):
    found = step(weights(), tokens(size))
    grads, loss = torch.func.grad_and_value(loss_fn)(weights(), tokens(size))
    torch.testing.assert_close(found, (loss, grads), rtol=1e-12, atol=1e-12)
