"""Dynamic sizes in a trace: ``DynamicInt`` to torch's symbolic ints and back, and torch's guards as
conditions.

torch's shape functions compute with ``SymInt`` and record each comparison of sizes as a guard. Here
a guard becomes a condition of the trace's ``Sizes``, with the user's line.
"""

import functools
import math
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import sympy
import torch
from torch import SymFloat, SymInt, fx
from torch._dynamo.source import ConstantSource
from torch.fx.experimental import _config
from torch.fx.experimental.symbolic_shapes import DimDynamic, StrictMinMaxConstraint
from torch.fx.node import map_aggregate
from torch.utils._sympy import functions as sizes_functions
from torch.utils._sympy.value_ranges import ValueRanges

from ftp.dynamic_float import FUNCTIONS, OPERATORS, DynamicFloat, evaluated, is_formula
from ftp.dynamic_int import (
    INT_FUNCTIONS,
    ROUNDINGS,
    DynamicInt,
    IsOne,
    Sizes,
    is_dynamic,
    value_of,
)
from ftp.rules.local_op import copied
from ftp.torch_internals.fake_tensors import SLICES
from ftp.torch_internals.modes import enable_python_dispatcher
from ftp.torch_internals.pytree import tree_map
from ftp.tracing.guards import Guards, is_number, says_one
from ftp.tracing.math_of_sizes import function_of, of_sizes
from ftp.tracing.places import SYMBOLIC
from ftp.tracing.python_numbers import python_numbers
from ftp.tracing.replacements.linspaces import OF_SIZES
from ftp.tracing.replacements.replaced import replaced

_SHOWN = 4  # conditions in a message
_SQUEEZES = (torch.ops.aten.squeeze, torch.ops.aten.squeeze_)


class NotSymbolic(Exception):
    """A number in a trace is no formula of the dynamic sizes that `Sizes` can hold."""


