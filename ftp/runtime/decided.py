"""Decide from a plan what becomes of its collectives, for all ranks, and apply it to a rank's
graph: steps 1 to 3 of `lowering`. A rank whose plan is found does none of it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from torch import fx

from ftp.dataclass import dataclass
from ftp.partitioning.partition import Partitioner
from ftp.passes.bucket_collectives import (
    Buckets,
    bucket_collectives_in,
    choose_buckets,
    reordered,
)
from ftp.passes.chunk_matmuls import Chunks, chunk_matmuls, chunks
from ftp.passes.faster_buckets import faster_buckets
from ftp.passes.fuse_matmul_collectives import Joint, fuse_matmuls, joints
from ftp.passes.merge_axes import merge_axes
from ftp.passes.narrow_reductions import gradient_reductions, narrow_reductions
from ftp.passes.prefetch_parameters import prefetch
from ftp.passes.span_hosts import Span, span_buckets, span_hosts, spans
from ftp.planning.cost import DEFAULT, Hardware
from ftp.planning.graph import Graph
from ftp.planning.plan import Plan
from ftp.runtime.options import Options
from ftp.sharding.mesh import Mesh, mesh_device


@dataclass(frozen=True)
class Decided:
    """Decisions about collectives, made on the plan.

    Attributes:
        graph: the plan's graph, its gathers in the order in which they are issued.
        joints: by reshard, the matmuls that it is fused with.
        narrowed: names of the reshards that sum gradients in ``reduce_dtype``.
        spans: pairs of sums over a fast and a slow link, bucket by bucket.
    """

    graph: Graph
    buckets: Buckets
    chunks: Chunks
    joints: Mapping[str, Joint]
    narrowed: frozenset[str] = frozenset()
    spans: tuple[tuple[Span, ...], ...] = ()

    @property
    def changes_ranks(self) -> bool:
        """Whether a rank's graph differs from the partitioned plan."""
        return bool(
            self.buckets.groups
            or self.buckets.seeds
            or self.chunks.reshards
            or self.joints
            or self.narrowed
            or self.spans
        )

    @property
    def description(self) -> str:
        """The decisions as text that is equal on ranks which decided the same; ``graph`` is not
        part of it, but for its nodes' numbers.
        """
        number = {node.name: i for i, node in enumerate(self.graph.nodes)}
        spans = ([name for s in group for name in (s.first, s.second)] for group in self.spans)
        together = {
            "bucket": self.buckets.groups,
            "seeds": [sorted(self.buckets.seeds, key=number.__getitem__)],
            "chunked": [self.chunks.reshards],
            "fused": [sorted(self.joints, key=number.__getitem__)],
            "narrowed": [sorted(self.narrowed, key=number.__getitem__)],
            "spans": spans,
        }
        return "\n".join(
            f"{kind}({', '.join(f'%{number[name]}' for name in names)})"
            for kind, groups in together.items()
            for names in groups
        )


def decide(
    graph: Graph,
    options: Options,
    axes: Mapping[str, int],
    hardware: Hardware = DEFAULT,
    gradients: Sequence[int] | None = None,
) -> Decided:
    """Decide from a plan's graph which collectives are merged, chunked, fused, bucketed and
    prefetched.

    Args:
        axes: of the mesh; empty if collectives of several axes cannot be merged.
        hardware: its links by axis decide which sums over two axes take three steps.
        gradients: of `gradient_reductions`.
    """
    narrowed = _narrowed(graph, options, gradients)
    spanned = spans(graph, hardware, without=narrowed)
    inside = {node.name for node in graph.nodes if node.branch}  # they stay in their branches
    spanned = tuple(s for s in spanned if s.first not in inside and s.second not in inside)
    narrowed -= inside
    apart = {name for span in spanned for name in (span.first, span.second)}
    if options.bucket:
        graph = merge_axes(graph, axes, apart, hardware)
        inside = {node.name for node in graph.nodes if node.branch}
        narrowed = _narrowed(graph, options, gradients) - inside
    alone = narrowed | inside
    chunked = chunks(graph, options.chunks)
    kept = tuple(name for name in chunked.reshards if name not in alone)
    chunked = replace(chunked, reshards=kept)
    fused = joints(graph) if options.async_tp else {}
    fused = {name: joint for name, joint in fused.items() if name not in alone}
    buckets = Buckets((), {})
    if options.bucket:
        without = (*chunked.reshards, *fused, *apart, *inside)
        buckets = choose_buckets(graph, without=without, apart=narrowed, ahead=options.prefetch)
        buckets = faster_buckets(graph, buckets, hardware, options.prefetch)
    prefetched = prefetch(graph, buckets.groups, options.prefetch)
    buckets = reordered(prefetched, buckets)
    together = (
        span_buckets(prefetched, spanned) if options.bucket else tuple((span,) for span in spanned)
    )
    return Decided(prefetched, buckets, chunked, fused, narrowed, together)


def _narrowed(graph: Graph, options: Options, gradients: Sequence[int] | None) -> frozenset[str]:
    return frozenset() if options.reduce_dtype is None else gradient_reductions(graph, gradients)


def rank_graph(
    graph: fx.Graph, decided: Decided, options: Options, axes: Mapping[str, int]
) -> fx.Graph:
    """A rank's graph with its collectives bucketed, narrowed, chunked and fused as decided; it may
    be the one given, changed in place.
    """
    bucket_collectives_in(graph, decided.buckets)
    if options.reduce_dtype is not None:
        graph = narrow_reductions(graph, decided.narrowed, options.reduce_dtype, axes)
    if decided.spans:
        graph = span_hosts(graph, decided.spans, axes)
    graph = chunk_matmuls(graph, decided.chunks)
    return fuse_matmuls(graph, decided.joints)


def partitioner_of(plan: Plan, decided: Decided, options: Options, mesh: Mesh) -> Partitioner:
    """The partitioner of a plan whose collectives are as decided."""
    plan = replace(plan, graph=decided.graph)
    chunked = dict.fromkeys(decided.chunks.reshards, decided.chunks.count)
    change = None
    if decided.changes_ranks:
        change = partial(rank_graph, decided=decided, options=options, axes=mesh.axes)
    return Partitioner(plan, mesh_device(mesh), mesh.group_name, chunked, change)
