"""Records: which of them count, and what is told of those that are damaged or of another kind."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from made_records import add, cells, markdown
from mulstm import recipe, report
from mulstm.errors import RunError
from mulstm.report import records


def test_a_record_counts_as_long_as_its_recipe_stands(results: Path) -> None:
    name = "hutter/mlstm-emb-wn-vd-fast"
    then = recipe.settings(recipe.load(name))
    assert then["optimiser.rate"] == 1.6e-2
    # Another seed or precision is no other recipe, and a key that came later means what it always did.
    other = then | {"train.seed": 2, "train.precision": "fp32"}
    del other["train.ema_start"]
    path = add(results, name, 1.26, settings=other)
    title = "**mLSTM +emb +WN +VD; fast: weight decay**"
    assert cells(markdown(results), title)[4] == "1.260"
    add(results, name, 1.25, settings=then | {"optimiser.rate": 1e-3})
    page = markdown(results)
    assert cells(page, title)[4] == "not counted"
    assert "the recipe has changed since: optimiser.rate was 0.001, is 0.016" in page
    # A key that came later, and that the recipe sets by now.
    assert (then.pop("optimiser.clip"), recipe.OptimiserRecipe().clip) == (0.1, 0.0)
    add(results, name, 1.25, settings=then)
    assert "the recipe has changed since: optimiser.clip was 0.0, is 0.1" in markdown(results)
    assert json.loads(path.read_text())["complete"]  # the file stays


def test_a_recipe_under_its_old_name_is_no_second_seed(results: Path) -> None:
    add(results, "hutter/mlstm-fast", 1.43)
    add(results, "hutter/mlstm-emb-wn-fast", 1.37, recipe="hutter/mlstm-quick", row="mlstm", kind="fast")
    page = markdown(results)
    assert cells(page, "**unregularised mLSTM**")[4] == "1.430"
    assert "no packaged recipe has that name" in page


def test_a_record_says_of_which_kind_it_is(results: Path) -> None:
    add(results, "hutter/mlstm", 1.4, kind="fast")
    add(results, "hutter/mlstm-fast", 1.4)
    assert [r.kind for r in records.read(results)] == ["fast", "fast"]


def test_records_that_are_none(results: Path) -> None:
    path = add(results, "hutter/mlstm", 1.4)
    path.write_text("{")
    with pytest.raises(RunError, match="is not JSON"):
        records.read(results)
    path.write_text('{"recipe": "hutter/mlstm"}')
    with pytest.raises(RunError, match="lacks table, row, kind, seed"):
        records.read(results)
    for text in ("3", "null", "[1, 2]"):
        path.write_text(text)
        with pytest.raises(RunError, match="holds no JSON object"):
            records.read(results)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("parameters", "20M", 'parameters "20M", which is not a whole number'),
        ("test_bits_per_char", "abc", 'test_bits_per_char "abc", which is not a number or null'),
        ("test_bits_per_char", math.nan, "test_bits_per_char NaN"),
        ("train_seconds", None, "train_seconds null, which is not a number"),
        ("hardware", None, "hardware null, which is not text"),
        ("updates", True, "updates true, which is not a whole number"),
        ("complete", 1, "complete 1, which is not true or false"),
        ("test_word_perplexity", "88", 'test_word_perplexity "88"'),
        ("kind", 5, "kind 5, which is not text"),
        ("epochs", 10**400, "which is not a number"),
        ("test_bits_per_char", math.inf, "test_bits_per_char Infinity"),
    ],
)
def test_records_of_another_kind(results: Path, key: str, value: object, words: str) -> None:
    path = add(results, "hutter/mlstm", 1.4, **{key: value})
    with pytest.raises(RunError) as caught:
        records.read(results)
    assert words in str(caught.value)
    assert str(caught.value).startswith(str(path))


def test_curves_of_another_kind(results: Path) -> None:
    curve = add(results, "hutter/mlstm", 1.4).with_suffix(".jsonl")
    for line in ('{"update": 1, "valid_bits_per_char": 1.4}', '{"update": 1, "valid_bits_per_char": "x"}'):
        curve.write_text(f"{line}\n")
        with pytest.raises(RunError, match=r"seed1\.jsonl has (seconds null|valid_bits_per_char .x.), which"):
            records.read(results)


def test_a_copy_beside_a_record_is_no_second_seed(results: Path) -> None:
    path = add(results, "hutter/mlstm", 1.4)
    path.with_name("seed1-copy.json").write_text(path.read_text())
    assert len(records.read(results)) == 1
    for elsewhere in (path.with_name("seed2.json"), results / "hutter" / "mlstm2" / "seed1.json"):
        elsewhere.parent.mkdir(exist_ok=True)
        elsewhere.write_text(path.read_text())
        with pytest.raises(RunError) as caught:
            records.read(results)
        assert str(caught.value) == (
            f"{elsewhere} is the record of hutter/mlstm, seed 1. Move it to {path}, or remove it."
        )
        elsewhere.unlink()


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ("{", "is not JSON"),
        ("[]", "holds no JSON object"),
        ("{}", "by_delay is not five pairs"),
        ('{"by_delay": [[6, 6], [2, 2]]}', "by_delay is not five pairs"),
        ('{"by_delay": [[6, 6], [2, 2], [2, 2], [2, 2], [2, NaN]]}', "by_delay is not five pairs"),
        ('{"by_delay": [[6, 6], [2, 2], [2, 2], [2, 2], [2, 2]], "share": 0.2}', "share 0.2"),
        ('{"by_delay": [[6, 6], [2, 2], [2, 2], [2, 2], [2, 2]], "corpus": "my.txt"}', 'corpus "my.txt"'),
    ],
)
def test_surprises_that_are_not_the_papers(results: Path, found: str, words: str) -> None:
    path = results / "hutter" / "surprise.json"
    path.parent.mkdir()
    path.write_text(found)
    with pytest.raises(RunError) as caught:
        report.write(results, None)
    assert words in str(caught.value)
    assert f"mulstm surprise MLSTM LSTM --json > {path}" in str(caught.value)


def test_a_damaged_benchmark_is_told(results: Path) -> None:
    (results / "bench").mkdir()
    for text in ("{", "[]"):
        (results / "bench" / "h200.json").write_text(text)
        with pytest.raises(RunError, match=r"h200\.json (is not JSON|holds no JSON object)\. Make it again"):
            report.write(results, None)


def test_a_later_dynamic_evaluation_takes_the_place_of_an_earlier_one(results: Path) -> None:
    path = add(results, "hutter/mlstm", 1.4, dynamic_test_bits_per_char=1.3, dynamic_rate=1e-6)
    records.add_dynamic(path, {"test_bits_per_char": 1.2, "pull": 0.0})
    before = json.loads(add(results, "hutter/mlstm", 1.4, seed=2).read_text()) | {"seed": 1}
    after = json.loads(path.read_text())
    assert after == before | {"dynamic_test_bits_per_char": 1.2, "dynamic_pull": 0.0}
    with pytest.raises(RunError, match=r"none\.json cannot be read"):
        records.add_dynamic(results / "none.json", {})


def test_which_files_are_records(results: Path) -> None:
    path = add(results, "hutter/mlstm", 1.4)
    (results / "seed1.json").write_text(path.read_text())  # of no recipe
    assert records.paths(results) == [path]


def test_a_run_that_does_not_count_keeps_its_reason(results: Path) -> None:
    settings = recipe.settings(recipe.load("hutter/mlstm")) | {"optimiser.rate": 9.0}
    add(results, "hutter/mlstm", 1.4, complete=False, reason="not the recipe as it stands", settings=settings)
    (found,) = records.read(results)
    assert found["reason"] == "not the recipe as it stands"


def test_a_recipe_of_ones_own_is_never_outdated(results: Path) -> None:
    add(results, "text", 1.4, recipe="mine", table="")
    (found,) = records.read(results)
    assert found["complete"]


def test_a_mean_wants_all_seeds() -> None:
    some = [records.Record({"x": 1.0}), records.Record({"x": None})]
    assert records.mean(some, "x") is None
    assert records.mean(some[:1], "x") == 1.0
    assert records.mean([], "x") is None
