"""``ftp::choose``: the result of one of two branches, as of ``torch.cond``.

A program has the ops of both branches, each marked with its ``BranchPath``. By itself the graph
computes both branches and chooses one result. A runner of a rank's program skips the ops of the
branch that is not taken.
"""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from ftp.context import set_within
from ftp.ops.define import define

# From the outermost cond: its number and the side. The number is negative if both branches of the
# cond are computed.
BranchPath = tuple[tuple[int, bool], ...]

CHOOSE = define("choose(Tensor predicate, Tensor if_true, Tensor if_false, int number) -> Tensor")


@torch.library.impl("ftp::choose", "CompositeExplicitAutograd")
def _chosen(predicate: Tensor, if_true: Tensor, if_false: Tensor, number: int) -> Tensor:
    # A predicate that is read from a device would stop a recorded graph.
    return torch.where(predicate, if_true, if_false).contiguous()


def _chosen_of_each(
    info: Any, in_dims: Any, predicate: Tensor, if_true: Tensor, if_false: Tensor, number: int
) -> Any:
    assert in_dims[0] is None, "a predicate that is mapped over is no cond"
    results = []
    for side, x, dim in ((True, if_true, in_dims[1]), (False, if_false, in_dims[2])):
        with branch(number, side):
            results.append(
                x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)
            )
    return CHOOSE(predicate, *results, number), 0


torch.library.register_vmap("ftp::choose", _chosen_of_each)


_current: ContextVar[BranchPath] = ContextVar("ftp.ops.branch", default=())


def branch(number: int, side: bool) -> AbstractContextManager[BranchPath]:
    """Within the block mark traced ops as part of a branch."""
    return set_within(_current, (*_current.get(), (number, side)))


def current_branch() -> BranchPath:
    """The branch that is being traced."""
    return _current.get()


def number_of(target: Any, args: Sequence[Any]) -> int:
    """The number of the cond whose result a call chooses; negative for any other call."""
    return args[3] if target is CHOOSE else -1


def read_in(target: Any, args: Sequence[Any], branch: BranchPath, slot: int) -> BranchPath:
    """The branch in which a call in ``branch`` reads an operand: ``branch``, but a choice reads
    each result in that result's branch.
    """
    number = number_of(target, args)
    return (*branch, (number, slot == 1)) if number >= 0 and slot else branch


def common(branches: Iterable[BranchPath]) -> BranchPath:
    """The innermost branch that contains all the given branches."""
    first, *others = branches
    for other in others:
        shared = (i for i, (a, b) in enumerate(zip(first, other, strict=False)) if a != b)
        first = first[: next(shared, min(len(first), len(other)))]
    return first
