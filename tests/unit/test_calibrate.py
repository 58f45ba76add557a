"""Two factors for a trained model: found where its cost is least, kept in its weights, and nothing else."""

from __future__ import annotations

import itertools
import math
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.nn.utils import parametrizations, prune

from made_runs import Tiny, run, weights
from mulstm import checkpoint, outcome, recipe
from mulstm.calibrate import Calibration, calibrate
from mulstm.errors import MulstmError, RecipeError, RunInterruptedError
from mulstm.nn.model import LanguageModel
from mulstm.recipe import CELLS, ModelRecipe


def model_of(cell: str = "mlstm", **more: object) -> LanguageModel:
    return LanguageModel(ModelRecipe(cell=cell, hidden=8, **more), 5)  # type: ignore[arg-type]


def bowl(model: LanguageModel, logits: float, recurrent: float, part: str) -> float:
    """A cost that is least where the model's two parts are so many times as long as in `start_of`."""
    start = start_of(model, part)
    factors = [float(now.norm() / then) for now, then in zip(parts_of(model, part), start, strict=True)]
    return 1.0 + math.log(factors[0] / logits) ** 2 + 2 * math.log(factors[1] / recurrent) ** 2


STARTS: dict[int, list[float]] = {}


def parts_of(model: LanguageModel, part: str) -> list[torch.Tensor]:
    return [model.W_out.detach(), dict(model.layers[0].named_parameters())[part].detach()]


def start_of(model: LanguageModel, part: str) -> list[float]:
    return STARTS.setdefault(id(model), [float(tensor.norm()) for tensor in parts_of(model, part)])


@pytest.mark.parametrize("least", [(0.9, 0.85), (1.0, 0.97), (1.13, 1.0), (0.71, 1.2)])
@pytest.mark.parametrize("normed", [True, False])
def test_the_least_cost_is_found(least: tuple[float, float], normed: bool) -> None:
    model, part = model_of(weight_norm=normed), "g_zm" if normed else "W_zm"
    STARTS.clear()
    calls = 0

    def cost() -> float:
        nonlocal calls
        calls += 1
        return bowl(model, *least, part)

    found = calibrate(model, cost)
    assert found.before == pytest.approx(1 + math.log(least[0]) ** 2 + 2 * math.log(least[1]) ** 2)
    assert found.after == pytest.approx(cost(), abs=1e-7)
    assert found[:2] == pytest.approx(least, rel=1.5e-2)
    assert calls < 35


def test_all_else_stays_and_the_bias_goes_with_the_logits() -> None:
    model = model_of(weight_norm=True)
    with torch.no_grad():
        model.b_out.copy_(torch.arange(5.0))  # type: ignore[union-attr]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    STARTS.clear()
    found = calibrate(model, lambda: bowl(model, 0.9, 0.8, "g_zm"))
    factors = {"W_out": found.logits, "b_out": found.logits, "layers.0.g_zm": found.recurrent}
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name] * factors.get(name, 1.0)), name


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("cell", CELLS)
def test_a_cost_that_only_falls_is_not_followed_for_ever(cell: str, normed: bool) -> None:
    """Ten steps in each of two searches; and of every cell it is the matrix that acts that is scaled."""
    model, costs = model_of(cell, weight_norm=normed), itertools.count(0, -1)

    def acting() -> list[torch.Tensor]:
        w = model.layers[0].weights(torch.float32)
        matrices = (model.W_out, w.W_zm if w.W_hh is None else w.W_hh)
        return [matrix.detach().clone() for matrix in matrices]

    before = acting()
    found = calibrate(model, lambda: next(costs))
    assert found[:2] == pytest.approx([0.94**20] * 2)
    for now, was in zip(acting(), before, strict=True):
        torch.testing.assert_close(now, was * 0.94**20)


def test_a_model_without_a_bias_of_its_logits() -> None:
    model = model_of(output_bias=False)
    STARTS.clear()
    assert calibrate(model, lambda: bowl(model, 0.9, 0.8, "W_zm")).logits == pytest.approx(0.9, rel=1.5e-2)


@pytest.mark.parametrize("cost", [1.0, math.nan, math.inf])
def test_where_nothing_is_gained_nothing_changes(cost: float) -> None:
    model = model_of()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert calibrate(model, lambda: cost)[:2] == (1.0, 1.0)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_gain_not_worth_mentioning_changes_nothing() -> None:
    model = model_of()
    STARTS.clear()
    found = calibrate(model, lambda: 1e-3 * bowl(model, 0.95, 0.95, "W_zm"))
    assert found == (1.0, 1.0, found.before, found.before)


def test_a_search_that_is_broken_off_leaves_the_model_as_it_was() -> None:
    model, costs = model_of(weight_norm=True), iter([2.0, 1.9, 1.8, 1.9])
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(StopIteration):
        calibrate(model, lambda: next(costs))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("cell", CELLS)
def test_every_cell_has_both_factors(cell: str) -> None:
    model = model_of(cell, layers=1)
    x = torch.randint(5, (2, 6), generator=torch.Generator().manual_seed(1))
    logits, _ = model(x)
    found = calibrate(model, lambda: float((model(x)[0] - 0.5 * logits).square().sum()))
    assert found.logits < 0.9
    recurrent = [t for name, t in model.layers[0].named_parameters() if name in ("W_zm", "W_hh")]
    assert len(recurrent) == 1


