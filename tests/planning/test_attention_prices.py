"""Attention's prices: what the busiest rank computes, and what travels in a ring."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import ftp
from ftp import P
from ftp.ops.ring_pieces import Needs, Ring, RingAxis

CUT, ZIGZAG = P(None, None, "cp"), P(None, None, ftp.zigzag("cp"))


@settings(max_examples=40)
@given(st.data())
def test_traffic_is_what_the_steps_of_a_ring_send(data: Any):
    """From the runs that ranks see, as from each piece."""
    n, size = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 40))
    axes = (RingAxis(n, is_zigzag=data.draw(st.booleans()), group=-1),)
    returning, ring = (Ring(size, axes, returns) for returns in (True, False))
    ring.__dict__["count"] = data.draw(st.integers(1, 3))
    seen = []
    for _ in range(n):
        edges = sorted(data.draw(st.sets(st.integers(0, size), max_size=6)))
        seen.append([(a, b - a) for a, b in zip(edges[::2], edges[1::2], strict=False)])
    needs = Needs(ring, seen)
    steps = set()
    sent = [0] * n
    received = [0] * n
    for rank in range(n):
        for owner in range(n):
            pieces = [needs.length(rank, owner, at) for at in range(ring.count)]
            if rank != owner:
                assert sum(pieces) == needs.overlap[rank, owner]
                sent[owner] += sum(pieces)
                received[rank] += sum(pieces)
                steps |= {((rank - owner) % n, at) for at, length in enumerate(pieces) if length}
    assert needs.traffic() == (max(sent), max(received))
    both = max(a + b for a, b in zip(sent, received, strict=True))
    assert Needs(returning, seen).traffic() == (both, both)
    assert len(steps) <= needs.steps


def gradients(attend: Any) -> Any:
    def run(batch: tuple[Tensor, ...], w: Tensor) -> Any:
        out, vjp = torch.func.vjp(attend, *(w * x for x in batch))
        return vjp(out)

    return run


def lowered(attend: Any, cut: P, length: int, n: int = 8, **options: Any) -> ftp.Lowered:
    x = torch.empty(1, 8, length, 64, dtype=torch.bfloat16, device="meta")
    w = torch.empty((), dtype=torch.bfloat16, device="meta")
    mesh = ftp.AbstractMesh((n,), ("cp",))
    step = ftp.spmd(gradients(attend), mesh, ((cut,) * 3, P()), (cut,) * 3, **options)
    return step.lower((x,) * 3, w)


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


@pytest.mark.parametrize("cut", [CUT, ZIGZAG])
@pytest.mark.parametrize("n", [2, 8])
def test_the_busiest_rank_s_work_is_priced(cut: P, n: int):
    """Links take no time: what is left is computing. In plain chunks the last rank has 2n - 1 of
    n² half-squares, in zigzag each rank n."""
    free = ftp.Link(0.0, 1e30)
    hardware = ftp.Hardware(flops=1e12, memory=1e30, link=free, ring_step=0.0)
    length = 1 << 16
    cost = lowered(causal, cut, length, n, hardware=hardware).plan.cost
    of_pair = 8 * (4 + 10) * 64 / 1e12  # two matmuls forward, five backward, all heads
    share = (2 * n - 1) / (2 * n * n) if cut == CUT else 1 / (2 * n)
    assert cost == pytest.approx(length**2 * of_pair * share, rel=0.01)


def window(width: int) -> Any:
    """The blocks of a window: a BlockMask that is a constant."""
    length = 1 << 14
    mask = create_block_mask(
        lambda b, h, q, k: (q >= k) & (q - k < width), None, None, length, length, "cpu"
    )
    return lambda q, k, v: flex_attention(q, k, v, block_mask=mask)


def rings(attend: Any, hardware: ftp.Hardware) -> int:
    found = lowered(attend, CUT, 1 << 14, hardware=hardware).collectives
    return [c.op for c in found].count("ring")


@pytest.mark.slow
def test_a_ring_is_priced_by_what_travels():
    """A rank of a narrow window needs a part of its neighbour's keys; nothing hides that little is
    computed, so that all keys would take longer than the gather's."""
    hardware = ftp.Hardware(flops=1e18, link=ftp.Link(1e-6, 1e10), ring_step=5e-5)
    assert rings(window(128), hardware) == 2
    assert rings(window(1 << 14), hardware) == 0


