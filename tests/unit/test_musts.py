"""What is asked of the GPU is read off the rows, and what the rows do not show is not claimed."""

from __future__ import annotations

from typing import Any

import pytest

from mulstm.report import musts

Row = dict[str, Any]


def row(name: str, level: str, hidden: int, speed: float, **more: Any) -> Row:
    shape = {"layer": (128, 200), "update": (256, 100), "evaluate": (500, 200), "sample": (1, 64)}[level]
    return {
        "name": name, "backend": "triton, one graph", "level": level, "hidden": hidden, "lanes": shape[0],
        "chunk": shape[1], "parameters": 20e6, "symbols_per_second": speed, "error_vs_float64": 0.004, **more,
    }  # fmt: skip


ROWS = [
    row("mlstm", "layer", 1900, 2.5e6),
    row("mlstm", "layer", 1900, 0.4e6, backend="triton, launch by launch", error_vs_float64=0.9),
    row("mlstm", "layer", 1900, 0.3e6, backend="triton, nn.MultiplicativeLSTM"),
    row("nn.LSTM", "layer", 1900, 1.0e6, backend="cudnn"),
    row("nn.LSTM", "layer", 1900, 1.3e6, backend="cudnn, one graph"),
    row("nn.LSTM equal parameters", "layer", 2144, 2.0e6, backend="cudnn", error_vs_float64=0.005),
    row("nn.LSTM equal parameters", "layer", 2144, 2.6e6, backend="cudnn, one graph", error_vs_float64=0.005),
    row("nn.LSTM equal parameters", "layer", 3152, 9.9e6, backend="cudnn"),
    row("mlstm", "update", 1900, 3.3e6),
    row("naive", "update", 1900, 0.2e6, backend="reference"),
    row("milstm", "update", 2219, 1.5e6, parameters=22e6),
    row("lstm", "update", 1900, 3.0e6, parameters=18e6),
    row("mlstm", "evaluate", 2800, 5.0e6),
    row("mlstm", "sample", 2800, 29e3),
]
LOSSES = {"agreement": {"held_out_difference_bits": -0.002, "held_out_range_of_seeds_bits": 0.003}}


def test_musts_and_goals() -> None:
    lines = {one["work"]: one for one in musts.table(ROWS, LOSSES)}

    def of(*words: str) -> Row:
        (found,) = [one for work, one in lines.items() if all(word in work for word in words)]
        return found

    same = "same hidden size"
    assert of("layer in a graph", "1900", same, "as it comes")["measured"] == 2.5
    assert of("layer in a graph", "1900", same, "as it comes")["met"] is True
    assert of("layer in a graph", "1900", f"{same}, in a graph")["met"] is False
    equal = of("layer in a graph", "1900", "equal parameters", "as it comes")
    assert (equal["measured"], equal["met"], equal["goal_met"]) == (1.25, True, False)
    assert of("layer in a graph", "1900", "equal parameters, in a graph")["met"] is False
    # Nothing of ours was measured at 2800: nothing is said.
    unknown = of("layer in a graph", "2800", "as it comes")
    assert (unknown["measured"], unknown["met"], unknown["goal_met"]) == (None, None, None)
    alone = of("nn.MultiplicativeLSTM without a graph", "1900")
    assert (alone["measured"], alone["met"]) == (0.15, None)
    assert (of("naive loop")["measured"], of("naive loop")["met"]) == (pytest.approx(16.5), True)
    assert of("evaluation")["measured"] == 1.0
    assert (of("evaluation")["met"], of("evaluation")["goal_met"]) == (True, False)
    assert of("sampling")["goal_met"] is True
    # The error is that of the row whose time is shown, the fastest.
    assert of("gradient error", "layer", "1900")["measured"] == 0.8
    assert of("milstm of hidden 2219")["measured"] == 50.0
    assert of("milstm of hidden 2219")["met"] is False
    assert of(", lstm of hidden 1900")["measured"] == pytest.approx(81.82)
    losses = of("short training run")
    assert (losses["measured"], losses["must"], losses["met"]) == (0.002, 0.003, True)


def test_the_table_for_people() -> None:
    body = {line[0]: line[1:] for line in musts.cells(musts.table(ROWS, None))}
    assert all(len(line) == len(musts.HEAD) - 1 for line in body.values())
    assert body["full update, hidden 1900, 256 x 100"] == ["3.20 M/s", "4.50 M/s", "3.30 M/s", "yes", "no"]
    assert body["full update, hidden 450, 128 x 200"] == ["8.00 M/s", "15.00 M/s", "not measured", "–", "–"]
    assert body["sampling one stream, hidden 2800"] == ["12.0 k/s", "25.0 k/s", "29.0 k/s", "yes", "yes"]
    assert [musts.FORMATS["symbols/s"](speed) for speed in (99_900, 1e5)] == ["99.9 k/s", "0.10 M/s"]
    evaluation = body["evaluation, hidden 2800, 500 lanes, 5 M symbols"]
    assert evaluation == ["at most 1.50 s", "at most 0.90 s", "1.00 s", "yes", "no"]
    (losses,) = [line for work, line in body.items() if work.startswith("a short training run")]
    assert losses == ["–", "–", "not measured", "–", "–"]
