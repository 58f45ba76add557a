"""Training on records: proteins and texts of one's own, from nothing or from a model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import foreign
from made import fasta, proteins
from mulstm import checkpoint, console, interop, record_corpus, runs, train
from mulstm import recipe as recipes
from mulstm.cli import _target
from mulstm.data.alphabet import Alphabet
from mulstm.errors import DataError
from mulstm.evaluate import evaluate
from mulstm.interop import tape, unirep
from mulstm.nn.model import LanguageModel
from mulstm.recipe import ModelRecipe, Recipe
from mulstm.record_corpus import RecordLanes, RecordSplit
from mulstm.records import Record
from mulstm.scoring import scores


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_going_on_with_a_protein_model(tmp_path: Path) -> None:
    weights = unirep.from_arrays(foreign.unirep(H=8, layers=2).arrays, "unirep", "w")
    start = tmp_path / "u.safetensors"
    fingerprint = checkpoint.save(start, interop.to_model(weights), weights.alphabet, source=weights.source)
    family = ["MKTAYIAKQRQISFVKSHFSRQ" * 3 + tail for tail in proteins(30, 1, 5)]
    fasta(tmp_path / "family.fasta", family)
    settings = ["train.lanes=4", "train.chunk=16", "train.epochs=6", "optimiser.rate=0.02"]
    recipe = _target.recipe_for(str(tmp_path / "family.fasta"), settings, None, start)
    assert recipe.model == weights.recipe
    assert (recipe.data.records, recipe.data.alphabet, recipe.data.convention) == (
        "fasta",
        "protein",
        "protein",
    )
    record, folder = train.train(
        recipe, runs_dir=tmp_path / "runs", device="cpu", start_from=start, quiet=True
    )
    before = evaluate(
        checkpoint.load(start).model, record_corpus.load(recipe.data).split("valid")
    ).bits_per_char
    assert record["valid_bits_per_char"] < before - 0.5
    tuned = checkpoint.load(folder)
    assert tuned.meta["source"]["convention"] == "protein"
    assert tuned.meta["source"]["head_map"] == "unirep"
    assert tuned.meta["source"]["tuned_from"] == fingerprint
    unirep.write(interop.to_weights(tuned), tmp_path / "tuned.npz")
    assert [s.symbols for s in scores(tuned, [Record("a", b"MKT")])] == [4]


def test_a_model_without_an_output_layer_learns_one(tmp_path: Path) -> None:
    weights = tape.from_arrays(foreign.tape(head=False).arrays, "unirep", "w")
    start = tmp_path / "t.safetensors"
    checkpoint.save(start, interop.to_model(weights), weights.alphabet, source=weights.source)
    fasta(tmp_path / "p.fasta", proteins(20))
    recipe = _target.recipe_for(str(tmp_path / "p.fasta"), ["train.updates=2", "train.chunk=16"], None, start)
    folder = train.train(recipe, runs_dir=tmp_path / "a", device="cpu", start_from=start, quiet=True)[1]
    tuned = checkpoint.load(folder)
    assert "head" not in tuned.source
    assert [s.symbols for s in scores(tuned, [Record("a", b"MKT")])] == [4]
    assert tape.to_arrays(interop.to_weights(tuned))["feedforward.weight"].any()


def test_a_protein_model_takes_lines_but_no_symbol_without_a_class(tmp_path: Path) -> None:
    weights = unirep.from_arrays(foreign.unirep().arrays, "unirep", "w")
    start = tmp_path / "u.safetensors"
    checkpoint.save(start, interop.to_model(weights), weights.alphabet, source=weights.source)
    (tmp_path / "p.txt").write_text("\n".join(proteins(9)))
    settings = ["train.updates=1", "train.chunk=16"]
    recipe = _target.recipe_for(str(tmp_path / "p.txt"), settings, None, start)
    assert (recipe.data.records, recipe.data.convention) == ("lines", "protein")
    for split in ("data.split=100-0-0", "data.split = 100-0-0"):
        whole = _target.recipe_for(str(tmp_path / "p.txt"), [*settings, split], None, start)
        assert whole.evaluate.patience == 0
    (tmp_path / "gap.txt").write_text("\n".join([*proteins(9), "MK-T"]))
    recipe = _target.recipe_for(str(tmp_path / "gap.txt"), settings, None, start)
    with pytest.raises(
        DataError, match=r"Record 10 of gap\.txt has '-', which the model's output layer has no"
    ):
        train.train(recipe, runs_dir=tmp_path / "runs", device="cpu", start_from=start, quiet=True)


def test_a_column_needs_no_further_word(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("review,x\n" + "".join(f"text number {k},0\n" for k in range(9)))
    recipe = _target.recipe_for(str(tmp_path / "t.csv"), ["data.column=review"], None)
    assert (recipe.data.records, recipe.data.column) == ("csv", "review")


def test_proteins_from_nothing_and_going_on_after_a_stop(tmp_path: Path) -> None:
    fasta(tmp_path / "p.fasta", proteins(20))
    small = ["model.hidden=8", "model.embedding=4", "train.updates=6", "train.chunk=16", "evaluate.every=3"]
    recipe = _target.recipe_for(str(tmp_path / "p.fasta"), small, None)
    assert (recipe.data.alphabet, recipe.train.lanes) == ("protein", 4)
    record, folder = train.train(recipe, runs_dir=tmp_path / "a", device="cpu", quiet=True)
    assert checkpoint.load(folder).meta["source"] == {"convention": "protein"}
    assert record["updates"] == 6
    (folder / "metrics.json").unlink()
    again, _ = train.train(recipe, runs_dir=tmp_path / "a", device="cpu", resume_from=str(folder), quiet=True)
    assert again["valid_bits_per_char"] == record["valid_bits_per_char"]
    assert checkpoint.load(folder).meta["source"] == {"convention": "protein"}


@pytest.mark.parametrize(("count", "longest", "lanes"), [(60, 100, 3), (6, 9000, 5)])
def test_a_run_over_records_has_the_lanes_it_was_planned_with(
    tmp_path: Path, count: int, longest: int, lanes: int
) -> None:
    """Many short records are too few symbols for all lanes; a few long ones cannot fill them."""
    path, plain = tmp_path / "p.fasta", recipes.load("text")
    fasta(path, proteins(count, longest=longest))
    recipe = _target.recipe_for(str(path), [], None)
    assert recipe.train.lanes == lanes
    symbols = record_corpus.load(recipe.data).split("train").symbols_count
    epoch = symbols // (lanes * recipe.train.chunk)
    assert recipe.train.epochs == min(max(plain.train.epochs, 2000 / epoch), 4 * plain.train.epochs)
    assert recipe.optimiser.warmup == min(plain.optimiser.warmup, int(recipe.train.epochs * epoch) // 10)


def test_early_stopping_keeps_the_best_model(tmp_path: Path) -> None:
    rows = [json.dumps({"text": f"line number {k}"}) for k in range(12)]
    (tmp_path / "t.jsonl").write_text("\n".join(rows))
    small = [
        "model.hidden=8",
        "model.embedding=4",
        "train.updates=200",
        "optimiser.rate=0.5",
        "evaluate.every=2",
    ]
    recipe = _target.recipe_for(str(tmp_path / "t.jsonl"), [*small, "evaluate.patience=2"], None)
    record, _ = train.train(recipe, runs_dir=tmp_path / "a", device="cpu", quiet=True)
    assert record["updates"] < 200
    assert "without a gain" in record["stopped"]


def test_a_convention_that_is_asked_for_stands(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("text\n" + "".join(f"fine film {k}\n" for k in range(400)))
    start = tmp_path / "start.safetensors"
    model = LanguageModel(ModelRecipe(hidden=8), 256)
    checkpoint.save(start, model, Alphabet.bytes(), recipe=Recipe(model=model.recipe))
    for trained in (start, None):
        asked = ["data.convention=nvidia-review"]
        recipe = _target.recipe_for(str(tmp_path / "t.csv"), asked, None, trained)
        assert recipe.data.convention == "nvidia-review"


def test_the_speed_on_the_screen_counts_symbols_as_the_log_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One long record among short ones: most lanes are soon empty, and what they hold is no symbol."""
    now, shown = [0.0], []

    class Screen(console.Progress):
        """To whose clock each update takes a second."""

        def update(self, done: int, **more: Any) -> None:
            now[0] += 1.0
            super().update(done, **more)
            shown.append(self.line().split("  "))

    monkeypatch.setattr(console, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(console, "Progress", Screen)
    data = replace(fasta(tmp_path / "p.fasta", ["M" + "K" * 319, *proteins(8, longest=9)]), split="100-0-0")
    part = record_corpus.load(data).split("train")
    assert isinstance(part, RecordSplit)
    rows = RecordLanes(part, 8, 16, seed=1, epoch=0)
    n, counts = len(rows), [int((rows.chunk_at(k).y >= 0).sum()) for k in range(len(rows))]
    assert sum(counts) < n * 8 * 16 / 4
    small = recipes.TrainRecipe(lanes=8, chunk=16, epochs=1.0)
    recipe = Recipe(name="p", model=ModelRecipe(hidden=4), data=data, train=small)
    _, folder = train.train(recipe, runs_dir=tmp_path / "a", device="cpu")
    speeds = [f"{console.quantity(sum(counts[1:k]) / (k - 1))} symbols/s" for k in range(2, n + 1)]
    assert [*(line[-2] for line in shown[1:-1]), shown[-1][-1]] == speeds
    assert [line[-1] for line in shown[1:-1]] == [f"{n - k} s left" for k in range(2, n)]
    log = runs.read_log(folder)
    seconds = np.diff([0.0, *(line["seconds"] for line in log)])
    assert [line["symbols_per_second"] for line in log] * seconds == pytest.approx(counts)
