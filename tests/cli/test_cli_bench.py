"""`mulstm bench` on a GPU, as far as a machine without one can see it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from process import Call

LOSSES = {"curves": [], "agreement": {"held_out_difference_bits": 0.1, "held_out_range_of_seeds_bits": 0.2}}


def test_bench_on_a_gpu(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command round the benchmark, which is made up here: what it writes, says and fails on."""
    machine = {"device": "NVIDIA H200"}
    row: dict[str, Any] = {
        "name": "mlstm",
        "backend": "triton, one graph",
        "level": "update",
        "precision": "bf16",
    }
    row |= {"hidden": 1900, "lanes": 256, "chunk": 100, "milliseconds": 8.0, "symbols_per_second": 3.2e6}
    row |= {"error_vs_float64": 0.004, "parameters": 22_000_000}
    wrong = {"contender": "milstm", "reason": "differs", "ours": True}
    asked: list[Any] = []

    def run(device: str, parts: Any, repeats: int, small: bool, say: Any, keep: Any) -> dict[str, Any]:
        asked.append((device, list(parts), repeats, small))
        keep({"machine": machine, "rows": []})
        return {"machine": machine, "rows": [row], "left_out": [wrong] if small else [], "losses": LOSSES}

    monkeypatch.setattr("mulstm.bench.cuda.run", run)
    monkeypatch.setattr("mulstm.parallel.pick", lambda device: torch.device("cuda"))
    file = tmp_path / "h200.json"
    code, out, err = call("bench", "--device", "cuda", "--json", "--save", file, "--only", "update")
    assert code == 0
    assert asked == [("cuda", ["update"], 15, False)]
    found = json.loads(out)
    assert found["losses"] == LOSSES
    assert json.loads((tmp_path / "losses-h200.json").read_text()) == LOSSES
    assert json.loads(file.read_text()) == {k: v for k, v in found.items() if k != "losses"}
    line = (
        "work full update, hidden 1900, 256 x 100; must 3.20 M/s; goal 4.50 M/s; measured 3.20 M/s; met yes"
    )
    assert line in err
    code, out, err = call("bench", "--device", "cuda", "--small", "-q")
    assert code == 4
    assert "1 of our contenders could not be timed, first milstm (differs)" in err
    assert "goal met" in out
    assert call("bench", "--only", "layers").code == 2
