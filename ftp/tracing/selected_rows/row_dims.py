"""Find the dim of a function's result that holds selected rows, from the sharding rules of its ops:
if a rule lets a mesh axis cut a dim without a collective, the op acts on each row of that dim by
itself.
"""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import Any

import torch
from torch import Tensor

from ftp.dataclass import dataclass
from ftp.errors import RuleError
from ftp.rules.call import Call, Meta, replaced, tensors
from ftp.rules.notation import Dims
from ftp.rules.rule import BoundRule
from ftp.torch_internals.functorch import temporarily_clear_interpreter_stack
from ftp.torch_internals.modes import (
    DisableTorchFunction,
    TorchDispatchMode,
    disable_current_modes,
)
from ftp.torch_internals.op_types import decomposition_table

aten = torch.ops.aten
# The number of rows in a trial: a prime, so that its multiples among sizes are sizes of rows.
ROWS = 1_000_003
# Ops that depend on a row's position: their rules let rows be cut only because each rank knows
# which rows it has.
_BY_POSITION = (aten.tril.default, aten.triu.default)
# Functions of matrices: where no row is selected, they raise or give inf on the rows that fill in.
_OF_MATRICES = ("linalg_inv", "linalg_solve", "linalg_cholesky", "linalg_lu", "_linalg", "cholesky")
# Ops that take sizes. To others the number of rows is a value.
_SIZED = """
    view _unsafe_view reshape _reshape_alias expand repeat unflatten as_strided slice new_zeros
    new_ones new_full new_empty native_group_norm
"""
_OF_SIZES = frozenset(_SIZED.split())


@dataclass(frozen=True)
class RowDim:
    """The dim of a tensor that holds the rows, and the number of the dim's elements per row."""

    dim: int
    per_row: int = 1


@dataclass
class RowTrial:
    """The outcome of running a function on the shapes of rows.

    Attributes:
        result: the function's result, with a `RowDim` in place of each tensor; None if the function
            does not act on each row by itself.
        ops: the name and arguments of each op that the function runs.
        is_sum: whether its result is a sum over the rows.
    """

    result: Any = None
    ops: list[tuple[str, Sequence[Any]]] = field(default_factory=list)
    is_sum: bool = False


