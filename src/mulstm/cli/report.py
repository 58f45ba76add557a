"""`mulstm report`: tables and figures from the records of runs."""

from __future__ import annotations

from pathlib import Path
from shlex import quote
from typing import Annotated

import typer

from mulstm import console
from mulstm.cli._options import AsJson
from mulstm.errors import CheckFailedError


def command(
    results: Annotated[Path, typer.Option("--results", help="The folder of the records.")] = Path("results"),
    readme: Annotated[
        Path | None,
        typer.Option(
            "--readme",
            help="The page whose table is renewed (default: README.md beside a folder called results, where "
            "it has a place for it).",
        ),
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Write nothing; fail if anything is stale.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write tables and figures again from the records.

    They are results/tables.md, the figures beside it and the README's table.
    """
    from mulstm import report

    report.require_folder(results)
    report.require_records(results)
    page = readme or report.page_beside(results)
    changed = report.stale(results, page) if check else [str(path) for path in report.write(results, page)]
    if as_json:
        console.result_json({"stale" if check else "written": changed})
    else:
        for path in changed:
            console.result(path)
        if not changed and not check:
            console.note("Nothing has changed: tables and figures are those of the records.")
    if check and changed:
        where = "" if results == Path("results") else f" --results {quote(str(results))}"
        where += "" if readme is None else f" --readme {quote(str(readme))}"
        raise CheckFailedError(
            f'Older than the records: {console.counted(len(changed), "file")}. Run "mulstm report{where}".'
        )
