"""A run that was cut short stands for its row, with its epochs, as long as none that counts does."""

from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from made_records import add, cells, markdown
from mulstm import recipe
from mulstm.report import figures, paper, records, tables


def cut(name: str, **more: Any) -> dict[str, Any]:
    """What the record of a run has that was cut short."""
    reason = f"{records.CUT_SHORT} 5 min of updates"
    settings = recipe.settings(recipe.load(name))
    return {"complete": False, "reason": reason, "stopped": records.CUT, "settings": settings} | more


def test_a_run_that_was_cut_short_is_shown_with_its_epochs(results: Path) -> None:
    name = "hutter/mlstm"
    add(results, name, 1.6, seed=1, minutes=3.0, hardware="a GPU (shared)", **cut(name, epochs=3.0))
    add(results, name, 1.5, seed=2, hardware="a GPU (shared)", **cut(name, epochs=9.5))
    assert cells(markdown(results), "**unregularised mLSTM**")[3:8] == [
        "1.500 (9.5 of at most 40 epochs)",
        "not run yet",
        "",
        "1 / –",
        "10.0 / –",
    ]
    found = records.read(results)
    assert "1.500 (9.5 of at most 40 epochs)" in tables.readme(found)
    (row,) = (row for row in tables.flat(found) if (row["table"], row["row"]) == ("hutter", "mlstm"))
    assert (row["faithful"], row["faithful_cut"], row["faithful_cut_epochs"]) == (None, 1.5, 9.5)
    drawn = {f.name: f.data for f in figures.all_of(found, None)}
    (line,) = drawn["learning-curves-hutter"]["lines"]
    assert line["label"] == "unregularised mLSTM, faithful (shared GPU, cut short)"
    assert line["points"][-1][0] > 5  # minutes: of the longer one
    # A fast one does not make it a complete one, and one that counts goes before.
    add(results, name + "-fast", 1.38)
    assert cells(markdown(results), "**unregularised mLSTM**")[3:6] == [
        "1.500 (9.5 of at most 40 epochs)",
        "1.380",
        "−0.020",
    ]
    add(results, name, 1.4, seed=3)
    assert cells(markdown(results), "**unregularised mLSTM**")[3] == "1.400"


def test_of_runs_that_were_cut_short_the_longest_that_was_measured_is_shown(results: Path) -> None:
    name = "hutter/mlstm"
    add(results, name, 1.6, seed=1, **cut(name, epochs=3.0))
    add(results, name, 1.5, seed=2, **cut(name, epochs=9.5, test_bits_per_char=None))
    shown = cells(markdown(results), "**unregularised mLSTM**")[3]
    assert shown == "1.600 (3.0 of at most 40 epochs)"


def test_words_of_a_run_that_was_cut_short(results: Path) -> None:
    name = "wikitext2/mlstm-emb-wn-vd-large"
    words = {"valid_word_perplexity": 95.0, "test_word_perplexity": 91.0}
    add(results, name, 1.3, **cut(name, epochs=7.0), **words)
    (line,) = (line for line in paper.TABLES[2].lines if line.row)
    assert cells(markdown(results), f"**{line.title}**")[3].startswith("95.0 / 91.0 (7.0 of ")


@pytest.mark.parametrize(
    "more",
    [
        {"reason": "not the recipe as it stands: started from a trained model; cut short after 5 min"},
        {"settings": {}},
        {"settings": {"optimiser.rate": 0.1}},
        {"stopped": ""},
    ],
    ids=["other start", "no settings", "another rate", "not cut"],
)
def test_what_departs_besides_is_not_shown(results: Path, more: dict[str, Any]) -> None:
    name = "hutter/mlstm"
    given = cut(name, epochs=9.5)
    more = {key: given[key] | value if key == "settings" and value else value for key, value in more.items()}
    add(results, name, 1.5, **(given | more))
    assert cells(markdown(results), "**unregularised mLSTM**")[3] == "not counted"


def test_a_cut_run_of_a_recipe_that_is_gone_is_not_shown(results: Path) -> None:
    add(results, "hutter/mlstm", 1.5, **cut("hutter/mlstm", epochs=9.5, recipe="hutter/mlstm-old"))
    assert cells(markdown(results), "**unregularised mLSTM**")[3] == "not run yet"


def test_a_row_that_the_paper_does_not_have_is_drawn_without_its_level(results: Path) -> None:
    add(results, "hutter/lstm-stacked-matched", 1.5)
    drawn = {f.name: f for f in figures.all_of(records.read(results), None)}["learning-curves-hutter"]
    assert [line["row"] for line in drawn.data["lines"]] == ["lstm-stacked-matched"]
    picture = Figure()
    figures._paint_curves(picture, drawn.data)
    assert [line.get_linestyle() for line in picture.axes[0].lines].count(":") == 0
    assert [line.get_marker() for line in picture.axes[0].lines].count("o") == 1


def test_a_ring_is_the_whole_validation_part(results: Path) -> None:
    add(results, "hutter/mlstm-emb-wn-vd", 1.28, minutes=24.0, valid_bits_per_char=1.27)
    add(results, "hutter/mlstm-emb-wn-vd-fast", 1.25, valid_bits_per_char=None)
    drawn = {f.name: f.data.get("lines") for f in figures.all_of(records.read(results), None)}
    assert [line["end"] for line in drawn["learning-curves-hutter"]] == [[], [(24.0, 1.27)]]
    assert [line["end"] for line in drawn["time-to-quality"]] == [[], [(1.27, 24.0)]]


def test_a_fast_curve_is_called_what_its_recipe_is(results: Path) -> None:
    add(results, "text8/lstm-small", 1.6)
    add(results, "text8/lstm-small-fast", 1.5)
    drawn = {f.name: f.data for f in figures.all_of(records.read(results), None)}
    labels = [line["label"] for line in drawn["learning-curves-text8"]["lines"]]
    assert labels == ["small LSTM (Adam), fast", "small LSTM (RMSprop), faithful"]