class Symbolic:
    """The dynamic sizes of one `Sizes`, as torch's symbolic ints.

    >>> from ftp.dynamic_int import Symbol
    >>> symbolic = symbolic_of(Sizes([Symbol("S", 7, 1, 512)]))
    >>> (s,) = symbolic.sizes.symbols
    >>> given = symbolic.symint(2 * s)
    >>> bool(given > 20), symbolic.dynamic(given // 3)
    (False, ((2*S)//3))
    >>> _ = symbolic.note_guards()
    >>> list(symbolic.sizes.conditions)
    ['2*S - 20 <= 0']
    """

    def __init__(self, sizes: Sizes):
        self.sizes, self.env, self._noted = sizes, Guards(), 0
        self.env.symbolic = self
        self.keeps_ones = self._inner_keeps_ones = False
        self._depth = 0
        self._of_one: list[int] = []  # guards that are not noted
        self._symints: dict[DynamicInt, Any] = {}
        self._dynamic: dict[Any, Any] = {}
        self._rounded: dict[Any, Any] = {}
        for symbol, x, now in zip(sizes.given, sizes.symbols, sizes.now, strict=True):
            source = ConstantSource(symbol.name)
            limits = ValueRanges(symbol.low, int(min(symbol.high, 2**40)))
            name = self.env.create_symbol(
                now // symbol.multiple,
                source,
                DimDynamic.DYNAMIC,
                StrictMinMaxConstraint(vr=limits, warn_only=False),
                positive=symbol.low > 0 or None,
                do_not_specialize_zero_one=True,
            )
            count = sizes.count(x)
            self._dynamic[name] = count
            self._symints[count] = self.env.create_symintnode(
                name, hint=now // symbol.multiple, source=source
            )

    def stands_for(self, theirs: Any, x: DynamicInt) -> None:
        """Read the symbol ``theirs`` of another program's formulas as the size ``x``."""
        self._dynamic[theirs] = x

    def symint(self, x: Any) -> Any:
        """A size, or a float computed from sizes, for torch's shape functions."""
        if type(x) is DynamicFloat:
            if x.operator in FUNCTIONS:
                return function_of(x.operator, self.symint(x.left))
            left, right = (torch.sym_float(self.symint(part)) for part in (x.left, x.right))
            return OPERATORS[x.operator](left, right)
        if not is_dynamic(x):
            return x
        if x not in self._symints:
            self._symints[x] = sum(
                math.prod(map(self._atom, atoms), start=c) for atoms, c in x.terms.items()
            )
        return self._symints[x]

    def _atom(self, atom: int) -> Any:
        alone = self.sizes.alone(atom)
        if alone not in self._symints:
            kind, operands = self.sizes.made_of(atom)
            made = INT_FUNCTIONS[kind](*map(self.symint, operands))
            if kind in ROUNDINGS:
                self._means(made.node.expr, alone)
            self._symints[alone] = made
        return self._symints[alone]

    def _means(self, e: Any, rounded: Any) -> None:
        """Read torch's formula of a rounded float as ``rounded``. torch's own has lost the order of
        sums and products, which decides a float's last bit, and so what it is rounded to.
        """
        if self._rounded.setdefault(e, rounded) != rounded:
            raise NotSymbolic(f"{self.shown(e)}, which is rounded, is computed in two ways")

    def dynamic(self, x: Any) -> Any:
        """A size, or a float computed from sizes, as torch's shape functions give it.

        Raises:
            NotSymbolic: where it is no formula of ints.
        """
        if isinstance(x, SymInt):
            return self.of_formula(x.node.expr)
        if isinstance(x, SymFloat):
            return self._of_float(x.node.expr)
        if isinstance(x, SYMBOLIC):
            raise NotSymbolic(f"the number {x}")
        return x

    def replaced(self, tree: Any) -> Any:
        """Nested arguments with symbolic numbers and their nodes replaced by formulas."""

        def number(x: Any) -> Any:
            if isinstance(x, fx.Node) and isinstance(x.meta.get("val"), SYMBOLIC):
                return self.dynamic(x.meta["val"])
            return self.dynamic(x)

        return map_aggregate(tree, number)

    def at(self, graph: fx.Graph, values: Sequence[int]) -> fx.Graph:
        """A traced graph at one set of sizes, with tensors on meta in its metadata."""

        def number(x: Any) -> Any:
            return value_of(self.dynamic(x))

        def tensor(x: Any) -> Any:
            if not isinstance(x, torch.Tensor):
                return x
            shape, strides = (tuple(map(number, of)) for of in (x.shape, x.stride()))
            return torch.empty_strided(shape, strides, dtype=x.dtype, device="meta")

        new = copied(graph)
        with self.sizes.noting(values):
            for node in new.nodes:
                given = map_aggregate((node.args, dict(node.kwargs)), evaluated)
                node._update_args_kwargs(*given)
                node.meta["val"] = tree_map(tensor, node.meta.get("val"))
        return new

    def described(self) -> str:
        """Conditions on sizes that the function's code tests, with their lines; equations first."""
        given = zip(self.env.guards, self.env.lines, strict=True)
        guards = sorted(given, key=lambda each: type(each[0].expr).__name__ != "Equality")
        found = [self.shown(g.expr) + (f" at {line}" if line else "") for g, line in guards]
        first = list(dict.fromkeys(found))[:_SHOWN]
        return "; ".join(first) + ("; and others" if set(found) - set(first) else "")

    def shown(self, e: Any) -> str:
        """torch's formula, with the names of the sizes."""
        of = {str(name): repr(x) for name, x in self._dynamic.items() if name.is_Symbol}
        return re.sub(r"\w+", lambda word: of.get(word[0], word[0]), str(e))

    def inline(self, graph: fx.Graph) -> None:
        """Write the graph's symbolic numbers as formulas in the arguments of the nodes."""
        self.note_rounded(graph)
        for node in graph.nodes:
            if node.op == "call_function" and not isinstance(node.meta.get("val"), SYMBOLIC):
                node.args, node.kwargs = self.replaced(node.args), self.replaced(node.kwargs)
        # Whether a dim of size one is squeezed decides the shape of the result.
        self.keeps_ones = self._inner_keeps_ones or any(
            getattr(n.target, "overloadpacket", None) in _SQUEEZES for n in graph.nodes
        )
        for node in reversed(graph.nodes):
            if isinstance(node.meta.get("val"), SYMBOLIC) and not node.users:
                graph.erase_node(node)
        if self._depth:
            self._inner_keeps_ones = self.keeps_ones
        else:
            self.note_guards()

    @contextmanager
    def inner_trace(self) -> Iterator[None]:
        """Within the block a trace is made inside of another: the outer one notes the guards of
        both.
        """
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def of_formula(self, e: Any) -> Any:
        """torch's formula as one of `Sizes`."""
        if e not in self._dynamic:
            self._dynamic[e] = self._of_formula(e)
        return self._dynamic[e]

    def _of_formula(self, e: Any) -> Any:
        if isinstance(e, int):
            return e
        if e.is_Integer or (e.is_Float and float(e).is_integer()):  # floats are compared with sizes
            return int(e)
        name = type(e).__name__
        if name in ("CeilToInt", "FloorToInt") and type(e.args[0]).__name__ == "IntTrueDiv":
            x, y = map(self.of_formula, e.args[0].args)
            return x // y if name == "FloorToInt" else -(-x // y)
        if e in self._rounded:
            return self._rounded[e]
        args = [self.of_formula(a) for a in e.args] if not e.is_Relational else []
        match name:
            case "ToFloat":
                return args[0]
            case "Add":
                return sum(args[1:], args[0])
            case "Mul":
                return math.prod(args)
            case "Pow" if isinstance(args[1], int) and not is_dynamic(args[1]) and args[1] >= 0:
                return math.prod([args[0]] * args[1])
            case "Abs":
                return abs(args[0])
            case "FloorDiv" | "CleanDiv":
                return args[0] // args[1]
            case "Mod" | "PythonMod":
                return args[0] % args[1]
            case "Min" | "Max" as kind:
                # Which one it is becomes a condition: rules compare the dims of slices with others.
                # A formula stands for a number that it equals, and fits other dims of that size.
                args.sort(key=lambda x: not is_dynamic(x))
                return (min if kind == "Min" else max)(args)
            case _:
                raise NotSymbolic(f"the number {self.shown(e)}")

    def note_rounded(self, graph: fx.Graph) -> None:
        """Read the ints that the graph makes of floats as formulas of these floats."""
        for node in graph.nodes:
            if node.target in _ROUNDED and isinstance(node.meta["val"], SymInt):
                with suppress(NotSymbolic):  # where it is used, the reason is given
                    rounded = node.target(self._as_computed(node.args[0]))
                    self._means(node.meta["val"].node.expr, rounded)

    def _as_computed(self, x: Any) -> Any:
        """A float of the graph, computed in the order of its nodes."""
        if not isinstance(x, fx.Node):
            return x
        if isinstance(x.meta["val"], SymInt):  # ints are exact in any order
            return self.of_formula(x.meta["val"].node.expr)
        if x.target in _SIGNS:
            return DynamicFloat("*", _SIGNS[x.target], self._as_computed(x.args[0]))
        name = _OPERATORS.get(x.target, getattr(x.target, "__name__", ""))
        if name not in OPERATORS and name not in FUNCTIONS:
            raise NotSymbolic(f"the number {self.shown(x.meta['val'])}")
        return self._float(name, *map(self._as_computed, x.args))

    def _float(self, name: str, *args: Any) -> DynamicFloat:
        """A float, and the conditions under which Python computes it."""
        if name in ("/", "log", "log2"):
            for factor in _factors(args[-1]):
                self.sizes.note("zero", factor, False)
        return DynamicFloat(name, *args)

    def _of_float(self, e: Any) -> Any:
        """A float formula of torch's."""
        if e.is_Float:
            return float(e)
        if e.is_integer and not isinstance(e, sizes_functions.ToFloat):
            return self.of_formula(e)
        args = [self._of_float(a) for a in e.args]
        name = type(e).__name__.removeprefix("OpaqueUnaryFn_")
        if name in FUNCTIONS:
            return self._float(name, args[0])
        symbols = {"FloatTrueDiv": "/", "IntTrueDiv": "/", "FloatPow": "**", "Add": "+", "Mul": "*"}
        if name == "ToFloat":
            return DynamicFloat("*", 1.0, args[0])
        if name not in symbols:
            raise NotSymbolic(f"the number {self.shown(e)}")
        return functools.reduce(functools.partial(self._float, symbols[name]), args)

    def refuse_ones(self) -> None:
        """Refuse a trace in which a size at hand is one or zero, and something was decided by it:
        other decisions took it for another number, see `generic`.

        Raises:
            IsOne: it is such a trace.
        """
        for at in range(self._noted, len(self.env.guards)):
            if says_one(self.env.guards[at].expr):
                raise IsOne(f"{self.env.guards[at].expr} at {self.env.lines[at]}")

    def note_guards(self) -> list[str]:
        """Note torch's guards since the last call as conditions; returns their lines."""
        first, self._noted = self._noted, len(self.env.guards)
        new = range(first, self._noted)
        for at in [*self._of_one, *new] if self.keeps_ones else new:
            if self.keeps_ones or self.env.is_pythons[at] or not self._is_of_one(at):
                self._note_guard(at)
            else:
                self._of_one.append(at)
        if self._of_one:  # they may have answered what Python code asked later
            for question, answer in self.env.answered.items():
                self._note(question, answer)
        if self.env.deferred_runtime_asserts:
            raise NotSymbolic("a value that the trace does not know")
        return self.env.lines[first : self._noted]

    def _note_guard(self, at: int) -> None:
        try:
            self._note(self.env.guards[at].expr, True)
        except NotSymbolic as error:
            line = self.env.lines[at]
            raise NotSymbolic(f"{error}, of which the value is asked at {line}") from error

    def _is_of_one(self, at: int) -> bool:
        """Whether a guard says that a dynamic dim is not of size one, and nothing else. C++ adds
        such guards to see whether strides allow a view. They change no value: the view or copy that
        is right for other sizes is right for size one.
        """
        e = self.env.guards[at].expr
        if type(e).__name__ != "Unequality":
            return False
        if 1 in e.args:
            return True
        x = self.of_formula(e.args[0]) - self.of_formula(e.args[1])
        return is_dynamic(x) and len(x.terms) == 2 and sum(x.terms.values()) == 0 and () in x.terms

    def _note(self, e: Any, answer: bool) -> None:
        name = type(e).__name__
        if e in (sympy.true, sympy.false):
            return
        if name == "Not":
            self._note(e.args[0], not answer)
        elif name == ("And" if answer else "Or"):
            for part in e.args:
                self._note(part, answer)
        elif name in ("And", "Or"):
            self._note_one_of(e, answer)
        elif e.is_Relational:
            question, sign, means = _QUESTIONS[name]
            left, right = e.args
            if question == "positive" and (_is_float(left) != _is_float(right)):
                # A float is above an int if it is, rounded up.
                x = self._rounded_to(left, sign > 0) - self._rounded_to(right, sign < 0)
            else:
                x = self.of_formula(left) - self.of_formula(right)
            self.sizes.note(question, sign * x, means == answer)
        else:
            raise NotSymbolic(f"the condition {self.shown(e)}")

    def _rounded_to(self, e: Any, is_up: bool) -> Any:
        """A formula, rounded if it is one of `_is_float`."""
        if not _is_float(e):
            return self.of_formula(e)
        name = type(e).__name__.removeprefix("OpaqueUnaryFn_")
        x = self._float(name if name in FUNCTIONS else "/", *map(self.of_formula, e.args))
        return math.ceil(x) if is_up else math.floor(x)

    def _note_one_of(self, e: Any, answer: bool) -> None:
        """Note a part of an ``or`` that holds; that a size equals a number is the last choice."""
        for part in sorted(e.args, key=is_number):
            with suppress(ValueError, NotSymbolic):
                self._note(part, answer)
                return
        raise NotSymbolic(f"the condition {self.shown(e)}")

    @contextmanager
    def generic(self, line: Callable[[], str]) -> Iterator[None]:
        """Within the block torch's shape functions assume that no dynamic size is one. Their
        results hold for size one too, at the cost of a copy where strides decide. Guards are noted
        with their ``line``.
        """
        outer, self.env.line = self.env.line, line
        # Some ops take symbolic ints in their Python form only.
        oblivious = _config.patch(backed_size_oblivious=True)  # type: ignore[attr-defined]
        numbers = replaced(math, {name: of_sizes(name) for name in FUNCTIONS})
        try:
            with (
                oblivious,
                enable_python_dispatcher(),
                numbers,
                replaced(*SLICES),
                replaced(torch, OF_SIZES),
                python_numbers(),
            ):
                yield
        finally:
            self.env.line = outer


