"""What is left of a run may be damaged: it is told, or made again, and never half believed."""

from __future__ import annotations

import json
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from made import TINY, made_text, text_recipe
from made_runs import run
from mulstm import job, parallel, resume, runs, tensorfile
from mulstm.errors import CheckpointError, RunError


def broken(folder: Path, what: str, value: Any) -> None:
    """A training state with another thing, or without it, in a file that is sound otherwise."""
    path = folder / "resume.safetensors"
    tensors, meta = tensorfile.read(path, "training state")
    section, _, key = what.rpartition("/")
    place = tensors if not section else meta if section == "meta" else meta[section]
    if value is None:
        del place[key]
    else:
        place[key] = value
    tensorfile.write(path, tensors, meta)
    (folder / "metrics.json").unlink(missing_ok=True)


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that has ended, over a text beside it."""
    root = tmp_path_factory.mktemp("ended")
    (root / "made.txt").write_bytes(made_text(6_000))
    return run(text_recipe(root / "made.txt", TINY), root / "runs")[1]


@pytest.mark.parametrize(
    ("what", "value"),
    [
        ("generator", None),
        ("generator", torch.zeros(3)),
        ("model.W_out", None),
        ("model.W_out", torch.zeros(3)),
        ("optimiser.exp_avg.W_out", None),
        ("optimiser.exp_avg.W_out", torch.zeros(3)),
        ("state.0.h", None),
        ("state.0.h", torch.zeros(1, 1)),
        ("meta/progress", None),
        ("meta/corpus", None),
        ("meta/corpus", 5),
        ("meta/device", None),
        ("progress/update", "x"),
        ("progress/update", -5),
        ("progress/update", 10**12),
        ("progress/logged", 10**12),
        ("progress/seconds", -1.0),
        ("progress/stale", True),
        ("progress/stopped", 5),
        ("progress/more", 1),
    ],
)
def test_a_training_state_of_other_things(ended: Path, tmp_path: Path, what: str, value: Any) -> None:
    folder = shutil.copytree(ended, tmp_path / "run")
    broken(folder, what, value)
    with pytest.raises(RunError, match=rf"cannot go on .*\. Start a new run with --from {folder}/last\."):
        run(runs.recipe_of(folder), tmp_path, resume_from=str(folder))


@pytest.mark.parametrize("name", ["validated", "best_update", "logged"])
def test_nothing_is_known_of_updates_to_come(name: str) -> None:
    with pytest.raises(ValueError, match="update is 5"):
        resume._progress({"update": 5, name: 6}, 12)


def test_on_another_kind_of_device_the_masks_start_a_new_series(ended: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(ended, tmp_path / "run")
    broken(folder, "meta/device", "cuda")
    recipe = runs.recipe_of(folder)
    place = {"runs_dir": tmp_path, "path": folder, "data_dir": None, "start_from": None}
    with ExitStack() as stack:
        found = job.build(recipe, parallel.Share(), stack, **place).update.generator.get_state()
    assert found.equal(torch.Generator().manual_seed(recipe.train.seed + 12).get_state())


def test_memory_that_is_short_is_no_fault_of_the_state(
    ended: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(ended, tmp_path / "run")
    (folder / "metrics.json").unlink()

    def short(*_: Any) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(resume, "_put_back", short)
    with pytest.raises(torch.OutOfMemoryError):
        run(runs.recipe_of(folder), tmp_path, resume_from=str(folder))


def test_a_damaged_training_state(ended: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(ended, tmp_path / "run")
    (folder / "metrics.json").unlink()
    path = folder / "resume.safetensors"
    whole = path.read_bytes()
    for damaged in (
        whole[:-40] + bytes([whole[-40] ^ 0x80]) + whole[-39:],
        whole.replace(b'\\"validated\\": 12', b'\\"validated\\": 11'),
    ):
        assert damaged != whole
        path.write_bytes(damaged)
        with pytest.raises(RunError, match="do not match their checksum"):
            run(runs.recipe_of(folder), tmp_path, resume_from=str(folder))
    path.write_bytes(whole)
    assert run(runs.recipe_of(folder), tmp_path, resume_from=str(folder))[0]["updates"] == 12


@pytest.mark.parametrize("record", ['{"a": 1}', "[]", "[" * 100_000, ""])
def test_a_damaged_record_is_made_again(ended: Path, tmp_path: Path, record: str) -> None:
    folder = shutil.copytree(ended, tmp_path / "run")
    whole = json.loads((folder / "metrics.json").read_text())
    (folder / "metrics.json").write_text(record)
    again, _ = run(runs.recipe_of(folder), tmp_path, resume_from=str(folder))
    assert again["test_bits_per_char"] == whole["test_bits_per_char"]
    assert json.loads((folder / "metrics.json").read_text()) == again


def test_a_record_of_nulls_is_made_again(ended: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(ended, tmp_path / "run")
    whole = json.loads((folder / "metrics.json").read_text())
    (folder / "metrics.json").write_text(json.dumps(dict.fromkeys(whole)))
    again, _ = run(runs.recipe_of(folder), tmp_path, resume_from=str(folder))
    assert again["test_bits_per_char"] == whole["test_bits_per_char"]


def test_a_record_of_an_earlier_version_is_made_again(ended: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(ended, tmp_path / "run")
    whole = json.loads((folder / "metrics.json").read_text())
    old = {key: value for key, value in whole.items() if key != "reason"}
    (folder / "metrics.json").write_text(json.dumps(old))
    assert run(runs.recipe_of(folder), tmp_path, resume_from=str(folder))[0]["reason"] == ""


def test_a_run_that_is_complete_needs_no_state(ended: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(ended, tmp_path / "run")
    (folder / "resume.safetensors").unlink()
    record, _ = run(runs.recipe_of(folder), tmp_path, resume_from=str(folder))
    assert record == json.loads((ended / "metrics.json").read_text())


def test_a_complete_run_without_its_state_still_has_its_start(ended: Path, tmp_path: Path) -> None:
    recipe, start = runs.recipe_of(ended), ended / "last.safetensors"
    _, folder = run(recipe, tmp_path, start_from=start)
    (folder / "resume.safetensors").unlink()
    for which in ("auto", str(folder)):
        assert run(recipe, tmp_path, start_from=start, resume_from=which)[1] == folder


@pytest.mark.parametrize("place", ["named", "auto"])
def test_models_without_a_state_are_not_trained_over(ended: Path, tmp_path: Path, place: str) -> None:
    folder = shutil.copytree(ended, tmp_path / "runs" / ended.parent.name / ended.name)
    for name in ("metrics.json", "resume.safetensors"):
        (folder / name).unlink()
    before = (folder / "last.safetensors").read_bytes()
    with pytest.raises(RunError, match=r"resume\.safetensors is missing.*--from .*last\.safetensors"):
        run(
            runs.recipe_of(folder),
            tmp_path / "runs",
            resume_from="auto" if place == "auto" else str(folder),
        )
    assert (folder / "last.safetensors").read_bytes() == before


@pytest.mark.parametrize("content", [b"", b"half a model"])
def test_a_better_model_that_is_damaged_is_taken_away(ended: Path, tmp_path: Path, content: bytes) -> None:
    folder = shutil.copytree(ended, tmp_path / "run")
    (folder / "metrics.json").unlink()
    (folder / "better.safetensors").write_bytes(content)
    assert run(runs.recipe_of(folder), tmp_path, resume_from=str(folder))[0]["updates"] == 12
    assert not (folder / "better.safetensors").exists()


def test_a_training_state_is_no_start(ended: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not a model"):
        run(runs.recipe_of(ended), tmp_path, start_from=ended / "resume.safetensors", resume_from="auto")
