"""The groups of ranks of a mesh: one for each axis, and for each product of axes."""

import itertools

from ftp.sharding.mesh import Mesh


def axes_of_groups(mesh: Mesh) -> dict[str, tuple[str, ...]]:
    """The axes of each process group, by its name: one axis or a product of axes."""
    return {mesh.group_name(*axes): axes for axes in _products(mesh)}


def _products(mesh: Mesh) -> list[tuple[str, ...]]:
    """Each axis, then each product of axes."""
    names = mesh.axis_names
    return [
        axes for count in range(1, len(names) + 1) for axes in itertools.combinations(names, count)
    ]


def groups_of(mesh: Mesh) -> dict[str, list[list[int]]]:
    """Per axis and per product of axes, the groups of ranks (positions on the mesh) that differ in
    those axes only.
    """
    found: dict[str, list[list[int]]] = {}
    for axes in _products(mesh):
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank, coordinate in enumerate(mesh.coordinates()):
            elsewhere = tuple(c for a, c in coordinate.items() if a not in axes)
            groups.setdefault(elsewhere, []).append(rank)
        found[" × ".join(axes)] = list(groups.values())
    return found
