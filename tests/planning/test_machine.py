"""The hardware that programs are planned for: presets, links by axis, hosts."""

from dataclasses import replace

import pytest
import torch
from pages import run_examples

import ftp
from ftp import Hardware, Link, P
from ftp.errors import InputError, MeshError
from ftp.planning.cost import collective_seconds
from ftp.planning.machine import describe_hardware, hardware_on
from ftp.sharding.launcher import known_hosts
from ftp.sharding.mesh import resolve

X = torch.empty(64, 32, device="meta")
W = {"w": torch.empty(32, 64, device="meta")}
MAKERS = {
    "shard": lambda **given: ftp.shard(lambda p, x: (x @ p["w"]).sum(), specs=P(), **given),
    "spmd": lambda **given: ftp.spmd(lambda x: 2 * x, in_specs=P(), **given),
    "lower": lambda mesh, **given: ftp.lower(lambda x: 2 * x, mesh, P(), X, **given),
    "search": lambda mesh, **given: ftp.search(
        lambda p, x: (x @ p["w"]).sum(), W, mesh, P("dp"), X, **given
    ),
}


def test_the_page():
    run_examples("hardware.md", least=17)


@pytest.mark.parametrize("name", MAKERS)
def test_links_of_an_unknown_axis_are_refused(name):
    mesh = ftp.AbstractMesh((2,), ("dp",))
    with pytest.raises(MeshError, match=r"links for 'pp', but the mesh has axes 'dp'"):
        MAKERS[name](mesh=mesh, hardware=Hardware(links={"dp": Link(), "pp": Link()}))
    with pytest.raises(InputError, match=r"hardware is 'h1000'; give one of 'b200'"):
        MAKERS[name](mesh=mesh, hardware="h1000")


def test_axes_that_leave_a_host_have_the_networks_link():
    def bandwidths(hosts, given=None, device_type="cuda"):
        mesh = ftp.AbstractMesh((2, 2, 2), ("a", "b", "c"), device_type, hosts=hosts)
        found = hardware_on(resolve(mesh), given)
        return [found.link_of([axis]).bandwidth for axis in mesh.axes]

    inside, outside = 450e9, 50e9
    assert bandwidths(None) == [inside] * 3
    assert bandwidths(["h"] * 8) == [inside] * 3
    assert bandwidths([*"xxxxyyyy"]) == [outside, inside, inside]
    assert bandwidths([*"xxyyzzww"]) == [outside, outside, inside]
    assert bandwidths([*"xyxyxyxy"]) == [inside, inside, outside]
    assert bandwidths([*"xxxxxxxy"]) == [outside] * 3  # one rank elsewhere: on a line of each axis
    own = Hardware.h100({"a": Link(bandwidth=7.0)})
    assert bandwidths([*"xxyyzzww"], own) == [7.0, outside, inside]
    assert bandwidths(None, "b200") == [900e9] * 3
    assert bandwidths(None, None, "cpu") == [Hardware().link.bandwidth] * 3


@pytest.mark.parametrize("hosts", ["aaaabbbb", "aabbccdd", "abababab", "aaaaaabb"])
def test_an_axis_over_hosts_has_the_ports_of_its_ranks(hosts):
    """Seconds of each collective are at least those of the busiest port, by counting the bytes
    that each rank sends to other hosts.
    """
    hardware, n, nbytes = Hardware.h100(), len(hosts), 1e9
    link = hardware_on(resolve(ftp.AbstractMesh((n,), ("dp",), hosts=hosts)), hardware).links["dp"]
    ports = min(map(hosts.count, hosts))
    assert link.bandwidth == min(ports * 50e9, 450e9)
    others = max(n - hosts.count(host) for host in hosts)
    assert collective_seconds("all_to_all", nbytes, n, link) == pytest.approx(
        link.latency + nbytes / n * others / n / 50e9
    )
    assert collective_seconds("ring", nbytes, n, link) == pytest.approx(
        link.latency + nbytes / 50e9
    )
    shared = replace(hardware, network=Link(bandwidth=1e9, shared=True))
    mesh = resolve(ftp.AbstractMesh((n,), ("dp",), hosts=hosts))
    assert hardware_on(mesh, shared).links["dp"] == shared.network


def test_hosts_are_one_a_rank():
    with pytest.raises(MeshError, match=r"hosts names 3, but the mesh \(dp 2, tp 2\) has 4 ranks"):
        ftp.AbstractMesh((2, 2), ("dp", "tp"), hosts=["a", "a", "b"])
    mesh = ftp.AbstractMesh((2, 3), ("dp", "tp"), hosts=[*"xxyzzz"])
    assert mesh["tp"].hosts == ("x", "x", "y") and mesh["dp"].hosts == ("x", "z")
    assert ftp.simulated_mesh((2,), ("dp",), hosts=["x", "y"]).hosts == ("x", "y")
    assert ftp.AbstractMesh((2,), ("dp",)).hosts is None


