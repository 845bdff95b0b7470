"""Specs and DTensor's placements say the same of every rank's part, as DTensor's own chunking
tells it.
"""

from contextlib import suppress
from itertools import permutations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import ftp
from ftp import P
from ftp.sharding.check_spec import check_spec
from ftp.sharding.dtensor_placements import placements_of_spec, spec_of_placements
from ftp.sharding.local_pieces import local_pieces
from ftp.sharding.mesh import resolve


def as_dtensor_cuts(size, placements, mesh, coordinate):
    part = torch.arange(size)
    for placement, (axis, n) in zip(placements, mesh.axes.items(), strict=True):
        if not placement.is_replicate():
            part = placement._split_tensor(part, n, with_padding=False)[0][coordinate[axis]]
    return part.tolist()


def as_spec_cuts(size, spec, mesh, coordinate):
    return [
        i for a, b in local_pieces(spec, (size,), mesh.axes, coordinate)[0] for i in range(a, b)
    ]


def same_on_all(size, spec, placements, mesh):
    return all(
        as_dtensor_cuts(size, placements, mesh, c) == as_spec_cuts(size, spec, mesh, c)
        for c in mesh.coordinates()
    )


def attempt(convert, given, mesh, size):
    with suppress(ftp.errors.SpecError):
        return convert(given, mesh, (size,), "x")
    return None


@st.composite
def entries(draw):
    shape = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    mesh = resolve(ftp.AbstractMesh(shape, ("a", "b", "c")[: len(shape)]))
    axes = draw(st.permutations(mesh.axis_names))[: draw(st.integers(1, len(shape)))]
    if draw(st.booleans()):
        pack = draw(st.integers(1, 3))
        axes = [ftp.units(axes[0], draw(st.integers(1, 3)), pack=pack), *axes[1:]]
    return mesh, P(tuple(axes))


@given(entries(), st.integers(0, 40))
def test_placements_hold_what_the_spec_says(drawn, size):
    mesh, spec = drawn
    if check_spec(spec, (size,), mesh.axes, "x"):
        return
    placements = attempt(placements_of_spec, spec, mesh, size)
    if placements is None:
        assert size % mesh.size() or any(cut.size > 1 or cut.pack != 1 for cut in spec.cuts(0))
        return
    assert same_on_all(size, spec, placements, mesh)
    back = spec_of_placements(placements, mesh, (size,), "x")
    assert same_on_all(size, back, placements, mesh)


@given(st.data(), st.integers(0, 40))
def test_specs_hold_what_the_placements_say(data, size):
    shape = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    mesh = resolve(ftp.AbstractMesh(shape, ("a", "b", "c")[: len(shape)]))
    kinds = [
        st.just(Replicate()),
        st.just(Shard(0)),
        st.just(Shard(-1)),
        st.builds(lambda f: _StridedShard(0, split_factor=f), st.integers(2, 6)),
    ]
    placements = data.draw(st.lists(st.one_of(*kinds), min_size=len(shape), max_size=len(shape)))
    spec = attempt(spec_of_placements, placements, mesh, size)
    if spec is None:
        assert any(isinstance(p, _StridedShard) for p in placements)
        return
    positive = [Shard(0) if p == Shard(-1) else p for p in placements]
    assert same_on_all(size, spec, positive, mesh)


def test_every_order_of_axes_is_found():
    mesh = resolve(ftp.AbstractMesh((2, 3, 2), ("a", "b", "c")))
    for order in permutations("abc"):
        placements = placements_of_spec(P(order), mesh, (24,), "x")
        assert spec_of_placements(placements, mesh, (24,), "x") == P(order)
    assert placements_of_spec(P("b", "a"), mesh, (6, 4), "x") == (Shard(1), Shard(0), Replicate())


def test_what_no_spec_or_placement_states():
    mesh = resolve(ftp.AbstractMesh((3, 2), ("dp", "tp")))
    with pytest.raises(
        ftp.errors.SpecError,
        match=r"x is Partial\(sum\) over 'tp', a pending sum.*Reduce it first: redistribute it to",
    ):
        spec_of_placements((Replicate(), Partial()), mesh, (4,), "x")
    with pytest.raises(
        ftp.errors.SpecError,
        match=r"x, of spec P\(\('tp', 'dp'\)\) and shape \(7,\): DTensor has no placements for it",
    ):
        placements_of_spec(P(("tp", "dp")), mesh, (7,), "x")
