"""Proofs of per-rank code (``ftp.local``): the ranks run it as it is written, and its results are
equal on the ranks where its specs say so.

For equal results the checker first follows the axes along which each value varies through the
ranks' graphs. What that leaves open it proves by running the code on random residues, on all ranks
side by side, as it does for programs that ftp did not write.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import fx

from ftp.certification.certificate import Certificate, Operation, Ref
from ftp.certification.collective_semantics import COLLECTIVES
from ftp.certification.rank_code_run import open_after_a_run
from ftp.certification.rank_graphs import RankGraphs
from ftp.dataclass import dataclass
from ftp.ops.axis_collectives import OPS
from ftp.ops.exchange_rows import ALL_TO_ALL_ROWS
from ftp.ops.mapped_arguments import mapped_arguments
from ftp.ops.rings import SENDING
from ftp.per_rank.planned import ENTER, LEAVE, collective_axis, rank_axes

aten = torch.ops.aten
c10d = torch.ops._c10d_functional
AxisSet = frozenset[str]
_INVARIANT = (c10d.all_reduce.default, c10d.all_gather_into_tensor.default)


@dataclass(frozen=True)
class Unproven:
    """A claim of an op of per-rank code that is not proven.

    Attributes:
        kind: "code", that the ranks run it as it is written; "specs", that its results are equal
            on the ranks where its specs say so.
    """

    op: Operation
    kind: str

    @property
    def key(self) -> tuple[str, str]:
        return self.op.name, self.kind

    def __str__(self) -> str:
        what = {
            "code": "that the ranks run the per-rank code as it is written",
            "specs": "that results are equal on all ranks along axes that its specs do not name",
        }
        return f"{self.op}: {what[self.kind]} is not proven"


def unproven(certificate: Certificate) -> Iterator[Unproven]:
    """The claims of per-rank code that are neither proven nor trusted.

    Raises:
        CertificateError: a claim is wrong, as a run showed.
    """
    known = set(certificate.trusted)
    code = [o for o in certificate.operations if o.ports is not None or o.target is LEAVE]
    if not code:
        return
    graphs = RankGraphs(certificate, {o.name: o for o in certificate.operations})
    of_ops = _of_operations(certificate)
    for op in code:
        if op.ports is None:
            claimed = [a for a in op.args[1] if a not in (*op.args[3], *op.args[6])]
            found = ["specs"] if of_ops[op.operands[0]].intersection(claimed) else []
        else:
            kinds = [k for k in ("code", "specs") if (op.name, k) not in known]
            claims = list(_claims(certificate, graphs, op)) if "specs" in kinds else []
            is_run = "code" in kinds or claims
            found = open_after_a_run(certificate, graphs, op, claims) if is_run else []
        yield from (o for o in (Unproven(op, kind) for kind in found) if o.key not in known)


def _claims(
    certificate: Certificate, graphs: RankGraphs, op: Operation
) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Results, each with axes along which it is claimed to be equal and may vary, as far as the
    graphs show.
    """
    assert op.ports is not None
    varying = _of_results(certificate, graphs, op)
    for at, (spec, pending) in enumerate(op.ports.results):
        named = {axis for dim in spec for axis, _, _ in dim} | set(pending)
        if axes := tuple(a for a in certificate.axes if a not in named and a in varying[at]):
            yield at, axes


def _of_operations(certificate: Certificate) -> dict[Ref, AxisSet]:
    """The axes along which each value may vary in per-rank code over some of the mesh's axes."""
    found: dict[Ref, AxisSet] = {}
    for op in certificate.operations:
        operands = [found.get(r, frozenset()) for r in op.operands]
        axes = rank_axes(op.target, op.args, operands)
        axis = collective_axis(op.target, op.args)
        if axis is not None and op.target in (OPS.all_reduce.default, OPS.all_gather.default):
            axes -= {axis}
        if op.target is ENTER:
            axes = frozenset(op.args[3])
        found |= {Ref(op.name, i): axes for i in range(len(op.results))}
    return found