def test_what_a_link_does_not_hide_is_added():
    """A ring's transfers hide behind its work where the hardware says that they can."""
    chosen = []
    for hidden in (1.0, 0.0):
        link = ftp.Link(1e-6, 1e10, hidden=hidden)
        hardware = ftp.Hardware(flops=1e13, link=link, ring_step=3e-4)
        found = lowered(causal, ZIGZAG, 1 << 16, hardware=hardware).collectives
        chosen.append([c.op for c in found].count("ring"))
    assert chosen == [2, 0]


def forms(found: ftp.Lowered) -> list[Any]:
    name = next(n.name for n in found.plan.graph.nodes if "attention" in n.name)
    return [a for a in found.why(name).alternatives if a.seconds is not None]


def test_why_says_what_each_form_sends_and_holds():
    ring, gather = "cut on dim 2, by a ring", "cut on dim 2"
    for ring_step, form in ((0.0, ring), (1.0, gather)):
        hardware = ftp.Hardware(flops=1e13, ring_step=ring_step)
        planned = lowered(causal, CUT, 1 << 13, hardware=hardware)
        found = forms(planned)
        (chosen,) = [a for a in found if a.chosen]
        assert chosen.layout == form and chosen.memory == planned.memory
        assert chosen.wire_nbytes == planned.collectives.wire_nbytes
        held = {a.layout: a.memory for a in found}
        # The backward pass stays as it is cheapest, and is the peak where it gathers.
        assert held[ring] < held[gather] if form == ring else held[ring] <= held[gather]


@pytest.mark.parametrize(
    ("fn", "count"),
    [
        (lambda q, k, v: causal(q, k, v), 3),
        (lambda qkv: causal(*qkv.unbind()), 1),
        (lambda kv, q: causal(q, *kv.unbind()), 2),
    ],
    ids=["q alone", "all in one", "keys alone"],
)
def test_arguments_attended_as_they_are_have_both_forms(fn: Any, count: int):
    """Whichever argument comes first: keys and values may be gathered, and are where that is
    faster.
    """
    length, mesh = 1 << 13, ftp.AbstractMesh((8,), ("cp",), device_type="cpu")
    q = torch.empty(1, 8, length, 64, dtype=torch.bfloat16, device="meta")
    several = torch.empty(3 if count == 1 else 2, *q.shape, dtype=q.dtype, device="meta")
    cut, cut_several = P(None, None, "cp"), P(None, None, None, "cp")
    args = {1: (several,), 2: (several, q), 3: (q, q, q)}[count]
    specs = tuple(cut_several if x.ndim == 5 else cut for x in args)
    for ring_step, rings in ((0.0, True), (1.0, False)):
        hardware = ftp.Hardware(flops=1e13, ring_step=ring_step)
        step = ftp.spmd(fn, mesh, specs, cut, hardware=hardware)
        planned = step.lower(*args)
        assert {c.op for c in planned.collectives} == {"ring" if rings else "all_gather"}
        ring, gather = sorted(forms(planned), key=lambda a: "ring" not in a.layout)
        assert (ring.chosen, gather.chosen) == (rings, not rings)
        assert ring.memory < gather.memory


