"""The sharding rule of each aten op: how its tensor dims share factors.

A rule knows nothing of meshes, ranks, uneven shards, dtypes or cost; strategies, prices, plans, printouts and tests are derived from it.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch._ops import OpOverload

from ftp.errors import RuleError
from ftp.notation import BATCH, Dims, Notation, parse


@dataclass(frozen=True)
class Meta:
    """Global shape and dtype of a tensor in a call."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    @property
    def ndim(self) -> int:
        return len(self.shape)


@dataclass(frozen=True)
class Call:
    """An op with its arguments, a ``Meta`` in place of each tensor, and the metas of its results."""

    target: OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    results: tuple[Meta, ...]

    @property
    def operands(self) -> tuple[Meta, ...]:
        """Every tensor among the arguments, in order, list members too."""
        return tuple(tensors((self.args, dict(self.kwargs)), Meta))

    def arg(self, name: str) -> Any:
        """The argument called ``name`` in the op's schema, its default where it is not given."""
        for i, a in enumerate(self.target._schema.arguments):
            if a.name == name:
                if not a.kwarg_only and i < len(self.args):
                    return self.args[i]
                return self.kwargs.get(name, a.default_value)
        raise RuleError(f"{self.target} has no argument {name!r}: its schema is {self.target._schema}.")


def tensors(tree: Any, kind: type) -> Iterator[Any]:
    """The members of nested arguments that are of ``kind``, in order."""
    if isinstance(tree, kind):
        yield tree
    elif isinstance(tree, list | tuple):
        for t in tree:
            yield from tensors(t, kind)
    elif isinstance(tree, dict):
        for t in tree.values():
            yield from tensors(t, kind)


def replaced(tree: Any, kind: type | tuple[type, ...], new: Callable[[Any], Any]) -> Any:
    """Nested arguments with each member of ``kind`` replaced by what ``new`` makes of it; containers come out plain."""
    if isinstance(tree, kind):
        return new(tree)
    if isinstance(tree, list):
        return [replaced(t, kind, new) for t in tree]
    if isinstance(tree, tuple):
        return tuple(replaced(t, kind, new) for t in tree)
    if isinstance(tree, dict):
        return {k: replaced(t, kind, new) for k, t in tree.items()}
    return tree


LocalHook = Callable[[Any], Any]
# Torch has no kernels that mask and add these: no value of such a dtype is a pending reduction.
NEVER_ADDED = frozenset({torch.uint16, torch.uint32, torch.uint64, *(d for d in vars(torch).values() if str(d).startswith("torch.float8"))})


@dataclass(frozen=True)
class Rule:
    """How one call's dims share factors.

    Attributes:
        notation: the factors.
        linear: groups of operand indices that may be pending sums together, giving a pending sum.
        local: emits the op's local form, where that is more than the op itself (see ``partition.LocalOp``).
        sizes: sizes of factors that the shapes do not tell.
        decompose: whether the op is worth replacing by primitives when a whole factor is within reach.
    """

    notation: Notation
    linear: tuple[tuple[int, ...], ...] = ()
    local: LocalHook | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)
    decompose: bool = True

    def __str__(self) -> str:
        return str(self.notation)


@dataclass(frozen=True)
class BoundRule:
    """A rule fitted to a call: one factor list per dim, all sizes known; ``is_found`` where it is not stated, but found by trial."""

    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    whole: frozenset[str]
    pending: tuple[Mapping[str, str], ...]
    linear: tuple[tuple[int, ...], ...]
    sizes: Mapping[str, int]
    local: LocalHook | None
    decompose: bool
    is_found: bool = False

    def __str__(self) -> str:
        return str(Notation(self.operands, self.results, self.whole, tuple(tuple(p.items()) for p in self.pending)))


RuleMaker = Callable[[Call], "Rule | str | None"]
RULES: dict[OpOverload, Rule | RuleMaker] = {}


