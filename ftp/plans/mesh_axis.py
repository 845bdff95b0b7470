"""The mesh axis that a plan shards over."""

import warnings
from typing import Any

from ftp.errors import MeshError
from ftp.sharding.mesh import AnyMesh
from ftp.sharding.pytree import kind_of


def axis_of(mesh: AnyMesh, way_out: str = "Of such a mesh give a 1-D mesh, mesh[{axis!r}].") -> str:
    """The axis of a 1-D mesh; ``way_out`` ends the error for any other mesh.

    >>> from ftp import simulated_mesh
    >>> axis_of(simulated_mesh(2, "model"))
    'model'
    """
    names = _names(mesh)
    if len(names) != 1:
        raise MeshError(
            f"The plan is for one axis, and the mesh has {', '.join(map(repr, names))}."
            f" {way_out.format(axis=names[-1])}"
        )
    return names[0]


def choose_axis(mesh: AnyMesh | None, axis: str | None, tp_mesh_dim: int | None) -> str:
    """The axis that the arguments of ``from_parallelize_plan`` name."""
    if tp_mesh_dim is not None:
        warnings.warn(
            "tp_mesh_dim= is deprecated; name the mesh axis, as axis='tp'.",
            DeprecationWarning,
            stacklevel=3,
        )
        if mesh is None or axis is not None:
            raise MeshError(
                "tp_mesh_dim= is the position of an axis in mesh=: give mesh= and not axis=, or"
                " better axis= alone."
            )
        names = _names(mesh)
        if not -len(names) <= tp_mesh_dim < len(names):
            raise MeshError(
                f"tp_mesh_dim={tp_mesh_dim}, but the mesh has the axes"
                f" {', '.join(map(repr, names))}."
            )
        return names[tp_mesh_dim]
    if mesh is None:
        if axis is not None and not isinstance(axis, str):
            raise MeshError(
                f"axis={axis!r} is {kind_of(axis)}; it must be the name of a mesh axis. A mesh is"
                " given as mesh=."
            )
        return axis or "tp"
    names = _names(mesh)
    if axis is not None and axis not in names:
        raise MeshError(
            f"The mesh has no axis {axis!r}; its axes are {', '.join(map(repr, names))}."
        )
    return axis or axis_of(mesh, "Name it, as axis={axis!r}, or give a 1-D mesh.")


def _names(mesh: Any) -> tuple[str, ...]:
    names = getattr(mesh, "axis_names", None) or getattr(mesh, "mesh_dim_names", None)
    if not names:
        raise MeshError(
            f"mesh={mesh!r} has no named axes. Make it with ftp.make_mesh(shape, names), or give"
            " mesh_dim_names."
        )
    return tuple(names)
