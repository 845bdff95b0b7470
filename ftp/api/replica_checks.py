"""Whether ranks pass, and captured, equal copies of what they share."""

import json
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ftp.api.arguments import Arguments
from ftp.api.planned import Planned
from ftp.distributed.calls import Calls
from ftp.runtime.program import Program
from ftp.sharding.mesh import Mesh
from ftp.sharding.spec import PartitionSpec
from ftp.tensors.check_indices import check_indices
from ftp.tensors.global_shapes import describe_held
from ftp.tensors.replicas import check_samples, compare_copies
from ftp.torch_internals.storages import storage_of


def check_inputs(call: Arguments, planned: Planned, mesh: Mesh, record: Calls) -> None:
    """``check_inputs=True``: raise if replicas differ between ranks, or if an index is out of
    range.
    """
    program, when = planned.program, f" at call {record.next()}"
    given = [*(call.leaves[i] for i in program.tensor_leaves), *program.constants]
    names = [*(call.names[i] for i in program.tensor_leaves), *_names_of_captured(planned)]
    specs = [*program.in_specs, *([PartitionSpec()] * len(program.constants))]
    check_indices(given, specs, names, program.index_bounds, mesh, record, when)
    compare_copies(given, specs, names, mesh, record, when)


def check_captured(planned: Planned, mesh: Mesh, record: Calls, when: str) -> None:
    """Raise on every rank, naming the captured tensors whose samples are far apart."""
    if found := _captured(planned):
        spec = PartitionSpec()
        held = json.dumps([describe_held(x, spec, mesh) for x in found])
        everyone = [json.loads(t) for t in record.exchange("captured tensors", held)]
        check_samples(everyone, [spec] * len(found), _names_of_captured(planned), mesh, when)


def _captured(planned: Planned) -> Sequence[Tensor]:
    """None for pipelines: each rank has those of its stages."""
    return planned.program.constants if isinstance(planned.program, Program) else ()


def _names_of_captured(planned: Planned) -> list[str]:
    """The places where the function finds them; of each, the first."""
    places = {_memory(place.value): place.name for place in reversed(planned.captured)}
    return [
        f"{places.get(_memory(x), f'closure constant {i}')}, a tensor of shape {tuple(x.shape)},"
        for i, x in enumerate(_captured(planned))
    ]


def _memory(x: Any) -> Any:
    """What tensors that are one have in common: a traced one is detached."""
    storage = storage_of(x) if isinstance(x, Tensor) else None
    return id(x) if storage is None else (storage.data_ptr(), x.storage_offset(), x.shape)
