"""A rule fitted to a call: every factor's size."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import fx

from ftp.errors import RuleError
from ftp.rules.call import Call, Meta, replaced
from ftp.rules.notation import BATCH, Dims, Notation
from ftp.rules.own import RULES
from ftp.rules.rule import BoundRule, Rule
from ftp.torch_internals.op_types import OpOverload

# Dtypes that torch has no kernels to mask and add: a value of such a dtype is never pending.
NEVER_ADDED = frozenset(
    {
        torch.uint16,
        torch.uint32,
        torch.uint64,
        *(d for d in vars(torch).values() if str(d).startswith("torch.float8")),
    }
)


def lookup(call: Call) -> BoundRule | None:
    """The rule of a call with all sizes known; None if none is stated.

    Raises:
        RuleError: the rule does not fit the call's tensors.
    """
    entry = RULES.get(call.target)
    found = entry if isinstance(entry, Rule) or entry is None else entry(call)
    if found is None:
        return None
    operands, results = call.operands, call.results
    shapes = [m.shape for m in operands], [m.shape for m in results]
    bound = replace(bind(found, *shapes, str(call.target)), call=call)  # type: ignore[arg-type]
    if bound.linear and len(results) == 1:
        made = results[0].dtype
        linear = tuple(
            group
            for group in bound.linear
            if all(i >= len(operands) or _adds_up(operands[i].dtype, made) for i in group)
        )
        if len(linear) < len(bound.linear):
            bound = replace(bound, linear=linear)
    # Of no elements every rank's part starts at 0, so that none of them is the first.
    summed = {
        f
        for m, pending in zip(results, bound.pending, strict=True)
        for f in pending
        if m.dtype in NEVER_ADDED or bound.sizes[f] == 0
    }
    linear = () if any(m.dtype in NEVER_ADDED for m in results) else bound.linear
    return replace(bound, whole=bound.whole | summed, linear=linear)


def rule_of(call: Call) -> BoundRule | None:
    """The rule of a call; None if none is stated, or if it does not fit the tensors."""
    try:
        return lookup(call)
    except RuleError:
        return None


def rule_of_node(node: fx.Node) -> BoundRule | None:
    """The rule of a traced call, as ``rule_of``; None for a node that is no op."""
    if not isinstance(node.target, OpOverload):
        return None
    args, kwargs = replaced(
        (node.args, dict(node.kwargs)), fx.Node, lambda n: Meta.of(n.meta["val"])
    )
    val = node.meta["val"]
    results = tuple(map(Meta.of, val if isinstance(val, list | tuple) else [val]))
    return rule_of(Call(node.target, args, kwargs, results))


def _adds_up(given: torch.dtype, made: torch.dtype) -> bool:
    """Whether the terms of a sum, each as another dtype, add up to the sum as that dtype. Floats
    are rounded to integers, and a sum of integers may wrap around where its terms do not.
    """
    if given.is_floating_point or given.is_complex:
        return made.is_floating_point or made.is_complex
    return given is made


def bind(
    rule: Rule,
    operands: Sequence[tuple[int, ...]],
    results: Sequence[tuple[int, ...]],
    name: str = "the op",
) -> BoundRule:
    """Fit a rule to shapes: write out ``...`` and find every factor's size."""
    notation = rule.notation
    if len(notation.operands) != len(operands) or len(notation.results) != len(results):
        raise RuleError(
            f"The rule {str(notation)!r} of {name} has {len(notation.operands)} operands and"
            f" {len(notation.results)} results;"
            f" the call has {len(operands)} and {len(results)}."
        )
    shapes = [*operands, *results]
    written = [*notation.operands, *notation.results]
    batch = _batch_names(written, shapes)
    tensors_dims = [_write_out(dims, batch) for dims in written]
    sizes = dict(rule.sizes)
    waiting = [
        (dim, size)
        for dims, shape in zip(tensors_dims, shapes, strict=True)
        for dim, size in _zip_dims(dims, shape, notation, name)
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
            is_resized = dim and rule.resized.issuperset(dim)
            found = math.prod(sizes[f] for f in dim)
            # Of formulas that differ the op needs sizes at which they are equal: a condition.
            if found != size and not is_resized and found - size != 0:
                raise RuleError(
                    f"The rule {str(notation)!r} of {name} does not fit shapes {operands} ->"
                    f" {results}: dim {dim} is of size {size}."
                )
        if len(left) == len(waiting):
            raise RuleError(
                f"The rule {str(notation)!r} of {name} leaves the sizes of {left[0][0]} open for"
                f" shapes {operands} -> {results}."
            )
        waiting = left
    whole = frozenset(
        itertools.chain.from_iterable(batch if f == BATCH else (f,) for f in notation.whole)
    )
    pending = tuple(
        {g: op for f, op in p for g in (batch if f == BATCH else (f,))} for p in notation.pending
    )
    n = len(operands)
    return BoundRule(
        tuple(tensors_dims[:n]),
        tuple(tensors_dims[n:]),
        whole,
        pending,
        rule.linear,
        sizes,
        rule.local,
        rule.decompose,
        ring=rule.ring,
        sees=rule.sees,
        together=rule.together,
        exchange=rule.exchange,
    )


def _batch_names(written: Sequence[Dims], shapes: Sequence[tuple[int, ...]]) -> tuple[str, ...]:
    for dims, shape in zip(written, shapes, strict=True):
        if (BATCH,) in dims:
            return tuple(f"~{i}" for i in range(len(shape) - len(dims) + 1))
    return ()


def _write_out(dims: Dims, batch: tuple[str, ...]) -> Dims:
    return tuple(f for dim in dims for f in ([(b,) for b in batch] if dim == (BATCH,) else [dim]))


def _zip_dims(dims: Dims, shape: tuple[int, ...], notation: Notation, name: str):
    if len(dims) != len(shape):
        raise RuleError(
            f"The rule {str(notation)!r} of {name} gives a tensor of shape {tuple(shape)}"
            f" {len(dims)} dims."
        )
    return zip(dims, shape, strict=True)
