"""Short forms: one line states the rule of every op of a family."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from ftp.errors import RuleError
from ftp.rules.call import Call, Meta
from ftp.rules.dims import (
    acting_on,
    all_whole,
    broadcast_notation,
    core_dims,
    factors,
    numbered,
    reduced,
)
from ftp.rules.notation import BATCH, PENDING, Dims, Notation, parse
from ftp.rules.registry import LinearGroups, linear_groups, register
from ftp.rules.rule import LocalHook, Rule
from ftp.torch_internals.op_types import OpOverload


def einsum(*ops: "OpOverload | str") -> None:
    """Rule of an einsum: factors that no result has are summed over; linear in each operand.

    Args:
        ops: op overloads, then the text.

    Raises:
        RuleError: what is given as an op is no op overload, or the text does not parse.

    >>> import torch
    >>> einsum(torch.ops.aten.mm.default, "m k, k n -> m n")
    """
    targets, notation = _with_text(ops)
    kept = factors(*notation.results)
    summed = tuple(
        dict.fromkeys(
            (f, "sum") for dims in notation.operands for dim in dims for f in dim if f not in kept
        )
    )
    n = len(notation.operands)
    register(
        targets,
        Rule(
            replace(notation, pending=(summed,) * len(notation.results)),
            tuple((i,) for i in range(n)),
        ),
    )


def _with_text(ops: Sequence[Any]) -> tuple[Sequence[Any], Notation]:
    if not ops or not isinstance(ops[-1], str):
        raise RuleError("Give ops, and last the text of their rule, such as 'm k, k n -> m n'.")
    return ops[:-1], parse(ops[-1])


def pointwise(
    *ops: OpOverload,
    linear: LinearGroups = (),
    local: LocalHook | None = None,
    if_zero: str | None = None,
) -> None:
    """Elementwise ops; operands broadcast to the result from the right.

    Args:
        ops: op overloads.
        linear: groups of operands that may be pending sums together.
        local: emits the op's local form.
        if_zero: the argument that must be 0, if it is a number, for ``linear`` to hold: each rank
            would add any other value once. Groups are without it then.

    Raises:
        RuleError: what is given as an op is no op overload.

    >>> import torch
    >>> aten = torch.ops.aten
    >>> pointwise(aten.mul.Tensor, linear=[(0,), (1,)])
    >>> pointwise(aten.masked_fill.Scalar, linear=[(0,)], if_zero="value")
    """
    groups = linear_groups(linear)

    def maker(call: Call) -> Rule:
        notation = broadcast_notation(
            [m.shape for m in call.operands], [m.shape for m in call.results]
        )
        number = Meta(()) if if_zero is None else call.arg(if_zero)
        if isinstance(number, Meta):
            present = tuple(g for g in groups if max(g) < len(call.operands))
        elif type(number) in (bool, int, float) and number == 0:
            present = tuple(tuple(i for i in g if i < len(call.operands)) for g in groups)
        else:
            present = ()
        return Rule(notation, present, local)

    register(ops, maker)


def reduction(
    *ops: OpOverload,
    op: str | None = "sum",
    linear: LinearGroups = (),
    local: LocalHook | None = None,
) -> None:
    """Ops over ``dim`` (all dims if it is missing, None or empty) with ``keepdim``; ``op=None``:
    the reduced dims stay whole.

    Args:
        ops: op overloads.
        op: how ranks' results are reduced where a reduced dim is cut: ``sum``, ``max``, ``min``.
        linear: groups of operands that may be pending sums together.
        local: emits the op's local form.

    Raises:
        RuleError: what is given as an op is no op overload.

    >>> import torch
    >>> reduction(torch.ops.aten.prod.default, op=None)
    """
    groups = linear_groups(linear)
    if op is not None and op not in PENDING:
        raise RuleError(f"op={op!r}: ranks' results are reduced by {', '.join(PENDING)}.")
    register(ops, lambda call: reduced(call, op, groups, local))


def along_dim(
    *ops: "OpOverload | str",
    linear: "LinearGroups | Literal['all']" = (),
    local: LocalHook | None = None,
    dim: "str | Sequence[str] | int" = "dim",
    if_zero: str | None = None,
) -> None:
    """Ops that act along the dim that an argument names, or the dims that several name.

    The text's dims beside ``...`` stand for the dims that the arguments name. A tensor that has
    them all has them at these positions, and its further dims at its end. The last tensor of a text
    stands for each member of a list. Batch dims that differ in size between tensors are whole. If a
    call's tensors do not have the text's numbers of dims, all dims are whole.

    Args:
        ops: op overloads, then the text.
        linear: groups of operands that may be pending sums together; "all" for all operands in one.
        local: emits the op's local form.
        dim: the arguments that name the dims, or a dim itself.
        if_zero: the argument that must be 0 for ``linear`` to hold.

    Raises:
        RuleError: what is given as an op is no op overload, or the text does not parse.

    >>> import torch
    >>> aten = torch.ops.aten
    >>> along_dim(aten._softmax.default, "... [d] -> ... [d]")
    >>> along_dim(aten.diagonal.default, "... [a] [b] -> ... [y]", dim=("dim1", "dim2"))
    """
    targets, notation = _with_text(ops)
    fixed = "all" if linear == "all" else linear_groups(linear)
    given = [dim] if isinstance(dim, str | int) else list(dim)

    def maker(call: Call) -> Rule:
        groups: LinearGroups = [range(len(call.operands))] if isinstance(fixed, str) else fixed
        if if_zero is not None and call.arg(if_zero) != 0:
            groups = ()
        placed = _placed(notation, call, [call.arg(d) if isinstance(d, str) else d for d in given])
        if placed is None:
            return all_whole(call, groups)
        return Rule(placed, tuple(map(tuple, groups)), local)

    register(targets, maker)


def _placed(notation: Notation, call: Call, dims: Sequence[int]) -> Notation | None:
    """The text with its dims moved to the positions ``dims``; None if it does not fit."""
    n = len(call.operands)
    metas = (*call.operands, *call.results)
    written = (*_repeated(notation.operands, n), *_repeated(notation.results, len(call.results)))
    if len(written) != len(metas):
        return None
    inside = [[dim for dim in text if dim != (BATCH,)] for text in written]
    has_batch = [(BATCH,) in text for text in written]
    ranks = {
        (batch, m.ndim - len(own))
        for batch, own, m in zip(has_batch, inside, metas, strict=True)
        if batch or m.ndim != len(own)
    }
    if len(ranks) != 1:
        return None
    ((is_batch, batch_ndim),) = ranks
    if not is_batch or batch_ndim < 0:
        return None
    ndim = batch_ndim + len(dims)
    at = [d % ndim for d in dims]
    if len(set(at)) < len(at):
        return None
    sizes: list[set[int]] = [set() for _ in range(batch_ndim)]
    own_sizes: dict[Any, int] = {}
    tensors: list[list[Any]] = []
    for batch, own, meta in zip(has_batch, inside, metas, strict=True):
        places = dict(zip(at, own, strict=False)) if batch and len(own) >= len(at) else {}
        numbers = iter(range(batch_ndim if batch else 0))
        body = [
            places[d] if d in places else next(numbers)
            for d in range(batch_ndim + len(places) if batch else 0)
        ]
        tensor = [*body, *own[len(places) :]] if batch else list(own)
        for dim, size in zip(tensor, meta.shape, strict=True):
            if isinstance(dim, int):
                sizes[dim].add(size)
            elif len(dim) == 1 and own_sizes.setdefault(dim, size) != size:
                return None
        tensors.append(tensor)
    differ = {i for i, found in enumerate(sizes) if len(found) > 1}
    named: list[Dims] = [
        tuple(
            dim if isinstance(dim, tuple) else (f"~{dim}_{t}",) if dim in differ else (f"~{dim}",)
            for dim in tensor
        )
        for t, tensor in enumerate(tensors)
    ]
    own_batch = {f"~{i}_{t}" for i in differ for t in range(len(metas))}
    pending = (*notation.pending, *notation.pending[-1:] * len(call.results))[: len(call.results)]
    return Notation(tuple(named[:n]), tuple(named[n:]), notation.whole | own_batch, pending)


def _repeated(written: tuple[Dims, ...], n: int) -> tuple[Dims, ...]:
    """The texts of ``n`` tensors, the last one repeated for the members of a list."""
    return (*written, *written[-1:] * (n - len(written)))


def along_dims(
    *ops: OpOverload, dims: str = "dim", linear: LinearGroups = (), local: LocalHook | None = None
) -> None:
    """Ops that act along the dims that an argument lists, in which tensors may differ in size; an
    empty list means all dims. The other dims correspond.

    >>> import torch
    >>> along_dims(torch.ops.aten.flip.default, dims="dims", linear=[(0,)])
    """

    def maker(call: Call) -> Rule:
        at = call.arg(dims)
        at = [at] if isinstance(at, int) else at or range(call.operands[0].ndim)
        return acting_on(call, at, linear, local)

    register(ops, maker)


def batched(
    *ops: OpOverload, core: int, linear: LinearGroups = (), local: LocalHook | None = None
) -> None:
    """Ops on the last ``core`` dims of the first operand, as a NumPy gufunc: the dims before them
    are a batch that all tensors share; every tensor's core dims are whole and its own. Integers,
    whose means are rounded, take no pending sums.

    >>> import torch
    >>> from ftp.rules.local_forms import unless_empty
    >>> local = unless_empty()
    >>> batched(torch.ops.aten.avg_pool2d.default, core=2, linear=[(0,)], local=local)
    """

    def maker(call: Call) -> Rule:
        x = call.operands[0]
        is_rounded = not (x.dtype.is_floating_point or x.dtype.is_complex)
        return core_dims(call, x.ndim - core, () if is_rounded else linear, local)

    register(ops, maker)


def whole(*ops: OpOverload, linear: LinearGroups = ()) -> None:
    """Ops that keep all dims whole.

    >>> import torch
    >>> whole(torch.ops.aten.bincount.default)
    """
    register(ops, lambda call: all_whole(call, linear))


def like(
    *ops: OpOverload, local: LocalHook, linear: LinearGroups = (), if_zero: str | None = None
) -> None:
    """Ops that use only the dtype and device of their operand. Its dims are matched with the
    result's by size, so that it need not be gathered.

    >>> import torch
    >>> from ftp.rules.local_forms import with_shape
    >>> like(torch.ops.aten.new_empty.default, local=with_shape(1))
    """

    def maker(call: Call) -> Rule:
        x, (y,) = call.operands[0], call.results
        operand = tuple(
            (f"~{d}",) if d < y.ndim and y.shape[d] == s else (f"x{d}",)
            for d, s in enumerate(x.shape)
        )
        is_linear = if_zero is None or call.arg(if_zero) == 0
        return Rule(
            Notation((operand,), (numbered(y.ndim),), frozenset(), ((),)),
            tuple(map(tuple, linear)) if is_linear else (),
            local,
        )

    register(ops, maker)
