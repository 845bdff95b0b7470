"""Any placement to any placement is the identity on the global tensor; so is its transpose."""

import pytest
import torch
from few_or_many import few_or_many
from hypothesis import strategies as st

import ftp
from ftp import P
from ftp.sharding.check_spec import check_spec

DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
]


@st.composite
def meshes(draw):
    a = draw(st.integers(1, 4))
    b = draw(st.sampled_from([n for n in (1, 2, 3, 4) if a * n <= 8]))
    return (
        ftp.simulated_mesh((a, b), ("a", "b"))
        if draw(st.booleans())
        else ftp.simulated_mesh((a,), ("a",))
    )


@st.composite
def specs(draw, mesh, shape):
    """Each axis cuts one dim or none, in either order on one dim, in units of one or more
    elements where units divide it.
    """
    ndim = len(shape)
    entries = [[] for _ in range(ndim)]
    for axis in draw(st.permutations(mesh.axis_names)):
        dim = draw(st.integers(-1, ndim - 1))
        if dim >= 0:
            entries[dim].append(
                draw(st.sampled_from([axis, axis, ftp.units(axis, 2), ftp.units(axis, 3)]))
            )
    spec = P(*(tuple(e) or None for e in entries))
    if check_spec(spec, shape, dict(zip(mesh.axis_names, mesh.shape, strict=True)), "x"):
        spec = P(
            *(
                tuple(e if isinstance(e, str) else e.axis for e in entry) or None
                for entry in entries
            )
        )
    return spec


@st.composite
def cases(draw):
    mesh = draw(meshes())
    shape = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
    return mesh, shape, draw(specs(mesh, shape)), draw(specs(mesh, shape))


def tensor(shape, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(shape, generator=generator, dtype=torch.float64) * 9
    return values.abs().to(dtype) if dtype is torch.uint8 else values.to(dtype)


@few_or_many(cases(), st.sampled_from(DTYPES), few=40, many=600)
def test_resharding_keeps_the_values(case, dtype):
    mesh, shape, old, new = case
    x = tensor(shape, dtype)
    placed = ftp.device_put(x, mesh, old)
    moved = ftp.reshard(placed, mesh, old, new)
    assert moved.dtype == dtype
    assert torch.equal(ftp.device_get(moved, mesh, new), x)
    assert torch.equal(ftp.device_get(placed, mesh, old), x)


@few_or_many(cases(), few=20, many=400)
def test_a_program_that_only_moves_is_the_identity(case):
    mesh, shape, old, new = case
    x = tensor(shape)
    assert torch.equal(ftp.spmd(lambda x: x.clone(), mesh, old, new)(x), x)


@few_or_many(cases(), few=12, many=240)
def test_the_transpose_of_a_move_is_the_identity(case):
    mesh, shape, old, new = case
    x, weight = tensor(shape), tensor(shape) + 1
    loss = ftp.shard(
        lambda p, w: (ftp.constrain(p["x"], new) * w).sum(), mesh, {"x": old}, batch_specs=P()
    )
    value, grads = loss({"x": x}, weight)
    torch.testing.assert_close(value, (x * weight).sum())
    assert torch.equal(grads["x"], weight)


@few_or_many(
    cases(),
    meshes(),
    st.data(),
    st.sampled_from(DTYPES),
    st.sampled_from([None, 16, 1000]),
    few=20,
    many=240,
)
def test_another_mesh(case, new_mesh, data, dtype, max_bytes):
    mesh, shape, old, _ = case
    x = tensor(shape, dtype)
    new = data.draw(specs(new_mesh, shape))
    placed = ftp.device_put(
        {"x": torch.nn.Parameter(x, requires_grad=False), "n": 3}, mesh, {"x": old, "n": P()}
    )
    moved = ftp.reshard(
        placed,
        mesh,
        {"x": old, "n": P()},
        {"x": new, "n": P()},
        new_mesh=new_mesh,
        max_bytes=max_bytes,
    )
    assert (
        torch.equal(moved["x"], x)
        and moved["n"] == 3
        and isinstance(moved["x"], torch.nn.Parameter)
    )
    assert torch.equal(ftp.device_get(moved, new_mesh, {"x": new, "n": P()})["x"], x)


def test_trees_and_static_leaves():
    mesh = ftp.simulated_mesh((2, 2), ("a", "b"))
    tree = {"w": tensor((5, 3)), "n": 3, "none": None, "b": tensor((4,))}
    old, new = (
        {"w": P("a"), "n": P(), "none": None, "b": P(("a", "b"))},
        {"w": P("b", "a"), "n": P(), "none": None, "b": P()},
    )
    moved = ftp.reshard(ftp.device_put(tree, mesh, old), mesh, old, new)
    assert (
        moved["n"] == 3
        and moved["none"] is None
        and torch.equal(moved["w"], tree["w"])
        and torch.equal(moved["b"], tree["b"])
    )


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        (P("pp"), P(), "the mesh has no axis 'pp'"),
        (P(), P(None, "a"), "of 2 entries, but its shape (4,) has 1 dims"),
        (P("b"), P(), "placed with spec P('a'), but P('b') is asked for"),
    ],
)
def test_bad_specs(old, new, text):
    mesh = ftp.simulated_mesh((2, 2), ("a", "b"))
    x = ftp.device_put(tensor((4,)), mesh, P("a"))
    with pytest.raises(ftp.FtpError) as caught:
        ftp.reshard(x, mesh, old, new)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"new_mesh": ftp.AbstractMesh((2,), ("a",))}, "is abstract: nothing is stored on it"),
        ({"max_bytes": 8}, "max_bytes=8: give an int of at least 16"),
        (
            {"new_mesh": ftp.simulated_mesh((2,), ("tp",))},
            "tree has spec P('b'), but the mesh has no axis 'b'; its axes are 'tp' (size 2)",
        ),
    ],
)
def test_bad_moves(options, text):
    mesh = ftp.simulated_mesh((2, 2), ("a", "b"))
    with pytest.raises(ftp.FtpError) as caught:
        ftp.reshard(ftp.device_put(tensor((4,)), mesh, P("a")), mesh, P("a"), P("b"), **options)
    assert text in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint64, torch.float8_e4m3fn])
def test_dtypes_of_few_kernels(dtype):
    """Chunks of a zigzag are put in order by ops, such as flip, that these dtypes lack."""
    mesh = ftp.simulated_mesh((3,), ("a",))
    x = torch.arange(10).to(torch.uint8).to(dtype).view(2, 5)
    old, new = P(None, ftp.zigzag("a")), P(None, "a")
    moved = ftp.reshard(ftp.device_put(x, mesh, old), mesh, old, new)
    assert moved.dtype == dtype
    assert torch.equal(
        ftp.device_get(moved, mesh, new).contiguous().view(torch.uint8), x.view(torch.uint8)
    )
