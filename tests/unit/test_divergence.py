"""Runs that diverge: each is ended, told of, and has no record."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from made_runs import Tiny, run, tell_norms, tell_validations, weights
from mulstm import checkpoint, job, optim, runs, train
from mulstm.divergence import DivergedError
from mulstm.errors import RunError


@pytest.mark.parametrize(("rate", "good", "what"), [(math.inf, 6, "Some weight"), (1e38, 7, "The loss")])
def test_a_loss_that_is_no_number(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rate: float, good: int, what: str
) -> None:
    real = optim.rate_at
    monkeypatch.setattr(optim, "rate_at", lambda o, n, total: rate if n >= 6 else real(o, n, total))
    with pytest.raises(
        RunError, match=rf"{what} is no longer a number.*last checkpoint.*optimiser\.rate below 0\.004"
    ):
        run(tiny("train.save_every=1e-9"), tmp_path)
    (folder,) = runs.newest_first("text", root=tmp_path)
    assert all(bool(torch.isfinite(t).all()) for t in weights(folder, "last").values())
    last = checkpoint.load(folder / "last.safetensors").meta["metrics"]
    assert (last["update"], last["valid_bits_per_char"]) == (good, None)  # validated at 5
    assert not (folder / "metrics.json").exists()


@pytest.mark.parametrize("lines", [12, 2])  # of the log: at every update, or where validation is read
def test_a_model_that_is_ruined(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: int
) -> None:
    """Updates from the seventh on are far too long: they leave numbers behind, but no model to keep."""
    monkeypatch.setattr(job, "LOG_LINES", lines)
    real = optim.rate_at
    monkeypatch.setattr(optim, "rate_at", lambda o, n, total: 50.0 if n >= 6 else real(o, n, total))
    what = r"The loss is at [\d.]+ bits/char, where a blind guess costs 8\.0, at update 10"
    with monkeypatch.context() as patch:
        tell_validations(patch, 7.9, 40.0)
        with pytest.raises(DivergedError, match=what + r".*last checkpoint.*rate below 0\.004"):
            run(tiny("train.save_every=1e-9"), tmp_path)
    (folder,) = runs.newest_first("text", root=tmp_path)
    assert runs.read_log(folder)[-1]["train_bits_per_char"] > 16
    assert checkpoint.load(folder / "last.safetensors").meta["metrics"]["update"] == 7
    # Where nothing had been learnt yet, a high loss is no ruin midway.
    with monkeypatch.context() as patch:
        tell_validations(patch, 8.1, 40.0, 40.0)
        with pytest.raises(DivergedError, match="at update 12;"):
            run(tiny(), tmp_path / "new")
    # Where validation stays low, the text has changed its character.
    with monkeypatch.context() as patch:
        tell_validations(patch, 7.9, 7.9, 7.9)
        assert run(tiny(), tmp_path / "changed")[0]["updates"] == 12
    # With patience the best model counts.
    tell_validations(monkeypatch, 7.9, 40.0, 40.0)
    record, folder = run(tiny("evaluate.patience=2"), tmp_path / "patient")
    assert (record["best_valid_update"], record["updates"]) == (5, 12)
    assert record["valid_bits_per_char"] < 8.1


def test_a_run_that_ends_ruined_is_no_result(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It never learnt anything, or had no validation part to show it."""
    monkeypatch.setattr(optim, "rate_at", lambda *_: 50.0)
    what = r"The loss is at [\d.e+]+ bits/char, where a blind guess costs 8\.0, at update 12; the last check"
    for k, more in enumerate([(), ("data.split=100-0-0",), ("evaluate.patience=5",)]):
        with pytest.raises(DivergedError, match=what):
            run(tiny(*more), tmp_path / str(k))
    # Who goes on from a model of another text may still be far from this one.
    monkeypatch.undo()
    _, folder = run(tiny(), tmp_path / "sound")
    monkeypatch.setattr(optim, "rate_at", lambda *_: 50.0)
    record, _ = train.train(
        tiny(), runs_dir=tmp_path / "tuned", device="cpu", quiet=True, start_from=folder / "last.safetensors"
    )
    assert record["updates"] == 12


def test_gradients_and_validations_that_are_no_numbers(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        tell_norms(patch, math.inf)
        with pytest.raises(RunError, match="The gradient is no longer a number at update 1"):
            run(tiny(), tmp_path)
    with monkeypatch.context() as patch:
        tell_validations(patch, math.nan)
        with pytest.raises(RunError, match="The validation loss is no longer a number at update 5"):
            run(tiny(), tmp_path)
    for saved, name in (("600.0", "better"), ("1e-9", "best")):
        with monkeypatch.context() as patch:
            tell_validations(patch, 2.0, math.nan)
            told = rf"at update 10; (the last .*; )?the best model so far is .*/{name}\.safetensors"
            with pytest.raises(RunError, match=told):
                run(tiny("evaluate.patience=9", f"train.save_every={saved}"), tmp_path)


def test_a_trained_model_that_gives_no_number_has_no_record(tiny: Tiny, tmp_path: Path) -> None:
    """The last update, which no validation follows, is far too long."""
    far = tiny("data.split=90-0-10", "train.updates=1", "optimiser.rate=1e15", "optimiser.warmup=0")
    for how in (None, "auto"):
        with pytest.raises(DivergedError, match=r"The loss on the test part is no longer a .*1\. Start"):
            run(far, tmp_path, resume_from=how)
    (folder,) = runs.newest_first("text", root=tmp_path)
    assert not (folder / "metrics.json").exists()