def make(
    text: str,
    *,
    linear: Sequence[Sequence[int]] = (),
    local: LocalHook | None = None,
    sizes: Mapping[str, int] | None = None,
    decompose: bool = True,
) -> Rule:
    """A rule from its text, for functions that depend on a call's arguments."""
    return Rule(parse(text), tuple(map(tuple, linear)), local, sizes or {}, decompose)


def rule(*ops: "OpOverload | str", linear: Sequence[Sequence[int]] = (), local: LocalHook | None = None, decompose: bool = True) -> Any:
    """State the sharding rule of ``ops`` in factor notation, or decorate a function ``(call: Call) -> Rule | str`` that does.

    >>> rule(torch.ops.aten.mv.default, "m k, k -> m {k}", linear=[(0,), (1,)])

    Raises:
        RuleError: where the text does not parse.
    """
    *targets, last = ops
    if isinstance(last, str):
        _register(targets, make(last, linear=linear, local=local, decompose=decompose))
        return None

    def decorate(maker: RuleMaker) -> RuleMaker:
        def made(call: Call) -> Rule | None:
            found = maker(call)
            return make(found, linear=linear, local=local, decompose=decompose) if isinstance(found, str) else found

        _register(ops, made)
        return maker

    return decorate


def einsum(*ops: "OpOverload | str") -> None:
    """A product: factors that no result has are summed over; linear in each operand."""
    *targets, text = ops
    notation = parse(text)  # type: ignore[arg-type]
    kept = {f for dims in notation.results for dim in dims for f in dim}
    summed = tuple(dict.fromkeys((f, "sum") for dims in notation.operands for dim in dims for f in dim if f not in kept))
    n = len(notation.operands)
    _register(targets, Rule(replace(notation, pending=(summed,) * len(notation.results)), tuple((i,) for i in range(n))))


def pointwise(*ops: OpOverload, linear: Sequence[Sequence[int]] = (), local: LocalHook | None = None) -> None:
    """Elementwise ops; operands broadcast to the result from the right."""
    groups = tuple(map(tuple, linear))

    def maker(call: Call) -> Rule:
        return Rule(broadcast_notation([m.shape for m in call.operands], [m.shape for m in call.results]), _present(groups, call), local)

    _register(ops, maker)


def _present(groups: tuple[tuple[int, ...], ...], call: Call) -> tuple[tuple[int, ...], ...]:
    """The groups that the call has; bools do not add up."""
    n = len(call.operands)
    return tuple(g for g in groups if all(i < n and call.operands[i].dtype is not torch.bool for i in g))


def broadcast_notation(operands: Sequence[tuple[int, ...]], results: Sequence[tuple[int, ...]]) -> Notation:
    """The factors of tensors that broadcast together from the right: one per dim, none where one of them is stretched."""
    ndim = max((len(s) for s in (*operands, *results)), default=0)
    sizes = [
        max((s[len(s) - ndim + d] for s in (*operands, *results) if len(s) - ndim + d >= 0 and s[len(s) - ndim + d] != 1), default=1)
        for d in range(ndim)
    ]

    def dims(shape: tuple[int, ...]) -> Dims:
        skip = ndim - len(shape)
        return tuple((f"~{skip + d}",) if size == sizes[skip + d] else () for d, size in enumerate(shape))

    return Notation(tuple(map(dims, operands)), tuple(map(dims, results)), frozenset(), ((),) * len(results))


def reduction(*ops: OpOverload, op: str | None = "sum", linear: Sequence[Sequence[int]] = (), local: LocalHook | None = None) -> None:
    """Ops over ``dim`` (all dims where it is missing, None or empty) with ``keepdim``; ``op=None``: the reduced dims stay whole."""

    def maker(call: Call) -> Rule:
        return reduction_rule(call, op, linear, local)

    _register(ops, maker)


