"""Every command does what it says, on stdout, and says everything else on stderr."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from process import Call

from made import settings
from made_records import add
from mulstm import checkpoint, cli, recipe, report, reproduce
from mulstm.cli import quickstart
from mulstm.codec.bench import STANDARD
from mulstm.train import RunInterruptedError


def test_train_a_text(call: Call, text_file: Path, tmp_path: Path) -> None:
    code, out, err = call("train", text_file, "--runs-dir", tmp_path, "--device", "cpu", *settings())
    assert code == 0
    assert out.startswith("valid  ")
    assert "test   " in out
    folder = Path(out.rsplit("run folder: ")[1].strip())
    assert checkpoint.load(folder).alphabet.size == 256
    assert "bits/char" in err
    assert "symbols/s" in err


def test_train_as_json_and_nothing_else(call: Call, text_file: Path, tmp_path: Path) -> None:
    code, out, err = call(
        "train", text_file, "--runs-dir", tmp_path, "--json", "-q", *settings("train.updates=2")
    )
    assert code == 0
    assert json.loads(out)["updates"] == 2
    assert err == ""


def test_train_for_some_time_only(call: Call, text_file: Path, tmp_path: Path) -> None:
    code, out, _ = call(
        "train", text_file, "--runs-dir", tmp_path, "--json", "-q", "--minutes", 1e-9, *settings()
    )
    record = json.loads(out)
    assert (code, record["updates"], record["complete"]) == (0, 1, False)
    code, out, _ = call("train", "--resume", record["folder"], "-q")
    assert code == 0
    assert out.splitlines()[2].startswith("12 updates")
    assert "cut short" not in out
    told = call("train", text_file, "--runs-dir", tmp_path / "told", "-q", "--minutes", 1e-9, *settings()).out
    assert told.count("cut short") == 1
    assert "its time was over" not in told
    assert f"to go on: mulstm train --resume {tmp_path}" in told


def test_options_of_reproduce(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, object] = {}
    monkeypatch.setattr(reproduce, "reproduce", lambda chosen, **more: given.update(more))
    monkeypatch.chdir(tmp_path)
    options = ["--minutes", 2, "--precision", "bf16", "--seed", 3, "--seed", 4]
    assert call("reproduce", "ptb", *options).code == 0
    assert (given["minutes"], given["precision"], given["seeds"]) == (2.0, "bf16", [3, 4])
    given.clear()
    code, _, err = call("reproduce", "ptb", "--fast", "--faithful")
    assert (code, given, "leave both out" in err) == (2, {}, True)


def test_train_a_folder_and_a_recipe_file(call: Call, text_file: Path, tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    for name in "ab":
        (tmp_path / "texts" / name).write_bytes(text_file.read_bytes()[:2500])
    runs = tmp_path / "runs"
    code, out, _ = call("train", tmp_path / "texts", "--runs-dir", runs, "--json", "-q", *settings())
    assert code == 0
    assert json.loads(out)["test_symbols"] == 250
    file = tmp_path / "mine.toml"
    file.write_text(f'like = "text"\n[data]\ncorpus = "{text_file}"\n')
    code, out, _ = call("train", file, "--runs-dir", runs, "--json", "-q", *settings("train.updates=2"))
    assert code == 0
    assert json.loads(out)["recipe"] == "mine"


def test_a_short_text_gets_fewer_lanes(call: Call, text_file: Path, tmp_path: Path) -> None:
    text_file.write_bytes(text_file.read_bytes()[:700])
    small = ["--set", "model.hidden=8", "--set", "train.updates=2"]
    code, out, _ = call("train", text_file, "--runs-dir", tmp_path, "--json", "-q", *small)
    assert code == 0
    copy = recipe.load(Path(json.loads(out)["folder"]) / "recipe.toml")
    assert copy.train.lanes * copy.train.chunk * 8 <= 630
    assert copy.evaluate.lanes == 1


def test_resume_with_the_file_of_the_recipe(call: Call, text_file: Path, tmp_path: Path) -> None:
    first = json.loads(call("train", text_file, *settings(), "--runs-dir", tmp_path, "--json").out)
    mine = tmp_path / "mine.toml"
    mine.write_text((Path(first["folder"]) / "recipe.toml").read_text())
    (Path(first["folder"]) / "metrics.json").unlink()
    code, again, err = call("train", mine, "--resume", first["folder"], "--json")
    assert code == 0, err
    assert json.loads(again)["test_bits_per_char"] == first["test_bits_per_char"]


def test_resume_by_folder_alone(call: Call, text_file: Path, tmp_path: Path) -> None:
    out = call("train", text_file, "--runs-dir", tmp_path, "--json", "-q", *settings()).out
    folder = Path(json.loads(out)["folder"])
    (folder / "metrics.json").unlink()
    code, again, err = call("train", "--resume", folder, "--json")
    assert code == 0
    assert json.loads(again)["test_bits_per_char"] == json.loads(out)["test_bits_per_char"]
    assert "Going on at update 12" in err


def test_from_a_checkpoint(call: Call, trained: Path, tmp_path: Path) -> None:
    text = recipe.load(trained / "recipe.toml").data.corpus
    given = ["train", text, "--from", trained / "last.safetensors", "--runs-dir", tmp_path, "--json", "-q"]
    code, out, _ = call(*given, "--set", "train.updates=40", "--set", "evaluate.final_lanes=5")
    assert code == 0
    before = json.loads((trained / "metrics.json").read_text())
    assert json.loads(out)["valid_bits_per_char"] < before["valid_bits_per_char"]
    told = call(*given, "--set", "model.hidden=24")
    assert told.code == 3
    assert "hidden was 16, is 24" in told.err


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


def test_a_warm_up_as_long_as_the_run_is_told(call: Call, text_file: Path, tmp_path: Path) -> None:
    given = ["train", text_file, *settings(), "--device", "cpu", "--runs-dir", tmp_path / "runs"]
    for warmup, warned in ((11, False), (12, True)):
        err = call(*given, "--set", f"optimiser.warmup={warmup}").err
        assert ("warning: the warm-up (12 updates) is as long as the run" in err) is warned


def test_a_folder_of_runs_goes_on_with_its_newest(call: Call, text_file: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    given = ["train", text_file, *settings(), "--device", "cpu", "-q", "--runs-dir", runs]
    for seed in (1, 2):
        assert call(*given, "--set", f"train.seed={seed}").code == 0
    code, out, _ = call("train", "--resume", runs, "--device", "cpu", "-q")
    assert code == 0
    assert out.rstrip().endswith("-seed2")
    code, _, err = call("train", "--resume", tmp_path / "nowhere")
    assert (code, "nowhere is not a run folder" in err) == (3, True)


def test_the_recipe_for_going_on_wants_a_model(call: Call) -> None:
    code, _, err = call("train", "finetune")
    assert (code, 'Say "mulstm train TEXT --from MODEL"' in err) == (3, True)


def test_an_interrupted_quickstart_goes_on_by_its_own_command(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_: object, **__: object) -> None:
        raise RunInterruptedError("Interrupted at update 5", "Go on with something else.", 2)

    monkeypatch.setattr("mulstm.train.train", stopped)
    code, _, err = call("quickstart")
    assert (code, err) == (130, "error: Interrupted at update 5. Go on with the same command and --resume.\n")


def test_the_program_is_named_as_it_is_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other, mine = tmp_path / "other" / "mulstm", tmp_path / "my bin" / "mulstm"
    for path in (other, mine):
        path.parent.mkdir()
        path.write_text("#!/bin/sh\n")
        path.chmod(0o755)
    monkeypatch.setenv("PATH", str(other.parent))
    for called, expected in (
        (other, "mulstm"),
        (mine, f"'{mine}'"),
        (tmp_path / "mulstm" / "__main__.py", f"{sys.executable} -m mulstm"),
    ):
        monkeypatch.setattr(sys, "argv", [str(called)])
        assert quickstart._program() == expected


def test_sample(call: Call, trained: Path) -> None:
    code, out, err = call("sample", trained, "--prompt", "abda", "--length", 30, "--seed", 3)
    assert code == 0
    assert err == ""
    assert out.startswith("abda")
    assert out == call("sample", trained, "-p", "abda", "-n", 30, "--seed", 3).out
    found = json.loads(call("sample", trained, "-n", 9, "--streams", 2, "--json").out)
    assert len(found["texts"]) == 2
    told = call("sample", trained, "-n", 5, "--streams", 2, "-p", "x", "--temperature", 0).out
    assert told.count("--- ") == 2
    for more in (("--json",), ("--streams", 2)):
        code, _, err = call("sample", trained, "--raw", *more)
        assert (code, "need one stream, and no JSON" in err) == (2, True)
    for streams in (1, 2):  # a prompt that is no UTF-8, as the system passes it on
        assert "ab\ufffd" in call("sample", trained, "-n", 5, "-p", "ab\udcff", "--streams", streams).out


def test_streams_that_are_interrupted_are_not_lost(
    trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken_off(*_: object) -> Iterator[list[bytes]]:
        yield [b"one", b"other"]
        raise KeyboardInterrupt

    monkeypatch.setattr("mulstm.sample.sample", broken_off)
    with pytest.raises(SystemExit, match="130"):
        cli.run(["sample", str(trained), "--streams", "2", "-p", "ab"])
    assert capsys.readouterr().out == "--- 1 ---\nabone\n--- 2 ---\nabother\n"


def test_sample_in_a_precision(call: Call, trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    monkeypatch.setattr("mulstm.nn.packed.sampler", lambda model, *_, **__: found.append(model.precision))
    assert call("sample", trained, "-n", 5).code == 0
    assert call("sample", trained, "-n", 5, "--precision", "bf16").code == 0
    assert found == ["fp32", "bf16"]


def test_recipes(call: Call, tmp_path: Path) -> None:
    out = call("recipes").out
    assert all(name in out for name in recipe.names())
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


def test_info(call: Call, trained: Path) -> None:
    found = json.loads(call("info", "--json").out)
    assert found["backends"]["cpu fp32"]["fused"] == "yes"
    assert "CUDA" in found["backends"]["cpu fp32"]["triton"]
    assert "torch" in found["versions"]
    assert found["fused on a CPU"]["pointwise"] == "kernels of its own"
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


def test_info_says_why_there_are_no_kernels(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mulstm.ops.native.unavailable", lambda: "llvmlite cannot be imported")
    assert "all: PyTorch's calls: llvmlite cannot be imported" in call("info").out


def test_report(call: Call, tmp_path: Path) -> None:
    results = tmp_path / "results"
    add(results, "hutter/mlstm", 1.4)
    page = tmp_path / "README.md"
    page.write_text(f"# Title\n\n{report.BEGIN}\n{report.END}\n")
    where = ("--results", results, "--readme", page)
    assert call("report", "--check", *where).code == 4
    assert "tables.md" in call("report", *where).out
    assert call("report", "--check", *where) == (0, "", "")


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


def test_quickstart(call: Call, text_file: Path, tmp_path: Path) -> None:
    given = [*settings(f"data.corpus={text_file}"), "--runs-dir", tmp_path, "--device", "cpu"]
    code, out, _ = call("quickstart", *given)
    assert code == 0
    for word in ("multiplicative LSTM", "gzip -9", "bzip2 -9", "xz -9e", "A sample:", "def ", "curve.svg"):
        assert word in out
    folder = next(tmp_path.glob("quickstart/*"))
    assert (folder / "curve.png").read_bytes().startswith(b"\x89PNG")
    own = json.loads((folder / "metrics.json").read_text())["test_bits_per_char"]
    assert f"this model, test {own:.2f}" in (folder / "curve.svg").read_text()
    found = json.loads(call("quickstart", *given, "--resume", "--json").out)
    assert found["folder"] == str(folder)
    assert set(found["compressors"]) == {"gzip -9", "bzip2 -9", "xz -9e"}


@pytest.mark.parametrize(("split", "part"), [("90-10-0", "test"), ("90-0-10", "valid")])
def test_quickstart_wants_all_parts(
    split: str, part: str, call: Call, text_file: Path, tmp_path: Path
) -> None:
    given = [*settings(f"data.corpus={text_file}", f"data.split={split}"), "--runs-dir", tmp_path / "runs"]
    code, _, err = call("quickstart", *given, "--device", "cpu")
    assert (code, f"The {part} part of {text_file.name} is empty" in err) == (3, True)
    code, _, err = call("quickstart", *given, "--set", "data.records=lines", "--device", "cpu")
    assert (code, "reads one text" in err) == (3, True)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(("command", "near"), [("gzip -9", 0.005), ("bzip2 -9", 0), ("xz -9e", 0.001)])
def test_the_compressors_are_those_of_the_shell(command: str, near: float) -> None:
    program, option = command.split()
    if shutil.which(program) is None:
        pytest.skip(f"there is no {program} here")
    data = Path(json.__file__).with_name("decoder.py").read_bytes() * 12
    alone = subprocess.run([program, option, "-c"], input=data, capture_output=True, check=True).stdout
    (ours,) = [len(pack(data)) for name, pack, _ in STANDARD if name == command]
    assert ours == pytest.approx(len(alone), rel=near)


def test_a_split_without_validation_in_either_spelling(call: Call, text_file: Path, tmp_path: Path) -> None:
    for split in ("95-0-5", '"95-0-5"'):
        changes = ("model.hidden=8", "model.embedding=4", "train.updates=2", f"data.split={split}")
        given = [word for change in changes for word in ("--set", change)]
        assert call("train", text_file, *given, "--runs-dir", tmp_path, "--device", "cpu", "-q").code == 0


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
