"""The functions of torch's ``distribute_module`` as specs and constraints.

They are called, as torch calls them, on a copy of the module without memory and on placeholders of
its inputs and its output. Their calls of DTensor are recorded: ``distribute_tensor``,
``DTensor.from_local``, ``redistribute``, ``to_local``.
"""

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import field
from typing import Any

import torch
from torch import Tensor, nn

from ftp.dataclass import dataclass
from ftp.errors import SpecError
from ftp.functional.functionalize import functionalize
from ftp.functional.module_constraints import Constraint
from ftp.plans.labelled_specs import labelled_specs
from ftp.plans.mesh_axis import choose_axis
from ftp.plans.styles import shard_spec
from ftp.sharding.mesh import AnyMesh, resolve
from ftp.sharding.pytree import Specs, kind_of
from ftp.sharding.spec import P


def from_distribute_module(
    model: nn.Module,
    partition_fn: Callable[..., Any] | None = None,
    input_fn: Callable[..., Any] | None = None,
    output_fn: Callable[..., Any] | None = None,
    *,
    mesh: AnyMesh | None = None,
    axis: str | None = None,
) -> tuple[Specs, dict[str, Constraint]]:
    """Read the functions of torch's ``distribute_module(model, mesh, ...)`` as specs and
    constraints.

    Args:
        model: is not changed.
        partition_fn: ``(name, module, mesh)``, called for each module; parameters that it replaces
            by ``distribute_tensor``'s result are sharded, all others replicated.
        input_fn: ``(module, inputs, mesh)``, or ``(inputs, mesh)``; sets the layouts of the inputs
            by ``DTensor.from_local`` and ``redistribute``, and returns them.
        output_fn: ``(module, outputs, mesh)``, or ``(outputs, mesh)``; of one output tensor.
        mesh: a 1-D mesh, whose axis to shard over; or any mesh, with ``axis``.
        axis: the mesh axis to shard over; default "tp".

    Returns:
        ``(specs, constraints)``, as of ``from_parallelize_plan``; ``ftp.plans.merge`` puts those of
        submodules together.

    Raises:
        SpecError: placements over several axes or ``Partial``; a function that asks for more than
            layouts, such as an input's shape or its values.
        MeshError: a mesh of several axes without ``axis``.

    >>> from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
    >>> def rows(name, module, mesh):
    ...     for key, p in list(module.named_parameters(recurse=False)):
    ...         sharded = nn.Parameter(distribute_tensor(p, mesh, [Shard(0)]))
    ...         module.register_parameter(key, sharded)
    >>> def gathered(module, outputs, mesh):
    ...     return outputs.redistribute(mesh, [Replicate()]).to_local()
    >>> model = nn.Linear(4, 8)
    >>> specs, constraints = from_distribute_module(model, rows, output_fn=gathered)
    >>> specs["weight"], constraints[""].outputs
    (P('tp'), P())
    """
    axis = choose_axis(mesh, axis, None)
    of_mesh = _FakeMesh(axis, None if mesh is None else resolve(mesh).axes.get(axis))
    _, params = functionalize(model)
    found = _partitioned(model, partition_fn, of_mesh) if partition_fn else {}
    given_by = _name(partition_fn) if partition_fn else "no partition_fn"
    specs = labelled_specs(params, {path: (given_by, found.get(path, P())) for path in params})
    inputs, outputs = None, None
    if input_fn:
        count, name = len(inspect.signature(model.forward).parameters), _name(input_fn)
        taken = tuple(_FakeDTensor(f"input {i} of {name}", of_mesh) for i in range(count))
        left = _called(input_fn, model, taken, of_mesh)
        inputs = _entries(left if isinstance(left, tuple | list) else (left,), taken, input_fn)
    if output_fn:
        out = _FakeDTensor(f"the output of {_name(output_fn)}", of_mesh)
        left = _called(output_fn, model, out, of_mesh)
        if left is not out:
            raise SpecError(
                f"{_name(output_fn)} gives {kind_of(left)}, not the output that it was given. State"
                " the layouts as ftp.Constraint(outputs=...)."
            )
        outputs = out.specs[-1] if out.specs else None
    if inputs is None and outputs is None:
        return specs, {}
    return specs, {"": Constraint(inputs=inputs, outputs=outputs, axes=axis, grad="dtensor")}


@dataclass(frozen=True)
class _FakeMesh:
    """Stands for the DeviceMesh that the functions are given."""

    axis: str
    n: int | None
    ndim: int = 1
    device_type: str = "cpu"

    @property
    def mesh_dim_names(self) -> tuple[str]:
        return (self.axis,)

    def size(self, mesh_dim: int | None = None) -> int:
        if self.n is None:
            raise SpecError("A function asks for the size of the mesh. Pass mesh=.")
        return self.n

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise SpecError(
            f"A function asks the mesh for its {name}; layouts are the same on all ranks. Give them"
            " as ftp.plan and ftp.Constraint do."
        )


