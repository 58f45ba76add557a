"""Where named corpora come from (folders, cache, network), what is packed, and what can be wrong there."""

import bz2
import gzip
import hashlib
import io
import lzma
import os
import sys
import tarfile
import threading
import time
import zipfile
from collections.abc import Callable
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from mulstm.data import corpus, fetch, load, store
from mulstm.data.known import KNOWN, File, Known
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
    assert [p.name for p in (tmp_path / "cache" / "mulstm").iterdir()] == ["corpora"]


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
    with pytest.raises(DataError, match="There is no folder"):
        load("made", data_dir=tmp_path / "nowhere")


@pytest.mark.usefixtures("made")
def test_no_cache_folder_is_not_blamed_on_the_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(DataError, match=r"made cannot be fetched to .*set XDG_CACHE_HOME"):
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
@pytest.mark.parametrize("place", ["os.fsync", "mulstm.data.store.opened"])
def test_a_full_disk_while_unpacking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    (tmp_path / "made.gz").write_bytes(gzip.compress(TEXT))

    def full(*given: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(place, full)
    with pytest.raises(DataError, match=r"No space left on device.*set XDG_CACHE_HOME"):
        load("made", data_dir=tmp_path)
    assert not [p for p in (tmp_path / "cache").rglob("*") if p.is_file()]


@pytest.mark.usefixtures("made")
def test_what_unpacks_to_more_than_the_known_size_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "BLOCK", 64)
    monkeypatch.setattr(store, "verify", None)
    (tmp_path / "made.gz").write_bytes(gzip.compress(bytes(1_000_000)))
    with pytest.raises(DataError, match=r"made\.gz unpacks to more than the 100 bytes of made\. Delete"):
        load("made", data_dir=tmp_path)


@pytest.mark.usefixtures("made")
def test_a_fault_of_what_was_unpacked_names_the_packed_copy(tmp_path: Path) -> None:
    for data, fault in ((TEXT[:-1], "99 bytes, not 100"), (bytes(100), "SHA-256")):
        (tmp_path / "made.gz").write_bytes(gzip.compress(data))
        with pytest.raises(DataError, match=f"{fault}.*{tmp_path}/made.gz"):
            load("made", data_dir=tmp_path)


def test_what_was_left_half_written_a_day_ago_is_taken_away(tmp_path: Path) -> None:
    now = time.time()
    for name, age in ((".old.tmp", 25), (".new.tmp", 23), ("old", 25)):
        (tmp_path / name).write_bytes(b"half")
        os.utime(tmp_path / name, (now - age * 3600,) * 2)
    store.sweep(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == [".new.tmp", "old"]


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


def test_what_was_unpacked_is_unpacked_again_where_it_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / f"{'long' * 60}.gz"  # a name as long as can be
    path.write_bytes(packed(".gz", TEXT))
    assert len(load(path).text) == 100
    (cached,) = [p for p in (tmp_path / "cache").rglob("*long") if p.is_file()]
    cached.write_bytes(TEXT[:50])
    assert len(load(path).text) == 100


def test_headers_that_make_no_sense(tmp_path: Path) -> None:
    path = tmp_path / "made.tar"
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT, pax_headers={}) as tar:
        entry = tarfile.TarInfo("made")
        entry.pax_headers = {"GNU.sparse.map": "x,y", "GNU.sparse.size": "9"}
        tar.addfile(entry, io.BytesIO())
    with pytest.raises(DataError, match=r"cannot be unpacked .*Delete that copy"):
        load(path)


@pytest.mark.parametrize("home", ["relative", ""])
def test_where_the_cache_is(home: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", home)
    assert store.cache_folder() == Path.home() / ".cache" / "mulstm"
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    with pytest.raises(DataError, match="Set XDG_CACHE_HOME"):
        store.cache_folder()


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


def test_a_folder_by_the_name_of_a_file_in_a_tar(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(TEXT)
    (tmp_path / "folder").mkdir()
    with tarfile.open(tmp_path / "made.tar", "w") as archive:
        archive.add(tmp_path / "a.txt", "a.txt")
        archive.add(tmp_path / "folder", "a.txt")
    found = load(tmp_path / "made.tar").text
    assert found.read(0, len(found)).tobytes() == TEXT


def test_of_several_files_in_a_tar_the_one_of_its_name(tmp_path: Path) -> None:
    (tmp_path / "made").write_bytes(TEXT)
    (tmp_path / "README").write_bytes(b"no text")
    with tarfile.open(tmp_path / "made.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "README", "made/README")
        archive.add(tmp_path / "made", "made/made")
    found = load(tmp_path / "made.tar.gz").text
    assert found.read(0, len(found)).tobytes() == TEXT


def test_a_file_put_in_the_place_of_another_is_another(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("one")
    before, status = store.key_of(file), file.stat()
    time.sleep(0.02)  # a clock has ticks
    file.write_text("two")
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert file.stat().st_mtime_ns == status.st_mtime_ns
    assert store.key_of(file) != before
