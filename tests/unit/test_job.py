"""A job: what it is made of, what falls due when, and what every process has of it."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from made_runs import Tiny
from mulstm import job, parallel, train
from mulstm import recipe as recipes
from mulstm.errors import DataError
from mulstm.evaluate import Evaluation
from mulstm.nn import packed
from mulstm.ops import cuda_driver
from mulstm.outcome import Outcome
from mulstm.recipe import ModelRecipe


def built(recipe: recipes.Recipe, stack: ExitStack, folder: Path) -> job.Job:
    share = parallel.Share()
    return job.build(recipe, share, stack, runs_dir=folder, path=None, data_dir=None, start_from=None)


def test_validation_records_are_not_counted_between_validations(tiny: Tiny, tmp_path: Path) -> None:
    asked = []

    class Parts:
        def split(self, name: str) -> Any:
            asked.append(name)
            return type("Part", (), {"symbols_count": 5})

    with ExitStack() as stack:
        found = built(tiny("evaluate.every=4"), stack, tmp_path)
        found.corpus = Parts()  # type: ignore[assignment]
        found.progress.update = 3
        assert (found.is_validation_due, asked) == (False, [])
        found.progress.update = 4
        assert (found.is_validation_due, asked) == (True, ["valid"])


def test_a_validation_is_logged_between_two_lines(tiny: Tiny, tmp_path: Path) -> None:
    with ExitStack() as stack:
        found = built(tiny(), stack, tmp_path)
        found.total = 4 * job.LOG_LINES
        found.progress.update = 5
        assert not found.is_log_due
        found.progress.validated = 5
        assert found.is_log_due


def test_the_seed_decides_where_a_run_starts(tiny: Tiny, tmp_path: Path) -> None:
    starts = []
    for seed in (1, 1, 2):
        with ExitStack() as stack:
            made = built(tiny(f"train.seed={seed}"), stack, tmp_path)
            starts.append(made.update.model.W_out.detach())
    assert torch.equal(starts[0], starts[1])
    assert not torch.equal(starts[0], starts[2])


def test_masks_are_not_drawn_as_the_weights_were(tiny: Tiny, tmp_path: Path) -> None:
    recipe = tiny("model.embedding=8", "init.embedding_range=1.0", "dropout.embedding=0.5")
    with ExitStack() as stack:
        made = built(recipe, stack, tmp_path)
        drawn = torch.rand(8, generator=made.update.generator)
        start = made.update.model.embedding.flatten()[:8]
    assert not torch.allclose(2 * drawn - 1, start, atol=1e-3)


@pytest.mark.parametrize("total", [9, 19, 25, 2005])
def test_at_most_ten_validations_and_the_last_at_the_end(tiny: Tiny, tmp_path: Path, total: int) -> None:
    with ExitStack() as stack:
        found = built(tiny("evaluate.every=0"), stack, tmp_path)
        found.total = total
        due = []
        for found.progress.update in range(1, total + 1):
            if found.is_validation_due:
                due.append(found.progress.update)
    assert 5 <= len(due) <= 10
    assert due[-1] == total


def test_every_process_returns_what_the_first_measured(tiny: Tiny, tmp_path: Path) -> None:
    """And looks at no file itself: the first may be writing it."""
    measured = {"test": Evaluation(nats=2.0, symbols=3, words=None, seconds=1.0)}

    class Other(parallel.Share):
        def by_first(self, work: Any) -> Any:
            return Outcome(measured, None), 5.0, "of the calibrated model"

    with ExitStack() as stack:
        found = built(tiny("evaluate.patience=1"), stack, tmp_path)
        found.share = Other(rank=1, count=2)
        found.progress.best_bits = 1.0
        record = train.finish(found)
    assert record["test_bits_per_char"] == measured["test"].bits_per_char
    assert (record["evaluate_seconds"], record["fingerprint"]) == (5.0, "of the calibrated model")


@pytest.mark.parametrize(("epochs", "total"), [(0.29, 39), (1.4, 188), (0.001, 1)])
def test_parts_of_an_epoch_are_rounded(tiny: Tiny, tmp_path: Path, epochs: float, total: int) -> None:
    with ExitStack() as stack:
        found = built(tiny("train.updates=0", f"train.epochs={epochs}"), stack, tmp_path)
        assert (found.per_epoch, found.total) == (134, total)


def test_more_lanes_than_any_memory_holds_are_told_of_as_lanes(tiny: Tiny, tmp_path: Path) -> None:
    with ExitStack() as stack, pytest.raises(DataError, match="too few for 999999999999 x 10"):
        built(tiny("train.lanes=999999999999"), stack, tmp_path)


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (("model.hidden=1900",), "they need an NVIDIA GPU"),
        (("model.hidden=32",), "they need an NVIDIA GPU"),
        (("train.backend=fused",), "the backend fused does not make them"),
        (("data.records=lines", "data.alphabet=bytes"), "records begin inside chunks"),
        (("dropout.hidden=0.72",), "h grows beyond them behind a dropout of 0.72 (up to 0.7 they serve)"),
        (("dropout.hidden=0.7",), "they need an NVIDIA GPU"),
    ],
)
def test_a_run_without_the_8_bit_products_it_asks_for_is_one_in_bf16(
    tiny: Tiny, tmp_path: Path, capsys: pytest.CaptureFixture[str], more: tuple[str, ...], why: str
) -> None:
    recipe = tiny("train.precision=fp8", "train.lanes=8", *more)
    assert job.no_eight(recipe, parallel.Share()) == why
    assert (
        job.no_eight(replace(recipe, train=replace(recipe.train, precision="bf16")), parallel.Share()) is None
    )
    if recipe.model.hidden > 100:
        return  # too large to be trained here
    record, _ = train.train(recipe, runs_dir=tmp_path / "runs", device="cpu")
    assert record["precision"] == "bf16"
    assert f"8-bit products are not to be had here ({why}): the run is one in bf16" in capsys.readouterr().err


def test_models_without_8_bit_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Told where a GPU could have made them; elsewhere the GPU is what is lacking."""
    monkeypatch.setattr(cuda_driver, "why_not", lambda device: None)
    monkeypatch.setattr(packed, "_objection", lambda device: None)

    def why(**more: Any) -> str | None:
        return packed.no_eight(ModelRecipe(**more), 8, False, torch.device("cpu"))

    assert why(hidden=32) == "32 units in 8 lanes have no kernels for them"
    assert why(cell="lstm", hidden=1900) == "the lstm has no kernels for them"
