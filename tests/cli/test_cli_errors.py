"""What a user can get wrong has an exit code and two sentences, and destroys nothing."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from process import Call, told
from safetensors.torch import save_file
from torch import no_grad, zeros

from made import TINY, settings, text_recipe
from mulstm import checkpoint, runs, train
from mulstm.cli import _text
from mulstm.errors import DataError


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_a_text_with_the_name_of_a_corpus(
    call: Call, trained: Path, text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "python").mkdir()
    (tmp_path / "python" / "a.txt").write_bytes(text_file.read_bytes())
    monkeypatch.chdir(tmp_path)
    for words in (("train", "python", "--device", "cpu"), ("evaluate", trained, "python")):
        told(call(*words), 3, "python is the name of a corpus, and of a file or folder here", "./python")
    assert call("evaluate", trained, "./python", "-q").code == 0
    # What has its very size is the corpus itself.
    with (tmp_path / "enwik8").open("wb") as file:
        file.truncate(100_000_000)
    _text.require_one_meaning("enwik8")


def test_two_texts_are_one_too_many(call: Call, text_file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_bytes(text_file.read_bytes())
    answer = call("train", text_file, "--set", f"data.corpus={other}", "--device", "cpu")
    told(answer, 3, f"{text_file} is the text, and data.corpus names another")


def test_a_folder_that_cannot_be_written_is_told_before_any_work(
    call: Call, trained: Path, text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: Path(path) != tmp_path)
    told(call("score", trained, text_file, "--html", tmp_path / "h.html"), 3, f"{tmp_path} cannot be written")


def test_records_and_a_folder_or_a_cache_that_is_none(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ["--set", "data.records=lines", "--device", "cpu"]
    told(call("train", tmp_path, *given), 3, f"{tmp_path} is a folder, and records come from one file")
    told(call("train", "./no.txt", *given), 3, "There is no file")
    (tmp_path / "lines.txt").write_text("one\ntwo\nthree\n" * 30)
    (tmp_path / "cache").write_text("a file where a folder should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    told(call("train", tmp_path / "lines.txt", *given), 3, "cannot be kept in", "XDG_CACHE_HOME")


def test_a_text_that_no_run_could_go_on_with(call: Call) -> None:
    told(call("train", "/dev/stdin"), 3, "/dev/stdin is no file", "Write the text to a file first")


def test_a_key_like_no_other(call: Call, text_file: Path) -> None:
    told(
        call("train", text_file, "--set", "foo=1"), 3, 'unknown key foo: "mulstm recipes show text" has them'
    )


def test_unknown_recipe_keys(call: Call, text_file: Path, tmp_path: Path) -> None:
    before = files(tmp_path)
    told(call("train", text_file, "--set", "train.lane=3"), 3, "train.lane", "did you mean train.lanes")
    (tmp_path / "r.toml").write_text("[model]\nhiden = 3\nlayers = -1\n")
    answer = call("train", tmp_path / "r.toml")
    told(answer, 3, "model.hiden", "model.hidden", "layers")
    (tmp_path / "r.toml").unlink()
    assert files(tmp_path) == before


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("train.lanes=0", "1 or more"),
        ("dropout.hidden=1.5", "in [0, 1)"),
        ("model.cell=gru", "mlstm"),
        ("train.lanes=many", "whole number"),
        ("train.lanes", "section.key=value"),
        ("optimiser.rate=nan", "finite"),
    ],
)
def test_impossible_values(call: Call, text_file: Path, value: str, words: str) -> None:
    told(call("train", text_file, "--set", value), 3, words)


def test_unknown_recipe(call: Call) -> None:
    told(call("train", "hutter/mlstn"), 3, "hutter/mlstm", "mulstm recipes")
    told(call("recipes", "show", "quickstat"), 3, "quickstart")


def test_texts_that_are_none(call: Call, tmp_path: Path) -> None:
    told(call("train", tmp_path / "missing.txt"), 3, "missing.txt", "no file or folder")
    told(call("train", "missing.fsa"), 3, "missing.fsa", "no file or folder")
    for name, data, words in [
        ("empty", b"", "is empty"),
        ("one", b"x", "one byte"),
        ("two", b"xy", "is empty"),
    ]:
        (tmp_path / name).write_bytes(data)
        told(call("train", tmp_path / name, "--runs-dir", tmp_path / "runs"), 3, words)
    (tmp_path / "folder").mkdir()
    told(call("train", tmp_path / "folder"), 3, "is empty")
    assert not (tmp_path / "runs").exists()


def test_a_folder_called_like_a_recipe(
    call: Call, text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").mkdir()
    text_file.rename(tmp_path / "text" / "made.txt")
    told(
        call("train", "text", "--device", "cpu"), 3, "the name of a recipe, and of a file or folder", "./text"
    )
    assert not (tmp_path / "runs").exists()
    given = [*settings(), "--runs-dir", tmp_path / "runs", "--device", "cpu"]
    assert call("train", "./text", *given).code == 0


def test_a_text_shorter_than_a_chunk(call: Call, text_file: Path, tmp_path: Path) -> None:
    given = ["--set", "train.chunk=9000", "--runs-dir", tmp_path / "runs"]
    told(call("train", text_file, *given), 3, "5,399 symbols", "train.chunk=5399")
    assert not (tmp_path / "runs").exists()


def test_bytes_outside_the_alphabet(call: Call, text_file: Path, tmp_path: Path) -> None:
    given = [*settings("data.alphabet=corpus", "train.updates=2"), "--runs-dir", tmp_path / "runs", "-q"]
    assert call("train", text_file, *given).code == 0
    other = tmp_path / "other.txt"
    other.write_bytes(b"abba dabba" + b"\xfe" + b"abba")
    folder = next((tmp_path / "runs").glob("text/*"))
    told(call("evaluate", folder, other, "-q"), 3, "0xfe", "offset 10")
    told(call("sample", folder, "--prompt", "abba Z"), 3, "'Z'", "position 6")


def test_damaged_checkpoints(call: Call, trained: Path, tmp_path: Path) -> None:
    data = (trained / "last.safetensors").read_bytes()
    cases = {
        "cut": (data[:-100], "cut short"),
        "changed": (data[:-100] + b"\x01" + data[-99:], "fingerprint"),
        "noise": (b"\x00" * 50, "no safetensors file"),
        "pickle": (b"PK\x03\x04abcdefgh", "run code"),
    }
    for name, (content, words) in cases.items():
        path = tmp_path / f"{name}.safetensors"
        path.write_bytes(content)
        for command in ("evaluate", "sample", "info"):
            told(call(command, path), 3, words, path.name)
        assert path.read_bytes() == content
    save_file({"w": zeros(2)}, tmp_path / "foreign.safetensors")
    told(call("sample", tmp_path / "foreign.safetensors"), 3, "another program", "mulstm import")
    told(call("sample", tmp_path / "nowhere"), 3, "no checkpoint")
    told(call("evaluate", trained / "resume.safetensors"), 3, "training state")
    assert call("quantize", trained, "-o", tmp_path / "i.safetensors").code == 0
    for command in ("evaluate", "sample"):
        told(call(command, tmp_path / "i.safetensors"), 3, "is an integer model", "Give the checkpoint")


def test_a_checkpoint_of_another_alphabet(call: Call, trained: Path, text_file: Path, tmp_path: Path) -> None:
    model = trained / "last.safetensors"
    given = [*settings("data.alphabet=corpus"), "--from", model, "--runs-dir", tmp_path / "runs"]
    told(call("train", text_file, *given), 3, "alphabet of 256", "data.alphabet=bytes")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "words",
    [
        ("sample", "MODEL"),
        ("neurons", "sample", "MODEL", "--clamp", "1=0"),
        ("evaluate", "MODEL", "TEXT"),
        ("surprise", "MODEL", "MODEL", "TEXT"),
        ("score", "MODEL", "TEXT"),
        ("quantize", "MODEL"),
        ("compress", "MODEL", "TEXT"),
        ("demo", "MODEL", "--port", "0"),
    ],
    ids=lambda words: "-".join(words[:2]),
)
def test_a_model_without_an_output_layer_cannot_predict(
    call: Call, trained: Path, text_file: Path, tmp_path: Path, words: tuple[str, ...]
) -> None:
    loaded = checkpoint.load(trained)
    file = tmp_path / "headless.safetensors"
    checkpoint.save(file, loaded.model, loaded.alphabet, source={"head": False})
    before = files(tmp_path)
    given = [{"MODEL": file, "TEXT": text_file}.get(word, word) for word in words]
    told(call(*given), 3, "without its output layer", "use embed")
    assert files(tmp_path) == before


def test_records_for_a_model_of_its_own_bytes(call: Call, text_file: Path, tmp_path: Path) -> None:
    place = ["--runs-dir", tmp_path / "runs", "-q"]
    assert call("train", text_file, *settings("data.alphabet=corpus"), *place).code == 0
    lines = tmp_path / "notes.jsonl"
    lines.write_text('{"text": "one"}\n{"text": "two"}\n')
    given = ["--from", tmp_path / "runs" / "text", *place]
    told(call("train", lines, *given), 3, "those of its own text", "leave --from out")


def test_what_is_written_into_the_text_itself(
    call: Call, text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "letters"
    folder.mkdir()
    (folder / "one.txt").write_bytes(text_file.read_bytes())
    monkeypatch.chdir(folder)
    told(call("train", ".", *settings()), 3, "runs/text lies in the text itself", "--runs-dir")
    told(call("search", ".", "--trial", "", *settings()), 3, "text.jsonl lies in the text itself", "--out")
    assert [path.name for path in folder.iterdir()] == ["one.txt"]
    # What is hidden is not read, and what is elsewhere neither.
    answer = call("train", ".", *settings(), "--runs-dir", ".runs")
    assert answer.code == 0
    assert "; letters, 5,399 symbols;" in answer.err
    assert call("evaluate", ".runs/text").code == 0
    assert call("train", ".", *settings(), "--runs-dir", tmp_path / "runs", "-q").code == 0


def test_a_folder_of_runs_is_no_text(
    call: Call, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "runs" / "text" / trained.name
    shutil.copytree(trained, place)
    monkeypatch.chdir(tmp_path)
    before = files(tmp_path)
    for given in ("runs/text", "runs", "."):
        told(call("train", given, *settings()), 3, "has runs in it", f"mulstm train --resume {given}")
    place.rename(place.with_name("the best"))
    told(call("train", "runs", *settings()), 3, "has runs in it")
    place.with_name("the best").rename(place)
    told(call("train", place, *settings()), 3, "is the folder of a run, not a text", "--resume")
    # What a library's caller gives is looked at as well: the text must not grow by the run.
    with pytest.raises(DataError, match="runs/text lies in the text itself"):
        train.train(text_recipe(Path("runs/text"), TINY), device="cpu", quiet=True)
    assert files(tmp_path) == before


def test_a_run_in_use(call: Call, text_file: Path, tmp_path: Path) -> None:
    made = text_recipe(text_file)
    with runs.Run.create(made, root=tmp_path / "runs") as held:
        before = files(held.path)
        told(call("train", "--resume", held.path), 3, "in use")
        assert files(held.path) == before


def test_resume_of_no_run(call: Call, text_file: Path, tmp_path: Path) -> None:
    told(call("train", "--resume", tmp_path), 3, "not a run folder")
    told(call("train", text_file, "--resume", tmp_path), 3, "not a run folder")


def test_a_run_is_no_text(call: Call, trained: Path, tmp_path: Path) -> None:
    told(call("train", trained, "--runs-dir", tmp_path / "runs"), 3, "folder of a run", f"--resume {trained}")
    assert not (tmp_path / "runs").exists()


def test_places_that_cannot_be_written(call: Call, text_file: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    told(call("train", text_file, "--runs-dir", tmp_path / "file", *settings()), 3, "file")
    assert (tmp_path / "file").read_text() == "in the way"


def test_data_that_cannot_be_had(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MULSTM_DATA", raising=False)
    told(call("train", "hutter/mlstm", "--data-dir", tmp_path / "nowhere"), 3, "nowhere")
    (tmp_path / "enwik8").write_bytes(b"not it")
    told(call("train", "hutter/mlstm", "--data-dir", tmp_path), 3, "100,000,000", "mulstm fetch enwik8")


def test_a_model_that_gives_no_numbers(call: Call, trained: Path, text_file: Path, tmp_path: Path) -> None:
    loaded = checkpoint.load(trained)
    with no_grad():
        loaded.model.stack[0].b_z.fill_(50.0)  # all gates open
        loaded.model.W_out.fill_(3e38)
    path = tmp_path / "large.safetensors"
    checkpoint.save(path, loaded.model, loaded.alphabet, recipe=loaded.recipe)
    kept = tmp_path / "losses.npy"
    for option in ([], ["--json"], ["--losses", kept]):
        told(call("evaluate", path, text_file, *option), 3, "gives no number for this text", "Train it again")
    assert not kept.exists()
    told(call("score", path, text_file, "--json"), 3, "gives no number for record", "Train it again")
    told(call("surprise", trained, path, text_file), 3, "gives no number for this text", "Train it again")


def test_a_report_of_nothing(call: Call, tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    told(call("report", "--results", tmp_path / "results"), 3, "There are no records in")
    assert list((tmp_path / "results").iterdir()) == []
    (tmp_path / "results" / "search").mkdir()
    assert call("report", "--results", tmp_path / "results").code == 0
    assert "Nothing has changed" in call("report", "--results", tmp_path / "results").err