def _factors(x: Any) -> Iterator[DynamicInt]:
    """The sizes of which one is zero where the number ``x`` is; none of a sum of floats."""
    if is_dynamic(x):
        yield x
    elif is_formula(x) and x.operator == "*":
        yield from _factors(x.left)
        yield from _factors(x.right)


def _is_float(e: Any) -> bool:
    """Whether torch's formula is a quotient, or one of `FUNCTIONS`. Of ints these are what Python
    computes; of sums and products of floats torch has lost the order.
    """
    name = type(e).__name__
    return name in ("IntTrueDiv", "FloatTrueDiv") or name.startswith("OpaqueUnaryFn_")


_OPERATORS: dict[Any, str] = {function: symbol for symbol, function in OPERATORS.items()}
_ROUNDED = tuple(ROUNDINGS.values())
_SIGNS = {torch.sym_float: 1.0, operator.neg: -1.0}

# By the kind of a comparison with zero: what is asked of ``sign`` times the number, and the answer
# of a comparison that holds.
_QUESTIONS = {
    "Equality": ("zero", 1, True),
    "Unequality": ("zero", 1, False),
    "StrictGreaterThan": ("positive", 1, True),
    "StrictLessThan": ("positive", -1, True),
    "GreaterThan": ("positive", -1, False),
    "LessThan": ("positive", 1, False),
}


def symbolic_of(sizes: Sizes) -> Symbolic:
    """The one `Symbolic` of these sizes."""
    if "symbolic" not in sizes.memo:
        sizes.memo["symbolic"] = Symbolic(sizes)
    return sizes.memo["symbolic"]
