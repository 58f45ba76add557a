"""Machine code is kept for the next run, where that is safe, and nothing depends on it."""

from __future__ import annotations

from pathlib import Path

import pytest

machine_code = pytest.importorskip("mulstm.codec.machine_code")


def test_machine_code_is_kept_where_nobody_else_can_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_code.config, "CACHE_DIR", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "mulstm" / "numba"
    assert machine_code.kept_in() == str(folder)
    assert folder.stat().st_mode & 0o077 == 0
    folder.chmod(0o777)
    assert machine_code.kept_in() is None
    monkeypatch.setattr(machine_code.config, "CACHE_DIR", "elsewhere")
    assert machine_code.kept_in() == "elsewhere"


def twice(x: int) -> int:
    return 2 * x


def test_a_damaged_or_full_cache_of_machine_code_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_code, "_KEPT_IN", str(tmp_path))
    before = machine_code.config.CACHE_DIR
    assert machine_code.compiled(twice)(4) == 8
    assert before == machine_code.config.CACHE_DIR  # others keep theirs where they did
    kept = [path for path in tmp_path.rglob("*") if path.suffix in (".nbi", ".nbc")]
    assert {path.suffix for path in kept} == {".nbi", ".nbc"}
    again = machine_code.compiled(twice)
    assert again(4) == 8
    assert sum(again.stats.cache_hits.values()) == 1
    for path in kept:
        path.write_bytes(b"")
        assert machine_code.compiled(twice)(4) == 8
    again = machine_code.compiled(twice)
    assert again(4) == 8
    assert sum(again.stats.cache_hits.values()) == 1  # it was made anew

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("numba.core.caching.IndexDataCacheFile.save", full)
    monkeypatch.setattr("numba.core.caching.IndexDataCacheFile.load", full)
    assert machine_code.compiled(twice)(4) == 8


def test_loops_compile_where_no_folder_can_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("numba.core.caching.CompileResultCacheImpl._locator_classes", [])
    assert machine_code.compiled(twice)(21) == 42
