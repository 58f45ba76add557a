"""The benchmark gives the rows it promises, and times nobody whose answers are wrong."""

from __future__ import annotations

import json
import math

import torch

from mulstm import bench
from mulstm.bench import cpu, timing
from mulstm.bench.timing import Session, fault

KEYS = ["name", "backend", "level", "precision", "hidden", "lanes", "chunk", "parameters"]
KEYS += ["milliseconds", "symbols_per_second", "error_vs_float64"]


def test_rows() -> None:
    said: list[str] = []
    found = bench.run("cpu", repeats=2, quick=True, say=said.append)
    assert json.loads(json.dumps(found)) == found
    assert found["machine"]["cores"] >= 1
    assert said[0].startswith("mlstm 32 (fused), layer 4 x 10: error")
    assert not found["left_out"]
    rows = found["rows"]
    for row in rows:
        assert all(key in row for key in KEYS)
        assert 0 < row["error_vs_float64"] < (3e-2 if row["precision"] == "bf16" else 1e-4)
    names = {(r["name"], r["level"], r["precision"]) for r in rows}
    for level in ("layer", "evaluate"):
        for name in ("mlstm", "nn.LSTM", "nn.LSTM equal parameters", "naive"):
            assert (name, level, "fp32") in names
        assert ("mlstm", level, "bf16") in names
    assert {("mlstm", "sample", "fp32"), ("mlstm", "sample", "bf16"), ("naive", "sample", "fp32")} <= names


def test_equal_parameters() -> None:
    contenders = list(cpu.layers(**cpu.LAYER))
    size = {c.name: c.prepare().parameters for c in contenders}
    assert abs(size["nn.LSTM equal parameters"] - size["mlstm"]) < 0.002 * size["mlstm"]


def test_nobody_wrong_is_timed() -> None:
    (one, *_) = cpu.streams(hidden=8, alphabet=5)
    ready = one.prepare()
    session = Session("cpu", 3, lambda line: None)
    for error in (2e-4, float("nan")):  # of fp32
        ready.error, one.prepare = lambda error=error: error, lambda: ready
        assert session.in_turn([one]) == []
    wrong = fault({"left_out": session.left_out})
    assert "2 of our contenders" in str(wrong)
    assert "mlstm 8 (fused), sample 1 x 1 (differs from float64 by 0.0002, more than 0.0001)" in str(wrong)


def test_no_gradient_is_no_agreement() -> None:
    one = torch.ones(2)
    assert timing.largest([(one, one), (one, 2 * one)]) == 0.5
    assert math.isnan(timing.largest([(one, one), (one * math.nan, one), (one, one)]))
    assert math.isnan(timing.largest([(one, one), (None, one)]))
