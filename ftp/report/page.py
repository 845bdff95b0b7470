"""One self-contained HTML page about a program: no scripts or styles from elsewhere, every name escaped."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from ftp.report.lint import Finding
from ftp.report.memory import Memory, in_bytes
from ftp.report.table import Collectives
from ftp.report.timing import Cost
from ftp.report.whose import as_html
from ftp.spec import PartitionSpec, local_shape

_STYLE = """
body{font:14px/1.45 system-ui,sans-serif;margin:2rem auto;max-width:72rem;padding:0 1rem;color:#1c2430;background:#fff}
h1{font-size:1.4rem}h2{font-size:1.1rem;margin-top:2rem;border-bottom:1px solid #ccd3dc}
table{border-collapse:collapse;margin:.4rem 0}td,th{border:1px solid #ccd3dc;padding:.2rem .5rem;text-align:left;vertical-align:top}
th{background:#eef2f6}td.n{text-align:right;font-variant-numeric:tabular-nums}code,pre{font:12px/1.4 ui-monospace,monospace}
pre{background:#f6f8fa;padding:.6rem;overflow-x:auto}summary{cursor:pointer}details{margin:.15rem 0 .15rem 1rem}
.warning{color:#9a3412;font-weight:600}.holders td{background:#eef6ff}svg{background:#f6f8fa;max-width:100%}
"""
WIDTH, HEIGHT = 900, 200


@dataclass(frozen=True)
class Leaf:
    """A tensor of the arguments: its name in messages, spec, global shape and bytes of an element."""

    name: str
    spec: PartitionSpec
    shape: tuple[int, ...]
    itemsize: int
    dtype: str

    def nbytes(self, axes: Mapping[str, int]) -> int:
        """On the first rank."""
        size = self.itemsize
        for n in local_shape(self.spec, self.shape, dict(axes)):
            size *= n
        return size


def page(
    title: str,
    axes: Mapping[str, int],
    leaves: Sequence[Leaf],
    collectives: Collectives | None = None,
    memory: Memory | None = None,
    cost: Cost | None = None,
    findings: Sequence[Finding] = (),
    program: str = "",
    by_layer: Mapping[str, Collectives] | None = None,
) -> str:
    """The page; sections for which nothing is given are left out."""
    parts = [f"<h1>{escape(title)}</h1>", f"<p>Mesh: {escape(', '.join(f'{a} {n}' for a, n in axes.items()))}</p>"]
    if findings:
        items = "".join(f'<li class="{escape(f.severity)}">{escape(str(f))}</li>' for f in findings)
        parts.append(f'<h2 id="findings">Findings</h2><ul>{items}</ul>')
    parts.append(f'<h2 id="parameters">Parameters and inputs</h2>{_tree(leaves, axes)}')
    if collectives is not None:
        parts.append(f'<h2 id="collectives">Collectives</h2>{collectives._repr_html_()}')
    if by_layer and any(by_layer):
        parts.append(f'<h3 id="layers">By layer</h3>{_layers(by_layer)}')
    if memory is not None:
        parts.append(f'<h2 id="memory">Memory</h2>{_timeline(memory)}')
    if cost is not None:
        parts.append(f'<h2 id="cost">Cost</h2><pre>{escape(cost.report())}</pre>')
    if program:
        parts.append(f'<h2 id="program">Program</h2><details><summary>every op</summary><pre>{escape(program)}</pre></details>')
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style></head>'
        f"<body>{''.join(parts)}</body></html>\n"
    )


def _tree(leaves: Sequence[Leaf], axes: Mapping[str, int]) -> str:
    """Leaves under the part of their path before its last dot, each with its layout and who holds what."""
    groups: dict[str, list[Leaf]] = {}
    for leaf in leaves:
        groups.setdefault(leaf.name.rpartition(".")[0] or leaf.name.split("[")[0], []).append(leaf)
    out = []
    for group, members in groups.items():
        total = sum(leaf.nbytes(axes) for leaf in members)
        rows = "".join(
            f"<tr><td><code>{escape(leaf.name)}</code></td><td>{escape(leaf.dtype)}{escape(str(list(leaf.shape)))}</td>"
            f"<td><code>{escape(str(leaf.spec))}</code></td><td class='n'>{in_bytes(leaf.nbytes(axes))}</td>"
            f"<td><details><summary>who holds what</summary>{as_html(leaf.spec, leaf.shape, axes) if _few(axes) else 'too many ranks'}"
            "</details></td></tr>"
            for leaf in members
        )
        table = f"<table><tr><th>path</th><th>global shape</th><th>spec</th><th>bytes a rank</th><th></th></tr>{rows}</table>"
        out.append(f"<details><summary><code>{escape(group)}</code>: {len(members)}, {in_bytes(total)} a rank</summary>{table}</details>")
    return "".join(out)


def _layers(by_layer: Mapping[str, Collectives]) -> str:
    """A row for each layer: how many collectives of each kind over each axis, and the bytes that a rank sends for them."""
    kinds = list(dict.fromkeys((c.op, c.axes) for found in by_layer.values() for c in found))
    head = "".join(f"<th>{escape(op)} {escape(', '.join(axes))}</th>" for op, axes in kinds)
    rows = []
    for name, found in by_layer.items():
        cells = ""
        for kind in kinds:
            mine = [c for c in found if (c.op, c.axes) == kind]
            sent = in_bytes(sum(c.wire_nbytes for c in mine))
            cells += f"<td class='n'>{f'{len(mine)}, {sent}' if mine else ''}</td>"
        total = in_bytes(found.wire_nbytes)
        rows.append(f"<tr><td><code>{escape(name) or 'no layer'}</code></td>{cells}<td class='n'>{total}</td></tr>")
    table = f"<table><tr><th>layer</th>{head}<th>bytes sent</th></tr>{''.join(rows)}</table>"
    return f"<details><summary>{len(by_layer)} rows</summary>{table}</details>"


def _few(axes: Mapping[str, int]) -> bool:
    n = 1
    for size in axes.values():
        n *= size
    return n <= 256


def _timeline(memory: Memory) -> str:
    columns = memory.columns(WIDTH // 2)
    top = max(max(columns, default=1), 1)
    points = " ".join(f"{i * WIDTH / max(len(columns) - 1, 1):.1f},{HEIGHT - n / top * (HEIGHT - 12):.1f}" for i, n in enumerate(columns))
    svg = (
        f'<svg id="timeline" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" role="img">'
        f'<polygon points="0,{HEIGHT} {points} {WIDTH},{HEIGHT}" fill="#93c5fd" stroke="#1d4ed8"/></svg>'
    )
    rows = "".join(
        f"<tr><td>{escape(kind)}</td><td class='n'>{in_bytes(n)}</td></tr>" for kind, n in sorted(memory.parts.items(), key=lambda p: -p[1])
    )
    peak = f"<p>Peak {in_bytes(int(memory))} a rank, at <code>{escape(memory.peak_op)}</code></p>"
    return f"{peak}{svg}<table><tr><th>at the peak</th><th>bytes</th></tr>{rows}</table>"
