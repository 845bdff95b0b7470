"""Marks in a traced loss where numbered modules (``layers.3``) return: open placement constraints,
which fix nothing until a search cuts a dim there.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum
from typing import Any

from torch import Tensor, fx

from ftp.functional.module_constraints import Constraint, outputs_through
from ftp.ops.constrain import CONSTRAIN, Pin, constrain, pin_from_str, pin_to_str
from ftp.rules.local_op import RankGraph, as_module
from ftp.sharding.spec import PartitionSpec
from ftp.tracing.trace import Traced

MARK = "@"  # starts the name of a mark's axis, which no mesh has; the module's pattern follows
Along = Mapping[str, int]
"""Per axis, the dim of the marked modules' outputs that it cuts."""


def is_mark(pin: Pin) -> bool:
    return marked_pattern(pin) is not None


def marked_pattern(pin: Pin) -> str | None:
    return pin.axes[0].removeprefix(MARK) if pin.axes and pin.axes[0].startswith(MARK) else None


def marked_shapes(traced: Traced) -> dict[str, tuple[int, ...]]:
    """Per pattern of marked modules, the shape of their output."""
    marks = [node for node in traced.gm.graph.nodes if node.target is CONSTRAIN]
    return {
        pattern: tuple(node.meta["val"].shape)
        for node in marks
        if (pattern := marked_pattern(pin_from_str(node.args[1])))
    }


def constrained_axes(traced: Traced) -> set[str]:
    """The axes over which the program constrains outputs of marked modules itself."""
    found: set[str] = set()
    for node in traced.gm.graph.nodes:
        if node.target is CONSTRAIN and is_mark(pin_from_str(node.args[1])):
            around = [n for n in (*node.users, node.args[0]) if n.target is CONSTRAIN]
            pins = [pin_from_str(n.args[1]) for n in around]
            found.update(axis for pin in pins if not is_mark(pin) for axis in pin.axes or ())
    return found


def pin_along(along: Along, shape: Sequence[int]) -> Pin:
    return Pin(spec_along(along).at_rank(len(shape)), tuple(along))


def spec_along(along: Along) -> PartitionSpec:
    """
    >>> spec_along({"tp": 1})
    P(None, 'tp')
    """
    return PartitionSpec(
        *[
            tuple(a for a, d in along.items() if d == dim) or None
            for dim in range(max(along.values()) + 1)
        ]
    )


def is_markable(out: Any) -> bool:
    return isinstance(out, Tensor) and out.ndim >= 3 and out.is_floating_point()


class BlockOutput(Enum):
    """What a numbered module returns."""

    TENSOR = "a batch of sequences"
    TUPLE = "a tuple, whose first is one"
    OTHER = "something else"


@contextmanager
def marking() -> Iterator[dict[str, set[BlockOutput]]]:
    """Within the block, mark those outputs of a functionalized model's numbered modules that are
    batches of sequences; of a tuple the first. Yields what each module, by path, returns.
    """
    found: dict[str, set[BlockOutput]] = {}

    def mark(path: str, out: Any, is_first: bool) -> Any:
        kinds = found.setdefault(path, set())
        if not is_markable(out):
            kinds.add(BlockOutput.OTHER)
            return out
        kinds.add(BlockOutput.TUPLE if is_first else BlockOutput.TENSOR)
        return constrain(out, PartitionSpec(), axes=MARK + pattern_of([path]))

    with outputs_through(mark):
        yield found


def constraints_along(
    along: Along, returned: Mapping[str, set[BlockOutput]]
) -> dict[str, Constraint]:
    """The constraints on what numbered modules return: one for a pattern whose modules return
    alike, else one for a module.
    """
    if not along:
        return {}
    spec, axes = spec_along(along), tuple(along)
    of_patterns: dict[str, dict[str, set[BlockOutput]]] = {}
    for path, kinds in returned.items():
        of_patterns.setdefault(pattern_of([path]), {})[path] = kinds
    found: dict[str, Constraint] = {}
    for pattern, of_paths in of_patterns.items():
        of_all = set[BlockOutput]().union(*of_paths.values())
        for name, kinds in ({pattern: of_all} if len(of_all) == 1 else of_paths).items():
            if kinds == {BlockOutput.TENSOR}:
                found[name] = Constraint(outputs=spec, axes=axes)
            elif kinds == {BlockOutput.TUPLE}:
                found[name] = Constraint(outputs=(spec, ...), axes=axes)
    return found


def with_marks(traced: Traced, along: Along) -> Traced:
    """The trace with its marks as constraints; without marks if ``along`` is empty."""
    graph = RankGraph()
    env: dict[fx.Node, fx.Node] = {}
    for node in traced.gm.graph.nodes:
        marked = node.target is CONSTRAIN and is_mark(pin_from_str(node.args[1]))
        if marked and not along:
            env[node] = env[node.args[0]]
            continue
        env[node] = graph.node_copy(node, env.__getitem__)
        if marked:
            env[node].args = (
                env[node.args[0]],
                pin_to_str(pin_along(along, node.meta["val"].shape)),
            )
    return replace(traced, gm=as_module(graph, traced.gm))


def pattern_of(path: Sequence[Any]) -> str:
    """A parameter's path with ``*`` in place of numbers."""
    return ".".join(
        "*" if part.isdigit() else part for element in path for part in str(element).split(".")
    )


def patterns_of(paths: Sequence[Sequence[Any]], ndims: Sequence[int]) -> list[str]:
    """The pattern of each parameter; where those of one pattern differ in their number of dims,
    which a spec does not fit, the path of each.
    """
    found = [pattern_of(path) for path in paths]
    of_pattern: dict[str, set[int]] = {}
    for pattern, ndim in zip(found, ndims, strict=True):
        of_pattern.setdefault(pattern, set()).add(ndim)
    return [
        pattern if len(of_pattern[pattern]) == 1 else ".".join(map(str, path))
        for pattern, path in zip(found, paths, strict=True)
    ]
