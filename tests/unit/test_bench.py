"""The benchmark gives the rows it promises, and times nobody whose answers are wrong."""

from __future__ import annotations

import json

import pytest

from mulstm import bench
from mulstm.bench import cpu
from mulstm.errors import CheckFailedError

KEYS = ["name", "backend", "level", "device", "precision", "hidden", "lanes", "chunk", "parameters"]
KEYS += ["milliseconds", "symbols_per_second", "error_vs_float64"]


def test_rows() -> None:
    said: list[str] = []
    found = bench.run("cpu", repeats=2, quick=True, say=said.append)
    assert json.loads(json.dumps(found)) == found
    assert found["machine"]["cores"] >= 1
    assert said[0] == "round 1 of 2"
    rows = found["rows"]
    for row in rows:
        assert all(key in row for key in KEYS)
        assert row["milliseconds_best"] <= row["milliseconds"]
        assert 0 < row["error_vs_float64"] < (4e-2 if row["precision"] == "bf16" else 1e-4)
    names = {(r["name"], r["level"], r["precision"]) for r in rows}
    for level in ("layer", "evaluate"):
        for name in ("mlstm", "nn.LSTM", "nn.LSTM equal parameters", "naive"):
            assert (name, level, "fp32") in names
        assert ("mlstm", level, "bf16") in names
    assert {("mlstm", "sample", "fp32"), ("mlstm", "sample", "bf16"), ("naive", "sample", "fp32")} <= names


def test_equal_parameters() -> None:
    contenders = list(cpu.layers(**cpu.LAYER))
    size = {c.name: c.parameters for c in contenders}
    assert abs(size["nn.LSTM equal parameters"] - size["mlstm"]) < 0.002 * size["mlstm"]


def test_nobody_wrong_is_timed() -> None:
    (one, *_) = cpu.streams(hidden=8, alphabet=5)
    worked: list[int] = []
    one.error, one.work = lambda: 0.5, lambda: worked.append(1)
    with pytest.raises(CheckFailedError, match=r"mlstm \(fused, fp32\) differs from float64 by 0.5"):
        cpu.in_turn([one], 3, lambda line: None)
    assert not worked
    one.error = lambda: float("nan")
    with pytest.raises(CheckFailedError):
        cpu.in_turn([one], 3, lambda line: None)
