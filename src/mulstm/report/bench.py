"""What results/bench shows: times beside the others', curves of losses, and what was asked for and met."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from mulstm.errors import RunError
from mulstm.report import musts
from mulstm.report.canvas import BLUE, FAINT, INK, ORANGE, SKY, VERMILLION, Figure
from mulstm.report.records import is_of, read_object
from mulstm.report.tables import grid, picture

Rows = list[dict[str, Any]]
TICKS = (2, 5, 10, 20, 50, 100, 200, 500)
NAMES = {
    "mlstm": "mLSTM",
    "nn.LSTM": "LSTM",
    "nn.LSTM padded": "LSTM",
    "nn.LSTM equal parameters": "LSTM",
    "naive": "mLSTM",
    "torchrecurrent": "mLSTM",
    "flashrnn": "LSTM",
    "lstm": "LSTM",
    "lstm, 2 layers": "LSTM 2 x",
    "milstm": "MI-LSTM",
    "mlstm, initial unit": "mLSTM",
}
HOW = {"cudnn": "cuDNN", "cudnn, one graph": "cuDNN in a graph"}
WHO = {
    "naive": "plain loop",
    "torchrecurrent": "torchrecurrent",
    "flashrnn": "FlashRNN",
    "mlstm, initial unit": "initial unit, one graph",
}
KINDS = {  # of what a row has; more in records.WHAT
    **dict.fromkeys(("name", "level", "backend"), "text"),
    **dict.fromkeys(("hidden", "lanes", "chunk", "parameters"), "count"),
    **dict.fromkeys(("milliseconds", "symbols_per_second"), "number"),
    "error_vs_float64": "score",
}
POSITIVE = ("parameters", "milliseconds", "symbols_per_second")
AGAIN = "Make it again with mulstm bench."
MEAN_OF = 10  # updates, in the lower half of the figure of losses


def _machines(results: Path) -> Iterator[tuple[str, dict[str, Any], dict[str, Any] | None]]:
    """Name, record and, where there are any, curves of losses."""
    for path in sorted((results / "bench").glob("*.json")):
        if path.name.startswith("losses-"):
            continue
        beside = path.with_name(f"losses-{path.name}")
        losses = read_object(beside, AGAIN) if beside.is_file() else None
        if losses is not None and not _are_losses(losses):
            raise RunError(f"{beside} does not hold curves of losses. {AGAIN}")
        record = read_object(path, AGAIN)
        if not isinstance(record.get("machine"), dict) or (_is_gpu(record) and not _has_rows(record)):
            raise RunError(f"{path} is not the record of a benchmark. {AGAIN}")
        yield path.stem, record, losses


def _has_rows(record: dict[str, Any]) -> bool:
    def is_one(row: Any) -> bool:
        if not isinstance(row, dict) or not row.keys() >= KINDS.keys():
            return False
        return all(is_of(row[key], kind) for key, kind in KINDS.items()) and all(row[k] > 0 for k in POSITIVE)

    rows = record.get("rows")
    return isinstance(rows, list) and all(map(is_one, rows))


def _are_losses(losses: dict[str, Any]) -> bool:
    """Whether there is everything that the figure shows."""
    model, agreement, curves = (losses.get(key) for key in ("model", "agreement", "curves"))
    if not isinstance(model, dict) or not isinstance(agreement, dict) or not isinstance(curves, list):
        return False
    bits: list[Any] = [curve.get("bits") if isinstance(curve, dict) else None for curve in curves]
    if not all(isinstance(one, list) for one in bits) or len(bits) < 2 or len(set(map(len, bits))) > 1:
        return False
    held_out = [agreement.get(f"held_out_{key}_bits") for key in ("difference", "range_of_seeds")]
    return (
        all(is_of(number, "number") for number in (*chain(*bits), *held_out))
        and all(is_of(model.get(key), "count") for key in ("hidden", "lanes", "chunk"))
        and is_of(losses.get("text"), "text")
    )


def figures(results: Path) -> list[Figure]:
    """For each GPU its times; and its losses, where they were measured."""
    found = []
    for name, record, losses in _machines(results):
        panels = _panels(record["rows"]) if _is_gpu(record) else []
        if panels:
            data = {"machine": name.upper(), "panels": panels}
            lines = sum(len(panel["points"]) for panel in panels) + 3 * len(panels)
            found.append(Figure(f"bench-{name}", data, _paint, (8.4, 0.6 + 0.2 * lines)))
        if losses:
            about = {"machine": name.upper(), "losses": losses}
            found.append(Figure(f"losses-{name}", about, _paint_losses, (7.6, 6.0)))
    return found


def markdown(results: Path, drawn: Collection[str] = ()) -> str:
    """What was asked of each GPU beside what it did; empty where there is none."""
    parts = []
    for name, record, losses in _machines(results):
        if _is_gpu(record):
            several = " The rows come from several runs; the record says which." if "runs" in record else ""
            date = record["machine"].get("date")
            when = f" of {date}" if is_of(date, "text") else ""
            parts += [
                f"## Speed on one {name.upper()}: asked for and measured",
                f"Made from `results/bench/{name}.json`{when}, in bf16.{several} *Must* and *goal* were set "
                "before the kernels were written. A cell's share is of symbols/s x parameters: a model of "
                "more parameters may be slower in proportion. cuDNN's LSTM is slow at widths like 1900: "
                "[docs/kernels.md](../docs/kernels.md) has it padded, too, and what has changed since.",
                grid(musts.HEAD, musts.cells(musts.table(record["rows"], losses))),
                picture(f"bench-{name}", drawn, f"Times on one {name.upper()}"),
                picture(f"losses-{name}", drawn, "Losses of a short run, fastest backend and reference"),
            ]
    return "\n\n".join(filter(None, parts)) + "\n" if parts else ""


def _is_gpu(record: dict[str, Any]) -> bool:
    return "device" in record["machine"]


def _panels(rows: Rows) -> list[dict[str, Any]]:
    """The layers of each size of ours, then the updates at the size where most take part."""
    found = []
    layers = [row for row in rows if row["level"] == "layer" and (row["lanes"], row["chunk"]) == (128, 200)]
    sizes = sorted({row["hidden"] for row in layers if row["name"] == "mlstm"})
    for size in sizes:
        near = [row for row in layers if min(sizes, key=lambda s: abs(s - row["hidden"])) == size]
        found.append(_panel(f"Layer, forward and backward, hidden {size}, 128 x 200", near))
    wide = [row for row in rows if row["level"] == "update" and (row["lanes"], row["chunk"]) == (256, 100)]
    most = [row for row in wide if row["hidden"] < 2500]
    if len(most) > 1:
        found.append(_panel("Full training update, 256 x 100, and millions of parameters", most))
    return found


def _panel(title: str, rows: Rows) -> dict[str, Any]:
    points = [
        {
            "label": _label(row),
            "ms": row["milliseconds"],
            "low": row.get("milliseconds_p10", row["milliseconds"]),
            "high": row.get("milliseconds_p90", row["milliseconds"]),
            "kind": _kind(row),
        }
        for row in sorted(rows, key=lambda row: -float(row["milliseconds"]))
    ]
    return {"title": title, "points": points}


def _kind(row: dict[str, Any]) -> str:
    if row["name"] == "mlstm":
        return "ours"
    return "cudnn" if row["name"].startswith("nn.") else "cells" if row["name"] in musts.CELLS else "others"


def _label(row: dict[str, Any]) -> str:
    how = HOW.get(row["backend"], row["backend"].removeprefix("triton, "))
    how = WHO.get(row["name"], how)
    which = row["name"].removeprefix("nn.LSTM")
    which = f",{which}" if which in (" padded", " equal parameters") else ""
    size = f", {row['parameters'] / 1e6:.0f} M" if row["level"] == "update" else ""
    return f"{NAMES.get(row['name'], row['name'])} {row['hidden']}{which} ({how}){size}"


COLOURS = {"ours": BLUE, "cudnn": VERMILLION, "cells": SKY, "others": FAINT}
LEGEND = {
    "ours": "multiplicative LSTM, ours",
    "cudnn": "torch.nn.LSTM",
    "cells": "other cells, ours",
    "others": "plain loops and others",
}


def _paint(picture: Any, data: Any) -> None:
    """Points, not bars: on a logarithmic axis a bar's length would mean nothing."""
    panels = data["panels"]
    axes = picture.subplots(
        len(panels), 1, sharex=True, squeeze=False, height_ratios=[len(p["points"]) + 2 for p in panels]
    )[:, 0]
    times = [point[key] for panel in panels for point in panel["points"] for key in ("low", "high")]
    kinds: dict[str, Any] = {}
    for axis, panel in zip(axes, panels, strict=True):
        for place, point in enumerate(panel["points"]):
            colour = COLOURS[point["kind"]]
            axis.plot([point["low"], point["high"]], [place, place], color=colour, linewidth=3, alpha=0.4)
            (mark,) = axis.plot(
                [point["ms"]], [place], color=colour, marker="o", markersize=6, linestyle="none"
            )
            kinds.setdefault(point["kind"], mark)
            axis.annotate(
                f"{point['ms']:.1f}", (point["high"], place), (7, 0),
                textcoords="offset points", va="center", fontsize=8, color=INK,
            )  # fmt: skip
        labels = [point["label"] for point in panel["points"]]
        axis.set_yticks(range(len(labels)), labels, fontsize=8)
        axis.set_ylim(-0.7, len(labels) - 0.3)
        axis.set_xscale("log")
        axis.set_xlim(0.75 * min(times), 1.6 * max(times))
        shown = [tick for tick in TICKS if 0.75 * min(times) <= tick <= 1.6 * max(times)]
        axis.set_xticks(shown, [str(tick) for tick in shown])
        axis.minorticks_off()
        axis.tick_params(labelbottom=True, labelsize=8)
        axis.set_title(panel["title"], fontsize=10, pad=6)
    axes[-1].set_xlabel(
        f"milliseconds on one {data['machine']}, bf16 (logarithmic); median, 10th to 90th percentile",
        fontsize=9,
    )
    order = [kind for kind in LEGEND if kind in kinds]
    picture.legend(
        [kinds[kind] for kind in order], [LEGEND[kind] for kind in order],
        loc="outside lower center", ncols=len(order), handlelength=1.0,
    )  # fmt: skip


