"""Per-rank code as a value: a graph on local shapes, with the specs of its operands and results."""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx

from ftp.dataclass import dataclass
from ftp.dynamic_int import Sizes
from ftp.ops.ancestors import ancestors
from ftp.ops.define import define, register_fake
from ftp.per_rank.sizes import Replacement, as_symbolic, meta, name_of, with_numbers
from ftp.rules.notation import Dims
from ftp.rules.rule import BoundRule
from ftp.sharding.spec import PartitionSpec

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Port:
    """An operand or a result of a program.

    Attributes:
        shape: the local one.
        pending: axes over which the value is a pending sum.
    """

    spec: PartitionSpec
    shape: Shape
    dtype: torch.dtype
    pending: tuple[str, ...] = ()

    @property
    def meta(self) -> Tensor:
        return meta(self.shape, self.dtype)

    @property
    def has_gradient(self) -> bool:
        return has_gradient(self.dtype)

    def global_shape(self, axes: Mapping[str, int]) -> Shape:
        return tuple(
            s * math.prod(axes[c.axis] for c in self.spec.cuts(d)) for d, s in enumerate(self.shape)
        )


def has_gradient(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


@dataclass(frozen=True, eq=False)
class RankCode:
    """Per-rank code.

    Attributes:
        gm: takes the operands' shards, then the rank's index on each axis, 0-d int64 tensors.
        is_planned: whether the mesh has other axes, over which the code is planned like the program
            around it.
        sizes: the dynamic sizes that its numbers are formulas of; None where there are none.
        content: hash of the content, equal on all ranks.
    """

    gm: fx.GraphModule
    axes: Mapping[str, int]
    operands: tuple[Port, ...]
    results: tuple[Port, ...]
    is_planned: bool
    sizes: Sizes | None

    @cached_property
    def key(self) -> str:
        """Unique in this process: formulas of two traces may read alike."""
        return self.content if self.sizes is None else f"{self.content} of {name_of(self.sizes)}"

    @cached_property
    def content(self) -> str:
        lines = [
            f"{node.format_node()} {node.meta.get('source', '')}" for node in self.gm.graph.nodes
        ]
        text = "\n".join(
            [*lines, repr((dict(self.axes), self.operands, self.results, self.is_planned))]
        )
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @cached_property
    def rule(self) -> BoundRule:
        """A rule with a factor per mesh axis, of the axis' size, in every dim that the axis shards;
        the rest of a dim is whole.
        """
        of_axes, rests = {factor(axis): n for axis, n in self.axes.items()}, {}

        def dims(port: Port, name: str) -> Dims:
            found: list[tuple[str, ...]] = []
            for d, size in enumerate(port.shape):
                cuts, rest, before = port.spec.cuts(d), f"{name}{d}", ()
                (pack,) = {c.pack for c in cuts} or {1}  # the number of equal packs along the dim
                assert isinstance(pack, int)
                rests[rest] = size // pack
                if pack > 1:
                    rests[f"{rest}p"], before = pack, (f"{rest}p",)
                found.append((*before, *(factor(c.axis) for c in cuts), rest))
            return tuple(found)

        operands = tuple(dims(p, f"x{i}_") for i, p in enumerate(self.operands))
        results = tuple(dims(p, f"y{i}_") for i, p in enumerate(self.results))
        pending = tuple({factor(a): "sum" for a in p.pending} for p in self.results)
        return BoundRule(
            operands, results, frozenset(rests), pending, (), of_axes | rests, None, False
        )

    def giving(self, results: Sequence[int]) -> tuple["RankCode", list[int]]:
        """The program that computes only these results, and the operands that it takes."""
        returned: Any = self.gm.graph.output_node().args[0]
        wanted = [returned[i] for i in results]
        taken_from = ancestors(wanted)
        placeholders = self.gm.graph.find_nodes(op="placeholder")
        taken = [i for i in range(len(self.operands)) if placeholders[i] in taken_from] or [0]
        inputs = [*(placeholders[i] for i in taken), *placeholders[len(self.operands) :]]
        graph = fx.Graph()
        env = {node: copied(graph, node) for node in inputs}
        for node in self.gm.graph.nodes:
            if node in taken_from and node.op == "call_function":
                env[node] = graph.node_copy(node, env.__getitem__)
        graph.output(tuple(env[n] for n in wanted))
        operands = [self.operands[i] for i in taken]
        return self.like(graph, operands, [self.results[i] for i in results]), taken

    def like(
        self, graph: fx.Graph, operands: Sequence[Port], results: Sequence[Port]
    ) -> "RankCode":
        """Other code on the same axes."""
        gm = fx.GraphModule({}, graph)
        return interned(gm, self.axes, operands, results, self.is_planned, self.sizes)

    def with_numbers(self, number: Replacement, sizes: Sizes | None = None) -> "RankCode":
        """The code with ``number(x)`` in place of each formula: its value, or one of ``sizes``."""

        def port(old: Port) -> Port:
            return replace(old, shape=tuple(map(number, old.shape)))

        if self.sizes is None:
            return self
        gm = fx.GraphModule({}, with_numbers(self.gm.graph, number))
        operands, results = (tuple(map(port, of)) for of in (self.operands, self.results))
        return interned(gm, self.axes, operands, results, self.is_planned, sizes)

    def __str__(self) -> str:
        return f"local[{self.content}]"


def factor(axis: str) -> str:
    """The factor of a mesh axis in a program's rule."""
    return f"@{axis}"


_programs: dict[str, RankCode] = {}


def program_of(key: str) -> RankCode:
    return _programs[key]


def interned(
    gm: fx.GraphModule,
    axes: Mapping[str, int],
    operands: Sequence[Port],
    results: Sequence[Port],
    is_planned: bool,
    sizes: Sizes | None = None,
) -> RankCode:
    """The program with this content; equal programs are one object."""
    made = RankCode(gm, axes, tuple(operands), tuple(results), is_planned, sizes)
    return _programs.setdefault(made.key, made)


def copied(graph: fx.Graph, placeholder: fx.Node) -> fx.Node:
    made = graph.placeholder(placeholder.name)
    made.meta = dict(placeholder.meta)
    return made


# The op that carries a program through a surrounding trace.

LOCAL = define("local(Tensor[] xs, str program) -> Tensor[]")


@register_fake("ftp::local")
def _shapes(xs: list[Tensor], program: str) -> list[Tensor]:
    known = program_of(program)
    shapes = [port.global_shape(known.axes) for port in known.results]
    if known.sizes is not None:
        symint = as_symbolic(known.sizes).symint
        shapes = [tuple(map(symint, shape)) for shape in shapes]
    return [
        xs[0].new_empty(shape, dtype=port.dtype)
        for shape, port in zip(shapes, known.results, strict=True)
    ]
