"""Figures and learning curves: what they show, and that any run can be drawn."""

import itertools
import json
from pathlib import Path

import matplotlib
import pytest

from made_records import add
from mulstm import recipe, report, runs
from mulstm.errors import RunError
from mulstm.recipe import names
from mulstm.report import canvas, curve, figures, paper, records


def test_curves_that_do_not_count_say_so(results: Path) -> None:
    def labels() -> list[str]:
        drawn = {f.name: f.data for f in figures.all_of(records.read(results), None)}
        return [
            line["label"]
            for name in ("learning-curves-hutter", "time-to-quality")
            for line in drawn[name]["lines"]
        ]

    name = "hutter/mlstm-emb-wn-vd-fast"
    add(results, name, 1.5, complete=False, reason="another rate")
    title = "mLSTM +emb +WN +VD, weight decay"
    assert labels() == [f"{title}, fast (not counted)", "22M fast (not counted), some GPU"]
    add(results, name, 1.3, seed=2)
    assert labels() == [f"{title}, fast", "22M fast, some GPU"]


def test_figures_do_not_follow_the_users_own_settings() -> None:
    with matplotlib.rc_context({"xtick.major.size": 9.0}):
        with canvas.canvas((2.0, 2.0)):
            assert matplotlib.rcParams["xtick.major.size"] < 9
        assert matplotlib.rcParams["xtick.major.size"] == 9


def test_names_of_close_levels_are_apart(results: Path) -> None:
    levels = {"a": 1.40, "b": 1.42, "c": 1.44}
    with canvas.canvas((7.6, 4.6)) as picture:
        axes = picture.subplots()
        axes.set_ylim(1.2, 2.0)
        figures._paint_levels(axes, levels)
        picture.canvas.draw()
        boxes = sorted((t.get_window_extent() for t in axes.texts), key=lambda box: box.y0)
    assert len(boxes) == 3
    assert all(below.y1 <= above.y0 + 1 for below, above in itertools.pairwise(boxes))


def test_other_numbers_of_the_paper_make_figures_stale(
    results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures.all_of([], None)[0].draw(results)
    assert not figures.all_of([], None)[0].is_stale(results)
    changed = tmp_path / "paper.py"
    changed.write_text(Path(str(paper.__file__)).read_text().replace("6.27", "6.28"))
    monkeypatch.setattr(paper, "__file__", str(changed))
    assert figures.all_of([], None)[0].is_stale(results)


def test_every_figure_can_be_drawn(results: Path) -> None:
    for name in names():
        if "/" in name:
            add(results, name, 1.3, valid_word_perplexity=90.0, test_word_perplexity=90.0)
    drawn = {
        f.name: f
        for f in figures.all_of(records.read(results), {"by_delay": [[6.2, 6.3], *[[2.0, 2.1]] * 4]})
    }
    assert set(drawn) == {
        *(f"learning-curves-{table.name}" for table in paper.TABLES),
        "size",
        "surprise",
        "time-to-quality",
    }
    for name in ("size", "learning-curves-wikitext2"):
        svg, png = drawn[name].draw(results)
        assert svg.read_bytes().startswith(b"<?xml")
        assert png.read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    """The folder of a run that has ended."""
    with runs.Run.create(recipe.load("hutter/mlstm-fast"), root=tmp_path / "runs") as run:
        for n in range(1, 1001):
            valid = 1.5 + 1 / n if n % 100 == 50 else None
            run.log(
                {
                    "update": n,
                    "seconds": n / 10,
                    "train_bits_per_char": 1.5 + 5 / n,
                    "valid_bits_per_char": valid,
                }
            )
        values = json.loads(add(tmp_path / "made", "hutter/mlstm-fast", 1.5).read_text())
        run.write_json("metrics.json", values)
    return run.path


def test_a_run_is_published_with_a_thin_curve(finished: Path, results: Path) -> None:
    path = records.publish(finished, results)
    assert path == results / "hutter" / "mlstm-fast" / "seed1.json"
    (record,) = records.read(results)
    assert record["test_bits_per_char"] == 1.5
    assert len(list(record.validations())) == 10
    assert 200 <= len(record.curve) <= 220
    assert record.curve[-1]["update"] == 1000
    (finished / "metrics.json").unlink()
    with pytest.raises(RunError, match="has no record yet"):
        records.publish(finished, results)
    with pytest.raises(RunError, match=r"mulstm train --resume 'a run'\.$"):
        records.publish(Path("a run"), results)


def test_curves_far_above_the_paper_are_drawn(results: Path) -> None:
    add(results, "hutter/mlstm-fast", 4.0)
    assert results / "learning-curves-hutter.svg" in report.write(results, None)


def test_the_learning_curve_of_a_run(finished: Path) -> None:
    paths = report.learning_curve(finished, {"gzip -9": 2.6}, 1.49)
    assert [path.name for path in paths] == ["curve.svg", "curve.png"]
    first = [path.read_bytes() for path in paths]
    for level in (b"gzip -9, test 2.60", b"this model, test 1.49"):
        assert level in first[0]
    report.learning_curve(finished, {"gzip -9": 2.6}, 1.49)
    assert first == [path.read_bytes() for path in paths]
    (finished / "log.jsonl").unlink()
    with pytest.raises(RunError, match="no log to draw"):
        report.learning_curve(finished)


def test_a_learning_curve_shows_both_parts_and_every_level() -> None:
    marks = {"gzip -9": 2.6, curve.OWN: 1.7}
    data = {"title": "A run", "train": [(0.5, 2.0), (1.0, 1.8)], "valid": [(1.0, 1.9)], "marks": marks}
    with canvas.canvas((7.0, 4.0)) as picture:
        curve._paint_run(picture, data)
        (axes,) = picture.axes
    assert sorted(list(line.get_ydata()) for line in axes.lines) == [
        [1.7, 1.7],
        [1.9],
        [2.0, 1.8],
        [2.6, 2.6],
    ]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["training text", "validation text"]
