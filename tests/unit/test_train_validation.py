"""Validation during a run: what it decides, what it costs, and that it changes nothing else."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from made_runs import RICH, Tiny, run, same, tell_validations, weights
from mulstm import checkpoint, job, outcome, parallel, resume, runs, train


def test_validation_does_not_touch_training(tiny: Tiny, tmp_path: Path) -> None:
    _, often = run(tiny(*RICH, "evaluate.every=1"), tmp_path / "a")
    _, seldom = run(tiny(*RICH, "evaluate.every=100"), tmp_path / "b")
    assert same(weights(often), weights(seldom))


def test_early_stopping_keeps_the_best(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = outcome.evaluate
    tell_validations(monkeypatch, 5.0, 4.0, 4.5, 4.2, 3.0)
    record, folder = run(tiny("evaluate.every=2", "evaluate.patience=2"), tmp_path)
    assert record["updates"] == 8
    assert record["best_valid_update"] == 4
    assert "2 validations" in record["stopped"]
    assert checkpoint.load(folder / "best.safetensors").meta["metrics"]["update"] == 4
    best = checkpoint.load(folder / "best.safetensors").model
    corpus = job.load_corpus(tiny(), parallel.Share(), None)
    assert real(best, corpus.split("test"), 5).bits_per_char == record["test_bits_per_char"]
    assert not same(weights(folder, "best"), weights(folder, "last"))


def test_patience_begins_anew_with_a_gain_and_a_draw_is_none(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tell_validations(monkeypatch, 5.0, 6.0, 4.0, 4.0, 4.5, 3.0)
    record, _ = run(tiny("evaluate.every=2", "evaluate.patience=2"), tmp_path)
    assert (record["updates"], record["best_valid_update"]) == (10, 6)


def test_the_best_model_is_measured_as_it_was_trained(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, str]] = []
    real = outcome.evaluate_together

    def measure(model: Any, *given: Any, **named: Any) -> Any:
        seen.append((model.precision, model.backend))
        return real(model, *given, **named)

    monkeypatch.setattr(outcome, "evaluate_together", measure)
    run(tiny("evaluate.patience=9", "train.precision=bf16", "train.backend=reference"), tmp_path)
    assert seen == [("bf16", "reference")]


def test_validation_takes_no_time_of_training(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late, clock, real = [0.0], time.perf_counter, outcome.evaluate

    def slow(*given: Any, **named: Any) -> Any:
        late[0] += 1e6
        return real(*given, **named)

    monkeypatch.setattr(train.time, "perf_counter", lambda: clock() + late[0])
    monkeypatch.setattr(outcome, "evaluate", slow)
    record, _ = run(tiny(), tmp_path)
    assert 0 < record["train_seconds"] < 60
    assert record["valid_seconds"] > 3e6 - 1


@pytest.mark.parametrize("patience", [0, 9])
def test_a_folder_stands_for_the_model_of_its_record(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patience: int
) -> None:
    real = outcome.evaluate
    tell_validations(monkeypatch, 4.0, 5.0)
    recipe = tiny("evaluate.every=6", f"evaluate.patience={patience}")
    record, folder = run(recipe, tmp_path)
    loaded = checkpoint.load(folder)
    assert loaded.meta["metrics"]["update"] == (6 if patience else 12)
    test = job.load_corpus(recipe, parallel.Share(), None).split("test")
    assert real(loaded.model, test, 5).bits_per_char == record["test_bits_per_char"]
    last = checkpoint.load(folder / "last.safetensors").meta["metrics"]
    assert last["valid_bits_per_char"] == pytest.approx(5.0)


def test_a_killed_run_finds_no_best_model_of_its_future_that_nothing_overtakes(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tiny("evaluate.patience=9", "evaluate.every=4", "train.save_every=1e-9")
    real = resume.save

    def killed(path: Path, work: Any, progress: resume.Progress, *more: Any) -> None:
        if progress.update == 8:
            raise KeyboardInterrupt
        real(path, work, progress, *more)

    with monkeypatch.context() as patch:
        patch.setattr(resume, "save", killed)
        tell_validations(patch, 4.0, 3.0)
        with pytest.raises(KeyboardInterrupt):
            run(recipe, tmp_path)
    tell_validations(monkeypatch, 5.0)  # of the last model that was saved
    record, folder = run(recipe, tmp_path, resume_from="auto", minutes=1e-9)
    assert (record["updates"], record["best_valid_update"]) == (7, 4)
    assert checkpoint.load(folder).meta["metrics"]["update"] == 4


def test_without_a_validation_part(tiny: Tiny, tmp_path: Path) -> None:
    record, folder = run(tiny("data.split=90-0-10"), tmp_path)
    assert record["valid_bits_per_char"] is None
    assert record["valid_symbols"] == record["best_valid_update"] == record["valid_seconds"] == 0
    assert record["test_symbols"] == 600
    assert all(line["valid_bits_per_char"] is None for line in runs.read_log(folder))