def _smooth(bits: list[float]) -> list[float]:
    """Means of so many updates."""
    return [sum(bits[k : k + MEAN_OF]) / MEAN_OF for k in range(0, len(bits) - MEAN_OF + 1, MEAN_OF)]


def _paint_losses(picture: Any, data: Any) -> None:
    losses = data["losses"]
    plain, first, *others = losses["curves"]
    model, agreement = losses["model"], losses["agreement"]
    size = f"{model['lanes']} x {model['chunk']}"
    top, bottom = picture.subplots(2, 1, sharex=True, height_ratios=[1.5, 1])
    updates = range(1, len(plain["bits"]) + 1)
    top.plot(updates, plain["bits"], color=ORANGE, linewidth=3.2, label="reference, fp32")
    top.plot(
        updates, first["bits"], color=BLUE, linewidth=1.1, label=f"fastest backend, bf16 ({data['machine']})"
    )
    top.set_title(f"Training loss: hidden {model['hidden']}, {size}, corpus {losses['text']}")
    top.set_ylabel("bits/char")
    top.legend(loc="upper right")
    centres = [MEAN_OF * k + (MEAN_OF + 1) / 2 for k in range(len(_smooth(plain["bits"])))]
    for n, other in enumerate(others):
        gap = [b - a for a, b in zip(_smooth(plain["bits"]), _smooth(other["bits"]), strict=True)]
        label = "fastest backend, other masks and order" if n == 0 else None
        bottom.plot(centres, gap, color=FAINT, linewidth=1.0, label=label)
    gap = [b - a for a, b in zip(_smooth(plain["bits"]), _smooth(first["bits"]), strict=True)]
    bottom.plot(centres, gap, color=BLUE, label="fastest backend, same masks and order")
    bottom.axhline(0, color=ORANGE, linewidth=1.2, zorder=1)
    bottom.set_ylabel(f"minus reference,\nmean of {MEAN_OF} updates")
    apart = f"{agreement['held_out_difference_bits']:+.4f}".replace("-", "−")
    bottom.set_xlabel(
        f"updates.  Held out, after the last: {apart} bits/char from reference; "
        f"seeds range over {agreement['held_out_range_of_seeds_bits']:.4f}",
        fontsize=9,
    )
    low, high = bottom.get_ylim()
    bottom.set_ylim(low, high + 0.25 * (high - low))  # room for the legend
    bottom.legend(loc="upper right", ncols=2)
