"""The result of a search: a plan that can be read and edited, with its seconds and bytes and those
of other plans.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import field
from functools import cached_property
from typing import Any

from ftp.dataclass import dataclass
from ftp.functional.module_constraints import Constraint
from ftp.planning.cost import Hardware
from ftp.report.lowered import Lowered
from ftp.report.memory import in_bytes
from ftp.report.timing import in_seconds
from ftp.sharding.plan import plan
from ftp.sharding.spec import PartitionSpec


@dataclass(frozen=True)
class Rival:
    """A plan that was tried: seconds per step, bytes at a rank's peak, and whether these are within
    the limit.
    """

    seconds: float
    nbytes: int
    fits: bool
    patterns: Mapping[str, PartitionSpec]


@dataclass(frozen=True)
class Found:
    """A plan that was searched for.

    Attributes:
        patterns: path pattern to spec, as ``ftp.plan`` takes it.
        constraints: module pattern to constraint, as ``ftp.functionalize`` takes them: those that
            the search adds to the program.
        pins: the constraints that the program had already.
        loss_fn: the loss with ``constraints``, for ``shard``; without any, the loss that was given.
        bucket: ``shard``'s option; False if a limit leaves no room for the copies that buckets
            hold.
        lowered: the program under the plan.
        hardware: the rates that it was estimated with.
        limit: bytes that it had to fit in.
        price: the price of a byte in seconds: the time lost per byte saved to fit; 0 without a
            limit.
        rivals: by name, the best plan of each kind that was tried, such as plain data parallelism.
        planned: seconds as the networks count them: ops and collectives one after the other.

    >>> import ftp, torch
    >>> params = {"w": torch.empty(64, 64, device="meta")}
    >>> mesh, x = ftp.AbstractMesh((2,), ("dp",)), torch.empty(8, 64, device="meta")
    >>> found = ftp.search(lambda p, x: (x @ p["w"]).sum(), params, mesh, ftp.P("dp"), x)
    >>> found.specs(params), found.bound <= found.planned
    ({'w': P(None, None)}, True)
    """

    patterns: dict[str, PartitionSpec]
    constraints: dict[str, Constraint]
    pins: list[str]
    loss_fn: Callable[..., Any]
    bucket: bool
    lowered: Lowered
    hardware: Hardware
    limit: int | None
    price: float
    rivals: Mapping[str, Rival]
    planned: float
    _gaps: Callable[[], dict[str, float]] = field(repr=False)
    _bound: Callable[[], float] = field(repr=False)
    _alternatives: Callable[[], dict[tuple[str, str], dict[str, float]]] = field(repr=False)

    def specs(self, params: Any) -> Any:
        """The spec tree for ``shard``."""
        return plan(params, dict(self.patterns))

    @cached_property
    def cost(self) -> float:
        """Estimated seconds of a step, ``lowered.cost(hardware)``."""
        return float(self.lowered.cost(self.hardware))

    @property
    def memory(self) -> int:
        """Bytes at a rank's peak."""
        return int(self.lowered.memory)

    @cached_property
    def bound(self) -> float:
        """A lower bound on the seconds of all plans within the limit, counted like ``planned``,
        over all axes together.

        It holds for plans that keep the planner's placement constraints and give repeated layers,
        and parameters of one pattern, equal layouts, under the constraints that were tried. Each
        single axis is a relaxation; memory has the price at which the plan was found (Lagrange).
        """
        return self._bound()

    @cached_property
    def gap(self) -> dict[str, float]:
        """Per axis, the most seconds by which its network may have a cheaper plan, given the axes
        folded before it.

        With a limit, the price of the bytes that are still free is included: a plan that uses them
        could cost so much less.
        """
        return self._gaps()

    @cached_property
    def alternatives(self) -> dict[tuple[str, str], dict[str, float]]:
        """Per axis and pattern, the extra cost of the axis' network in seconds with each other
        layout (infinity: no program).
        """
        return self._alternatives()

    def __str__(self) -> str:
        limit = "" if self.limit is None else f" of {in_bytes(self.limit)}"
        lines = [f"{in_seconds(self.cost)} a step, {in_bytes(self.memory)}{limit} a rank"]
        width = max(map(len, (*self.patterns, *self.constraints)))
        for pattern, spec in self.patterns.items():
            others = [
                f"{name} over {axis} {_more(seconds)}"
                for (axis, p), found in self.alternatives.items()
                if p == pattern
                for name, seconds in found.items()
            ]
            lines.append(f"  {pattern:{width}}  {spec!s:20}  {'; '.join(others)}".rstrip())
        lines += [
            f"  {pattern:{width}}  returns {_first(c.outputs)} over {', '.join(c.axes or ())}"
            for pattern, c in self.constraints.items()
        ]
        lines += [f"  {pin}" for pin in self.pins]
        lines += ["  bucket=False: buckets would hold more"] * (not self.bucket)
        lines.append("tried:")
        for name, rival in sorted(self.rivals.items(), key=lambda item: item[1].seconds):
            over = "" if rival.fits else ", over the limit"
            lines.append(
                f"  {in_seconds(rival.seconds):>8} a step, {in_bytes(rival.nbytes):>10} a rank:"
                f" {name}{over}"
            )
        lines.append(
            f"as planned, nothing overlapped: {in_seconds(self.planned)}; no plan of this kind"
            f" takes less than {in_seconds(self.bound)}"
        )
        for axis, seconds in self.gap.items():
            given = "" if len(self.gap) == 1 else ", the axes before it as they are"
            lines.append(
                f"  over {axis}: at most {in_seconds(seconds)} above the network's optimum{given}"
            )
        return "\n".join(lines)


def _more(seconds: float) -> str:
    return (
        "impossible"
        if seconds == math.inf
        else f"{'+' if seconds >= 0 else '-'}{in_seconds(abs(seconds))}"
    )


def _first(outputs: Any) -> Any:
    """The spec of a module's output, or of the first of a tuple."""
    return outputs[0] if isinstance(outputs, tuple) else outputs
