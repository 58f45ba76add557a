"""Where the bytes of a known corpus come from: a folder of copies, the cache, or the network."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import hashlib
import lzma
import os
import tarfile
import tempfile
import time
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

from mulstm import __version__, files
from mulstm.data.known import File, Known
from mulstm.errors import DataError

PACKED = (".xz", ".gz", ".bz2", ".zip", ".tgz", ".tar")
BLOCK = 1 << 20
# RuntimeError is zipfile's for a member that is encrypted or packed in an unknown way, ValueError tarfile's
# for headers that make no sense.
DAMAGED = (
    *(lzma.LZMAError, zlib.error, EOFError, zipfile.BadZipFile, tarfile.TarError),
    *(RuntimeError, ValueError, OverflowError),
)


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/mulstm; what that names must not depend on where one stands."""
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        return (named if named.is_absolute() else Path.home() / ".cache") / "mulstm"
    except RuntimeError:  # an account without a home
        raise DataError("There is no home folder for the cache. Set XDG_CACHE_HOME to a folder.") from None


def key_of(file: Path, *more: str) -> str:
    """Sixteen hexadecimal digits that differ when a file, or what is made of it, is another one."""
    status = file.stat()
    times = str(status.st_mtime_ns), str(status.st_ctime_ns)  # the one can be set, the other tells when
    facts = " ".join([str(file.resolve()), str(status.st_size), *times, *more])
    return hashlib.sha256(facts.encode(errors="surrogateescape")).hexdigest()[:16]


def data_folder(data_dir: str | Path | None) -> Path | None:
    """The folder of local copies: the one given, or $MULSTM_DATA."""
    named = data_dir or os.environ.get("MULSTM_DATA")
    if not named:
        return None
    if not Path(named).is_dir():
        raise DataError(
            f"There is no folder {named} with data. Create it or correct MULSTM_DATA (--data-dir)."
        )
    return Path(named)


def find(corpus: Known, file: File, data_dir: str | Path | None) -> Path:
    """A checked, unpacked copy of the file; unpacked or fetched into the cache where there is none yet."""
    folder = data_folder(data_dir)
    cached = cache_folder() / "corpora" / f"{file.sha256[:12]}-{file.name}"
    copies = [] if folder is None else list(_copies(folder, corpus, file))
    for copy in copies:
        if not copy.name.endswith(PACKED):
            verify(copy, file, f'Delete it and run "mulstm fetch {corpus.name}"')
            return copy
    if cached.is_file():
        with contextlib.suppress(DataError):
            verify(cached, file, "")
            return cached
    if copies:
        unpack(copies[0], cached, file.name, file)
        return cached
    return _fetch(file, cached, folder)


def _copies(folder: Path, corpus: Known, file: File) -> Iterator[Path]:
    names = [file.name, *(file.name + suffix for suffix in PACKED), *file.archives]
    for place in (folder, folder / corpus.name):
        yield from (place / name for name in names if (place / name).is_file())


def verify(path: Path, file: File, remedy: str, source: Path | None = None) -> None:
    """Raises DataError, which names their source, unless the bytes are those known."""
    size, source = path.stat().st_size, source or path
    if size != file.size:
        raise DataError(f"{file.name} has {size:,} bytes, not {file.size:,} ({source}). {remedy}.")
    found = files.sha256(path)
    if found != file.sha256:
        raise DataError(
            f"{file.name} has SHA-256 {found[:12]}..., not {file.sha256[:12]}... ({source}). {remedy}."
        )


def stream_of(path: Path) -> IO[bytes]:
    """The bytes of a file, unpacked where its ending says that they are packed."""
    openers: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
    return cast(IO[bytes], openers.get(path.suffix.lower(), open)(path, "rb"))


@contextlib.contextmanager
def opened(path: Path, member: str) -> Iterator[IO[bytes]]:
    """The unpacked bytes of any file; of archives, those of the member called so, or the only one."""
    suffix = path.suffix.lower()
    if suffix == ".zip":
        with zipfile.ZipFile(path) as archive:
            inside = [n for n in archive.namelist() if not n.endswith("/")]
            with archive.open(_pick(path, inside, member)) as stream:
                yield stream
    elif suffix == ".tgz" or ".tar" in (suffix, Path(path.stem).suffix.lower()):
        with tarfile.open(path) as tar:
            members = {m.name: m for m in tar if m.isfile()}  # of several by a name, the last
            with cast(IO[bytes], tar.extractfile(members[_pick(path, list(members), member)])) as stream:
                yield stream
            while cast(IO[bytes], tar.fileobj).read(BLOCK):  # a checksum comes after the last member
                pass
    else:
        with stream_of(path) as stream:
            yield stream


