"""Pictures of the results, for the docs.

python benchmarks/picture.py        # all of them, from benchmarks/results
"""

import json
from typing import Any

from record import ROOT

PICTURES = ROOT / "docs" / "pictures"
_OURS, _OTHER = "#2a6fb0", "#b8b8b8"
_STAGES = {
    "trace": "trace",
    "from_fx": "to our graph",
    "make_plan": "plan",
    "partition": "partition",
}


def draw(name: str) -> None:
    """``docs/pictures/<name>.svg`` from ``results/<name>.json``; nothing where there is no
    picture of that benchmark.
    """
    if name in _DRAWN:
        import matplotlib

        matplotlib.use("Agg")
        # Text stays text, and the same results give the same file.
        with matplotlib.rc_context(
            {
                "svg.fonttype": "none",
                "svg.hashsalt": name,
                "font.size": 9,
                "axes.spines.top": False,
                "axes.spines.right": False,
            }
        ):
            figure = _DRAWN[name](
                json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())
            )
            PICTURES.mkdir(parents=True, exist_ok=True)
            figure.savefig(PICTURES / f"{name}.svg", bbox_inches="tight", metadata={"Date": None})


def _speed(results: dict[str, Any]) -> Any:
    """A panel a workload, a bar a peer: its time relative to the anchor's, its milliseconds
    beside it.
    """
    from matplotlib import pyplot as plt

    tables = {
        name: [row for row in rows if "ratio" in row]
        for name, rows in results.items()
        if name in ("W1", "W2", "W3")
    }
    heights = [len(rows) for rows in tables.values()]
    figure, panels = plt.subplots(
        len(tables),
        squeeze=False,
        figsize=(7, 0.22 * sum(heights) + 0.7 * len(tables)),
        height_ratios=heights,
    )
    for axes, (name, rows) in zip(panels[:, 0], tables.items(), strict=True):
        colours = [_OURS if row["peer"].startswith("ftp") else _OTHER for row in rows]
        bars = axes.barh(
            [row["peer"] for row in rows], [row["ratio"] for row in rows], color=colours
        )
        axes.bar_label(
            bars, [f"{row['ratio']:.2f} ({row['ms']:.3g} ms)" for row in rows], padding=3
        )
        axes.axvline(1.0, color="#333", linestyle=":", linewidth=1)
        axes.invert_yaxis()
        axes.margins(x=0.25)
        axes.set_title(
            f"{name}: time of a step, relative to {results['anchor']}", loc="left", fontsize=10
        )
    figure.tight_layout()
    return figure


def _planning(results: dict[str, Any]) -> Any:
    """Seconds of the processor by stage: over depth, for each mesh, and over the size of the
    mesh.
    """
    from matplotlib import pyplot as plt

    depths = [row for row in results["depths"] if "failed" not in row]
    meshes = list(dict.fromkeys(row["mesh"] for row in depths))
    panels = {
        mesh: [(str(row["layers"]), row) for row in depths if row["mesh"] == mesh]
        for mesh in meshes
    }
    sizes = [row for row in results["sizes"] if "failed" not in row]
    panels["2 to 4096 ranks, 2 layers"] = [
        (row["mesh"].replace(" x ", "\nx "), row) for row in sizes
    ]
    figure, grid = plt.subplots(1, len(panels), figsize=(3.1 * len(panels), 2.8))
    for axes, (title, rows) in zip(grid, panels.items(), strict=True):
        base = [0.0] * len(rows)
        for stage, label in _STAGES.items():
            seconds = [row[stage] for _, row in rows]
            axes.bar([x for x, _ in rows], seconds, bottom=base, label=label)
            base = [a + b for a, b in zip(base, seconds, strict=True)]
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("mesh" if title.startswith("2 to") else "layers")
        axes.tick_params(axis="x", labelsize=7 if title.startswith("2 to") else 9)
    grid[0].set_ylabel("seconds of one core")
    grid[0].legend(frameon=False)
    figure.tight_layout()
    return figure


_DRAWN = {"speed": _speed, "planning": _planning}


if __name__ == "__main__":
    for each in _DRAWN:
        draw(each)