def test_a_plan_is_priced_by_the_machine_and_keyed_by_it():
    """Of the two axes the one that leaves the host costs more, and the fingerprint differs."""

    def lowered(hosts=None, hardware=None):
        mesh = ftp.AbstractMesh((2, 2), ("dp", "tp"), "cuda", hosts=hosts)
        params = {n: torch.empty(512, 512, device="meta") for n in ("up", "down")}
        specs = {"up": P(None, "tp"), "down": P("tp")}
        return ftp.shard(
            lambda p, x: ((x @ p["up"]).relu() @ p["down"]).square().sum(),
            mesh,
            specs,
            batch_specs=P("dp"),
            hardware=hardware,
        ).lower(params, torch.empty(4096, 512, device="meta"))

    one, two = lowered(), lowered([*"xxyy"])
    assert two.plan.solutions["dp"].cost > one.plan.solutions["dp"].cost
    # In the network of tp the sums over dp, planned before, take as long as on their own link.
    sums = sum(c.nbytes for c in two.collectives if c.axes == ("dp",))
    later = two.plan.solutions["tp"].cost - one.plan.solutions["tp"].cost
    assert later == pytest.approx(sums * (1 / 50e9 - 1 / 450e9), rel=1e-3)
    assert two.cost() > one.cost() and one.cost().hardware.name == "H100"
    assert lowered(hardware="h100")._program.fingerprint == one._program.fingerprint
    others = [two, lowered(hardware="b200"), lowered(hardware=Hardware.h100({"dp": Link()}))]
    found = {p._program.fingerprint for p in (one, *others)}
    assert len(found) == 4
    assert one.cost("b200").hardware.name == "B200"


@pytest.mark.parametrize("order", ["ab", "ba"])
@pytest.mark.parametrize("links", [{"a": 1e12, "b": 1e8}, {"a": 1e8, "b": 1e12}, {"b": 1e8}])
def test_reshards_of_axes_planned_before_keep_the_price_of_their_link(order, links):
    """A sum over a, by all ranks of b or by each of a part that b gathers then. Planning b priced
    the sum by b's link: 21 ms were planned where 14 microseconds do.
    """

    def fn(state, x, scale):
        total = x.sum(0)
        return total, (total * scale).sum(1)

    mesh = ftp.AbstractMesh(tuple({"a": 8, "b": 2}[axis] for axis in order), tuple(order))
    hardware = Hardware(
        link=Link(1e-9, 1e12), links={axis: Link(1e-9, rate) for axis, rate in links.items()}
    )
    step = ftp.spmd(
        fn,
        mesh,
        (P(), P("a"), P("b")),
        (P(), P("b")),
        data_axes=(),
        hardware=hardware,
        bucket=False,
    )
    x, whole = torch.empty(8, 1024, 1024, device="meta"), 4 * 1024 * 1024
    found = step.lower(torch.empty(1), x, x[0]).collectives
    assert [(c.op, c.axes, c.nbytes) for c in found] == (
        [("all_reduce", ("a",), whole)]
        if links.get("a", 1e12) > links["b"]
        else [("all_reduce", ("a",), whole // 2), ("all_gather", ("b",), whole)]
    )


def test_a_description_depends_on_every_figure_and_on_no_order():
    a, b = Link(bandwidth=1.0), Link(bandwidth=2.0)
    same = Hardware(links={"dp": a, "tp": b}), Hardware(links={"tp": b, "dp": a})
    assert len({describe_hardware(h) for h in same}) == 1
    other = Hardware(links={"dp": a, "tp": Link(bandwidth=2.0, factors={"all_gather": 1.5})})
    assert describe_hardware(other) != describe_hardware(same[0])


def test_hosts_under_torchrun():
    def hosts(each, count, world=8, ranks=range(8)):
        return known_hosts(
            ranks, world, {"LOCAL_WORLD_SIZE": str(each), "GROUP_WORLD_SIZE": str(count)}
        )

    assert hosts(4, 2) == ("node 0",) * 4 + ("node 1",) * 4
    assert hosts(4, 2, ranks=(0, 4)) == ("node 0", "node 1")
    assert hosts(8, 1) == () and hosts(3, 2) == () and known_hosts(range(8), 8, {}) == ()
