"""Training with matmuls of float8 beside one device, and what it sends beside code by hand."""

import pytest
import torch
from float8_mlp import E4, E5, PLACEMENTS, distance, drawn, gradients, linear, mlp
from hypothesis import given, settings
from hypothesis import strategies as st
from pages import run_examples
from torch import Tensor
from torch.nn import functional as F

import ftp
from ftp import P
from ftp.rules import low_precision
from ftp.rules.call import Call, Meta


def test_what_it_costs():
    """Its FLOPs at twice the rate of bfloat16, and each rank computes its share."""
    params, batch = drawn(2048, 256, 1024)
    found = {}
    for of_float8 in (True, False):
        for ranks in (1, 4):
            mesh = ftp.AbstractMesh((ranks,), ("dp",), device_type="cuda")
            loss = mlp(linear(by_rows=True, new=True) if of_float8 else linear_in_bfloat16)
            step = ftp.shard(loss, mesh, P("dp"), batch_specs=P("dp"), hardware="h100")
            found[of_float8, ranks] = step.lower(params, *batch).cost()
    for of_float8, rate in ((True, 1979e12), (False, 989e12)):
        flops = [sum(op.flops for op in found[of_float8, ranks].ops) for ranks in (1, 4)]
        assert flops == [5 * 2 * 2048 * 256 * 1024, 5 * 2 * 512 * 256 * 1024]
        cost = found[of_float8, 1]
        assert cost.mfu * float(cost) == pytest.approx(flops[0] / rate)


def linear_in_bfloat16(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x.bfloat16(), w.bfloat16())


@pytest.mark.cases_by_default(4)
@pytest.mark.parametrize("by_rows", [False, True], ids=["a scale", "scales of rows"])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_training_in_float8(placement: str, by_rows: bool):
    """Rounding to float8 turns the last bits of a sum into steps of an eighth: no two orders of a
    sum agree closely. The step is as near to float64's gradients as one device's is.
    """
    shape, axes, specs, batch_specs = PLACEMENTS[placement]
    loss = mlp(linear(by_rows, new=placement == "dp"))
    params, batch = drawn(45, 24, 50)
    mesh = ftp.simulated_mesh(shape, axes)
    step = ftp.shard(loss, mesh, specs, batch_specs=batch_specs, certify=True, strict=True)
    value, grads = step(params, *batch)
    wide = {path: p.double() for path, p in params.items()}
    exact = gradients(mlp(F.linear), wide, [x.double() for x in batch])
    one_device = distance(gradients(loss, params, batch), exact)
    assert distance([value, *grads.values()], exact) < 1.1 * one_device < 0.2


def sent(placement: str, by_rows: bool) -> dict[tuple[str, torch.dtype], int]:
    """Bytes by collective and dtype, but for largest elements and the loss."""
    shape, axes, specs, batch_specs = PLACEMENTS[placement]
    params, batch = drawn(96, 32, 64)
    mesh, loss = ftp.AbstractMesh(shape, axes), mlp(linear(by_rows))
    step = ftp.shard(loss, mesh, specs, batch_specs=batch_specs, bucket=False)
    found: dict[tuple[str, torch.dtype], int] = {}
    for c in step.lower(params, *batch).collectives:
        if c.nbytes > 1024:
            found[c.op, c.dtype] = found.get((c.op, c.dtype), 0) + c.nbytes
    return found


def test_what_it_sends():
    """As code by hand: the sum of a row-parallel product; gradients; weights gathered as float8."""
    for by_rows in (False, True):
        assert sent("tp", by_rows) == {("all_reduce", torch.float32): 96 * 32 * 4}
        assert sent("dp", by_rows) == {("all_reduce", torch.float32): 2 * 32 * 64 * 4}
        assert sent("ZeRO-3", by_rows) == {
            ("all_gather", E4): 3 * 32 * 64,  # down again for the gradient, with other scales
            ("reduce_scatter", torch.float32): 2 * 32 * 64 * 4,
        }


@settings(max_examples=15)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(2, 40), st.booleans(), st.data())
def test_operands_padded_for_gpus(m: int, k: int, n: int, by_rows: bool, data: st.DataObject):
    """As a rank of GPUs pads them to multiples of 16, run on a CPU, to the bit."""
    dtypes = [data.draw(st.sampled_from([E4, E5])) for _ in "ab"]
    shapes = (m, k), (n, k)
    a, b = (torch.randint(-3, 4, s).to(d) for s, d in zip(shapes, dtypes, strict=True))
    scales = [0.5 ** torch.randint(3, s if by_rows else ()).float() for s in ((m, 1), (1, n))]
    bias = data.draw(st.sampled_from([None, torch.arange(n).bfloat16()]))
    out_dtype = torch.float32 if bias is None else torch.bfloat16

    def f(a: Tensor, b: Tensor, scales: list[Tensor], bias: Tensor | None) -> Tensor:
        return torch._scaled_mm(a, b.t(), *scales, bias=bias, out_dtype=out_dtype)

    cuts = [data.draw(st.sampled_from([P(), P("x"), P(None, "x")])) for _ in "ab"]
    mesh = ftp.simulated_mesh((data.draw(st.integers(2, 3)),), ("x",))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(low_precision, "MULTIPLES", {"cpu": 16})
        found = ftp.spmd(f, mesh, (*cuts, P(), P()))(a, b, scales, bias)
    assert torch.equal(found, f(a, b, scales, bias))


@pytest.mark.parametrize(("k", "pads"), [(96, 2), (64, 0)])
def test_parts_are_padded_on_gpus_alone(k: int, pads: int):
    def f(a: Tensor, b: Tensor, one: Tensor) -> Tensor:
        return torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.float32)

    for device, due in (("cuda", pads), ("cpu", 0)):
        mesh = ftp.AbstractMesh((4,), ("x",), device_type=device)
        a, b = (torch.empty(16, k, dtype=E4, device="meta") for _ in "ab")
        step = ftp.spmd(f, mesh, (P(None, "x"), P(None, "x"), P()))
        nodes = step.lower(a, b, torch.empty(())).graph.graph.nodes
        found = sum(x.target is torch.ops.aten.constant_pad_nd.default for x in nodes)
        assert found == due


@pytest.mark.parametrize(
    ("scales", "text"),
    [
        (((256, 2), (2, 384)), "m [k], [k] n, m [m0], [n0] n -> m n"),  # blocks of 1 x 128
        (((256, 2), (2, 3)), "m [k], [k] [n], m [m0], [n00] [n01] -> m [n]"),  # of 128 x 128
        (((2048,), (3072,)), "[m] [k], [k] [n], [m00], [n00] -> [m] [n]"),  # swizzled
    ],
)
def test_scales_of_blocks(scales: tuple[tuple[int, ...], ...], text: str):
    """Which no CPU multiplies: rows and columns are cut where each has its own scales."""
    narrow = torch.float32 if len(scales[0]) == 2 else torch.float8_e8m0fnu
    of_a, of_b = (Meta(shape, narrow) for shape in scales)
    args = (Meta((256, 256), E4), Meta((256, 384), E4), of_a, of_b, None, None, torch.bfloat16)
    call = Call(torch.ops.aten._scaled_mm.default, args, {}, (Meta((256, 384), torch.bfloat16),))
    assert str(low_precision.scaled_mm(call)) == text


def test_the_page_runs():
    run_examples("low_precision.md", 10)
