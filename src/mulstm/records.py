"""Reads records, one at a time, from FASTA, lines, JSONL or a column of CSV."""

from __future__ import annotations

import codecs
import contextlib
import csv
import io
import json
import lzma
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from pathlib import Path
from typing import IO, AnyStr, Generic, NamedTuple

from mulstm.data import plain
from mulstm.data.store import BLOCK, stream_of
from mulstm.errors import DataError

KINDS = ("fasta", "lines", "jsonl", "csv", "whole")
_SUFFIXES = {
    **dict.fromkeys((".fasta", ".fa", ".faa", ".fas", ".fsa", ".pep"), "fasta"),
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), "jsonl"),
    **dict.fromkeys((".csv", ".tsv", ".tab"), "csv"),
}
_COMPRESSED = (".gz", ".bz2", ".xz")
_NOT_READ = (*plain.NOT_READ, ".zip", ".tar", ".tgz")
_TEXT_FIELDS = ("sequence", "text")
_NO_OBJECT = "Give one object a line, or --as whole for one text (train: --set data.records=)."
LONGEST = 1 << 30  # bytes of a record, which has to fit in memory


class Record(NamedTuple):
    """A text with a name; names need not be unique."""

    id: str
    text: bytes
    label: str = ""


def texts(given: str | bytes | Iterable[str | bytes]) -> Iterator[bytes]:
    """One text, or many, that a caller gives instead of a file."""
    if isinstance(given, Mapping) or hasattr(given, "columns"):
        raise DataError(
            f"A {type(given).__name__} was given, and the names of it would be read. "
            "Give a list of the texts alone: the values, or one column."
        )
    for k, text in enumerate([given] if isinstance(given, (str, bytes)) else given, 1):
        if not isinstance(text, (str, bytes)):
            raise DataError(f"Text {k} is {text!r}, no string. Take it out, or write it as one.")
        try:
            yield text.encode() if isinstance(text, str) else text
        except UnicodeEncodeError as fault:
            raise DataError(
                f"Text {k} holds what is no character ({fault.reason}). Give its bytes."
            ) from fault


def kind_of(path: str) -> str:
    """The kind that a file's name suggests; lines where it suggests none."""
    suffixes = [s.lower() for s in Path(path).suffixes]
    if suffixes and suffixes[-1] in (*_COMPRESSED, *_NOT_READ):  # refused later, as what they hold
        suffixes.pop()
    return _SUFFIXES.get(suffixes[-1], "lines") if suffixes else "lines"


def read(
    path: str, *, kind: str = "", column: str = "", id_column: str = "", label_column: str = ""
) -> Iterator[Record]:
    """The records of a file in its order, never more than one in memory; "-" is the standard input.

    column names the field of JSONL or CSV that holds the text; when not given, "sequence" or "text".
    """
    kind = kind or kind_of(path)
    if kind not in KINDS:
        raise DataError(f'There is no kind of input "{kind}". Choose one of: {", ".join(KINDS)}.')
    fields = (column, id_column, label_column)
    if any(fields) and kind not in ("jsonl", "csv"):
        help = "Give CSV or JSONL" if label_column else "Leave the column out, or give CSV or JSONL"
        raise DataError(
            f"{path} is read as {kind}, which has no columns. {help} "
            "(--as says which it is; for train, --set data.records)."
        )
    with _opened(path) as file:
        try:
            if kind != "whole":
                _require_text(file, path)
            if kind == "fasta":
                yield from _fasta(file, path)
            elif kind == "lines":
                yield from _lines(file, path)
            elif kind == "whole":
                # The last line's end is what ends the record, as it is for each of several lines.
                yield Record(_sound(Path(path).name), _whole(file, path).removesuffix(b"\n"))
            elif kind == "jsonl":
                yield from _jsonl(file, path, *fields)
            else:
                yield from _csv(file, path, *fields)
        except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
            raise DataError(f"{path} cannot be read ({error}). Check that it was copied whole.") from error


def _opened(path: str) -> AbstractContextManager[IO[bytes]]:
    if not path:
        raise DataError("The file's name is empty. Give a file, or - for the standard input.")
    if path == "-":
        return nullcontext(sys.stdin.buffer)
    suffix = Path(path).suffix.lower()
    inside = Path(Path(path).stem).suffix.lower() if suffix in _COMPRESSED else suffix
    if inside in _NOT_READ:
        raise DataError(
            f"{path} is packed in a way that is not read here. Unpack it; gz, bz2 and xz may stay."
        )
    try:
        return stream_of(Path(path))
    except OSError as error:
        raise DataError(
            f"{path} cannot be opened ({error.strerror}). "
            "Give a file of records, or - for the standard input."
        ) from error


