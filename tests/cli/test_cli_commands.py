"""Every command does what it says, on stdout, and says everything else on stderr."""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from process import Call

from made import settings
from made_records import add
from mulstm import checkpoint, recipe, report, reproduce
from mulstm.data.alphabet import Alphabet
from mulstm.divergence import DivergedError
from mulstm.nn.model import LanguageModel
from mulstm.recipe import ModelRecipe


def test_options_of_reproduce(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, object] = {}
    monkeypatch.setattr(reproduce, "reproduce", lambda rows, **more: given.update(more, rows=rows))
    monkeypatch.chdir(tmp_path)
    options = ["--minutes", 2, "--precision", "bf16", "--seed", 3, "--seed", 4]
    options += ["--device", "cpu", "--results", "there", "--runs-dir", "r", "--data-dir", "d"]
    assert call("reproduce", "ptb", *options).code == 0
    assert (given["minutes"], given["precision"], given["seeds"]) == (2.0, "bf16", [3, 4])
    assert (given["device"], given["results"]) == ("cpu", Path("there"))
    assert (given["runs_dir"], given["data_dir"]) == (Path("r"), Path("d"))
    for kinds in (("faithful", "fast"), ("fast",), ("faithful",)):
        call("reproduce", "ptb", *[f"--{kind}" for kind in kinds if len(kinds) == 1])
        assert given["rows"] == reproduce.rows("ptb", kinds=kinds)
    given.clear()
    code, _, err = call("reproduce", "ptb", "--fast", "--faithful")
    assert (code, given, "leave both out" in err) == (2, {}, True)


