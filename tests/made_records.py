"""Made-up records for tests of reports, and how to read a table that is made of them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from mulstm import recipe
from mulstm.report import records, tables


def add(results: Path, name: str, bits: float, *, seed: int = 1, minutes: float = 10.0, **more: Any) -> Path:
    """A record with a made-up curve that ends a little above `bits`."""
    one = recipe.load(name)
    values = {
        "recipe": name,
        "table": one.table,
        "row": one.row,
        "kind": one.kind,
        "seed": seed,
        "parameters": 20_394_600,
        "complete": True,
        "reason": "",
        "valid_bits_per_char": bits + 0.01,
        "test_bits_per_char": bits,
        "test_symbols": 5_000_000,
        "evaluate_lanes": 10,
        "epochs": one.train.epochs,
        "updates": 1000,
        "train_seconds": 60 * minutes,
        "hardware": "some GPU",
        "precision": "bf16",
        "backend": "fused",
        "commit": "0123",
        "settings": recipe.settings(one),
        **more,
    }
    path = records.place(results, str(values["recipe"]), seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values))
    lines = [
        {
            "update": n,
            "seconds": 6 * n * minutes,
            "train_bits_per_char": bits,
            "valid_bits_per_char": bits + math.exp(-n),
        }
        for n in range(1, 11)
    ]
    path.with_suffix(".jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def cells(page: str, start: str) -> list[str]:
    """The cells of the table line that begins so."""
    (line,) = [line for line in page.splitlines() if line.startswith(f"| {start} |")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def markdown(results: Path) -> str:
    return tables.markdown(records.read(results), None)
