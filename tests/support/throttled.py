"""Shared memory with a slow link on each mesh axis: a transport to compare plans' times on.

Every collective moves its data as always. Then the ranks sleep for as long as the bytes that a rank
sends of it take on the axis' link, so that nobody computes meanwhile and no core is busy.
"""

import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ftp import Link
from ftp.runtime import shared_memory
from ftp.runtime.shared_memory import SharedGroup
from ftp.sharding.mesh import Mesh
from ftp.sharding.process_group import product_groups


def sent(what: int, nbytes: int, n: int) -> int:
    """Bytes that each of ``n`` ranks sends, as a ring.

    Args:
        what: the kind, a number of `ftp.runtime.shared_memory`.
        nbytes: of an all-reduce the whole tensor, of a ring's step what is passed on, of any other
            the part that one rank gives to another.
    """
    if what == shared_memory._ALL_REDUCE:
        return 2 * (n - 1) * nbytes // n
    return nbytes if what == shared_memory._SHIFT else (n - 1) * nbytes


@contextlib.contextmanager
def throttled(mesh: Mesh, links: Mapping[str, Link]) -> Iterator[dict[str, list[int]]]:
    """What is issued through shared memory takes the time of its axis' link, the slowest where it
    is over several axes. Yields what this rank has sent: by the axes' names the bytes of each.
    """
    issue = SharedGroup._issue
    log: dict[str, list[int]] = {}

    def axes_of(group: SharedGroup) -> tuple[str, ...]:
        for axis, n in mesh.axes.items():
            if n > 1 and mesh.group_name(axis) == group.group.group_name:
                return (axis,)
        return next(axes for (_, axes), other in product_groups.items() if other == group.group)

    def slowly(
        self: SharedGroup,
        what: int,
        x: torch.Tensor | None,
        out: Any,
        each: int,
        op: str | int = "sum",
        dtype: torch.dtype | None = None,
    ) -> Any:
        found = issue(self, what, x, out, each, op, dtype)
        dtype = dtype or (None if x is None else x.dtype)
        assert dtype is not None
        nbytes, axes = sent(what, each * dtype.itemsize, self.ranks), axes_of(self)
        log.setdefault(" × ".join(axes), []).append(nbytes)
        link = min((links[axis] for axis in axes), key=lambda one: one.bandwidth)
        time.sleep(link.latency + nbytes / link.bandwidth)
        return found

    SharedGroup._issue = slowly  # type: ignore[method-assign]
    try:
        yield log
    finally:
        SharedGroup._issue = issue