def try_rows(
    func: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    rows_of: Callable[[Any], tuple[Tensor, int] | None],
) -> RowTrial:
    """Run a function on shapes.

    Args:
        rows_of: of an argument that is a selection, its rows, which come first, and the dim at
            which the function sees them; else None.
    """
    mode = _RowDims()

    def on_meta(x: Any) -> Tensor:
        found = rows_of(x)
        if found is None:
            return torch.empty(x.shape, dtype=x.dtype, device="meta")
        rows, at = found
        made = torch.empty((ROWS, *rows.shape[1:]), dtype=rows.dtype, device="meta").movedim(0, at)
        mode.given(made, RowDim(at))
        return made

    def is_tensor(x: Any) -> bool:
        return isinstance(x, Tensor) or rows_of(x) is not None

    with (
        disable_current_modes(),
        temporarily_clear_interpreter_stack(),
        DisableTorchFunction(),
        torch.no_grad(),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        given, by_name = _mapped((list(args), dict(kwargs)), is_tensor, on_meta)
        try:
            with mode:
                out = func(*given, **by_name)
            if mode.are_summed:
                return RowTrial(is_sum=isinstance(out, Tensor) and not mode.is_of_rows(out))
            places = _mapped(out, lambda x: isinstance(x, Tensor), mode.of)
            return RowTrial(places, mode.ops)
        except (_JoinsRows, RuntimeError, TypeError, ValueError, IndexError, RuleError):
            return RowTrial()


def _mapped(tree: Any, is_leaf: Callable[[Any], bool], fn: Callable[[Any], Any]) -> Any:
    if is_leaf(tree):
        return fn(tree)
    if isinstance(tree, dict):
        return {key: _mapped(value, is_leaf, fn) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        made = [_mapped(value, is_leaf, fn) for value in tree]
        return made if isinstance(tree, list) else tuple(made)
    return tree


class _JoinsRows(Exception):
    """An op does not act on each row by itself, or its rule does not say so."""


class _RowDims(TorchDispatchMode):
    """Follows the dim of rows from op to op."""

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[int, tuple[Tensor, RowDim | None]] = {}  # the tensor keeps its id
        self._given: set[int] = set()
        self.are_summed = False  # by an op of the function
        self.ops: list[tuple[str, Sequence[Any]]] = []

    def given(self, x: Tensor, at: RowDim) -> None:
        """Note an operand of the function, which it must not write to."""
        self._given.add(_memory(x))
        self._known[id(x)] = x, at

    def is_of_rows(self, x: Tensor) -> bool:
        return id(x) in self._known

    def of(self, x: Tensor) -> RowDim:
        if (at := self._of(x)) is None:
            raise _JoinsRows
        return at

    def _of(self, x: Tensor) -> RowDim | None:
        """The dim of a tensor that holds rows; None if the tensor does not depend on rows.

        Raises:
            _JoinsRows: each element of the tensor depends on all rows.
        """
        if id(x) not in self._known:
            return None
        if (at := self._known[id(x)][1]) is None:
            raise _JoinsRows
        return at

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        operands = [*tensors((args, kwargs), Tensor)]
        places = [self._of(x) for x in operands]
        if not any(places):
            if "device" in kwargs:
                kwargs = {**kwargs, "device": "meta"}
            out = func(*args, **kwargs)
            if func is aten.expand.default:  # the same for each row
                at = [d for d, size in enumerate(out.shape) if _is_of_rows(size)]
                if len(at) == 1:
                    self._known[id(out)] = out, RowDim(at[0], out.shape[at[0]] // ROWS)
            return out
        name = func._schema.name.removeprefix("aten::")
        if func in _BY_POSITION or name.startswith(_OF_MATRICES):
            raise _JoinsRows
        if name not in _OF_SIZES and any(_is_of_rows(n) for n in tensors((args, kwargs), int)):
            raise _JoinsRows
        self.ops.append((name, args))
        out = func(*args, **kwargs)
        results = [*tensors(out, Tensor)]
        metas = replaced((list(args), dict(kwargs)), Tensor, Meta.of)
        op = self._out_of_place(func, args[0]) if func._schema.is_mutable else func
        from ftp.rules.bind import lookup  # few traces select rows

        rule = lookup(Call(op, tuple(metas[0]), metas[1], tuple(map(Meta.of, results))))
        if rule is None:
            return self._decomposed(func, args, kwargs)
        after = _rows_after(rule, places)
        if after is None:
            self.are_summed = True
            return out
        for x, at in zip(results, after, strict=True):
            if op is not func and at != self._of(x):
                raise _JoinsRows
            self._known[id(x)] = x, at
        return out

    def _out_of_place(self, func: Any, written: Any) -> Any:
        """The out-of-place form of an in-place op, if the op writes to a tensor that the function
        made.
        """
        name, overload = func._schema.name.removeprefix("aten::"), func._overloadname
        form = getattr(getattr(aten, name.removesuffix("_"), None), overload, None)
        if not isinstance(written, Tensor) or form is None or form is func:
            raise _JoinsRows
        if self._of(written) is None or _memory(written) in self._given:
            raise _JoinsRows
        return form

    def _decomposed(self, func: Any, args: Any, kwargs: Any) -> Any:
        by = decomposition_table.get(func, func.decompose)
        with self:
            out = by(*args, **kwargs)
        if out is NotImplemented:
            raise _JoinsRows
        return out


def _memory(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def _is_of_rows(number: int) -> bool:
    return number != 0 and number % ROWS == 0


def _rows_after(rule: BoundRule, places: Sequence[RowDim | None]) -> list[RowDim | None] | None:
    """The dim of rows in each result of a call, or None for a result that joins all rows. None in
    place of the list if every result is a sum over rows.

    Raises:
        _JoinsRows: the rule keeps the dim whole, or all results join its rows.
    """
    factors = {
        _rows_in(dims, at, rule.sizes)
        for dims, at in zip(rule.operands, places, strict=True)
        if at is not None
    }
    (rows, *others) = factors
    ringed = {f for pair in rule.ring for f in pair}
    plain = [d for d, at in zip(rule.operands, places, strict=True) if at is None]
    if others or rows is None or rows in rule.whole | ringed:
        raise _JoinsRows
    if any(rows in dim for dims in plain for dim in dims):
        raise _JoinsRows
    found: list[RowDim | None] = []
    for dims in rule.results:
        dim = next((d for d, dim in enumerate(dims) if rows in dim), None)
        if dim is None or _major(dims[dim], rule.sizes) != rows:
            found.append(None)
            continue
        size = math.prod(rule.sizes[f] for f in dims[dim])
        found.append(RowDim(dim, size // ROWS))
    if not any(found):
        if any(of.get(rows) != "sum" for of in rule.pending):
            raise _JoinsRows
        return None
    return found


def _rows_in(dims: Dims, at: RowDim, sizes: Mapping[str, int]) -> str | None:
    """The factor that holds the rows: the major one of their dim."""
    first = _major(dims[at.dim], sizes)
    return first if first is not None and sizes[first] % ROWS == 0 else None


def _major(dim: tuple[str, ...], sizes: Mapping[str, int]) -> str | None:
    return next((f for f in dim if sizes[f] != 1), None)
