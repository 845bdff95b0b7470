"""Collectives by mesh axis name, for per-rank code inside ``ftp.local``.

Each is one op until the program is partitioned. Its gradient is its exact transpose: a gradient
taken inside per-rank code is that of the sum of all ranks' outputs, with respect to this rank's
tensor.

>>> import torch
>>> import ftp
>>> from ftp import P
>>> mesh = ftp.simulated_mesh((2,), ("dp",))
>>> mean = ftp.local(lambda x: ftp.axis.all_reduce(x.mean(), "dp") / 2, mesh, P("dp"), P())
>>> step = ftp.spmd(lambda x: mean(x), mesh, P("dp"), P())
>>> step(torch.tensor([1.0, 2.0, 3.0, 6.0]))
tensor(3.)

All raise MeshError outside of ``ftp.local`` and for an axis that the mesh lacks, and InputError if
``x`` is not a tensor, a dim is out of range, or the ranks do not divide it.
"""

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from contextvars import ContextVar
from functools import wraps
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from ftp.context import set_within
from ftp.dataclass import dataclass
from ftp.errors import InputError, MeshError
from ftp.ops.axis_collectives import OPS, reduced
from ftp.ops.exchange_rows import EXCHANGE_ROWS
from ftp.ops.linear import linear
from ftp.source import at_line

Axes = str | Sequence[str]
_Collective = TypeVar("_Collective", bound=Callable[..., Tensor])


