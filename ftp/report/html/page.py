"""One self-contained HTML page about a program: no external scripts, every name escaped."""

import math
from collections.abc import Mapping, Sequence
from html import escape

from ftp.report.collectives import Collectives
from ftp.report.html.memory_timeline import timeline
from ftp.report.html.tree import ShownLeaf, outline
from ftp.report.lint import Finding
from ftp.report.memory import Memory, in_bytes
from ftp.report.timing import Cost, in_seconds

_STYLE = """
body{font:14px/1.45 system-ui,sans-serif;margin:2rem auto;max-width:72rem;padding:0 1rem}
body{color:#1c2430;background:#fff}small{color:#64748b}
h1{font-size:1.4rem}h2{font-size:1.1rem;margin-top:2rem;border-bottom:1px solid #ccd3dc}
table{border-collapse:collapse;margin:.4rem 0}
td,th{border:1px solid #ccd3dc;padding:.2rem .5rem;text-align:left;vertical-align:top}
th{background:#eef2f6}td:not(:last-child){white-space:nowrap}
td.n{text-align:right;font-variant-numeric:tabular-nums}
code,pre{font:12px/1.4 ui-monospace,monospace}pre{background:#f6f8fa;padding:.6rem;overflow-x:auto}
summary{cursor:pointer}details{margin:.15rem 0 .15rem 1rem}td details{margin:0}
.warning{color:#9a3412;font-weight:600}.holders td{background:#eef6ff}svg{max-width:100%}
.key{display:inline-block;width:.8em;height:.8em;margin-right:.4em}
.figures{list-style:none;padding:0;display:flex;flex-wrap:wrap;gap:.6rem}
.figures b{display:block;font-size:1.15rem}
.figures li{background:#f6f8fa;border:1px solid #ccd3dc;padding:.5rem .8rem}
"""


def page(
    title: str,
    axes: Mapping[str, int],
    leaves: Sequence[ShownLeaf],
    collectives: Collectives | None = None,
    memory: Memory | None = None,
    cost: Cost | None = None,
    findings: Sequence[Finding] = (),
    program: str = "",
    by_layer: Mapping[str, Collectives] | None = None,
) -> str:
    """The page; sections without data are left out."""
    mesh = " x ".join(f"{axis} {n}" for axis, n in axes.items())
    parts = [
        f"<h1>{escape(title)}</h1>",
        f"<p>Mesh: {escape(mesh)}, {math.prod(axes.values())} ranks</p>",
        _figures(collectives, memory, cost),
    ]
    if findings:
        items = "".join(f'<li class="{escape(f.severity)}">{escape(str(f))}</li>' for f in findings)
        parts.append(f'<h2 id="findings">Findings</h2><ul>{items}</ul>')
    parts.append(f'<h2 id="parameters">Parameters and inputs</h2>{outline(leaves, axes)}')
    if collectives is not None:
        parts.append(f'<h2 id="collectives">Collectives</h2>{collectives._repr_html_()}')
    if by_layer and any(by_layer):
        parts.append(f'<h3 id="layers">By layer</h3>{_layers(by_layer)}')
    if memory is not None:
        parts.append(f'<h2 id="memory">Memory</h2>{timeline(memory)}')
    if cost is not None:
        parts.append(f'<h2 id="cost">Cost</h2><pre>{escape(cost.report())}</pre>')
    if program:
        parts.append(
            '<h2 id="program">Program</h2><details><summary>every op</summary>'
            f"<pre>{escape(program)}</pre></details>"
        )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>"
        f"<body>{''.join(parts)}</body></html>\n"
    )


def _figures(collectives: Collectives | None, memory: Memory | None, cost: Cost | None) -> str:
    """The key figures at the top of the page."""
    found = {}
    if memory is not None:
        found |= {
            "at the peak, a rank": in_bytes(int(memory)),
            "of parameters, a rank": in_bytes(memory.parameters),
        }
    if collectives is not None:
        found |= {
            "collectives a step": f"{len(collectives):,}",
            "sent by a rank": in_bytes(collectives.wire_nbytes),
        }
    if cost is not None:
        found |= {f"a step, estimated on {cost.hardware.name}": in_seconds(cost)}
    items = "".join(f"<li><b>{escape(n)}</b> {escape(what)}</li>" for what, n in found.items())
    return f'<ul class="figures">{items}</ul>' if found else ""


def _layers(by_layer: Mapping[str, Collectives]) -> str:
    """A row for each layer: how many collectives of each kind over each axis, and the bytes that
    a rank sends for them.
    """
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
        rows.append(
            f"<tr><td><code>{escape(name) or 'no layer'}</code></td>{cells}<td"
            f" class='n'>{total}</td></tr>"
        )
    table = f"<table><tr><th>layer</th>{head}<th>bytes sent</th></tr>{''.join(rows)}</table>"
    return f"<details><summary>{len(by_layer)} rows</summary>{table}</details>"
