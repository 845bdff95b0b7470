"""Numbers that are computed from captured tensors alone are known while tracing: no program reads
them, and a step refuses later calls once such a tensor has changed.
"""

import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch

import ftp
from ftp import P
from ftp.errors import InputError

MESH = ftp.simulated_mesh((2,), ("tp",))
MESHES = [((2,), ("tp",)), ((2, 2), ("dp", "tp"))]
# Velocities, weights and opposite directions of the lattice D2Q9.
C = torch.tensor([[0, 0], [1, 0], [0, 1], [-1, 0], [0, -1], [1, 1], [-1, 1], [-1, -1], [1, -1]])
WEIGHTS = torch.tensor([16.0, 4, 4, 4, 4, 1, 1, 1, 1], dtype=torch.float64) / 36
OPPOSITE = torch.tensor([0, 3, 4, 1, 2, 7, 8, 5, 6])
# The first joints of a body's kinematic tree.
PARENTS = torch.tensor([-1, 0, 0, 0, 1, 2, 3, 4, 5, 6])


def collide_and_stream(tau, f, wall):
    """A step of lattice Boltzmann with walls that bounce back: ``f`` is (9, width, height)."""
    density = f.sum(0)
    ux, uy = (sum(int(C[i, d]) * f[i] for i in range(9)) / density for d in range(2))
    after = []
    for i, (cx, cy) in enumerate(C):
        along = int(cx) * ux + cy.item() * uy
        settled = 1 + 3 * along + 4.5 * along**2 - 1.5 * (ux**2 + uy**2)
        collided = f[i] - (f[i] - float(WEIGHTS[i]) * density * settled) / tau
        bounced = f[OPPOSITE[i].item()] if C[i].abs().sum() > 0 else f[i]
        moved = torch.where(wall, bounced, collided)
        after.append(torch.roll(moved, (int(C[i, 0].item()), int(C[i, 1])), (0, 1)))
    return torch.stack(after).cos().square().sum()


def pose(bones, turns):
    """Places of joints, each turned with its parents: ``turns`` is (batch, joints, 3, 3)."""
    turned, at = [], []
    for i in range(len(PARENTS)):
        if PARENTS[i] < 0:
            turned.append(turns[:, i])
            at.append(bones[i].expand(turns.shape[0], 3))
        else:
            parent = int(PARENTS[i])
            turned.append(turned[parent] @ turns[:, i])
            at.append(at[PARENTS[i]] + turned[parent] @ bones[i])
    return torch.stack(at, 1).sin().square().sum()


def _of_lattice():
    f = torch.linspace(0.5, 3, 9 * 5 * 4, dtype=torch.float64).sin().square().reshape(9, 5, 4) + 1
    wall = torch.zeros(5, 4, dtype=torch.bool)
    wall[0] = True
    tau = torch.linspace(0.6, 2, 20, dtype=torch.float64).reshape(5, 4)
    return collide_and_stream, (tau, f, wall), (P("tp"), P(None, "tp"), P())


def _of_body():
    turns = torch.linspace(-1, 2, 4 * 10 * 9, dtype=torch.float64).sin().reshape(4, 10, 3, 3)
    bones = torch.linspace(-1, 1, 30, dtype=torch.float64).cos().reshape(10, 3)
    return pose, (bones, turns), (P(), P("tp"))


