"""Records are read one at a time, in order, from every kind of file; faults name the line."""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import lzma
import os
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mulstm import records
from mulstm.errors import DataError
from mulstm.records import Record, kind_of, read, texts


def write(path: Path, text: str | bytes) -> str:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return str(path)


def test_fasta(tmp_path: Path) -> None:
    text = "; a comment\n>one first protein\nMKT\nAY I\n\n>one again\r\nGG\r\n>\nA\n>empty\n"
    path = write(tmp_path / "p.fasta", text)
    assert list(read(path)) == [
        Record("one", b"MKTAYI"),
        Record("one", b"GG"),
        Record("8", b"A"),
        Record("empty", b""),
    ]
    assert list(read(write(tmp_path / "bom.fasta", "\ufeff>a\nMK\n"))) == [Record("a", b"MK")]


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_fasta_of_any_system(tmp_path: Path, end: bytes) -> None:
    lines = [b">a\x85b one", b"MKT", b"A\xa0Y", b"", b">c", b"GG", b""]
    (tmp_path / "p.fasta.gz").write_bytes(gzip.compress(end.join(lines)))
    found = list(read(str(tmp_path / "p.fasta.gz")))
    assert found == [Record("a\ufffdb", b"MKTA\xa0Y"), Record("c", b"GG")]


def test_lines_end_as_on_any_system_and_no_byte_is_lost(tmp_path: Path) -> None:
    for end in ("\n", "\r\n", "\r"):
        path = write(tmp_path / "t.txt", codecs.BOM_UTF8 + end.join(["one", "", "three", ""]).encode())
        assert list(read(path, kind="lines")) == [Record("1", b"one"), Record("3", b"three")]
    path = write(tmp_path / "t.txt", b"10%\r20%\ndone\rfor")  # carriage returns that end no line
    assert list(read(path)) == [Record("1", b"10%\r20%"), Record("2", b"done\rfor")]


def test_lines_keep_their_numbers(tmp_path: Path) -> None:
    path = write(tmp_path / "t.txt", b"first\r\n\n  \nfourth \xff")
    assert list(read(path)) == [Record("1", b"first"), Record("4", b"fourth \xff")]
    assert list(read(write(tmp_path / "bom.txt", "\ufeffone\n\ufefftwo"))) == [
        Record("1", b"one"),
        Record("2", "\ufefftwo".encode()),
    ]
    assert list(read(path, kind="whole")) == [Record("t.txt", b"first\r\n\n  \nfourth \xff")]
    path = write(tmp_path / "u.txt", b"one\n\n")
    assert list(read(path, kind="whole")) == [Record("u.txt", b"one\n")]
    path = write(tmp_path / os.fsdecode(b"caf\xe9.txt"), "one")
    assert list(read(path, kind="whole")) == [Record("caf\N{REPLACEMENT CHARACTER}.txt", b"one")]


def test_jsonl(tmp_path: Path) -> None:
    path = write(
        tmp_path / "t.jsonl",
        '{"text": "caf\u00e9", "id": 7, "y": 1}\n\n{"text": "b\\nc", "y": "no"}\n'.replace(
            ', "y": "no"', ', "y": "no", "id": "x"'
        ),
    )
    assert list(read(path, label_column="y")) == [
        Record("7", "caf\u00e9".encode(), "1"),
        Record("x", b"b\nc", "no"),
    ]


@pytest.mark.parametrize("sign", [",", ";", "\t"])
def test_the_header_tells_how_columns_are_separated(tmp_path: Path, sign: str) -> None:
    path = write(tmp_path / "t.csv", sign.join(["id", "text"]) + "\n" + sign.join(["a", '"1,5; 2"']) + "\n")
    assert list(read(path)) == [Record("a", b"1,5; 2")]


