"""Files are written whole or not at all, and folders by one process at a time."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mulstm.errors import RunError

if sys.platform != "win32":
    import fcntl


class UnwritableError(RunError):
    """A file system refuses."""


def json_line(value: Any) -> str:
    """One line of JSON; numbers that JSON has no word for become null."""
    return json.dumps(_plain(value), ensure_ascii=False) + "\n"


def json_text(value: Any) -> str:
    """JSON for people: indented."""
    return json.dumps(_plain(value), indent=2, ensure_ascii=False) + "\n"


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
def replacing(path: Path) -> Iterator[Path]:
    """A path beside `path` to write to; it takes the place of `path` when the block ends well.

    A link stays, and what it points to is replaced.
    """
    given, path = path, Path(os.path.realpath(path)) if path.is_symlink() else path
    temporary = path.with_name(f".{path.name[-50:]}.{os.getpid()}.tmp")  # a name may be as long as can be
    try:
        # Devices and pipes can be replaced like files, and nobody means that.
        if path.exists() and not path.is_file():
            raise OSError(None, "it is no plain file")
        yield temporary
        with temporary.open("rb+") as stream:
            os.fsync(stream.fileno())
        temporary.replace(path)
        _sync_folder(path.parent)
    except OSError as error:
        raise unwritable(given, error) from None
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def filling(folder: Path) -> Iterator[Path]:
    """A folder to write files to; they take their places in `folder` together when the block ends well."""
    # In a folder that is there: it may be a link to another disk.
    home = folder if folder.is_dir() else folder.parent
    try:
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=home, prefix=f".{folder.name}.") as name:
            temporary = Path(name)
            try:
                yield temporary
            except UnwritableError as fault:
                raise UnwritableError(str(fault).replace(str(temporary), str(folder))) from None
            folder.mkdir(exist_ok=True)
            for file in temporary.iterdir():
                file.replace(os.path.realpath(folder / file.name))
            _sync_folder(folder)
    except OSError as error:
        raise unwritable(folder, error) from None


def _sync_folder(folder: Path) -> None:
    with contextlib.suppress(OSError):  # not every system can open a folder
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def unwritable(path: Path, error: OSError) -> UnwritableError:
    """What to say where a file system refuses."""
    return UnwritableError(
        f"{path} cannot be written ({error.strerror or error}). "
        "What was there before is untouched: make room or choose another place."
    )


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