def reduction_rule(call: Call, op: str | None, linear: Sequence[Sequence[int]] = (), local: LocalHook | None = None) -> Rule:
    """The rule of one call of such an op."""
    (x, *_) = call.operands
    names = {a.name for a in call.target._schema.arguments}
    dim = call.arg("dim") if "dim" in names else None
    keepdim = bool(call.arg("keepdim")) if "keepdim" in names else False
    reduced = set(range(x.ndim)) if dim is None or dim == [] else {d % max(x.ndim, 1) for d in ([dim] if isinstance(dim, int) else dim)}
    operand = tuple((f"~{d}",) for d in range(x.ndim))
    result = tuple(() if d in reduced else f for d, f in enumerate(operand) if keepdim or d not in reduced)
    factors = [f"~{d}" for d in sorted(reduced) if d < x.ndim]
    whole = frozenset(factors) if op is None else frozenset()
    pending = () if op is None else tuple((f, op) for f in factors)
    n = len(call.results)
    return Rule(Notation((operand,), (result,) * n, whole, (pending,) * n), tuple(map(tuple, linear)), local)


def acting_on(call: Call, dims: Sequence[int], linear: Sequence[Sequence[int]] = (), local: LocalHook | None = None) -> Rule:
    """The rule of an op on tensors of one ndim that acts along ``dims``, where they may differ in size; the other dims correspond."""
    metas = (*call.operands, *call.results)
    ndim = metas[0].ndim
    at = {d % max(ndim, 1) for d in dims}
    whole = set()

    def name(t: int, d: int) -> tuple[str, ...]:
        if d not in at:
            return (f"~{d}",)
        factor = f"d{d}" if len({m.shape[d] for m in metas}) == 1 else f"d{d}_{t}"
        whole.add(factor)
        return (factor,)

    named = [tuple(name(t, d) for d in range(m.ndim)) for t, m in enumerate(metas)]
    n = len(call.operands)
    notation = Notation(tuple(named[:n]), tuple(named[n:]), frozenset(whole), ((),) * len(call.results))
    return Rule(notation, tuple(map(tuple, linear)), local)


def leading(call: Call, ndim: int, linear: Sequence[Sequence[int]] = (), local: LocalHook | None = None) -> Rule:
    """The rule of an op whose tensors share their first ``ndim`` dims; the others are whole and each tensor's own."""
    metas = (*call.operands, *call.results)
    named = [tuple((f"~{d}",) if d < ndim else (f"y{t}_{d}",) for d in range(m.ndim)) for t, m in enumerate(metas)]
    whole = frozenset(f for dims in named for (f,) in dims[ndim:])
    n = len(call.operands)
    return Rule(Notation(tuple(named[:n]), tuple(named[n:]), whole, ((),) * len(call.results)), tuple(map(tuple, linear)), local)


def along_dim(*ops: "OpOverload | str", linear: Sequence[Sequence[int]] = (), local: LocalHook | None = None, dim: str = "dim") -> None:
    """Ops that act along their argument ``dim``; the text's one [d] stands for that dim wherever it is."""
    *targets, text = ops
    notation = parse(text)  # type: ignore[arg-type]

    def maker(call: Call) -> Rule:
        ndim = call.operands[0].ndim
        at = call.arg(dim) % max(ndim, 1)

        def place(dims: Dims) -> Dims:
            inside = [f for f in dims if f != (BATCH,)]
            batch = [(f"~{i}",) for i in range(ndim - 1)]
            return (*batch[:at], *inside, *batch[at:]) if (BATCH,) in dims else dims

        if ndim == 0:
            return Rule(Notation(((),) * len(notation.operands), ((),) * len(notation.results), frozenset(), notation.pending))
        placed = replace(notation, operands=tuple(map(place, notation.operands)), results=tuple(map(place, notation.results)))
        return Rule(placed, tuple(map(tuple, linear)), local)

    _register(targets, maker)


