"""Dims whose size ``torch.export`` left open: they are formulas of sizes for the planner, and nodes
in a rank's graph that compute with the sizes of its inputs.
"""

import itertools
import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import field
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from ftp.dataclass import dataclass
from ftp.dynamic_float import OPERATORS, DynamicFloat, is_formula
from ftp.dynamic_int import INT_FUNCTIONS, DynamicInt, Sizes, is_dynamic, symbol, value_of
from ftp.errors import InputError, raise_all
from ftp.sharding.arguments import Shape
from ftp.torch_internals.fake_tensors import mode_for

if TYPE_CHECKING:
    from torch.export import ExportedProgram

    from ftp.tracing.symbolic import Symbolic

aten = torch.ops.aten
_GENERIC = 5  # few conditions hold for this size and not for larger ones
_LARGEST = 2**40  # stands for no limit


@dataclass(frozen=True)
class OpenDims:
    """The sizes that an exported program learns when it runs; empty if all shapes are known.

    Attributes:
        ranges: ``{torch's symbol: (name, size to plan for, least, largest)}``. Open sizes are
            formulas of the symbols.
        graph: the exported program's.
    """

    ranges: Mapping[Any, tuple[str, int, int, int]]
    graph: fx.Graph = field(compare=False)

    @classmethod
    def of(cls, program: "ExportedProgram", ranks: int) -> "OpenDims":
        """The open dims of a program.

        Args:
            ranks: the planned sizes are multiples of it, where the limits allow.
        """
        from torch.export.graph_signature import InputKind

        placeholders = [n for n in program.graph.nodes if n.op == "placeholder"]
        dims: dict[str, Any] = {
            f"{node.name}.shape[{dim}]": size
            for spec, node in zip(program.graph_signature.input_specs, placeholders, strict=True)
            if spec.kind is InputKind.USER_INPUT and isinstance(node.meta["val"], torch.Tensor)
            for dim, size in enumerate(node.meta["val"].shape)
        }
        sizes = {dim: s.node.expr for dim, s in dims.items() if isinstance(s, torch.SymInt)}
        taken = {s for s in dims.values() if not isinstance(s, torch.SymInt)}
        ranges = {}
        for s in dict.fromkeys(
            s for expr in sizes.values() for s in sorted(expr.free_symbols, key=str)
        ):
            limits = program.range_constraints[s]
            low = max(int(limits.lower), 1)
            high = int(limits.upper) if limits.upper.is_Integer else _LARGEST
            value = _typical(max(low, _GENERIC), high, ranks, taken)
            taken.add(value)
            ranges[s] = (_named(s, sizes), value, low, high)
        return cls(ranges, program.graph)

    def sizes(self, multiples: Mapping[str, int] = MappingProxyType({})) -> Sizes:
        """The sizes to trace or plan with; those in ``multiples`` {name: factor} are multiples."""
        return Sizes(
            [
                symbol(name, value, low, high, multiples.get(name, 1))
                for name, value, low, high in self.ranges.values()
            ]
        )

    def example(self, numbers: Sequence[Any]) -> Shape:
        """A shape of the exported program, at the sizes to plan for."""
        return tuple(map(value_of, self.formulas(numbers, self._example_sizes)))

    @cached_property
    def _example_sizes(self) -> Sizes:
        return self.sizes()

    def formulas(self, numbers: Sequence[Any], sizes: Sizes) -> Shape:
        """A shape or strides of the exported program as formulas of ``sizes``."""
        if not self.ranges:
            return tuple(numbers)
        from ftp.tracing.symbolic import symbolic_of

        symbolic = symbolic_of(sizes)
        if "open dims" not in sizes.memo:
            sizes.memo["open dims"] = self
            for theirs, ours in zip(self.ranges, sizes.symbols, strict=True):
                symbolic.stands_for(theirs, ours)
            symbolic.note_rounded(self.graph)
        return tuple(map(symbolic.dynamic, numbers))

    def check(self, sizes: Sizes) -> None:
        """Check that a plan serves all sizes of the exported program.

        Raises:
            InputError: it does not; the message says what to export instead.
        """
        failures = [
            f"The plan cuts {one.name} into {one.multiple} equal parts, and torch.export left its"
            f" size open. Export with {one.multiple} * torch.export.Dim(...) in place of its Dim,"
            " or with its size."
            for one in sizes.given
            if one.multiple > 1
        ]
        raise_all(InputError, failures)
        for values in self._samples():
            if not sizes.conditions.holds(values):
                given = ", ".join(
                    f"{one.name} = {v}" for one, v in zip(sizes.given, values, strict=True)
                )
                raise InputError(
                    f"The program was exported for sizes such as {given}, and its plan takes"
                    f" {' and '.join(sizes.conditions)}. Export with a torch.export.Dim of such"
                    " sizes, or with a size."
                )

    def _samples(self) -> Iterator[tuple[int, ...]]:
        """Combinations of sizes: the least, the largest, and sizes near the planned ones."""
        several = []
        for _, value, low, high in self.ranges.values():
            ends = [low, low + 1, value, value + 1, min(high, 4096), min(high, 4095)]
            several.append(sorted({int(x) for x in ends if low <= x <= high}))
        return itertools.product(*several)