def _require_text(file: IO[bytes], path: str) -> None:
    """Refuses what is packed though nothing says so, or written in UTF-16: it would be read as it stands."""
    head: bytes = file.peek(plain.HEAD) if hasattr(file, "peek") else b""
    if fault := plain.fault_of(head):
        remedy = "Unpack it into the pipe" if path == "-" and fault.is_packed else fault.remedy
        raise DataError(f"{path} {fault.what}. {remedy}.")


def _fasta(file: IO[bytes], path: str) -> Iterator[Record]:
    name: str | None = None
    pieces: list[bytes] = []
    # Lines that end as on any system, old Macs too; Latin-1 gives every byte back.
    with io.TextIOWrapper(file, encoding="latin-1", newline=None) as text:
        lines = _Lines(text, path)
        for number, line in enumerate((line.encode("latin-1") for line in lines), 1):
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            if line.startswith(b">"):
                lines.begin()
                if name is not None:
                    yield Record(name, b"".join(pieces))
                words = line[1:].split(maxsplit=1)
                name, pieces = (words[0].decode("utf-8", errors="replace") if words else str(number)), []
            elif line.startswith(b";") or not line.strip():
                continue
            elif name is None:
                raise DataError(
                    f'{path}, line {number}: a sequence without a ">" line before it. '
                    "Check that it is FASTA, or give --as lines (train: --set data.records=lines)."
                )
            else:
                pieces.append(b"".join(line.split()))
    if name is None:
        raise DataError(f"{path} holds no FASTA record. Check the file.")
    yield Record(name, b"".join(pieces))


class _Lines(Generic[AnyStr]):
    """A file's lines, so that a record that does not end is refused before it fills the memory."""

    def __init__(self, file: IO[AnyStr], path: str) -> None:
        self.file: IO[AnyStr] = file
        self.path = path
        self.number = 0
        self.begun = 0  # lines that had been read when `begin` was last called
        self.length = 0  # of what was read since the record began

    def begin(self) -> None:
        """The last line was the first of a record, or a whole one."""
        self.begun, self.length = self.number, 0

    def __iter__(self) -> Iterator[AnyStr]:
        while line := self.file.readline(LONGEST + 1 - self.length):
            self.number += 1
            self.length += len(line)
            _require_short(self.length, f"{self.path}, line {self.number}")
            yield line


def _whole(file: IO[bytes], path: str) -> bytes:
    """In pieces: asked for so much at once, a file takes the memory for it beforehand."""
    text = bytearray()
    while piece := file.read(BLOCK):
        text += piece
        _require_short(len(text), path)
    return bytes(text)


def _require_short(length: int, where: str) -> None:
    if length > LONGEST:
        raise DataError(
            f"{where}: more than {LONGEST:,} bytes in one record, which has to fit in memory. "
            "Check that this is the right file, and how it is read (--as), or cut the record into several."
        )


def _lines(file: IO[bytes], path: str) -> Iterator[Record]:
    """Named by their line's number; blank lines are no records.

    In a file without a line feed a carriage return ends a line, as on old Macs; elsewhere, where it is not
    before a line feed, it is a byte like any other.
    """
    for number, line in enumerate(_ended(_Lines(file, path)), 1):
        text = (line.removeprefix(codecs.BOM_UTF8) if number == 1 else line).rstrip(b"\r\n")
        if text.strip():
            yield Record(str(number), text)


def _ended(lines: _Lines[bytes]) -> Iterator[bytes]:
    for line in lines:
        lines.begin()
        if lines.number == 1 and not line.endswith(b"\n"):  # all of the file
            yield from line.split(b"\r")
        else:
            yield line