# The axes along which values vary, in the ranks' graphs.


def _of_results(certificate: Certificate, graphs: RankGraphs, op: Operation) -> list[AxisSet]:
    """The axes along which each result of per-rank code may vary, by its nodes and its operands."""
    assert op.ports is not None
    every = frozenset(certificate.axes)
    lists = [nodes.get(op.name, []) for nodes in graphs.local_ops]
    found = [frozenset[str]() for _ in op.ports.results]
    if len({len(nodes) for nodes in lists}) > 1:
        return [every] * len(found)
    ranks = _VaryingNumbers(certificate)
    known: list[dict[fx.Node, AxisSet]] = [{} for _ in lists]
    numbers = [{n: i for i, n in enumerate(nodes)} for nodes in lists]
    offsets = [list(graphs.placeholders[g])[graphs.inputs :] for g in range(len(lists))]
    for alike in zip(*lists, strict=True):
        first = alike[0]
        axes = ranks.varying([_text(n, numbers[g], offsets[g]) for g, n in enumerate(alike)])
        used = [
            [offsets[g].index(x) for x in n.all_input_nodes if x in offsets[g]]
            for g, n in enumerate(alike)
        ]
        if len({len(u) for u in used}) > 1:
            axes = every
        else:
            for each in zip(*used, strict=True):
                axes |= ranks.varying_offset(each)
        for g, n in enumerate(alike):
            axes |= frozenset().union(*(known[g].get(x, frozenset()) for x in n.all_input_nodes))
        if "takes" in first.meta and first.target is aten.contiguous.default:
            axes |= {a for dim in op.ports.operands[first.meta["takes"]] for a, _, _ in dim}
        if first.target in COLLECTIVES:
            over = frozenset(certificate.groups.get(first.args[-1], ()))
            axes = axes - over if first.target in _INVARIANT else axes | over
        if first.target in SENDING or first.target is ALL_TO_ALL_ROWS or _is_random(first):
            axes = every
        for g, n in enumerate(alike):
            known[g][n] = axes
        for at in [at for n in alike for at in n.meta.get("gives", ())]:
            found[at] |= axes
    return found


def _text(node: fx.Node, numbers: dict[fx.Node, int], offsets: Sequence[fx.Node]) -> str:
    """A call as text that is equal on ranks that make the same call of the same operands."""

    def named(n: fx.Node) -> str:
        if n in numbers:
            return f"%{numbers[n]}"
        return "%offset" if n in offsets else "%operand"

    args = mapped_arguments(node, named)
    return f"{node.target} {args} {node.meta.get('takes')} {node.meta.get('gives')}"


def _is_random(node: fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


class _VaryingNumbers:
    """The mesh axes along which facts of the ranks' graphs, and offsets, vary."""

    def __init__(self, certificate: Certificate):
        self.axes = list(certificate.axes)
        self.number, self.offsets = certificate.ranks.number, certificate.ranks.offsets

    def varying(self, of_graphs: Sequence[Any]) -> AxisSet:
        """The axes along which a fact varies, given the fact for each graph."""
        kinds = {kind: i for i, kind in enumerate(dict.fromkeys(of_graphs))}
        return self._along(np.array([kinds[kind] for kind in of_graphs])[self.number])

    def varying_offset(self, of_graphs: Sequence[int]) -> AxisSet:
        """The axes along which an offset varies, given its index in each graph."""
        values = np.zeros_like(self.number)
        for graph, which in enumerate(of_graphs):
            values = np.where(self.number == graph, self.offsets[graph][which], values)
        return self._along(values)

    def _along(self, values: np.ndarray) -> AxisSet:
        return frozenset(
            axis
            for dim, axis in enumerate(self.axes)
            if not (values == values.take([0], dim)).all()
        )