def test_keys_that_do_not_fit_are_not_gathered():
    """Keys and values of each layer are whole from its forward pass to its backward pass, and one
    layer's gradients: two thirds of the peak in one layer, and layers add up."""
    length, layers = 1 << 13, 3
    of_layer = 2 * 8 * length * 64 * 2  # bytes of keys and values

    def deep(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        for at in range(layers):
            q = causal(q, k * (at + 2), v * (at + 3))
        return q

    gathered = of_layer * (layers + 1)  # and gradients of one
    inputs = 3 * 8 * length * 64 * 2 // 8 + 2
    for capacity, count in ((gathered + inputs, 0), (gathered + inputs - 1, 2 * layers), (0.0, 0)):
        hardware = ftp.Hardware(flops=1e13, ring_step=1.0, capacity=capacity)
        found = lowered(deep, CUT, length, hardware=hardware)
        assert [c.op for c in found.collectives].count("ring") == count
        if not count:
            assert found.memory > gathered
        else:
            assert found.memory < gathered / 2


def test_a_ring_across_hosts_and_heads_inside():
    """Of a sequence that both axes cut: slow links hide behind the work, fast ones bring heads."""

    def loss(w: dict[str, Tensor], x: Tensor) -> Tensor:
        q, k, v = ((x @ w[n]).unflatten(-1, (16, 128)).transpose(1, 2) for n in "qkv")
        return (causal(q, k, v).transpose(1, 2).flatten(2) @ w["o"]).square().mean()

    mesh = ftp.AbstractMesh((2, 4), ("host", "dev"), hosts=[0] * 4 + [1] * 4)
    specs = {**dict.fromkeys("qkv", P(None, "dev")), "o": P("dev")}
    x = torch.empty(1, 1 << 17, 2048, dtype=torch.bfloat16, device="meta")
    w = dict.fromkeys("qkvo", x[0, :2048])
    step = ftp.shard(
        loss, mesh, specs, batch_specs=P(None, ("host", "dev")), hardware=ftp.Hardware.h100()
    )
    moved = [(c.op, c.axes) for c in step.lower(w, x).collectives]
    assert moved.count(("ring", ("host",))) == 2
    assert moved.count(("all_to_all", ("dev",))) == 8
    assert {op for op, axes in moved if axes == ("host",)} <= {"ring", "all_reduce"}


def over_two_axes(
    cut: P, length: int, hosts: Any = None, hardware: ftp.Hardware | None = None
) -> ftp.Lowered:
    mesh = ftp.AbstractMesh((2, 4), ("a", "b"), hosts=hosts)
    x = torch.empty(1, 8, length, 128, dtype=torch.bfloat16, device="meta")
    step = ftp.spmd(gradients(causal), mesh, ((cut,) * 3, P()), (cut,) * 3, hardware=hardware)
    return step.lower((x,) * 3, x[0, 0, 0, 0])


TWO, ZIGZAGS = P(None, None, ("a", "b")), P(None, None, (ftp.zigzag("a"), ftp.zigzag("b")))


@pytest.mark.parametrize("cut", [TWO, ZIGZAGS])
def test_of_two_ways_that_take_about_as_long_the_one_that_holds_less(cut: P):
    """A ring over one axis and a gather over the other is a little faster than one ring over both,
    and holds three times the inputs, results and gradients."""
    length = 1 << 18
    planned = over_two_axes(cut, length, hardware=ftp.Hardware.h100())
    assert {c.axes for c in planned.collectives} == {("a", "b")}
    assert planned.memory < 1.5 * 8 * length * 128 * 2
    (mixed,) = [a for a in forms(planned) if a.axis == "b" and not a.chosen]
    assert mixed.delta < 0 and mixed.memory > 1.4 * planned.memory
    chosen = [(a.axis, a.layout.endswith("by a ring")) for a in forms(planned) if a.chosen]
    assert chosen == [("a", True), ("b", True)]


def test_ways_over_two_axes_are_weighed_together():
    """Of short sequences across two hosts, a ring over the first axis pays beside a gather over the
    second, by the first axis' prices alone; but gathers over both take less time."""
    planned = over_two_axes(TWO, 1 << 14, [0] * 4 + [1] * 4)
    assert "ring" not in {c.op for c in planned.collectives}
    assert all(a.delta >= 0 for a in forms(planned))
