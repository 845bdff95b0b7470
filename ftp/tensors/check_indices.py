"""Integer inputs that index a dim: their ranges, read off a traced program, and a check of the
values that ranks give.

>>> from ftp.sharding.pytree import flatten
>>> from ftp.tracing.trace import trace
>>> fn = lambda table, ids: table[ids[:, :-1]]
>>> leaves, tree = flatten((torch.ones(7, 2), torch.zeros(1, 3, dtype=torch.int64)))
>>> gm = trace(fn, leaves, tree, "cpu", names=["table", "ids"]).gm
>>> [(bound.least, bound.size, bound.reaches.tolist()) for bound in index_bounds(gm.graph)[1]]
[(-7, 7, [[True, True, False]])]
"""

import json
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from ftp.dataclass import dataclass
from ftp.distributed.calls import Calls
from ftp.errors import InputError, raise_all
from ftp.sharding.local_pieces import local_pieces
from ftp.sharding.mesh import Mesh, require_coordinate
from ftp.sharding.spec import PartitionSpec
from ftp.tensors.device_put import take

aten = torch.ops.aten


@dataclass(frozen=True)
class IndexBound:
    """The range of an input's elements that one op reads as indices.

    Attributes:
        least, size: the smallest value, and the first that is too large.
        ignored: another value that is allowed.
        line: the user's line.
        reaches: a mask, of the global input's shape, of the elements that the op reads; None: all.
    """

    least: int
    size: int
    ignored: int | None
    line: str
    reaches: Tensor | None


