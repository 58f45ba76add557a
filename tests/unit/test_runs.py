"""Run folders: made once, held by one, and never half written."""

import errno
import getpass
import io
import json
import math
import os
import platform
import signal
import subprocess
import sys
import time
from io import FileIO
from pathlib import Path

import pytest

from mulstm import machine, recipe, runs
from mulstm.errors import RunError
from mulstm.runs import Run

RECIPE = recipe.load("text", ["train.seed=7"])


def test_a_new_folder_tells_what_is_run(tmp_path: Path) -> None:
    with Run.create(RECIPE, root=tmp_path) as run, Run.create(RECIPE, root=tmp_path) as second:
        assert run.path.parent == tmp_path / "text"
        assert "-seed7" in run.path.name
        assert run.path != second.path
        assert runs.recipe_of(run.path) == RECIPE
        run.write_json("metrics.json", {"bits": 1.5, "none": math.nan, "list": (1, -math.inf)})
        assert json.loads((run.path / "metrics.json").read_text()) == {
            "bits": 1.5,
            "none": None,
            "list": [1, None],
        }


def test_a_folder_in_use_says_so(tmp_path: Path) -> None:
    with Run.create(RECIPE, root=tmp_path) as run:
        with pytest.raises(RunError, match="in use by another process"):
            Run.open(run.path)
        path = run.path
    Run.open(path).close()
    with pytest.raises(RunError, match="is not a run folder"):
        Run.open(tmp_path)


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("a file where a folder should be")
    with pytest.raises(RunError, match=r"cannot be made .*Choose another place"):
        Run.create(RECIPE, root=tmp_path)
    (tmp_path / "link").symlink_to(tmp_path / "nowhere" / "at all")
    with pytest.raises(RunError, match=r"cannot be made .*Choose another place"):
        Run.create(RECIPE, root=tmp_path / "link")


