"""Turn a plan into one rank's program: an ``fx.GraphModule`` on local tensors, with collectives.
Ranks of equal local shapes differ only in the offsets of their shards. Offsets are inputs of the
graph, after the tensors, so that such ranks share one graph and one compilation.
"""

import functools
import itertools
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import Any

import torch
from torch import fx

from ftp.dataclass import dataclass
from ftp.dynamic_int import Conditions
from ftp.partitioning.emit_reshards import (
    emit_chunks,
    emit_gathered_pieces,
    emit_pieces,
    emit_reshard,
)
from ftp.partitioning.inline_per_rank import (
    InlineSite,
    axes_by_rank,
    axes_of_calls,
    emit_per_rank,
)
from ftp.partitioning.local_program import Coordinate, LocalProgram, ShardOffset
from ftp.partitioning.nested_cuts import nested_cuts
from ftp.partitioning.rank_tables import Table, chunk_table, table
from ftp.partitioning.reshard_site import ReshardSite
from ftp.partitioning.rings import record_sends
from ftp.paused_gc import collection_paused
from ftp.planning.graph import FactorCut, Node, Reshard, Value, identity_rule
from ftp.planning.insert_reshards import reshard_rule
from ftp.planning.plan import Plan
from ftp.rules.call import Meta, replaced, returns_tuple
from ftp.rules.local_op import LocalCut, LocalOp, RankGraph, as_module, localize
from ftp.sharding.layout import Chunk, Product, R, Size, chunk_at, mul, pieces_at, shard, size_at
from ftp.sharding.local_pieces import cut_pieces
from ftp.sharding.spec import PartitionSpec
from ftp.torch_internals.process_groups import load_python_kernels

WAIT = torch.ops._c10d_functional.wait_tensor.default


@dataclass
class Partitioner:
    """Makes the programs of a plan's ranks, each distinct one once.

    Attributes:
        change: applied to each rank's graph, which it may change in place.
    """

    plan: Plan
    device: torch.device
    group_name: Callable[..., str]
    chunks: Mapping[str, int] = field(default_factory=dict)
    change: Callable[[fx.Graph], fx.Graph] | None = None

    def __post_init__(self):
        load_python_kernels()  # passes and reports ask for fake results of collectives
        self._programs: dict[tuple[int, ...], LocalProgram] = {}
        self._dynamic: dict[tuple[int, ...], list[tuple[Conditions, LocalProgram]]] = {}
        chunks: dict[Chunk, None] = {}

        def collect(size: Size) -> None:
            """Collect the chunks in a size, nested ones too: local forms may use their lengths."""
            for chunk in size.chunks if isinstance(size, Product) else ():
                if chunk not in chunks:
                    chunks[chunk] = None
                    collect(chunk.size)

        shared = {id(node.sizes): node.sizes for node in self.plan.graph.nodes}  # by copies
        for sizes in shared.values():
            for size in sizes.values():
                collect(size)
        self._uneven = list(chunks)
        firsts = {
            node.target.axis
            for node in self.plan.graph.nodes
            if node.kind == "reshard" and node.target.op == "contribute"
        }
        local = [
            axes_by_rank(node.target) for node in self.plan.graph.nodes if node.kind == "local"
        ]
        ops = [node for node in self.plan.graph.nodes if node.kind == "op"]
        local.append(axes_of_calls((node.target, node.args) for node in ops))
        firsts = firsts.union(*(contributing for contributing, _ in local))
        self._permuting = [
            a for a in self.plan.axes if any(a in permuting for _, permuting in local)
        ]
        self._outside = [(Value(node), spec) for node, spec in self.plan.entries.items()]
        self._outside += [(self.plan.graph.outputs[i], spec) for i, spec in self.plan.exits.items()]
        self._contributing = [a for a in self.plan.axes if a in firsts]

    def program(self, coordinate: Coordinate) -> LocalProgram:
        """The program of the rank at ``coordinate``. With dynamic sizes it is made for their
        current values, and serves all that meet the noted conditions.
        """
        key = (
            *(chunk_at(c, coordinate)[1] for c in self._uneven),
            *(int(coordinate[a] == 0) for a in self._contributing),
            *(coordinate[a] for a in self._permuting),
            *itertools.chain(*(self._held_outside(*out, coordinate) for out in self._outside)),
        )
        if (sizes := self.plan.sizes) is not None:
            known = self._dynamic.setdefault(key, [])
            found = next((one for one in known if one[0].holds(sizes.now)), None)
            if found is None:
                with collection_paused(), sizes.noting(sizes.now) as asked:
                    found = asked, _Emission(self, coordinate).run()
                known.append(found)
            sizes.note_all(found[0])
            return found[1]
        if key not in self._programs:
            with collection_paused():
                self._programs[key] = _Emission(self, coordinate).run()
        return self._programs[key]

    def tables(self, axes: Mapping[str, int]) -> list[Table]:
        """Tables over the ranks of a mesh that tell their programs apart: ranks with equal entries
        in all tables run one program.

        Args:
            axes: of the mesh, in its order, which may differ from the plan's.
        """
        return [
            *(chunk_table(axes, c, lambda chunk, at: chunk_at(chunk, at)[1]) for c in self._uneven),
            *(table(axes, [a], lambda at, a=a: int(at[a] == 0)) for a in self._contributing),
            *(table(axes, [a], lambda at, a=a: at[a]) for a in self._permuting),
            *(
                table(
                    axes,
                    [c.axis for dim in range(len(spec)) for c in spec.cuts(dim)],
                    lambda at, value=value, spec=spec: self._held_outside(value, spec, at),
                )
                for value, spec in self._outside
            ),
        ]

    def _held_outside(
        self, value: Value, spec: PartitionSpec, coordinate: Coordinate
    ) -> tuple[Any, ...]:
        """The intervals that a rank holds of a value whose spec fits no order of the axes."""
        found: list[Any] = []
        for cut in nested_cuts(spec, value.meta.shape, self.plan.axes, coordinate):
            found += [cut.length, *itertools.chain(*(cut.pieces if cut.is_irregular else ()))]
        return tuple(found)


