"""`mulstm search`: what it prints, keeps and warns of."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from process import Call

from made import settings
from mulstm import record_corpus


def test_search_settings(call: Call, text_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "search.jsonl"
    given = ["search", text_file, "--try", "optimiser.rate=1e-6,1e-2", "--out", out, *settings()]
    code, told, err = call(*given, "--device", "cpu")
    assert code == 0
    assert [line.split()[0] for line in told.splitlines()[2:4]] == [
        "optimiser.rate=0.01",
        "optimiser.rate=1e-06",
    ]
    assert told.endswith(f"trials: {out}\n")
    assert "trial 2 of 2: optimiser.rate=1e-2" in err
    code, told, err = call(*given, "--trial", "optimiser.rate=1e-3 train.updates=2", "--json", "-q")
    assert (code, err) == (0, "")
    assert sorted(line["updates"] for line in json.loads(told)["trials"]) == [2, 12, 12]
    assert len(out.read_text().splitlines()) == 3
    code, told, err = call("search", text_file, "--out", out)
    assert (code, told) == (2, "")
    assert "give --try optimiser.rate=1e-3,2e-3, or --trial" in err
    assert "no closing quotation" in call("search", text_file, "--trial", 'title="a').err
    told = call(
        "search", text_file, "--trial", 'title="of mine" train.updates=1', "--json", "-q", "--out", out
    )
    assert json.loads(told.out)["trials"][0]["set"] == ["title=of mine", "train.updates=1"]


def test_every_trial_asked_for_is_in_the_answer(call: Call, text_file: Path, tmp_path: Path) -> None:
    given = ["search", text_file, "--out", tmp_path / "s.jsonl", *settings(), "--device", "cpu", "-q"]
    asked = ["optimiser.rate=1e-3", "optimiser.rate=1e-3 train.seed=1"]  # the same settings
    options = [text for trial in asked for text in ("--trial", trial)]
    found = json.loads(call(*given, *options, "--json").out)["trials"]
    assert sorted(" ".join(line["set"]) for line in found) == asked
    assert len(call(*given, *options).out.splitlines()) == 4  # two of the table's head, one trial, the file


def test_trials_that_are_too_short_to_say_anything(call: Call, text_file: Path, tmp_path: Path) -> None:
    given = ["search", text_file, "--out", tmp_path / "s.jsonl", *settings(), "--device", "cpu"]
    assert "warning: trials of 12 updates say little" in call(*given, "--try", "optimiser.rate=1e-3,1e-2").err


def test_figures_of_different_texts_are_not_to_be_compared(
    call: Call, text_file: Path, tmp_path: Path
) -> None:
    given = ["search", text_file, "--out", tmp_path / "s.jsonl", *settings(), "--device", "cpu", "-q"]
    assert call(*given, "--try", "optimiser.rate=1e-3,1e-2").err == ""
    err = call(*given, "--try", "data.split=90-5-5,50-40-10", "--try", "evaluate.lanes=1,2").err
    assert "warning: measured with different data.split, evaluate.lanes: do not compare" in err


def test_a_text_is_measured_once_for_all_trials(
    call: Call, text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads: list[object] = []
    load = record_corpus.load
    monkeypatch.setattr(record_corpus, "load", lambda *given: loads.append(given) or load(*given))
    rates = "optimiser.rate=1e-3,2e-3,3e-3,4e-3"
    given = ["search", text_file, "--try", rates, *settings("train.updates=1"), "--device", "cpu", "-q"]
    assert call(*given, "--out", tmp_path / "s.jsonl").code == 0
    assert len(loads) == 2  # to fit the recipes, and to train
