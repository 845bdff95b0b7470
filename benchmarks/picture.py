"""Bars as an SVG file, of the times of peers on several workloads."""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

LEFT, WIDTH, ROW, HEAD = 190, 380, 18, 30  # pixels
_LONGEST = 4.0  # a ratio whose bar fills the width


def bars(tables: Mapping[str, Sequence[Mapping[str, Any]]], anchor: str, path: Path) -> None:
    """Writes one panel a workload: a bar a peer, its time relative to the anchor's, and what it is in milliseconds."""
    parts, y = [], 0
    for name, rows in tables.items():
        timed = [row for row in rows if "ratio" in row]
        parts.append(f'<text x="4" y="{y + 20}" class="head">{escape(name)}: time of a step, relative to {escape(anchor)}</text>')
        y += HEAD
        for row in timed:
            length = min(1.0, row["ratio"] / _LONGEST) * WIDTH
            kind = "ours" if row["peer"].startswith("ftp") else "other"
            parts.append(f'<text x="{LEFT - 6}" y="{y + 13}" text-anchor="end">{escape(row["peer"])}</text>')
            parts.append(f'<rect x="{LEFT}" y="{y + 2}" width="{length:.1f}" height="{ROW - 5}" class="{kind}"/>')
            parts.append(f'<text x="{LEFT + length + 5:.1f}" y="{y + 13}">{row["ratio"]:.2f} ({row["ms"]:.3g} ms)</text>')
            y += ROW
        line = LEFT + WIDTH / _LONGEST
        parts.append(f'<line x1="{line}" y1="{y - ROW * len(timed)}" x2="{line}" y2="{y}" class="one"/>')
        y += 12
    style = "text{font:12px sans-serif;fill:#333}.head{font-weight:bold}.ours{fill:#2a6fb0}.other{fill:#b8b8b8}"
    style += ".one{stroke:#333;stroke-dasharray:3}"
    size = f'width="{LEFT + WIDTH + 130}" height="{y}"'
    background = '<rect width="100%" height="100%" fill="white"/>'
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{style}</style>{background}{"".join(parts)}</svg>\n')