def test_csv_and_tsv(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", '\ufeffname,text,label\na,"one, ""two""",pos\nb,"x\ny",neg\n')
    assert list(read(path, id_column="name", label_column="label")) == [
        Record("a", b'one, "two"', "pos"),
        Record("b", b"x\ny", "neg"),
    ]
    path = write(tmp_path / "t.tsv", "sequence\tother\nMK\t1\nAA\t2\n")
    assert list(read(path)) == [Record("1", b"MK"), Record("2", b"AA")]
    assert [r.text for r in read(path, column="other")] == [b"1", b"2"]


def test_the_separator_is_the_one_of_the_column_that_is_wanted(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", "text,old;body\na;b\n")
    assert [r.text for r in read(path, column="body")] == [b"b"]
    path = write(tmp_path / "t.tsv", "text,old\ttext\na\tb\n")
    assert [r.text for r in read(path)] == [b"b"]


def test_names_can_be_written_anywhere(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", b"id,text,label\ncaf\xe9,caf\xe9,\xff\n")
    assert list(read(path, label_column="label")) == [Record("caf\ufffd", b"caf\xe9", "\ufffd")]
    path = write(tmp_path / "t.jsonl", '{"id": "\\ud800", "text": "a"}\n')
    assert list(read(path)) == [Record("\ufffd", b"a")]


@pytest.mark.parametrize(
    ("suffix", "pack"), [(".gz", gzip.compress), (".bz2", bz2.compress), (".xz", lzma.compress)]
)
def test_compressed_files(suffix: str, pack: object, tmp_path: Path) -> None:
    path = write(tmp_path / f"p.fa{suffix}", pack(b">a\nMK\n"))  # type: ignore[operator]
    assert list(read(path)) == [Record("a", b"MK")]
    assert kind_of(path) == "fasta"
    cut = write(tmp_path / f"cut.fa{suffix}", pack(b">a\nMK\n" * 1000)[:-12])  # type: ignore[operator]
    with pytest.raises(DataError, match="copied whole"):
        list(read(cut))


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stdin:
        buffer = io.BufferedReader(io.BytesIO(b">a\nMK\n"))

    monkeypatch.setattr("sys.stdin", Stdin)
    assert list(read("-", kind="fasta")) == [Record("a", b"MK")]
    Stdin.buffer = io.BufferedReader(io.BytesIO(gzip.compress(b"a\n", mtime=0)))
    with pytest.raises(DataError, match=r"- is packed \(gz\), and does not say so. Unpack it into the pipe"):
        list(read("-"))


def test_a_text_that_begins_like_a_packed_file(tmp_path: Path) -> None:
    assert list(read(write(tmp_path / "t.txt", "BZh\n"))) == [Record("1", b"BZh")]
    assert list(read(write(tmp_path / "t.bin", b"\x1f\x8b"), kind="whole")) == [Record("t.bin", b"\x1f\x8b")]


def test_a_column_that_is_named_for_something_else_is_not_the_text(tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", "text,sequence\nn1,MKV\n")
    assert list(read(path, id_column="text")) == [Record("n1", b"MKV")]
    assert list(read(path, label_column="sequence")) == [Record("1", b"n1", "MKV")]


def test_json_is_an_object_a_line(tmp_path: Path) -> None:
    assert list(read(write(tmp_path / "t.json", '{"text": "a"}\n'))) == [Record("1", b"a")]
    assert kind_of("reviews.json.gz") == "jsonl"
    assert kind_of("reviews.csv.zip") == "csv"  # which is refused as such, and not read as one text
    assert kind_of("letters.zip") == "lines"


@pytest.mark.parametrize(
    ("name", "text", "options", "words"),
    [
        ("p.fasta", "MKT\n>a\nM\n", {}, 'line 1: a sequence without a ">"'),
        ("p.fasta", "MKT\n", {}, "--as lines (train: --set data.records=lines)"),
        ("p.fasta", "\n", {}, "no FASTA record"),
        ("t.jsonl", '{"text": "a"}\n{"text": \n', {}, "line 2: not JSON"),
        ("t.jsonl", "[" * 99_999, {}, "line 1: not JSON"),
        ("t.jsonl", "[1]\n", {}, "line 1: a list, not an object"),
        ("t.jsonl", '{"text": 3}\n', {}, '"text" is int, not text'),
        ("t.jsonl", '{"text": "a", "y": null}\n', {"label_column": "y"}, 'line 1: "y" is empty, no label'),
        ("t.csv", "text,y\na,1\nb,\n", {"label_column": "y"}, 'row 2: "y" is empty, no label'),
        ("t.csv", "text,sequence\na,1\n", {}, "both sequence and text could be the column"),
        ("t.jsonl", '{"text": "a"}\n{"sequence": "b"}\n', {}, 'line 2: there is no column "text"'),
        ("t.json", '[\n{"text": "a"}]\n', {}, "--as whole for one text (train: --set data.records=)"),
        ("t.csv", "", {}, "is empty"),
        ("t.csv", "a,b\n1,2\n", {}, "none of the columns a, b"),
        ("t.csv", "a,b\n1,2\n", {}, "with --column (train: --set data.column=NAME)"),
        ("t.csv", "text,b\n1,2\n", {"column": "c"}, 'no column "c" among text, b'),
        ("t.csv", "text,b\n1,2\n3\n", {}, "row 2: 2 fields in the header, 1 here"),
        ("t.csv", "text,b\n1,2,3\n", {}, "row 1: 2 fields in the header, 3 here"),
        ("t.csv", "text,b,text\n1,2,3\n", {}, "two columns are called text"),
        ("t.csv", "text,y\n1,2\n", {"label_column": "text"}, "none of the columns y is called"),
        ("t.csv", "text\n1\n", {"id_column": "text"}, "none of the columns (there are no others) is called"),
        (
            "t.csv",
            'b,text\n\n1,"two\n3,four\n',
            {},
            "line 3: unexpected end of data in line 4: a quote may be left open. Mend the line.",
        ),
        ("t.csv", 'b,text\n1,"two\n3,"four"\n', {}, "line 2: ',' expected after '\"' in line 3: a quote may"),
        ("t.csv", 'b,"text\n1,two\n', {}, "line 1: unexpected end of data in line 2"),
        ("t.csv", 'b,text\n1,"two"x\n', {}, "line 2: ',' expected after '\"'"),
        ("t.csv", "text,b\n1,2\n".encode("utf-16"), {}, "is written in UTF-16. Save it as UTF-8"),
        ("t.txt", "a\n", {"column": "c"}, "read as lines, which has no columns"),
        ("t.txt", "a\n", {"label_column": "y"}, "read as lines, which has no columns. Give CSV or JSONL"),
        ("t.txt", "good\n".encode("utf-16"), {}, "is written in UTF-16. Save it as UTF-8"),
        ("t.jsonl", "{}".encode("utf-16"), {}, "is written in UTF-16. Save it as UTF-8"),
        ("t.txt", "good\n".encode("utf-32"), {}, "is written in UTF-32. Save it as UTF-8"),
        (
            "t.txt",
            gzip.compress(b"a\n", mtime=0),
            {},
            "is packed (gz), and does not say so. Give it the ending .gz",
        ),
        ("t.csv", bz2.compress(b"text\n"), {}, "is packed (bz2)"),
        ("t.txt", lzma.compress(b"a\n"), {}, "is packed (xz)"),
        ("t.zip", "PK", {}, "t.zip is packed"),
        ("t.jsonl.zst", "x", {}, "t.jsonl.zst is packed in a way that is not read here"),
        ("t.parquet", "PAR1\x15\x04", {}, "t.parquet is no text (but parquet). Write what it holds as"),
        ("t.xlsx", "PK\x03\x04\n", {}, "t.xlsx is no text (but zip)"),
        ("t.npy", b"\x93NUMPY\x01\n", {"kind": "lines"}, "t.npy is no text (but npy)"),
        ("t.txt", b"\x28\xb5\x2f\xfd\x04\n", {}, "t.txt is no text (but zst)"),
        ("t.tab", "text;a\n1;2\n", {}, "none of the columns text;a"),
        ("t.tar.gz", "", {}, "t.tar.gz is packed"),
        ("t.txt", "a\n", {"kind": "xml"}, 'no kind of input "xml"'),
    ],
)
def test_faults(name: str, text: str, options: dict[str, str], words: str, tmp_path: Path) -> None:
    path = write(tmp_path / name, text)
    with pytest.raises(DataError) as error:
        list(read(path, **options))
    assert words in str(error.value)


def test_a_name_that_is_empty() -> None:
    with pytest.raises(DataError, match="The file's name is empty"):
        list(records.read(""))


def test_endings_of_biologists(tmp_path: Path) -> None:
    assert list(read(write(tmp_path / "p.pep", ">a\nMK\n"))) == [Record("a", b"MK")]
    assert list(read(write(tmp_path / "p.tab", "id\tsequence\na\tMK\n"))) == [Record("a", b"MK")]


def test_an_empty_name_is_none(tmp_path: Path) -> None:
    lines = write(tmp_path / "t.jsonl", '{"text": "a", "id": ""}\n{"text": "b", "id": "x"}\n')
    table = write(tmp_path / "t.csv", "text,id\na,\nb,x\n")
    assert list(read(lines)) == list(read(table)) == [Record("1", b"a"), Record("x", b"b")]


def test_a_name_of_null_is_none_and_zero_is_one(tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", '{"text": "a", "id": null}\n{"text": "b", "id": 0}\n')
    assert list(read(path)) == [Record("1", b"a"), Record("0", b"b")]


def test_texts_of_a_caller() -> None:
    assert list(texts("caf\u00e9")) == list(texts(["caf\u00e9".encode()])) == ["caf\u00e9".encode()]
    assert list(texts(t for t in ("a", b"b"))) == [b"a", b"b"]


@pytest.mark.parametrize("columns", [{"x": "MKT"}, SimpleNamespace(columns=["sequence"])])
def test_names_are_not_taken_for_texts(columns: Any) -> None:
    with pytest.raises(DataError, match="names of it would be read"):
        list(texts(columns))


@pytest.mark.parametrize("value", [float("nan"), None, 3])
def test_what_is_no_text_is_named(value: Any) -> None:
    with pytest.raises(DataError, match=f"Text 2 is {value}, no string"):
        list(texts(["a", value]))


def test_a_damaged_gzip(tmp_path: Path) -> None:
    damaged = bytearray(gzip.compress(b">a\nMKTAYIAKQR\n" * 9))
    damaged[12] = 0xFF
    (tmp_path / "p.fasta.gz").write_bytes(damaged)
    with pytest.raises(DataError, match="copied whole"):
        list(read(str(tmp_path / "p.fasta.gz")))


class Endless(io.RawIOBase):
    """A stream of one letter that gives up its patience in the end, so that nothing fills the memory."""

    def __init__(self) -> None:
        self.left = 1000

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self.left -= 1
        assert self.left, "read on and on"
        buffer[:] = b"A" * len(buffer)
        return len(buffer)


KINDS_OF = {
    "lines": "%s\n",
    "jsonl": '{"text": "%s"}\n',
    "csv": "text\n%s\n",
    "fasta": ">a\n%s\n",
    "whole": "%s\n",
}


@pytest.mark.parametrize("kind", list(KINDS_OF))
@pytest.mark.parametrize("pack", [None, gzip.compress], ids=["plain", "gz"])
def test_the_longest_record(kind: str, pack: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "LONGEST", 100)
    # The line's end and what stands around the text count too.
    for length, is_refused in ((80, False), (101, True)):
        text = (KINDS_OF[kind] % ("A" * length)).encode()
        path = write(tmp_path / ("a.gz" if pack else "a"), pack(text) if pack else text)
        if is_refused:
            with pytest.raises(DataError, match="more than 100 bytes in one record"):
                list(read(path, kind=kind))
        else:
            assert [r.text for r in read(path, kind=kind)] == [b"A" * length]


@pytest.mark.parametrize("kind", list(KINDS_OF))
def test_a_record_without_an_end(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "LONGEST", 100_000)
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BufferedReader(Endless())))
    with pytest.raises(DataError, match="more than 100,000 bytes in one record"):
        list(read("-", kind=kind))


def test_records_of_many_lines_have_the_same_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "LONGEST", 100)
    line = "A" * 9 + "\n"
    fasta = write(tmp_path / "a.fasta", (">a\n" + 9 * line) * 2)
    assert [len(r.text) for r in read(fasta)] == [81, 81]
    with pytest.raises(DataError, match="line 12: more than 100"):
        list(read(write(tmp_path / "a.fasta", ">a\n" + 11 * line)))
    quoted = write(tmp_path / "a.csv", "text\n" + ('"' + 9 * line + '"\n') * 2)
    assert [len(r.text) for r in read(quoted)] == [90, 90]
    with pytest.raises(DataError, match="line 11: more than 100"):
        list(read(write(tmp_path / "a.csv", 'text\n"' + 11 * line + '"\n')))


def test_a_short_whole_file_takes_little_memory(tmp_path: Path) -> None:
    path = write(tmp_path / "a", "abc\n")
    tracemalloc.start()
    try:
        assert [r.text for r in read(path, kind="whole")] == [b"abc"]
        assert tracemalloc.get_traced_memory()[1] < 1 << 24
    finally:
        tracemalloc.stop()


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be opened"):
        list(read(str(tmp_path / "no.fasta")))


@pytest.mark.parametrize("header", ['"id";"text";"note, if any"', "id;text;price (EUR, net)"])
def test_a_comma_in_the_name_of_a_column(header: str, tmp_path: Path) -> None:
    path = write(tmp_path / "t.csv", f"{header}\na;MKT;1\n")
    assert list(read(path)) == [Record("a", b"MKT")]
    assert list(read(path, column="text")) == [Record("a", b"MKT")]
