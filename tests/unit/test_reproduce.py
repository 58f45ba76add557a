"""Tables made again: what is trained, what is left as it is, and what happens when it is interrupted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from made_runs import Tiny
from mulstm import adapt, reproduce, runs
from mulstm import recipe as recipes
from mulstm.divergence import DivergedError
from mulstm.errors import DataError, RecipeError, RunError, RunInterruptedError
from mulstm.recipe import Recipe
from mulstm.report.records import CUT, CUT_SHORT

SCORES = {"valid_bits_per_char": 1.4, "test_bits_per_char": 1.41}


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The runs that were asked for; each ends at once."""
    asked: list[str] = []

    def train(recipe: Recipe, **more: Any) -> tuple[dict[str, Any], Path]:
        asked.append(f"{recipe.name} {recipe.train.seed}")
        values = dict.fromkeys(("hardware", "backend", "commit"), "some") | SCORES
        values |= dict.fromkeys(
            ("parameters", "test_symbols", "evaluate_lanes", "epochs", "updates", "train_seconds"), 10
        )
        values |= {"recipe": recipe.name, "table": recipe.table, "row": recipe.row, "kind": recipe.kind}
        values |= {"precision": recipe.train.precision, "reason": "", "settings": recipes.settings(recipe)}
        with runs.Run.create(recipe, root=more["runs_dir"]) as run:
            run.write_json("metrics.json", values | {"seed": recipe.train.seed, "complete": True})
        return values, run.path

    monkeypatch.setattr(reproduce, "train", train)
    monkeypatch.chdir(tmp_path)
    return asked


def test_only_what_is_missing_is_trained(trained: list[str]) -> None:
    rows = reproduce.rows("hutter", "mlstm")
    assert [r.name for r in rows] == ["hutter/mlstm", "hutter/mlstm-fast"]
    made = reproduce.reproduce(rows, note=lambda _: None)
    assert [str(path) for path in made] == [f"results/{r.name}/seed1.json" for r in rows]
    told: list[str] = []
    made = reproduce.reproduce(rows[1:], seeds=(1, 2), note=told.append)
    assert [str(path) for path in made] == ["results/hutter/mlstm-fast/seed2.json"]
    again = "With another --results and --runs-dir it is made again."
    assert told == [
        f"hutter/mlstm-fast, seed 1: measured already. {again}",
        "hutter/mlstm-fast, seed 2",
    ]
    assert reproduce.reproduce(rows[1:], precision="fp32", note=told.append) == []
    assert told[2:] == [f"hutter/mlstm-fast, seed 1: measured already, in bf16. {again}"]
    assert trained == ["hutter/mlstm 1", "hutter/mlstm-fast 1", "hutter/mlstm-fast 2"]


@pytest.mark.parametrize("text", ["{", "3", "{}", None])
def test_a_record_that_does_not_count_is_made_again(trained: list[str], text: str | None) -> None:
    rows = [recipes.load("ptb/mlstm-fast")]
    (path,) = reproduce.reproduce(rows, note=lambda _: None)
    whole = path.read_text()
    path.write_text(json.dumps(json.loads(whole) | {"complete": False}) if text is None else text)
    assert reproduce.reproduce(rows, note=lambda _: None) == [path]
    assert path.read_text() == whole
    assert len(trained) == 2


def test_rows_that_are_not_there() -> None:
    with pytest.raises(RecipeError, match=r"no table 'huter'\. Choose one of: hutter, ptb, text8, wikitext2"):
        reproduce.rows("huter")
    with pytest.raises(RecipeError, match=r"no row 'mlstm-fast'\. Choose one of: .*, milstm, mlstm, "):
        reproduce.rows("hutter", "mlstm-fast")
    with pytest.raises(RecipeError, match=r"has no fast recipe\. Leave --fast out: it has a faithful one"):
        reproduce.rows("hutter", "lstm-stacked-matched", ("fast",))


