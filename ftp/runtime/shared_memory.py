"""Collectives through memory that ranks on one machine share, in place of gloo's sockets; with
``FTP_SHM=1``.

The ranks of a mesh agree once, through the store, whether all of them can use it: they must be on
one host, have a C compiler, and reserve the memory. If one cannot, all use gloo and warn. The
memory has no name in a file system, so none is left over, however the ranks end. If a rank dies, is
late, or is told to stop, the others raise.
"""

import ctypes
import math
import mmap
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from ftp.distributed.interrupt import interrupts
from ftp.ops.define import define, like, register_fake
from ftp.ops.exchange_rows import ALL_TO_ALL_ROWS, as_bytes, by_rank, checked_counts
from ftp.ops.rings import SENDING
from ftp.ops.sends import Send, SendingOp, run
from ftp.passes.aliasing import WAIT
from ftp.passes.copy_elimination import copied
from ftp.runtime.shared_pages import HEADER_BYTES, failure_of, with_shared_memory
from ftp.sharding.mesh import Mesh
from ftp.sharding.process_group import releases
from ftp.torch_internals.op_types import OpOverload

c10d = torch.ops._c10d_functional
SLOT_BYTES = 4 << 20  # bytes that hold a part of a tensor; each rank has two slots
_KINDS = {torch.float32: 0, torch.float64: 1, torch.int64: 2}
_OPS = {"sum": 0, "max": 1, "min": 2}
_ALL_REDUCE, _ALL_GATHER, _REDUCE_SCATTER, _ALL_TO_ALL, _SHIFT = range(5)