@pytest.mark.parametrize("program", [_of_lattice, _of_body])
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("strict", [False, True])
def test_programs_that_read_tables_of_constants(program, mesh, strict):
    fn, (first, *rest), (spec, *specs) = program()
    if strict:  # which refuses the layouts that a roll along a cut dim takes
        spec, specs = P(), [P()] * len(specs)
    step = ftp.shard(
        fn,
        ftp.simulated_mesh(*mesh),
        spec,
        batch_specs=tuple(specs),
        certify=not strict,
        strict=strict,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss, grad = step(first, *rest)
    leaf = first.clone().requires_grad_()
    expected = fn(leaf, *rest)
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(grad, torch.autograd.grad(expected, leaf)[0])
    assert not step.lower(first, *rest).assumptions


TABLE = torch.tensor([3, 1, 2, 0])
SHARES = torch.tensor([0.25, 0.5, 2.25], dtype=torch.float64)


def _repeated(x: Any, n: Any) -> Any:
    return sum(x * (i + 1) for i in range(n))


def _after_a_decision(x):
    y = x * 2 if x.sum() > 0 else x
    return y[: int(TABLE[2])].sum() + float(SHARES[1])


def _in_many_ways(x):
    for i in range(20):
        x = x.sin() if (TABLE[i % 4] + i) % 3 == 0 else (x + 1 if SHARES[i % 3] > 1 else x * 2)
    return x.sum()


READING: dict[str, Any] = {
    "int": lambda x: _repeated(x, int(TABLE[0])).sum(),
    "range": lambda x: _repeated(x, TABLE[0]).sum(),
    "item": lambda x: torch.cat([x, x.new_ones(TABLE[2].item(), 4)]).cos().sum(),
    "float": lambda x: (x * math.sqrt(float(SHARES[2]))).sum(),
    "item of a fraction": lambda x: (x * math.sqrt(SHARES[2].item())).sum(),
    "round": lambda x: x[: round(SHARES[2].item())].sum(),
    "tolist": lambda x: x.split(TABLE[:3].tolist(), 0)[TABLE[:2].tolist()[1]].sum(),
    "numpy": lambda x: x.reshape(*(TABLE[2:3].numpy() * 3), 4).softmax(1).square().sum(),
    "len": lambda x: _repeated(x, len(TABLE[TABLE > 1])).sum(),
    "key": lambda x: (x * {3: 2.0, 1: 5.0}[int(TABLE[1])]).sum(),
    "sum": lambda x: _repeated(x, int((TABLE * 2 - 1).clamp(min=0).sum())).sum(),
    "text": lambda x: (x * len(str(int(TABLE.sum()) * 1000))).sum(),
    "bool": lambda x: _repeated(x, bool(TABLE[1] == 1) + 1).sum(),
    "format": lambda x: (x * len(f"{TABLE[1] * 1000:d}") * len(f"{SHARES[2]:.3f}")).sum(),
    "repeats": lambda x: x[:4].repeat_interleave(TABLE, 0).cumsum(0).sum(),
    "after a decision": _after_a_decision,
    "in many ways": _in_many_ways,
    "vmap": lambda x: torch.vmap(lambda row: _repeated(row, int(TABLE[0])))(x).sum(),
    "remat": lambda x: ftp.remat(lambda y: _repeated(y.sin(), int(TABLE[0])).cos())(x).sum(),
    "local": lambda x: ftp.local(
        lambda y: _repeated(y.sin(), int(TABLE[0])), None, P(None, "tp"), P(None, "tp")
    )(x).sum(),
}  # fmt: skip


@pytest.mark.parametrize("form", READING)
@pytest.mark.parametrize("strict", [False, True])
def test_a_number_of_captured_tensors_needs_no_program_of_its_own(form, strict):
    fn, x = READING[form], torch.linspace(-1, 3, 24, dtype=torch.float64).reshape(6, 4)
    step = ftp.shard(fn, MESH, P(None, "tp"), strict=strict)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss, grad = step(x)
    leaf = x.clone().requires_grad_()
    expected = fn(leaf) if form != "local" else _repeated(leaf.sin(), 3).sum()
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(grad, torch.autograd.grad(expected, leaf)[0])


def _by_numpy(table):
    table.numpy()[1] = 2


CHANGES: dict[str, Any] = {
    "in place": lambda table: table.fill_(2),
    "data": lambda table: table.data.fill_(2),
    "numpy": _by_numpy,
    "optimizer": lambda table: torch.optim.SGD([table], lr=1.0).step(),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("reads_row", [False, True])
def test_a_table_that_changes_later_is_an_error(change, reads_row):
    table = torch.tensor([3.0, 1.0], dtype=torch.float64)
    if change == "optimizer":
        table.requires_grad_().grad = torch.ones(2, dtype=torch.float64)

    def loss(x):
        read = table[1:] if reads_row else table
        return (x * float(read.detach()[-1])).sum()

    x = torch.ones(4, dtype=torch.float64)
    step = ftp.shard(loss, MESH, P("tp"))
    for _ in range(3):
        assert step(x)[0] == 4
    with torch.no_grad():
        table.copy_(table.clone())
    assert step(x)[0] == 4
    CHANGES[change](table)
    for _ in range(2):
        with pytest.raises(InputError, match=r"'table', which loss .* was read as Python numbers"):
            step(x)
    assert ftp.shard(loss, MESH, P("tp"))(x)[0] == loss(x)


COPIES: dict[str, Any] = {
    "tensor": lambda x, n: torch.tensor([n, 1], dtype=x.dtype),
    "tensor by name": lambda x, n: torch.tensor(data=[[n, 1]], dtype=x.dtype)[0],
    "as_tensor": lambda x, n: torch.as_tensor((n, n), dtype=x.dtype),
    "asarray": lambda x, n: torch.asarray([n, n], dtype=x.dtype),
    "new_tensor": lambda x, n: x.new_tensor([n, 1]),
    "from_dlpack": lambda x, n: x * float(np.from_dlpack(n)),
}


@pytest.mark.parametrize("form", COPIES)
def test_numbers_of_captured_tensors_that_torch_copies(form):
    number = torch.tensor(4.0, dtype=torch.float64)

    def loss(x):
        return (x * COPIES[form](x, number)).sum()

    x = torch.ones(2, dtype=torch.float64)
    step = ftp.shard(loss, MESH, P("tp"))
    for _ in range(2):
        assert step(x)[0] == loss(x)
    number.data.fill_(5)
    with pytest.raises(InputError, match="was read as Python numbers"):
        step(x)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex128])
