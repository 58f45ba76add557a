"""Corpora: named ones from folders, cache or network; any file or folder; and what can be wrong with them."""

import bz2
import gzip
import hashlib
import io
import lzma
import os
import sys
import tarfile
import threading
import tracemalloc
import zipfile
from collections.abc import Callable
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from mulstm.data import Lanes, corpus, fetch, load, store
from mulstm.data.known import KNOWN, File, Known, recounted
from mulstm.errors import DataError

TEXT = b"made-up text, a hundred bytes of it: " + bytes(range(63))


def packed(suffix: str, data: bytes, member: str = "made") -> bytes:
    if suffix == ".zip":
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as archive:
            archive.writestr("folder/other", b"not this")
            archive.writestr(f"folder/{member}", data)
        return buffer.getvalue()
    if suffix == ".tgz":
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
            entry = tarfile.TarInfo(f"./data/{member}")
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))
        return buffer.getvalue()
    squeeze: dict[str, Callable[[bytes], bytes]] = {
        ".xz": lzma.compress,
        ".gz": gzip.compress,
        ".bz2": bz2.compress,
    }
    return squeeze[suffix](data) if suffix else data


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("MULSTM_DATA", raising=False)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Known:
    """A known corpus of one made-up file, at two addresses."""
    addresses = ("http://one.invalid/made.zip", "http://two.invalid/made.gz")
    file = File("made", len(TEXT), hashlib.sha256(TEXT).hexdigest(), addresses)
    one = Known("made", "made up", "none", (file,))
    monkeypatch.setattr(corpus, "KNOWN", KNOWN | {"made": one})
    return one


