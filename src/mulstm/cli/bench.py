"""`mulstm bench`: how fast this machine runs our layers beside others'."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from mulstm import console, files
from mulstm.cli._options import AsJson, Device, Quiet
from mulstm.cli._output import require_room

PARTS = ("layer", "update", "cells", "evaluate", "sample", "losses")


def command(
    device: Device = "auto",
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Measurements of each contender.")] = 15,
    small: Annotated[bool, typer.Option("--small", help="Small sizes, for a first look.")] = False,
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="PART", help=f"On a GPU, some parts only: {', '.join(PARTS)}."),
    ] = None,
    save: Annotated[
        Path | None,
        typer.Option(
            "--save",
            help="Also write the JSON to this file, the losses beside it. For all of a GPU's parts the "
            "default is results/bench/GPU.json where there is such a folder.",
        ),
    ] = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Time layers, updates and streams beside other software.

    The others are torch.nn.LSTM and a plain loop; each is timed after its check.
    """
    from mulstm import bench, parallel
    from mulstm.bench.timing import fault
    from mulstm.report import musts

    place = str(parallel.pick(device))
    unknown = [part for part in only or [] if part not in PARTS]
    if unknown:
        raise typer.BadParameter(f"{unknown[0]!r} is none of {', '.join(PARTS)}", param_hint="--only")
    if only and place == "cpu":
        raise typer.BadParameter("a CPU's benchmark has no parts to choose from", param_hint="--only")

    require_room(save, force=True)  # a place that cannot be written is told before minutes of work

    def say(line: str) -> None:
        if not quiet:
            console.note(line)

    def keep(found: dict[str, Any]) -> None:
        path = save or (None if small or only else _usual(found))
        if path is not None:
            _write(path, found)

    found = bench.run(place, repeats=repeats, quick=small, parts=only or (), say=say, keep=keep)
    keep(found)
    if as_json:
        console.result_json(found)
        # For whoever watches: stdout is a program's.
        for line in musts.cells(found.get("musts", [])):
            say("; ".join(f"{name} {cell}" for name, cell in zip(musts.HEAD, line, strict=True)))
    else:
        _show(found)
    if wrong := fault(found):
        raise wrong


def _usual(found: dict[str, Any]) -> Path | None:
    """Where a GPU's record belongs in a checkout; None elsewhere, and for a CPU."""
    folder = Path("results/bench")
    if "device" not in found["machine"] or not folder.is_dir():
        return None
    words = str(found["machine"]["device"]).lower().removeprefix("nvidia").split()
    return folder / f"{'-'.join(words)}.json"


def _write(path: Path, found: dict[str, Any]) -> None:
    """The rows into this file, the curves of losses into one beside it."""
    losses = found.get("losses")
    files.write_atomic(path, files.json_text({k: v for k, v in found.items() if k != "losses"}))
    if losses is not None:
        files.write_atomic(path.with_name(f"losses-{path.name}"), files.json_text(losses))


def _show(found: dict[str, Any]) -> None:
    from mulstm.report import musts

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
    if "musts" in found:
        console.result("")
        console.table(musts.HEAD, musts.cells(found["musts"]))
