"""Check that a graph with one tensor per rank for each stack of layers computes the traced graph.

It shares no code with `stacked`. A value that consists of layers has a number for each of them;
other values are numbered as in `check`. Rules of ops are assumed to be true, as in all
certificates.
"""

import operator
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ftp.dataclass import dataclass
from ftp.errors import CertificateError
from ftp.ops.mapped_arguments import evaluated, mapped_arguments
from ftp.ops.stack import STACK, UNSTACK
from ftp.pipeline.check import Number, Numbering, name_of_one
from ftp.rules.bind import rule_of_node
from ftp.rules.call import Meta, operands_of, replaced

aten = torch.ops.aten
LayerCounts = Sequence[tuple[int, ...] | None]


@dataclass(frozen=True)
class _LayerRule:
    """An op of the traced graph that acts on each layer by itself.

    Attributes:
        target, args: the op and its arguments, without operands.
        metas: of its operands.
        dims: per operand, the dim of the layers; None if it has none.
        is_stack: whether the result consists of layers; else it is the sum over them.
    """

    target: Any
    args: str
    metas: tuple[Meta, ...]
    dims: tuple[int | None, ...]
    is_stack: bool

    def fits(self, node: fx.Node) -> bool:
        """Whether a node is this op, on fewer layers or as many."""
        metas = [_meta(n) for n in operands_of(node)]
        return (
            node.target == self.target
            and _text(node) == self.args
            and len(metas) == len(self.metas)
            and all(
                a.dtype == b.dtype and _without(a.shape, dim) == _without(b.shape, dim)
                for a, b, dim in zip(metas, self.metas, self.dims, strict=True)
            )
        )


class _StackNumbering:
    """Numbers of values, with a number for each layer of a stack.

    Attributes:
        rows: per value that consists of layers along dim 0, the layers' numbers.
        stacks: the values that the traced graph computes layer by layer from its inputs.
        slices: per slice the value that it is cut from, the dim, and where it begins.
        terms: per sum how often each term is added.
        rules: per op of the traced graph, by name, its rule.
    """

    def __init__(self):
        self.numbering = Numbering()
        self.rows: dict[Number, tuple[Number, ...]] = {}
        self.stacks: set[Number] = set()
        self.slices: dict[Number, tuple[Number, int, int]] = {}
        self.terms: dict[Number, Counter[Number]] = {}
        self.rules: dict[str, _LayerRule] = {}

    def together(self, rows: Iterable[Number]) -> Number:
        made = tuple(rows)
        number = self.numbering.of(("layers", made))
        self.rows[number] = made
        return number

    def rows_of(self, number: Number, dim: int, count: int) -> tuple[Number, ...]:
        """The slices of one element along ``dim``."""
        if dim == 0 and number in self.rows:
            return self.rows[number]
        base, of, begin = self.slices.get(number, (number, dim, 0))
        if of != dim:
            base, begin = number, 0
        return tuple(self.numbering.of(("row", base, dim, begin + i)) for i in range(count))

    def sum(self, numbers: Iterable[Number]) -> Number:
        terms: Counter[Number] = Counter()
        for number in numbers:
            terms.update(self.terms.get(number, {number: 1}))
        if len(terms) == 1 and set(terms.values()) == {1}:
            return next(iter(terms))
        number = self.numbering.of(("sum", tuple(sorted(terms.items()))))
        self.terms[number] = terms
        return number

    def run(self, graph: fx.Graph, inputs: Sequence[Number], is_traced: bool) -> list[Number]:
        """The numbers of a graph's outputs.

        Args:
            is_traced: whether it is the traced graph, whose rules are noted.
        """
        return evaluated(graph, inputs, lambda node, known: self._call(node, known, is_traced))

    def _call(self, node: fx.Node, env: Mapping[fx.Node, Number], is_traced: bool) -> Number:
        args: Any = node.args
        if _is_of_dim_0(node, UNSTACK, aten.unbind.int):
            count = _meta(args[0]).shape[0]
            return self.together(self.rows_of(env[args[0]], 0, count))
        if node.target is operator.getitem and _is_of_dim_0(args[0], UNSTACK, aten.unbind.int):
            return self.rows[env[args[0]]][args[1]]
        if _is_of_dim_0(node, STACK, aten.stack.default):
            return self.together(env[n] for n in args[0])
        if _is_of_dim_0(node, aten.cat.default) and all(env[n] in self.rows for n in args[0]):
            return self.together(row for n in args[0] for row in self.rows[env[n]])
        if node.target is aten.full.default and args[0] and args[0][0] == 0:
            return self.together(())
        if node.target is aten.slice.Tensor and len(args) == 4 and args[1] == 0:
            rows = self.rows.get(env[args[0]])
            if rows is not None:
                return self.together(rows[args[2] : args[3]])
        rule = self._rule(node, env) if is_traced else self._rule_of_traced(node)
        if rule is not None:
            return self._by_layer(node, env, rule)
        if _adds_alike(node):
            return self.sum(env[n] for n in args)
        mapped = mapped_arguments(node, lambda n: f"%{env[n]}")
        number = self.numbering.of(name_of_one(node) or (str(node.target), str(mapped)))
        if node.target is aten.slice.Tensor and len(args) == 4 and args[2] >= 0:
            base, dim, begin = self.slices.get(env[args[0]], (env[args[0]], args[1], 0))
            if dim != args[1]:
                base, begin = env[args[0]], 0
            self.slices[number] = base, args[1], begin + args[2]
        return number

    def _rule(self, node: fx.Node, env: Mapping[fx.Node, Number]) -> _LayerRule | None:
        """How an op of the traced graph acts on layers; None where it does not keep them apart."""
        slots, is_tensor = operands_of(node), isinstance(node.meta.get("val"), torch.Tensor)
        if not is_tensor or not any(env[n] in self.stacks for n in slots):
            return None
        rule = rule_of_node(node)
        if rule is None or rule.local is not None:
            return None
        of = {rule.operands[i][0] for i, n in enumerate(slots) if env[n] in self.stacks}
        if len(of) != 1 or len(layers := of.pop()) != 1 or layers[0] in rule.whole:
            return None
        dims: list[int | None] = []
        for factors in rule.dims:
            at = [d for d, dim in enumerate(factors) if layers[0] in dim]
            if len(at) > 1 or (at and factors[at[0]] != layers):
                return None
            dims.append(at[0] if at else None)
        result = dims.pop()
        is_sum = result is None and rule.pending[0].get(layers[0]) == "sum"
        if not (result == 0 or is_sum):
            return None
        metas = tuple(_meta(n) for n in slots)
        found = _LayerRule(node.target, _text(node), metas, tuple(dims), result == 0)
        self.rules[node.name] = found
        return found

    def _rule_of_traced(self, node: fx.Node) -> _LayerRule | None:
        rule = self.rules.get(node.meta.get("traced_as", ""))
        return rule if rule is not None and rule.fits(node) else None

    def _by_layer(self, node: fx.Node, env: Mapping[fx.Node, Number], rule: _LayerRule) -> Number:
        """The number of an op's result, of numbers for each layer."""
        operands, counts = list[tuple[Number, ...] | Number](), set[int]()
        for n, dim in zip(operands_of(node), rule.dims, strict=True):
            if dim is None:
                operands.append(env[n])
            else:
                operands.append(self.rows_of(env[n], dim, _meta(n).shape[dim]))
                counts.add(len(operands[-1]))  # type: ignore[arg-type]
        if len(counts) != 1:
            raise CertificateError(f"%{node.name} reads stacks of {sorted(counts)} layers.")
        rows = [
            self.numbering.of(
                (
                    "of a layer",
                    str(rule.target),
                    rule.args,
                    tuple(x if isinstance(x, int) else x[i] for x in operands),
                )
            )
            for i in range(counts.pop())
        ]
        number = self.together(rows) if rule.is_stack else self.sum(rows)
        if rule.is_stack:
            self.stacks.add(number)
        return number