@pytest.mark.parametrize("is_beside_nan", [False, True])
def test_the_sign_of_a_zero_and_numbers_beside_a_nan_change(dtype, is_beside_nan):
    table = torch.tensor([0.0, math.nan if is_beside_nan else 1.0], dtype=dtype)

    def loss(x):
        return (x * math.copysign(2.0, float(table[0].real))).sum()

    x = torch.ones(4, dtype=torch.float64)
    step = ftp.shard(loss, MESH, P("tp"))
    for _ in range(2):
        assert step(x)[0] == loss(x) == 8
    table.data[0] = -0.0
    with pytest.raises(InputError, match="was read as Python numbers"):
        step(x)


def test_few_decisions_by_a_captured_tensor_follow_it():
    flag = torch.tensor([True, False])

    def loss(x):
        return (x.sin() if flag[1] else x * 2).sum()

    x = torch.linspace(1, 2, 4, dtype=torch.float64)
    step = ftp.shard(loss, MESH, P("tp"))
    for value in (False, True, False):
        flag[1] = value
        torch.testing.assert_close(step(x)[0], loss(x))


def test_more_decisions_by_captured_tensors_are_known():
    """diffusers' samplers ask of each time, a captured number, whether it is the last."""
    times = torch.tensor([66, 33, 0])

    def loss(w, x):
        for time in times:
            x = x.sin() if time - 33 >= 0 else x * 2
            x = x @ w
        return x.square().mean()

    def known(w, x):
        x = ((x.sin() @ w).sin() @ w) * 2 @ w
        return x.square().mean()

    w, x = torch.rand(4, 4, dtype=torch.float64), torch.rand(3, 4, dtype=torch.float64)
    step, same = (ftp.shard(f, MESH, P(None, "tp")) for f in (loss, known))
    assert len(step.lower(w, x).graph.graph.nodes) == len(same.lower(w, x).graph.graph.nodes)
    torch.testing.assert_close(step(w, x), same(w, x), rtol=0, atol=0)


def test_ranks_whose_tables_differ_have_other_programs():
    x = torch.ones(4, dtype=torch.float64)

    def lowered(table):
        return ftp.spmd(lambda x: x * float(table[0]), MESH, P("tp"), P("tp")).lower(x)

    programs = [lowered(torch.tensor([v]))._program.fingerprint for v in (0.5, 0.5, 0.25)]
    assert programs[0] == programs[1] != programs[2]
