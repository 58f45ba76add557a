"""Searches: short runs compared on validation, kept line by line, the test part unread."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import signal
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from made_runs import at_update
from mulstm import evaluate, job, outcome, parallel, report, search, train
from mulstm import recipe as recipes
from mulstm.divergence import DivergedError
from mulstm.errors import DataError, RecipeError, RunError, RunInterruptedError
from mulstm.recipe import Recipe
from mulstm.report import trials

Tiny = Callable[..., Recipe]


def trial(tiny: Tiny, *changes: str) -> search.Trial:
    return search.Trial(changes, tiny("train.updates=6", *changes))


def test_axes_are_combined() -> None:
    assert search.combinations(["a.x=1, 2", "b.y=p"]) == [("a.x=1", "b.y=p"), ("a.x=2", "b.y=p")]
    assert search.combinations([]) == []
    for wrong in ("a.x", "=1,2", "a.x=", "a.x=1,,2"):
        with pytest.raises(RecipeError, match=r"is no list of values\. Write it as"):
            search.combinations([wrong])
    with pytest.raises(RecipeError, match=r"a\.x is tried twice\. Give all its values in one list: a\.x="):
        search.combinations(["a.x=1,2", "b.y=p", "a.x=3"])


def test_trials_are_compared_kept_and_not_run_again(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "deep" / "search.jsonl"
    asked = [trial(tiny, "optimiser.rate=1e-6"), trial(tiny, "optimiser.rate=1e-2")]
    found = search.search(asked, out=out)
    assert trials.best_first(found) == [found[1], found[0]]
    assert trials.read(out) == found
    assert [line["set"] for line in found] == [["optimiser.rate=1e-6"], ["optimiser.rate=1e-2"]]
    assert all(line["updates"] == 6 and line["stopped"] == "" for line in found)
    for key in ("valid_bits_per_char", "train_bits_per_char"):
        assert found[0]["curve"][-1][key] == found[0][key]
    assert found[0]["symbols_per_second"] > 0
    assert found[0]["epochs"] == pytest.approx(6 * 4 * 10 / 5_400, rel=0.02)

    told: list[str] = []
    monkeypatch.setattr(search, "run_updates", lambda job: pytest.fail("it was run again"))
    monkeypatch.setattr(job, "backend_of", lambda *_: pytest.fail("it may be of another machine"))
    assert search.search(asked, out=out, note=told.append) == found
    assert told == []
    monkeypatch.undo()
    out.write_text(out.read_text().rstrip("\n"))  # as an editor may leave it
    search.search([trial(tiny, "optimiser.rate=1e-3")], out=out)
    assert len(trials.read(out)) == 3


def test_trials_of_the_text_as_it_was_do_not_count(tiny: Tiny, tmp_path: Path) -> None:
    out, one = tmp_path / "search.jsonl", trial(tiny)
    text = Path(one.recipe.data.corpus)
    (before,) = search.search([one], out=out)
    text.write_bytes(text.read_bytes()[::-1])
    (after,) = search.search([one], out=out)
    assert after["valid_bits_per_char"] != before["valid_bits_per_char"]
    text.write_bytes(text.read_bytes()[::-1])
    assert search.search([one], out=out) == [before]
    # A line of an earlier version does not tell its text.
    del before["corpus"]
    out.write_text(json.dumps(before))
    assert search.search([one], out=out) == [before]
    # Nor does one from before a key was known tell that.
    del before["settings"]["evaluate.calibrate"]
    out.write_text(json.dumps(before))
    assert search.search([one], out=out) == [before]


def test_it_measures_what_training_measures(tiny: Tiny, tmp_path: Path) -> None:
    one = trial(tiny, "evaluate.final_lanes=3", "evaluate.lanes=3")
    (found,) = search.search([one], out=tmp_path / "search.jsonl")
    record, _ = train.train(one.recipe, runs_dir=tmp_path, quiet=True)
    assert found["valid_bits_per_char"] == pytest.approx(record["valid_bits_per_char"], abs=1e-6)
    assert found["parameters"] == record["parameters"]


def test_the_speed_of_a_trial_is_not_that_of_its_last_moment(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_log(folder: Path) -> list[dict[str, Any]]:
        speeds = (1.0, 30e3, 31e3, 32e3, 33e3, 900e3)
        # At first there is no line.
        return [line | {"symbols_per_second": s} for line, s in zip(real(folder), speeds, strict=False)]

    real = search.runs.read_log
    monkeypatch.setattr(search.runs, "read_log", read_log)
    (found,) = search.search([trial(tiny)], out=tmp_path / "search.jsonl")
    assert found["symbols_per_second"] == pytest.approx(31.5e3)


def test_the_test_part_is_not_read(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    measure = evaluate.evaluate

    def watched(model: Any, split: Any, *more: Any, **named: Any) -> evaluate.Evaluation:
        read.append(split.name)
        return measure(model, split, *more, **named)

    monkeypatch.setattr(outcome, "evaluate", watched)
    search.search([trial(tiny)], out=tmp_path / "search.jsonl")
    assert set(read) == {"valid"}


def test_one_that_diverges_comes_last(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = search.run_updates

    def broken(job: Any) -> None:
        if job.recipe.optimiser.rate == 1:
            raise DivergedError(
                "The loss is no longer a number at update 3", "; it stays in a. b. Start again."
            )
        run(job)

    monkeypatch.setattr(search, "run_updates", broken)
    found = search.search(
        [trial(tiny, "optimiser.rate=1"), trial(tiny, "optimiser.rate=1e-2")], out=tmp_path / "s.jsonl"
    )
    assert found[0]["valid_bits_per_char"] is None
    assert found[0]["stopped"] == "The loss is no longer a number at update 3"
    assert [row[1] for row in trials.rows(found)][1] == "diverged"
    assert trials.rows(found[:1])[0][0] == "optimiser.rate=1"  # nothing differs, and yet it was changed


def test_a_signal_ends_it_and_the_same_command_goes_on(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "search.jsonl"
    asked = [trial(tiny, "optimiser.rate=1e-3"), trial(tiny, "optimiser.rate=1e-2")]
    run = search.run_updates

    def interrupted(job: Any) -> None:
        if job.recipe.optimiser.rate == 1e-2:
            signal.raise_signal(signal.SIGTERM)
        run(job)

    monkeypatch.setattr(search, "run_updates", interrupted)
    with pytest.raises(
        RunInterruptedError, match=r"Interrupted in trial 2 of 2: .*\. The trials before it are kept"
    ) as caught:
        search.search(asked, out=out)
    assert caught.value.exit_code == 128 + signal.SIGTERM
    assert len(trials.read(out)) == 1
    monkeypatch.undo()
    assert len(search.search(asked, out=out)) == len(trials.read(out)) == 2


def test_a_signal_at_the_end_of_a_trial_ends_it_too(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "search.jsonl"
    result = search._result

    def late(*given: Any, **named: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        return result(*given, **named)

    monkeypatch.setattr(search, "_result", late)
    with pytest.raises(KeyboardInterrupt):
        search.search([trial(tiny, "optimiser.rate=1e-3"), trial(tiny, "optimiser.rate=1e-2")], out=out)
    assert len(trials.read(out)) == 1  # of what was done, nothing is lost


def test_a_trial_that_cannot_be_run_is_told_before_any_work(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "run_updates", lambda job: pytest.fail("a trial was begun"))
    with pytest.raises(DataError, match="lanes"):
        search.search([trial(tiny), trial(tiny, "train.lanes=5000")], out=tmp_path / "search.jsonl")


def test_no_trial_is_begun_after_its_time(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    asked = [trial(tiny, "optimiser.rate=1e-3"), trial(tiny, "optimiser.rate=1e-2")]
    seconds = itertools.chain([0.0, 59.0], itertools.repeat(60.0))  # the start, then a look before each trial
    monkeypatch.setattr(search, "time", types.SimpleNamespace(monotonic=seconds.__next__))
    found = search.search(asked, out=tmp_path / "search.jsonl", minutes=1.0, note=told.append)
    assert [line["set"] for line in found] == [["optimiser.rate=1e-3"]]
    assert told[-1] == (
        "The time is over before trial 2 of 2: optimiser.rate=1e-2. The same command goes on with it."
    )


def test_trials_made_before_are_told_though_the_time_is_over(tiny: Tiny, tmp_path: Path) -> None:
    out, told = tmp_path / "search.jsonl", list[str]()
    first, second, third, known = (
        trial(tiny, f"optimiser.rate={rate}") for rate in ("1e-3", "2e-3", "3e-3", "1e-2")
    )
    search.search([known], out=out)
    found = search.search([first, second, third, known], out=out, minutes=1e-9, note=told.append)
    assert [line["set"] for line in found] == [["optimiser.rate=1e-3"], ["optimiser.rate=1e-2"]]
    assert [line for line in told if "time is over" in line] == told[-1:]
    assert "before trial 2 of 4" in told[-1]


def test_a_call_runs_one_trial_however_little_time_there_is(tiny: Tiny, tmp_path: Path) -> None:
    asked = [trial(tiny, "optimiser.rate=1e-3"), trial(tiny, "optimiser.rate=1e-2")]
    for count in (1, 2):
        found = search.search(asked, out=tmp_path / "search.jsonl", minutes=1e-9)
        assert len(found) == count
    with pytest.raises(RecipeError, match="minutes=nan is no time"):
        search.search(asked, out=tmp_path / "search.jsonl", minutes=math.nan)


def test_what_cannot_be_compared(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "search.jsonl"
    with pytest.raises(DataError, match=r"The valid part of .* is empty\. Give another part or"):
        search.search([trial(tiny, "data.split=95-0-5", "evaluate.patience=0")], out=out)
    # Of several texts, too, before any work.
    pair = [trial(tiny), trial(tiny, "data.split=95-0-5", "evaluate.patience=0")]
    with pytest.raises(DataError, match=r"The valid part of .* is empty"):
        search.search(pair, out=out)
    assert out.read_text() == ""
    out.write_text("notes of mine\n")
    with pytest.raises(RunError, match=r"line 1 is no trial of a search\. Remove that line"):
        search.search([trial(tiny)], out=out)
    assert out.read_text() == "notes of mine\n"
    out.write_text('{"settings": {}}\n')
    with pytest.raises(RunError, match=r"line 1 is no trial of a search\. Remove that line"):
        trials.read(out)
    (line,) = search.search([trial(tiny)], out=tmp_path / "whole.jsonl")
    for key, value in {"valid_bits_per_char": "x", "updates": None, "settings": [], "set": None}.items():
        out.write_text(json.dumps(line | {key: value}) + "\n")
        with pytest.raises(RunError, match=r"line 1 is no trial of a search\. Remove that line"):
            trials.read(out)
    two = parallel.Share(0, 2, torch.device("cpu"))
    monkeypatch.setattr(parallel, "joined", lambda device: contextlib.nullcontext(two))
    with pytest.raises(RunError, match="in one process"):
        search.search([trial(tiny)], out=tmp_path / "other.jsonl")


def test_tables_are_made_of_them(tiny: Tiny, results: Path) -> None:
    assert "search.md" not in {path.name for path in report.write(results, None)}
    out = results / "search" / "tiny.jsonl"
    search.search([trial(tiny, "optimiser.rate=1e-6"), trial(tiny, "optimiser.rate=1e-2")], out=out)
    with out.open("a") as stream:
        stream.write(json.dumps({"note": "of another kind"}) + "\n")
    assert results / "search.md" in report.write(results, None)
    page = (results / "search.md").read_text()
    first, second = (line for line in page.splitlines() if line.startswith("| `"))
    assert first.startswith("| `optimiser.rate=0.01` | ")
    assert second.startswith("| `optimiser.rate=1e-06` | ")
    assert report.stale(results, None) == []


def test_pages_tell_what_all_trials_share(tiny: Tiny, tmp_path: Path) -> None:
    recipe = tiny("train.updates=2", "optimiser.rate=0.5")
    one = search.Trial((), replace(recipe, name="quickstart"))
    search.search([one], out=tmp_path / "search" / "tiny.jsonl")
    page = trials.markdown(tmp_path)
    (shared,) = (line for line in page.splitlines() if line.startswith("All of them with `"))
    assert "train.updates=2" in shared
    assert "optimiser.rate=0.5" in shared
    assert "train.seed" not in shared
    assert "| `as it is` | " in page
    assert trials._shared("quickstart", [{"settings": recipes.settings(recipes.load("quickstart"))}]) == ""


def test_two_searches_into_one_file_lose_nothing(tmp_path: Path) -> None:
    out = tmp_path / "s.jsonl"
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda k: search._append(out, {"n": k}), range(80)))
    assert sorted(json.loads(line)["n"] for line in out.read_text().splitlines()) == list(range(80))


def test_a_name_with_a_line_separator(tiny: Tiny, tmp_path: Path) -> None:
    out = tmp_path / "s.jsonl"
    (found,) = search.search([trial(tiny)], out=out)
    search._append(out, found | {"recipe": "a\u2028b"})
    assert [line["recipe"] for line in trials.read(out)] == [found["recipe"], "a\u2028b"]


def test_lines_tell_how_much_was_read(tiny: Tiny, tmp_path: Path) -> None:
    lines = tmp_path / "lines.txt"
    lines.write_text("".join(f"{k} is a line of thirty letters\n" for k in range(200)))
    records = ("evaluate.symbols=40", "data.records=lines", f"data.corpus={lines}", "train.rotate=false")
    asked = [trial(tiny, "evaluate.symbols=40"), trial(tiny, *records)]
    found = search.search(asked, out=tmp_path / "s.jsonl")
    assert found[0]["valid_symbols"] == 40
    assert 40 < found[1]["valid_symbols"] < 80  # records are read whole
    told = trials._told(found, "s.jsonl")
    assert "40 symbols of validation" in told
    assert f"{found[1]['valid_symbols']} symbols of validation" in told
    broken = found[0] | {"valid_symbols": 0}  # before its first validation
    assert trials._told([found[0], broken], "s.jsonl") == trials._told(found[:1], "s.jsonl")
    assert ": 0 symbols of validation" in trials._told([broken], "s.jsonl")


def test_settings_that_are_those_of_another_trial_are_told(tiny: Tiny, tmp_path: Path) -> None:
    rate = tiny().optimiser.rate
    told: list[str] = []
    asked = [trial(tiny), trial(tiny, f"optimiser.rate={rate}")]
    found = search.search(asked, out=tmp_path / "s.jsonl", note=told.append)
    assert found[1] == {**found[0], "set": [f"optimiser.rate={rate}"]}
    assert told[-1] == f"trial 2 of 2: optimiser.rate={rate}: these are the settings of the one as it is"


def test_with_patience_a_trial_is_worth_its_best(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, told = outcome.evaluate, iter([2.0, 3.0, 4.0])

    def validation(*given: Any, **named: Any) -> Any:
        found = real(*given, **named)
        return replace(found, nats=next(told) * found.symbols * math.log(2))

    monkeypatch.setattr(outcome, "evaluate", validation)
    asked = trial(tiny, "evaluate.every=2", "evaluate.patience=9")
    (found,) = search.search([asked], out=tmp_path / "search.jsonl", device="cpu")
    assert found["valid_bits_per_char"] == pytest.approx(2.0)


def test_a_trial_of_another_recipe_is_not_taken_for_this_one(tiny: Tiny, tmp_path: Path) -> None:
    out, first = tmp_path / "search.jsonl", trial(tiny).recipe
    for recipe in (first, replace(first, name="other")):
        (found,) = search.search([search.Trial((), recipe)], out=out, device="cpu")
        assert found["recipe"] == recipe.name
    assert len(trials.read(out)) == 2


def test_a_text_that_changed_meanwhile_has_no_line(
    tiny: Tiny, text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rewrite() -> None:
        with text_file.open("r+b") as file:
            file.write(b"Q" * 60)

    monkeypatch.setattr("mulstm.data.corpus.IN_MEMORY", 9)
    at_update(monkeypatch, 3, rewrite)
    with pytest.raises(RunError, match=r"The text changed during trial 1 of 1: .* Put it back as it was"):
        search.search([trial(tiny)], out=tmp_path / "s.jsonl")
    assert trials.read(tmp_path / "s.jsonl") == []
