"""`mulstm bench`: how fast this machine runs our layers beside others'."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mulstm.cli._options import AsJson, Device, Quiet


def command(
    device: Device = "auto",
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Measurements of each contender.")] = 15,
    small: Annotated[bool, typer.Option("--small", help="Small sizes, for a first look.")] = False,
    save: Annotated[Path | None, typer.Option("--save", help="Also write the JSON to this file.")] = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Time the layers against torch.nn.LSTM and a plain loop, each only after it has passed its check."""
    from mulstm import bench, console, parallel, runs

    def say(line: str) -> None:
        if not quiet:
            console.note(line)

    found = bench.run(str(parallel.pick(device)), repeats=repeats, quick=small, say=say)
    if save is not None:
        runs.write_atomic(save, runs.json_text(found))
    if as_json:
        console.result_json(found)
        return
    head = ["name", "backend", "level", "precision", "hidden", "lanes", "chunk", "ms", "symbols/s", "error"]
    console.table(
        head,
        [
            [
                *(str(row[key]) for key in head[:7]),
                f"{row['milliseconds']:.2f}",
                f"{row['symbols_per_second']:,.0f}",
                f"{row['error_vs_float64']:.1e}",
            ]
            for row in found["rows"]
        ],
    )
