"""Files are written whole or not at all."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from mulstm import files
from mulstm.errors import RunError


@pytest.mark.parametrize("where", ["write", "fsync", "replace"])
def test_a_full_disk_loses_nothing(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model"
    files.write_atomic(path, b"the old one")

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if where == "write":
        real = Path.open

        class Full:
            def __init__(self, stream: Any) -> None:
                self.stream = stream

            def __enter__(self) -> "Full":
                return self

            def __exit__(self, *_: Any) -> None:
                self.stream.close()

            def write(self, data: bytes) -> None:
                self.stream.write(data[:3])
                self.stream.flush()
                full()

        monkeypatch.setattr(Path, "open", lambda self, mode: Full(real(self, mode)))
    else:
        monkeypatch.setattr(*((os, "fsync") if where == "fsync" else (Path, "replace")), full)
    with pytest.raises(RunError, match=r"No space left on device.*untouched"):
        files.write_atomic(path, b"the new one")
    monkeypatch.undo()
    assert path.read_bytes() == b"the old one"
    assert list(tmp_path.iterdir()) == [path]


def test_an_error_of_ours_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "model"
    files.write_atomic(path, "old")

    def fail() -> None:
        with files.replacing(path) as temporary:
            temporary.write_bytes(b"half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_links_stay_and_what_they_point_to_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    for name in ("there", "not yet"):
        link, target = tmp_path / name, tmp_path / "far" / name
        link.symlink_to(target)
        files.write_atomic(link, "old")
        files.write_atomic(link, "new")
        assert link.is_symlink()
        assert target.read_text() == "new"
    assert len(list((tmp_path / "far").iterdir())) == 2


def test_only_plain_files_are_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    for name in ("pipe", "link"):
        with pytest.raises(RunError, match=rf"{name} cannot be written \(it is no plain file\)"):
            files.write_atomic(tmp_path / name, "new")
    assert (tmp_path / "link").is_fifo()
    assert len(list(tmp_path.iterdir())) == 2
