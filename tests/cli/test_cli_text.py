"""Which text evaluate reads: the model's own only where it is known to be that."""

from __future__ import annotations

import json
from pathlib import Path
from shlex import quote

import numpy as np
import pytest
from process import Call

import foreign
from made import made_text, settings
from mulstm import checkpoint
from mulstm.interop import npz


@pytest.fixture
def run(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run whose recipe names its text by a relative path."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "home").mkdir()
    monkeypatch.chdir(tmp_path / "home")
    Path("my.txt").write_bytes(made_text(6_000))
    out = call("train", "my.txt", "--json", "-q", "--device", "cpu", *settings()).out
    return Path(json.loads(out)["folder"]).absolute()


@pytest.mark.parametrize("change", ["another folder", "shortened", "edited"])
def test_another_text_of_the_same_name_is_none(
    call: Call, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    assert call("evaluate", run, "-q").code == 0
    text = made_text(6_000)
    if change == "another folder":
        (tmp_path / "away").mkdir()
        monkeypatch.chdir(tmp_path / "away")
        text = made_text(6_000, seed=2)
    Path("my.txt").write_bytes(text[:4_000] if change == "shortened" else b"X" + text[1:])
    for command in (("evaluate", run, "-q"), ("evaluate", run, "--split", "valid"), ("surprise", run, run)):
        code, out, err = call(*command)
        assert (code, out) == (3, "")
        assert "my.txt is not the text this model was trained on" in err
    assert "of my.txt (all)" in call("evaluate", run, "my.txt", "-q").out
    code, _, err = call("evaluate", run, "my.txt", "-q", "--dynamic")
    assert (code, "Leave --dynamic out" in err) == (3, True)


def test_its_own_text_is_gone(call: Call, run: Path) -> None:
    Path("my.txt").unlink()
    code, out, err = call("evaluate", run, "-q")
    assert (code, out) == (3, "")
    assert err.startswith("error: The model's own text cannot be had: ")
    assert "my.txt" in err


def test_its_own_text_by_another_path(call: Call, run: Path) -> None:
    plain = call("evaluate", run, "my.txt", "-q").out
    assert "(test)" in plain
    Path("copy.txt").write_bytes(Path("my.txt").read_bytes())
    for path in ("./my.txt", Path("my.txt").absolute(), "copy.txt"):
        assert call("evaluate", run, path, "-q").out == plain.replace("my.txt", Path(path).name)
    assert "dynamic" in call("evaluate", run, "copy.txt", "-q", "--dynamic").out


def test_a_run_goes_on_from_elsewhere(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "away").mkdir()
    monkeypatch.chdir(tmp_path / "home")
    Path("my.txt").write_bytes(made_text(6_000))
    out = call("train", "my.txt", "--json", "-q", "--device", "cpu", "--minutes", 1e-9, *settings()).out
    folder = Path(json.loads(out)["folder"]).absolute()
    monkeypatch.chdir(tmp_path / "away")
    assert call("train", "--resume", folder, "--device", "cpu").code == 3
    Path("other.txt").write_bytes(made_text(6_000, seed=2))
    code, _, err = call("train", "other.txt", "--resume", folder, "--device", "cpu")
    assert (code, "The text has changed" in err) == (3, True)
    out = call(
        "train", tmp_path / "home" / "my.txt", "--resume", folder, "--json", "-q", "--device", "cpu"
    ).out
    assert json.loads(out)["stopped"] == ""


def test_a_checkpoint_without_facts_is_not_compared(call: Call, run: Path) -> None:
    whole = checkpoint.load(run)
    checkpoint.save("early.safetensors", whole.model, whole.alphabet, recipe=whole.recipe)
    Path("my.txt").write_bytes(made_text(4_000))
    assert call("evaluate", "early.safetensors", "-q").code == 0


def test_the_facts_survive_the_hub(call: Call, run: Path) -> None:
    assert call("export", run, "hub", "mine").code == 0
    assert checkpoint.load("mine/model.safetensors").meta["corpus"] == checkpoint.load(run).meta["corpus"]


def test_an_imported_model_has_no_text_of_its_own(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("oa").mkdir()
    for key, array in foreign.openai().arrays.items():
        np.save(f"oa/{key}.npy", array)
    Path("t.txt").write_bytes(made_text(300))
    assert call("import", "openai", "oa", "review.safetensors").code == 0
    told = "error: This model does not say what it was trained on. "
    assert call("evaluate", "review.safetensors", "-q") == (3, "", f"{told}Give a text.\n")
    assert call("evaluate", "review.safetensors", "t.txt", "-q").code == 0
    code, _, err = call("evaluate", "review.safetensors", "t.txt", "-q", "--dynamic")
    assert (code, err) == (3, f"{told}Leave --dynamic out, which wants that text.\n")


def test_models_of_records_are_sent_to_score(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    npz.write_npz(Path("w.npz"), foreign.unirep(H=6, layers=1).arrays)
    assert call("import", "unirep", "w.npz", "p.safetensors", "--head-map", "unirep").code == 0
    code, _, err = call("evaluate", "p.safetensors", "-q")
    assert (code, 'Use "mulstm score".' in err) == (3, True)
    Path("p.fasta").write_text("".join(f">{k}\nMKTAYIAKQR\n" for k in range(9)))
    Path("r.jsonl").write_text("".join(f'{{"text": "number {k}"}}\n' for k in range(20)))
    out = call("train", "r.jsonl", "--json", "-q", *settings()).out
    folder = json.loads(out)["folder"]
    for model, file in (("p.safetensors", "p.fasta"), (folder, "p.fasta"), (folder, "its own.jsonl")):
        code, out, err = call("evaluate", model, file, "-q")
        assert (code, out) == (3, "")
        assert f"This model reads records, each for itself, and {file} would be" in err
        assert f'Use "mulstm score MODEL {quote(file)}".' in err
    Path("t.txt").write_bytes(made_text(300))
    assert call("evaluate", folder, "t.txt", "-q").code == 0


def test_a_name_of_two_lines_stays_in_one(call: Call, run: Path) -> None:
    Path("a\nb.txt").write_bytes(made_text(300))
    assert call("evaluate", run, "a\nb.txt", "-q").out.count("\n") == 1


def test_the_lanes_are_those_of_the_record(call: Call, run: Path) -> None:
    record = json.loads((run / "metrics.json").read_text())
    for given in ((), ("my.txt",)):
        found = json.loads(call("evaluate", run, *given, "--json", "-q", "--device", "cpu").out)
        assert found["lanes"] == 5
        assert found["bits_per_char"] == record["test_bits_per_char"]
    Path("other.txt").write_bytes(made_text(300))
    assert json.loads(call("evaluate", run, "other.txt", "--json", "-q").out)["lanes"] == 1
    Path("long.txt").write_bytes(made_text(300) * (5_000 // 300 + 1))
    assert json.loads(call("evaluate", run, "long.txt", "--json", "-q").out)["lanes"] == 10
    assert json.loads(call("evaluate", run, "--lanes", 7, "--json", "-q").out)["lanes"] == 7
