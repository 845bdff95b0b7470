"""Zigzags: placed, moved, drawn and trained as one device does, and even work for causal masks."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from few_or_many import few_or_many
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

import ftp
from ftp import P, zigzag
from ftp.certification.checker import check
from ftp.certification.ranks import Ranks
from ftp.errors import CertificateError, SpecError
from ftp.ops.constrain import Pin, pin_from_str, pin_to_str
from ftp.report.flops import flops_of
from ftp.runtime.executed import local_inputs
from ftp.runtime.local_shapes import local_shapes
from ftp.sharding.local_pieces import local_pieces, local_shape
from ftp.sharding.mesh import resolve
from ftp.tensors.device_put import put, take

Z = zigzag("a")


@given(st.integers(0, 30), st.integers(1, 5))
def test_rank_r_holds_chunks_r_and_2n_1_r(size: int, n: int):
    x = torch.arange(size)
    chunks = [*x.chunk(2 * n), *[x[:0]] * (2 * n)][: 2 * n]
    whole = torch.full_like(x, -1)
    for rank in range(n):
        pieces = local_pieces(P(Z), (size,), {"a": n}, {"a": rank})
        held = take(x, pieces)
        assert torch.equal(held, torch.cat([chunks[rank], chunks[2 * n - 1 - rank]]))
        assert held.shape == local_shape(P(Z), (size,), {"a": n}, {"a": rank})
        put(whole, held, pieces)
    assert torch.equal(whole, x)
    most = max(local_shape(P(Z), (size,), {"a": n}, {"a": rank})[0] for rank in range(n))
    assert local_shape(P(Z), (size,), {"a": n}) == (most,)


@st.composite
def moves(draw: Any) -> Any:
    """A mesh, a shape, and two specs, of which one at least has a zigzag."""
    shape = draw(st.sampled_from([(2,), (3,), (4,), (2, 2), (3, 2)]))
    mesh = ftp.simulated_mesh(shape, ("a", "b")[: len(shape)])
    specs = [P(Z), P(None, Z)]
    others = [P(), P("a"), P(None, "a"), *specs]
    if len(shape) == 2:
        specs += [P((Z, "b")), P(("b", Z)), P(Z, "b"), P(zigzag("b"), Z)]
        others += [P(("a", "b")), P("b", "a"), P((Z, zigzag("b"))), *specs]
    size = draw(st.tuples(st.integers(1, 13), st.integers(1, 6)))
    both = draw(st.sampled_from(specs)), draw(st.sampled_from(others))
    return mesh, size, *(both if draw(st.booleans()) else both[::-1])


@few_or_many(moves(), few=3, many=100)
def test_moves_keep_the_values_and_so_do_their_transposes(case: Any):
    mesh, shape, old, new = case
    made = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(shape, generator=made, dtype=torch.float64) for _ in range(2))

    def loss(params: Any, weight: Tensor) -> Any:
        moved = ftp.constrain(params["x"], new)
        return (moved * weight).sum(), moved.cumsum(0)

    step = ftp.shard(loss, mesh, {"x": old}, batch_specs=P(), has_aux=True, certify=True)
    (value, aux), grads = step({"x": x}, weight)
    torch.testing.assert_close(value, (x * weight).sum())
    torch.testing.assert_close(aux, x.cumsum(0), rtol=0, atol=1e-12)
    assert torch.equal(grads["x"], weight)
    placed = ftp.device_put(x, mesh, old)
    assert torch.equal(ftp.device_get(ftp.reshard(placed, mesh, old, new), mesh, new), x)


def decoder(params: Any, tokens: Tensor, targets: Tensor, key: Tensor) -> Tensor:
    """One causal block with positions from ``arange``, dropout, and labels that may be ignored."""
    x = params["emb"][tokens] + params["at"][torch.arange(tokens.shape[1])]
    x = ftp.random.dropout(key, x, 0.5)
    b, s, d = x.shape
    q, k, v = ((x @ params[name]).view(b, s, 2, d // 2).transpose(1, 2) for name in "qkv")
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    x = F.layer_norm(x + y.transpose(1, 2).reshape(b, s, d) @ params["o"], (d,))
    logits = x @ params["emb"].T
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=0)


@pytest.mark.cases_by_default(1)
@pytest.mark.parametrize(
    ("shape", "names", "length"),
    [
        ((2,), ("cp",), 8),
        ((3,), ("cp",), 7),
        ((5,), ("cp",), 6),
        ((2, 2), ("cp", "tp"), 9),
        ((2, 2), ("dp", "cp"), 10),
    ],
)
def test_a_decoder(shape: Any, names: Any, length: int):
    made = torch.Generator().manual_seed(length)
    of = lambda *s: torch.randn(*s, generator=made, dtype=torch.float64)  # noqa: E731
    params = {name: of(8, 8) for name in "qkvo"} | {"emb": of(11, 8), "at": of(16, 8)}
    tokens, targets = (torch.randint(0, 11, (2, length), generator=made) for _ in range(2))
    column = P(None, "tp") if "tp" in names else P()
    specs = dict.fromkeys(params, P()) | dict.fromkeys("qkv", column)
    batch = P("dp" if "dp" in names else None, zigzag("cp"))
    mesh = ftp.simulated_mesh(shape, names)
    step = ftp.shard(decoder, mesh, specs, batch_specs=(batch, batch, P()), certify=True)
    key = ftp.random.key(0)
    loss, grads = step(params, tokens, targets, key)
    found, expected = torch.func.grad_and_value(decoder)(params, tokens, targets, key)
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-10)
    for name, grad in found.items():
        torch.testing.assert_close(grads[name], grad, rtol=0, atol=1e-10)


def test_an_output_that_is_left_open_stays_in_zigzag():
    mesh = ftp.simulated_mesh((2,), ("a",))
    lowered = ftp.lower(lambda x: x.exp(), mesh, P(None, Z), torch.ones(3, 8))
    assert lowered.out_specs == P(None, Z) and not lowered.collectives


def attend(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> Any:
    run = lambda *x: F.scaled_dot_product_attention(*x, is_causal=True)  # noqa: E731
    out, vjp = torch.func.vjp(run, q, k, v)
    return out, *vjp(grad)


@pytest.mark.parametrize("n", [2, 4, 8])
def test_causal_attention_is_even_work(n: int):
    mesh, cut = ftp.AbstractMesh((n,), ("a",)), P(None, None, Z)
    q = torch.empty(1, 1, 1024, 8, device="meta")
    lowered = ftp.lower(attend, mesh, cut, q, q, q, q, out_specs=(cut,) * 4)
    work = []
    for coordinate in resolve(mesh).coordinates():
        local = lowered._program.local(coordinate)
        inputs = local_inputs(lowered._program, coordinate)
        offsets = local.offsets_at(coordinate)
        shapes = local_shapes(local.gm.graph, inputs, offsets, "cpu")
        work.append(sum(flops_of(node, shapes) for node in shapes.values))
    assert max(work) == min(work) and sum(work) == 14 * 8 * 1024 * 1025 / 2


def test_an_offset_that_is_wrong_is_refused():
    mesh, cut = ftp.simulated_mesh((3,), ("a",)), P(None, None, Z)
    q = torch.randn(1, 2, 12, 4, dtype=torch.float64)
    certificate = ftp.certify(ftp.spmd(attend, mesh, cut, (cut,) * 4).lower(q, q, q, q))
    graph, offsets = certificate.ranks.at[(1,)]
    assert sorted(offsets) == [2, 8]
    for at in range(2):
        for wrong in (offsets[at] - 1, offsets[at] + 2):
            changed = {**certificate.ranks.at}
            changed[(1,)] = graph, (*offsets[:at], wrong, *offsets[at + 1 :])
            with pytest.raises(CertificateError, match="not the local form"):
                check(replace(certificate, ranks=Ranks.of(certificate.ranks.graphs, changed)))


def test_a_saved_certificate_keeps_zigzags(tmp_path: Any):
    mesh = ftp.simulated_mesh((3,), ("a",))
    lowered = ftp.lower(lambda x: x.cumsum(0), mesh, P(Z), torch.ones(7), out_specs=P(Z))
    ftp.certify(lowered).save(tmp_path / "proof")
    from ftp.certification.certificate_file import load_certificate

    assert check(load_certificate(tmp_path / "proof")).outputs[0][1] == ((("a", 1, "zigzag"),),)


def test_errors():
    with pytest.raises(SpecError, match="name of a mesh axis, not 3"):
        zigzag(3)  # type: ignore[arg-type]
    mesh = ftp.simulated_mesh((2,), ("a",))
    with pytest.raises(SpecError, match="the mesh has no axis 'b'"):
        ftp.device_put(torch.ones(4), mesh, P(zigzag("b")))
    with pytest.raises(SpecError, match="uses mesh axis 'a' for dim 0 and again for dim 1"):
        P(Z, "a")
    own = ftp.local(lambda x: x, mesh, P(Z), P(Z))
    with pytest.raises(SpecError, match="takes one chunk of a dim, and a zigzag is two"):
        ftp.lower(own, mesh, P(Z), torch.ones(8))
    assert pin_from_str(pin_to_str(Pin(P(None, ("b", Z))))).spec == P(None, ("b", Z))