def test_the_log_survives_a_kill(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib, itertools\n"
        "from mulstm import recipe, runs\n"
        "run = runs.Run.create(recipe.load('text'), root=pathlib.Path(sys.argv[1]))\n"
        "for n in itertools.count():\n"
        "    run.log({'update': n, 'padding': 'x' * 1000})\n"
        "    print(n, flush=True)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout:
        while int(process.stdout.readline()) < 20:
            pass
        process.send_signal(signal.SIGKILL)
        printed = process.stdout.read().splitlines()
    process.wait()
    (path,) = runs.newest_first("text", root=tmp_path)
    logged = [record["update"] for record in runs.read_log(path)]
    assert logged == list(range(len(logged)))
    assert len(logged) > max(int(line) for line in [*printed, "20"] if line.isdigit())
    # The lock went with the process, and the log goes on where it was.
    with Run.open(path) as run:
        run.log({"update": -1})
    assert [r["update"] for r in runs.read_log(path)] == [*logged, -1]


def test_a_torn_last_line_is_left_out_and_cut_off(tmp_path: Path) -> None:
    with Run.create(RECIPE, root=tmp_path) as run:
        log = run.path / "log.jsonl"
        log.write_bytes(b'{"update": 1}\n{"upd')
        assert runs.read_log(run.path) == [{"update": 1}]
        run.log({"update": 2})
        assert runs.read_log(log) == [{"update": 1}, {"update": 2}]
        log.write_bytes(b'{"update": 1}\n{"upd\n')  # not torn: its end is there
        with pytest.raises(RunError, match="line 2 is no line of a log"):
            runs.read_log(log)
        for wrong in (b'{"upd', b"[1]", b"{}", b'{"update": "x"}', b'"x"', b"[" * 100_000):
            log.write_bytes(b'{"update": 2}\n' + wrong + b'\n{"update": 3}\n')
            with pytest.raises(RunError, match="line 2 is no line of a log"):
                runs.read_log(log)
    assert runs.read_log(tmp_path / "none.jsonl") == []


@pytest.mark.parametrize("whole", [0, 1, 3])
@pytest.mark.parametrize("torn", [0, 1, 4095, 4096, 10_000])
def test_only_the_torn_line_is_cut_off(whole: int, torn: int, tmp_path: Path) -> None:
    with Run.create(RECIPE, root=tmp_path) as run:
        lines = b'{"padding": "%s"}\n' % (b"x" * 3000) * whole
        (run.path / "log.jsonl").write_bytes(lines + b"y" * torn)
        run.log({"update": 2})
        assert (run.path / "log.jsonl").read_bytes() == lines + b'{"update": 2}\n'


def test_the_newest_run_comes_first(tmp_path: Path) -> None:
    assert runs.newest_first("text", root=tmp_path) == []
    for n, name in enumerate(["2026-01-02-000000-seed1", "2026-01-01-000000-seed2"]):
        folder = tmp_path / "text" / name
        folder.mkdir(parents=True)
        (folder / "recipe.toml").write_text("")
        os.utime(folder / "recipe.toml", (time.time() + n, time.time() + n))
    found = [folder.name for folder in runs.newest_first("text", root=tmp_path)]
    assert found == ["2026-01-01-000000-seed2", "2026-01-02-000000-seed1"]


def test_a_renamed_run_is_found(tmp_path: Path) -> None:
    for name, when in (("2026-01-01-000000-seed1", 1e9), ("mine", 2e9), ("texts", 3e9)):
        folder = tmp_path / "text" / name
        folder.mkdir(parents=True)
        (folder / "recipe.toml").write_text("")
        os.utime(folder / "recipe.toml", (when, when))
    (tmp_path / "text" / "mine" / runs.ENVIRONMENT).write_text("{}")
    found = [folder.name for folder in runs.all_below(tmp_path)]
    assert found == ["mine", "2026-01-01-000000-seed1"]


def test_runs_of_one_moment_come_in_the_order_of_their_names(tmp_path: Path) -> None:
    names = [f"2026-01-01-000000-seed{k}" for k in (3, 1, 4, 2, 6, 5)]
    for name in names:
        (tmp_path / "text" / name).mkdir(parents=True)
        (tmp_path / "text" / name / "recipe.toml").write_text("")
        os.utime(tmp_path / "text" / name / "recipe.toml", (1e9, 1e9))
    found = [folder.name for folder in runs.newest_first("text", root=tmp_path)]
    assert found == sorted(names, reverse=True)


def test_a_full_disk_under_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    with Run.create(RECIPE, root=tmp_path) as run:
        monkeypatch.setattr(runs, "_appendable", lambda path: FileIO("/dev/full", "a"))
        with pytest.raises(RunError, match="No space left on device"):
            run.log({"update": 1})


def test_half_a_line_is_a_full_disk_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Half(io.BytesIO):
        def write(self, line: bytes) -> int:  # type: ignore[override]
            return super().write(line[: len(line) // 2])

    with Run.create(RECIPE, root=tmp_path) as run:
        monkeypatch.setattr(runs, "_appendable", lambda path: Half())
        with pytest.raises(RunError, match="No space left on device"):
            run.log({"update": 1})


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*given: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(runs.fcntl, "flock", none)
    with Run.create(RECIPE, root=tmp_path) as run:
        run.log({"update": 1})
    assert runs.read_log(run.path) == [{"update": 1}]


@pytest.mark.parametrize(
    "name", ["lock", "log.jsonl", "environment.json", "last.safetensors", "metrics.json"]
)
def test_links_and_pipes_in_a_run_from_elsewhere(name: str, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("keep this")
    with Run.create(RECIPE, root=tmp_path) as run:
        path = run.path / name
    path.unlink(missing_ok=True)
    for make in (lambda: path.symlink_to(victim), lambda: os.mkfifo(path)):
        make()
        with pytest.raises(RunError, match=f"{name} is a link or no plain file"):
            Run.open(path.parent)
        path.unlink()
    assert victim.read_text() == "keep this"


def test_the_environment_names_no_host_user_or_folder() -> None:
    got = machine.environment(["a device"])
    assert got["devices"] == ["a device"]
    assert {"mulstm", "python", "numpy"} <= set(got["versions"])
    text = json.dumps(got)
    for private in (platform.node(), str(Path.home()), str(Path.cwd())):
        assert private not in text
    assert getpass.getuser() not in (got["system"], got["processor"])


def test_the_commit_is_known_in_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "__file__", str(tmp_path / "src" / "mulstm" / "machine.py"))
    monkeypatch.delenv("MULSTM_COMMIT", raising=False)
    assert machine.commit() == ""
    monkeypatch.setenv("MULSTM_COMMIT", "abc")
    assert machine.commit() == "abc"
    (tmp_path / "src" / "mulstm").mkdir(parents=True)
    for command in (
        ["init", "-q"],
        ["-c", "user.name=x", "-c", "user.email=x@x.invalid", "commit", "-q", "--allow-empty", "-m", "x"],
    ):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True)
    assert machine.commit() == "abc"
    monkeypatch.delenv("MULSTM_COMMIT")
    assert len(machine.commit()) == 12
