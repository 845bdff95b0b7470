"""Which rank holds which shard of a tensor, as text and as HTML."""

from collections.abc import Mapping, Sequence
from html import escape
from itertools import product

from ftp.sharding.local_pieces import local_pieces
from ftp.sharding.spec import PartitionSpec

MOST = 64  # shards that are listed


def holders(
    spec: PartitionSpec, shape: Sequence[int], axes: Mapping[str, int]
) -> dict[tuple[str, ...], list[int]]:
    """``{shard: ranks that hold it, in mesh order}``; a shard is a slice of each dim."""
    found: dict[tuple[str, ...], list[int]] = {}
    for rank, at in enumerate(product(*map(range, axes.values()))):
        slices = local_pieces(spec, shape, dict(axes), dict(zip(axes, at, strict=True)))
        found.setdefault(
            tuple(" and ".join(f"{a}:{b}" for a, b in dim) for dim in slices), []
        ).append(rank)
    return found


def as_text(spec: PartitionSpec, shape: Sequence[int], axes: Mapping[str, int]) -> str:
    """A box per shard with the ranks that hold it; a table where the tensor is cut in more than two
    dims or in many shards.

    >>> print(as_text(PartitionSpec(None, "tp"), (4, 6), {"dp": 2, "tp": 2}))
    (4, 6) as P(None, 'tp') on dp 2, tp 2
    +-----------+-----------+
    | ranks 0,2 | ranks 1,3 |
    | 0:4, 0:3  | 0:4, 3:6  |
    +-----------+-----------+
    """
    head = f"{tuple(shape)} as {spec} on {', '.join(f'{a} {n}' for a, n in axes.items())}"
    found = holders(spec, shape, axes)
    rows = grid(found)
    if rows is None:
        lines = [
            f"  {', '.join(part) or 'all'}: {_ranks(ranks)}"
            for part, ranks in list(found.items())[:MOST]
        ]
        more = [f"  and {len(found) - MOST} more shards"] if len(found) > MOST else []
        return "\n".join([head, *lines, *more])
    width = max(
        len(text)
        for row in rows
        for part, ranks in row
        for text in (_ranks(ranks), ", ".join(part))
    )
    rule = "+" + "+".join("-" * (width + 2) for _ in rows[0]) + "+"
    lines = [head, rule]
    for row in rows:
        lines.append("|" + "|".join(f" {_ranks(ranks):{width}} " for _, ranks in row) + "|")
        lines.append("|" + "|".join(f" {', '.join(part):{width}} " for part, _ in row) + "|")
        lines.append(rule)
    return "\n".join(lines)


def as_html(spec: PartitionSpec, shape: Sequence[int], axes: Mapping[str, int]) -> str:
    """The boxes as a table."""
    found = holders(spec, shape, axes)
    rows = grid(found) or [[item] for item in list(found.items())[:MOST]]
    body = "".join(
        "<tr>"
        + "".join(
            f"<td><b>{escape(_ranks(r))}</b><br>{escape(', '.join(p) or 'all')}</td>"
            for p, r in row
        )
        + "</tr>"
        for row in rows
    )
    return f'<table class="holders">{body}</table>'


def grid(
    found: Mapping[tuple[str, ...], list[int]],
) -> list[list[tuple[tuple[str, ...], list[int]]]] | None:
    """The shards in rows and columns; None if there are too many, or more than two dims are cut."""
    parts = list(found)
    varying = [dim for dim in range(len(parts[0])) if len({part[dim] for part in parts}) > 1]
    if len(varying) > 2 or len(parts) > 16 or not parts[0]:
        return None
    rows: dict[str, list[tuple[tuple[str, ...], list[int]]]] = {}
    down = varying[0] if len(varying) == 2 or varying == [0] else None
    for part in parts:
        rows.setdefault("" if down is None else part[down], []).append((part, found[part]))
    return [
        sorted(row, key=lambda item: _start(item[0]))
        for row in sorted(rows.values(), key=lambda row: _start(row[0][0]))
    ]


def _start(part: tuple[str, ...]) -> tuple[int, ...]:
    return tuple(int(dim.split(":")[0]) for dim in part)


def _ranks(ranks: Sequence[int]) -> str:
    shown = (
        ",".join(map(str, ranks)) if len(ranks) <= 8 else f"{ranks[0]},{ranks[1]},..,{ranks[-1]}"
    )
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
