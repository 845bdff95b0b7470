"""The machine at hand: the hardware that programs of a mesh are planned for."""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from numbers import Real
from typing import Any

from ftp.errors import InputError, MeshError, raise_all
from ftp.planning.cost import Hardware, Link
from ftp.sharding.mesh import Mesh

PRESETS: Mapping[str, Callable[[], Hardware]] = {
    "b200": Hardware.b200,
    "cpu": Hardware.cpu,
    "default": Hardware,
    "h100": Hardware.h100,
    "h200": Hardware.h200,
}
# In tests and reports a CPU mesh stands for GPUs, so it is planned with the prices of GPUs.
_OF_DEVICE = {"cuda": "h100"}

GivenHardware = Hardware | str | None


def hardware_on(mesh: Mesh, given: GivenHardware = None) -> Hardware:
    """The hardware with a link for every axis that leaves a host.

    Args:
        given: a ``Hardware``, a preset's name, or None for the preset of the mesh's device type.

    Raises:
        InputError: any other value; a rate that is no positive number. MeshError: links of axes
            that the mesh does not have.

    >>> from ftp.sharding.mesh import AbstractMesh, resolve
    >>> mesh = resolve(AbstractMesh((2, 2), ("dp", "tp"), hosts=["a", "a", "b", "b"]))
    >>> hardware = hardware_on(mesh, "h100")
    >>> [hardware.link_of([axis]).bandwidth for axis in mesh.axes]
    [50000000000.0, 450000000000.0]
    """
    if given is None:
        given = _OF_DEVICE.get(mesh.device_type, "default")
    if isinstance(given, str) and given in PRESETS:
        given = PRESETS[given]()
    if not isinstance(given, Hardware):
        raise InputError(
            f"hardware is {given!r}; give one of {', '.join(map(repr, PRESETS))}, an ftp.Hardware,"
            " the result of ftp.calibrate(mesh), or None for the preset of the mesh's device type."
        )
    raise_all(InputError, _impossible(given))
    unknown = [axis for axis in given.links if axis not in mesh.axes]
    if unknown:
        raise MeshError(
            f"hardware has links for {', '.join(map(repr, unknown))}, but the mesh has axes"
            f" {', '.join(map(repr, mesh.axes))}."
        )
    between = {axis: _between_hosts(mesh, axis, given) for axis in mesh.axes}
    between = {axis: link for axis, link in between.items() if link is not None}
    return replace(given, links={**between, **given.links})


def _impossible(hardware: Hardware) -> Iterator[str]:
    """Error messages about rates that no machine has: planning divides by them."""
    for name in ("flops", "memory", "attention", "convolution"):
        yield from _not_positive(f"hardware's {name}", getattr(hardware, name))
    for name, link in {
        "link": hardware.link,
        "network": hardware.network,
        **hardware.links,
    }.items():
        if not isinstance(link, Link):
            yield f"hardware's link {name!r} is {link!r}; give an ftp.Link(latency, bandwidth)."
            continue
        yield from _not_positive(f"the bandwidth of hardware's {name!r}", link.bandwidth)
        if not isinstance(link.latency, Real) or link.latency < 0:
            yield f"the latency of hardware's {name!r} is {link.latency!r}; give seconds."


def _not_positive(name: str, value: Any) -> Iterator[str]:
    if not isinstance(value, Real) or value <= 0:
        yield f"{name} is {value!r}; give a positive number."


def _between_hosts(mesh: Mesh, axis: str, hardware: Hardware) -> Link | None:
    """The link of an axis that leaves a host; None if it does not.

    Where k of the axis' ranks are on each host, a backend such as NCCL runs k rings, each through
    another rank's port, so that a gather or a sum has k ports. In an all-to-all a rank sends what
    is for other hosts through its own port; in a shift the last rank of a host sends everything.
    """
    lines = [Counter(line) for line in mesh.hosts_along(axis)]
    if all(len(line) == 1 for line in lines):
        return None
    network, n = hardware.network, mesh.axes[axis]
    ports = min(min(line.values()) for line in lines)
    if network.shared or ports == 1:
        return network
    bandwidth = min(ports * network.bandwidth, hardware.link.bandwidth)
    one_port = bandwidth / network.bandwidth
    factors = {
        "all_to_all": one_port * (n - ports) / (n - 1),
        "ring": one_port,
        "halo_exchange": one_port,
    }
    return replace(network, bandwidth=bandwidth, factors={**network.factors, **factors})


def describe_hardware(hardware: Hardware) -> str:
    """The hardware's name and a digest of its figures: equal on ranks that plan at equal prices."""
    figures = {f.name: _ordered(getattr(hardware, f.name)) for f in fields(hardware)}
    return f"{hardware.name} {hashlib.sha256(repr(figures).encode()).hexdigest()[:12]}"


def _ordered(value: Any) -> Any:
    if isinstance(value, Mapping):
        return sorted((str(key), _ordered(of)) for key, of in value.items())
    return repr(value) if not hasattr(value, "bandwidth") else _of_link(value)


def _of_link(link: Any) -> list[tuple[str, Any]]:
    return [(f.name, _ordered(getattr(link, f.name))) for f in fields(link)]
