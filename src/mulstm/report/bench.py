"""The figure of results/bench: how long a layer takes beside the others, as the rows say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mulstm.report.figures import BLUE, FAINT, INK, Figure

Bars = list[dict[str, Any]]
TICKS = (5, 10, 20, 50, 100, 200)


def figures(results: Path) -> list[Figure]:
    """One for each machine that has layers of one chunk's shape at two sizes or more."""
    found = []
    for path in sorted((results / "bench").glob("*.json")):
        rows = [row for row in json.loads(path.read_text())["rows"] if row["level"] == "layer"]
        shapes = sorted({(row["lanes"], row["chunk"]) for row in rows})
        panels = [panel for shape in shapes[:1] for panel in _panels(rows, shape)]
        if len(panels) > 1:
            data = {"machine": path.stem.upper(), "panels": panels}
            found.append(Figure(f"bench-{path.stem}", data, _paint, (8.0, 6.6)))
    return found


def _panels(rows: Bars, shape: tuple[int, int]) -> list[dict[str, Any]]:
    """The rows of each size of ours; another's row belongs to the size nearest to its own."""
    rows = [row for row in rows if (row["lanes"], row["chunk"]) == shape]
    sizes = sorted({row["hidden"] for row in rows if row["name"] == "mlstm"})
    panels = []
    for size in sizes:
        near = [row for row in rows if min(sizes, key=lambda s: abs(s - row["hidden"])) == size]
        bars = [
            {
                "label": f"{row['name']} {row['hidden']} ({row['backend']})",
                "ms": row["milliseconds"],
                "ours": row["name"] == "mlstm",
            }
            for row in sorted(near, key=lambda row: -float(row["milliseconds"]))
        ]
        panels.append({"hidden": size, "lanes": shape[0], "chunk": shape[1], "bars": bars})
    return panels


def _paint(picture: Any, data: Any) -> None:
    axes = picture.subplots(len(data["panels"]), 1, sharex=True)
    longest = max(bar["ms"] for panel in data["panels"] for bar in panel["bars"])
    for axis, panel in zip(axes, data["panels"], strict=True):
        bars = panel["bars"]
        places = range(len(bars))
        axis.barh(
            places,
            [bar["ms"] for bar in bars],
            color=[BLUE if bar["ours"] else FAINT for bar in bars],
            zorder=2,
        )
        for place, bar in zip(places, bars, strict=True):
            axis.annotate(
                f"{bar['ms']:.1f}", (bar["ms"], place), (3, 0),
                textcoords="offset points", va="center", fontsize=8, color=INK,
            )  # fmt: skip
        axis.set_yticks(places, [bar["label"] for bar in bars], fontsize=8)
        axis.set_xscale("log")
        axis.set_xticks(TICKS, [str(tick) for tick in TICKS])
        axis.minorticks_off()
        axis.set_xlim(TICKS[0], 1.5 * longest)
        axis.grid(visible=False, axis="y")
        axis.set_title(f"Hidden {panel['hidden']}, {panel['lanes']} x {panel['chunk']} ({data['machine']})")
    axes[-1].set_xlabel("milliseconds, forward and backward, bf16")