def test_an_interrupted_table_goes_on_with_the_same_command(
    trained: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(recipe: Recipe, **more: Any) -> None:
        raise RunInterruptedError(
            "Interrupted at update 5 of 9; everything is saved", "Go on with something else.", 2
        )

    monkeypatch.setattr(reproduce, "train", stopped)
    with pytest.raises(RunInterruptedError) as caught:
        reproduce.reproduce(reproduce.rows("ptb"), note=lambda _: None)
    assert str(caught.value) == (
        "Interrupted at update 5 of 9; everything is saved. Give the same command again: it goes on there."
    )
    assert caught.value.exit_code == 130


def test_what_cannot_be_is_told_before_any_training(trained: list[str]) -> None:
    rows = reproduce.rows("ptb")
    with pytest.raises(RecipeError, match=r"train\.seed = -1"):
        reproduce.reproduce(rows, seeds=(1, -1), note=lambda _: None)
    with pytest.raises(RunError, match=r"Nothing can be written into /proc \(.*\)\. Choose another place"):
        reproduce.reproduce(rows, results=Path("/proc"), note=lambda _: None)
    assert trained == []


def test_a_run_that_had_its_time_is_left_unless_it_gets_more(trained: list[str]) -> None:
    rows = [recipes.load("ptb/mlstm")]
    (path,) = reproduce.reproduce(rows, note=lambda _: None)
    cut = json.loads(path.read_text()) | {"complete": False, "train_seconds": 125.0}
    for minutes, stopped, expected in (
        (2.0, CUT, []),
        (2.1, CUT, [path]),
        (0.0, CUT, [path]),
        (2.0, "", [path]),  # it does not count for another reason
    ):
        path.write_text(json.dumps(cut | {"stopped": stopped}))
        assert reproduce.reproduce(rows, minutes=minutes, note=lambda _: None) == expected


def test_a_slower_machine_does_not_replace_a_run_that_came_further(
    trained: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [recipes.load("ptb/mlstm")]
    (path,) = reproduce.reproduce(rows, note=lambda _: None)
    cut = json.loads(path.read_text()) | {"complete": False, "stopped": CUT, "reason": f"{CUT_SHORT} a while"}
    made = reproduce.train

    def slow(recipe: Recipe, **more: Any) -> tuple[dict[str, Any], Path]:
        values, folder = made(recipe, **more)
        (folder / "metrics.json").write_text(json.dumps(cut | {"epochs": 1.5, "train_seconds": 60.0}))
        return values, folder

    monkeypatch.setattr(reproduce, "train", slow)
    told: list[str] = []
    for epochs, expected in ((2.5, []), (0.5, [path])):
        path.write_text(json.dumps(cut | {"epochs": epochs, "train_seconds": 9.0}))
        assert reproduce.reproduce(rows, minutes=1.0, note=told.append) == expected
    assert told[1] == "ptb/mlstm, seed 1: the earlier record came further (2.5 epochs) and stays."
    assert json.loads(path.read_text())["epochs"] == 1.5
    assert reproduce.reproduce(rows, minutes=1.0, note=told.append) == []
    assert "measured already, cut short after 1.5 epochs." in told[-1]


def test_a_run_that_diverges_keeps_no_other_from_being_made(
    trained: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = reproduce.train

    def train(recipe: Recipe, **more: Any) -> tuple[dict[str, Any], Path]:
        if recipe.name == "ptb/mlstm":
            raise DivergedError("The gradient is not finite. ", "Lower the rate.")
        return made(recipe, **more)

    monkeypatch.setattr(reproduce, "train", train)
    told: list[str] = []
    with pytest.raises(DivergedError, match="not finite"):
        reproduce.reproduce(reproduce.rows("ptb"), note=told.append)
    assert trained == ["ptb/mlstm-fast 1"]
    assert Path("results/ptb/mlstm-fast/seed1.json").is_file()
    assert told == [
        "ptb/mlstm, seed 1",
        "The gradient is not finite. Lower the rate.",
        "ptb/mlstm-fast, seed 1",
    ]


def test_time_precision_and_places_reach_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[tuple[str, float]] = []
    places = {"runs_dir": tmp_path / "r", "data_dir": tmp_path / "d", "device": "cpu"}

    def train(recipe: Recipe, *, minutes: float, **more: Any) -> None:
        seen.append((recipe.train.precision, minutes))
        assert more == places | {"resume_from": "auto"}
        raise RunError("enough")

    monkeypatch.setattr(reproduce, "train", train)
    monkeypatch.chdir(tmp_path)
    for precision in ("", "bf16"):
        with pytest.raises(RunError, match="enough"):
            reproduce.reproduce(
                [recipes.load("ptb/mlstm")], precision=precision, minutes=3.0, note=lambda _: None, **places
            )
    assert seen == [("fp32", 3.0), ("bf16", 3.0)]


def test_a_recipe_that_has_changed_is_run_again(trained: list[str]) -> None:
    rows = [recipes.load("ptb/mlstm")]
    (path,) = reproduce.reproduce(rows, note=lambda _: None)
    record, same = json.loads(path.read_text()), recipes.settings(rows[0])
    for settings, expected in ((same, []), (same | {"train.lanes": 7}, [path])):
        path.write_text(json.dumps(record | {"settings": settings}))
        assert reproduce.reproduce(rows, note=lambda _: None) == expected


def test_a_recipe_that_asks_for_dynamic_evaluation_has_it_in_its_record(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    recipe, told = replace(tiny("dynamic.rate=1e-4", "dynamic.segment=10"), name="mine"), list[str]()
    where = {"results": tmp_path / "results", "runs_dir": tmp_path / "runs", "note": told.append}
    (path,) = reproduce.reproduce([recipe], **where)
    first = json.loads(path.read_text())
    assert (first["dynamic_rate"], first["dynamic_segment"]) == (1e-4, 10)
    assert first["dynamic_test_bits_per_char"] < first["test_bits_per_char"]
    assert told == ["mine, seed 1", "mine, seed 1, dynamic evaluation"]
    # It is not made again, but where it is missing or another one, as long as the run is there.
    assert reproduce.reproduce([recipe], **where) == []
    assert len(told) == 3
    path.write_text(json.dumps(first | {"dynamic_rate": 2e-4, "dynamic_test_bits_per_char": 1.0}))
    assert reproduce.reproduce([recipe], **where) == []
    again = json.loads(path.read_text())
    assert again["dynamic_test_bits_per_char"] == first["dynamic_test_bits_per_char"]
    (tmp_path / "runs").rename(tmp_path / "elsewhere")
    path.write_text(json.dumps({k: v for k, v in first.items() if not k.startswith("dynamic_")}))
    reproduce.reproduce([recipe], **where)
    assert told[-1].endswith(f"left out, because the record's run is not in {tmp_path / 'runs'}.")


def test_a_dynamic_evaluation_that_fails_keeps_nothing_else_from_being_made(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise DataError("The part is too short. Give a shorter segment.")

    monkeypatch.setattr(adapt, "prepare", fail)
    recipes_ = [replace(tiny(*more), name=name) for name, more in (("a", ("dynamic.rate=1e-4",)), ("b", ()))]
    told: list[str] = []
    where = {"results": tmp_path / "results", "runs_dir": tmp_path / "runs", "note": told.append}
    why = "a, seed 1: without its dynamic evaluation. The part is too short. Give a shorter segment."
    with pytest.raises(reproduce.LeftOutError) as caught:
        reproduce.reproduce(recipes_, **where)
    assert str(caught.value) == why
    assert told == ["a, seed 1", "a, seed 1, dynamic evaluation", why, "b, seed 1"]
    assert all((tmp_path / "results" / name / "seed1.json").is_file() for name in "ab")


def test_dynamic_evaluation_wants_one_process(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, told = replace(tiny("dynamic.rate=1e-4"), name="mine"), list[str]()
    where = {"results": tmp_path / "results", "runs_dir": tmp_path / "runs", "note": told.append}
    run = reproduce.train

    def train(*given: Any, **more: Any) -> tuple[dict[str, Any], Path]:
        found = run(*given, **more)
        monkeypatch.setenv("WORLD_SIZE", "2")
        return found

    monkeypatch.setattr(reproduce, "train", train)
    (path,) = reproduce.reproduce([recipe], **where)
    assert "dynamic_rate" not in json.loads(path.read_text())
    assert "The same command without torchrun adds it" in told[-1]
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    reproduce.reproduce([recipe], **where)
    assert json.loads(path.read_text())["dynamic_rate"] == 1e-4
