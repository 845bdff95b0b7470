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
    DIMS,
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

import ftp
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


def alike(given, sizes):
    """The sizes that a program's graphs may serve."""
    ranks = [given.ranks.at(c, given.values) for c in given.mesh.coordinates()]
    every = [given.ranks.sizes.conditions, *(rank.conditions for rank in ranks)]
    return [s for s in sizes if all(conditions.holds((s,)) for conditions in every)]


def check_changes(given, sizes, most, every=1):
    """Each changed program is refused, or its certificate is limited to sizes at which it is right.
    Returns the number of those refused.

    Args:
        sizes: which its graphs may serve.
        most, every: how many changes of collectives and data movement, and which of all.
    """
    refused = 0
    with given.ranks.sizes.noting(given.values):
        changes = islice(changed_programs(given, most), 0, None, every)
        for number, (what, certificate) in enumerate(changes):
            if not number:
                sizes = alike(given, sizes)
                assert len(sizes) > 2 and given.values[0] in sizes
            found = proven(certificate)
            refused += found is None
            if found is not None:
                held = [s for s in sizes if found.holds((s,))]
                assert given.values[0] in held
                for s in {given.values[0], *held[:2], *held[-2:]}:
                    assert is_right(certificate, (s,)), (what, s)
    return refused


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
    assert check_changes(program_at(step, size), (6, 7, 8, 9, 11, 12, 14), 20, every) > 10


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("size", [12, 16, 11])
def test_changes_of_models_are_refused_or_limited(name, size):
    check_changes(program(name, size), range(1, 65), 100, every=4)


def check_proofs(step, size):
    """The certificates agree with the check of each size that meets their conditions, and the step
    with one device.
    """
    step(weights(), tokens(size))
    given = program_at(step, size)
    check_sizes(given)
    sizes = alike(given, range(max(size - 8, 1), size + 9))
    for proof in given.ranks.proofs[given.ranks.served((size,))[1]]:
        for other in sizes if proof is not None else ():
            if proof.holds((other,)):
                certify.certified(program_at(step, other))
    found = step(weights(), tokens(size))
    grads, loss = torch.func.grad_and_value(loss_fn)(weights(), tokens(size))
    torch.testing.assert_close(found, (loss, grads), rtol=1e-12, atol=1e-12)


STEPS = {}


@pytest.mark.slow
@settings(max_examples=12)
@given(st.data())
def test_certificates_agree_with_the_check_of_each_size(data):
    """Drawn meshes, specs and sizes."""
    shape = data.draw(st.sampled_from([(2, 1), (3, 1), (5, 1), (2, 2), (2, 3), (4, 2)]))
    batch = data.draw(
        st.sampled_from([P(None, "a"), P("b", "a"), P(None, ("a", "b")), P(None, ("b", "a")), P()])
    )
    specs = data.draw(st.sampled_from([P(), {"up": P(None, "b"), "down": P("b")}, P("a")]))
    key = str((shape, batch, specs))
    if key not in STEPS:
        mesh = ftp.simulated_mesh(shape, ("a", "b"))
        STEPS[key] = ftp.shard(loss_fn, mesh, specs, batch_specs=batch, dynamic_shapes=DIMS)
    check_proofs(STEPS[key], data.draw(st.integers(1, 40)))


@pytest.mark.parametrize("size", [6, 8])
def test_a_certificate_agrees_with_the_check_of_each_size(size):
    check_proofs(step_of("context", certify=False), size)
