"""The paper's figures: each is a function of the records alone, and the same records give the same bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mulstm import recipe as recipes
from mulstm.report import paper, tables
from mulstm.report.canvas import BLUE, GREEN, INK, ORANGE, PURPLE, SKY, VERMILLION, Figure, apart
from mulstm.report.records import Record, all_of_row, shown_of_row

COLOURS = {
    "mlstm-emb-wn-vd-large": BLUE,
    "mlstm-emb-wn-vd-large-ten": SKY,
    "mlstm-emb-wn-vd-large-long": INK,
    "mlstm-emb-wn-vd": GREEN,
    "mlstm-emb-wn": ORANGE,
    "mlstm": PURPLE,
    "milstm": VERMILLION,
    "mlstm-rmsprop": PURPLE,
    "mlstm-small": GREEN,
    "lstm-small": VERMILLION,
}


def all_of(records: Sequence[Record], surprise: tables.Surprise | None) -> list[Figure]:
    """Every figure there are data for."""
    figures = [
        Figure(f"learning-curves-{table.name}", curves, _paint_curves, (7.6, 4.6))
        for table in paper.TABLES
        if (curves := _curves(records, table))["lines"]
    ]
    sizes = tables.size_points(records)
    if any(len(points) > 1 for points in sizes.values()):
        figures.append(Figure("size", sizes, _paint_sizes))
    figures.append(Figure("surprise", {"ours": surprise and surprise["by_delay"]}, _paint_surprise))
    if quality := _times(records):
        figures.append(Figure("time-to-quality", quality, _paint_times))
    return figures


def _curves(records: Sequence[Record], table: paper.Table) -> dict[str, Any]:
    """The validation curves of a table's rows: one a recipe."""
    lines = []
    for line in table.lines:
        for kind in ("fast", "faithful"):
            record = _shown(records, table.name, line.row, kind)
            points = list(record.validations()) if record else []
            if record and len(points) > 1:
                # What the fast recipe has instead stands in its own title.
                other = kind == "fast" and (line.fast or line.extra) and record["recipe"] in recipes.names()
                model = recipes.load(record["recipe"]).title if other else line.label
                label = f"{model}, {_kind(record)}"
                drawn = {"row": line.row, "label": label, "kind": kind, "points": points}
                lines.append(drawn | {"end": _end(record)})
    levels = {line.row: line.bits or line.paper for line in table.lines if line.row and line.paper}
    unit = "bits/byte" if table.is_in_words else "bits/char"
    return {"title": table.title, "unit": unit, "lines": lines, "paper": levels}


def _shown(records: Sequence[Record], table: str, row: str, kind: str) -> Record | None:
    """The run whose curve is drawn: the first that counts, else the longest that was cut, else any."""
    found = shown_of_row(records, table, row, kind) or all_of_row(records, table, row, kind)
    return found[0] if found else None


def _end(record: Record) -> list[tuple[float, float]]:
    """Minutes, and the whole validation part as the tables' figures are measured: comparable between runs."""
    bits = record["valid_bits_per_char"]
    return [] if bits is None else [(record.minutes, float(bits))]


def _kind(record: Record) -> str:
    """With what a reader of its times should know."""
    marks = ["shared GPU"] * ("(shared)" in str(record["hardware"]))
    if not record["complete"]:
        marks.append("cut short" if record.is_cut else "not counted")
    return record.kind + (f" ({', '.join(marks)})" if marks else "")


