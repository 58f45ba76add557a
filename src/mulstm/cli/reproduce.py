"""`mulstm reproduce`: a table of the paper, made again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from mulstm import console
from mulstm.cli._options import DataDir, Device, Minutes, RunsDir


def command(
    table: Annotated[str, typer.Argument(help="hutter, text8, wikitext2 or ptb.")],
    row: Annotated[
        str,
        typer.Option(
            "--row", help='One row only; named as its recipe in "mulstm recipes", without table and -fast.'
        ),
    ] = "",
    fast: Annotated[bool, typer.Option("--fast", help="Only our recipes.")] = False,
    faithful: Annotated[
        bool, typer.Option("--faithful", help="Only the authors' settings, and the -matched rows.")
    ] = False,
    seed: Annotated[
        list[int] | None, typer.Option("--seed", help="Instead of each recipe's own; repeatable.")
    ] = None,
    precision: Annotated[
        Literal["fp32", "bf16", "fp8"] | None,
        typer.Option("--precision", help="Instead of each recipe's own; bf16 is the fast one on most GPUs."),
    ] = None,
    minutes: Minutes = 0.0,
    report_only: Annotated[
        bool, typer.Option("--report-only", help="Train nothing; write tables and figures.")
    ] = False,
    results: Annotated[Path, typer.Option("--results", help="Where records, tables and figures are.")] = Path(
        "results"
    ),
    runs_dir: RunsDir = Path("runs"),
    device: Device = "auto",
    data_dir: DataDir = None,
) -> None:
    """Train what a table of the paper still lacks.

    It then writes the tables and figures. Interrupted, the same command goes on where it was.
    """
    from mulstm import report
    from mulstm.divergence import DivergedError
    from mulstm.report.records import KINDS
    from mulstm.reproduce import LeftOutError, reproduce, rows

    if fast and faithful:
        raise typer.BadParameter(
            "give one, or leave both out for all recipes", param_hint="--fast, --faithful"
        )
    if report_only:
        report.require_folder(results)
        report.require_records(results)
    asked = {"fast": fast, "faithful": faithful}
    chosen = rows(table, row, [kind for kind in KINDS if asked[kind]] or KINDS)
    failed = None
    if not report_only:
        try:
            reproduce(
                chosen,
                seeds=seed or (),
                precision=precision or "",
                minutes=minutes,
                results=results,
                runs_dir=runs_dir,
                data_dir=data_dir,
                device=device,
                note=console.note if console.speaks() else lambda _: None,
            )
        except (DivergedError, LeftOutError) as fault:  # the others have their records
            failed = fault
    if not console.speaks():  # the first of several writes for all; torchrun would end it with one that fails
        return
    results.mkdir(parents=True, exist_ok=True)
    for path in report.write(results, report.page_beside(results)):
        console.result(str(path))
    if failed is not None:
        raise failed
