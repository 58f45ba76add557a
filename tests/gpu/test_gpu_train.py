"""Training on a GPU: a run can stop and go on, its model is read on a CPU, and a wrong loss ends it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

from made_runs import RICH, Tiny, same, weights
from mulstm import checkpoint, job, parallel, record_corpus, search, train, update
from mulstm.errors import RunInterruptedError
from mulstm.evaluate import evaluate

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# So wide that pairs of lane and symbol pay; chunks so short that their number varies.
PAIRS = ("model.hidden=600", "train.lanes=4", "train.chunk=60")
# The authors' first set-up: the state after an update is computed again with the new weights.
FIRST = (
    "optimiser.name=rmsprop-normalised",
    "optimiser.rate=0.2",
    "optimiser.weight_decay=0",
    "optimiser.beta2=0.9",
    "train.refresh=true",
)


@pytest.mark.parametrize(
    ("precision", "more", "graphs"),
    [
        ("fp32", (), 1),
        ("bf16", (), 1),
        ("bf16", PAIRS, 2),
        ("fp8", (*PAIRS, "model.hidden=1200"), 1),
        ("fp32", FIRST, 1),
        ("bf16", FIRST, 1),
    ],
    ids=["fp32", "bf16", "pairs", "fp8", "rmsprop-fp32", "rmsprop-bf16"],
)
def test_a_run_stops_goes_on_and_is_read_on_a_cpu(
    tiny: Tiny,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    precision: str,
    more: tuple[str, ...],
    graphs: int,
) -> None:
    if precision == "fp8" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("not a Hopper GPU")
    recipe = tiny(
        *RICH,
        "model.hidden=32",
        "train.updates=60",
        "evaluate.every=30",
        f"train.precision={precision}",
        *more,
    )
    expected, whole = train.train(recipe, runs_dir=tmp_path / "whole", device="cuda", quiet=True)
    real, calls = update.GraphedUpdate.step, [0]

    def step(self: update.GraphedUpdate) -> None:
        calls[0] += 1
        if calls[0] == 33:
            assert len(self.graphs) >= graphs
            os.kill(os.getpid(), signal.SIGINT)
        real(self)

    with monkeypatch.context() as patch:
        patch.setattr(update.GraphedUpdate, "step", step)
        with pytest.raises(RunInterruptedError):
            train.train(recipe, runs_dir=tmp_path / "broken", device="cuda", quiet=True)
    again, broken = train.train(
        recipe, runs_dir=tmp_path / "broken", device="cuda", quiet=True, resume_from="auto"
    )
    assert again["updates"] == 60
    for name in ("last", "resume"):
        assert same(weights(whole, name), weights(broken, name)), name
    assert again["test_bits_per_char"] == expected["test_bits_per_char"]
    model = checkpoint.load(broken / "last.safetensors").model
    assert model.W_out.device.type == "cpu"
    split = job.load_corpus(recipe, parallel.Share(), None).split("test")
    assert evaluate(model, split, 5).bits_per_char == pytest.approx(again["test_bits_per_char"], rel=5e-3)


def test_a_loss_that_is_no_number(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken by hand in the middle of the replays: a high rate alone saturates, and need not overflow."""
    real, calls = update.GraphedUpdate.step, [0]

    def step(self: update.GraphedUpdate) -> None:
        calls[0] += 1
        if calls[0] == 20:
            with torch.no_grad():
                self.model.W_out[0, 0] = torch.nan
        real(self)

    monkeypatch.setattr(update.GraphedUpdate, "step", step)
    with pytest.raises(train.RunError, match="no longer a number"):
        train.train(tiny("train.updates=60"), runs_dir=tmp_path, device="cuda", quiet=True)


def test_trials_one_after_the_other(tiny: Tiny, tmp_path: Path) -> None:
    common = ("train.updates=60", "evaluate.final_lanes=5", "evaluate.lanes=5")
    asked = [
        search.Trial((rate,), tiny(rate, *common)) for rate in ("optimiser.rate=1e-6", "optimiser.rate=1e-2")
    ]
    found = search.search(asked, out=tmp_path / "search.jsonl", device="cuda")
    record, _ = train.train(asked[1].recipe, runs_dir=tmp_path, device="cuda", quiet=True)
    assert found[1]["valid_bits_per_char"] == pytest.approx(record["valid_bits_per_char"], rel=1e-4)
    assert found[1]["valid_bits_per_char"] < found[0]["valid_bits_per_char"]


def test_the_calibrated_model_is_the_one_that_is_measured(tiny: Tiny, tmp_path: Path) -> None:
    """Weights change between evaluations that pack them and capture graphs."""
    recipe = tiny("train.updates=60", "optimiser.rate=3e-2", "evaluate.calibrate=true")
    record, folder = train.train(recipe, runs_dir=tmp_path, device="cuda", quiet=True)
    assert record["calibration"]["after"] < record["calibration"]["before"] - 1e-3
    loaded = checkpoint.load(folder / "last.safetensors", "cuda")
    assert loaded.meta["fingerprint"] == record["fingerprint"]
    part = record_corpus.load(recipe.data).split("valid")
    again = evaluate(loaded.model, part, recipe.evaluate.final_lanes)
    assert again.bits_per_char == pytest.approx(record["valid_bits_per_char"], rel=1e-5)
