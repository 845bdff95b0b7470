"""Inputs: the arguments of a call, with a spec and a global shape for each leaf."""

from collections.abc import Mapping, Sequence
from dataclasses import field
from functools import cached_property

import torch

from ftp.api.arguments import Arguments
from ftp.dataclass import dataclass
from ftp.distributed.handed_out import HandedOut
from ftp.planning.known_passes import KnownPasses
from ftp.planning.plan import Plan
from ftp.sharding.arguments import Shape
from ftp.sharding.spec import PartitionSpec
from ftp.tracing.trace import Traced


@dataclass(frozen=True, eq=False)
class Inputs:
    """The arguments of a call, with a spec and a global shape for each leaf.

    Attributes:
        shapes: None for static leaves.
        handed_out: how the first rank's plan reaches ranks of other hosts, if there are several.
        traced: the function's trace for them, if it is made already.
        known: results of passes over that trace, if programs for other specs share them.
        reported: the plan of the last report, by its key.
    """

    call: Arguments
    specs: Sequence[PartitionSpec]
    shapes: Sequence[Shape | None]
    handed_out: HandedOut | None = None
    traced: Traced | None = None
    known: KnownPasses | None = None
    reported: Mapping[str, Plan] = field(default_factory=dict)

    @cached_property
    def tensors(self) -> tuple[int, ...]:
        """Which leaves are tensors: the inputs of the graph, in order."""
        leaves = enumerate(self.call.leaves)
        return tuple(i for i, leaf in leaves if isinstance(leaf, torch.Tensor))

    @property
    def tensor_names(self) -> list[str]:
        return [self.call.names[i] for i in self.tensors]

    @property
    def tensor_specs(self) -> list[PartitionSpec]:
        return [self.specs[i] for i in self.tensors]

    @property
    def tensor_positions(self) -> list[int]:
        """For each tensor, the position of the argument that holds it."""
        return [self.call.positions[i] for i in self.tensors]