def check_parts_of_stacks(
    traced: fx.Graph, expanded: fx.Graph, inputs: LayerCounts, outputs: LayerCounts
) -> None:
    """Raise unless ``expanded`` computes ``traced`` with one tensor per rank for each stack: every
    rank's part of an output must consist of its layers, computed from the same layers of inputs.

    Args:
        inputs, outputs: per input and output of ``traced`` the number of layers on each rank; None
            for a tensor that is no stack.

    Raises:
        CertificateError: the first output that differs. That is a fault of ftp: please report it.
    """
    layers = _StackNumbering()
    of_traced, of_expanded = list[Number](), list[Number]()
    for i, sizes in enumerate(inputs):
        if sizes is None:
            of_traced.append(layers.numbering.of(("input", i)))
            of_expanded.append(of_traced[-1])
            continue
        rows = [layers.numbering.of(("layer", i, k)) for k in range(sum(sizes))]
        of_traced.append(layers.together(rows))
        of_expanded += [layers.together(own) for own in _cut(rows, sizes)]
        layers.stacks.add(of_traced[-1])
    due = layers.run(traced, of_traced, is_traced=True)
    returned: Any = expanded.output_node().args[0]
    found = zip(layers.run(expanded, of_expanded, is_traced=False), returned, strict=True)
    for k, (number, sizes) in enumerate(zip(due, outputs, strict=True)):
        if sizes is None:
            if next(found)[0] != number:
                raise CertificateError(
                    f"Output {k} differs with one tensor per rank for each stack."
                )
            continue
        for rank, own in enumerate(_cut(layers.rows_of(number, 0, sum(sizes)), sizes)):
            part, node = next(found)
            shape = _meta(node).shape
            is_part = shape[:1] == (len(own),)
            if not is_part or layers.rows_of(part, 0, shape[0]) != tuple(own):
                raise CertificateError(
                    f"Output {k} of rank {rank} does not hold its {len(own)} layers of the stack."
                )
    if (rest := len(list(found))) > 0:
        raise CertificateError(f"The graph with parts of stacks returns {rest} tensors too many.")


def _cut(rows: Sequence[Number], sizes: Sequence[int]) -> list[Sequence[Number]]:
    ends = [sum(sizes[: rank + 1]) for rank in range(len(sizes))]
    return [rows[end - size : end] for end, size in zip(ends, sizes, strict=True)]


def _is_of_dim_0(node: Any, *targets: Any) -> bool:
    """Whether a node is one of these ops, of one operand or list of operands, along dim 0."""
    return (
        isinstance(node, fx.Node)
        and node.target in targets
        and node.args[1:] in ((), (0,))
        and not node.kwargs
    )


def _adds_alike(node: fx.Node) -> bool:
    """Whether a node adds two tensors without changing their dtype, so that a sum of such sums is
    one sum.
    """
    if node.target is not aten.add.Tensor or node.kwargs or len(node.args) != 2:
        return False
    return all(isinstance(n, fx.Node) and _meta(n).dtype == _meta(node).dtype for n in node.args)


def _text(node: fx.Node) -> str:
    """A call's arguments without its operands."""
    return str(replaced((node.args, dict(node.kwargs)), fx.Node, lambda n: "%"))


def _meta(node: Any) -> Meta:
    val = node.meta["val"]
    return Meta(tuple(val.shape), val.dtype)


def _without(shape: Sequence[int], dim: int | None) -> tuple[int, ...]:
    return tuple(n for d, n in enumerate(shape) if d != dim)
