"""Sums over an axis inside a host and one across: three steps, one part on the slow link."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ftp
from ftp import Hardware, Link, P

FAST, SLOW = Link(1e-9, 1e12), Link(1e-8, 1e7)


def loss(params, x):
    return ((x @ params["w"]).square() * params["b"]).sum()


@settings(max_examples=6, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    st.sampled_from([(2, 2), (2, 3), (3, 2)]),
    st.sampled_from(["a", "b"]),
    st.integers(1, 9),
    st.integers(1, 5),
    st.booleans(),
)
def test_values_are_those_of_one_device(shape, slow, rows, columns, bucket):
    mesh = ftp.simulated_mesh(shape, ("a", "b"))
    links = {axis: SLOW if axis == slow else FAST for axis in ("a", "b")}
    seed = torch.Generator().manual_seed(rows)
    params = {
        "w": torch.randn(4, columns, generator=seed, dtype=torch.float64),
        "b": torch.randn(columns, generator=seed, dtype=torch.float64),
    }
    x = torch.randn(rows, 4, generator=seed, dtype=torch.float64)
    step = ftp.shard(
        loss, mesh, P(), batch_specs=P(("a", "b")), bucket=bucket, hardware=Hardware(links=links)
    )
    want, of = torch.func.grad_and_value(loss)(params, x)
    value, grads = step(params, x)
    assert value == pytest.approx(float(of), rel=1e-12)
    for name, grad in grads.items():
        assert torch.allclose(grad, want[name], rtol=1e-12, atol=1e-12)
    found = [(c.op, c.axes) for c in step.lower(params, x).collectives]
    inside = "b" if slow == "a" else "a"
    steps = [("reduce_scatter", (inside,)), ("all_reduce", (slow,)), ("all_gather", (inside,))]
    n = mesh.axes[inside]
    if 4 * columns % n == 0 or columns % n == 0:
        assert set(steps) <= set(found)
    else:
        assert {op for op, _ in found} == {"all_reduce"}


def test_the_three_steps_are_certified():
    mesh = ftp.AbstractMesh((2, 2), ("a", "b"))
    step = ftp.shard(
        loss, mesh, P(), batch_specs=P(("a", "b")), hardware=Hardware(links={"a": SLOW, "b": FAST})
    )
    lowered = step.lower({"w": torch.ones(4, 2), "b": torch.ones(2)}, torch.ones(4, 4))
    assert "reduce_scatter" in {c.op for c in lowered.collectives}
    ftp.certify(lowered)


def test_the_slow_link_carries_one_ranks_part():
    """Exact bytes, before and after: hosts of four GPUs, a gradient of 64 MiB."""
    params, x = {"w": torch.empty(4096, 4096, device="meta")}, torch.empty(64, 4096, device="meta")

    def sent(hosts, bucket):
        mesh = ftp.AbstractMesh((2, 4), ("dp", "cp"), "cuda", hosts=hosts)
        step = ftp.shard(
            lambda p, x: (x @ p["w"]).square().sum(),
            mesh,
            P(),
            batch_specs=P(("dp", "cp")),
            bucket=bucket,
        )
        lowered = step.lower(params, x)
        return [(c.op, c.axes, c.wire_nbytes) for c in lowered.collectives if c.nbytes > 100]

    whole, hosts = 4096 * 4096 * 4, [f"host {rank // 4}" for rank in range(8)]
    for bucket in (False, True):
        big = sent(hosts, bucket)
        assert sorted(big) == [
            ("all_gather", ("cp",), whole * 3 // 4),
            ("all_reduce", ("dp",), whole // 4),
            ("reduce_scatter", ("cp",), whole * 3 // 4),
        ]
        one_host = sent(None, bucket)
        assert all(op == "all_reduce" for op, _, _ in one_host)


@pytest.mark.parametrize("names", [("dp", "cp"), ("cp", "dp")])
@pytest.mark.parametrize("spec", [P(("dp", "cp")), P(("cp", "dp")), P("dp", "cp"), P("cp", "dp")])
def test_gathers_and_their_gradients_cross_hosts_in_parts(names, spec):
    """ZeRO-3 over both axes, a weight of 64 MiB: across hosts a rank's part is gathered, then all
    parts inside, and back; with the inner axis first in the mesh it was the other way round.
    """
    sizes = {"dp": 2, "cp": 4}
    shape = tuple(sizes[axis] for axis in names)
    hosts = [*"xxxxyyyy"] if names[0] == "dp" else [*"xyxyxyxy"]
    mesh = ftp.AbstractMesh(shape, names, "cuda", hosts=hosts)
    step = ftp.shard(
        lambda p, x: (x @ p["w"]).square().sum(), mesh, {"w": spec}, batch_specs=P(("dp", "cp"))
    )
    params = {"w": torch.empty(4096, 4096, device="meta")}
    lowered = step.lower(params, torch.empty(64, 4096, device="meta"))
    whole = 4096 * 4096 * 4
    found = [(c.op, c.axes, c.wire_nbytes) for c in lowered.collectives if c.nbytes > 100]
    assert found == [
        ("all_gather", ("dp",), whole // 4 // 2),
        ("all_gather", ("cp",), whole * 3 // 4),
        ("reduce_scatter", ("cp",), whole * 3 // 4),
        ("reduce_scatter", ("dp",), whole // 4 // 2),
    ]


def test_an_all_to_all_crosses_hosts_once():
    """Over the slow link a rank sends the half of its part that is the other host's."""
    mesh = ftp.AbstractMesh((2, 4), ("dp", "cp"), "cuda", hosts=[*"xxxxyyyy"])
    both, x = ("dp", "cp"), torch.empty(4096, 4096, device="meta")
    lowered = ftp.lower(lambda x: 2 * x, mesh, P(both), x, out_specs=P(None, both))
    part = 4096 * 4096 * 4 // 8
    assert [(c.op, c.axes, c.wire_nbytes) for c in lowered.collectives] == [
        ("all_to_all", ("dp",), part // 2),
        ("all_to_all", ("cp",), part * 3 // 4),
    ]


def chain(params, x):
    for weight in params.values():
        x = torch.relu(x @ weight)
    return x.square().sum()


def test_several_sums_take_their_steps_together():
    """Exact counts, bytes and members: four gradients of 1 MiB, in packs of 2 MiB."""
    params = {name: torch.empty(512, 512, device="meta") for name in "abcd"}
    x = torch.empty(64, 512, device="meta")
    mesh = ftp.AbstractMesh((2, 4), ("dp", "cp"), "cuda", hosts=[*"xxxxyyyy"])
    one = 512 * 512 * 4
    for bucket, count in ((False, 1), (True, 2)):
        step = ftp.shard(chain, mesh, P(), batch_specs=P(("dp", "cp")), bucket=bucket)
        lowered = step.lower(params, x)
        steps = [c for c in lowered.collectives if c.nbytes > 100]
        nbytes = count * one
        assert [(c.op, c.axes, c.nbytes, c.wire_nbytes) for c in steps] == [
            ("reduce_scatter", ("cp",), nbytes, nbytes * 3 // 4),
            ("all_reduce", ("dp",), nbytes // 4, nbytes // 4),
            ("all_gather", ("cp",), nbytes, nbytes * 3 // 4),
        ] * (4 // count)
        for record in steps:
            assert [m.nbytes for m in record.members] == [record.nbytes // count] * count
        assert len({m.name for c in steps for m in c.members}) == 4
        ftp.certify(lowered)


def test_a_pack_ends_where_a_sum_is_needed():
    """A sum that the next one needs is not in its pack."""
    mesh = ftp.simulated_mesh((2, 2), ("a", "b"))
    hardware = Hardware(links={"a": SLOW, "b": FAST})

    def means(x, y):
        total = x.sum(0)
        return total, (y * total.tanh()).sum(0), y.sum(0)

    x, y = torch.randn(8, 6).double(), torch.randn(8, 6).double()
    specs = P(("a", "b")), P(("a", "b"))
    step = ftp.spmd(means, mesh, specs, (P(), P(), P()), hardware=hardware)
    for got, want in zip(step(x, y), means(x, y), strict=True):
        assert torch.allclose(got, want, rtol=1e-12, atol=1e-12)
    sums = [c for c in step.lower(x, y).collectives if c.op == "all_reduce"]
    assert [(c.axes, c.nbytes, len(c.members)) for c in sums] == [
        (("a",), 24, 1),
        (("a",), 48, 2),
    ]


def test_small_sums_stay_as_they_are():
    """Three latencies are more than two."""
    mesh = ftp.AbstractMesh((2, 4), ("dp", "cp"), "cuda", hosts=[*"xxxxyyyy"])
    step = ftp.shard(
        lambda p, x: (x @ p["w"]).square().sum(), mesh, P(), batch_specs=P(("dp", "cp"))
    )
    found = step.lower({"w": torch.empty(8, 8)}, torch.empty(64, 8)).collectives
    assert {c.op for c in found} == {"all_reduce"}