class _Emission:
    """Emits the graph of the rank at ``coordinate``, node by node of the plan."""

    def __init__(self, owner: Partitioner, coordinate: Coordinate):
        self.plan, self.device, self.group_name = owner.plan, owner.device, owner.group_name
        self.chunks, self.change = owner.chunks, owner.change
        self.coordinate = coordinate
        self.graph = RankGraph()
        self.env: dict[Value, fx.Node] = {}
        self.offsets: dict[ShardOffset, fx.Node] = {}
        self.cuts: dict[FactorCut, LocalCut] = {}
        self.cuts_of: dict[int, dict[str, list[LocalCut]]] = {}

    def run(self) -> LocalProgram:
        for node in self.plan.graph.inputs:
            name = re.sub(r"\W+", "_", node.name).strip("_")
            # The code of a graph is a method, with a ``self`` of its own.
            self.env[Value(node)] = self.graph.placeholder(name if name != "self" else "self_input")
        self.last_input = list(self.graph.nodes)[-1] if self.env else None
        for node, spec in self.plan.entries.items():
            self.env[Value(node)] = self._enter_or_leave(Value(node), spec, True)
        for node in self.plan.graph.nodes:
            if node.kind != "input":
                last = self.graph._root._prev
                self._emit(node)
                self._annotate(node, last)
        outputs = [
            self._enter_or_leave(v, self.plan.exits.get(i), False)
            for i, v in enumerate(self.plan.graph.outputs)
        ]
        self.graph.output(tuple(outputs))
        for made in reversed(self.graph.nodes):
            if made.users or made.op != "call_function":
                continue
            # A rank with an empty shard takes part in collectives whose results it does not use.
            if made.target is not WAIT and "collective" not in made.meta:
                self.graph.erase_node(made)
        for made in self.graph.nodes:
            made.meta.setdefault("branch", ())
        for offset, node in list(self.offsets.items()):
            if not node.users:
                self.graph.erase_node(node)
                del self.offsets[offset]
        graph = self.graph if self.change is None else self.change(self.graph)
        collectives = tuple(n.meta["collective"] for n in graph.nodes if "collective" in n.meta)
        return LocalProgram(as_module(graph), tuple(self.offsets), collectives)

    def _enter_or_leave(self, value: Value, spec: PartitionSpec | None, enters: bool) -> fx.Node:
        """Reshard a value whose spec fits no order of the axes: gather it whole from minor to major
        axis, or slice it from major to minor.
        """
        x = self.env[value]
        if spec is None:
            return x
        cuts = nested_cuts(spec, value.meta.shape, self.plan.axes, self.coordinate)
        shape = [size_at(s, self.coordinate) for s in value.shape]
        if enters:
            for at in cuts:
                shape[at.dim] = at.length
        for at in reversed(cuts) if enters else cuts:
            n = self.plan.axes[at.cut.axis]
            here = list(shape)
            shape[at.dim] = at.size
            packs = at.cut.sizes(at.size)
            regular = shard(
                at.dim, len(packs), packs[0] // at.cut.size, at.cut.size, n, at.cut.zigzag
            )
            layout = shard(at.dim, 1, at.size, 1, n) if at.is_irregular else regular
            reshard = Reshard(
                at.cut.axis, n, layout if enters else R, R if enters else layout, tuple(shape)
            )
            rule, sizes = reshard_rule(reshard)
            step = Node(
                f"{value.node.name}_{reshard.op}_{at.cut.axis}",
                "reshard",
                reshard,
                (value,),
                {},
                (value.meta,),
                rule,
                value.node.source,
                cause=str(spec),
            )
            step.sizes = sizes
            if at.is_irregular:
                site = self._site(step)
                held = [cut_pieces(at.size, n, index, at.cut) for index in range(n)]
                x = (
                    emit_gathered_pieces(site, x, at.dim, here, held)
                    if enters
                    else emit_pieces(site, x, at.dim, at.pieces)
                )
            else:
                outer, self.env[value] = self.env[value], x
                self._emit(step)
                self.env[value] = outer
                x = self.env[Value(step)]
            if not enters:
                shape[at.dim] = at.length
        return x

    def _annotate(self, node: Node, last: fx.Node) -> None:
        """Set source, origin (the planned op's name) and branch of the nodes after ``last``."""
        at = self.graph._root._prev
        while at is not last:
            if at.op == "call_function":
                at.meta.setdefault("source", node.source)
                at.meta.setdefault("origin", node.name)
                at.meta.setdefault("branch", node.branch)
            at = at._prev

    def _emit(self, node: Node) -> None:
        if node.kind == "constrain":
            self.env[Value(node)] = self.env[node.operands[0]]
            return
        if node.kind == "reshard":
            site, x = self._site(node), self.env[node.operands[0]]
            count = self.chunks.get(node.name, 1)
            made = emit_chunks(site, x, count) if count > 1 else emit_reshard(site, x)
            self.env[Value(node)] = made
            return
        if node.kind == "local" or node.rank_axes:
            operands = [self.env[v] for v in node.operands]
            if (found := emit_per_rank(self._inline_site(node), node, operands)) is not None:
                self._give(node, found)
                return
        self._emit_op(node)

    def _emit_op(self, node: Node) -> None:
        cuts = self._cuts(node)
        args = self._lower(node.args)
        kwargs = self._lower(dict(node.kwargs)) if node.kwargs else {}
        last = self.graph._root._prev
        if node.rule.local is None:
            made = self.graph.call_function(node.target, args, kwargs)
        else:
            op = LocalOp(
                self.graph,
                node.target,
                args,
                kwargs,
                node.rule,
                self._sizes(node),
                cuts,
                self.device,
                self.group_name,
            )
            made = localize(op)
        if node.rule.ring or node.rule.exchange:
            starts = {at: offset.at(self.coordinate) for offset, at in self.offsets.items()}
            record_sends(last, node, self.coordinate, starts)
        if isinstance(made, tuple):
            self._give(node, made)
            return
        if len(node.results) == 1 and not returns_tuple(node.target):
            self.env[Value(node)] = made
            return
        for value in node.values:
            self.env[value] = self.graph.call_function(operator.getitem, (made, value.index))

    def _give(self, node: Node, made: Sequence[fx.Node | None]) -> None:
        """Record in the ``meta`` of each result's node which result it is: results of an empty
        shard are all zeros and could not be told apart. The node of an unused gradient is None.
        """
        for index, x in enumerate(made):
            if x is not None:
                self.env[Value(node, index)] = x
                x.meta["gives"] = [*x.meta.get("gives", ()), index]

    def _inline_site(self, node: Node) -> InlineSite:
        cause = f"ftp.local at {node.source}"
        axes = self.plan.axes
        return InlineSite(
            self.graph,
            self.device,
            lambda axis: self._offset(ShardOffset("start", axes[axis], axis, axes[axis])),
            lambda x, reshard, dtype, name, source: self._reshard(
                x, reshard, dtype, f"{node.name}.{name}", source, cause
            ),
            self.group_name,
            axes,
            self.coordinate,
            cause,
        )

    def _sizes(self, node: Node) -> dict[str, int]:
        """The size of each factor on this rank."""
        return {
            f: s if type(s) is int else size_at(s, self.coordinate) for f, s in node.sizes.items()
        }

    def _site(self, node: Node) -> ReshardSite:
        return ReshardSite(
            self.graph,
            node,
            self._sizes(node),
            node.results[0].shape,
            lambda kind, size: self._offset(
                ShardOffset(
                    kind,
                    _resharded_extent(node) if size is None else size,
                    node.target.axis,
                    node.target.n,
                )
            ),
            self.coordinate,
            self.group_name(*node.target.axes),
            all(self.coordinate[axis] == 0 for axis in node.target.axes),
        )

    def _reshard(
        self, x: fx.Node, reshard: Reshard, dtype: torch.dtype, name: str, source: str, cause: str
    ) -> fx.Node:
        """Emit a reshard that is not a node of the plan."""
        meta = Meta(tuple(size_at(s, self.coordinate) for s in reshard.shape), dtype)
        held = Value(
            Node(f"{name}.held", "input", None, (), {}, (meta,), identity_rule(meta.shape, 0))
        )
        rule, sizes = reshard_rule(reshard)
        step = Node(name, "reshard", reshard, (held,), {}, (meta,), rule, source, cause=cause)
        step.sizes = sizes
        self.env[held] = x
        self._emit(step)
        return self.env[Value(step)]

    def _cuts(self, node: Node) -> dict[str, list[LocalCut]]:
        """The cuts of each factor of a node; copies of a planned node share them."""
        found = self.cuts_of.get(id(node.cuts))
        if found is None:
            found = self.cuts_of[id(node.cuts)] = {}
            for cut in node.cuts:
                found.setdefault(cut.factor, []).append(self._cut(cut))
        return found

    def _cut(self, cut: FactorCut) -> LocalCut:
        found = self.cuts.get(cut)
        if found is None:
            found = self.cuts[cut] = self._held(cut)
        return found

    def _held(self, cut: FactorCut) -> LocalCut:
        n = self.plan.axes[cut.axis]
        held = pieces_at(Chunk(cut.extent, cut.axis, n, cut.zigzag), self.coordinate)
        begins = [
            self._offset(ShardOffset(kind, cut.extent, cut.axis, n, cut.zigzag))
            for kind in ("start", "second")[: len(held)]
        ]
        outer, size, inner = (
            size_at(s, self.coordinate) for s in (cut.outer, cut.extent, cut.inner)
        )
        length = sum(length for _, length in held)
        second = (begins[1], held[1][1]) if cut.zigzag else None
        place = list(self.coordinate).index(cut.axis)
        return LocalCut(outer, size, inner, begins[0], length, second, cut.axis, n, place)

    def _offset(self, offset: ShardOffset) -> fx.Node:
        if offset not in self.offsets:
            name = f"{offset.kind}_{offset.axis}_{len(self.offsets)}"
            with (
                self.graph.inserting_before(next(iter(self.graph.nodes)))
                if self.last_input is None
                else self.graph.inserting_after(self.last_input)
            ):
                self.last_input = self.graph.placeholder(name)
            self.offsets[offset] = self.last_input
        return self.offsets[offset]

    def _lower(self, tree: Any) -> Any:
        return replaced(tree, Value, self.env.__getitem__)


@functools.cache
def _resharded_extent(node: Node) -> Size:
    """The size of the dim that a reshard slices or pads."""
    sizes, reshard = node.sizes, node.target
    if "yf" in sizes:
        return sizes["yf"]
    d = (reshard.dst if reshard.dst.kind == "S" else reshard.src).dim
    if f"h{d}" in sizes:
        return sizes[f"h{d}"]
    return mul(sizes[f"m{d}"], sizes[f"g{d}"])
