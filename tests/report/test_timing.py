"""Estimated times against sums done by hand, and calibrations against what they are made of."""

import math

import pytest
import torch

import ftp
from ftp import Hardware, Link, P
from ftp.planning.cost import measured_seconds, on_curve

ROWS, DIM, HIDDEN = 64, 32, 16
CPU = Hardware(
    flops=1e9,
    memory=2e9,
    overhead=1e-3,
    fresh=((1, 4e9),),
    cold=((1, 5e-3),),
    elements={"exp": 1e4, "strided": 1e4},
)


def program(fn=lambda p, x: (x @ p["w"]).exp().sum(), spec=P("n")):
    step = ftp.spmd(lambda p, x: fn(p, x), ftp.AbstractMesh((2,), ("n",)), ({"w": P()}, spec))
    return step.lower(
        {"w": torch.empty(DIM, HIDDEN, device="meta")}, torch.empty(ROWS, DIM, device="meta")
    )


def test_ops_of_a_cpu_cost_what_their_parts_do():
    ops = {op.op: op for op in program().cost(CPU).ops}
    rows, sizes = (
        ROWS // 2,
        {"x": 4 * ROWS // 2 * DIM, "w": 4 * DIM * HIDDEN, "y": 4 * ROWS // 2 * HIDDEN},
    )
    assert ops["call of the step"].seconds == 3e-3  # two tensors come in, one goes out
    arithmetic, traffic = 2 * rows * DIM * HIDDEN / 1e9, sum(sizes.values()) / 2e9
    assert ops["mm.default"].seconds == pytest.approx(
        1e-3 + arithmetic + traffic + sizes["y"] / 4e9
    )
    # An exponential in place: by its elements, and issued after a product.
    (exp,) = (op for name, op in ops.items() if name.startswith("exp"))
    assert exp.seconds == pytest.approx(1e-3 + 5e-3 + rows * HIDDEN / 1e4)
    assert (exp.limit, ops["mm.default"].limit) == ("compute", "overhead")


def test_a_gpu_takes_the_longer_of_both_and_nothing_for_memory():
    gpu = Hardware(flops=1e9, memory=2e9, overhead=1e-9, hides_overhead=True)
    ops = {op.op: op for op in program().cost(gpu).ops}
    assert "call of the step" not in ops
    assert ops["mm.default"].seconds == pytest.approx(2 * ROWS // 2 * DIM * HIDDEN / 1e9)


def test_tensors_with_gaps_take_their_own_rate():
    def fn(p, x):
        return (x[:, ::2] * 2.0).sum() + p["w"].sum()

    lowered = program(fn)
    (op,) = (op for op in lowered.cost(CPU).ops if op.op.startswith("mul"))
    result = 4 * ROWS // 2 * DIM // 2
    assert op.seconds == pytest.approx(1e-3 + ROWS // 2 * DIM // 2 / 1e4 + result / 4e9)


@pytest.mark.parametrize("hidden", [0.0, 0.25, 1.0])
def test_collectives_take_what_was_measured_for_what_ranks_did_before(hidden: float):
    points = {"all_reduce": ((1e-3, ((4.0, 1.0), (8.0, 2.0))), (1.0, ((4.0, 3.0), (8.0, 4.0))))}
    cpu = Hardware(link=Link(measured=points, hidden=hidden), overhead=1e-2, elements={"exp": 1e4})
    cost = program().cost(cpu)
    (issued,) = cost.collectives
    computed = cost.computing
    assert issued.begin == pytest.approx(computed) and issued.nbytes == 4
    assert 1e-3 < computed < 1.0
    assert issued.seconds == pytest.approx(1.0 + 2.0 * math.log(computed / 1e-3) / math.log(1e3))
    # What cannot be hidden is waited for when it is issued, the rest at the end: nothing else is
    # left to compute.
    assert cost.waiting == pytest.approx(issued.seconds) and float(cost) == pytest.approx(
        computed + issued.seconds
    )


def test_curves_end_flat_and_sizes_go_on():
    assert [on_curve(((2, 1.0), (8, 3.0)), x) for x in (1, 2, 4, 8, 16)] == [
        1.0,
        1.0,
        2.0,
        3.0,
        3.0,
    ]
    link = Link(measured={"all_gather": ((1.0, ((10.0, 1.0), (20.0, 2.0), (40.0, 6.0))),)})
    assert [measured_seconds("all_gather", n, 2, link, 7.0) for n in (5, 10, 15, 30, 60)] == [
        1.0,
        1.0,
        1.5,
        4.0,
        10.0,
    ]
    assert measured_seconds("all_reduce", 1e11, 2, link) == pytest.approx(1.0 + link.latency)


def test_a_calibrated_machine_has_what_an_estimate_asks_for():
    machine = ftp.calibrate(dtypes=[torch.float32], seconds=1e-4)
    assert all(rate > 0 for _, rate in machine.fresh) and [n for n, _ in machine.fresh] == sorted(
        n for n, _ in machine.fresh
    )
    assert all(seconds >= 0 for _, seconds in machine.cold)
    assert {"exp", "sum", "strided", "random_bits"} <= machine.elements.keys() and min(
        machine.elements.values()
    ) > 0
    assert 0 < machine.attention <= 1 and 0 < machine.convolution <= 1
    cost = program().cost(machine)
    assert 0 < cost.computing <= float(cost)


def test_attention_takes_what_the_busiest_rank_takes():
    """In plain chunks of a causal mask the last rank sees most; in zigzag all see as much."""
    ranks, length = 4, 4096
    q = torch.empty(1, 2, length, 64, device="meta")

    def attend(q, k, v):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    def flops(entry):
        cut = P(None, None, entry)
        mesh = ftp.AbstractMesh((ranks,), ("cp",), device_type="cpu")
        return ftp.lower(attend, mesh, cut, q, q, q, out_specs=cut).cost(CPU).flops

    held = length // ranks
    last = held * (length - held) + held * (held + 1) // 2
    assert flops("cp") == 4 * 64 * 2 * last
    assert flops(ftp.zigzag("cp")) == 4 * 64 * 2 * (length * (length + 1) // 2 // ranks)


@pytest.mark.parametrize("first", [0, 1])
def test_a_tensor_given_twice_is_read_once(first: int):
    calls = [lambda x, y: torch.atan2(x, y), lambda x, y: torch.atan2(x, x)]
    order = calls if first == 0 else calls[::-1]
    mesh, x = ftp.AbstractMesh((2,), ("n",)), torch.empty(ROWS, DIM, device="meta")
    step = ftp.spmd(lambda x, y: tuple(f(x, y) for f in order), mesh, (P("n"), P("n")))
    moved = [op.nbytes for op in step.lower(x, x).cost(CPU).ops if op.op.startswith("atan2")]
    assert moved == [4 * ROWS // 2 * DIM * count for count in ([3, 2] if first == 0 else [2, 3])]
