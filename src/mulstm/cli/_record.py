"""How the record of a run is told to people."""

from __future__ import annotations

from typing import Any

from mulstm import console
from mulstm.job import CUT


def lines(record: dict[str, Any]) -> list[str]:
    """A few lines with what matters in a record."""
    told = []
    for part in ("valid", "test"):
        if record.get(f"{part}_bits_per_char") is not None:
            bits, symbols = record[f"{part}_bits_per_char"], record[f"{part}_symbols"]
            line = f"{part:<6} {bits:.4f} bits/char on {symbols:,} symbols"
            if f"{part}_word_perplexity" in record:
                line += f", word perplexity {console.decimal(record[f'{part}_word_perplexity'], 2)}"
            told.append(line)
    told.append(
        f"{record['updates']:,} updates ({record['epochs']:.2f} epochs) of {record['parameters']:,} weights, "
        f"{console.duration(record['train_seconds'])} on {record['hardware']}"
    )
    if record.get("stopped") not in ("", None, CUT):  # of a run that was cut short the reason says all
        told.append(f"stopped early: {record['stopped']}")
    if not record["complete"]:
        told.append(record["reason"])
    return told