# Ops of a tensor, a dim and indices along it.
_ALONG_DIM = (
    aten.gather.default, aten.index_select.default, aten.index_add.default, aten.index_copy.default,
    aten.scatter.src, aten.scatter.value, aten.scatter_add.default, aten.scatter_reduce.two,
)  # fmt: skip
_LOSSES = (aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
# Ops whose negative indices count from the end.
_LISTS = (aten.index.Tensor, aten._unsafe_index.Tensor, aten.index_put.default)

# Ops whose result has elements of their operands, and zeros, at places that depend on no value.
_SAME_ELEMENTS = {
    aten.alias.default, aten.clone.default, aten.detach.default, aten.lift_fresh_copy.default,
}  # fmt: skip
_REARRANGED = {
    aten.cat.default, aten.diagonal.default, aten.expand.default, aten.flip.default,
    aten.permute.default, aten.repeat.default, aten.roll.default, aten.rot90.default,
    aten.select.int, aten.select_scatter.default, aten.slice.Tensor, aten.slice_scatter.default,
    aten.split.Tensor, aten.split_with_sizes.default, aten.squeeze.default, aten.squeeze.dim,
    aten.squeeze.dims, aten.stack.default, aten.t.default, aten.transpose.int, aten.tril.default,
    aten.triu.default, aten.unbind.int, aten.unfold.default, aten.unsqueeze.default,
}  # fmt: skip
_RESHAPED = (aten.reshape.default, aten.view.default, aten._unsafe_view.default)


def _indexed(node: fx.Node) -> Iterator[tuple[fx.Node, int, int, int | None]]:
    """The indices that an op reads: (node, least index, size of the dim, index that it ignores)."""
    args: Any = node.args
    if node.target is aten.embedding.default:
        yield args[1], 0, args[0].meta["val"].shape[0], None
    elif node.target in _ALONG_DIM and args[0].meta["val"].ndim:
        size = args[0].meta["val"].shape[args[1]]
        from_the_end = _given_index(args[2])
        yield from_the_end or args[2], -size if from_the_end else 0, size, None
    elif node.target in _LOSSES:
        x, ignored_class = args[0].meta["val"], args[4]
        yield args[1], 0, x.shape[min(1, x.ndim - 1)], ignored_class
    elif node.target is aten.eq.Tensor and (classes := _one_hot_classes(args[1])):
        yield args[0], 0, classes, None
    elif node.target in _LISTS:
        given = [(dim, index) for dim, index in enumerate(args[1]) if index is not None]
        if not any(i.meta["val"].dtype in (torch.bool, torch.uint8) for _, i in given):
            for dim, index in given:
                size = args[0].meta["val"].shape[dim]
                yield index, -size, size, None


def index_bounds(graph: fx.Graph) -> dict[int, list[IndexBound]]:
    """Bounds of the inputs that index a dim, by the inputs' positions.

    Elements are followed through ops that select or rearrange them. Indices that are computed (by
    arithmetic, or chosen by other values) get no bound.
    """
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    followed: list[dict[fx.Node, Any]] = [{} for _ in inputs]
    found: dict[int, dict[tuple[int, int, int | None, str], Tensor]] = {}

    def note(index: fx.Node, least: int, size: int, ignored: int | None, line: str) -> None:
        if index.meta["val"].dtype in (torch.bool, torch.uint8):
            return
        for place in sorted({inputs.index(n) for n in _sources(index)}):
            numbers = _numbers(index, inputs[place], followed[place])
            reaches = torch.zeros(inputs[place].meta["val"].numel() + 1, dtype=torch.bool)
            reaches[numbers.reshape(-1)] = True
            reaches = reaches[1:].view(inputs[place].meta["val"].shape)
            if reaches.any():
                of, bound = found.setdefault(place, {}), (least, size, ignored, line)
                of[bound] = reaches | of[bound] if bound in of else reaches

    for node in graph.nodes:
        for index, least, size, ignored in _indexed(node):
            note(index, least, size, ignored, node.meta.get("source", ""))
    return {
        place: [
            IndexBound(*bound, reaches=None if reaches.all() else reaches)
            for bound, reaches in bounds.items()
        ]
        for place, bounds in found.items()
    }


def check_indices(
    leaves: Sequence[Tensor],
    specs: Sequence[PartitionSpec],
    names: Sequence[str],
    bounds: Mapping[int, Sequence[IndexBound]],
    mesh: Mesh,
    record: Calls,
    when: str = "",
) -> None:
    """Check the values that ranks give for inputs that index, in a call that all ranks have begun.

    Raises:
        InputError: on all ranks, with each input that is out of range, a value of it, the bound and
            the rank.
    """
    if not bounds:
        return
    is_process = mesh.kind == "process" and mesh.size() > 1
    mine = []
    for place, found in bounds.items():
        values = leaves[place]
        if values.device.type == "meta":
            continue
        for bound in found:
            wrong = (values < bound.least) | (values >= bound.size)
            if bound.ignored is not None:
                wrong &= values != bound.ignored
            if (reaches := bound.reaches) is not None:
                if is_process and specs[place]:
                    pieces = local_pieces(
                        specs[place], reaches.shape, mesh.axes, require_coordinate(mesh)
                    )
                    reaches = take(reaches, pieces)
                wrong &= reaches.to(values.device)
            if wrong.any():
                value = int(values[wrong][0])
                mine.append(
                    f"{names[place]} holds {value}, which is not in [{bound.least}, {bound.size}),"
                    f" where it indexes{f' at {bound.line}' if bound.line else ''}"
                )
    everyone, ranks = [mine], (0,)
    if is_process:
        everyone = [json.loads(text) for text in record.exchange("indices", json.dumps(mine))]
        ranks = mesh.ranks
    failures = [
        f"{said}{f', on rank {rank}' if is_process else ''}{when}."
        for rank, of in zip(ranks, everyone, strict=True)
        for said in of
    ]
    raise_all(InputError, failures)


def _numbers(node: fx.Node, source: fx.Node, known: dict[fx.Node, Any]) -> Any:
    """Per element of a value, its number in the input ``source``, from 1; 0 if not from there."""
    if node not in known:
        value = node.meta["val"]
        if node is source:
            known[node] = torch.arange(1, value.numel() + 1).view(value.shape)
        elif operands := _followed(node):
            numbers = {n: _numbers(n, source, known) for n in operands}
            known[node] = _rearranged(node, numbers)
        else:
            known[node] = torch.zeros(value.shape, dtype=torch.int64)
    return known[node]


def _rearranged(node: fx.Node, numbers: Mapping[fx.Node, Any]) -> Any:
    args: Any
    args, kwargs = map_arg((node.args, dict(node.kwargs)), lambda n: numbers.get(n, n))
    if node.target is operator.getitem:
        return args[0][args[1]]
    if node.target in _RESHAPED:
        return args[0].reshape(node.meta["val"].shape)
    if node.target is aten.constant_pad_nd.default:
        return aten.constant_pad_nd.default(args[0], args[1], 0)
    if node.target in _REARRANGED:
        return node.target(*args, **kwargs)
    return args[0]


def _followed(node: fx.Node) -> list[fx.Node]:
    """The operands whose elements a value holds; empty if it computes new elements."""
    target = node.target
    if target is operator.getitem:
        return node.all_input_nodes if _followed(node.all_input_nodes[0]) else []
    if target is aten._to_copy.default:
        x, y = node.args[0].meta["val"].dtype, node.meta["val"].dtype  # type: ignore[union-attr]
        is_wider = not (x.is_floating_point or y.is_floating_point) and y.itemsize >= x.itemsize
        return node.all_input_nodes if is_wider else []
    moves = (*_RESHAPED, aten.constant_pad_nd.default)
    is_followed = target in _SAME_ELEMENTS or target in _REARRANGED or target in moves
    return node.all_input_nodes if is_followed else []


def _sources(node: fx.Node) -> set[fx.Node]:
    """The integer inputs that may hold elements of a value."""
    seen, left = set(), [node]
    while left:
        if (one := left.pop()) not in seen:
            seen.add(one)
            left += _followed(one)
    return {n for n in seen if n.op == "placeholder" and not n.meta["val"].dtype.is_floating_point}


def _given_index(node: Any) -> fx.Node | None:
    """The index that a trace has counted from the front, as its metadata says; else None."""
    while node.target in (aten.expand.default, aten.unsqueeze.default):
        node = node.args[0]
    return node.args[2] if "from_the_front" in node.meta else None


def _one_hot_classes(node: Any) -> int | None:
    """The number of classes, if ``node`` is the range that ``one_hot`` compares with; else None."""
    while isinstance(node, fx.Node) and (operands := _followed(node)):
        node = operands[0]
    is_of_one_hot = (
        isinstance(node, fx.Node)
        and node.target is aten.arange.default
        and "layout" in node.kwargs  # as ftp.tracing.replacements.value_independent writes it
    )
    return int(node.args[0]) if is_of_one_hot else None  # type: ignore[arg-type]