def _paint_curves(picture: Any, data: Any) -> None:
    axes = picture.subplots()
    axes.set_title(f"{data['title']}: validation {data['unit']} against training time")
    axes.set_xlabel("training time (logarithmic)")
    axes.set_ylabel(f"validation {data['unit']}")
    axes.set_xscale("log")
    lowest = min(bits for line in data["lines"] for _, bits in line["points"] + line["end"])
    drawn = {line["row"] for line in data["lines"]}
    levels = {row: level for row, level in data["paper"].items() if row in drawn}
    lowest = min([lowest, *levels.values()])
    first = [line["points"][max(0, len(line["points"]) // 20)][1] for line in data["lines"]]
    highest = min(max(first), lowest + 0.8)
    axes.set_ylim(lowest - 0.03, highest + 0.03)
    every = [point for line in data["lines"] for point in line["points"]]
    seen = [minutes for minutes, bits in every if bits <= highest] or [minutes for minutes, _ in every]
    axes.set_xlim(min(seen) * 0.6, max(seen) * 1.3)
    for line in data["lines"]:
        colour = COLOURS.get(line["row"], INK)
        style = "-" if line["kind"] == "fast" else (0, (4, 2))
        x, y = zip(*line["points"], strict=True)
        axes.plot(x, y, color=colour, linestyle=style, label=line["label"])
        for minutes, bits in line["end"]:
            _paint_end(axes, (x[-1], minutes), (y[-1], bits), colour)
    _paint_levels(axes, levels)
    _minutes_axis(axes.xaxis)
    picture.legend(loc="outside lower center", ncols=2)


def _paint_end(axes: Any, x: tuple[float, float], y: tuple[float, float], colour: str) -> None:
    """A ring at the second point, tied to the curve's end."""
    axes.plot(x, y, color=colour, linewidth=0.8)
    axes.plot(x[1:], y[1:], color=colour, marker="o", markersize=5, markerfacecolor="white", linestyle="none")


def _paint_levels(axes: Any, levels: Mapping[str, float]) -> None:
    """The paper's figure of each row."""
    low, high = axes.get_ylim()
    for row, level, height in apart(levels, 0.038 * (high - low)):
        colour = COLOURS.get(row, INK)
        axes.axhline(level, color=colour, linewidth=1.2, linestyle=":", zorder=1.8)  # above the grid
        axes.annotate(
            f"paper (test) {level:.{2 if round(level, 2) == level else 3}f}",
            (0, height),
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            xytext=(4, 2),
            fontsize=8,
            color=colour,
        )


def _paint_sizes(picture: Any, data: Any) -> None:
    axes = picture.subplots()
    axes.set_title("Hutter Prize: test bits/char against size, 4 epochs")
    axes.set_xlabel("million parameters (logarithmic)")
    axes.set_ylabel("test bits/char")
    axes.set_xscale("log")
    for name, points in data.items():
        if points:
            colour = BLUE if name.startswith("mLSTM") else VERMILLION
            style, face = _SETUPS[name.rpartition(", ")[2]]
            x = [parameters / 1e6 for parameters, _ in points.values()]
            y = [score for _, score in points.values()]
            axes.plot(
                x, y, color=colour, linestyle=style, marker="o", markersize=6, label=name,
                markerfacecolor=colour if face else "white", markeredgecolor=colour,
            )  # fmt: skip
    from matplotlib.ticker import FixedLocator, NullLocator

    axes.xaxis.set_major_locator(FixedLocator([3, 5, 10, 15, 20]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.legend(loc="upper right")


_SETUPS: dict[str, tuple[Any, bool]] = {
    "authors' set-up": ("-", True),
    "matched": ((0, (4, 2)), True),
    "fast": ("-", False),
}


def _paint_surprise(picture: Any, data: Any) -> None:
    left, right = picture.subplots(1, 2, width_ratios=[1, 3.2])
    picture.suptitle(
        "Recovery from surprise: mean loss on the Hutter Prize test part",
        x=0.01,
        ha="left",
        weight="bold",
        fontsize=11,
    )
    series = [
        ("mLSTM, paper", paper.SURPRISE_MLSTM, BLUE, False),
        ("stacked LSTM, paper", paper.SURPRISE_LSTM, VERMILLION, False),
    ]
    if data["ours"]:
        ours = list(zip(*data["ours"], strict=True))
        series += [("mLSTM, ours", ours[0], BLUE, True), ("stacked LSTM, ours", ours[1], VERMILLION, True)]
    width = 0.8 / len(series)
    for n, (name, values, colour, filled) in enumerate(series):
        look = {"color": colour if filled else "white", "edgecolor": colour, "linewidth": 1.4}
        offset = (n - (len(series) - 1) / 2) * width
        for axes, places, heights in ((left, [0], values[:1]), (right, [1, 2, 3, 4], values[1:])):
            at = [place + offset for place in places]
            bars = axes.bar(at, heights, width * 0.9, label=name, zorder=2, **look)
            axes.bar_label(bars, fmt="%.2f", fontsize=6.5, padding=2, color=INK)
    left.set_xticks([0], ["10 % most\nsurprising"])
    right.set_xticks([1, 2, 3, 4], ["1", "2", "3", "4"])
    right.set_xlabel("symbols after the surprise")
    left.set_ylabel("bits")
    for axes in (left, right):
        axes.grid(visible=False, axis="x")
        axes.margins(y=0.12)
    right.legend(loc="upper right", ncols=2)


def _times(records: Sequence[Record]) -> dict[str, Any]:
    """For each level of validation bits/char the first minute it was reached, on the Hutter Prize text."""
    lines = []
    names = {
        "mlstm-emb-wn-vd-large": "46M",
        "mlstm-emb-wn-vd-large-ten": "46M (short run)",
        "mlstm-emb-wn-vd-large-long": "46M (long run)",
        "mlstm-emb-wn-vd": "22M",
    }
    for row, name in names.items():
        for kind in ("fast", "faithful"):
            record = _shown(records, "hutter", row, kind)
            if record is None:
                continue
            best, points = float("inf"), []
            for minutes, bits in record.validations():
                if bits < best and minutes > 0:
                    best = bits
                    points.append((bits, minutes))
            if len(points) > 1:
                label = f"{name} {_kind(record)}, {record['hardware']}"
                end = [(bits, minutes) for minutes, bits in _end(record)]
                lines.append({"row": row, "kind": kind, "label": label, "points": points, "end": end})
    return {"lines": lines} if lines else {}


def _paint_times(picture: Any, data: Any) -> None:
    axes = picture.subplots()
    axes.set_title("Hutter Prize: training time to a validation score")
    axes.set_xlabel("validation bits/char reached (better to the right)")
    axes.set_ylabel("training time (logarithmic)")
    axes.set_yscale("log")
    for line in data["lines"]:
        x, y = zip(*line["points"], strict=True)
        style = "-" if line["kind"] == "fast" else (0, (4, 2))
        colour = COLOURS[line["row"]]
        axes.plot(x, y, color=colour, linestyle=style, marker=".", label=line["label"])
        for bits, minutes in line["end"]:
            _paint_end(axes, (x[-1], bits), (y[-1], minutes), colour)
    axes.plot([1.24], [paper.AUTHORS_MINUTES], marker="D", markersize=7, color=INK, linestyle="none")
    axes.annotate(
        "authors' 46M model, 1.24 test:\na week on a GTX 1080 Ti",
        (1.24, paper.AUTHORS_MINUTES),
        textcoords="offset points",
        xytext=(-9, 0),
        ha="right",
        va="center",
        fontsize=9,
    )
    worst = max(bits for line in data["lines"] for bits, _ in line["points"])
    best = min(bits for line in data["lines"] for bits, _ in line["points"] + line["end"])
    worst = min(worst, max(1.8, best + 0.1))
    axes.set_xlim(worst + 0.02, min(best, 1.24) - 0.02)
    soonest = min(minutes for line in data["lines"] for bits, minutes in line["points"] if bits <= worst)
    axes.set_ylim(soonest * 0.6, paper.AUTHORS_MINUTES * 2)
    _minutes_axis(axes.yaxis)
    axes.legend(loc="center left")


def _minutes_axis(axis: Any) -> None:
    """Ticks that people have words for."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    names = {
        0.1: "6 s", 0.25: "15 s", 0.5: "30 s", 1: "1 min", 2: "2 min", 5: "5 min", 10: "10 min", 20: "20 min",
        60: "1 h", 240: "4 h", 1440: "1 day", 10080: "1 week",
    }  # fmt: skip
    axis.set_major_locator(FixedLocator(list(names)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: names.get(round(value, 4), "")))
