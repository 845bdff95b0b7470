"""Uneven dims of per-rank code: the last ranks' parts have fewer rows.

All ranks run one program on parts of one size. Dims are filled up before it; in it, a mask selects
the rank's own rows, as ``x[mask]`` does in any function (``tracing/selected``).
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from ftp.axis import (
    all_gather,
    all_reduce,
    all_to_all,
    axis_index,
    names_of,
    ppermute,
    reduce_scatter,
)
from ftp.context import set_within
from ftp.dataclass import dataclass
from ftp.errors import SpecError, TraceError
from ftp.ops.fill_up import cut_off, filled_up
from ftp.per_rank.sizes import number
from ftp.sharding.pytree import flatten
from ftp.sharding.spec import PartitionSpec
from ftp.source import at_line
from ftp.tracing.explain_errors import COPY
from ftp.tracing.same_values import holds_same
from ftp.tracing.selected_rows.group import SelectionGroup, group_of
from ftp.tracing.selected_rows.refused import refused
from ftp.tracing.selected_rows.selected import OF_ALL_ROWS, OF_ANY_DIM, Selected, select


@dataclass(frozen=True)
class UnevenCut:
    """A dim of ``size``, an int or a formula, that the ``n`` ranks of one axis cut in unequal
    parts.
    """

    dim: int
    axis: str
    size: int
    n: int

    def filled_up(self, x: Tensor) -> Tensor:
        return filled_up(x.movedim(self.dim, 0), self.axis, self.n).movedim(0, self.dim)

    def cut_off(self, x: Tensor, size: int) -> Tensor:
        found = cut_off(x.movedim(self.dim, 0), self.axis, self.n, size)
        return found.movedim(0, self.dim)

    def group(self, part: Tensor) -> SelectionGroup:
        """The mask of the rank's own rows."""
        rows = part.shape[self.dim]
        place = axis_index(self.axis) * rows + torch.arange(rows, device=part.device)
        return group_of(place < number(self.size))

    def own(self, part: Tensor, group: SelectionGroup) -> Selected:
        return Selected(select(part.movedim(self.dim, 0), group).rows, group, row_dim=self.dim)


def uneven_cut(
    shape: Sequence[int], spec: PartitionSpec, axes: Mapping[str, int]
) -> UnevenCut | None:
    """The dim that one axis cuts unevenly; None if there is none, or several."""
    found = [
        (cuts[0], UnevenCut(d, cuts[0].axis, size, n))
        for d, size in enumerate(shape)
        if len(cuts := spec.cuts(d)) == 1 and size % (n := axes[cuts[0].axis])
    ]
    return found[0][1] if len(found) == 1 and found[0][0].is_plain else None


def with_own_rows(
    fn: Callable[..., Any],
    cuts: Mapping[int, UnevenCut],
    names: Sequence[str],
    results: dict[int, UnevenCut],
) -> Callable[..., Any]:
    """``fn`` as a function of filled-up parts, which selects the rank's own rows before it calls
    ``fn``.

    Args:
        cuts: per leaf.
        names: of the leaves.
        results: filled with the cuts of the function's results, per leaf.
    """

    def run(*args: Any) -> Any:
        leaves, tree = flatten(args)
        groups: dict[tuple[str, int], tuple[SelectionGroup, UnevenCut]] = {}
        versions = {}
        for i, cut in cuts.items():  # one mask for all parts that are cut alike
            key = cut.axis, cut.size
            group, _ = groups[key] = groups.get(key) or (cut.group(leaves[i]), cut)
            leaves[i] = cut.own(leaves[i], group)
            versions[i] = leaves[i].rows._version
        with set_within(_known, list(groups.values())):
            made, of = flatten(fn(*tree.unflatten(leaves)))
            for i, version in versions.items():
                if leaves[i].rows._version != version:
                    raise TraceError(f"{at_line()}{names[i]} is changed in place. {COPY}")
            for i, x in enumerate(made):
                if isinstance(x, Selected) and (cut := _cut_of(x.group)) is not None:
                    results[i] = UnevenCut(x.row_dim, cut.axis, cut.size, cut.n)
                    made[i] = x.rows.movedim(0, x.row_dim)
        return of.unflatten(made)

    return run


_known: ContextVar[Sequence[tuple[SelectionGroup, UnevenCut]]] = ContextVar("uneven", default=())


def _cut_of(group: SelectionGroup) -> UnevenCut | None:
    """The cut whose rows a mask selects."""
    found = (cut for own, cut in _known.get() if own is group or holds_same(own.mask, group.mask))
    return next(found, None)


def check_result(cut: UnevenCut, spec: PartitionSpec, name: str) -> None:
    if cut.dim >= len(spec) or spec[cut.dim] != cut.axis:
        raise SpecError(
            f"{at_line()}{name} has out spec {spec}, and in dim {cut.dim} the rows of an uneven"
            f" part over {cut.axis!r}: name {cut.axis!r} for that dim."
        )


def _of_parts(collective: Callable[..., Any]) -> Callable[..., Any]:
    """The form of a collective for uneven parts: along axes that do not cut the rows; all_gather
    along the axis that does.
    """
    name, signature = collective.__name__, inspect.signature(collective)

    def of(group: SelectionGroup, x: Selected, *args: Any, **kwargs: Any) -> Any:
        given, cut = signature.bind(x, *args, **kwargs), _cut_of(group)
        if cut is None:
            raise refused(name)
        given.apply_defaults()
        over = names_of(given.arguments["axis"])
        dims = [d % x.ndim for key, d in given.arguments.items() if key.endswith("dim")]
        rows = x.rows.movedim(0, x.row_dim)
        if cut.axis not in over and x.row_dim not in dims:
            made = collective(rows, *args, **kwargs)
            return Selected(made.movedim(x.row_dim, 0), group, row_dim=x.row_dim)
        if collective is all_gather and over == (cut.axis,) and x.row_dim in dims:
            return all_gather(rows, *args, **kwargs).narrow(x.row_dim, 0, number(cut.size))
        raise TraceError(
            f"{at_line()}ftp.axis.{name} over {given.arguments['axis']!r} takes equal parts, and"
            f" dim {x.row_dim} has {cut.size} rows over the {cut.n} ranks of {cut.axis!r}. Reduce"
            f" the rows first, gather them by ftp.axis.all_gather(x, {cut.axis!r}, {x.row_dim}), or"
            " pad the dim."
        )

    return of


_COLLECTIVES = (all_reduce, all_gather, reduce_scatter, all_to_all, ppermute)
OF_ALL_ROWS.update({f.__name__: _of_parts(f) for f in _COLLECTIVES})
OF_ANY_DIM.update(f.__name__ for f in _COLLECTIVES)
