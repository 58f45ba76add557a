"""Options of the commands that read records, spelled once."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from mulstm import console

if TYPE_CHECKING:
    from mulstm.records import Record

Input = Annotated[
    str, typer.Argument(help="FASTA, lines, JSONL or CSV, plain or compressed; - is the standard input.")
]
Kind = Annotated[
    str,
    typer.Option("--as", help="fasta, lines, jsonl, csv or whole (one text); else by the file's ending."),
]
Column = Annotated[str, typer.Option("--column", help="The field with the text (default: sequence or text).")]
IdColumn = Annotated[str, typer.Option("--id-column", help="The field with the name (default: id).")]
Upper = Annotated[bool, typer.Option("--upper", help="Write all letters in upper case first.")]
Lanes = Annotated[int, typer.Option("--lanes", min=0, help="Records read at once; 0: as many as do best.")]


def read(
    path: str, kind: str, column: str, id_column: str, upper: bool = False, label: str = ""
) -> Iterator[Record]:
    """The records of an input, in its order."""
    from mulstm import records

    for record in records.read(path, kind=kind, column=column, id_column=id_column, label_column=label):
        yield record._replace(text=record.text.upper()) if upper else record


class Counter:
    """How many records are done: one repainted line on a terminal, else a line now and then."""

    def __init__(self, quiet: bool) -> None:
        self._quiet, self._live = quiet, console.is_live()
        self._done, self._begun, self._shown = 0, time.monotonic(), time.monotonic()

    def add(self, more: int) -> None:
        """So many more."""
        self._done += more
        now = time.monotonic()
        if now - self._shown >= (console.PAINT_EVERY if self._live else console.PLAIN_EVERY):
            self._shown = now
            text = f"{self._done:,} records, {self._done / (now - self._begun):,.1f} a second"
            self._write(f"\r\x1b[2K{text}" if self._live else f"{text}\n")

    def close(self) -> None:
        """Clears the repainted line."""
        if self._live:
            self._write("\r\x1b[2K")

    def _write(self, text: str) -> None:
        """No work is given up because it cannot be told."""
        if not self._quiet:
            with contextlib.suppress(OSError):
                sys.stderr.write(text)
                sys.stderr.flush()
