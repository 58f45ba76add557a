"""Options of the commands that read records, spelled once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from mulstm.errors import DataError

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
    """The records of an input, in its order: at least one."""
    from mulstm import records

    record = None
    for record in records.read(path, kind=kind, column=column, id_column=id_column, label_column=label):
        yield record._replace(text=record.text.upper()) if upper else record
    if record is None:
        raise DataError("The input holds no record. Check the file and --as.")