def _pick(path: Path, inside: list[str], member: str) -> str:
    named = [n for n in inside if n.rpartition("/")[2] == member] or (inside if len(inside) == 1 else [])
    if not named:
        raise DataError(
            f"{path} holds {len(inside)} files and none called {member}. Unpack it and give one file."
        )
    return named[0]


def unpack(path: Path, target: Path, member: str, file: File | None = None) -> None:
    """Writes the unpacked bytes to `target`, checked where they are known; all of them or nothing."""
    with making(target, f"{path} cannot be unpacked to") as temporary:
        _copy(path, member, temporary, None if file is None else file.size)
        if file is not None:
            verify(temporary, file, "Delete that copy and get another", path)


@contextlib.contextmanager
def making(target: Path, what: str) -> Iterator[Path]:
    """An empty file that becomes this one of the cache when the block ends well; or says `what` cannot be."""
    make_room(target.parent, what)
    try:
        with files.replacing(target) as temporary:
            yield temporary
    except files.UnwritableError as fault:
        raise _no_room(f"{what} {target.parent}", fault.reason) from None


def make_room(folder: Path, what: str) -> None:
    """Makes a folder of the cache, and takes away what others left half-written; or says `what` cannot be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        sweep(folder)
    except OSError as error:
        raise _no_room(f"{what} {folder}", files.reason_of(error)) from None


def _no_room(what: str, reason: str) -> DataError:
    return DataError(f"{what} ({reason}). Make room there, or set XDG_CACHE_HOME to another folder.")


def _copy(path: Path, member: str, target: Path, size: int | None) -> None:
    """Unpacks a member, of `size` bytes where that is known: what is not that file may fill any disk."""
    try:
        with opened(path, member) as source, target.open("wb") as sink:
            while piece := source.read(BLOCK):
                sink.write(piece)
                if size is not None and sink.tell() > size:
                    raise DataError(
                        f"{path} unpacks to more than the {size:,} bytes of {member}. "
                        "Delete that copy and get another."
                    )
    except (*DAMAGED, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # gzip and bz2 have none for damage
            raise
        raise DataError(f"{path} cannot be unpacked ({error}). Delete that copy and get another.") from None


def sweep(folder: Path) -> None:
    """Takes away what processes that were killed a day ago or earlier left half written."""
    for left in folder.glob(".*.tmp"):
        with contextlib.suppress(OSError):
            if left.stat().st_mtime < time.time() - 24 * 3600:
                left.unlink()


def seal(path: Path) -> None:
    """Keeps a cached file's hash beside it."""
    files.write_atomic(_seal_of(path), files.sha256(path))


def is_sound(path: Path) -> bool:
    """Whether a cached file is there and still what it was when it was sealed."""
    try:
        return _seal_of(path).read_text() == files.sha256(path)
    except (OSError, UnicodeDecodeError):
        return False


def _seal_of(path: Path) -> Path:
    return path.with_name(path.name + ".sha256")


def _fetch(file: File, cached: Path, folder: Path | None) -> Path:
    """Tries one address after the other until one gives the known bytes."""
    make_room(cached.parent, f"{file.name} cannot be fetched to")
    tried: list[str] = []
    with tempfile.TemporaryDirectory(prefix="mulstm-") as place:
        for address in file.addresses:
            download = Path(place) / f"{len(tried)}-{address.rpartition('/')[2]}"
            try:
                _download(address, download)
                unpack(download, cached, file.name, file)
                return cached
            except DataError as error:
                tried.append(f"  {address}: {error}")
    where = f"not in {folder}" if folder else "not in a local folder (MULSTM_DATA is not set)"
    raise DataError(
        f"{file.name} is {where}, and no address gave it:\n" + "\n".join(tried) + "\n"
        "Put a copy (plain, .xz, .gz, .bz2 or .zip) into a folder and set MULSTM_DATA to it."
    )


def _download(address: str, target: Path) -> None:
    try:
        import pooch
    except ImportError:
        raise DataError("pooch, which fetches it, is not installed. Run: pip install pooch") from None
    pooch.get_logger().setLevel("ERROR")
    # Some hosts turn Python's default User-Agent away.
    headers = {"User-Agent": f"mulstm/{__version__}"}
    try:
        pooch.retrieve(
            address,
            known_hash=None,
            fname=target.name,
            path=target.parent,
            downloader=pooch.HTTPDownloader(headers=headers, timeout=30),
        )
    except (OSError, ValueError) as error:
        status = getattr(getattr(error, "response", None), "status_code", "")
        raise DataError(f"{type(error).__name__} {status}".rstrip()) from None
