"""One mesh axis' problem and its solution."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ftp.planning.cost import Hardware
from ftp.planning.graph import Graph, Node, Value
from ftp.planning.layers.repeats import Ties
from ftp.planning.reachable_cuts import Reach
from ftp.planning.solver.minimize import Solution
from ftp.planning.strategies import Strategy
from ftp.sharding.layout import Layout


class NotAlike(Exception):
    """Layers that are to be decided alike have different choices."""


@dataclass
class AxisPlan:
    """The choices on one axis.

    Attributes:
        strategies: per node.
        copies: per value the layouts it is brought to, beside its home.
    """

    axis: str
    n: int
    strategies: dict[Node, Strategy]
    copies: dict[Value, tuple[Layout, ...]]
    solution: Solution
    kept_rules: bool = True


@dataclass(frozen=True)
class Open:
    """Inputs whose layouts are to be found (`search`).

    Attributes:
        groups: of each such input the one that it lies like.
        mirrors: outputs by their place, and the inputs that they lie like.
        held: per input, seconds that holding it whole is priced with; a shard counts for its part.
        kept: the same, per value that a forward pass keeps for a backward pass.
        cuts: per input the layouts that it may have, beside whole.
        is_bare: prices are those of ops and moves alone, without the small ones that choose between
            equals; for bounds.
    """

    groups: Mapping[Node, Node]
    mirrors: Mapping[int, Node]
    held: Mapping[Node, float]
    kept: Mapping[Value, float]
    cuts: Mapping[Node, Sequence[Layout]]
    is_bare: bool = False


@dataclass
class Problem:
    """What is given for one axis: the fixed layouts, what may be cut, and which rules of conduct
    hold.
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
