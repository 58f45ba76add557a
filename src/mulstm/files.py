"""Files are written whole or not at all, and folders by one process at a time."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import secrets
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mulstm.errors import DataError, RunError

if sys.platform != "win32":
    import fcntl


# What a command found free and was not told to replace: hours later something may lie there.
_free: set[str] = set()


class UnwritableError(RunError):
    """A file system refuses."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(
            f"{path} cannot be written ({reason}). "
            "What was there before is untouched: make room or choose another place."
        )
        self.path, self.reason = path, reason


def require_place(path: Path) -> None:
    """Raises DataError, before any work is done, where no file can be written."""
    if not path.parent.is_dir():
        raise DataError(f"The folder {path.parent} does not exist. Make it first.")
    if not os.access(path.parent, os.W_OK):
        raise DataError(f"The folder {path.parent} cannot be written. Choose another place.")
    if path.is_dir():
        raise DataError(f"{path} is a folder. Give the path of a file.")
    if path.exists() and not path.is_file():
        raise DataError(f"{path} is no plain file. Give the path of one.")


def require_free(path: Path, force: bool) -> None:
    """Raises DataError where a file or folder is that may not be replaced; nor may one that appears later."""
    if force:
        _free.discard(os.path.abspath(path))
    elif path.exists():
        raise DataError(f"{path} exists already. Give another path, or --force to replace it.")
    else:
        _free.add(os.path.abspath(path))


def _is_to_be_free(path: Path) -> bool:
    """Itself, or the folder that it is to come in."""
    return not _free.isdisjoint((os.path.abspath(path), os.path.abspath(path.parent)))


def _place(temporary: Path, path: Path, given: Path) -> None:
    """Gives a finished file its name, which replaces what has it; one that was free must be free still."""
    if not _is_to_be_free(given):
        temporary.replace(path)
        return
    try:
        os.link(temporary, path)
    except OSError:  # the name is taken, or there are no links here: then it is empty for a moment, but ours
        try:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        except FileExistsError:
            require_free(given, force=False)
            raise
        try:
            temporary.replace(path)
        except OSError:
            path.unlink()
            raise
    _free.discard(os.path.abspath(given))


def json_line(value: Any) -> str:
    """One line of JSON; numbers that JSON has no word for become null."""
    return json.dumps(_plain(value), ensure_ascii=False) + "\n"


def json_text(value: Any) -> str:
    """JSON for people: indented."""
    return json.dumps(_plain(value), indent=2, ensure_ascii=False) + "\n"


def json_of(line: bytes) -> Any:
    """What a line of JSON holds; None where it is none."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value


def write_atomic(path: Path, data: bytes | str) -> None:
    """Replaces the file by `data`, all of it or, whatever happens, not at all."""
    with replacing(path) as temporary, temporary.open("wb") as stream:
        stream.write(data.encode() if isinstance(data, str) else data)


@contextlib.contextmanager
def replacing(path: Path, like: os.stat_result | None = None) -> Iterator[Path]:
    """An empty file beside `path` to write to; it takes the place of `path` when the block ends well.

    A link stays, and what it points to is replaced. Who may read a file stays, too; a new one may be read by
    those who may read what it is `like`.
    """
    given, path = path, Path(os.path.realpath(path)) if path.is_symlink() else path
    temporary: Path | None = None
    try:
        if _is_to_be_free(given):
            require_free(given, force=False)
        # Devices and pipes can be replaced like files, and nobody means that.
        if path.exists() and not path.is_file():
            raise OSError(None, "it is no plain file")
        like = path.stat() if path.exists() else like
        # From its first moment on: who has opened it may read all that is written later.
        temporary = _beside(path, 0o666 if like is None else 0o600)
        like = temporary.stat() if like is None else like
        yield temporary
        with temporary.open("rb+") as stream:
            os.fsync(stream.fileno())
        _give_rights_of(temporary, like)  # some writers put a file of their own in its place
        _place(temporary, path, given)
        _sync_folder(path.parent)
    except OSError as error:
        raise UnwritableError(given, reason_of(error)) from None
    finally:
        if temporary is not None:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)


def _give_rights_of(path: Path, like: os.stat_result) -> None:
    """Lets those read and write it who may the other.

    Where its group cannot be had, another may what strangers may, and no more than its own might. That a
    program runs with its owner's rights is left out: the owner may be another now.
    """
    mode = like.st_mode & 0o777
    if path.stat().st_gid != like.st_gid:
        try:
            os.chown(path, -1, like.st_gid)
        except OSError:
            mode = mode & ~0o070 | mode & (mode & 0o007) << 3
    path.chmod(mode)


def _beside(path: Path, mode: int) -> Path:
    """A new file whose name nobody else has (processes in containers share their numbers) or can foresee."""
    found = path.with_name(f".{path.name[-50:]}.{secrets.token_hex(8)}.tmp")  # a name has a longest length
    os.close(os.open(found, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode))
    return found


@contextlib.contextmanager
def filling(folder: Path) -> Iterator[Path]:
    """A folder to write files to; they take their places in `folder` together when the block ends well.

    Links stay, and who may read a file, as `replacing` has it.
    """
    # In a folder that is there: it may be a link to another disk.
    home = folder if folder.is_dir() else folder.parent
    try:
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=home, prefix=f".{folder.name}.") as name:
            temporary = Path(name)
            try:
                yield temporary
            except UnwritableError as fault:
                raise UnwritableError(folder / fault.path.relative_to(temporary), fault.reason) from None
            folder.mkdir(exist_ok=True)
            for file in temporary.iterdir():
                if _is_to_be_free(folder / file.name):  # before the first, so that all of them come or none
                    require_free(folder / file.name, force=False)
            for file in list(temporary.iterdir()):
                target = Path(os.path.realpath(folder / file.name))
                if target.exists():
                    _give_rights_of(file, target.stat())
                _place(file, target, folder / file.name)
            _free.discard(os.path.abspath(folder))
            _sync_folder(folder)
    except OSError as error:
        raise UnwritableError(folder, reason_of(error)) from None


def sha256(path: Path) -> str:
    """Of a file's bytes."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _sync_folder(folder: Path) -> None:
    with contextlib.suppress(OSError):  # not every system can open a folder
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def reason_of(error: OSError) -> str:
    """In the system's words."""
    return error.strerror or str(error)


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Waits until no other process that asks so is at work in this folder, and keeps others waiting."""
    if sys.platform == "win32":
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # of a file system without locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
