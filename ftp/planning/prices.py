"""Prices of one mesh axis' cost network: seconds of strategies, reshards and reads, and placement
constraints as violations.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from ftp.ops.windows import Exchange
from ftp.planning.attention_prices import computed_share, ring_seconds
from ftp.planning.cost import collective_seconds, exchange_seconds, op_seconds
from ftp.planning.exemptions import exemptions
from ftp.planning.graph import BATCH, Node, Reshard, Value
from ftp.planning.problem import Problem
from ftp.planning.reachable_cuts import is_cut_again
from ftp.planning.strategies import GATHERED, PASS_ON, WHOLE, Strategy
from ftp.rules.op_kinds import VIEWS, is_matmul
from ftp.sharding.layout import PARTIAL, Layout, R, bytes_of, estimated

RESHARD_OF_VIEW = 1e-10  # seconds; a tie-breaker, to reshard a value rather than a view of it
REPLICATED_MATMUL = 1e4  # factor for a replicated matmul on batch data that could be cut
# Padding a shard to a pending sum is priced this many latencies above a gather, so that it never
# replaces one.
PAD_LATENCIES = 3
# A gradient that is reduced over a data axis before it is widened costs its price in the wider
# dtype times this factor.
TOO_NARROW = 2.0


class Prices:
    """Prices on one axis.

    Args:
        options: each node's strategies.
        users: the nodes that read each value.
        required: the layouts in which outputs are returned; None: open.

    ``violation``: seconds for breaking a placement constraint; infinity forbids it.
    """

    def __init__(
        self,
        problem: Problem,
        options: Mapping[Node, Sequence[Strategy]],
        users: Mapping[Value, Sequence[tuple[Node, int]]],
        required: Mapping[Value, Sequence[Layout | None]],
    ):
        self.problem, self.violation, self.options = problem, math.inf, options
        self.users, self.required = users, required
        self._sizes: dict[Value, int] = {}
        self._reduced: dict[Value, int] = {}
        found = exemptions(problem, required)
        self.free_to_reshard, self.after_conflict, self.rows, self.of_sums = found

    def nbytes(self, value: Value) -> int:
        """Bytes of a value over all ranks of the axis."""
        if value not in self._sizes:
            self._sizes[value] = value.nbytes()
        return self._sizes[value]

    def reduced_nbytes(self, value: Value) -> int:
        """Bytes that the reduction of a pending sum is priced at. If every user widens the sum, the
        bytes in the narrowest dtype that a user widens it to.
        """
        if value not in self._reduced:
            here, users = value.meta.dtype.itemsize, self.users.get(value, ())
            if value in self.required or not users:
                found = here
            else:
                found = max(here, min(self._width_for(node) for node, _ in users))
            self._reduced[value] = self.nbytes(value) * found // here if here else 0
        return self._reduced[value]

    def _width_for(self, user: Node) -> int:
        result = Value(user)
        if user.target in VIEWS and len(user.results) == 1:
            return (
                self.reduced_nbytes(result)
                * result.meta.dtype.itemsize
                // max(self.nbytes(result), 1)
            )
        return result.meta.dtype.itemsize if user.target is torch.ops.aten._to_copy.default else 0

    def reshard_facts(self, value: Value) -> Any:
        """What ``may_reshard`` of a value depends on, for a cache key."""
        if value in self.free_to_reshard:
            return True
        of_parts = tuple(self.problem.parts.layouts.get(value, ()))
        if not self.problem.is_data_axis or not value.node.depends & BATCH:
            return bool(value.node.depends & BATCH), of_parts
        of_batch = tuple(self.problem.batch_reach.layouts.get(value, ()))
        return of_batch, of_parts, value in self.after_conflict, value in self.rows

    def of_op(self, node: Node) -> list[float]:
        """Seconds of each of a node's strategies."""
        if node.kind == "reshard":
            nbytes = bytes_of(node.target.shape, node.results[0].dtype)
            hardware = self.problem.hardware
            link = replace(
                hardware.link_of(node.target.axes),
                latency=hardware.link.latency,
            )
            seconds = collective_seconds(node.target.op, nbytes, node.target.n, link)
            return [seconds / self.problem.n if s.cut else seconds for s in self.options[node]]
        if node.kind != "op":
            return [0.0] * len(self.options[node])
        sizes = {f: estimated(s) for f, s in node.sizes.items()}
        sizes |= {
            f: estimated(node.rule.sizes[f]) for _, f in node.rule.ring
        }  # whole, or each part in turn
        seconds = op_seconds(node.target, node.rule, sizes, node.results, self.problem.hardware)
        could_be_cut = any(s.cut for s in self.options[node])
        is_product = is_matmul(node.target) and self.is_of_activations(node)
        prices = []
        for s in self.options[node]:
            # An op that widens the gathered copy of a parameter is priced as if it were cut: bytes
            # alone decide where in a chain a weight is resharded. So is an op on batch data whose
            # results are all gathered for matmuls, as of weights that are passed with the batch.
            is_resharded = Value(node) in self.free_to_reshard and not is_cut_again(node)
            widens = WHOLE in s.operands and (not node.depends & BATCH or is_resharded)
            is_shared = s.cut or widens
            price = seconds / self.problem.n if is_shared else seconds
            if node.rule.ring:
                price = self._of_attention(node, s, seconds)
            if s.aligned_cut is not None and (exchange := node.rule.exchange):
                price += self._of_exchange(node, exchange)
            if self.problem.open and self.problem.open.is_bare:
                pass
            elif s.pending is not None:
                # PASS_ON may exceed a toy model's latency: then pending sums of single numbers, as
                # in a norm, and outputs that are to stay pending would be reduced one by one.
                is_number = all(math.prod(map(estimated, r.shape)) == 1 for r in node.results)
                price += (
                    min(PASS_ON, self.problem.hardware.link.latency / 100)
                    if is_number or PARTIAL in self.problem.outputs
                    else PASS_ON
                )
            elif s.cut is None and could_be_cut and is_product:
                price *= REPLICATED_MATMUL
            prices.append(price)
        return prices

    def is_of_activations(self, node: Node) -> bool:
        """Whether an op works on batch data, not on sums over the batch alone."""
        return bool(node.depends & BATCH) and node not in self.of_sums

    def _of_exchange(self, node: Node, exchange: Exchange) -> float:
        ((whole, _),) = node.rule.together
        each = self.nbytes(node.operands[0]) / max(node.rule.sizes[whole], 1)
        return exchange_seconds(exchange, each, self.problem.hardware.link)

    def _of_attention(self, node: Node, s: Strategy, whole: float) -> float:
        """Seconds of attention: the busiest rank's computation and, in a ring, its messages.

        Args:
            whole: seconds to compute all pairs, masked or not.
        """
        n, axes, hardware = self.problem.n, self.problem.axes, self.problem.hardware
        has_ring = any(o.cut == s.cut and o.ring_cut is not None for o in self.options[node])
        is_ring, by_ring = s.ring_cut is not None, self.problem.by_ring
        can_gather = any(o.cut == s.cut and o.ring_cut is None for o in self.options[node])
        if has_ring and not is_ring and not self._fits_gathered:
            return self.violation
        if has_ring and can_gather and by_ring is not None and is_ring != by_ring:
            return self.violation
        computed = whole * computed_share(node, s.cut, n, axes)
        if s.cut is None or s.ring_cut is None:
            return computed
        tensors = zip(node.operands, node.rule.operands, strict=True)
        sent = sum(self.nbytes(value) for value, dims in tensors if (s.ring_cut.factor,) in dims)
        of_key = sent / max(estimated(node.sizes[s.ring_cut.factor]), 1)
        cuts = s.cut, s.ring_cut
        return ring_seconds(node, cuts, n, axes, hardware, computed, of_key)

    @cached_property
    def _fits_gathered(self) -> bool:
        """Whether the gathered keys and values of all attention ops that could use a ring fit in a
        rank's memory in addition to the inputs, by this axis' sizes. Gathered keys and values are
        kept for the backward pass, which holds the whole gradients of one attention op too.
        """
        capacity, ties = self.problem.hardware.capacity, self.problem.ties
        gathered: dict[Value, int] = {}
        gradients = 0
        for node, options in self.options.items():
            ring_factors = {s.ring_cut.factor for s in options if s.ring_cut is not None}
            for value, dims in zip(node.operands, node.rule.operands, strict=True):
                if any(factor in dim for dim in dims for factor in ring_factors):
                    layers = ties.weight(value.node) if ties else 1
                    gathered[value] = self.nbytes(value) * layers
            made = [
                self.nbytes(Value(node, index))
                for index, dims in enumerate(node.rule.results)
                if any(factor in dim for dim in dims for factor in ring_factors)
            ]
            gradients = max(gradients, sum(made))
        if not capacity or not gathered:
            return True
        return sum(gathered.values()) + gradients + self._inputs <= capacity

    @property
    def _inputs(self) -> int:
        """Bytes of the inputs that a rank holds."""
        total = 0
        for node in self.problem.graph.inputs:
            is_cut = self.problem.pinned.get(node, R).kind == "S"
            total += self.nbytes(Value(node)) // (self.problem.n if is_cut else 1)
        return total

    def of_reshards(self, value: Value, entries: list[tuple[Layout, ...]]) -> np.ndarray:
        """Seconds from each strategy's result to each set of copies, as a table."""
        nbytes = self.nbytes(value)
        table = np.empty((len(self.options[value.node]), len(entries)))
        known: dict[Layout, list[float]] = {}
        for row, s in enumerate(self.options[value.node]):
            home = s.results[value.index]
            if home not in known:
                known[home] = [self._price(value, home, entry, nbytes) for entry in entries]
            table[row] = known[home]
        return table

    def _price(self, value: Value, home: Layout, entry: tuple[Layout, ...], nbytes: int) -> float:
        first = entry[0]
        if first is R:
            return (
                self.of_reshard(value, home, R, nbytes)
                if home.kind == "P"
                else (0.0 if home == R else math.inf)
            )
        if first is GATHERED:
            if home == GATHERED:
                return 0.0
            return self.of_reshard(value, home, GATHERED, nbytes) if home.kind == "S" else math.inf
        if first is PARTIAL:
            return 0.0 if home == PARTIAL else math.inf
        if home.kind == "R":
            # A slice costs nothing. Two cuts need no copies: users slice R.
            return 0.0 if len(entry) == 1 else math.inf
        return sum(self.of_reshard(value, home, cut, nbytes) for cut in entry if cut != home)

    def of_reshard(self, value: Value, src: Layout, dst: Layout, nbytes: int) -> float:
        """Seconds of one reshard, with a violation where it breaks a placement constraint."""
        if src.kind == "P" and src.op != "sum" and dst.kind == "S":
            return self.of_reshard(value, src, R, nbytes)
        to = R if dst is GATHERED else dst
        shape = value.shape if src.kind == to.kind == "S" and src.dim == to.dim else ()
        reshard = Reshard(self.problem.axis, self.problem.n, src, to, shape)
        seconds = collective_seconds(reshard.op, nbytes, self.problem.n, self.problem.hardware.link)
        if self.problem.open and self.problem.open.is_bare:
            return seconds + (
                self.violation if src.kind == "S" and not self.may_reshard(value, src, dst) else 0.0
            )
        if src.kind == "P" and self.problem.is_data_axis and self.reduced_nbytes(value) > nbytes:
            # Add a gradient that a user widens in the wider dtype: reducing it in the narrow one
            # costs more than widening its terms and reducing those. Sums over other axes are mostly
            # of activations, which one device would have rounded as well.
            wide = collective_seconds(
                reshard.op, self.reduced_nbytes(value), self.problem.n, self.problem.hardware.link
            )
            seconds = TOO_NARROW * wide
        may = self.may_reshard if src.kind == "S" else self._may_reduce
        if not may(value, src, dst):
            seconds += self.violation
        return seconds + (RESHARD_OF_VIEW if value.node.target in VIEWS else 0.0)

    def may_reshard(self, value: Value, home: Layout, to: Layout = R) -> bool:
        """Placement constraints C1 and C2: on a data axis activations keep their shards; on any
        other axis parameters, and values computed only from parameters, keep theirs.
        """
        if value in self.free_to_reshard:
            return True
        of_parts = self.problem.parts.layouts.get(value, ())
        if to.kind == "S" and (home in of_parts or to in of_parts):
            return True
        if not self.problem.is_data_axis:
            return bool(value.node.depends & BATCH)
        return not value.node.depends & BATCH or (
            value in self.after_conflict
            and home not in self.problem.batch_reach.layouts.get(value, ())
        )

    def _may_reduce(self, value: Value, home: Layout, to: Layout) -> bool:
        """The same for sums of what ranks find in their parts of a table: no rank gets all rows."""
        is_gather = (home.kind, home.op, to.kind) == ("P", "sum", "R")
        is_bound = value in self.rows and value not in self.free_to_reshard
        return not (is_gather and is_bound and self.problem.batch_reach.layouts.get(value))

    def of_use(self, node: Node, strategy: Strategy, slot: int, entry: tuple[Layout, ...]) -> float:
        need = strategy.operands[slot]
        if need == GATHERED:
            return 0.0 if entry[0] == GATHERED else math.inf
        if need == WHOLE:
            return 0.0 if entry[0].kind == "R" else math.inf
        if need.kind == "S":
            return 0.0 if need in entry or entry[0].kind == "R" else math.inf
        if need.kind == "P":
            return self._join_price(node, strategy, slot, entry[0])
        if entry[0] is R:
            return 0.0
        if entry[0] is not GATHERED:
            return math.inf
        # Placement constraint D: a gathered copy feeds no replicated op that could be cut.
        is_idle = (
            node.kind in ("op", "constrain")
            and strategy.cut is None
            and strategy.pending is None
            and any(s.cut for s in self.options[node])
            and node not in self.of_sums
        )
        return self.violation if is_idle else 0.0

    def _join_price(self, node: Node, strategy: Strategy, slot: int, have: Layout) -> float:
        """Seconds to turn a value into an operand of a pending sum. A single operand is never
        padded to a pending sum: reducing it would just be a gather.
        """
        if have == PARTIAL:
            return 0.0
        if strategy.pending is None or len(strategy.pending) == 1:
            return math.inf
        if have.kind == "R":
            return 0.0
        if not self.may_reshard(node.operands[slot], have):
            return self.violation  # padding and reducing a shard is a gather
        nbytes = self.nbytes(node.operands[slot])
        return PAD_LATENCIES * self.problem.hardware.link.latency + collective_seconds(
            "all_gather", nbytes, self.problem.n, self.problem.hardware.link
        )

    def share_held(self, node: Node) -> list[float]:
        """The share of an input's bytes that a rank holds under each strategy."""
        return [1 / self.problem.n if s.cut else 1.0 for s in self.options[node]]

    def share_kept(self, entry: tuple[Layout, ...]) -> float:
        """The share of a value's bytes that a rank keeps for the backward pass: less than all if
        every user reads a shard.
        """
        return 1 / self.problem.n if all(layout.kind == "S" for layout in entry) else 1.0

    def of_output(self, value: Value, entry: tuple[Layout, ...]) -> float:
        """0 where an output can be returned from these copies in its layout, else infinity."""
        for layout in self.required.get(value, ()):
            if layout is None:
                if not any(map(is_at_rest, entry)):
                    return math.inf
            elif layout.kind == "S":
                if layout not in entry and entry[0].kind != "R":
                    return math.inf
            elif layout.kind == "R" and entry[0].kind != "R":
                return math.inf
        return 0.0  # any copy becomes a term of a pending sum without a collective


def is_at_rest(layout: Layout) -> bool:
    """Whether an open output may be returned in this layout: one that a spec can express, without a
    pending sum or a strided cut.
    """
    return layout.kind == "R" or (layout.kind == "S" and layout.outer == layout.inner == 1)
