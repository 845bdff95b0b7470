"""Lint: specs that shard nothing, replicated weights, uneven shards, activations gathered whole."""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from ftp.dataclass import dataclass
from ftp.ops.constrain import pin_from_str
from ftp.planning.graph import BATCH, Graph, Node, Value
from ftp.planning.lookups import is_of_lookup
from ftp.report.causes import Origins, Users, describe
from ftp.report.memory import in_bytes
from ftp.report.names import without_numbers
from ftp.rules.op_kinds import VIEWS
from ftp.sharding.local_pieces import local_shape
from ftp.sharding.spec import PartitionSpec

LARGE = 1 << 20  # bytes from which waste is a warning rather than a note
SHARE = 0.01  # of all parameters, from which one of them is large
WASTED = 0.05  # of a shard's memory and time, from which unevenness is a warning


@dataclass(frozen=True)
class Finding:
    """One finding.

    Attributes:
        kind: ``shards nothing``, ``replicated``, ``uneven``, ``gathered``, ``disagreement``,
            ``repeated work``, ``no matmul cut``, ``constraints broken`` or ``empty rows``.
        severity: ``warning``, which ``strict=True`` makes an error, or ``note``.
        where: the parameter path, pattern or op.
        text: what was found, what it costs, and what to do.
        nbytes: bytes per rank that are wasted or sent.
        count: number of equal findings.
    """

    kind: str
    severity: str
    where: str
    text: str
    nbytes: int = 0
    count: int = 1

    def __str__(self) -> str:
        times = f" (x {self.count})" if self.count > 1 else ""
        return f"{self.severity}: {self.where}{times} {self.text}"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def lint(
    graph: Graph,
    inputs: Sequence[tuple[Node, PartitionSpec, str]],
    axes: Mapping[str, int],
    found: Origins,
    collectives: Mapping[str, Any],
    is_strict: bool = False,
) -> list[Finding]:
    """All findings, warnings first; findings that repeat from layer to layer are merged.

    Args:
        inputs: input nodes with their specs and roles.
        collectives: ``{name of a reshard, or of per-rank code with one: record}``.
        is_strict: warn of every activation that is gathered without a request, however small.
    """
    specs = {node: spec for node, spec, _ in inputs}
    findings = [
        *_idle_specs(inputs, axes),
        *_replicated(inputs, axes),
        *_uneven(inputs, axes),
        *_gathered(graph, found, specs, collectives, 0 if is_strict else LARGE),
    ]
    return sorted(folded(findings), key=lambda f: (f.severity != "warning", -f.nbytes))


def folded(findings: Sequence[Finding]) -> list[Finding]:
    """Merge findings that differ only in numbers of layers: count them and add up their bytes."""
    groups: dict[Any, list[Finding]] = {}
    for f in findings:
        groups.setdefault(
            (f.kind, f.severity, without_numbers(f.where), without_numbers(f.text)), []
        ).append(f)
    return [
        replace(g[0], nbytes=sum(f.nbytes for f in g), count=sum(f.count for f in g))
        for g in groups.values()
    ]


def _idle_specs(
    inputs: Sequence[tuple[Node, PartitionSpec, str]], axes: Mapping[str, int]
) -> list[Finding]:
    found = []
    for node, spec, _ in inputs:
        shape = node.results[0].shape
        idle = [axis for axis in spec.axes if axes[axis] == 1]
        if idle and math.prod(axes[a] for a in spec.axes) == 1:
            text = f"has spec {spec}, which shards nothing: mesh axis {idle[0]!r} has size 1."
            found.append(Finding("shards nothing", "note", node.name, text))
        elif spec.axes and not math.prod(shape):
            text = f"has spec {spec} and shape {shape}: there is nothing to shard."
            found.append(Finding("shards nothing", "note", node.name, text))
        elif spec.axes and any(size == 1 and spec.cuts(dim) for dim, size in enumerate(shape)):
            dim = next(dim for dim, size in enumerate(shape) if size == 1 and spec.cuts(dim))
            text = (
                f"has spec {spec}, which cuts dim {dim} of size 1: one rank holds all of it."
                " Give None there."
            )
            found.append(Finding("shards nothing", "warning", node.name, text))
    return found


def _replicated(
    inputs: Sequence[tuple[Node, PartitionSpec, str]], axes: Mapping[str, int]
) -> list[Finding]:
    """Large parameters that are whole on an axis which cuts other parameters."""
    mine = [(node, spec) for node, spec, role in inputs if role == "parameters"]
    total = sum(_nbytes(node) for node, _ in mine)
    used = [axis for axis in axes if axes[axis] > 1 and any(axis in spec.axes for _, spec in mine)]
    found = []
    for node, spec in mine:
        missing = [axis for axis in used if axis not in spec.axes]
        nbytes = _nbytes(node)
        if spec.axes or not missing or nbytes < max(LARGE, SHARE * total):
            continue
        axis = missing[0]
        shape = node.results[0].shape
        dims = [d for d, size in enumerate(shape) if size % axes[axis] == 0]
        could = (
            f" P({', '.join(['None'] * dims[0] + [repr(axis)])}) would cut it in {axes[axis]}."
            if dims
            else ""
        )
        text = (
            f"of shape {tuple(shape)} is whole on every rank: {in_bytes(nbytes)},"
            f" {nbytes / total:.0%} of all parameters.{could}"
        )
        found.append(Finding("replicated", "warning", node.name, text, nbytes))
    return found