def test_what_is_made_anew_cannot_be_scaled() -> None:
    model = model_of()
    prune.l1_unstructured(model.layers[-1], "W_zm", 0.5)
    other = model_of()
    parametrizations.weight_norm(other, "W_out")
    for one in (model, other):
        with pytest.raises(MulstmError, match=r"cannot be scaled\. Make them part of its weights first"):
            calibrate(one, lambda: 1.0)


@pytest.fixture
def little_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipe, "VALID_LANE", 1)


def overfitted(tiny: Tiny, *more: str) -> recipe.Recipe:
    """A run whose model is far too sure of itself: its training text is short, its updates are many."""
    return tiny("evaluate.calibrate=true", "train.updates=60", "optimiser.rate=3e-2", *more)


@pytest.mark.usefixtures("little_is_enough")
def test_a_run_with_it_keeps_and_measures_the_calibrated_model(tiny: Tiny, tmp_path: Path) -> None:
    plain, folder = run(overfitted(tiny, "evaluate.calibrate=false"), tmp_path / "plain")
    record, with_it = run(overfitted(tiny), tmp_path / "with")
    assert "calibration" not in plain
    found = Calibration(**record["calibration"])
    assert found.after < found.before - 1e-3
    assert record["valid_bits_per_char"] < plain["valid_bits_per_char"]
    was, now = weights(folder), weights(with_it)
    assert torch.equal(now["W_out"], was["W_out"] * found.logits)
    assert {name for name in was if not torch.equal(was[name], now[name])} <= {
        "W_out",
        "b_out",
        "layers.0.W_zm",
        "layers.0.g_zm",
    }
    loaded = checkpoint.load(with_it / "last.safetensors")
    assert record["fingerprint"] == loaded.meta["fingerprint"]
    assert loaded.meta["metrics"]["valid_bits_per_char"] == found.after
    assert loaded.meta["metrics"]["update"] == 60
    # What training would go on from is the model as it was trained.
    state = weights(with_it, "resume")
    assert any(torch.equal(tensor, was["W_out"]) for tensor in state.values())


@pytest.mark.usefixtures("little_is_enough")
def test_with_patience_the_best_model_is_calibrated(tiny: Tiny, tmp_path: Path) -> None:
    patient = ("evaluate.patience=3", "train.save_every=1e-9")
    record, folder = run(overfitted(tiny, *patient), tmp_path)
    best = checkpoint.load(folder / "best.safetensors")
    assert record["fingerprint"] == best.meta["fingerprint"]
    assert best.meta["metrics"]["update"] == record["best_valid_update"]


@pytest.mark.usefixtures("little_is_enough")
def test_a_run_that_is_measured_again_comes_to_the_same(tiny: Tiny, tmp_path: Path) -> None:
    for more in ((), ("evaluate.patience=3",)):
        record, folder = run(overfitted(tiny, *more), tmp_path / str(len(more)))
        (folder / "metrics.json").unlink()
        again, _ = run(overfitted(tiny, *more), tmp_path / str(len(more)), resume_from=str(folder))
        assert again["fingerprint"] == record["fingerprint"]
        assert again["test_bits_per_char"] == record["test_bits_per_char"]
        assert again["calibration"] == record["calibration"]


@pytest.mark.usefixtures("little_is_enough")
def test_a_run_whose_time_was_over_goes_on_with_the_model_as_it_was_trained(
    tiny: Tiny, tmp_path: Path
) -> None:
    recipe = overfitted(tiny)
    cut, folder = run(recipe, tmp_path / "cut", minutes=1e-9)
    assert (cut["updates"], cut["complete"]) == (1, False)
    assert cut["calibration"]["after"] < cut["calibration"]["before"]
    record, _ = run(recipe, tmp_path / "cut", resume_from=str(folder))
    assert record["fingerprint"] == run(recipe, tmp_path / "whole")[0]["fingerprint"]


@pytest.mark.usefixtures("little_is_enough")
def test_a_signal_meanwhile_loses_nothing(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes while a model is measured whose weights are scaled for a trial."""

    def broken_off(model: LanguageModel, cost: Callable[[], float]) -> Calibration:
        costs = iter([cost(), cost() - 1])

        def ended() -> float:
            if (found := next(costs, None)) is not None:
                return found
            os.kill(os.getpid(), signal.SIGINT)
            return cost()

        return calibrate(model, ended)

    with monkeypatch.context() as patch:
        patch.setattr(outcome, "calibrate", broken_off)
        with pytest.raises(RunInterruptedError, match="while measuring"):
            run(overfitted(tiny), tmp_path / "one")
    record, _ = run(overfitted(tiny), tmp_path / "one", resume_from="auto")
    assert record["fingerprint"] == run(overfitted(tiny), tmp_path / "other")[0]["fingerprint"]


def test_it_wants_a_validation_part(tiny: Tiny) -> None:
    with pytest.raises(RecipeError, match=r"evaluate\.calibrate needs a validation part"):
        overfitted(tiny, "data.split=95-0-5")


@pytest.mark.parametrize(("lanes", "is_calibrated"), [(1, True), (2, False)])
def test_too_little_text_at_a_stretch_is_not_calibrated_by(
    lanes: int, is_calibrated: bool, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = overfitted(tiny, f"evaluate.lanes={lanes}", "evaluate.symbols=100")
    monkeypatch.setattr(recipe, "VALID_LANE", 100)
    record, _ = run(asked, tmp_path)
    assert ("calibration" in record) == is_calibrated
