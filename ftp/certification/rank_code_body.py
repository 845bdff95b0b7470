"""Run per-rank code as it is written, on all ranks: a collective of ``ftp.axis`` is a function of
the tensors of the ranks along an axis.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from itertools import product
from typing import Any

import torch
from torch import fx

from ftp.certification.lockstep.run import dtypes_of, is_view
from ftp.ops.axis_collectives import OPS
from ftp.ops.mapped_arguments import mapped_arguments
from ftp.per_rank.planned import collective_axis

aten = torch.ops.aten


class NotRun(Exception):
    """Per-rank code cannot be run; the message says why."""


def run_body(
    domain: Any, body: fx.Graph, axes: Mapping[str, int], inputs: Sequence[Sequence[Any]]
) -> list[list[Any]]:
    """The results of every rank, in row-major order of the mesh.

    Args:
        body: takes the operands' shards, then the rank's index on each axis.
        inputs: the shards of each rank.
    """
    every = list(product(*map(range, axes.values())))
    dims = {axis: d for d, axis in enumerate(axes)}
    given = [[*own, *map(torch.tensor, at)] for own, at in zip(inputs, every, strict=True)]
    values: list[dict[fx.Node, Any]] = [{} for _ in every]
    count = 0
    for node in body.nodes:
        if node.op == "placeholder":
            for own, xs in zip(values, given, strict=True):
                own[node] = xs[count]
            count += 1
            continue
        if node.op == "output":
            return [[own[n] for n in node.args[0]] for own in values]
        axis = collective_axis(node.target, node.args)
        if axis is None:
            for own in values:
                own[node] = _called(domain, node, own)
            continue
        if node.target not in _COLLECTIVES:
            raise NotRun(f"{node.target} sends as many rows as values say")
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank, at in enumerate(every):
            groups.setdefault((*at[: dims[axis]], *at[dims[axis] + 1 :]), []).append(rank)
        # all_reduce takes (x, op, axis), the others take (x, axis, ...).
        rest = node.args[1:2] if node.target is OPS.all_reduce.default else node.args[2:]
        for ranks in groups.values():
            sent = [values[r][node.args[0]] for r in ranks]
            found = _COLLECTIVES[node.target](domain, sent, *rest)
            for rank, x in zip(ranks, found, strict=True):
                values[rank][node] = domain.separate(x)
    raise AssertionError("a graph without an output")


def _called(domain: Any, node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
    arguments: Any = mapped_arguments(node, values.__getitem__)
    args, kwargs = arguments
    if node.target is operator.getitem:
        return args[0][args[1]]
    found = domain.call(node.target, args, kwargs, dtypes_of(node))
    return found if is_view(node) else domain.laid_out(found, node.meta.get("strides"))


def _zeros(domain: Any, x: Any) -> Any:
    return domain.call(aten.zeros_like.default, (x,), {}, [x.dtype])


def _cut(domain: Any, x: Any, n: int, dim: int, at: int) -> Any:
    return domain.move(lambda t: t.chunk(n, dim)[at], x)


def _joined(domain: Any, parts: Sequence[Any], dim: int) -> Any:
    return domain.move(lambda *ts: torch.cat(ts, dim), *parts)


def _all_reduce(domain: Any, sent: Sequence[Any], op: str) -> list[Any]:
    by = {"sum": domain.add, "max": domain.larger, "min": domain.smaller}[op]
    return [reduce(by, sent)] * len(sent)


def _all_gather(domain: Any, sent: Sequence[Any], n: int, dim: int) -> list[Any]:
    return [_joined(domain, sent, dim)] * n


def _reduce_scatter(domain: Any, sent: Sequence[Any], n: int, dim: int) -> list[Any]:
    total = reduce(domain.add, sent)
    return [_cut(domain, total, n, dim, at) for at in range(n)]


def _all_to_all(domain: Any, sent: Sequence[Any], n: int, split: int, concat: int) -> list[Any]:
    return [
        _joined(domain, [_cut(domain, x, n, split, at) for x in sent], concat) for at in range(n)
    ]


def _ppermute(domain: Any, sent: Sequence[Any], n: int, flat: Sequence[int]) -> list[Any]:
    source = dict(zip(flat[1::2], flat[::2], strict=True))
    return [sent[source[at]] if at in source else _zeros(domain, sent[at]) for at in range(n)]


def _own_part(domain: Any, sent: Sequence[Any], n: int, dim: int) -> list[Any]:
    return [_cut(domain, x, n, dim, at) for at, x in enumerate(sent)]


def _place_part(domain: Any, sent: Sequence[Any], n: int, dim: int) -> list[Any]:
    return [
        _joined(domain, [x if i == at else _zeros(domain, x) for i in range(n)], dim)
        for at, x in enumerate(sent)
    ]


def _contribute(domain: Any, sent: Sequence[Any]) -> list[Any]:
    return [sent[0], *(_zeros(domain, x) for x in sent[1:])]


_COLLECTIVES: dict[Any, Callable[..., list[Any]]] = {
    OPS.all_reduce.default: _all_reduce,
    OPS.all_gather.default: _all_gather,
    OPS.reduce_scatter.default: _reduce_scatter,
    OPS.all_to_all.default: _all_to_all,
    OPS.ppermute.default: _ppermute,
    OPS.own_part.default: _own_part,
    OPS.place_part.default: _place_part,
    OPS.contribute.default: _contribute,
}
