"""Records as commands read them: which columns, in which case, from a file or a pipe."""

from __future__ import annotations

import json
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from process import Call

from mulstm.embedding import embed
from mulstm.errors import DataError
from mulstm.records import Record

OPTIONS = ("--column", "seq", "--upper")
NAMED = (*OPTIONS, "--id-column", "name")


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Beside the columns that are meant, those that are usual."""
    path = tmp_path / "r.csv"
    path.write_text("text,id,seq,name,label,kind\nno,1,abd,first,x,p\nno,2,adee,second,x,q\n")
    return path


def test_columns_to_score(call: Call, trained: Path, table: Path) -> None:
    out = call("score", trained, table, *NAMED, "--losses", "--json").out
    found = [json.loads(line) for line in out.splitlines()]
    assert [(one["id"], one["text"]) for one in found] == [("first", "ABD\n"), ("second", "ADEE\n")]


def test_columns_to_embed(call: Call, trained: Path, table: Path, tmp_path: Path) -> None:
    assert call("embed", trained, table, *NAMED, "-q", "-o", tmp_path / "v.npz").code == 0
    with np.load(tmp_path / "v.npz") as found:
        assert found["id"].tolist() == ["first", "second"]
        assert found["h_mean"] == pytest.approx(embed(trained, ["ABD", "ADEE"]).h_mean, abs=1e-6)


def test_columns_to_trace(call: Call, trained: Path, table: Path) -> None:
    out = call("neurons", "trace", trained, table, *NAMED, "-u", 1, "--json").out
    found = [json.loads(line) for line in out.splitlines()]
    assert [(one["id"], "".join(one["symbols"])) for one in found] == [("first", "ABD"), ("second", "ADEE")]


def test_columns_to_find_units_by(
    call: Call, trained: Path, table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, object] = {}

    def find(loaded: object, records: list[Record], **more: object) -> None:
        given.update(more, records=[(record.text, record.label) for record in records])
        raise DataError("Enough. Stop.")

    monkeypatch.setattr("mulstm.probe.find", find)
    more = ("--label", "kind", "--of", "h_final", "--top", 3, "--seed", 7, "-q")
    assert call("neurons", "find", trained, table, *OPTIONS, *more).code == 3
    assert given["records"] == [(b"ABD", "p"), (b"ADEE", "q")]
    assert (given["of"], given["top"], given["seed"], given["tell"]) == ("h_final", 3, 7, None)


def test_a_pipe_is_read_once(
    call: Call, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=BytesIO(b"one\ntwo\n")))
    assert call("embed", trained, "-", "--as", "lines", "-q", "-o", tmp_path / "r.npz").code == 0
    with np.load(tmp_path / "r.npz") as found:
        assert found["id"].tolist() == ["1", "2"]


def test_words_that_are_no_text(call: Call, trained: Path, tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_bytes(b"caf\xe9 two\n")
    assert "word  caf\ufffd\n" in call("score", trained, tmp_path / "t.txt", "--words").out
    found = json.loads(call("score", trained, tmp_path / "t.txt", "--words", "--json").out)
    assert [word["word"] for word in found["word_scores"]] == ["caf\ufffd", "two"]
    assert found["text"] == "caf\ufffd two\n"
