"""Lint of exchanges of rows: room that equal loads leave empty, and that every op computes."""

from collections.abc import Iterator
from typing import Any

from torch import fx

from ftp.ops.exchange_rows import ALL_TO_ALL_ROWS
from ftp.report.lint import LARGE, Finding, folded
from ftp.report.loads import source_of_counts
from ftp.report.memory import in_bytes


def empty_rows(graph: fx.Graph, *, compiled: bool = False) -> list[Finding]:
    """Exchanges that have room for all rows of all ranks, though no capacity asks for it, and
    whose readers compute all of that room.

    Args:
        graph: of a rank, with the sizes of its values, as the eager runner executes it.
        compiled: whether the graph runs compiled, where all rows of the room are computed.
    """
    found = []
    for node, own, bound, n, row in _exchanges(graph, compiled):
        nbytes = (bound - own) * row
        if bound != n * own or nbytes < LARGE:
            continue
        source = node.meta.get("source")
        text = (
            f"{f'at {source} ' if source else ''}has room for all {bound} rows that {n} ranks send,"
            f" {in_bytes(bound * row)}; equal loads fill {own} of them, {in_bytes(own * row)}."
            " Every op on the rows computes and holds the room: memory, cost and MFU count it."
            " State a capacity: expert_capacity=1.5 of from_hf, capacity= of send_tokens or bound="
            f" of all_to_all, leaves {own * 3 // 2} rows, and more raise an error before a row is"
            " sent. lowered.loads(...) says what a batch needs."
        )
        name = node.meta.get("origin") or node.name
        found.append(Finding("empty rows", "note", f"%{name}", text, nbytes))
    return folded(found)


def _exchanges(graph: fx.Graph, compiled: bool) -> Iterator[tuple[fx.Node, int, int, int, int]]:
    """Of each dispatch the first exchange that returns a buffer for the most rows, with the rows
    that this rank sends, those that there is room for, the ranks, and the bytes of a row.
    """
    seen = set()
    for node in graph.find_nodes(op="call_function", target=ALL_TO_ALL_ROWS):
        x, counts, bound, back, fits, *_ = node.args
        result: Any = node.meta["val"]
        own, n = x.meta["val"].shape[0], counts.meta["val"].shape[0]
        is_open = not back and (compiled or not fits) and source_of_counts(counts) not in seen
        if is_open and n > 1 and own and all(type(size) is int for size in (own, bound)):
            seen.add(source_of_counts(counts))
            yield node, own, bound, n, result.shape[1:].numel() * result.element_size()