def _register(ops: Sequence[Any], entry: Rule | RuleMaker) -> None:
    if not ops:
        raise RuleError("A rule names at least one op, such as torch.ops.aten.mm.default.")
    for op in ops:
        if not isinstance(op, OpOverload):
            raise RuleError(f"A rule is for an op overload such as torch.ops.aten.mm.default, not {op!r} ({type(op).__name__}).")
        RULES[op] = entry


def lookup(call: Call) -> BoundRule | None:
    """The rule of a call with all sizes known, or None where nothing is stated for it.

    Raises:
        RuleError: where the rule does not fit the call's tensors.
    """
    entry = RULES.get(call.target)
    found = entry if isinstance(entry, Rule) or entry is None else entry(call)
    if found is None:
        return None
    bound = bind(found, [m.shape for m in call.operands], [m.shape for m in call.results], str(call.target))  # type: ignore[arg-type]
    if not any(m.dtype in NEVER_ADDED for m in call.results):
        return bound
    summed = {f for m, pending in zip(call.results, bound.pending, strict=True) if m.dtype in NEVER_ADDED for f in pending}
    return replace(bound, whole=bound.whole | summed, linear=())


def bind(rule: Rule, operands: Sequence[tuple[int, ...]], results: Sequence[tuple[int, ...]], name: str = "the op") -> BoundRule:
    """Fit a rule to shapes: write out ``...`` and find every factor's size."""
    notation = rule.notation
    if len(notation.operands) != len(operands) or len(notation.results) != len(results):
        raise RuleError(
            f"The rule {str(notation)!r} of {name} has {len(notation.operands)} operands and {len(notation.results)} results;"
            f" the call has {len(operands)} and {len(results)}."
        )
    shapes = [*operands, *results]
    written = [*notation.operands, *notation.results]
    batch = _batch_names(written, shapes)
    tensors_dims = [_write_out(dims, batch) for dims in written]
    sizes = dict(rule.sizes)
    waiting = [
        (dim, int(size)) for dims, shape in zip(tensors_dims, shapes, strict=True) for dim, size in _zip_dims(dims, shape, notation, name)
    ]
    while waiting:
        left = []
        for dim, size in waiting:
            unknown = [f for f in dim if f not in sizes]
            if len(unknown) == 1:
                known = math.prod(sizes[f] for f in dim if f in sizes)
                sizes[unknown[0]] = size // known if known else 0
            elif unknown:
                left.append((dim, size))
                continue
            if math.prod(sizes[f] for f in dim) != size:
                raise RuleError(
                    f"The rule {str(notation)!r} of {name} does not fit shapes {operands} -> {results}: dim {dim} is of size {size}."
                )
        if len(left) == len(waiting):
            raise RuleError(
                f"The rule {str(notation)!r} of {name} leaves the sizes of {left[0][0]} open for shapes {operands} -> {results}."
            )
        waiting = left
    whole = frozenset(itertools.chain.from_iterable(batch if f == BATCH else (f,) for f in notation.whole))
    pending = tuple({g: op for f, op in p for g in (batch if f == BATCH else (f,))} for p in notation.pending)
    n = len(operands)
    return BoundRule(tuple(tensors_dims[:n]), tuple(tensors_dims[n:]), whole, pending, rule.linear, sizes, rule.local, rule.decompose)


def _batch_names(written: Sequence[Dims], shapes: Sequence[tuple[int, ...]]) -> tuple[str, ...]:
    for dims, shape in zip(written, shapes, strict=True):
        if (BATCH,) in dims:
            return tuple(f"~{i}" for i in range(len(shape) - len(dims) + 1))
    return ()


def _write_out(dims: Dims, batch: tuple[str, ...]) -> Dims:
    return tuple(f for dim in dims for f in ([(b,) for b in batch] if dim == (BATCH,) else [dim]))


def _zip_dims(dims: Dims, shape: tuple[int, ...], notation: Notation, name: str):
    if len(dims) != len(shape):
        raise RuleError(f"The rule {str(notation)!r} of {name} gives a tensor of shape {tuple(shape)} {len(dims)} dims.")
    return zip(dims, shape, strict=True)
