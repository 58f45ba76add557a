"""`mulstm fetch`: a checked local copy of a corpus."""

from __future__ import annotations

from typing import Annotated

import typer

from mulstm import console
from mulstm.cli._options import DataDir


def command(
    names: Annotated[list[str], typer.Argument(help='Corpora by name; "mulstm corpora" lists them.')],
    data_dir: DataDir = None,
) -> None:
    """Get a corpus, check it, and print where its files are."""
    from mulstm import data

    for name in names:
        paths = data.fetch(name, data_dir)
        for path in paths:
            console.result(str(path))
        if not paths:
            console.note(f"{name} needs no files.")