def test_tables_are_written_though_a_run_diverged(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def diverge(chosen: object, **more: object) -> None:
        raise DivergedError("The loss is no number", ". Lower the rate.")

    monkeypatch.setattr(reproduce, "reproduce", diverge)
    monkeypatch.chdir(tmp_path)
    code, out, err = call("reproduce", "ptb")
    assert (code, err) == (3, "error: The loss is no number. Lower the rate.\n")
    assert "results/tables.md" in out
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")  # with which torchrun would end the first, at work on the tables
    assert call("reproduce", "ptb") == (0, "", "")


def test_of_several_processes_one_tells_and_writes(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(tmp_path, "ptb/mlstm", 1.36)
    words = ("reproduce", "ptb", "--row", "mlstm", "--faithful", "--results", tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert call(*words) == (0, "", "")
    assert not (tmp_path / "tables.md").exists()
    monkeypatch.setenv("RANK", "0")
    assert "measured already" in call(*words).err
    assert (tmp_path / "tables.md").exists()


def test_evaluate(call: Call, trained: Path, tmp_path: Path) -> None:
    record = json.loads((trained / "metrics.json").read_text())
    losses = tmp_path / "losses.npy"
    code, out, _ = call(
        "evaluate",
        trained / "last.safetensors",
        "--lanes",
        5,
        "--losses",
        losses,
        "--json",
        "--device",
        "cpu",
    )
    assert code == 0
    found = json.loads(out)
    assert found["bits_per_char"] == pytest.approx(record["test_bits_per_char"])
    assert found["symbols"] == 300
    assert found["word_perplexity"] is None
    assert np.load(losses).mean() / np.log(2) == pytest.approx(found["bits_per_char"], rel=1e-5)
    by_words = json.loads(call("evaluate", trained, "--lanes", 5, "--words", "--json", "-q").out)["by_words"]
    assert by_words["nats"] + by_words["spaces_nats"] == pytest.approx(found["nats"], rel=1e-5)
    assert by_words["perplexity"] == pytest.approx(np.exp(by_words["nats"] / by_words["count"]))
    told = call("evaluate", trained, "--words", "-q")
    assert f"by the bytes of {by_words['count']:,} words and newlines" in told.out
    code, out, _ = call("evaluate", trained, "--split", "valid", "-q")
    assert code == 0
    assert "bits/char on 300 symbols of made.txt (valid)" in out


def test_evaluate_words_with_spaces_between_them_or_none(call: Call, trained: Path, tmp_path: Path) -> None:
    text = tmp_path / "t.txt"
    text.write_bytes(b"one  two\n" * 30)
    assert (
        "of 90 words and newlines, without the 30 other spaces ("
        in call("evaluate", trained, text, "--words", "-q").out
    )
    text.write_bytes(b" " * 30)
    assert "there are no words in it" in call("evaluate", trained, text, "--words", "-q").out


def test_surprise(call: Call, trained: Path, tmp_path: Path) -> None:
    """The second model finds every byte equally likely."""
    record = json.loads((trained / "metrics.json").read_text())
    loaded, even = checkpoint.load(trained), tmp_path / "even.safetensors"
    with torch.no_grad():
        loaded.model.W_out.zero_()
        loaded.model.get_parameter("b_out").zero_()
    checkpoint.save(even, loaded.model, loaded.alphabet)
    options = ("--lanes", 5, "--share", 0.2, "--delays", 2)
    found = json.loads(call("surprise", trained, even, *options, "--json").out)
    assert (found["split"], found["symbols"], found["lanes"]) == ("test", 60, 5)
    assert found["fingerprints"] == [checkpoint.load(model).meta["fingerprint"] for model in (trained, even)]
    assert found["overall"] == pytest.approx([record["test_bits_per_char"], 8.0])
    assert [b for _, b in found["by_delay"]] == pytest.approx([8.0] * 3)
    assert found["by_delay"][0][0] > found["overall"][0]
    lines = [
        re.split("  +", line.strip()) for line in call("surprise", trained, even, *options).out.splitlines()
    ]
    assert [line[0] for line in lines if line[-1] == "8.000"] == [
        "whole text",
        "the 20% most surprising",
        "1 after",
        "2 after",
    ]


def test_surprise_of_models_of_two_alphabets(call: Call, trained: Path, tmp_path: Path) -> None:
    other = LanguageModel(ModelRecipe(hidden=4), 3)
    checkpoint.save(tmp_path / "m.safetensors", other, Alphabet.distinct(b"abc"))
    code, out, err = call("surprise", trained, tmp_path / "m.safetensors")
    assert (code, out, "have different alphabets" in err) == (3, "", True)


def test_records_are_no_text(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "r.jsonl").write_text("".join(f'{{"text": "number {k}"}}\n' for k in range(20)))
    given = ["train", tmp_path / "r.jsonl", "--runs-dir", tmp_path / "runs", "--json", "-q", *settings()]
    folder = json.loads(call(*given).out)["folder"]
    for command in (
        ("evaluate", folder, "--losses", tmp_path / "l.npy", "-q"),
        ("evaluate", folder, "--dynamic", "-q"),
        ("surprise", folder, folder),
    ):
        code, out, err = call(*command)
        assert (code, out) == (3, "")
        assert "r.jsonl is a file of records" in err
    assert not (tmp_path / "l.npy").exists()
    code, out, err = call("evaluate", folder, "--words", "-q")
    assert (code, out) == (3, "")
    assert '"mulstm score --json" with --losses or --words' in err


@pytest.mark.parametrize(("rate", "is_warned"), [(1, True), (1e-6, False)])
def test_a_model_that_learning_spoils(rate: float, is_warned: bool, call: Call, trained: Path) -> None:
    answer = call("evaluate", trained, "--dynamic", "--rate", rate)
    assert answer.code == 0
    assert ("warning: the text's end costs more than twice" in answer.err) == is_warned


def test_dynamic_figures_into_a_record(
    call: Call, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path, before = tmp_path / "seed1.json", json.loads((trained / "metrics.json").read_text())
    path.write_text(json.dumps(before))
    given = ("evaluate", trained, "--dynamic", "--record", path, "-q")
    errors = [call(*given[:-1]).err for _ in range(2)]
    assert ["statistics" in err for err in errors] == [True, False]  # gathered once, and told
    found = json.loads(call(*given, "--json").out)
    after = json.loads(path.read_text())
    assert after.items() >= before.items()
    assert after["dynamic_test_bits_per_char"] == found["bits_per_char"]
    assert after["dynamic_rate"] == found["dynamic"]["rate"]
    # Of a short text fewer batches than are usual, and it is these that are told.
    assert 0 < after["dynamic_statistics_batches"] == found["dynamic"]["statistics_batches"] < 500
    assert after["dynamic_precision"] == "fp32"
    for changed in ({"seed": 2}, {"fingerprint": "0123"}, {"fingerprint": None, "updates": 13}):
        text = json.dumps(before | changed)
        path.write_text(text)
        code, out, err = call(*given)
        assert (code, out) == (3, "")
        assert "is the record of another model" in err
        assert path.read_text() == text
    path.write_text(json.dumps({k: v for k, v in before.items() if k != "fingerprint"}))
    assert call(*given).code == 0
    assert call(*given, "--split", "valid").code == 2
    assert call("evaluate", trained, "--record", path).code == 2


def test_that_a_record_cannot_be_written_is_told_before_any_work(
    call: Call, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != trained)
    monkeypatch.setattr("mulstm.adapt.prepare", None)
    code, out, err = call("evaluate", trained, "--dynamic", "--record", trained / "metrics.json", "-q")
    assert (code, out) == (3, "")
    assert err == f"error: The folder {trained} cannot be written. Choose another place.\n"


def test_a_rounded_model_adds_to_the_record_of_its_run(
    call: Call, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path, before = tmp_path / "seed1.json", json.loads((trained / "metrics.json").read_text())
    whole, rounded = checkpoint.load(trained), tmp_path / "rounded.safetensors"

    def added(record: dict[str, Any], **changed: Any) -> bool:
        path.write_text(json.dumps(record))
        told = {"recipe": whole.recipe, "metrics": whole.meta["metrics"]} | changed
        checkpoint.save(rounded, whole.model, whole.alphabet, storage="int8", **told)
        answer = call("evaluate", rounded, "--dynamic", "--record", path, "-q")
        assert answer.code in (0, 3)
        return answer.code == 0

    assert added(before)
    assert json.loads(path.read_text())["dynamic_storage"] == "int8"
    for changed in ({"updates": 13}, {"train_seconds": 1.5}):
        assert not added(before | changed), changed
    patient = replace(whole.recipe, evaluate=replace(whole.recipe.evaluate, patience=2))
    assert added(before | {"best_valid_update": 12, "train_seconds": 1e3, "updates": 15}, recipe=patient)
    assert not added(before | {"best_valid_update": 10}, recipe=patient)


def test_evaluate_another_text(call: Call, trained: Path, tmp_path: Path) -> None:
    (tmp_path / "other.txt").write_bytes(b"naive and strange \xff\x00 text\n" * 9)
    found = json.loads(call("evaluate", trained, tmp_path / "other.txt", "--json", "-q").out)
    assert found["symbols"] == 9 * 26 - 1  # all of it but its first byte
    assert found["split"] == "all"
    bf16 = call("evaluate", trained, tmp_path / "other.txt", "--json", "-q", "--precision", "bf16").out
    assert json.loads(bf16)["bits_per_char"] == pytest.approx(found["bits_per_char"], rel=0.02)


def test_recipes(call: Call, tmp_path: Path) -> None:
    out = call("recipes").out
    assert all(name in out for name in recipe.names())
    assert re.search(r"^hutter/mlstm +1\.4 +faithful ", out, re.MULTILINE)
    assert {row["name"] for row in json.loads(call("recipes", "ls", "--json").out)} == set(recipe.names())
    shown = call("recipes", "show", "quickstart", "--set", "train.lanes=7").out
    assert "lanes = 7\n" in shown  # no longer what the file's note is about
    assert "hidden = 256  # ours: small enough for two CPU cores\n" in shown
    made = tmp_path / "made.toml"
    made.write_text(shown)
    assert recipe.load(made) == recipe.load("quickstart", ["train.lanes=7"])


def test_corpora(call: Call) -> None:
    assert "enwik8" in call("corpora").out
    found = {row["name"]: row["bytes"] for row in json.loads(call("corpora", "--json").out)}
    assert found["text8"] == 100_000_000
    assert call("fetch", "python").code == 0


def test_info_tells_the_size_of_the_cache(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert json.loads(call("info", "--json").out)["cache"]["megabytes"] == 0
    (tmp_path / "mulstm" / "unpacked").mkdir(parents=True)
    (tmp_path / "mulstm" / "unpacked" / "text").write_bytes(bytes(1_200_000))
    found = json.loads(call("info", "--json").out)["cache"]
    assert found == {"folder": str(tmp_path / "mulstm"), "megabytes": 1.2}


def test_info_where_there_is_no_home(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", home)
    found = json.loads(call("info", "--json").out)["cache"]
    assert found == {"folder": "There is no home folder for the cache. Set XDG_CACHE_HOME to a folder."}


def test_info(call: Call, trained: Path) -> None:
    found = json.loads(call("info", "--json").out)
    assert found["backends"]["cpu fp32"]["fused"] == "yes"
    assert "CUDA" in found["backends"]["cpu fp32"]["triton"]
    assert "torch" in found["versions"]
    assert found["fused on a CPU"]["pointwise"] == "kernels of its own"
    assert found["products of 8-bit numbers"]["cpu"] == "they need an NVIDIA GPU"
    assert found["fused on a CPU"].keys() == {"pointwise", "products fp32", "products bf16"}
    assert "reference: yes" in call("info").out
    about = json.loads(call("info", trained, "--json").out)
    assert about["alphabet"] == 256
    assert about["metrics"]["update"] == 12
    assert about["recipe"]["optimiser"]["name"]


def test_info_tells_nothing_of_a_training_that_it_does_not_know(
    call: Call, trained: Path, tmp_path: Path
) -> None:
    loaded = checkpoint.load(trained)
    checkpoint.save(tmp_path / "imported.safetensors", loaded.model, loaded.alphabet)
    about = json.loads(call("info", tmp_path / "imported.safetensors", "--json").out)
    assert about["recipe"] == {"model": asdict(loaded.model.recipe)}


def test_info_lets_no_file_write_lines_of_its_own(call: Call, trained: Path, tmp_path: Path) -> None:
    loaded, file = checkpoint.load(trained), tmp_path / "m.safetensors"
    checkpoint.save(file, loaded.model, loaded.alphabet, source={"licence": "MIT\nparameters: 3"})
    told = call("info", file).out.splitlines()
    assert [line for line in told if line.startswith("parameters")] == told[1:2]
    assert "  licence: MIT␊parameters: 3" in told


def test_info_says_why_there_are_no_kernels(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mulstm.ops.native.unavailable", lambda: "llvmlite cannot be imported")
    assert "all: PyTorch's calls: llvmlite cannot be imported" in call("info").out


def test_report(call: Call, tmp_path: Path) -> None:
    results = tmp_path / "results"
    add(results, "hutter/mlstm", 1.4)
    page = tmp_path / "README.md"
    page.write_text(f"# Title\n\n{report.BEGIN}\n{report.END}\n")
    where = ("--results", results, "--readme", page)
    code, out, err = call("report", "--check", *where)
    assert (code, len(out.splitlines())) == (4, 6)
    assert f'Older than the records: 6 files. Run "mulstm report --results {results} --readme {page}".' in err
    assert str(results / "tables.md") in json.loads(call("report", "--check", "--json", *where).out)["stale"]
    code, out, err = call("report", *where)
    assert (code, "tables.md" in out, err) == (0, True, "")
    assert call("report", "--check", *where) == (0, "", "")
    assert json.loads(call("report", "--json", *where).out) == {"written": []}
    (tmp_path / "empty").mkdir()
    for more in ((), ("--check",)):
        code, out, err = call("report", "--results", tmp_path / "empty", *more)
        assert (code, out, "There are no records in" in err) == (3, "", True)


def test_tables_beside_a_readme_of_other_things(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "README.md").write_text("# Mine\n")
    code, out, err = call("reproduce", "hutter", "--report-only")
    assert (code, out, "no folder results" in err) == (3, "", True)
    (tmp_path / "results").mkdir()
    code, out, err = call("reproduce", "hutter", "--report-only")
    assert (code, out, "There are no records in results" in err) == (3, "", True)
    add(tmp_path / "results", "hutter/mlstm", 1.4)
    assert call("reproduce", "hutter", "--report-only").code == 0
    assert (tmp_path / "results" / "tables.md").is_file()
    assert call("report").code == 0
    assert (tmp_path / "README.md").read_text() == "# Mine\n"
    code, _, err = call("report", "--readme", "README.md")
    assert (code, "has no place for the results" in err) == (3, True)
    assert call("report", "--readme", "missing.md").code == 3
    (tmp_path / "file").write_text("in the way")
    code, out, err = call("reproduce", "hutter", "--results", "file")
    assert (code, out, "file" in err) == (3, "", True)


def test_bench(call: Call, tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    given = ["bench", "--small", "--repeats", 1, "--device", "cpu"]
    code, out, err = call(*given, "--json", "--save", file)
    assert code == 0
    found = json.loads(out)
    assert json.loads(file.read_text()) == found
    assert {"mlstm", "nn.LSTM", "naive"} <= {row["name"] for row in found["rows"]}
    assert err
    assert "nn.LSTM" in call(*given, "-q").out


def test_version(call: Call) -> None:
    assert call("--version").out.startswith("mulstm 0.")
