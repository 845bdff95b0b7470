"""Match a rank's nodes with the local form of an op."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from ftp.certification.element_map import common_position
from ftp.certification.progression import Index
from ftp.dataclass import dataclass
from ftp.rules.op_kinds import RESHAPES

aten = torch.ops.aten
COPIES = (aten.alias.default, aten.clone.default, aten.detach.default)  # result equals operand


@dataclass(frozen=True)
class Matcher:
    """Compares a rank's nodes with an expected graph.

    Attributes:
        offsets: values of the number inputs of the rank's graph.
        starts: values of the number inputs of the expected graph.
    """

    offsets: Mapping[fx.Node, Index]
    starts: Mapping[fx.Node, Index]

    def is_same(
        self, expected: Any, actual: Any, bound: dict[fx.Node, fx.Node], seen: dict[Any, bool]
    ) -> bool:
        """Whether ``actual`` computes the same as ``expected``.

        Args:
            bound: collects, per input of the expected graph, the node that takes its place.
            seen: results for pairs of nodes.
        """
        if isinstance(expected, fx.Node):
            if expected in self.starts:
                return self.is_start(self.starts[expected], actual)
            if not isinstance(actual, fx.Node):
                return False
            if expected.op == "placeholder":
                return actual not in self.offsets and bound.setdefault(expected, actual) is actual
            if expected.target in COPIES:
                return self.is_same(expected.args[0], actual, bound, seen)
            if actual.target in COPIES:
                return self.is_same(expected, actual.args[0], bound, seen)
            key = (expected, actual)
            if key not in seen:
                seen[key] = (
                    actual.op == "call_function"
                    and expected.target is actual.target
                    and self.is_same(_sized(expected, actual), actual.args, bound, seen)
                    and self.is_same(dict(expected.kwargs), dict(actual.kwargs), bound, seen)
                )
            return seen[key]
        if isinstance(actual, fx.Node):
            return (
                actual in self.offsets
                and isinstance(expected, int)
                and common_position(self.offsets[actual]) == expected
            )
        if isinstance(expected, list | tuple):
            return (
                isinstance(actual, list | tuple)
                and len(expected) == len(actual)
                and all(
                    self.is_same(e, a, bound, seen) for e, a in zip(expected, actual, strict=True)
                )
            )
        if isinstance(expected, dict):
            return (
                isinstance(actual, dict)
                and expected.keys() == actual.keys()
                and all(self.is_same(e, actual[k], bound, seen) for k, e in expected.items())
            )
        if type(expected) is float and math.isnan(expected):
            return type(actual) is float and math.isnan(actual)
        return type(expected) is type(actual) and expected == actual

    def is_start(self, expected: Index, actual: Any) -> bool:
        if isinstance(actual, fx.Node):
            return actual in self.offsets and bool((self.offsets[actual] == expected).all())
        return isinstance(actual, int) and common_position(expected) == actual


def _sized(expected: fx.Node, actual: fx.Node) -> tuple[Any, ...]:
    """The arguments of ``expected``. If ``actual`` is a reshape with one size -1, so is the same
    size of the expected shape: the operand and the other sizes determine it.
    """
    if expected.target not in RESHAPES:
        return expected.args
    operand, shape = expected.args
    given: Any = actual.args[1]
    if not isinstance(shape, list | tuple) or list(given).count(-1) != 1 or -1 in shape:
        return expected.args
    at = list(given).index(-1)
    others = [size for i, size in enumerate(shape) if i != at]
    if at >= len(shape) or not all(isinstance(size, int) and size > 0 for size in others):
        return expected.args
    return operand, [*shape[:at], -1, *shape[at + 1 :]]
