"""`mulstm train` and `mulstm quickstart`: runs begin, go on and end as they say."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from process import Call

from made import settings
from mulstm import checkpoint, recipe
from mulstm.cli import quickstart
from mulstm.cli.train import summary
from mulstm.codec.bench import STANDARD
from mulstm.errors import RunInterruptedError


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


def test_why_a_run_stopped_is_told(trained: Path) -> None:
    record = json.loads((trained / "metrics.json").read_text())
    assert not any("stopped" in line for line in summary(record))
    assert summary(record | {"stopped": "nothing better came"})[-1] == "stopped early: nothing better came"
    assert summary(record | {"complete": False, "reason": "another rate"})[-1] == "another rate"


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


def test_a_first_run_is_not_told_of_others(call: Call, text_file: Path, tmp_path: Path) -> None:
    given = ("train", text_file, "--resume", "auto", "--runs-dir", tmp_path / "runs", *settings())
    assert "to go on with" not in call(*given).err
    assert "No run of this very recipe to go on with (" in call(*given, "--set", "train.seed=2").err


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


def test_a_block_is_held_against_the_lanes_of_a_short_text(
    call: Call, text_file: Path, tmp_path: Path
) -> None:
    small = ("model.hidden=8", "train.updates=1", "train.rotate=false", "evaluate.symbols=50")
    given = ["train", text_file, "--runs-dir", tmp_path, "--device", "cpu", "-q", "--json"]
    given += [word for override in small for word in ("--set", override)]
    code, out, _ = call(*given, "--set", "train.block=2000")  # 32 lanes of 100 would not fit
    assert code == 0
    assert {key: json.loads(out)["settings"][f"train.{key}"] for key in ("lanes", "chunk", "block")} == {
        "lanes": 6,
        "chunk": 100,
        "block": 2000,
    }
    code, _, err = call(*given, "--set", "train.block=500")
    assert (code, "train.block = 500 must hold 6 lanes of 100 symbols" in err) == (3, True)


def test_the_recipe_for_going_on_wants_a_model(call: Call) -> None:
    code, _, err = call("train", "finetune")
    assert (code, 'Say "mulstm train TEXT --from MODEL"' in err) == (3, True)


def test_an_interrupted_quickstart_goes_on_by_its_own_command(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, object] = {}

    def stopped(*_: object, **more: object) -> None:
        given.update(more)
        raise RunInterruptedError("Interrupted at update 5", "Go on with something else.", 2)

    monkeypatch.setattr("mulstm.train.train", stopped)
    code, _, err = call("quickstart", "--device", "cpu", "--runs-dir", "there")
    assert (code, err) == (130, "error: Interrupted at update 5. Go on with the same command and --resume.\n")
    assert given == {"runs_dir": Path("there"), "device": "cpu", "resume_from": None}
    call("quickstart", "--resume")
    assert given["resume_from"] == "auto"


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
