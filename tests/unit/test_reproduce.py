"""Tables made again: what is trained, what is left as it is, and what happens when it is interrupted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mulstm import recipe as recipes
from mulstm import reproduce, runs
from mulstm.recipe import Recipe

SCORES = {"valid_bits_per_char": 1.4, "test_bits_per_char": 1.41}


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """The runs that were asked for; each ends at once."""
    asked: list[str] = []

    def train(recipe: Recipe, **more: Any) -> tuple[dict[str, Any], Path]:
        asked.append(f"{recipe.name} {recipe.train.seed}")
        values = dict.fromkeys(("hardware", "precision", "backend", "commit"), "some") | SCORES
        values |= dict.fromkeys(
            ("parameters", "test_symbols", "evaluate_lanes", "epochs", "updates", "train_seconds"), 10
        )
        values |= {"recipe": recipe.name, "table": recipe.table, "row": recipe.row, "kind": recipe.kind}
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
    assert told == ["hutter/mlstm-fast, seed 1: measured already.", "hutter/mlstm-fast, seed 2"]
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