def _uneven(
    inputs: Sequence[tuple[Node, PartitionSpec, str]], axes: Mapping[str, int]
) -> list[Finding]:
    found = []
    of_spec = functools.cache(functools.partial(uneven_dims, axes=axes))  # layers have equal ones
    for node, spec, _ in inputs:
        meta = node.results[0]
        for u in of_spec(spec, meta.shape):
            held = math.prod(local_shape(spec, meta.shape, dict(axes))) * meta.dtype.itemsize
            wasted = int(held * u.wasted)
            severity = "warning" if u.wasted >= WASTED and wasted >= LARGE else "note"
            nearest = " or ".join(str(n) for n in (u.below, u.above) if n)
            text = (
                f"has {u.size} in dim {u.dim} for {u.ranks} ranks: the largest shard has"
                f" {u.largest}, so that {u.wasted:.1%} of its"
                f" memory and time ({in_bytes(wasted)} a rank) wait for nothing. {nearest} would"
                " divide."
            )
            found.append(Finding("uneven", severity, node.name, text, wasted))
    return found


def _gathered(
    graph: Graph,
    found: Origins,
    specs: dict[Node, PartitionSpec],
    collectives: Mapping[str, Any],
    large: int,
) -> list[Finding]:
    """Activations that are gathered whole over an axis: warnings from ``large`` bytes on, unless a
    constraint or the batch cuts the activation, a constraint or an output's spec asks for the
    whole, or its rows are moved instead of a table.
    """
    findings, users = [], graph.users
    for node in graph.nodes:
        record = collectives.get(node.name)
        is_planned = node.kind == "reshard" and node.depends & BATCH
        if record is None or record.op != "all_gather" or not is_planned:
            continue
        origin = found.get((node.operands[0], node.target.axis))
        if origin is None:
            continue
        asked = (
            origin.kind == "constrain"
            or origin.depends & BATCH
            or _is_asked(Value(node), node.target.axis, graph, users)
            or is_of_lookup(node, users)
        )
        severity = "warning" if not asked and record.nbytes >= large else "note"
        text = (
            f"is an activation of shape {record.global_shape} that is gathered whole over"
            f" {node.target.axis!r},"
            f" {in_bytes(record.nbytes)}; it was cut by {describe(origin, specs)}, and is needed"
            f" for {node.cause}."
        )
        axis, dim = node.target.axis, node.target.src.dim
        parts = _parts(Value(node), dim, users)
        if parts > 1 and origin.kind == "input" and not asked:
            text += (
                f" There dim {dim} falls into {parts} parts: units({axis!r}, pack={parts}) in"
                " that spec cuts each of them,"
            )
            text += f" units({axis!r}, {record.global_shape[dim] // parts}) none."
        findings.append(
            Finding("gathered", severity, f"%{node.operands[0].node.name}", text, record.nbytes)
        )
    return findings


def _is_asked(value: Value, axis: str, graph: Graph, users: Users) -> bool:
    """Whether an output or a constraint takes a gathered value, or a view of it."""
    return value in graph.outputs or any(
        (user.kind == "constrain" and pin_from_str(user.target).holds(axis))
        or (user.target in VIEWS and _is_asked(Value(user), axis, graph, users))
        for user, _ in users.get(value, ())
    )


def _parts(value: Value, dim: int, users: Users) -> int:
    """The number of equal parts into which users of ``value`` split its ``dim``; 1 if none do."""
    for user, slot in users.get(value, ()):
        parts = [result.shape for result in user.results]
        if user.kind != "op":
            continue
        if (
            len(parts) > 1
            and len(set(parts)) == 1
            and len(parts[0]) == len(value.shape)
            and parts[0][dim] * len(parts) == value.shape[dim]
        ):
            return len(parts)
        if user.target in VIEWS:
            factors = user.rule.operands[slot][dim]
            if factors in user.rule.results[0]:
                return _parts(Value(user), user.rule.results[0].index(factors), users)
            if len(factors) > 1:
                return user.rule.sizes[factors[0]]
    return 1


def _nbytes(node: Node) -> int:
    return math.prod(node.results[0].shape) * node.results[0].dtype.itemsize


@dataclass(frozen=True)
class Uneven:
    """A dim with shards of different sizes.

    Attributes:
        size: the size of the dim, which is cut over ``ranks`` ranks.
        largest: the size of the longest shard.
        wasted: the share of the ranks' memory and time for the dim that an even division would
            save.
        below, above: the nearest sizes that ``ranks`` divides.
    """

    dim: int
    size: int
    ranks: int
    largest: int
    wasted: float
    below: int
    above: int


def uneven_dims(spec: PartitionSpec, shape: Sequence[int], axes: Mapping[str, int]) -> list[Uneven]:
    """
    >>> (found,) = uneven_dims(PartitionSpec("tp"), (10, 3), {"tp": 4})
    >>> found.dim, found.largest, round(found.wasted, 3), found.below, found.above
    (0, 3, 0.167, 8, 12)
    >>> from ftp.sharding.spec import zigzag
    >>> (found,) = uneven_dims(PartitionSpec(zigzag("cp")), (14,), {"cp": 2})
    >>> found.largest, found.below, found.above
    (8, 12, 16)
    """
    found = []
    most = local_shape(spec, shape, dict(axes))
    for dim, size in enumerate(shape):
        cuts = spec.cuts(dim)
        n = math.prod(axes[c.axis] for c in cuts)
        if n == 1 or not size or most[dim] * n == size:
            continue
        step = n * max(c.size for c in cuts) * (2 if any(c.zigzag for c in cuts) else 1)
        if all(c.is_plain or c.pack == 1 for c in cuts) and most[dim] * n > size:
            below, wasted = size // step * step, 1 - size / (most[dim] * n)
            found.append(Uneven(dim, size, n, most[dim], wasted, below, below + step))
    return found
