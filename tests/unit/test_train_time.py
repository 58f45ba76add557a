"""A run whose time is over is measured as it is, and goes on when it is given more."""

from __future__ import annotations

import math
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from made_runs import RICH, Tiny, at_update, run, same, weights
from mulstm import checkpoint, job, outcome, parallel, runs, train
from mulstm.errors import RunInterruptedError
from mulstm.resume import Progress


def test_a_run_whose_time_is_over_is_recorded_as_it_is_and_goes_on(tiny: Tiny, tmp_path: Path) -> None:
    recipe = tiny(*RICH)
    _, whole = run(recipe, tmp_path / "whole")
    record, cut = run(recipe, tmp_path / "cut", minutes=1e-9)
    assert (record["updates"], record["stopped"], record["complete"]) == (1, "its time was over", False)
    assert record["reason"].startswith("cut short after")
    assert record["reason"].endswith("of updates, 0.17 of 2.833 epochs")
    assert record["test_bits_per_char"] > 0
    assert [line["update"] for line in runs.read_log(cut)] == [1]
    again, _ = run(recipe, tmp_path / "cut", minutes=1e-9, resume_from="auto")
    assert again["updates"] == 1  # it had its time before
    done, folder = run(recipe, tmp_path / "cut", minutes=60, resume_from="auto")
    assert folder == cut
    assert (done["updates"], done["stopped"], done["complete"]) == (17, "", True)
    assert same(weights(whole), weights(cut))
    _, rest = run(recipe, tmp_path / "cut", resume_from="auto")
    assert rest == cut  # nothing is left to do


def test_a_run_whose_time_is_over_ends_its_log_between_two_lines(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job, "LOG_LINES", 2)
    recipe = tiny("evaluate.every=12")
    _, cut = run(recipe, tmp_path, minutes=1e-9)
    assert [line["update"] for line in runs.read_log(cut)] == [1]
    run(recipe, tmp_path, resume_from="auto")
    assert [line["update"] for line in runs.read_log(cut)] == [1, 6, 12]


def test_a_run_that_had_its_time_before_it_was_interrupted_ends_its_log_there(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job, "LOG_LINES", 2)
    recipe = tiny("evaluate.every=12")
    at_update(monkeypatch, 3, lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(RunInterruptedError):
        run(recipe, tmp_path)
    record, folder = run(recipe, tmp_path, minutes=1e-9, resume_from="auto")
    assert [line["update"] for line in runs.read_log(folder)] == [record["updates"]] == [3]


def cut_at_six(monkeypatch: pytest.MonkeyPatch, costs: dict[int, float]) -> list[Progress]:
    """Validation costs so much after so many updates, and a run's time, where it has one, is over after six.

    Each run leaves its progress in the list.
    """
    seen: list[Progress] = []

    def watch(work: job.Job) -> None:
        seen.append(work.progress)
        if work.limit < math.inf:
            at_update(monkeypatch, 6, lambda: setattr(work, "limit", 0.0))
        updates(work)

    def valid(*given: Any, **named: Any) -> Any:
        return SimpleNamespace(bits_per_char=costs[seen[-1].update], symbols=9)

    updates = train.run_updates
    monkeypatch.setattr(outcome, "evaluate", valid)
    monkeypatch.setattr(train, "run_updates", watch)
    return seen


@pytest.mark.parametrize(("last", "best"), [(4.0, 6), (5.5, 5), (6.0, 5)])
def test_the_last_model_of_a_run_whose_time_is_over_may_be_its_best(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: float, best: int
) -> None:
    recipe = tiny("evaluate.every=5", "evaluate.patience=2")
    seen = cut_at_six(monkeypatch, {5: 5.0, 6: last, 10: 5.2, 12: 5.1})
    record, folder = run(recipe, tmp_path, minutes=60)
    assert (record["updates"], record["best_valid_update"], record["complete"]) == (6, best, False)
    assert checkpoint.load(folder).meta["metrics"]["update"] == best
    assert runs.read_log(folder)[-1]["valid_bits_per_char"] == last
    assert seen[0].stale == 0  # a whole run has no validation here
    record, _ = run(recipe, tmp_path, resume_from="auto")
    assert (record["updates"], record["best_valid_update"], record["stopped"]) == (12, best, "")


def test_where_a_run_was_cut_does_not_decide_when_it_stops(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tiny("evaluate.every=4", "evaluate.patience=1", "train.updates=16")
    cut_at_six(monkeypatch, {4: 5.0, 6: 4.0, 8: 4.5, 12: 4.6, 16: 3.0})
    whole, _ = run(recipe, tmp_path / "whole")
    cut, _ = run(recipe, tmp_path / "cut", minutes=60)
    assert (cut["updates"], cut["best_valid_update"]) == (6, 6)
    done, _ = run(recipe, tmp_path / "cut", resume_from="auto")
    assert (done["updates"], done["stopped"]) == (whole["updates"], whole["stopped"])
    assert (done["updates"], done["best_valid_update"]) == (12, 6)


@pytest.mark.parametrize(
    ("ending", "updates", "stopped"),
    [
        (("train.updates=1",), 1, ""),
        (("evaluate.every=1", "evaluate.patience=1"), 2, "1 validations without a gain"),
        (("evaluate.every=1", "evaluate.patience=1", "train.updates=2"), 2, ""),  # its last one anyway
    ],
)
def test_time_that_ends_with_the_run_cuts_nothing(
    tiny: Tiny,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ending: tuple[str, ...],
    updates: int,
    stopped: str,
) -> None:
    costs = iter([5.0, 6.0])
    monkeypatch.setattr(
        outcome, "evaluate", lambda *g, **n: SimpleNamespace(bits_per_char=next(costs), symbols=9)
    )
    seconds = 0.0
    for _ in range(updates):  # each time long enough for one update
        record, _ = run(tiny(*ending), tmp_path, minutes=(seconds + 1e-6) / 60, resume_from="auto")
        seconds = record["train_seconds"]
    assert (record["updates"], record["stopped"], record["complete"]) == (updates, stopped, True)


def test_the_first_of_several_processes_looks_at_the_clock(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallel.Share, "first", property(lambda share: False))
    record, _ = run(tiny(), tmp_path, minutes=1e-9)
    assert (record["updates"], record["complete"]) == (12, True)


def test_a_run_that_goes_on_has_no_record_of_before(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, cut = run(tiny(), tmp_path, minutes=1e-9)
    assert (cut / "metrics.json").is_file()
    at_update(monkeypatch, 3, lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(RunInterruptedError):
        run(tiny(), tmp_path, resume_from="auto")
    assert not (cut / "metrics.json").exists()