def _of_parts_too(collective: _Collective) -> _Collective:
    """A collective that an uneven part, which is no tensor, may carry out or refuse."""

    @wraps(collective)
    def call(x: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(x, Tensor) and has_torch_function_unary(x):
            return handle_torch_function(call, (x,), x, *args, **kwargs)
        return collective(x, *args, **kwargs)

    return call  # type: ignore[return-value]


@_of_parts_too
def all_reduce(x: Tensor, axis: Axes, op: Literal["sum", "max", "min"] = "sum") -> Tensor:
    """Reduce ``x`` over the ranks of ``axis``; every rank gets the result.

    Args:
        x: a tensor of one shape on all ranks.
        axis: a mesh axis, or several.
        op: with "max" and "min", ranks with tied values get equal shares of the gradient.

    Raises:
        MeshError: outside of ``ftp.local``; an axis that the mesh lacks.
        InputError: another ``op``; not a tensor.

    >>> import ftp
    >>> mesh = ftp.simulated_mesh(2, "tp")
    >>> total = ftp.local(lambda x: all_reduce(x.sum(), "tp"), mesh, ftp.P("tp"), ftp.P())
    >>> total(torch.arange(4))
    tensor(6)
    """
    for name, _ in reversed(_named("all_reduce", axis)):
        if op not in ("sum", "max", "min"):
            raise InputError(
                f"{at_line()}all_reduce has op={op!r}; it reduces by 'sum', 'max' or 'min'."
            )
        x = reduced(_tensor("all_reduce", x), op, name)
    return x


@_of_parts_too
def all_gather(x: Tensor, axis: Axes, dim: int = 0) -> Tensor:
    """Concatenate the ``x`` of the ranks of ``axis`` along ``dim``; every rank gets the result.

    Args:
        x: a tensor of one shape on all ranks, or an uneven part along ``dim``.
        axis: a mesh axis, or several, from major to minor.
        dim: multiplied by the number of ranks; that of an uneven part becomes the whole dim.

    >>> import ftp
    >>> mesh = ftp.simulated_mesh(2, "tp")
    >>> whole = ftp.local(lambda x: all_gather(x, "tp"), mesh, ftp.P("tp"), ftp.P())
    >>> whole(torch.arange(4))
    tensor([0, 1, 2, 3])
    """
    for name, n in reversed(_named("all_gather", axis)):
        d = _dim("all_gather", _tensor("all_gather", x), dim)
        x = linear(x, OPS.all_gather.default, name, n, d)
    return x


@_of_parts_too
def reduce_scatter(x: Tensor, axis: Axes, dim: int = 0) -> Tensor:
    """Sum ``x`` over the ranks of ``axis``; each rank gets its shard of the sum along ``dim``.

    Args:
        x: a tensor of one shape on all ranks.
        axis: a mesh axis, or several, from major to minor.
        dim: divided by the number of ranks, which must divide its size.

    >>> import ftp
    >>> mesh = ftp.simulated_mesh(2, "tp")
    >>> halves = ftp.local(lambda x: reduce_scatter(x, "tp"), mesh, ftp.P(), ftp.P("tp"))
    >>> halves(torch.arange(4))
    tensor([0, 2, 4, 6])
    """
    for name, n in _named("reduce_scatter", axis):
        d = _dim("reduce_scatter", _tensor("reduce_scatter", x), dim)
        _require_divides("reduce_scatter", x, d, name, n)
        x = linear(x, OPS.reduce_scatter.default, name, n, d)
    return x


@_of_parts_too
def all_to_all(
    x: Tensor,
    axis: str,
    split_dim: int = 0,
    concat_dim: int = 0,
    *,
    send_counts: Tensor | Sequence[int] | None = None,
    bound: int | None = None,
) -> Tensor:
    """Send chunk i of ``x`` along ``split_dim`` to rank i of ``axis``, and concatenate the chunks
    that arrive along ``concat_dim``.

    With ``send_counts`` the chunks are blocks of rows whose sizes are values: rows are sent in the
    order of their targets, and arrive in the order of their sources. The counts are sent first, so
    that errors are raised on all ranks before any row is sent. The gradient sends the rows back.

    Args:
        x: a tensor of one shape on all ranks.
        split_dim: divided by the number of ranks, which must divide its size.
        concat_dim: multiplied by the number of ranks; may be ``split_dim``.
        send_counts: numbers of rows (of dim 0) for each rank, integers of shape (ranks,). Rows
            after their sum are not sent.
        bound: number of rows of the result; rows at the end that do not arrive are zeros. Default:
            the rows of all ranks, which is always enough. The numbers of rows that arrive from each
            rank are ``all_to_all(send_counts, axis)``.

    Raises:
        InputError: ``bound`` without ``send_counts``, or counts with another dim than 0. When the
            program runs, on all ranks: more rows than ``bound`` for one rank; counts that are
            negative or exceed the rows of ``x``.

    >>> import ftp
    >>> mesh = ftp.simulated_mesh(2, "tp")
    >>> swap = ftp.local(lambda x: all_to_all(x, "tp", 1, 0), mesh, ftp.P("tp"), ftp.P(None, "tp"))
    >>> swap(torch.arange(4).view(2, 2))  # the same global tensor, sharded on dim 1 now
    tensor([[0, 1],
            [2, 3]])
    >>> def send(x, counts):
    ...     return all_to_all(x, "tp", send_counts=counts, bound=3)
    >>> send = ftp.local(send, mesh, ftp.P("tp"), ftp.P("tp"))
    >>> send(torch.tensor([1, 2, 3, 4]), torch.tensor([0, 2, 1, 1]))  # rank 0 keeps none
    tensor([3, 0, 0, 1, 2, 4])
    """
    ((name, n),) = _named("all_to_all", (axis,))
    split, concat = (
        _dim("all_to_all", _tensor("all_to_all", x), split_dim),
        _dim("all_to_all", x, concat_dim),
    )
    if send_counts is not None:
        if split or concat:
            raise InputError(
                f"{at_line()}ftp.axis.all_to_all has send_counts, which count rows of dim 0, with"
                f" split_dim={split_dim} and concat_dim={concat_dim}. Move the dim to the front."
            )
        return _exchange(x, name, n, send_counts, bound)
    if bound is not None:
        raise InputError(
            f"{at_line()}ftp.axis.all_to_all has bound={bound} without send_counts: without counts"
            " as many rows arrive as are sent. Leave bound out."
        )
    _require_divides("all_to_all", x, split, name, n)
    if split != concat:
        return linear(x, OPS.all_to_all.default, name, n, split, concat)
    parts = x.unflatten(split, (1, n, x.shape[split] // n))
    parts = linear(parts, OPS.all_to_all.default, name, n, split + 1, split)
    return parts.flatten(split, split + 2)


def _exchange(
    x: Tensor, axis: str, n: int, send_counts: Tensor | Sequence[int], bound: int | None
) -> Tensor:
    counts = torch.as_tensor(send_counts, device=x.device)
    if counts.shape != (n,) or counts.dtype.is_floating_point or counts.dtype.is_complex:
        raise InputError(
            f"{at_line()}ftp.axis.all_to_all has send_counts of shape {tuple(counts.shape)} and"
            f" dtype {counts.dtype}; it takes {n} integers, one for each rank of axis {axis!r}."
        )
    if bound is not None and (not isinstance(bound, int | torch.SymInt) or bound < 0):
        raise InputError(
            f"{at_line()}ftp.axis.all_to_all has bound={bound!r}; it takes a number of rows."
        )
    every = all_gather(counts.to(torch.int64)[None], axis)
    size = n * x.shape[0] if bound is None else bound
    return linear(x, EXCHANGE_ROWS, every, axis, n, size, False)


@_of_parts_too
def ppermute(x: Tensor, axis: str, perm: Sequence[tuple[int, int]]) -> Tensor:
    """Send ``x`` between ranks of ``axis`` by a permutation.

    Args:
        x: a tensor of one shape on all ranks.
        perm: pairs ``(source, target)`` of ranks; each is a source and a target at most once. A
            rank that is no target gets zeros.

    >>> import ftp
    >>> mesh, ring = ftp.simulated_mesh(3, "tp"), [(0, 1), (1, 2), (2, 0)]
    >>> shift = ftp.local(lambda x: ppermute(x, "tp", ring), mesh, ftp.P("tp"), ftp.P("tp"))
    >>> shift(torch.arange(3))
    tensor([2, 0, 1])

    Source: JAX, ``jax.lax.ppermute``.
    """
    ((name, n),) = _named("ppermute", (axis,))
    pairs: list[tuple[int, ...]] = [()]
    with suppress(TypeError):
        pairs = [tuple(map(operator.index, pair)) for pair in perm]
    if any(len(p) != 2 or not all(0 <= i < n for i in p) for p in pairs):
        raise InputError(
            f"{at_line()}ppermute has perm={perm!r}; it takes pairs (from, to) of ranks 0 to"
            f" {n - 1} of axis {name!r}."
        )
    sources, targets = [p[0] for p in pairs], [p[1] for p in pairs]
    if len(set(sources)) < len(pairs) or len(set(targets)) < len(pairs):
        raise InputError(
            f"{at_line()}ppermute has perm={pairs!r}; each rank sends at most once and receives at"
            " most once."
        )
    flat = tuple(i for pair in sorted(pairs) for i in pair)
    return linear(_tensor("ppermute", x), OPS.ppermute.default, name, n, flat)


def axis_index(axis: Axes) -> Tensor:
    """This rank's index along ``axis``, a 0-d int64 tensor; of several axes, from major to minor.

    It has no value while tracing; index with it by ``x.index_select(0, i[None])``.

    >>> import ftp
    >>> mesh = ftp.simulated_mesh(3, "tp")
    >>> ranks = ftp.local(lambda x: x + axis_index("tp"), mesh, ftp.P("tp"), ftp.P("tp"))
    >>> ranks(torch.zeros(3, dtype=torch.int64))
    tensor([0, 1, 2])
    """
    index: Any = 0
    for name, n in _named("axis_index", axis):
        index = index * n + _current("axis_index").index[name]
    return index


def axis_size(axis: Axes) -> int:
    """The number of ranks of ``axis``; the product for several axes.

    >>> import ftp
    >>> mesh = ftp.simulated_mesh(3, "tp")
    >>> ftp.local(lambda x: x * axis_size("tp"), mesh)(torch.ones(1))
    tensor([3.])
    """
    total = 1
    for _, n in _named("axis_size", axis):
        total *= n
    return total


# The mesh inside ftp.local.


@dataclass(frozen=True)
class Inside:
    """Sizes of the mesh axes, and this rank's index on each."""

    axes: Mapping[str, int]
    index: Mapping[str, Tensor]


_inside: ContextVar[Inside | None] = ContextVar("ftp.axis", default=None)


def entered(inside: Inside) -> AbstractContextManager[Inside]:
    """Run per-rank code inside the block."""
    return set_within(_inside, inside)


def is_inside() -> bool:
    return _inside.get() is not None


def _current(what: str) -> Inside:
    inside = _inside.get()
    if inside is None:
        raise MeshError(
            f"{at_line()}ftp.axis.{what} is for one rank's code: it works in a function given to"
            " ftp.local only. Elsewhere a tensor is"
            " global, and collectives follow from specs."
        )
    return inside


def names_of(axis: Axes) -> tuple[str, ...]:
    return (axis,) if isinstance(axis, str) or not isinstance(axis, Iterable) else tuple(axis)


def _named(what: str, axis: Axes) -> list[tuple[str, int]]:
    names = names_of(axis)
    axes = _current(what).axes
    for name in names:
        if not isinstance(name, str):
            raise InputError(
                f"{at_line()}ftp.axis.{what} takes the name of a mesh axis, or a tuple of names,"
                f" not {axis!r}."
            )
        if name not in axes:
            known = ", ".join(f"{a!r} (size {n})" for a, n in axes.items())
            raise MeshError(
                f"{at_line()}ftp.axis.{what} names axis {name!r}, but the mesh of ftp.local has"
                f" {known}."
            )
    if len(set(names)) < len(names):
        raise InputError(f"{at_line()}ftp.axis.{what} names an axis twice: {names}.")
    return [(name, axes[name]) for name in names]


def _tensor(what: str, x: Any) -> Tensor:
    if not isinstance(x, Tensor):
        raise InputError(
            f"{at_line()}ftp.axis.{what} takes a tensor, not {x!r}. Map it over the leaves of a"
            " tree."
        )
    return x


def _dim(what: str, x: Tensor, dim: int) -> int:
    if not -x.ndim <= dim < x.ndim:
        raise InputError(
            f"{at_line()}ftp.axis.{what} has dim {dim}, but its tensor has {x.ndim} dims, shape"
            f" {tuple(x.shape)}."
        )
    return dim % x.ndim


def _require_divides(what: str, x: Tensor, dim: int, axis: str, n: int) -> None:
    if x.shape[dim] % n:
        raise InputError(
            f"{at_line()}ftp.axis.{what} cuts dim {dim} of a tensor of shape {tuple(x.shape)} in"
            f" {n}, the size of axis {axis!r}, which does"
            " not divide it. Pad the dim."
        )
