"""The programs that a step keeps: those used last, with a word at the tenth, and nothing left of
the others.
"""

import gc
import random
import warnings
import weakref
from collections import OrderedDict

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import graph_module

import ftp
from ftp import P
from ftp.api import program_cache
from ftp.api.program_cache import MANY
from ftp.api.step import Step
from ftp.errors import DonationError, InputError
from ftp.planning import from_fx as ingest
from ftp.runtime.options import PROGRAMS

MESH = ftp.simulated_mesh((2,), ("tp",))


def loss_fn(params, x, scale=1.0):
    hidden = torch.nn.functional.layer_norm(x @ params["up"], (6,))
    return (torch.tanh(hidden) @ params["down"]).square().mean() * scale


def make(**options) -> Step:
    """A step that plans each size for itself."""
    specs = {"up": P(None, "tp"), "down": P("tp")}
    return ftp.shard(loss_fn, MESH, specs, dynamic_shapes={}, **options)


def weights():
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(s, generator=generator).double()
        for name, s in (("up", (3, 6)), ("down", (6, 2)))
    }


def batch(rows: int) -> torch.Tensor:
    return torch.arange(3.0 * rows, dtype=torch.float64).sin().view(rows, 3)


@pytest.mark.cases_by_default(1)
@pytest.mark.parametrize("most", [1, 2, 4])
def test_the_programs_used_last_are_kept(most: int, monkeypatch: pytest.MonkeyPatch):
    planned, plan = [], Step._plan
    monkeypatch.setattr(
        Step, "_plan", lambda step, call, record: planned.append(1) or plan(step, call, record)
    )
    step, params, draws = make(programs=most), weights(), random.Random(most)
    kept: OrderedDict[int, None] = OrderedDict()
    due = 0
    for _ in range(16):
        rows = draws.randint(1, 5)
        due += rows not in kept
        kept[rows] = None
        kept.move_to_end(rows)
        if len(kept) > most:
            kept.popitem(last=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            loss, _ = step(params, batch(rows))
        torch.testing.assert_close(loss, loss_fn(params, batch(rows)))
        assert len(planned) == due and len(step._cache.used) == len(kept)
    assert due > most


def test_calls_of_one_shape_in_several_forms_are_one_program():
    step, params = make(programs=2), weights()
    placed = ftp.device_put(params, MESH, {"up": P(None, "tp"), "down": P("tp")})
    for rows in (1, 2, 3):
        for given in (params, placed, params):
            step(given, batch(rows))
    assert len(step._cache.used) == 2 and set(step._cache.programs.values()) == set(
        step._cache.used
    )


def test_at_the_tenth_program_it_is_said_what_changes():
    step, params = make(), weights()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for rows in range(1, MANY):
            step(params, batch(rows))
            step(params, batch(rows))
    with pytest.warns(UserWarning, match="has planned 10 programs") as caught:
        step(params, batch(MANY))
    assert caught[0].filename == __file__
    assert str(caught[0].message) == (
        "The step has planned 10 programs, as its arguments change: x was float64[1, 3],"
        " float64[2, 3], ..., float64[10, 3]."
        " Each costs as much as a first call. Pad tensors to one shape, or to a few (buckets)."
        f" The step keeps the {PROGRAMS} programs used last (programs={PROGRAMS})."
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(params, batch(MANY + 1))  # once is enough


def test_of_a_value_that_changes_it_is_said_to_make_it_a_tensor():
    step, params = make(programs=5), weights()
    for n in range(1, MANY):
        step(params, batch(2), 1.0 / n)
    with pytest.warns(UserWarning, match="has planned 10 programs") as caught:
        loss, _ = step(params, batch(2), 1.0 / MANY)
    torch.testing.assert_close(loss, loss_fn(params, batch(2), 1.0 / MANY))
    (warning,) = caught
    # Of the five programs that are kept.
    assert "scale was 0.16666666666666666, 0.14285714285714285, ..., 0.1." in str(warning.message)
    assert "Give numbers that change as tensors: torch.tensor(x)." in str(warning.message)
    assert "Pad" not in str(warning.message)


def test_reshards_of_many_shapes_are_as_they_should_be():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for rows in range(1, MANY + 3):
            x = ftp.device_put(batch(rows), MESH, P("tp"))
            torch.testing.assert_close(ftp.reshard(x, MESH, P("tp"), P()), batch(rows))


def test_what_a_dropped_program_was_given_stays_donated():
    step = ftp.spmd(
        lambda state, x: state + x.sum(), MESH, (P("tp"), P()), P("tp"), donate=(0,), programs=1
    )
    mesh_state = ftp.device_put(torch.zeros(4, dtype=torch.float64), MESH, P("tp"))
    given, expected = [], torch.zeros(4, dtype=torch.float64)
    for rows in (1, 2, 1, 3, 2):
        given.append(mesh_state)
        mesh_state = step(mesh_state, batch(rows))
        expected = expected + batch(rows).sum()
        torch.testing.assert_close(mesh_state, expected)
    for old in given:
        with pytest.raises(DonationError):
            step(old, batch(4))


@pytest.mark.slow
def test_nothing_is_left_of_a_dropped_program(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ingest, "_MOST_TRACED", 8)
    monkeypatch.setattr(program_cache, "_MOST_FAKE", 100)
    step, params = make(programs=2), weights()
    dropped, counts = [], []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for rows in range(1, 25):
            step(params, batch(rows))
            dropped.append(weakref.ref(next(reversed(step._cache.used)).program.traced))
            if rows in (12, 24):
                gc.collect()
                counts.append((len(gc.get_objects()), len(graph_module._loader.eval_cache)))
    assert [ref() is None for ref in dropped] == [True] * 22 + [False] * 2
    (objects, sources), (objects_now, sources_now) = counts
    # Kept are tables of the planner, of which there is a bound; a program is some thousand objects.
    assert objects_now - objects < 12 * 200, counts
    assert sources_now == sources, counts
    assert len(FakeTensorMode.cache) < 400 and len(ingest._traced) == 8


def test_a_number_of_programs():
    for programs in (0, -1, True, 1.0):
        with pytest.raises(
            InputError, match=r"programs is .*; it must be a number of programs, at least 1"
        ):
            make(programs=programs)
