"""The training loop: what a run leaves behind, validation, early stops, and what cannot be trained."""

from __future__ import annotations

import builtins
import json
import math
import re
import time
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from made import text_recipe
from made_runs import RICH, Tiny, at_update, run, tell_norms, weights
from mulstm import checkpoint, console, job, outcome, parallel, record_corpus, runs, train, update
from mulstm import recipe as recipes
from mulstm.errors import BackendError, CheckpointError, ExtraError, MulstmError, RecipeError, RunError
from mulstm.words import word_costs


def test_what_a_run_leaves_behind(tiny: Tiny, tmp_path: Path) -> None:
    record, folder = run(tiny(), tmp_path)
    assert {path.name for path in folder.iterdir()} == {
        "recipe.toml",
        "environment.json",
        "log.jsonl",
        "last.safetensors",
        "resume.safetensors",
        "metrics.json",
        "lock",
    }
    assert json.loads((folder / "metrics.json").read_text()) == record
    fixed = "recipe table row seed parameters complete valid_bits_per_char test_bits_per_char test_symbols"
    fixed += " evaluate_lanes epochs updates train_seconds hardware precision backend commit"
    assert set(fixed.split()) <= record.keys()
    assert record["updates"] == 12
    assert record["complete"] is True
    assert record["backend"] == "fused"
    assert 0 < record["train_seconds"] < 60
    log = runs.read_log(folder)
    assert [line["update"] for line in log] == list(range(1, 13))
    assert [line["update"] for line in log if line["valid_bits_per_char"] is not None] == [5, 10, 12]
    assert set(log[0]) == {
        "update",
        "epoch",
        "seconds",
        "train_bits_per_char",
        "valid_bits_per_char",
        "rate",
        "grad_norm",
        "symbols_per_second",
    }
    assert log[0]["rate"] == 4e-3
    assert log[-1]["train_bits_per_char"] < log[0]["train_bits_per_char"] < 8.1
    loaded = checkpoint.load(folder / "last.safetensors")
    assert loaded.recipe == recipes.load(folder / "recipe.toml")
    assert loaded.meta["metrics"]["update"] == 12


