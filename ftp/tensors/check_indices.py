"""Integer inputs that index a dim: their bounds, found in a traced program, and a check of their
values on all ranks.
"""

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ftp.distributed.agreement import Calls
from ftp.errors import InputError, join_failures
from ftp.sharding.mesh import Mesh

aten = torch.ops.aten
Bound = tuple[
    int, int, int | None, str
]  # the least value, the first that is too large, one that is ignored, and the user's line

# Ops of a tensor, a dim and indices along it.
_ALONG_DIM = (
    aten.gather.default, aten.index_select.default, aten.index_add.default, aten.index_copy.default,
    aten.scatter.src, aten.scatter.value, aten.scatter_add.default, aten.scatter_reduce.two,
)  # fmt: skip
_LOSSES = {
    aten.nll_loss_forward.default: 4,
    aten.nll_loss2d_forward.default: 4,
}  # the argument that is the class to ignore
_LISTS = (
    aten.index.Tensor,
    aten._unsafe_index.Tensor,
    aten.index_put.default,
)  # these count negative ones from the end
_SAME_VALUES = {
    aten.alias.default, aten.clone.default, aten.detach.default, aten.expand.default,
    aten.permute.default, aten.reshape.default, aten.squeeze.default, aten.squeeze.dim,
    aten.squeeze.dims, aten.t.default, aten.transpose.int, aten.unsqueeze.default,
    aten.view.default,
}  # fmt: skip


def index_bounds(graph: fx.Graph) -> dict[int, list[Bound]]:
    """The bounds of each input whose values index a dim, by position. Indices that the program
    computes have none.
    """
    places = {node: i for i, node in enumerate(n for n in graph.nodes if n.op == "placeholder")}
    found: dict[int, list[Bound]] = {}

    def note(index: Any, least: int, size: int, ignored: int | None, line: str) -> None:
        while isinstance(index, fx.Node) and index.op == "call_function":
            if index.target not in _SAME_VALUES:
                return
            index = index.args[0]
        if (
            isinstance(index, fx.Node)
            and index in places
            and not index.meta["val"].dtype.is_floating_point
        ):
            bound = (least, size, ignored, line)
            if index.meta["val"].dtype not in (
                torch.bool,
                torch.uint8,
            ) and bound not in found.setdefault(places[index], []):
                found[places[index]].append(bound)

    for node in graph.nodes:
        args: Any = node.args
        line = node.meta.get("source", "")
        if node.target is aten.embedding.default:
            note(args[1], 0, args[0].meta["val"].shape[0], None, line)
        elif node.target in _ALONG_DIM and args[0].meta["val"].ndim:
            note(args[2], 0, args[0].meta["val"].shape[args[1]], None, line)
        elif node.target in _LOSSES:
            x = args[0].meta["val"]
            note(args[1], 0, x.shape[min(1, x.ndim - 1)], args[_LOSSES[node.target]], line)
        elif node.target in _LISTS:
            indices = list(args[1])
            if all(
                i is None or i.meta["val"].dtype not in (torch.bool, torch.uint8) for i in indices
            ):
                for dim, index in enumerate(indices):
                    size = args[0].meta["val"].shape[dim]
                    note(index, -size, size, None, line)
    return found


def check_indices(
    leaves: Sequence[Tensor],
    names: Sequence[str],
    bounds: dict[int, list[Bound]],
    mesh: Mesh,
    record: Calls,
    when: str = "",
) -> None:
    """Checks the values of inputs that index a dim, within a call that all ranks have begun.

    Raises:
        InputError: on all ranks: each input that is out of range, a value, the bounds and the rank.
    """
    if not bounds:
        return
    mine = []
    for place, found in bounds.items():
        values = leaves[place]
        if values.device.type == "meta":
            continue
        for least, size, ignored, line in found:
            wrong = (values < least) | (values >= size)
            wrong = wrong if ignored is None else wrong & (values != ignored)
            if wrong.any():
                value = int(values[wrong][0])
                mine.append(
                    f"{names[place]} holds {value}, which is not in [{least}, {size}), where it"
                    f" indexes{f' at {line}' if line else ''}"
                )
    is_process = mesh.kind == "process" and mesh.size() > 1
    everyone = (
        [json.loads(text) for text in record.exchange("indices", json.dumps(mine))]
        if is_process
        else [mine]
    )
    ranks = mesh.ranks if is_process else (0,)
    failures = [
        f"{said}{f', on rank {rank}' if is_process else ''}{when}."
        for rank, of in zip(ranks, everyone, strict=True)
        for said in of
    ]
    if failures:
        raise InputError(join_failures(failures))