@pytest.mark.usefixtures("made")
@pytest.mark.parametrize("suffix", ["", ".xz", ".gz", ".bz2", ".zip", ".tgz"])
def test_local_copies_plain_or_packed(suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "copies"
    folder.mkdir()
    (folder / f"made{suffix}").write_bytes(packed(suffix, TEXT))
    assert load("made", data_dir=folder).text.read(0, 100).tobytes() == TEXT
    # Once unpacked, it is not unpacked again; and the environment may name the folder.
    monkeypatch.setenv("MULSTM_DATA", str(folder))
    if suffix:
        monkeypatch.setattr(store, "unpack", None)
    assert len(load("made").text) == 100


@pytest.mark.usefixtures("made")
def test_copies_that_are_not_the_file(tmp_path: Path) -> None:
    (tmp_path / "made").write_bytes(TEXT[:-1])
    with pytest.raises(
        DataError, match=r'made has 99 bytes, not 100 .*Delete it and run "mulstm fetch made"'
    ):
        load("made", data_dir=tmp_path)
    (tmp_path / "made").write_bytes(TEXT[:-1] + b"x")
    with pytest.raises(DataError, match="made has SHA-256"):
        load("made", data_dir=tmp_path)
    (tmp_path / "made").unlink()
    (tmp_path / "made.xz").write_bytes(lzma.compress(TEXT)[:-20])
    with pytest.raises(DataError, match=r"made\.xz cannot be unpacked .*Delete that copy"):
        load("made", data_dir=tmp_path)
    assert not [p for p in (tmp_path / "cache").rglob("*") if p.is_file()]


def spoilt(suffix: str) -> bytes:
    data = bytearray(packed(suffix, TEXT * 99))
    if suffix == ".zip":  # encrypted, so the flags say
        data[data.rfind(b"PK\1\2") + 8] |= 1
    elif suffix == ".tgz":  # only the checksum tells: nothing follows the member's last byte
        data[-8] ^= 1
    else:
        data[12 if suffix == ".gz" else len(data) // 2] ^= 0xFF
    return bytes(data)


@pytest.mark.parametrize("suffix", [".xz", ".gz", ".bz2", ".zip", ".tgz"])
def test_damaged_packed_files(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"made{suffix}"
    path.write_bytes(spoilt(suffix))
    with pytest.raises(DataError, match=r"cannot be unpacked .*Delete that copy"):
        load(path)
    assert not [p for p in (tmp_path / "cache").rglob("*") if p.is_file()]


@pytest.mark.usefixtures("made")
def test_a_spoilt_cache_is_made_again(tmp_path: Path) -> None:
    (tmp_path / "made.gz").write_bytes(gzip.compress(TEXT))
    (cached,) = fetch("made", tmp_path)
    assert tmp_path / "cache" in cached.parents
    cached.write_bytes(b"spoilt")
    assert fetch("made", tmp_path) == [cached]
    assert cached.read_bytes() == TEXT


@pytest.mark.usefixtures("made")
def test_fetching_tries_one_address_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def download(address: str, target: Path) -> None:
        asked.append(address)
        target.parent.mkdir(parents=True, exist_ok=True)
        # The first has another file under that name.
        target.write_bytes(packed(target.suffix, TEXT if "two" in address else b"repacked"))

    monkeypatch.setattr(store, "_download", download)
    assert len(load("made").text) == 100
    assert asked == ["http://one.invalid/made.zip", "http://two.invalid/made.gz"]
    load("made")
    assert len(asked) == 2
    assert not list((tmp_path / "cache" / "mulstm" / "downloads").iterdir())


@pytest.mark.usefixtures("made")
def test_neither_copy_nor_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(address: str, target: Path) -> None:
        raise DataError("ConnectionError")

    monkeypatch.setattr(store, "_download", download)
    with pytest.raises(DataError) as caught:
        load("made")
    assert "MULSTM_DATA is not set" in str(caught.value)
    assert "http://two.invalid/made.gz: ConnectionError" in str(caught.value)
    assert "set MULSTM_DATA" in str(caught.value).splitlines()[-1]
    with pytest.raises(DataError, match=f"not in {tmp_path}"):
        load("made", data_dir=tmp_path)
    with pytest.raises(DataError, match="does not exist"):
        load("made", data_dir=tmp_path / "nowhere")


@pytest.mark.usefixtures("made")
def test_no_cache_folder_is_not_blamed_on_the_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(DataError, match=r"downloads cannot be made .*Set XDG_CACHE_HOME"):
        load("made")


def test_a_real_download(tmp_path: Path, made: Known, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pooch")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    asked = []

    class Host(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append((self.path, self.headers["User-Agent"]))
            self.send_response(200 if self.path == "/made.zip" else 404)
            self.end_headers()
            if self.path == "/made.zip":
                self.wfile.write(packed(".zip", TEXT))

        def log_message(self, *_: object) -> None:
            """Nothing."""

    with HTTPServer(("127.0.0.1", 0), Host) as host:
        threading.Thread(target=host.serve_forever, daemon=True).start()
        root = f"http://127.0.0.1:{host.server_port}"
        file = replace(made.files[0], addresses=(f"{root}/gone.zip", f"{root}/made.zip"))
        monkeypatch.setattr(corpus, "KNOWN", {"made": replace(made, files=(file,))})
        assert len(load("made").text) == 100
        gone = replace(file, addresses=(f"{root}/gone.zip",), sha256="0" * 64)
        monkeypatch.setattr(corpus, "KNOWN", {"made": replace(made, files=(gone,))})
        with pytest.raises(DataError, match=r"gone\.zip: HTTPError 404"):
            load("made")
        host.shutdown()
    assert [path for path, _ in asked] == ["/gone.zip", "/made.zip", "/gone.zip"]
    assert all(agent.startswith("mulstm/") for _, agent in asked)


def test_without_what_fetches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pooch", None)
    with pytest.raises(DataError, match="pip install pooch"):
        store._download("http://x.invalid/a.zip", tmp_path / "a.zip")


@pytest.mark.usefixtures("made")
def test_a_full_disk_while_unpacking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "made.gz").write_bytes(gzip.compress(TEXT))

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DataError, match=r"No space left on device.*set XDG_CACHE_HOME"):
        load("made", data_dir=tmp_path)
    assert not [p for p in (tmp_path / "cache").rglob("*") if p.is_file()]


@pytest.mark.parametrize(
    ("data", "words"), [(b"", "is empty"), (b"x", "holds one byte"), (None, "There is no file or folder")]
)
def test_files_that_cannot_be_a_corpus(data: bytes | None, words: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(DataError, match=words):
        load(path)


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
    assert load(path).split("valid").read(0, 2).flags.writeable
    assert got.split("valid").raw() == bytes(range(81, 96))
    assert got.split("test").words is None
    with pytest.raises(IndexError):
        got.split("test").read(0, 6)


def test_endings_in_capitals(tmp_path: Path) -> None:
    path = tmp_path / "MADE.TXT.GZ"
    path.write_bytes(packed(".gz", TEXT))
    assert load(path).text.read(0, 100).tobytes() == TEXT


@pytest.mark.parametrize("suffix", [".xz", ".gz", ".bz2", ".zip"])
def test_a_users_packed_file_is_unpacked(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"made{suffix}"
    path.write_bytes(packed(suffix, TEXT))
    assert load(path).text.read(0, 100).tobytes() == TEXT
    path.write_bytes(packed(suffix, TEXT * 2))
    assert len(load(path).text) == 200
    if suffix == ".zip":
        with pytest.raises(DataError, match=r"holds 2 files and none called"):
            load(path.rename(tmp_path / "other-name.zip"))


@pytest.mark.parametrize("name", ["made.tar", "made.tar.gz", "made.tar.xz", "made.tar.bz2", "MADE.TGZ"])
def test_what_is_in_a_tar_archive_is_the_text(name: str, tmp_path: Path) -> None:
    path, kind = tmp_path / name, name.rpartition(".")[2].lower()
    (tmp_path / "a.txt").write_bytes(TEXT)
    with tarfile.open(path, f"w:{'gz' if kind == 'tgz' else '' if kind == 'tar' else kind}") as archive:
        archive.add(tmp_path / "a.txt", "a.txt")
    found = load(path).text
    assert found.read(0, len(found)).tobytes() == TEXT
    with tarfile.open(path, "w") as archive:
        archive.add(tmp_path / "a.txt", "a.txt")
        archive.add(tmp_path / "a.txt", "b.txt")
    with pytest.raises(DataError, match="holds 2 files and none called"):
        load(path)


def test_a_folder_is_its_files_in_order(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    for name, text in [
        ("b", b"B"),
        ("a/z", b"Z"),
        ("a/y", b"Y"),
        ("empty", b""),
        (".git/x", b"no"),
        ("a/.x", b"no"),
    ]:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text)
    assert load(folder).text.read(0, 3).tobytes() == b"YZB"
    (tmp_path / "hollow").mkdir()
    with pytest.raises(DataError, match=r"folder .*hollow is empty"):
        load(tmp_path / "hollow")


def test_a_folder_of_many_files_keeps_few_open(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    for n in range(200):
        (folder / f"{n:03d}").write_bytes(bytes([n] * 10))
    got = load(folder)
    lanes = Lanes(got.split("all"), 10, 7, trim=False)
    y = sorted(int(s) for chunk in lanes for s in chunk.y.ravel() if s >= 0)
    assert y == sorted([n for n in range(200) for _ in range(10)])[1:]
    assert len(got.text._open) <= 64


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
    assert lanes.symbols_count > 0.89 * size
    if sys.platform == "linux":
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        assert resident < 3 * 10**9


def test_a_file_that_goes_away(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_bytes(TEXT)
    got = load(path)
    path.unlink()
    with pytest.raises(DataError, match="can no longer be read"):
        got.split("train").read(0, 5)


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
    assert default.protocol == "mikolov"
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