@dataclass(eq=False)
class _FakeDTensor:
    """Stands for a DTensor: an input of the module or its output.

    Attributes:
        specs: the layouts that the functions gave it, in order.
    """

    what: str
    mesh: _FakeMesh
    specs: list[P] = field(default_factory=list)

    def redistribute(
        self, device_mesh: Any = None, placements: Any = None, **_: Any
    ) -> "_FakeDTensor":
        self.specs.append(_spec(placements, self.mesh.axis, self.what))
        return self

    def to_local(self, **_: Any) -> "_FakeDTensor":
        return self

    def full_tensor(self, **_: Any) -> "_FakeDTensor":
        self.specs.append(P())
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise SpecError(
            f"A function asks for {name} of {self.what}; it may only set layouts, by"
            " DTensor.from_local, redistribute and to_local. State them as"
            " ftp.Constraint(inputs=..., outputs=...)."
        )


def _spec(placements: Any, axis: str, what: str) -> P:
    """The spec of one placement; of a dim from the end as well."""
    given = tuple(placements) if isinstance(placements, tuple | list) else (placements,)
    if len(given) == 1 and given[0].is_replicate():
        return P()
    if len(given) == 1 and given[0].is_shard() and not hasattr(given[0], "split_factor"):
        return shard_spec(given[0].dim, axis)
    raise SpecError(
        f"{what} has placements {given!r}; one Shard or Replicate over {axis!r} can be stated as a"
        " spec."
    )


def _partitioned(
    model: nn.Module, partition_fn: Callable[..., Any], mesh: _FakeMesh
) -> dict[str, P]:
    """The specs of the parameters that the function distributes."""
    known: dict[int, Any] = {}
    kept: list[Tensor] = []

    def distributed(tensor: Tensor, placements: Any) -> Tensor:
        made = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        kept.append(made)  # so that no other storage takes its place
        known[made.untyped_storage()._cdata] = placements
        return made

    trial = copy.deepcopy(model).to("meta")
    with _noting(distributed, mesh):
        for name, module in list(trial.named_modules()):
            partition_fn(name, module, mesh)
    found = {}
    for path, p in trial.named_parameters():
        placements = known.get(p.untyped_storage()._cdata)
        if placements is not None:
            spec = _spec(placements, mesh.axis, path)
            entries = [spec[d] for d in range(len(spec))]
            if ... in entries:
                entries = [None] * (p.ndim - len(entries) + 1) + entries[1:]
            found[path] = P(*entries)
    return found


@contextmanager
def _noting(distributed: Callable[[Tensor, Any], Tensor], mesh: _FakeMesh) -> Iterator[None]:
    """Record calls of ``distribute_tensor`` and ``DTensor.from_local`` within the block, by
    whatever name user code imported them.
    """
    from torch.distributed.tensor import DTensor, distribute_tensor

    function: Any = distribute_tensor
    own, from_local = function.__code__, DTensor.__dict__["from_local"]
    function.__code__ = _noted.__code__
    _noting_now.append(distributed)
    DTensor.from_local = staticmethod(_from_local)  # type: ignore[method-assign]
    try:
        yield
    finally:
        function.__code__ = own
        _noting_now.pop()
        DTensor.from_local = from_local


_noting_now: list[Callable[[Tensor, Any], Tensor]] = []


def _noted(tensor, device_mesh=None, placements=None, *, src_data_rank=0):
    # Runs with the globals of torch's function.
    from ftp.plans import distribute_module as noting

    return noting._noting_now[-1](tensor, placements)


def _from_local(value: Any, device_mesh: Any = None, placements: Any = None, **_: Any) -> Any:
    if not isinstance(value, _FakeDTensor):
        raise SpecError(
            "A function calls DTensor.from_local on a tensor that is no input or output of the"
            " module. State its layout with an ftp.Constraint."
        )
    return value.redistribute(device_mesh, placements)


def _called(fn: Callable[..., Any], model: nn.Module, values: Any, mesh: _FakeMesh) -> Any:
    takes = len(inspect.signature(fn).parameters)
    with _noting(lambda tensor, placements: _from_local(tensor, None, placements), mesh):
        return fn(values, mesh) if takes == 2 else fn(model, values, mesh)


def _entries(left: Sequence[Any], taken: Sequence[_FakeDTensor], fn: Callable[..., Any]) -> Any:
    """Per input its first and its last layout."""
    if any(a is not b for a, b in zip(left, taken, strict=False)):
        raise SpecError(
            f"{_name(fn)} gives other inputs than it was given, or in another order. State the"
            " layouts as ftp.Constraint(inputs=...)."
        )
    entries = [
        None if not v.specs else v.specs[0] if len(v.specs) == 1 else (v.specs[0], v.specs[-1])
        for v in left
    ]
    return (*entries, ...)


def _name(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__name__", type(fn).__name__)