class SharedGroup:
    """The memory of one process group, and this rank's place in it."""

    def __init__(self, group: dist.ProcessGroup, memory: mmap.mmap, library: ctypes.CDLL):
        self.group, self.ranks, self.rank = group, group.size(), group.rank()
        self._global_ranks = dist.get_process_group_ranks(group)
        self._options = group._get_backend(torch.device("cpu")).options
        self._run = library.ftp_collective
        self._memory = memory
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        ctypes.c_int64.from_address(
            self._base + HEADER_BYTES * (1 + self.rank) + 8
        ).value = os.getpid()

    def stop(self) -> None:
        """Make every rank's collectives fail, including one that is running."""
        ctypes.c_int64.from_address(self._base).value = 1

    def all_reduce(self, x: torch.Tensor, op: str) -> torch.Tensor:
        return self._issue(
            _ALL_REDUCE,
            x,
            torch.empty_like(x, memory_format=torch.contiguous_format),
            x.numel(),
            op,
        )

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return self._issue(
            _ALL_GATHER, x, x.new_empty([self.ranks * x.shape[0], *x.shape[1:]]), x.numel()
        )

    def reduce_scatter(self, x: torch.Tensor, op: str) -> torch.Tensor:
        return self._issue(
            _REDUCE_SCATTER,
            x,
            x.new_empty([x.shape[0] // self.ranks, *x.shape[1:]]),
            x.numel() // self.ranks,
            op,
        )

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        """An all-to-all of equal parts."""
        return self._issue(
            _ALL_TO_ALL,
            x,
            torch.empty_like(x, memory_format=torch.contiguous_format),
            x.numel() // self.ranks,
        )

    def all_to_all_rows(
        self,
        x: torch.Tensor,
        counts: torch.Tensor,
        bound: int,
        back: bool,
        fits: bool,
        source: str,
    ) -> torch.Tensor:
        """An all-to-all of unequal parts; each has room for the largest part of all ranks."""
        sizes = checked_counts(counts, x.shape[0], bound, back, source, fits)
        most, mine = max(map(max, sizes)), self.rank
        groups = counts[:, mine].tolist() if counts.ndim == 3 else [[s[mine]] for s in sizes]
        rows = x[: sum(sizes[mine])]
        rows = as_bytes((by_rank(rows, groups) if back and counts.ndim == 3 else rows).contiguous())
        width = math.prod(x.shape[1:]) * x.dtype.itemsize  # also where the rank has no row to send
        padded = rows.new_empty([self.ranks * most, width])
        for to, part in enumerate(rows.view(len(rows), width).split(sizes[mine])):
            padded[to * most : to * most + len(part)] = part
        arrived = self.all_to_all(padded).unflatten(0, (self.ranks, most))
        count = sum(sent[mine] for sent in sizes)
        out = x.new_empty([count if fits and not back else bound, *x.shape[1:]])
        out[count:].zero_()
        if not count:
            return out
        into = as_bytes(out)[:count]
        parts = [part[: sent[mine]] for part, sent in zip(arrived, sizes, strict=True)]
        if back or counts.ndim == 2:
            torch.cat(parts, out=into)
        else:
            of = [part.split(row) for part, row in zip(parts, groups, strict=True)]
            torch.cat([part for column in zip(*of, strict=True) for part in column], out=into)
        return out

    def shift(self, send: Send) -> torch.Tensor | None:
        """Send this rank's tensor, and return the one that a rank before this one sends."""
        like, x, out = send.like, send.tensor, None
        if x is not None and x.numel() < send.most:
            x = torch.cat([x.reshape(-1), like.new_empty(send.most - x.numel())])
        if send.arrives is not None:
            out = like.new_empty(send.most)
        self._issue(_SHIFT, x, out, send.most, send.step, like.dtype)
        if out is None or send.arrives is None:
            return None
        return out[: math.prod(send.arrives)].view(send.arrives)

    def _issue(
        self,
        what: int,
        x: torch.Tensor | None,
        out: Any,
        each: int,
        op: str | int = "sum",
        dtype: torch.dtype | None = None,
    ) -> Any:
        """Issue collective ``what``. ``op`` is the reduction, or for a shift the number of ranks to
        shift by.
        """
        if not each:
            return out
        x = None if x is None else x.contiguous()
        timeout = self._options._timeout.total_seconds()
        dtype = dtype or x.dtype  # type: ignore[union-attr]
        found = self._run(
            self._base,
            self.ranks,
            self.rank,
            SLOT_BYTES,
            None if x is None else x.data_ptr(),
            None if out is None else out.data_ptr(),
            each * dtype.itemsize,
            what,
            _KINDS.get(dtype, 0),
            op if isinstance(op, int) else _OPS[op],
            timeout,
        )
        if found:
            self.stop()
            name = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ring")[what]
            raise failure_of(name, found, timeout, self._global_ranks)
        return out


_groups: dict[str, SharedGroup] = {}
releases.append(_groups.clear)


def shared_groups(mesh: Mesh, groups: Mapping[str, dist.ProcessGroup]) -> dict[str, SharedGroup]:
    """The shared memory of each group, by name of its process group; empty if a rank of the mesh
    cannot use shared memory. All ranks of the mesh call it together.

    Args:
        groups: of this rank, by names that are equal on all ranks.
    """
    made = with_shared_memory(
        mesh,
        groups,
        lambda key: HEADER_BYTES * (1 + groups[key].size()) + 2 * SLOT_BYTES * groups[key].size(),
        lambda key, memory, library: SharedGroup(groups[key], memory, library),
    )
    found: dict[str, SharedGroup] = {groups[k].group_name: group for k, group in made.items()}
    _groups.update(found)
    return found


def stop() -> None:
    """Make this process' collectives through shared memory raise, and its peers'."""
    for group in _groups.values():
        group.stop()


interrupts.append(stop)


def through_memory(graph: fx.Graph, groups: dict[str, SharedGroup]) -> fx.Graph:
    """The graph with its collectives over these groups in shared memory, except unequal all-to-alls
    and sums in dtypes that it does not support.
    """
    if not groups:
        return graph
    new, _ = copied(graph)
    for node in list(new.nodes):
        if (other := _IN_MEMORY.get(node.target)) and node.args[-1] in groups and _is_known(node):
            node.target = other
            for user in list(node.users):
                if user.target is WAIT:
                    user.replace_all_uses_with(node)
                    new.erase_node(user)
    return new


def exchanges_of_rows() -> tuple[Any, ...]:
    """The ops that exchange rows, whose counts are values."""
    return ALL_TO_ALL_ROWS, _IN_MEMORY[ALL_TO_ALL_ROWS]


def _is_known(node: fx.Node) -> bool:
    if node.target in (c10d.all_reduce.default, c10d.reduce_scatter_tensor.default):
        return node.args[1] in _OPS and node.meta["collective"].dtype in _KINDS
    if node.target is c10d.all_to_all_single.default:
        return len({*node.args[1], *node.args[2]}) == 1  # type: ignore[misc]
    return True


def directly(node: fx.Node) -> Callable[..., torch.Tensor] | None:
    """A function that runs a node's collective in shared memory without torch's dispatcher, which
    costs more than a small collective; None for other nodes.

    While a profiler is on, it calls the op, so that the profile shows it.
    """
    op: Any = node.target
    run = _RUN.get(op)
    if run is None:
        return None

    def issue(*args: Any) -> torch.Tensor:
        is_profiled = torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
        return op(*args) if is_profiled else run(*args)

    return issue


def _in_ring(op: SendingOp) -> Callable[..., Any]:
    def issue(*args: Any) -> Any:
        group = _groups[args[-1]]

        def start(sends: list[Send]) -> Callable[[], list[torch.Tensor | None]]:
            arrived = list(map(group.shift, sends))
            return lambda: arrived

        return run(op.one_rank(group.rank, *args[:-1]), start)

    return issue


_RUN: dict[Any, Callable[..., torch.Tensor]] = {}


def _define(collective: OpOverload, run: Callable[..., torch.Tensor]) -> OpOverload:
    """An op with the arguments of one of torch's collectives, which runs in shared memory and has
    finished when it returns.
    """
    plain = collective._schema.name.partition("::")[2].removesuffix("_tensor")
    made = define(like(f"{plain.removesuffix('_into')}_in_memory", collective))
    torch.library.impl(made._name, "CPU", run)
    register_fake(made, collective)
    _RUN[made] = run
    return made


_IN_MEMORY = {
    c10d.all_reduce.default: _define(
        c10d.all_reduce.default, lambda x, op, group: _groups[group].all_reduce(x, op)
    ),
    c10d.all_gather_into_tensor.default: _define(
        c10d.all_gather_into_tensor.default, lambda x, n, group: _groups[group].all_gather(x)
    ),
    c10d.reduce_scatter_tensor.default: _define(
        c10d.reduce_scatter_tensor.default,
        lambda x, op, n, group: _groups[group].reduce_scatter(x, op),
    ),
    c10d.all_to_all_single.default: _define(
        c10d.all_to_all_single.default, lambda x, got, sent, group: _groups[group].all_to_all(x)
    ),
    ALL_TO_ALL_ROWS: _define(
        ALL_TO_ALL_ROWS, lambda *args: _groups[args[-1]].all_to_all_rows(*args[:-1])
    ),
    **{target: _define(target, _in_ring(op)) for target, op in SENDING.items()},
}
