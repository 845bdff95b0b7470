"""Live bytes over a program as an SVG: stacked by kind, with the op at each column."""

from html import escape

from ftp.report.memory import KINDS, Memory, in_bytes

WIDTH, HEIGHT, LEFT, TOP = 860, 220, 80, 16  # pixels of the areas, and the margins of their labels
_COLOURS = (
    "#1d4ed8", "#7c3aed", "#0f766e", "#64748b", "#dc2626", "#be185d", "#60a5fa", "#f59e0b",
    "#a3a3a3",
)  # fmt: skip


def timeline(memory: Memory) -> str:
    """The peak, the areas, and a legend that is the table of the peak's parts."""
    columns = memory.moments(WIDTH // 2)
    top = max(int(memory), 1)
    step = WIDTH / max(len(columns), 1)
    base, areas = [0.0] * len(columns), []
    shown = [kind for kind in KINDS if any(moment.parts.get(kind) for moment in columns)]
    for kind in shown:
        upper = [b + moment.parts.get(kind, 0) for b, moment in zip(base, columns, strict=True)]
        forward = [
            f"{LEFT + at * step:.1f},{_y(n, top)} {LEFT + (at + 1) * step:.1f},{_y(n, top)}"
            for at, n in enumerate(upper)
        ]
        backward = [
            f"{LEFT + (at + 1) * step:.1f},{_y(n, top)} {LEFT + at * step:.1f},{_y(n, top)}"
            for at, n in reversed(list(enumerate(base)))
        ]
        areas.append(f'<polygon points="{" ".join(forward + backward)}" fill="{_colour(kind)}"/>')
        base = upper
    hovers = "".join(
        f'<rect x="{LEFT + at * step:.1f}" y="{TOP}" width="{step:.2f}" height="{HEIGHT}"'
        ' fill="transparent"><title>'
        f"{escape(f'{in_bytes(moment.live)} at {moment.op}  {moment.source}'.strip())}"
        "</title></rect>"
        for at, moment in enumerate(columns)
    )
    labels = "".join(
        f'<line x1="{LEFT}" x2="{LEFT + WIDTH}" y1="{_y(n, top)}" y2="{_y(n, top)}"'
        ' stroke="#94a3b8" stroke-dasharray="2 4"/>'
        f'<text x="{LEFT - 6}" y="{_y(n, top)}" text-anchor="end" dominant-baseline="middle">'
        f"{in_bytes(n)}</text>"
        for n in (0, top / 2, top)
    )
    svg = (
        f'<svg id="timeline" viewBox="0 0 {LEFT + WIDTH + 8} {TOP + HEIGHT + 24}"'
        f' width="{LEFT + WIDTH + 8}" role="img"'
        f' font-size="11" fill="#475569">{"".join(areas)}{labels}{hovers}'
        f'<text x="{LEFT}" y="{TOP + HEIGHT + 16}">first op</text>'
        f'<text x="{LEFT + WIDTH}" y="{TOP + HEIGHT + 16}" text-anchor="end">last op</text></svg>'
    )
    rows = "".join(
        f'<tr><td><span class="key" style="background:{_colour(kind)}"></span>{escape(kind)}</td>'
        f"<td class='n'>{in_bytes(memory.parts.get(kind, 0))}</td><td"
        f" class='n'>{memory.parts.get(kind, 0) / top:.1%}</td></tr>"
        for kind in sorted(shown, key=lambda kind: -memory.parts.get(kind, 0))
    )
    peak = f"<p>Peak {in_bytes(int(memory))} a rank, at <code>{escape(memory.peak_op)}</code>"
    if memory.expected != memory:
        peak += f"; {in_bytes(int(memory.expected))} if ranks exchange equally many rows"
    peak += "</p>"
    return (
        f"{peak}{svg}<table><tr><th>at the peak</th><th>bytes</th><th>share</th></tr>{rows}</table>"
    )


def _y(nbytes: float, top: float) -> str:
    return f"{TOP + HEIGHT * (1 - nbytes / top):.1f}"


def _colour(kind: str) -> str:
    return _COLOURS[KINDS.index(kind)]
