"""Files are written whole or not at all."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from mulstm import files
from mulstm.errors import DataError, RunError


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


def test_who_may_read_a_file_stays(tmp_path: Path) -> None:
    path = tmp_path / "private"
    path.write_text("old")
    for mode in (0o600, 0o400):
        path.chmod(mode)
        files.write_atomic(path, "new")
        assert (path.read_text(), path.stat().st_mode & 0o777) == ("new", mode)
    with files.replacing(path) as temporary:
        assert temporary.stat().st_mode & 0o777 == 0o600  # also for a user who is not root
    (tmp_path / "like").touch(0o644)
    with files.replacing(path, (tmp_path / "like").stat()):
        pass
    assert path.stat().st_mode & 0o777 == 0o400
    with files.replacing(tmp_path / "shared", (tmp_path / "like").stat()):
        pass
    assert (tmp_path / "shared").stat().st_mode & 0o777 == 0o644
    mask = os.umask(0o027)
    try:
        files.write_atomic(tmp_path / "new", "new")
    finally:
        os.umask(mask)
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o640


def test_who_may_read_a_file_in_a_folder_that_is_filled_stays(tmp_path: Path) -> None:
    (tmp_path / "private").touch(0o600)
    with files.filling(tmp_path) as made:
        for name in ("private", "new"):
            files.write_atomic(made / name, "new")
    assert (tmp_path / "private").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "new").stat().st_mode & 0o777 != 0o600
    assert (tmp_path / "private").read_text() == "new"


def test_a_private_file_is_private_from_its_first_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []

    def seen(path: Path, *how: int, real: Callable[..., int] = os.open) -> int:
        handle = real(path, *how)
        made.append(os.fstat(handle).st_mode & 0o777)
        return handle

    (tmp_path / "old").touch(0o600)
    monkeypatch.setattr("os.open", seen)
    for name, like in (("new", (tmp_path / "old").stat()), ("old", None)):
        with files.replacing(tmp_path / name, like):
            assert made[-1] == 0o600
    with files.replacing(tmp_path / "public"):
        assert made[-1] != 0o600


def test_the_rights_of_an_owner_are_not_given_to_another(tmp_path: Path) -> None:
    path = tmp_path / "program"
    path.write_text("old")
    path.chmod(0o6755)
    with files.replacing(tmp_path / "copy", path.stat()):
        pass
    files.write_atomic(path, "new")
    for made in (path, tmp_path / "copy"):
        assert made.stat().st_mode & 0o7777 == 0o755


@pytest.mark.parametrize("is_allowed", [True, False])
def test_a_group_keeps_what_it_may_read_and_no_other_gets_it(
    is_allowed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, given = tmp_path / "shared", []
    path.touch()
    path.chmod(0o640)
    own = path.stat()
    theirs = os.stat_result((*own[:5], own.st_gid + 1, *own[6:]))

    def chown(path: Path, user: int, group: int) -> None:
        given.append((user, group))
        if not is_allowed:
            raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr("os.chown", chown)
    with files.replacing(tmp_path / "copy", theirs):
        pass
    assert given == [(-1, theirs.st_gid)]
    assert (tmp_path / "copy").stat().st_mode & 0o777 == (0o640 if is_allowed else 0o600)


@pytest.mark.parametrize(("mode", "wanted"), [(0o644, 0o644), (0o664, 0o644), (0o604, 0o604), (0o646, 0o646)])
def test_another_group_may_what_strangers_may(
    mode: int, wanted: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "shared"
    path.touch()
    path.chmod(mode)
    own = path.stat()
    monkeypatch.setattr("os.chown", Mock(side_effect=PermissionError(errno.EPERM, "not permitted")))
    with files.replacing(tmp_path / "copy", os.stat_result((*own[:5], own.st_gid + 1, *own[6:]))):
        pass
    assert (tmp_path / "copy").stat().st_mode & 0o777 == wanted


def test_a_link_in_the_way_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("secrets.token_hex", lambda n: "seen before")
    (tmp_path / "victim").write_text("theirs")
    (tmp_path / ".out.seen before.tmp").symlink_to("victim")
    with pytest.raises(RunError, match="File exists"):
        files.write_atomic(tmp_path / "out", "ours")
    assert (tmp_path / "victim").read_text() == "theirs"
    assert (tmp_path / ".out.seen before.tmp").is_symlink()  # not ours to take away


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


@pytest.mark.parametrize("links", [True, False])
def test_a_name_that_was_free_is_taken_only_while_it_is(
    links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def link(*_: Any) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    if not links:
        monkeypatch.setattr(os, "link", link)
    path, sentence = tmp_path / "out", r"out exists already. Give another path, or --force to replace it\."

    def write(meanwhile: str = "") -> None:
        with files.replacing(path) as temporary:
            temporary.write_text("ours")
            if meanwhile:
                path.write_text(meanwhile)

    files.require_free(path, force=False)
    with pytest.raises(DataError, match=sentence):
        write("theirs")
    assert (path.read_text(), list(tmp_path.iterdir())) == ("theirs", [path])
    with pytest.raises(DataError, match=sentence):
        write()
    path.unlink()
    write()
    assert (path.read_text(), list(tmp_path.iterdir())) == ("ours", [path])
    assert path.stat().st_nlink == 1
    with pytest.raises(DataError, match=sentence):
        files.require_free(path, force=False)
    write("theirs")  # of whom nothing is asked
    assert path.read_text() == "ours"
    files.require_free(tmp_path / "new", force=False)
    files.require_free(tmp_path / "new", force=True)
    files.write_atomic(tmp_path / "new", "old")
    files.write_atomic(tmp_path / "new", "new")


def test_no_empty_file_is_left_where_there_are_no_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    files.require_free(tmp_path / "out", force=False)
    with monkeypatch.context() as here:
        here.setattr(os, "link", refuse)
        here.setattr(Path, "replace", refuse)
        with pytest.raises(RunError, match="Input/output error"):
            files.write_atomic(tmp_path / "out", "ours")
    assert not list(tmp_path.iterdir())


def test_only_plain_files_are_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    for name in ("pipe", "link"):
        with pytest.raises(RunError, match=rf"{name} cannot be written \(it is no plain file\)"):
            files.write_atomic(tmp_path / name, "new")
    assert (tmp_path / "link").is_fifo()
    assert len(list(tmp_path.iterdir())) == 2


def test_links_in_a_folder_that_is_filled_stay(tmp_path: Path) -> None:
    folder, target = tmp_path / "folder", tmp_path / "far"
    folder.mkdir()
    target.write_text("old")
    (folder / "one").symlink_to(target)
    with files.filling(folder) as made:
        (made / "one").write_text("new")
        (made / "two").write_text("new")
    assert (folder / "one").is_symlink()
    assert (target.read_text(), (folder / "two").read_text()) == ("new", "new")
    assert sorted(p.name for p in folder.iterdir()) == ["one", "two"]


def test_a_file_that_cannot_be_written_is_told_by_the_place_it_was_to_have(tmp_path: Path) -> None:
    def fail() -> None:
        with files.filling(tmp_path / "folder") as made:
            raise files.UnwritableError(made / "one", "No space left on device")

    with pytest.raises(
        files.UnwritableError, match=r"/folder/one cannot be written \(No space left"
    ) as caught:
        fail()
    assert caught.value.path == tmp_path / "folder" / "one"
    assert not list(tmp_path.iterdir())


def test_a_name_as_long_as_names_may_be(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 250 + ".mul")
    files.write_atomic(path, "new")
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_is_a_link_is_filled_where_it_lies(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "folder").symlink_to("disk")
    with files.filling(tmp_path / "folder") as made:
        assert made.resolve().parent == tmp_path / "disk"
        (made / "one").write_text("new")
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["one"]
