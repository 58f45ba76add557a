"""The benchmark's figures and its table of what was asked for follow from the rows alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mulstm import report
from mulstm.errors import RunError
from mulstm.report import bench


def row(name: str, backend: str, level: str, hidden: int, ms: float) -> dict[str, Any]:
    lanes, chunk = (128, 200) if level == "layer" else (256, 100)
    return {
        "name": name, "backend": backend, "level": level, "hidden": hidden, "lanes": lanes, "chunk": chunk,
        "parameters": 20_000_000, "milliseconds": ms, "milliseconds_p10": 0.9 * ms,
        "milliseconds_p90": 1.2 * ms, "symbols_per_second": 25_600_000 / ms, "error_vs_float64": 0.004,
    }  # fmt: skip


ROWS = [
    row("mlstm", "triton, one graph", "layer", 1900, 9.0),
    row("mlstm", "fused", "layer", 1900, 90.0),
    row("nn.LSTM equal parameters", "cudnn, one graph", "layer", 2144, 10.0),
    row("torchrecurrent", "python loop", "layer", 1900, 270.0),
    row("mlstm", "triton, one graph", "layer", 2800, 17.0),
    row("nn.LSTM", "cudnn", "layer", 2800, 18.0),
    row("nn.LSTM padded", "cudnn", "layer", 2816, 17.5),
    row("mlstm", "triton, one graph", "update", 1900, 8.0),
    row("naive", "reference", "update", 1900, 130.0),
    row("lstm, 2 layers", "triton, one graph", "update", 1250, 12.0),
    row("mlstm", "triton, one graph", "update", 2800, 14.0),
]


def curve(seed: int, held_out: float) -> dict[str, Any]:
    return {"seed": seed, "bits": [8.0 - 0.1 * k + 0.01 * seed for k in range(35)], "held_out_bits": held_out}


LOSSES = {
    "model": {"hidden": 1900, "lanes": 128, "chunk": 50},
    "text": "python",
    "curves": [curve(1, 4.0), curve(1, 4.001), curve(2, 4.01), curve(3, 3.99)],
    "agreement": {"held_out_difference_bits": 0.001, "held_out_range_of_seeds_bits": 0.02},
}


@pytest.fixture
def results(tmp_path: Path) -> Path:
    folder = tmp_path / "results"
    (folder / "bench").mkdir(parents=True)
    (folder / "bench" / "h200.json").write_text(json.dumps({"machine": {"device": "H200"}, "rows": ROWS}))
    (folder / "bench" / "losses-h200.json").write_text(json.dumps(LOSSES))
    cpu = {"machine": {"cores": 2}, "rows": ROWS[:1]}
    (folder / "bench" / "cpu.json").write_text(json.dumps(cpu))
    return folder


def test_panels_and_their_labels(results: Path) -> None:
    times, losses = bench.figures(results)
    assert (times.name, losses.name) == ("bench-h200", "losses-h200")
    labels = [[point["label"] for point in panel["points"]] for panel in times.data["panels"]]
    # The slowest lies lowest; another's row stands with the size of ours nearest to its own.
    assert labels == [
        [
            "mLSTM 1900 (torchrecurrent)",
            "mLSTM 1900 (fused)",
            "LSTM 2144, equal parameters (cuDNN in a graph)",
            "mLSTM 1900 (one graph)",
        ],
        ["LSTM 2800 (cuDNN)", "LSTM 2816, padded (cuDNN)", "mLSTM 2800 (one graph)"],
        ["mLSTM 1900 (plain loop), 20 M", "LSTM 2 x 1250 (one graph), 20 M", "mLSTM 1900 (one graph), 20 M"],
    ]
    kinds = [point["kind"] for panel in times.data["panels"] for point in panel["points"]]
    assert kinds == ["others", "ours", "cudnn", "ours", "cudnn", "cudnn", "ours", "others", "cells", "ours"]


def test_what_was_asked_for_stands_in_the_tables(results: Path) -> None:
    changed = {path.name for path in report.write(results, None)}
    assert {"tables.md", "bench-h200.svg", "bench-h200.png", "losses-h200.svg", "losses-h200.png"} <= changed
    assert report.stale(results, None) == []
    page = (results / "tables.md").read_text()
    assert "## Speed on one H200: asked for and measured" in page
    assert "| full update, hidden 1900, 256 x 100 | 3.20 M/s | 4.50 M/s | 3.20 M/s | yes | no |" in page
    assert "several runs" not in page
    (results / "bench" / "losses-h200.json").unlink()
    assert report.stale(results, None) == [str(results / "tables.md")]
    assert [figure.name for figure in bench.figures(results)] == ["bench-h200"]


def test_no_gpu_no_table(results: Path) -> None:
    for path in (results / "bench").glob("*h200.json"):
        path.unlink()
    assert bench.figures(results) == []
    assert bench.markdown(results) == ""


@pytest.mark.parametrize(
    "rows",
    [
        *(None, [{}], [ROWS[0], "no row"]),
        *(
            [{**ROWS[0], "hidden": "wide"}],
            [{**ROWS[0], "backend": 3}],
            [{**ROWS[0], "symbols_per_second": 0}],
        ),
    ],
)
def test_what_is_no_record_of_a_benchmark(results: Path, rows: object) -> None:
    (results / "bench" / "h200.json").write_text(json.dumps({"machine": {"device": "H200"}, "rows": rows}))
    with pytest.raises(RunError, match=r"h200\.json is not the record of a benchmark\. Make it again"):
        bench.figures(results)


def test_a_record_without_a_machine_is_told(results: Path) -> None:
    (results / "bench" / "h200.json").write_text("{}")
    with pytest.raises(RunError, match=r"h200\.json is not the record of a benchmark"):
        bench.markdown(results)


@pytest.mark.parametrize(
    "change",
    [
        {"agreement": 3},
        {"agreement": {}},
        {"curves": []},
        {"curves": [curve(1, 4.0), {"bits": [8.0]}]},
        {"curves": [curve(1, 4.0), {"bits": ["x"] * 35}]},
        {"model": {"hidden": 1900}},
        {"text": None},
    ],
)
def test_what_are_no_losses(results: Path, change: dict[str, Any]) -> None:
    (results / "bench" / "losses-h200.json").write_text(json.dumps(LOSSES | change))
    with pytest.raises(RunError, match=r"losses-h200\.json does not hold curves of losses\. Make it again"):
        bench.markdown(results)
