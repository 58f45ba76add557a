"""`mulstm embed`: representations of records."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mulstm import console
from mulstm.cli._options import AsJson, Device, Model, Quiet
from mulstm.cli._output import Force, require_room
from mulstm.cli._records import Column, IdColumn, Input, Kind, Lanes, Upper, read
from mulstm.errors import DataError

VECTORS = {"mean": "h_mean", "final": "h_final", "cell": "c_final", "joined": "joined"}


def command(
    model: Model,
    source: Input,
    out: Annotated[Path, typer.Option("--out", "-o", help="What to write: .npz, .parquet or .jsonl.")],
    force: Force = False,
    what: Annotated[
        list[str] | None,
        typer.Option(
            "--what",
            help="mean, final, cell or joined; repeatable (default: the first three that the model has).",
        ),
    ] = None,
    positions: Annotated[
        bool, typer.Option("--positions", help="Also h after each symbol: rows of h, cut by offsets.")
    ] = False,
    units: Annotated[str, typer.Option("--units", help="Only these units, as in 3,17,2388.")] = "",
    kind: Kind = "",
    column: Column = "",
    id_column: IdColumn = "",
    upper: Upper = False,
    lanes: Lanes = 0,
    device: Device = "cpu",
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Turn texts or proteins of any length into vectors.

    Rows come in input order, and memory is bounded. The .npz holds id, h_mean, h_final and c_final. For
    UniRep's models h_mean is "the" vector.
    """
    from mulstm import checkpoint, parallel
    from mulstm.embedding import Wanted, embed_file, files, require_readable
    from mulstm.packing import LANES

    if unknown := [name for name in what or [] if name not in VECTORS]:
        raise typer.BadParameter(f"{unknown[0]!r} is none of {', '.join(VECTORS)}", param_hint="--what")
    chosen = _units(units)
    files.check(out)
    require_room(out, force, read=(source, model))
    loaded = checkpoint.load(model, parallel.pick(device))
    has_c = bool(loaded.model.c_width)
    if "cell" in (what or []) and not has_c:
        raise DataError(f"The cell {loaded.model.recipe.cell} has no c. Ask for mean or final.")
    vectors = tuple(VECTORS[name] for name in what or ("mean", "final", *["cell"] * has_c))
    wanted = Wanted(vectors, positions, chosen)
    if Path(source).is_file():  # which can be read twice: hours of work are not lost to its last record
        require_readable(loaded, read(source, kind, column, id_column, upper))
    with console.moving(0, "embed", quiet, "records") as tell:
        summary = embed_file(
            loaded,
            read(source, kind, column, id_column, upper),
            out,
            wanted=wanted,
            lanes=lanes or LANES,
            progress=tell,
        )
    facts = {
        "out": str(out),
        "records": summary.records,
        "symbols": summary.symbols,
        "seconds": summary.seconds,
        "symbols_per_second": summary.symbols / summary.seconds,
    }
    if as_json:
        console.result_json(facts)
    else:
        console.result(
            f"{out}: {console.counted(summary.records, 'record')}, "
            f"{console.counted(summary.symbols, 'symbol')} in {console.duration(summary.seconds)}, "
            f"{summary.symbols / summary.seconds:,.0f} symbols/s"
        )


def _units(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in text.split(",")) if text else ()
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no list of units such as 3,17", param_hint="--units") from None
