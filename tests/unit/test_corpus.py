"""Corpora: what a file, a folder or a named text becomes: parts, protocols, counts."""

import copy
import errno
import gzip
import hashlib
import os
import pickle
import re
import resource
import subprocess
import sys
import tracemalloc
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save

from mulstm.data import Alphabet, Lanes, corpus, fetch, load
from mulstm.data.known import KNOWN, recounted
from mulstm.data.text import Text
from mulstm.errors import DataError

TEXT = b"made-up text, a hundred bytes of it: " + bytes(range(63))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("MULSTM_DATA", raising=False)


@pytest.mark.parametrize(
    ("data", "words"), [(b"", "is empty"), (b"x", "holds one byte"), (None, "There is no file or folder")]
)
def test_files_that_cannot_be_a_corpus(data: bytes | None, words: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(DataError, match=words):
        load(path)


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("t.txt.zst", b"what is packed", "is packed in a way that is not read here. Unpack it"),
        ("t.7z", b"what is packed", "is packed in a way that is not read here"),
        ("t.txt", gzip.compress(TEXT), "is packed (gz), and does not say so. Give it the ending .gz"),
        ("t.parquet", b"PAR1" + TEXT, "is no text (but parquet)"),
        ("t.bin", save({"w": torch.zeros(3)}), "is a model. Give a text; "),
        (
            "t.mul",
            b"\x89MUL\r\n\x1a\n" + TEXT,
            "is an archive that mulstm wrote. Give what mulstm decompress",
        ),
        ("t.txt", TEXT.decode("latin-1").encode("utf-16"), "is written in UTF-16. Save it as UTF-8."),
    ],
)
def test_a_file_that_is_hardly_meant_as_a_text(name: str, data: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / name).write_bytes(data)
    with pytest.raises(DataError, match=re.escape(words)) as caught:
        load(tmp_path / "folder" / name)
    assert "put it into a folder of its own and give that" in str(caught.value)
    assert load(tmp_path / "folder").split("all").raw() == data[1:]


def test_a_name_that_is_empty_is_not_the_current_folder() -> None:
    with pytest.raises(DataError, match="The text's name is empty"):
        load("")


