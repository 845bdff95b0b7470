"""The sharding rule of each aten op: how its tensor dims share factors.

A rule knows nothing of meshes, ranks, uneven shards, dtypes or cost; strategies, prices, plans,
printouts and tests are derived from it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch._ops import OpOverload

from ftp.errors import RuleError
from ftp.rules.forms import broadcast_notation, reduction_rule
from ftp.rules.notation import BATCH, Dims, Notation, parse
from ftp.rules.rule import Call, LocalHook, Rule

# Torch has no kernels that mask and add these: no value of such a dtype is a pending reduction.
NEVER_ADDED = frozenset(
    {
        torch.uint16,
        torch.uint32,
        torch.uint64,
        *(d for d in vars(torch).values() if str(d).startswith("torch.float8")),
    }
)


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


def rule(
    *ops: "OpOverload | str",
    linear: Sequence[Sequence[int]] = (),
    local: LocalHook | None = None,
    decompose: bool = True,
) -> Any:
    """State the sharding rule of ``ops`` in factor notation, or decorate a function ``(call: Call)
    -> Rule | str`` that does.

    Args:
        ops: the ops, and last the text, where no function is decorated.
        linear: groups of operands that may be pending sums together, giving a pending sum.
        local: computes a rank's form of the op, where it is not the op itself.
        decompose: whether the op may be taken apart where the rule leaves a cut dim whole.

    Raises:
        RuleError: where the text does not parse.

    >>> rule(torch.ops.aten.mv.default, "m k, k -> m {k}", linear=[(0,), (1,)])
    """
    *targets, last = ops
    if isinstance(last, str):
        _register(targets, make(last, linear=linear, local=local, decompose=decompose))
        return None

    def decorate(maker: RuleMaker) -> RuleMaker:
        def made(call: Call) -> Rule | None:
            found = maker(call)
            return (
                make(found, linear=linear, local=local, decompose=decompose)
                if isinstance(found, str)
                else found
            )

        _register(ops, made)
        return maker

    return decorate


def einsum(*ops: "OpOverload | str") -> None:
    """A product: factors that no result has are summed over; linear in each operand.

    Args:
        ops: the ops, then the text: ``"m k, k n -> m n"``, a letter for each dim.

    Raises:
        RuleError: the text does not parse, or is not of the ops.

    >>> einsum(torch.ops.aten.mm.default, "m k, k n -> m n")
    """
    *targets, text = ops
    notation = parse(text)  # type: ignore[arg-type]
    kept = {f for dims in notation.results for dim in dims for f in dim}
    summed = tuple(
        dict.fromkeys(
            (f, "sum") for dims in notation.operands for dim in dims for f in dim if f not in kept
        )
    )
    n = len(notation.operands)
    _register(
        targets,
        Rule(
            replace(notation, pending=(summed,) * len(notation.results)),
            tuple((i,) for i in range(n)),
        ),
    )


def pointwise(
    *ops: OpOverload, linear: Sequence[Sequence[int]] = (), local: LocalHook | None = None
) -> None:
    """Elementwise ops; operands broadcast to the result from the right.

    Args:
        ops: the ops.
        linear: groups of operands that may be pending sums together, giving a pending sum.
        local: computes a rank's form of the op, where it is not the op itself.

    Raises:
        RuleError: what is given is no op.

    >>> pointwise(torch.ops.aten.sub.Tensor, linear=[(0, 1)])
    """
    groups = tuple(map(tuple, linear))

    def maker(call: Call) -> Rule:
        return Rule(
            broadcast_notation([m.shape for m in call.operands], [m.shape for m in call.results]),
            _present(groups, call),
            local,
        )

    _register(ops, maker)


def _present(groups: tuple[tuple[int, ...], ...], call: Call) -> tuple[tuple[int, ...], ...]:
    """The groups that the call has; bools do not add up."""
    n = len(call.operands)
    return tuple(
        g for g in groups if all(i < n and call.operands[i].dtype is not torch.bool for i in g)
    )


def reduction(
    *ops: OpOverload,
    op: str | None = "sum",
    linear: Sequence[Sequence[int]] = (),
    local: LocalHook | None = None,
) -> None:
    """Ops over ``dim`` (all dims where it is missing, None or empty) with ``keepdim``;
    ``op=None``: the reduced dims stay whole.

    Args:
        ops: the ops.
        op: how ranks' results of a part of the dims are combined: "sum", "max", "min".
        linear: groups of operands that may be pending sums together, giving a pending sum.
        local: computes a rank's form of the op, where it is not the op itself.

    Raises:
        RuleError: what is given is no op.

    >>> reduction(torch.ops.aten.amax.default, op="max")
    """

    def maker(call: Call) -> Rule:
        return reduction_rule(call, op, linear, local)

    _register(ops, maker)


def along_dim(
    *ops: "OpOverload | str",
    linear: Sequence[Sequence[int]] = (),
    local: LocalHook | None = None,
    dim: str = "dim",
) -> None:
    """Ops that act along their argument ``dim``; the text's one [d] stands for that dim wherever
    it is.

    Args:
        ops: the ops, then the text: ``"... [d] -> ... [d]"``.
        linear: groups of operands that may be pending sums together, giving a pending sum.
        local: computes a rank's form of the op, where it is not the op itself.
        dim: the name of the argument.

    Raises:
        RuleError: the text does not parse.

    >>> along_dim(torch.ops.aten.cumsum.default, "... [d] -> ... [d]", linear=[(0,)])
    """
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
            return Rule(
                Notation(
                    ((),) * len(notation.operands),
                    ((),) * len(notation.results),
                    frozenset(),
                    notation.pending,
                )
            )
        placed = replace(
            notation,
            operands=tuple(map(place, notation.operands)),
            results=tuple(map(place, notation.results)),
        )
        return Rule(placed, tuple(map(tuple, linear)), local)

    _register(targets, maker)


def _register(ops: Sequence[Any], entry: Rule | RuleMaker) -> None:
    if not ops:
        raise RuleError("A rule names at least one op, such as torch.ops.aten.mm.default.")
    for op in ops:
        if not isinstance(op, OpOverload):
            raise RuleError(
                f"A rule is for an op overload such as torch.ops.aten.mm.default, not {op!r}"
                f" ({type(op).__name__})."
            )
        RULES[op] = entry