def _jsonl(file: IO[bytes], path: str, column: str, id_column: str, label_column: str) -> Iterator[Record]:
    lines = _Lines(file, path)
    for number, line in enumerate(lines, 1):
        lines.begin()
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where}: not JSON ({error}). {_NO_OBJECT}") from error
        if not isinstance(value, dict):
            raise DataError(f"{where}: a {type(value).__name__}, not an object. {_NO_OBJECT}")
        # The text's column stays that of the first line; the name's may come and go.
        column, name_column, _ = _fields(list(value), column, id_column, label_column, where)
        text = value[column]
        if not isinstance(text, str):
            raise DataError(f'{where}: "{column}" is {type(text).__name__}, not text. Mend the line.')
        name = value[name_column] if name_column else None
        label = value[label_column] if label_column else ""
        if label_column and (label is None or not str(label).strip()):
            raise DataError(f'{where}: "{label_column}" is empty, no label. Mend the line, or take it out.')
        name = ("" if name is None else _sound(str(name))) or str(number)
        yield Record(name, text.encode("utf-8", errors="surrogatepass"), _sound(str(label)))


def _csv(file: IO[bytes], path: str, column: str, id_column: str, label_column: str) -> Iterator[Record]:
    csv.field_size_limit(2**31 - 1)  # what a C long holds everywhere
    with io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline="") as text:
        read = _Lines(text, path)
        lines = iter(read)
        first = next(lines, "")
        # Where a comma separates decimals, programs separate columns by a semicolon.
        signs = "\t" if {".tsv", ".tab"} & set(Path(path.lower()).suffixes) else ",;\t"
        delimiter = _delimiter(first, signs, column)
        # Strict: a quote that is never closed would make one field of all the rows after it.
        rows = csv.reader(chain([first] if first else [], lines), delimiter=delimiter, strict=True)
        try:
            header = next(rows, None)
            if header is None:
                raise DataError(f"{path} is empty. Give a header line and rows.")
            fields = _fields(header, column, id_column, label_column, path)
            places = [header.index(field) if field else -1 for field in fields]
            read.begin()
            for number, row in enumerate(rows, 1):
                read.begin()
                if not row:
                    continue
                if len(row) != len(header):
                    raise DataError(
                        f"{path}, row {number}: {len(header)} fields in the header, {len(row)} here. Mend it."
                    )
                body, name, label = (row[place] if place >= 0 else "" for place in places)
                if label_column and not label.strip():
                    raise DataError(
                        f'{path}, row {number}: "{label_column}" is empty, no label. Mend it, or take it out.'
                    )
                text_bytes = body.encode("utf-8", errors="surrogateescape")
                yield Record(_sound(name) or str(number), text_bytes, _sound(label))
        except csv.Error as error:
            begins = read.begun + 1  # of the row that is not sound
            more = f" in line {read.number:,}: a quote may be left open" if read.number > begins else ""
            raise DataError(f"{path}, line {begins:,}: {error}{more}. Mend the line.") from error


def _sound(name: str) -> str:
    """A name that can be written anywhere: what is no character becomes the sign for that."""
    return "".join("\N{REPLACEMENT CHARACTER}" if "\ud800" <= c <= "\udfff" else c for c in name)


def _delimiter(first: str, signs: str, column: str) -> str:
    """The sign by which the header has the wanted column; another may stand inside a name."""
    for sign in signs:
        with contextlib.suppress(csv.Error):
            header = next(csv.reader([first], delimiter=sign, strict=True), [])
            if set(header) & ({column} if column else set(_TEXT_FIELDS)):
                return sign
    return next((sign for sign in signs if sign in first), signs[0])


def _fields(known: list[str], column: str, id_column: str, label_column: str, where: str) -> list[str]:
    """The names of the text's field, of the name's ("" when there is none) and of the label's."""
    free = [field for field in _TEXT_FIELDS if field in known and field not in (id_column, label_column)]
    if not column and len(free) > 1:
        raise DataError(
            f"{where}: both sequence and text could be the column that is meant. "
            "Name one with --column (train: --set data.column=NAME)."
        )
    chosen = column or next(iter(free), "")
    asked = [chosen, id_column or ("id" if "id" in known else ""), label_column]
    if not chosen:
        others = [field for field in known if field not in (id_column, label_column)]
        raise DataError(
            f"{where}: none of the columns {', '.join(others) or '(there are no others)'} is called sequence "
            "or text. Name one with --column (train: --set data.column=NAME)."
        )
    for field in asked:
        if field and known.count(field) > 1:
            raise DataError(f"{where}: two columns are called {field}. Give one of them another name.")
        if field and field not in known:
            raise DataError(
                f'{where}: there is no column "{field}" among {", ".join(known)}. Choose one of these.'
            )
    return asked