def _named(symbol: Any, sizes: Mapping[str, Any]) -> str:
    """The input dim of which a symbol is the size, or the symbol and a dim whose size it is in."""
    dims = [dim for dim, expr in sizes.items() if symbol in expr.free_symbols]
    return next((dim for dim in dims if sizes[dim] == symbol), f"{symbol} of {dims[0]}")


def _typical(low: int, high: int, ranks: int, taken: set[int]) -> int:
    """A multiple of ``ranks`` that is not taken, if the limits allow."""
    first = -(-low // ranks) * ranks
    fitting = (s for s in range(first, first + (len(taken) + 1) * ranks, ranks) if s not in taken)
    found = next(fitting)
    return found if found <= high else min(low, high)


@dataclass
class SizeNodes:
    """Formulas of sizes as nodes of a rank's graph.

    Attributes:
        sizes: empty if the program has no open dims.
        inputs: the local shape of each input tensor.
    """

    graph: fx.Graph
    sizes: Sizes
    inputs: Mapping[fx.Node, Shape]
    _made: dict[Any, fx.Node] = field(default_factory=dict)

    @cached_property
    def _symbolic(self) -> "Symbolic":
        from ftp.tracing.symbolic import Symbolic

        return Symbolic(self.sizes)

    def symint(self, x: int) -> Any:
        """A size for torch's ops on fake tensors."""
        return self._symbolic.symint(x) if is_dynamic(x) else x

    @contextmanager
    def ops(self) -> Iterator[None]:
        """Within the block ops run on fake tensors; their tests of sizes become conditions."""
        if not self.sizes.given:
            with mode_for(None):
                yield
            return
        with self._symbolic.generic(str), mode_for(self._symbolic.env):
            yield
        self._symbolic.note_guards()

    def range_constraints(self) -> dict[Any, Any]:
        """The ``range_constraints`` of an ``ExportedProgram``."""
        return dict(self._symbolic.env.var_to_range) if self.sizes.given else {}

    def check_known(self) -> None:
        """Make a node for each size.

        Raises:
            InputError: a size that does not follow from the inputs' shapes.
        """
        for x in self.sizes.symbols:
            self(self.sizes.count(x))

    def add_conditions(self) -> list[fx.Node]:
        """Add nodes that check the program's conditions on sizes, beyond the sizes' limits."""
        before = set(self.graph.nodes)
        conditions = self.sizes.conditions
        for text, (question, x, answer) in zip(conditions, conditions.each(), strict=True):
            holds = self._call(_COMPARED[question, answer], self(x), 0)
            message = f"The program was planned for sizes with {text}."
            self._call(aten._assert_scalar.default, holds, message)
        return [n for n in self.graph.nodes if n not in before]

    def __call__(self, x: Any) -> Any:
        """The node of a formula; another argument is returned as it is."""
        if not is_formula(x):
            return x
        if x not in self._made:
            self._made[x] = self._of_float(x) if type(x) is DynamicFloat else self._of_int(x)
        return self._made[x]

    def _call(self, function: Any, *args: Any) -> Any:
        key = (function, *args)
        if key not in self._made:
            self._made[key] = self.graph.call_function(function, args)
        return self._made[key]

    def _of_float(self, x: DynamicFloat) -> Any:
        if x.operator not in OPERATORS:
            raise InputError(
                f"The program computes {x!r} of its sizes, which has no form in a rank's graph."
                " Export without dynamic_shapes, once for each size."
            )
        return self._call(OPERATORS[x.operator], self(x.left), self(x.right))

    def _of_int(self, x: DynamicInt) -> Any:
        total: Any = None
        for atoms, c in sorted(x.terms.items(), key=lambda term: not term[0]):
            product: Any = c
            for atom in atoms:
                one = self._atom(atom)
                product = one if product == 1 else self._call(operator.mul, product, one)
            total = product if total is None else self._call(operator.add, total, product)
        return total

    def _atom(self, atom: int) -> Any:
        kind, of = self.sizes.made_of(atom)
        if kind == "symbol":
            return self._count(atom, of[0])
        return self._call(INT_FUNCTIONS[kind], *map(self, of))

    def _count(self, atom: int, name: str) -> Any:
        """The count of a size (the size divided by its multiple), from the shape of an input."""
        for node, shape in self.inputs.items():
            for dim, size in enumerate(shape):
                terms = dict(size.terms) if isinstance(size, DynamicInt) else {}
                constant, factor = terms.pop((), 0), terms.get((atom,))
                if factor is None or len(terms) > 1:
                    continue
                found = self._call(aten.sym_size.int, node, dim)
                found = self._call(operator.sub, found, constant) if constant else found
                return found if factor == 1 else self._call(operator.floordiv, found, factor)
        raise InputError(
            f"No dim of this rank's inputs tells the size {name}. Let in_specs replicate a dim that"
            " has it, or export with a Dim that is the size of a dim."
        )


_COMPARED = {
    ("zero", True): operator.eq,
    ("zero", False): operator.ne,
    ("positive", True): operator.gt,
    ("positive", False): operator.le,
}
