"""The planning problem of one mesh axis, and its solution."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import NamedTuple

from ftp.dataclass import dataclass
from ftp.planning.cost import Hardware
from ftp.planning.graph import Graph, Node, Value
from ftp.planning.layers.repeats import Ties
from ftp.planning.reachable_cuts import Reach
from ftp.planning.solver.minimize import Solution
from ftp.planning.strategies import Strategy
from ftp.sharding.layout import Layout


class NotAlike(Exception):
    """Two tied layers have different choices."""


@dataclass
class AxisPlan:
    """The choices on one axis.

    Attributes:
        strategies: per node.
        copies: per value, the layouts that it is resharded to.
    """

    axis: str
    n: int
    strategies: dict[Node, Strategy]
    copies: dict[Value, tuple[Layout, ...]]
    solution: Solution
    kept_rules: bool = True


@dataclass(frozen=True)
class Open:
    """Open inputs: inputs whose layouts `search` is to find.

    Attributes:
        groups: per open input, the input whose layout it shares.
        mirrors: per output, by its index, the input whose layout it shares.
        held: per input, its bytes; a shard takes its share.
        kept: the same, per value that the forward pass keeps for the backward pass.
        cuts: per input, the sharded layouts that it may have.
        is_bare: whether to leave out the small prices that break ties; for bounds.
    """

    groups: Mapping[Node, Node]
    mirrors: Mapping[int, Node]
    held: Mapping[Node, int]
    kept: Mapping[Value, int]
    cuts: Mapping[Node, Sequence[Layout]]
    is_bare: bool = False


class BytePrices(NamedTuple):
    """Seconds per byte of the open inputs, and of the values kept for the backward pass."""

    held: float = 0.0
    kept: float = 0.0


@dataclass
class Problem:
    """One axis' problem: the fixed layouts, the cuts that may be made, and the facts that placement
    constraints depend on.

    Attributes:
        parts: the cuts within the parts of splits, such as chunks of the flattened batch, on other
            axes within entries of parameters, and all cuts that follow from them.
        forms: per node, a filter of its strategies, for reports that compare plans.
        by_ring: whether attention that can be a ring over this axis is one; None: the cheaper is
            chosen.
    """

    graph: Graph
    axis: str
    n: int
    hardware: Hardware
    reach: Reach
    pinned: Mapping[Node, Layout]
    outputs: Sequence[Layout | None]  # None: open
    is_data_axis: bool = False
    batch_reach: Reach = field(default_factory=Reach)
    ties: Ties | None = None
    open: Open | None = None
    axes: Mapping[str, int] = field(default_factory=dict)
    parts: Reach = field(default_factory=Reach)
    forms: dict[Node, Callable[[Strategy], bool]] = field(default_factory=dict)
    by_ring: bool | None = None


Watch = Callable[[Problem], None]
"""What is told of each problem before it is solved."""
