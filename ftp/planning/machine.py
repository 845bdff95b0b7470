"""The machine at hand: the hardware that programs of a mesh are planned for."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any

from ftp.errors import InputError, MeshError
from ftp.planning.cost import Hardware
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
        InputError: any other value. MeshError: links of axes that the mesh does not have.

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
    unknown = [axis for axis in given.links if axis not in mesh.axes]
    if unknown:
        raise MeshError(
            f"hardware has links for {', '.join(map(repr, unknown))}, but the mesh has axes"
            f" {', '.join(map(repr, mesh.axes))}."
        )
    between = {axis: given.network for axis in mesh.axes if mesh.leaves_host(axis)}
    return replace(given, links={**between, **given.links})


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
