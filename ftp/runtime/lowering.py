"""The passes from a plan to the graph that runs, in their order.

1. ``decide`` of ``decided``, on the plan, which is equal on all ranks: merge axes, chunk, fuse with
   matmuls, bucket, prefetch, narrow gradients' reductions.
2. Partition: one rank's graph.
3. ``rank_graph`` of ``decided``: apply the decisions to the rank's graph.
4. On processes, the forms of collectives that backends take (``process_groups``, ``transport``,
   ``shared_memory``).
5. ``ordered``: drop copies, put nodes in the order in which they run.
6. ``only_arrived`` for eager runs: compute the rows of an exchange that arrive.
7. ``with_writes`` for eager runs, ``for_inductor`` for compiled ones: write results to the memory
   of operands that no later node reads.
8. ``outline_branches``, if the host may choose: run one branch of a ``torch.cond``.
"""

from collections.abc import Sequence
from typing import Any

from torch import fx

from ftp.passes.arrived_rows import only_arrived
from ftp.passes.branch_order import mark
from ftp.passes.buffer_reuse import reuse_memory_in, with_values
from ftp.passes.copy_elimination import drop_copies
from ftp.passes.fuse_optimizer_updates import merge_updates, merge_updates_in
from ftp.passes.inline_small_ops import small_updates
from ftp.passes.onednn_matmuls import Choose, by_onednn, matmuls
from ftp.passes.schedule import schedule_in
from ftp.rules.local_op import as_module


def ordered(graph: fx.Graph) -> fx.Graph:
    """The graph in the order in which it runs; no value is written in place yet."""
    graph = mark(drop_copies(graph))
    schedule_in(graph)  # on the copy that `drop_copies` made
    return graph


def with_writes(graph: fx.Graph, donated: Sequence[int]) -> fx.Graph:
    """An ordered graph for eager runs, changed in place: results are written to memory that no
    later node reads.

    Args:
        donated: positions of the inputs that may be written to.
    """
    reuse_memory_in(graph, donated)
    merge_updates_in(graph, donated)
    return mark(graph)


def for_eager(
    graph: fx.Graph, inputs: Sequence[Any], donated: Sequence[int], exchanges: Sequence[Any]
) -> fx.Graph:
    """A rank's graph as eager runs take it: in order, with the rows of exchanges that arrive, and
    with writes.

    Args:
        inputs: of the shapes and strides that it will be given.
        exchanges: the ops that exchange rows, whose counts are values.
    """
    gm = with_values(as_module(ordered(graph)), inputs)
    return with_writes(only_arrived(gm.graph, exchanges), donated)


def for_inductor(graph: fx.Graph, donated: Sequence[int], choose: Choose) -> fx.Graph:
    """An ordered graph for inductor, which reuses memory itself: optimizer updates are merged, and
    matmuls use the kernels that ``choose`` picks.
    """
    graph = merge_updates(small_updates(graph), donated)
    return mark(by_onednn(graph, choose(matmuls(graph))))
