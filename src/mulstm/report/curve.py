"""The learning curve of one run, drawn into its folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mulstm import runs
from mulstm.errors import RunError
from mulstm.report.canvas import BLUE, FAINT, INK, SKY, Figure, apart

OWN = "this model"


def learning_curve(
    run: Path, others: Mapping[str, float] | None = None, own: float | None = None
) -> list[Path]:
    """Draws curve.svg and curve.png into a run's folder; `others` and `own` are what the test part costs."""
    lines = runs.read_log(run)
    if not lines:
        raise RunError(f"{run} has no log to draw. Give the folder of a run.")
    train = [(line["seconds"] / 60, line["train_bits_per_char"]) for line in lines]
    valid = [
        (line["seconds"] / 60, line["valid_bits_per_char"])
        for line in lines
        if line.get("valid_bits_per_char") is not None
    ]
    recipe = runs.recipe_of(run)
    # The curves are of other parts of the text: beside the others' levels stands the model's own.
    marks = dict(others or {}) | ({} if own is None else {OWN: own})
    data = {"title": recipe.title or recipe.name, "train": train, "valid": valid, "marks": marks}
    return Figure("curve", data, _paint_run, (7.0, 4.0)).draw(run)


def _paint_run(picture: Any, data: Any) -> None:
    axes = picture.subplots()
    axes.set_title(data["title"])
    axes.set_xlabel("minutes of training")
    axes.set_ylabel("bits/char")
    axes.plot(*zip(*data["train"], strict=True), color=SKY, linewidth=1.2, label="training text")
    if data["valid"]:
        axes.plot(
            *zip(*data["valid"], strict=True), color=BLUE, marker="o", markersize=4, label="validation text"
        )
        axes.annotate(
            f"{data['valid'][-1][1]:.2f}",
            data["valid"][-1],
            textcoords="offset points",
            xytext=(4, 8),
            ha="right",  # the levels' names begin beside it
            color=BLUE,
            weight="bold",
        )
    # The first moments of training would flatten all the rest.
    settled = [bits for _, bits in data["train"][len(data["train"]) // 20 :]]
    levels = [*settled, *(bits for _, bits in data["valid"]), *data["marks"].values()]
    ends = [points[-1][1] for points in (data["train"], data["valid"]) if points]
    most = max(min(levels) * 2.2, *ends, data["marks"].get(OWN, 0.0))
    low, high = min(levels) - 0.1, min(max(levels), most) + 0.1
    axes.set_ylim(low, high)
    axes.set_xlim(0, data["train"][-1][0] * 1.03)
    for name, level, height in apart(data["marks"], 0.055 * (high - low)):
        colour, weight = (BLUE, "bold") if name == OWN else (INK, "normal")
        axes.axhline(level, color=BLUE if name == OWN else FAINT, linewidth=1, linestyle=(0, (4, 3)))
        axes.annotate(
            f"{name}, test {level:.2f}",
            (1.01, height),  # beside the axes
            xycoords=("axes fraction", "data"),
            va="center",
            fontsize=9,
            color=colour,
            weight=weight,
        )
    axes.legend(loc="upper right")
