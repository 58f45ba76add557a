"""A run leaves a folder behind that tells what was done, on what, and how it went."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from mulstm import __version__
from mulstm.errors import RunError
from mulstm.recipe import Recipe, dumps, load

if sys.platform != "win32":
    import fcntl

ROOT = Path("runs")
PACKAGES = ("torch", "numpy", "triton", "safetensors")


class Run:
    """A run folder, held by this process until it is closed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = _locked(path)
        self._log: FileIO | None = None

    @classmethod
    def create(cls, recipe: Recipe, *, root: Path = ROOT) -> Run:
        """A new folder root/<recipe>/<date>-seed<k> with the recipe in it."""
        parent = root / (recipe.name or "unnamed")
        stamp = f"{time.strftime('%Y-%m-%d-%H%M%S')}-seed{recipe.train.seed}"
        for n in range(1, 1000):
            path = parent / (stamp if n == 1 else f"{stamp}-{n}")
            try:
                path.mkdir(parents=True)
                break
            except FileExistsError:
                continue
            except OSError as error:
                raise RunError(f"{path} cannot be made ({error.strerror}). Choose another place.") from None
        run = cls(path)
        write_atomic(path / "recipe.toml", dumps(recipe))
        return run

    @classmethod
    def open(cls, path: Path) -> Run:
        """The folder of an earlier run, to go on with it."""
        _require_run(path)
        return cls(path)

    def log(self, record: Mapping[str, Any]) -> None:
        """Appends one line to log.jsonl; it is in the system's hands when this returns."""
        if self._log is None:
            self._log = _appendable(self.path / "log.jsonl")
        line = json_line(record).encode()
        try:
            if self._log.write(line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise _unwritable(self.path / "log.jsonl", error) from None

    def write_json(self, name: str, value: Any) -> None:
        """Writes or replaces environment.json, metrics.json and their like."""
        write_atomic(self.path / name, json_text(value))

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
    try:
        lock = (path / "lock").open("w")
    except OSError as error:
        raise _unwritable(path / "lock", error) from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise RunError(
            f"{path} is in use by another process. Wait for it to end, or start a new run."
        ) from None
    return lock


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


def _appendable(path: Path) -> FileIO:
    """The log, open at its end; a last line torn by a crash is cut off first."""
    stream = path.open("ab+", buffering=0)
    end = place = stream.seek(0, os.SEEK_END)
    while place > 0:
        start = max(0, place - 4096)
        stream.seek(start)
        newline = stream.read(place - start).rfind(b"\n")
        place = start + newline + 1
        if newline >= 0 or start == 0:
            break
    if place < end:
        stream.truncate(place)
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
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
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


def newest_first(name: str, *, root: Path = ROOT) -> list[Path]:
    """The folders of a recipe's runs."""
    return _newest_first(root / name, 0)


def all_below(folder: Path) -> list[Path]:
    """The folders of a recipe's, a table's or of all runs, newest first."""
    return _newest_first(folder, 3)  # as in hutter/size/mlstm-3m


def _newest_first(folder: Path, depth: int) -> list[Path]:
    found = [
        p.parent for level in range(depth + 1) for p in folder.glob("*/" * level + "*-seed*/recipe.toml")
    ]
    return sorted(found, key=lambda p: ((p / "recipe.toml").stat().st_mtime_ns, p.name), reverse=True)


def environment(devices: Sequence[str] = ()) -> dict[str, Any]:
    """What the run ran on: versions and kinds of machine; no names of hosts, users or folders."""
    versions = {"mulstm": __version__, "python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return {
        "versions": versions,
        "system": platform.system(),
        "processor": _processor(),
        "cores": cores(),
        "devices": list(devices),
        "commit": commit(),
    }


def cores() -> int | None:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def commit() -> str:
    """The commit of the source tree this package runs from ("+" when changed since).

    Where there is no repository, or another one's, as in a container, MULSTM_COMMIT gives it.
    """
    here = Path(__file__).parent
    given = os.environ.get("MULSTM_COMMIT", "")
    if given or not (here.parents[1] / ".git").exists():
        return given
    try:
        described = subprocess.run(
            ["git", "-C", str(here), "describe", "--always", "--dirty=+", "--abbrev=12", "--exclude=*"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return described.stdout.strip()


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
        raise _unwritable(given, error) from None
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
            except RunError as fault:
                raise RunError(str(fault).replace(str(temporary), str(folder))) from None
            folder.mkdir(exist_ok=True)
            for file in temporary.iterdir():
                file.replace(os.path.realpath(folder / file.name))
            _sync_folder(folder)
    except OSError as error:
        raise _unwritable(folder, error) from None


def _sync_folder(folder: Path) -> None:
    with contextlib.suppress(OSError):  # not every system can open a folder
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _unwritable(path: Path, error: OSError) -> RunError:
    return RunError(
        f"{path} cannot be written ({error.strerror or error}). "
        "What was there before is untouched: make room or choose another place. "
        "Training that has begun goes on with --resume."
    )
