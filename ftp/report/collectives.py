"""The collectives of a program: a sequence that prints as a table with folded repeats, and the
check of a test's claims about it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from html import escape
from typing import Any

import torch
from torch import fx

from ftp.dataclass import dataclass
from ftp.partitioning.collectives import Collective, Member
from ftp.planning.graph import Node
from ftp.report.memory import in_bytes
from ftp.report.names import dtype_name, without_numbers


@dataclass(frozen=True)
class TableRow:
    """Equal collectives, such as those of a model's layers, as one row.

    Attributes:
        shape, dtype: of this rank's buffer on the larger side.
        wire_nbytes: bytes that a rank sends for one of the ``count`` collectives.
        why: the reason of the first collective.
        worst_nbytes: the most bytes that a rank may send or receive, if part sizes are values.
    """

    op: str
    axes: tuple[str, ...]
    shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    wire_nbytes: int
    count: int
    why: str
    worst_nbytes: int | None = None

    def to_dict(self) -> dict[str, Any]:
        return {
            "op": self.op,
            "axes": list(self.axes),
            "shape": list(self.shape),
            "global_shape": list(self.global_shape),
            "dtype": str(self.dtype).removeprefix("torch."),
            "nbytes": self.nbytes,
            "wire_nbytes": self.wire_nbytes,
            "count": self.count,
            "why": self.why,
            "worst_nbytes": self.worst_nbytes,
        }


class Collectives(tuple[Collective, ...]):
    """One record per issued collective, in order; printing them folds repeats.

    >>> one = Collective("all_reduce", ("tp",), (4,), torch.float32, 16, (4,), 16, "", "the loss")
    >>> print(Collectives([one, one]))
    op          axes  shape   bytes sent  count  why
    all_reduce  tp    f32[4]        16 B      2  the loss
    2 collectives, 32 B sent per rank
    """

    __slots__ = ()

    @property
    def rows(self) -> list[TableRow]:
        """The folded records: records that differ only in numbers of layers and ops are one row."""
        groups: dict[Any, list[Collective]] = {}
        for c in self:
            key = c.op, c.axes, c.shape, c.global_shape, c.dtype, without_numbers(c.cause)
            groups.setdefault(key, []).append(c)
        return [
            TableRow(
                *(c.op, c.axes, c.shape, c.global_shape, c.dtype, c.nbytes, c.wire_nbytes),
                count=1 + len(rest),
                why=c.cause,
                worst_nbytes=c.worst_nbytes,
            )
            for c, *rest in groups.values()
        ]

    @property
    def wire_nbytes(self) -> int:
        """Bytes that a rank sends in all."""
        return sum(c.wire_nbytes for c in self)

    def to_dict(self) -> dict[str, Any]:
        """For JSON: the folded rows and the totals."""
        return {
            "count": len(self),
            "wire_nbytes": self.wire_nbytes,
            "rows": [row.to_dict() for row in self.rows],
        }

    def __str__(self) -> str:
        body = [_cells(row) for row in self.rows]
        widths = [max(map(len, column)) for column in zip(_HEADER, *body, strict=True)]
        lines = []
        for cells in (_HEADER, *body):
            aligned = [
                c.rjust(w) if i in (3, 4) else c.ljust(w)
                for i, (c, w) in enumerate(zip(cells, widths, strict=True))
            ]
            lines.append("  ".join(aligned).rstrip())
        return "\n".join([*lines, self._total()])

    def __repr__(self) -> str:
        return str(self)

    def _total(self) -> str:
        return f"{len(self)} collectives, {in_bytes(self.wire_nbytes)} sent per rank"

    def __rich__(self) -> Any:
        from rich.table import Table
        from rich.text import Text

        table = Table(*_HEADER, box=None, header_style="bold", caption=self._total())
        for row in self.rows:
            table.add_row(*(Text(cell) for cell in _cells(row)))
        return table

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{name}</th>" for name in _HEADER)
        body = "".join(
            f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in _cells(row))}</tr>"
            for row in self.rows
        )
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        return f"{table}<p>{escape(self._total())}</p>"


_HEADER = ("op", "axes", "shape", "bytes sent", "count", "why")


def _cells(row: TableRow) -> tuple[str, ...]:
    is_flat = len(row.shape) != len(row.global_shape)  # moved as one dim
    whole = f" of {list(row.global_shape)}" if is_flat else ""
    shape = f"{dtype_name(row.dtype)}{list(row.shape)}{whole}"
    sent = in_bytes(row.wire_nbytes)
    if row.worst_nbytes is not None:
        sent += f" (at most {in_bytes(row.worst_nbytes)})"
    return row.op, ", ".join(row.axes), shape, sent, str(row.count), row.why


def broken_claims(
    collectives: Collectives,
    counts: Mapping[str, int],
    max_bytes: int | None,
    none_over: Iterable[str],
) -> list[tuple[str, Sequence[Collective]]]:
    """The claims that do not hold, as text, each with the collectives that break it."""
    broken: list[tuple[str, Sequence[Collective]]] = []
    for op, wanted in counts.items():
        found = [c for c in collectives if c.op == op]
        if len(found) != wanted:
            are = "is" if wanted == 1 else "are"
            broken.append((f"{len(found)} {op} where {wanted} {are} claimed", found))
    if max_bytes is not None and collectives.wire_nbytes > max_bytes:
        largest = sorted(collectives, key=lambda c: -c.wire_nbytes)
        sent = f"{collectives.wire_nbytes:,} bytes sent per rank"
        broken.append((f"{sent} where at most {max_bytes:,} are claimed", largest))
    for axis in none_over:
        found = [c for c in collectives if axis in c.axes]
        if found:
            broken.append((f"{len(found)} over {axis!r} where none is claimed", found))
    return broken


def resharded_name(reshard: Node) -> str:
    """The name of the value that a chain of reshards starts from."""
    (value,) = reshard.operands
    while value.node.kind == "reshard":
        (value,) = value.node.operands
    return repr(value)


def part_of(record: Collective, members: Sequence[Member]) -> Collective:
    """The part of a bucket that holds some of its members."""
    if len(members) == len(record.members):
        return record
    nbytes = sum(member.nbytes for member in members)
    return replace(
        record,
        nbytes=nbytes,
        wire_nbytes=record.wire_nbytes * nbytes // max(record.nbytes, 1),
        shape=(nbytes // record.dtype.itemsize,),
        cause=members[0].cause,
        members=tuple(members),
    )


def members_of(node: fx.Node) -> tuple[Member, ...]:
    """The members of an issued collective, by the names of the plan's reshards."""
    record = node.meta["collective"]
    own = Member(node.meta.get("origin", ""), record.nbytes, record.cause)
    return record.members or (own,)
