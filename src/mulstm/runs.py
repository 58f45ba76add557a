"""A run leaves a folder behind that tells what was done, on what, and how it went."""

from __future__ import annotations

import errno
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from io import FileIO
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from mulstm import files
from mulstm.errors import RunError
from mulstm.recipe import DEEPEST, Recipe, dumps, load

if sys.platform != "win32":
    import fcntl

ROOT = Path("runs")
ENVIRONMENT = "environment.json"
SEED = "-seed"  # in the name that a run's folder is given
BINARY = getattr(os, "O_BINARY", 0)  # on Windows bytes stay as they are


class Run:
    """A run folder, held by this process until it is closed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = _locked(path)
        self._log: FileIO | None = None

    @classmethod
    def create(cls, recipe: Recipe, *, root: Path) -> Run:
        """A new folder root/<recipe>/<date>-seed<k> with the recipe in it."""
        parent = home(recipe.name, root)
        stamp = f"{time.strftime('%Y-%m-%d-%H%M%S')}{SEED}{recipe.train.seed}"
        try:
            parent.mkdir(parents=True, exist_ok=True)
            for n in count(1):
                path = parent / (stamp if n == 1 else f"{stamp}-{n}")
                with suppress(FileExistsError):
                    path.mkdir()
                    break
        except OSError as error:
            raise RunError(
                f"A folder in {parent} cannot be made ({error.strerror}). Choose another place."
            ) from None
        run = cls(path)
        files.write_atomic(path / "recipe.toml", dumps(recipe))
        return run

    @classmethod
    def open(cls, path: Path) -> Run:
        """The folder of an earlier run, to go on with it."""
        _require_run(path)
        _require_own(path)
        return cls(path)

    def log(self, record: Mapping[str, Any]) -> None:
        """Appends one line to log.jsonl; it is in the system's hands when this returns."""
        if self._log is None:
            self._log = _appendable(self.path / "log.jsonl")
        line = files.json_line(record).encode()
        try:
            if self._log.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise files.UnwritableError(self.path / "log.jsonl", files.reason_of(error)) from None

    def write_json(self, name: str, value: Any) -> None:
        """Writes or replaces environment.json, metrics.json and their like."""
        files.write_atomic(self.path / name, files.json_text(value))

    def close(self) -> None:
        """Lets go of the folder."""
        if self._log is not None:
            self._log.close()
            self._log = None
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _locked(path: Path) -> IO[str] | None:
    """An open file whose advisory lock goes away with the process, however that ends."""
    if sys.platform == "win32":  # there, two processes are not told of each other
        return None
    lock = os.fdopen(_opened(path / "lock", os.O_RDWR), "r+")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise RunError(
            f"{path} is in use by another process. Wait for it to end, or start a new run."
        ) from None
    except OSError:  # a file system without locks
        pass
    return lock


def is_held(folder: Path) -> bool:
    """Whether a process is at work in it, as far as can be told."""
    if sys.platform == "win32":
        return False
    try:
        with (folder / "lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


def _require_own(folder: Path) -> None:
    """A run from elsewhere may hold links, and what is written through them lies outside its folder."""
    for path in folder.iterdir():
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise RunError(
                f"{path} is a link or no plain file, and this run would write there. "
                "Put a copy in its place, or remove it."
            )


def _opened(path: Path, flags: int) -> int:
    try:
        return os.open(path, flags | os.O_CREAT | BINARY, 0o666)
    except OSError as error:
        raise files.UnwritableError(path, files.reason_of(error)) from None


def _appendable(path: Path) -> FileIO:
    """The log, open at its end; a last line torn by a crash is cut off first."""
    stream = FileIO(_opened(path, os.O_RDWR | os.O_APPEND), "a+")
    stream.seek(0)
    stream.truncate(stream.readall().rfind(b"\n") + 1)  # some hundred lines
    return stream


def read_log(path: Path) -> list[dict[str, Any]]:
    """The records of a log.jsonl (or of the run folder that holds it), without a torn last line."""
    path = path / "log.jsonl" if path.is_dir() else path
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    records = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        record = files.json_of(line)
        if isinstance(record, dict) and isinstance(record.get("update"), int):
            records.append(record)
        elif number < len(lines):
            raise RunError(f"{path} line {number} is no line of a log. Remove that line.")
    return records


def recipe_of(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe as it was run, command line included, whoever holds the folder."""
    _require_run(path)
    return load(path / "recipe.toml", overrides)


def is_run(path: Path) -> bool:
    """Whether this is the folder of a run."""
    return (path / "recipe.toml").is_file()


def _require_run(path: Path) -> None:
    if not is_run(path):
        raise RunError(f"{path} is not a run folder: it has no recipe.toml. Give the folder of a run.")


def home(name: str, root: Path) -> Path:
    """Where the runs of a recipe are."""
    return root / (name or "unnamed")


def newest_first(name: str, *, root: Path) -> list[Path]:
    """The folders of a recipe's runs."""
    return _newest_first(home(name, root), 0)


def all_below(folder: Path) -> list[Path]:
    """The folders of a recipe's, a table's or of all runs, newest first."""
    return _newest_first(folder, DEEPEST)


def _newest_first(folder: Path, depth: int) -> list[Path]:
    """At most so much deeper; a folder that was renamed is known by what training wrote into it."""
    files = (file for level in range(depth + 1) for file in folder.glob("*/" * level + "*/recipe.toml"))
    found = [p for p in (file.parent for file in files) if SEED in p.name or (p / ENVIRONMENT).is_file()]
    return sorted(found, key=lambda p: ((p / "recipe.toml").stat().st_mtime_ns, p.name), reverse=True)
