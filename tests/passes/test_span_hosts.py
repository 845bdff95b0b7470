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


def test_small_sums_stay_as_they_are():
    """Three latencies are more than two."""
    mesh = ftp.AbstractMesh((2, 4), ("dp", "cp"), "cuda", hosts=[*"xxxxyyyy"])
    step = ftp.shard(
        lambda p, x: (x @ p["w"]).square().sum(), mesh, P(), batch_specs=P(("dp", "cp"))
    )
    found = step.lower({"w": torch.empty(8, 8)}, torch.empty(64, 8)).collectives
    assert {c.op for c in found} == {"all_reduce"}