def test_a_text_of_files_can_be_sent_to_other_processes(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_bytes(TEXT)
    text = Text([tmp_path / "t.txt"])
    assert text.read(5, 9).tobytes() == TEXT[5:9]  # now it is mapped
    for again in (pickle.loads(pickle.dumps(text)), copy.deepcopy(text)):
        assert again.read(0, len(TEXT)).tobytes() == TEXT


def test_wrong_words(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_bytes(TEXT)
    for options, words in [
        ({"split": "90-10"}, "three shares"),
        ({"protocol": "raw"}, "has no protocol"),
        ({"alphabet": "words"}, "no alphabet"),
    ]:
        with pytest.raises(DataError, match=words):
            load(path, **options)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="no part called"):
        load(path).split("dev")
    with pytest.raises(DataError, match="Say one of mikolov, raw"):
        load("ptb", protocol="penn")
    with pytest.raises(DataError, match="comes in its own three parts"):
        load("wikitext2", split="90-5-5")
    with pytest.raises(DataError, match="no corpus called"):
        fetch("enwik9")


def test_a_file_is_cut_by_bytes(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_bytes(bytes(range(1, 101)))
    got = load(path, split="80-15-5", alphabet="corpus")
    assert (got.name, got.alphabet.size) == ("mine.txt", 100)
    assert [got.split(s).symbols_count for s in ("train", "valid", "test", "all")] == [79, 15, 5, 99]
    assert got.split("valid").read(-1, 2).tolist() == [79, 80, 81]
    mapped = replace(got.split("valid"), text=Text([path]), alphabet=Alphabet.bytes())
    assert mapped.read(0, 2).flags.writeable
    assert got.split("valid").raw() == bytes(range(81, 96))
    assert got.split("test").words is None
    for part, end in (("valid", 16), ("test", 6)):
        with pytest.raises(IndexError):
            got.split(part).read(0, end)


def test_parts_end_where_their_shares_together_do(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_bytes(bytes(range(10)))
    got = load(path, split="85-5-10")
    assert [got.split(s).raw() for s in ("valid", "test")] == [b"\x08", b"\x09"]


def test_a_byte_that_another_alphabet_lacks_is_told_by_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mulstm.data.text.BLOCK", 8)
    path = tmp_path / "mine.txt"
    path.write_bytes(b"a" * 20 + b"b")
    with pytest.raises(DataError, match=r"\('b'\) at offset 20 is not"):
        load(path).in_alphabet(Alphabet.distinct(b"a"))


def test_a_folder_is_its_files_in_order(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    for name, text in [
        ("b", b"B"),
        ("a/z", b"Z"),
        ("a/y", b"Y"),
        ("empty", b""),
        ("empty.zip", b""),
        (".git/x", b"no"),
        ("a/.x", b"no"),
    ]:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text)
    (folder / "broken").symlink_to(folder / "nowhere")
    assert load(folder).text.read(0, 3).tobytes() == b"YZB"
    (tmp_path / "hollow").mkdir()
    with pytest.raises(DataError, match=r"folder .*hollow is empty"):
        load(tmp_path / "hollow")


@pytest.mark.skipif(sys.platform != "linux", reason="counts its open files in /proc")
def test_a_folder_of_many_files_keeps_few_open(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    for n in range(200):
        (folder / f"{n:03d}").write_bytes(bytes([n] * 10))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 100, hard))
    try:
        got = load(folder)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    lanes = Lanes(got.split("all"), 10, 7, trim=False)
    y = sorted(int(s) for chunk in lanes for s in chunk.y.ravel() if s >= 0)
    assert y == sorted([n for n in range(200) for _ in range(10)])[1:]
    assert len(got.text._open) <= 64


def test_a_checksum_is_of_all_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mulstm.data.text.BLOCK", 8)
    text = Text([np.frombuffer(TEXT[:30], dtype=np.uint8), np.frombuffer(TEXT[30:], dtype=np.uint8)])
    assert text.checksum() == f"{zlib.crc32(TEXT):08x}"
    assert text.checksum(5, 77) == f"{zlib.crc32(TEXT[5:77]):08x}"


def test_twenty_gigabytes_need_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "huge"
    size = 20 * 10**9
    with path.open("wb") as stream:
        stream.truncate(size)
    tracemalloc.start()
    try:
        lanes = Lanes(load(path).split("train"), 64, 100, trim=True)
        for k in (0, len(lanes) // 2, len(lanes) - 1):
            assert lanes.chunk_at(k).y.sum() == 0
        assert tracemalloc.get_traced_memory()[1] < 5_000_000
    finally:
        tracemalloc.stop()
    assert len(lanes) * 6_400 > 0.89 * size
    if sys.platform == "linux":
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        assert resident < 3 * 10**9


def test_a_file_that_goes_away_or_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "mine.txt"
    path.write_bytes(TEXT)
    kept = load(path)
    monkeypatch.setattr("mulstm.data.corpus.IN_MEMORY", 9)
    mapped, shorter = load(path), load(path)
    path.write_bytes(TEXT[:-1])
    with pytest.raises(DataError, match="has another length than before"):
        shorter.split("train").read(0, 5)
    path.unlink()
    with pytest.raises(DataError, match="can no longer be read"):
        mapped.split("train").read(0, 5)
    assert kept.text.read(0, len(TEXT)).tobytes() == TEXT


CUT = """
import os, sys
from pathlib import Path
import numpy as np
from mulstm.data.text import Text
from mulstm.errors import DataError
one, two = map(Path, sys.argv[1:])
for parts in ([one], [one, two]):
    one.write_bytes(b"x" * 20_000)
    text = Text(parts)
    ways = lambda: text.read(0, 9), lambda: text.take(np.arange(9)), lambda: next(text.blocks())
    for way in ways:
        assert way()[8] == ord("x")
    os.truncate(one, 100)
    for way in (lambda: text.read(19_000, 19_009), *ways):
        try:
            way().sum()
        except DataError as fault:
            assert "one has another length than before. Put it back" in str(fault)
        else:
            sys.exit("read")
"""


def test_a_file_that_is_cut_short_while_it_is_mapped(tmp_path: Path) -> None:
    """In a process of its own, which would end by a signal."""
    (tmp_path / "two").write_bytes(b"y" * 9)
    done = subprocess.run([sys.executable, "-c", CUT, tmp_path / "one", tmp_path / "two"], check=False)
    assert done.returncode == 0


def test_packed_files_in_a_folder_are_unpacked(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_bytes(b"abc ")
    (folder / "b.txt.gz").write_bytes(gzip.compress(b"def"))
    assert load(folder).text.read(0, 7).tobytes() == b"abc def"


def test_a_folder_that_may_not_be_entered_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "texts" / "shut").mkdir(parents=True)
    (tmp_path / "texts" / "a.txt").write_bytes(TEXT)
    real = os.scandir

    def scandir(path: Any) -> Any:  # the tests' user may enter anything
        if str(path).endswith("shut"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(DataError, match=r"shut: Permission denied\. Check your rights to it"):
        load(tmp_path / "texts")


def test_python_needs_no_download() -> None:
    got = load("python")
    assert got.text.read(0, len(got.text)).tobytes() == load("python").text.read(0, len(got.text)).tobytes()
    assert len(got.text) > 3_000_000
    head = got.text.read(0, 2000).tobytes()
    assert head.decode().startswith('"""Record of phased-in incompatible language changes.')
    assert b"import" in got.split("test").raw()


def test_ptb_protocols_on_made_up_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [b" a <unk> two \n three \n", b" four \n", b" five <unk> \n"]
    known = KNOWN["ptb"]
    files = tuple(
        replace(f, size=len(t), sha256=hashlib.sha256(t).hexdigest())
        for f, t in zip(known.files, texts, strict=True)
    )
    monkeypatch.setattr(corpus, "KNOWN", {"ptb": replace(known, files=files)})
    for file, text in zip(files, texts, strict=True):
        (tmp_path / file.name).write_bytes(text)
    whole = {
        p: load("ptb", data_dir=tmp_path, protocol=p).text.read for p in ("mikolov", "raw", "spaced", "unk")
    }
    assert whole["raw"](0, 22).tobytes() == texts[0]
    assert whole["mikolov"](0, 18).tobytes() == b"a <unk> two\nthree\n"
    assert whole["spaced"](0, 20).tobytes() == b"a <unk> two \nthree \n"
    assert whole["unk"](0, 14).tobytes() == b"a \x1a two\nthree\n"
    default = load("ptb", data_dir=tmp_path)
    assert default.text.read(0, 18).tobytes() == whole["mikolov"](0, 18).tobytes()
    assert [default.split(s).words for s in ("train", "valid", "test")] == [6, 2, 3]
    assert default.split("valid").read(-1, 2).tobytes() == b"\nfo"


# What the paper and the field count, on the real files.
SYMBOLS_AND_WORDS = {
    ("enwik8", "", 205): ((89_999_999, None), (5_000_000, None), (5_000_000, None)),
    ("text8", "", 27): ((89_999_999, None), (5_000_000, None), (5_000_000, None)),
    ("wikitext2", "", 178): ((10_797_147, 2_088_628), (1_121_681, 217_646), (1_256_449, 245_569)),
    ("ptb", "mikolov", 50): ((5_017_481, 929_589), (393_042, 73_760), (442_423, 82_430)),
    ("ptb", "raw", 50): ((5_101_617, 929_589), (399_782, 73_760), (449_945, 82_430)),
    ("ptb", "spaced", 50): ((5_059_549, 929_589), (396_412, 73_760), (446_184, 82_430)),
    ("ptb", "unk", 49): ((4_837_401, 929_589), (379_102, 73_760), (423_247, 82_430)),
}
DATA = os.environ.get("MULSTM_DATA")


@pytest.mark.data
@pytest.mark.skipif(not DATA, reason="MULSTM_DATA does not name a folder with the paper's corpora")
@pytest.mark.parametrize(("name", "protocol", "alphabet"), SYMBOLS_AND_WORDS)
def test_counts_of_the_real_files(name: str, protocol: str, alphabet: int) -> None:
    got = load(name, data_dir=DATA, protocol=protocol, alphabet="corpus")
    assert got.alphabet.size == alphabet
    # One less than the file in train: nothing stands before a text's first symbol.
    parts = [got.split(s) for s in ("train", "valid", "test")]
    assert tuple((p.symbols_count, p.words) for p in parts) == SYMBOLS_AND_WORDS[name, protocol, alphabet]
    for part in parts[1:]:
        counted = recounted(name, part.name, part.symbols_count)
        assert list(counted.items())[:1] == ([(protocol, part.symbols_count)] if protocol else [])


def test_counts_by_all_protocols() -> None:
    for k, part in enumerate(("valid", "test"), 1):
        counts = {
            protocol: rows[k][0] for (name, protocol, _), rows in SYMBOLS_AND_WORDS.items() if name == "ptb"
        }
        for protocol, symbols in counts.items():
            found = recounted("ptb", part, symbols)
            assert found == counts
            assert next(iter(found)) == protocol
    assert recounted("ptb", "test", 442_422) == recounted("ptb", "train", 5_017_482) == {}
    assert recounted("text8", "test", 5_000_000) == recounted("mine", "test", 442_423) == {}


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names here")
def test_a_pipe_is_no_text(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match=r"is neither a file nor a folder\. Write what it gives"):
        load(tmp_path / "pipe")


def test_a_part_that_is_rounded_away_is_empty(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_bytes(bytes(range(50)))
    part = load(path, split="1-98-1").split("train")
    assert part.symbols_count == 0
    with pytest.raises(DataError, match=r"The train part of mine\.txt is empty"):
        part.require_symbols()


def test_the_folder_one_is_in_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_bytes(TEXT)
    monkeypatch.chdir(folder)
    assert load(".").name == "texts"


def test_nobody_writes_into_the_text_itself(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_bytes(TEXT)
    part = load(tmp_path / "mine.txt").split("train")
    before = part.read(0, 5).tolist()
    part.read(0, 5)[:] = 0
    assert part.read(0, 5).tolist() == before
