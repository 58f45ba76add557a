from __future__ import annotations

import builtins
import json
import math
import os
import re
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from mulstm import checkpoint, console, job, optim, parallel, runs, train, update
from mulstm import recipe as recipes
from mulstm.errors import BackendError, CheckpointError, ExtraError, MulstmError, RecipeError, RunError
from mulstm.recipe import Recipe

Tiny = Callable[..., Recipe]
# Everything a run can carry along: masks, dropped states, an average, rotation, clearing.
RICH = (
    "dropout.hidden=0.2",
    "dropout.embedding=0.2",
    "train.drop_state=0.1",
    "train.ema=0.8",
    "train.rotate=true",
    "train.clear_every=7",
    "train.lanes=16",
    "train.chunk=50",
    "train.updates=17",  # more than two epochs
)


def run(recipe: Recipe, root: Path, **more: Any) -> tuple[dict[str, Any], Path]:
    return train.train(recipe, runs_dir=root, device="cpu", quiet=True, **more)


def weights(folder: Path, name: str = "last") -> dict[str, torch.Tensor]:
    return load_file(folder / f"{name}.safetensors")


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def steady(log: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A log without what depends on the clock."""
    return [{k: v for k, v in line.items() if k not in ("seconds", "symbols_per_second")} for line in log]


def at_update(monkeypatch: pytest.MonkeyPatch, n: int, act: Callable[[], None]) -> None:
    """Does something in the middle of the n-th update."""
    real, calls = update.Update.step, [0]

    def step(self: update.Update) -> None:
        calls[0] += 1
        if calls[0] == n:
            act()
        real(self)

    monkeypatch.setattr(update.Update, "step", step)


def test_what_a_run_leaves_behind(tiny: Tiny, tmp_path: Path) -> None:
    record, folder = run(tiny(), tmp_path)
    assert {path.name for path in folder.iterdir()} == {
        "recipe.toml",
        "environment.json",
        "log.jsonl",
        "last.safetensors",
        "best.safetensors",
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


def test_the_first_update_does_not_count_into_the_speed(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    late, real = [0.0], time.monotonic
    monkeypatch.setattr(console.time, "monotonic", lambda: real() + late[0])
    at_update(monkeypatch, 1, lambda: late.append(late.pop() + 1e6))
    train.train(tiny("data.split=100-0-0"), runs_dir=tmp_path, device="cpu")
    (last,) = re.findall(r"100%.* ([0-9.]+)(k?) symbols/s", capsys.readouterr().err)
    assert float(last[0]) > 1


def test_nothing_is_left_to_do(tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record, folder = run(tiny(), tmp_path)
    before = (folder / "last.safetensors").stat().st_mtime_ns
    again = train.train(tiny(), runs_dir=tmp_path, resume_from="auto")
    assert again == (record, folder)
    assert (folder / "last.safetensors").stat().st_mtime_ns == before
    assert "complete" in capsys.readouterr().err


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_resumed_equals_unbroken(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signum: signal.Signals
) -> None:
    recipe = tiny(*RICH)
    _, whole = run(recipe, tmp_path / "whole")
    for n in (4, 6):  # twice interrupted, the second time across an epoch's end
        with monkeypatch.context() as patch:
            at_update(patch, n, lambda: os.kill(os.getpid(), signum))
            with pytest.raises(train.RunInterruptedError, match="is saved") as caught:
                run(recipe, tmp_path / "broken", resume_from="auto")
        assert caught.value.exit_code == 128 + signum
        assert signal.getsignal(signum) in (signal.default_int_handler, signal.SIG_DFL)
    record, broken = run(recipe, tmp_path / "broken", resume_from="auto")
    assert record["updates"] == 17
    for name in ("last", "best", "resume"):
        assert same(weights(whole, name), weights(broken, name)), name
    assert steady(runs.read_log(whole)) == steady(runs.read_log(broken))
    expected = json.loads((whole / "metrics.json").read_text())
    for key in ("test_bits_per_char", "valid_bits_per_char", "epochs", "best_valid_update"):
        assert record[key] == expected[key]


def test_interrupted_while_validating(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = tiny()
    _, whole = run(recipe, tmp_path / "whole")
    real = train.evaluate

    def interrupted(*given: Any, progress: Any, **named: Any) -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        progress(1, 1.0)
        return real(*given, progress=progress, **named)

    with monkeypatch.context() as patch:
        patch.setattr(train, "evaluate", interrupted)
        with pytest.raises(train.RunInterruptedError, match="update 5 of 12"):
            run(recipe, tmp_path / "broken")
    _, broken = run(recipe, tmp_path / "broken", resume_from="auto")
    assert same(weights(whole, "best"), weights(broken, "best"))
    assert steady(runs.read_log(whole)) == steady(runs.read_log(broken))


def test_interrupted_while_measuring_at_the_end(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = train.finish

    def finish(work: job.Job) -> dict[str, Any]:
        os.kill(os.getpid(), signal.SIGTERM)
        monkeypatch.setattr(train, "evaluate", lambda *g, progress, **n: progress(1, 1.0))
        return real(work)

    monkeypatch.setattr(train, "finish", finish)
    with pytest.raises(train.RunInterruptedError, match="measuring") as caught:
        run(tiny(), tmp_path)
    assert caught.value.exit_code == 143
    monkeypatch.undo()
    record, _ = run(tiny(), tmp_path, resume_from="auto")
    assert record["updates"] == 12


def test_the_averaged_weights_are_the_model(tiny: Tiny, tmp_path: Path) -> None:
    _, folder = run(tiny(*RICH), tmp_path)
    state = weights(folder, "resume")
    for name, tensor in weights(folder, "last").items():
        assert torch.equal(tensor, state[f"average.{name}"])
        assert not torch.equal(tensor, state[f"model.{name}"])


def test_validation_does_not_touch_training(tiny: Tiny, tmp_path: Path) -> None:
    _, often = run(tiny(*RICH, "evaluate.every=1"), tmp_path / "a")
    _, seldom = run(tiny(*RICH, "evaluate.every=100"), tmp_path / "b")
    assert same(weights(often), weights(seldom))


def test_early_stopping_keeps_the_best(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bits = iter([5.0, 4.0, 4.5, 4.2, 3.0])
    real = train.evaluate

    def told(*given: Any, **named: Any) -> Any:
        found = real(*given, **named)
        if "symbols" in named:  # during training
            return replace(found, nats=next(bits) * math.log(2) * found.symbols)
        return found

    monkeypatch.setattr(train, "evaluate", told)
    record, folder = run(tiny("evaluate.every=2", "evaluate.patience=2"), tmp_path)
    assert record["updates"] == 8
    assert record["best_valid_update"] == 4
    assert "2 validations" in record["stopped"]
    assert checkpoint.load(folder / "best.safetensors").meta["metrics"]["update"] == 4
    best = checkpoint.load(folder / "best.safetensors").model
    corpus = job.load_corpus(tiny(), parallel.Share(), None)
    assert real(best, corpus.split("test"), 5).bits_per_char == record["test_bits_per_char"]
    assert not same(weights(folder, "best"), weights(folder, "last"))


@pytest.mark.parametrize(("rate", "good", "what"), [(math.inf, 6, "Some weight"), (1e38, 7, "The loss")])
def test_a_loss_that_is_no_number(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rate: float, good: int, what: str
) -> None:
    real = optim.rate_at
    monkeypatch.setattr(optim, "rate_at", lambda o, n, total: rate if n >= 6 else real(o, n, total))
    with pytest.raises(
        RunError, match=rf"{what} is no longer a number.*last good checkpoint.*optimiser\.rate below 0\.004"
    ):
        run(tiny("train.save_every=1e-9"), tmp_path)
    folder = runs.find("text", root=tmp_path)
    assert folder is not None
    assert all(bool(torch.isfinite(t).all()) for t in weights(folder, "last").values())
    assert checkpoint.load(folder / "last.safetensors").meta["metrics"]["update"] == good
    assert not (folder / "metrics.json").exists()


def test_a_full_disk_loses_nothing(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = tiny("train.save_every=1e-9")
    _, whole = run(recipe, tmp_path / "whole")
    real, writes = checkpoint.save_file, [0]

    def filling(tensors: Any, path: Path, metadata: Any) -> None:
        writes[0] += 1
        if writes[0] > 9:
            path.write_bytes(b"half")
            raise SafetensorError("I/O error: No space left on device (os error 28)")
        real(tensors, path, metadata)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save_file", filling)
        with pytest.raises(RunError, match="No space left"):
            run(recipe, tmp_path / "full")
    full = runs.find("text", root=tmp_path / "full")
    assert full is not None
    checkpoint.load(full / "last.safetensors")
    assert not list(full.glob(".*"))
    _, resumed = run(recipe, tmp_path / "full", resume_from="auto")
    assert resumed == full
    assert same(weights(whole), weights(resumed))


def test_leftovers_of_a_killed_run_are_cleared(tiny: Tiny, tmp_path: Path) -> None:
    recipe = tiny()
    with runs.Run.create(recipe, root=tmp_path) as kept:
        folder = kept.path
        kept.log(
            {"update": 3, "train_bits_per_char": 1.0}
        )  # written after the last checkpoint: there is none
    (folder / ".last.safetensors.123.tmp").write_bytes(b"half")
    _, resumed = run(recipe, tmp_path, resume_from="auto")
    assert resumed == folder
    assert not list(folder.glob(".*"))
    assert [line["update"] for line in runs.read_log(folder)] == list(range(1, 13))


def test_a_folder_in_use(tiny: Tiny, tmp_path: Path) -> None:
    recipe = tiny()
    with runs.Run.create(recipe, root=tmp_path) as held, pytest.raises(RunError, match="in use"):
        run(recipe, tmp_path, resume_from=str(held.path))
    assert sorted(path.name for path in held.path.iterdir()) == ["lock", "recipe.toml"]


def test_resume_wants_the_same_recipe_and_text(tiny: Tiny, tmp_path: Path, text_file: Path) -> None:
    recipe = tiny()
    _, folder = run(recipe, tmp_path)
    (folder / "metrics.json").unlink()
    before = weights(folder)
    with pytest.raises(RunError, match=r"optimiser\.rate was 0\.004, is 0\.1"):
        run(tiny("optimiser.rate=0.1"), tmp_path, resume_from=str(folder))
    with pytest.raises(RunError, match="not a run folder"):
        run(recipe, tmp_path, resume_from=str(tmp_path / "nowhere"))
    text_file.write_bytes(text_file.read_bytes().replace(b"a", b"o"))
    with pytest.raises(RunError, match="text has changed"):
        run(recipe, tmp_path, resume_from=str(folder))
    assert same(before, weights(folder))


def test_auto_takes_the_run_of_this_recipe_only(tiny: Tiny, tmp_path: Path) -> None:
    _, first = run(tiny("train.updates=2"), tmp_path)
    _, second = run(tiny("train.updates=3"), tmp_path, resume_from="auto")
    assert first != second
    assert job.earlier(tiny("train.updates=2"), tmp_path, "auto") == first
    assert job.earlier(tiny("train.updates=2", "train.save_every=9.0"), tmp_path, "auto") == first
    assert job.earlier(tiny("train.updates=4"), tmp_path, "auto") is None


def test_start_from_a_checkpoint(tiny: Tiny, tmp_path: Path, text_file: Path) -> None:
    _, first = run(tiny(), tmp_path)
    more = tiny("train.updates=1", "optimiser.rate=1e-12")
    _, second = run(more, tmp_path, start_from=first / "last.safetensors")
    assert torch.allclose(weights(first)["W_out"], weights(second)["W_out"], atol=1e-6)
    with pytest.raises(CheckpointError, match=r"hidden was 16, is 24"):
        run(tiny("model.hidden=24"), tmp_path, start_from=first / "last.safetensors")
    other = recipes.for_text(text_file, ["data.alphabet=corpus", "train.lanes=2"])
    with pytest.raises(CheckpointError, match="alphabet of 256"):
        run(other, tmp_path, start_from=first / "last.safetensors")


def test_without_a_validation_part(tiny: Tiny, tmp_path: Path) -> None:
    record, folder = run(tiny("data.split=90-0-10"), tmp_path)
    assert record["valid_bits_per_char"] is None
    assert record["test_symbols"] == 600
    assert all(line["valid_bits_per_char"] is None for line in runs.read_log(folder))


def test_blocks_and_clearing(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cleared: list[int] = []
    real = update.Update.clear
    monkeypatch.setattr(update.Update, "clear", lambda self: (cleared.append(1), real(self))[1])
    run(tiny("train.block=200", "train.rotate=false"), tmp_path)  # five chunks a block
    assert len(cleared) == 3
    cleared.clear()
    run(tiny("train.clear_every=2"), tmp_path)
    assert len(cleared) == 6


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
    assert train._departures(row) == ""
    seeded = recipes.load("hutter/mlstm", ["train.seed=7", "train.precision=bf16"])
    assert train._departures(seeded) == ""
    short = recipes.load("hutter/mlstm", ["train.updates=100"])
    assert "train.updates was" in train._departures(short)


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


def test_tensorboard_is_an_extra(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.startswith("torch.utils.tensorboard"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ExtraError, match=r"mulstm\[tensorboard\]"):
        run(tiny(), tmp_path, tensorboard=True)


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