def test_a_line_of_the_log_is_of_the_updates_since_the_last(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses: list[float] = []
    real = update.Update.__call__

    def call(self: update.Update, *given: Any, **named: Any) -> Any:
        loss = real(self, *given, **named)
        losses.append(float(loss))
        return loss

    monkeypatch.setattr(update.Update, "__call__", call)
    monkeypatch.setattr(job, "LOG_LINES", 4)  # one in three updates, and wherever validation is read
    log = runs.read_log(run(tiny(), tmp_path)[1])
    ends = [line["update"] for line in log]
    assert ends == [3, 5, 6, 9, 10, 12]
    means = [np.mean(losses[low:high]) for low, high in pairwise([0, *ends])]
    assert [line["train_bits_per_char"] * math.log(2) for line in log] == pytest.approx(means)
    assert [line["epoch"] for line in log] == [end / 134 for end in ends]


def test_the_first_update_does_not_count_into_the_speed(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    late, real = [0.0], time.monotonic
    monkeypatch.setattr(console.time, "monotonic", lambda: real() + late[0])
    at_update(monkeypatch, 1, lambda: late.append(late.pop() + 1e6))
    train.train(tiny("data.split=100-0-0"), runs_dir=tmp_path, device="cpu")
    (last,) = re.findall(r"100%.* ([0-9.]+)(k?) symbols/s", capsys.readouterr().err)
    assert float(last[0]) > 1


def test_the_averaged_weights_are_the_model(tiny: Tiny, tmp_path: Path) -> None:
    _, folder = run(tiny(*RICH), tmp_path)
    state = weights(folder, "resume")
    for name, tensor in weights(folder, "last").items():
        assert torch.equal(tensor, state[f"average.{name}"])
        assert not torch.equal(tensor, state[f"model.{name}"])


def test_averaging_begins_after_its_share_of_the_run(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blends: list[float] = []
    real = update.Update.__call__

    def call(self: update.Update, *given: Any, blend: float, **named: Any) -> Any:
        blends.append(blend)
        return real(self, *given, blend=blend, **named)

    monkeypatch.setattr(update.Update, "__call__", call)
    run(tiny("train.ema=0.75", "train.ema_start=0.25"), tmp_path)
    assert blends == [1.0] * 3 + [0.25] * 9


def test_words_are_recorded_of_both_parts_where_they_are_counted(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = outcome.evaluate_together

    def worded(*given: Any, **named: Any) -> Any:
        return [
            replace(
                found, words=found.symbols // 4, losses=np.full(found.symbols, found.nats / found.symbols)
            )
            for found in real(*given, **named)
        ]

    assert not any("perplexity" in key for key in run(tiny(), tmp_path / "plain")[0])
    monkeypatch.setattr(outcome, "evaluate_together", worded)
    record, _ = run(tiny(), tmp_path / "worded")
    for name in ("valid", "test"):
        symbols = record[f"{name}_symbols"]
        expected = 2 ** (record[f"{name}_bits_per_char"] * symbols / (symbols // 4))
        assert record[f"{name}_word_perplexity"] == pytest.approx(expected)
        # Where every byte costs the same, a word costs so many of them as are its own.
        costs = word_costs(record_corpus.load(tiny().data).split(name).raw(), np.ones(symbols))
        assert costs is not None
        bits = record[f"{name}_bits_per_char"] * costs.nats / costs.count
        assert record[f"{name}_product_word_perplexity"] == pytest.approx(2**bits)


def test_each_line_of_the_log_is_of_its_own_updates(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tell_norms(monkeypatch, 2.0)
    _, folder = run(tiny(), tmp_path)
    assert [line["grad_norm"] for line in runs.read_log(folder)] == [2.0] * 12


def test_start_from_a_checkpoint(tiny: Tiny, tmp_path: Path, text_file: Path) -> None:
    _, first = run(tiny(), tmp_path)
    more = tiny("train.updates=1", "optimiser.rate=1e-12")
    _, second = run(more, tmp_path, start_from=first / "last.safetensors")
    assert torch.allclose(weights(first)["W_out"], weights(second)["W_out"], atol=1e-6)
    with pytest.raises(CheckpointError, match=r"hidden was 16, is 24"):
        run(tiny("model.hidden=24"), tmp_path, start_from=first / "last.safetensors")
    other = text_recipe(text_file, ["data.alphabet=corpus", "train.lanes=2"])
    with pytest.raises(CheckpointError, match="alphabet of 256"):
        run(other, tmp_path, start_from=first / "last.safetensors")


def test_blocks_and_clearing(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cleared: list[int] = []
    real = update.Update.clear
    monkeypatch.setattr(update.Update, "clear", lambda self: (cleared.append(1), real(self))[1])
    run(tiny("train.block=200", "train.rotate=false"), tmp_path)  # five chunks a block
    assert len(cleared) == 3
    cleared.clear()
    run(tiny("train.clear_every=2"), tmp_path)
    assert len(cleared) == 6
    cleared.clear()
    run(tiny("train.lanes=16", "train.chunk=50", "train.updates=17", "train.clear_every=7"), tmp_path)
    assert len(cleared) == 5  # before updates 0, 7 and 14, and at the epochs' begin: 0, 6 and 12


def test_rotation_starts_each_epoch_elsewhere(tiny: Tiny) -> None:
    recipe = tiny("train.rotate=true")
    corpus = job.load_corpus(recipe, parallel.Share(), None)
    offsets = [job.lanes(recipe, corpus, epoch).offset for epoch in range(4)]
    assert offsets[0] == 0
    assert len(set(offsets)) == 4
    assert offsets == [job.lanes(recipe, corpus, epoch).offset for epoch in range(4)]
    still = tiny("train.rotate=false")
    assert job.lanes(still, corpus, 3).offset == 0


def test_a_shortened_row_says_so() -> None:
    row = recipes.load("hutter/mlstm")
    assert outcome.departures(row, {}) == ""
    seeded = recipes.load("hutter/mlstm", ["train.seed=7", "train.precision=bf16"])
    assert outcome.departures(seeded, {}) == ""
    short = recipes.load("hutter/mlstm", ["train.updates=100"])
    assert "train.updates was" in outcome.departures(short, {})
    moved = recipes.load("hutter/mlstm-fast", ["kind=faithful", "row=mlstm-emb-wn"])
    assert "kind was 'fast', is 'faithful'; row was 'mlstm', is" in outcome.departures(moved, {})
    assert "started from a trained model" in outcome.departures(row, {"tuned_from": "0123"})
    assert outcome.departures(recipes.load("finetune"), {"tuned_from": "0123"}) == ""


def test_lanes_that_cannot_be_shared(tiny: Tiny, tmp_path: Path) -> None:
    share, place = parallel.Share(0, 3), {"runs_dir": tmp_path, "data_dir": None}
    with ExitStack() as stack, pytest.raises(RecipeError, match="4 lanes cannot be shared by 3"):
        job.build(tiny(), share, stack, **place, path=None, start_from=None)


@pytest.mark.parametrize("device", ["tpu9", "meta", "cuda:7"])
def test_devices_that_are_not_there(tiny: Tiny, tmp_path: Path, device: str) -> None:
    if device == "cuda:7" and torch.cuda.device_count() > 7:
        pytest.skip("this machine has eight GPUs")
    with pytest.raises(BackendError, match="Say "):
        train.train(tiny(), runs_dir=tmp_path, device=device)
    assert not list(tmp_path.rglob("recipe.toml"))


def test_a_backend_that_cannot_run_here(tiny: Tiny, tmp_path: Path) -> None:
    with pytest.raises(BackendError, match="triton"):
        run(tiny("train.backend=triton"), tmp_path)
    assert not list(tmp_path.rglob("recipe.toml"))


def test_tensorboard_is_told_what_the_log_says(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: dict[str, dict[int, float]] = {}
    closed: list[str] = []

    class Writer:
        def __init__(self, folder: str) -> None:
            self.folder = folder

        def add_scalar(self, name: str, value: float, update: int) -> None:
            told.setdefault(name, {})[update] = value

        def flush(self) -> None:
            assert told

        def close(self) -> None:
            closed.append(self.folder)

    monkeypatch.setattr(job, "require_board", lambda: Writer)
    _, folder = run(tiny(), tmp_path, tensorboard=True)
    lines = runs.read_log(folder)
    for name in set(lines[0]) - {"update"}:
        assert told.pop(name) == {line["update"]: line[name] for line in lines if line[name] is not None}
    assert not told
    assert closed == [str(folder)]


def test_tensorboard_is_an_extra(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any, **named: Any) -> Any:
        if name.startswith("torch.utils.tensorboard"):
            raise ImportError(name)
        return real(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ExtraError, match=r"mulstm\[tensorboard\]"):
        run(tiny(), tmp_path, tensorboard=True)
    assert not list(tmp_path.rglob("recipe.toml"))  # which would be the newest run


def test_progress_is_told(tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train.train(tiny(), runs_dir=tmp_path, device="cpu")
    out, err = capsys.readouterr()
    assert out == ""
    assert "bits/char" in err
    assert "symbols/s" in err
    assert "backend fused" in err
    assert "\x1b" not in err


def test_errors_of_the_first_process_reach_all() -> None:
    def fail() -> float:
        raise RunError("no room")

    with pytest.raises(MulstmError, match="no room"):
        parallel.Share().by_first(fail)


@pytest.mark.parametrize("cell", recipes.CELLS)
def test_every_cell_trains(tiny: Tiny, tmp_path: Path, cell: str) -> None:
    record, _ = run(tiny(f"model.cell={cell}", "train.updates=3", "evaluate.symbols=50"), tmp_path)
    assert record["test_bits_per_char"] < 8.2


def test_a_failed_kernel_of_another_process_stops_this_one(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All must stop, or those that go on would wait for the one that does not."""
    monkeypatch.setattr(parallel.Share, "largest", lambda share, *own: [1.0] * len(own))
    with pytest.raises(RunError, match="waited in vain for its neighbours"):
        run(tiny(), tmp_path)


@pytest.mark.parametrize("minutes", [-1, math.nan])
def test_a_time_that_is_none(tiny: Tiny, tmp_path: Path, minutes: float) -> None:
    with pytest.raises(RecipeError, match=f"minutes={minutes} is no time"):
        train.train(tiny(), runs_dir=tmp_path, device="cpu", minutes=minutes)


def test_the_speed_of_a_line_is_that_of_its_own_updates(tiny: Tiny, tmp_path: Path) -> None:
    _, folder = run(tiny(), tmp_path)
    for before, line in pairwise(runs.read_log(folder)):
        assert line["symbols_per_second"] * (line["seconds"] - before["seconds"]) == pytest.approx(4 * 10)


def test_a_text_that_changed_meanwhile_has_no_record(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, real = tiny(), outcome.evaluate_together
    text = Path(recipe.data.corpus)

    def rewritten(*given: Any, **named: Any) -> Any:
        with text.open("r+b") as file:
            file.write(b"Q" * 60)
        return real(*given, **named)

    monkeypatch.setattr(outcome, "evaluate_together", rewritten)
    monkeypatch.setattr("mulstm.data.corpus.IN_MEMORY", 9)
    with pytest.raises(RunError, match="The text has changed since"):
        run(recipe, tmp_path)
    assert not list(tmp_path.rglob("metrics.json"))


@pytest.mark.parametrize(
    "mode", [torch.no_grad, torch.inference_mode, partial(torch.autocast, "cpu", torch.bfloat16)]
)
def test_a_run_wants_gradients_whoever_calls_it(tiny: Tiny, tmp_path: Path, mode: Any) -> None:
    with mode():
        found, _ = train.train(tiny(), runs_dir=tmp_path / "a", device="cpu", quiet=True)
    right, _ = train.train(tiny(), runs_dir=tmp_path / "b", device="cpu", quiet=True)
    assert found["test_bits_per_char"] == right["test_bits_per_char"]
