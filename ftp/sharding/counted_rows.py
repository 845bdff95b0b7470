"""Rows of a result whose number is known when a step has run, such as ``x[mask]``."""

from collections.abc import Callable
from typing import Any, NamedTuple

import optree

from ftp.sharding.pytree import NAMESPACE


class CountedRows(NamedTuple):
    """The first ``number`` of ``rows``, in the result of a traced function. Both are whole on every
    rank, which cuts the rows after the run.
    """

    rows: Any
    number: Any


def cut(result: Any) -> Any:
    """``result`` with tensors in the place of counted rows.

    >>> import torch
    >>> cut({"found": CountedRows(torch.arange(4), torch.tensor(2))})
    {'found': tensor([0, 1])}
    """
    return _mapped(lambda x: x.rows[: int(x.number)] if isinstance(x, CountedRows) else x, result)


def are_counted(tree: optree.PyTreeSpec) -> list[bool]:
    """Per leaf whether it belongs to counted rows.

    >>> from ftp.sharding.pytree import flatten
    >>> are_counted(flatten([CountedRows(1, 2), 3])[1])
    [True, True, False]
    """
    marked: list[bool] = []

    def mark(x: Any) -> None:
        marked.extend([True] * 2 if isinstance(x, CountedRows) else [False])

    _mapped(mark, tree.unflatten(range(tree.num_leaves)))
    return marked


def _mapped(fn: Callable[[Any], Any], tree: Any) -> Any:
    return optree.tree_map(
        fn, tree, is_leaf=lambda x: isinstance(x, CountedRows), namespace=NAMESPACE
    )
