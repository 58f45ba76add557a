"""Reports: tables and figures follow from the records, and say when they no longer do."""

import json
import sys
from pathlib import Path

import pytest

from made_records import add, cells, markdown
from mulstm import recipe, report
from mulstm.errors import RunError
from mulstm.recipe import names
from mulstm.report import figures, paper, records, tables


def test_no_records_at_all(results: Path) -> None:
    page = markdown(results)
    for table in paper.TABLES:
        assert f"## {table.title}: {table.unit}" in page
    assert "Runs that are not counted" not in page
    assert "not run yet" in tables.readme([])
    assert "Graves 2013" in page
    assert "Graves 2013" not in tables.readme([])


def test_a_row_of_the_paper(results: Path) -> None:
    add(results, "hutter/mlstm", 1.412, minutes=28.0, precision="fp32")
    add(results, "hutter/mlstm-fast", 1.380, seed=1, minutes=2.4)
    add(results, "hutter/mlstm-fast", 1.384, seed=2, minutes=2.6)
    assert cells(markdown(results), "**unregularised mLSTM**") == [
        "**unregularised mLSTM**",
        "20,394,600",
        "1.40",
        "1.412",
        "1.382 ± 0.003",
        "−0.018",
        "1 / 2",
        "28.0 / 2.5",
        "some GPU, fp32 / some GPU, bf16",
    ]
    assert cells(markdown(results), "hyperLSTM, Ha 2017") == ["hyperLSTM, Ha 2017", "27M", "1.34", *[""] * 6]


def test_rows_without_a_fast_recipe_do_not_wait_for_one(results: Path) -> None:
    assert cells(markdown(results), "**the same, optimiser as the mLSTM's, start chosen**")[2:5] == [
        "–",  # nor is it in the paper
        "not run yet",
        "–",
    ]


def test_runs_that_do_not_count_stand_apart(results: Path) -> None:
    add(results, "hutter/mlstm", 1.5, complete=False, reason="half an hour was over", epochs=9.5)
    page = markdown(results)
    assert cells(page, "**unregularised mLSTM**")[3] == "not counted"
    assert cells(page, "hutter/mlstm")[1:] == [
        "1",
        "9.5",
        "1.510",
        "1.500",
        "10.0",
        "some GPU",
        "half an hour was over",
    ]
    assert page.index("## Runs that are not counted") > page.index("## Dynamic evaluation")


def test_what_the_fast_recipe_trains_is_named_where_it_is_another_model(results: Path) -> None:
    add(results, "ptb/mlstm-fast", 1.25)
    add(results, "ptb/mlstm", 1.35)
    title = "unregularised mLSTM (older versions of the paper)"
    fast = "mLSTM +emb +WN +VD, weight decay, output dropout"
    assert f"**{title}; fast: {fast}**" in markdown(results)
    assert f" Mikolov's protocol) | {title}; fast: {fast} |" in tables.readme(records.read(results))
    (figure,) = [f for f in figures.all_of(records.read(results), None) if f.name == "learning-curves-ptb"]
    assert [line["label"] for line in figure.data["lines"]] == [
        f"{fast}, fast",
        f"{title}, faithful",
    ]
    for line in paper.PTB.lines:
        assert line.fast == recipe.load(f"ptb/{line.row}-fast").title


def test_perplexities_and_dynamic_evaluation(results: Path) -> None:
    add(
        results,
        "wikitext2/mlstm-emb-wn-vd-large-fast",
        1.24,
        valid_word_perplexity=86.44,
        test_word_perplexity=81.16,
        dynamic_test_bits_per_char=1.1,
    )
    page = markdown(results)
    line = cells(page, "**byte mLSTM +emb +WN +VD; fast: weight decay, output dropout**")
    assert (line[2], line[4], line[5]) == ("92.8 / 88.8", "86.4 / 81.2", "−7.6")
    assert cells(page, "wikitext2/mlstm-emb-wn-vd-large-fast, seed 1")[1:] == [
        "1.240",
        "1.100",
        "81.2",
        "–",
        "–",
    ]


def test_huge_perplexities(results: Path) -> None:
    name = "wikitext2/mlstm-emb-wn-vd-large-fast"
    huge = {"valid_word_perplexity": 1e40, "test_word_perplexity": 2e40}
    add(results, name, 24.0, dynamic_test_bits_per_char=24.0, **huge)
    page = markdown(results)
    line = cells(page, "**byte mLSTM +emb +WN +VD; fast: weight decay, output dropout**")
    assert (line[4], line[5]) == ("1.0e+40 / 2.0e+40", "+2.0e+40")
    assert cells(page, f"{name}, seed 1")[3] == "2.0e+40"


def test_published_dynamic_figures_stand_beside_their_own_row_only(results: Path) -> None:
    add(results, "hutter/mlstm-emb-wn-vd-large-fast", 1.22, dynamic_test_bits_per_char=1.09)
    add(results, "hutter/mlstm-fast", 1.38, dynamic_test_bits_per_char=1.2, dynamic_storage="bf16")
    add(results, "hutter/mlstm", 1.5, dynamic_test_bits_per_char=1.4, complete=False, reason="cut")
    page = markdown(results)
    assert cells(page, "hutter/mlstm-emb-wn-vd-large-fast, seed 1")[-1] == "1.08"
    assert cells(page, "hutter/mlstm-fast, seed 1, weights in bf16")[-1] == "–"
    assert "hutter/mlstm, seed 1" not in page


def test_the_front_page_has_dynamic_evaluation_of_the_last_rows(results: Path) -> None:
    add(results, "hutter/mlstm-emb-wn-vd-large-fast", 1.22, dynamic_test_bits_per_char=1.09)
    add(results, "hutter/mlstm-emb-wn-vd-large-fast", 1.23, seed=2)
    add(results, "hutter/mlstm-fast", 1.38, dynamic_test_bits_per_char=1.2)
    add(results, "text8/mlstm-emb-wn-vd-large-fast", 1.26)
    add(results, "wikitext2/mlstm-emb-wn-vd-large-fast", 1.24, dynamic_test_word_perplexity=70.04)
    add(results, "ptb/mlstm-fast", 1.18, dynamic_test_bits_per_char=1.16)
    page = tables.readme(records.read(results))
    name = "mLSTM +emb +WN +VD, dynamic evaluation"
    assert f"|  | large {name} | 1.08, published later | – | 1.090 |" in page
    assert f"|  | byte {name} | – | – | – / 70.0 |" in page
    other = "mLSTM +emb +WN +VD, weight decay, output dropout"  # than the one that the line is named for
    assert f"|  | {other}, dynamic evaluation | – | – | 1.160 |" in page
    assert page.count("dynamic evaluation") == 3


def test_ptb_states_its_symbols(results: Path) -> None:
    add(results, "ptb/mlstm-fast", 1.2, test_symbols=442_423)
    page = markdown(results)
    assert "Test symbols: 442,423. The same cost by other counts, fast: 1.180 (raw, 449,945), " in page
    assert "1.190 (spaced, 446,184), 1.254 (unk, 423,247).\n" in page


def test_a_figure_of_curves_says_how_to_read_it(results: Path) -> None:
    drawn = {"learning-curves-hutter", "learning-curves-text8"}
    for table, test in (("hutter", 1.26), ("text8", 1.33)):
        add(results, f"{table}/mlstm-emb-wn-vd-large", test, valid_bits_per_char=1.25)
    add(results, "hutter/mlstm", 1.3)  # whose curve is read in 500 lanes too, but on the whole part
    page = tables.markdown(records.read(results), None, drawn)
    assert page.count("Dotted lines are the paper's test figures") == len(drawn)
    assert page.count("end 0.01 above their rings.") == page.count("end 0.08 above their rings.") == 1
    head, *notes = page.split(
        "Its test part costs 0.08 more than validation: to cross a line is not to reach it."
    )
    assert (len(notes), "learning-curves-text8" in head) == (1, True)
    assert page.count("Its test part costs") == 1


def test_words_are_given_in_bytes_too(results: Path) -> None:
    name = "wikitext2/mlstm-emb-wn-vd-large"
    words = {"valid_word_perplexity": 83.18, "test_word_perplexity": 79.19}
    add(results, name, 1.2658, valid_bits_per_char=1.2728, **words)
    page = markdown(results)
    assert "In bits/byte: 1.2728 / 1.2658 faithful; the paper: 1.2649 on test." in page
    assert "own bytes" not in page
    add(
        results,
        f"{name}-fast",
        1.2327,
        valid_bits_per_char=1.2376,
        test_product_word_perplexity=79.1,
        **words,
    )
    page = markdown(results)
    assert (
        "1.2728 / 1.2658 faithful, 1.2376 / 1.2327 fast; the paper: 1.2649 on test. Multiplying the" in page
    )
    assert "own bytes instead, test: 79.1 fast ([the difference]" in page


def test_the_pages_beside_the_results_have_their_tables(results: Path) -> None:
    """The README's, and in docs/results.md those of the paper with our scores."""
    add(results, "ptb/mlstm-fast", 1.2)
    prose = results.parent / "docs" / "results.md"
    prose.parent.mkdir()
    places = [
        f"## {t.name}\n\n{report._marks(t.name)[0]}\n{report._marks(t.name)[1]}\n" for t in paper.TABLES
    ]
    prose.write_text("".join(places))
    report.write(results, report.page_beside(results))
    page = prose.read_text()
    assert "| RHN (rec depth 7) + VD, Zilly 2017 | 1.27 |  |  |" in page
    assert "weight decay, output dropout** | 1.35 | not run yet | 1.200 |" in page
    assert report.stale(results, report.page_beside(results)) == []
    prose.write_text(page.replace("1.200", "1.100"))
    assert report.stale(results, report.page_beside(results)) == [str(prose)]
    prose.write_text(page.replace("<!-- ptb: end -->", ""))
    lacks = r"results\.md has no place for the results\. Put these lines into it: <!-- ptb: end -->\."
    with pytest.raises(RunError, match=lacks):
        report.write(results, report.page_beside(results))
    prose.write_text("a page of another kind")
    report.write(results, report.page_beside(results))
    assert prose.read_text() == "a page of another kind"


def test_the_size_figure_takes_the_largest_from_the_table(results: Path) -> None:
    add(results, "hutter/size/mlstm-3m", 1.6, parameters=3_000_000)
    add(results, "hutter/mlstm-rmsprop", 1.42)
    found = tables.size_points(records.read(results))["mLSTM, authors' set-up"]
    assert found == {"3m": (3_000_000, 1.6), "20m": (20_394_600, 1.42)}
    assert cells(markdown(results), "mLSTM, authors' set-up")[1:] == ["1.600", *["not run yet"] * 2, "1.420"]


def test_every_row_of_ours_has_its_recipe() -> None:
    rows = {f"{table.name}/{line.row}" for table in paper.TABLES for line in table.lines if line.row}
    ours = {name.removesuffix("-fast"): name for name in names() if "/" in name and "/size/" not in name}
    assert rows == ours.keys()
    for table in paper.TABLES:
        for line in table.lines:
            if line.row:
                assert recipe.load(ours[f"{table.name}/{line.row}"]).paper == (line.bits or line.paper)


def test_write_then_nothing_is_stale(results: Path, tmp_path: Path) -> None:
    page = tmp_path / "README.md"
    add(results, "hutter/mlstm-emb-wn-vd-large-fast", 1.22)
    (results / "hutter" / "surprise.json").write_text(
        json.dumps({"by_delay": [[6.2, 6.3], *[[2.0, 2.1]] * 4]})
    )
    before = report.stale(results, page)
    written = report.write(results, page)
    assert {str(path) for path in written if path.suffix != ".png"} == set(before)
    assert {path.name for path in written} >= {
        "tables.md",
        "tables.csv",
        "tables.json",
        "README.md",
        "surprise.svg",
    }
    assert report.stale(results, page) == []
    assert report.write(results, page) == []
    assert page.read_text().startswith("# Title\n")
    assert page.read_text().endswith(f"{report.END}\n\nThe rest.\n")
    assert "| 1.24 | not run yet | 1.220 |" in page.read_text()
    # The same records give the same bytes.
    drawn = {path: path.read_bytes() for path in results.glob("*.*g")}
    assert len(drawn) == 6
    for path in drawn:
        path.unlink()
    report.write(results, page)
    assert drawn == {path: path.read_bytes() for path in results.glob("*.*g")}
    # Another record, and everything that shows it is stale.
    add(results, "hutter/mlstm-emb-wn-vd-large-fast", 1.21, minutes=20)
    assert [Path(path).name for path in report.stale(results, page)] == [
        "tables.md",
        "tables.csv",
        "tables.json",
        "README.md",
        "learning-curves-hutter.svg",
        "time-to-quality.svg",
    ]


def test_a_page_without_a_place_for_the_table(results: Path, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("# Title\n")
    with pytest.raises(RunError, match="has no place for the results"):
        report.write(results, tmp_path / "README.md")


def test_csv_and_json_hold_the_same(results: Path) -> None:
    add(results, "hutter/mlstm-fast", 1.38, minutes=3)
    found = records.read(results)
    (row,) = [r for r in tables.flat(found) if (r["table"], r["row"]) == ("hutter", "mlstm")]
    assert (row["fast"], row["fast_seeds"], row["fast_minutes"], row["faithful"]) == (1.38, 1, 3.0, None)
    lines = tables.comma_separated(found).splitlines()
    assert len(lines) == 1 + len(tables.flat(found))
    assert "hutter,mlstm,unregularised mLSTM,test_bits_per_char,1.4,,,0,,,,1.38,,1,3.0,," in lines


def test_without_matplotlib_there_are_tables(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(RunError, match="pip install matplotlib"):
        report.write(results, None)
    assert (results / "tables.md").is_file()


def test_a_page_beside_that_is_no_text(results: Path) -> None:
    page = results.parent / "README.md"
    page.write_bytes(b"caf\xe9")
    assert report.page_beside(results) is None
    page.write_bytes(f"caf\xe9 {report.BEGIN}{report.END}".encode("latin-1"))
    with pytest.raises(RunError, match=r"README.md is not written in UTF-8 \(.*\)\. Save it so"):
        report.write(results, report.page_beside(results))


def test_a_page_shows_the_records_of_results_alone(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records that a reader makes in a clone, in a folder of their own, do not take the place of ours."""
    page = results.parent / "README.md"
    page.write_text(f"{report.BEGIN}\n{report.END}\n")
    assert report.page_beside(results) == page
    monkeypatch.chdir(results)
    assert report.page_beside(Path(".")) == page
    assert report.page_beside(results.rename(results.with_name("mine"))) is None


def test_a_difference_that_rounds_to_nothing_has_no_sign() -> None:
    assert [tables._signed(x, 2) for x in (0.001, -0.001, 0.02, -0.02)] == ["0.00", "0.00", "+0.02", "−0.02"]


def test_a_size_that_is_not_the_columns_and_weights_that_are_not_rounded(results: Path) -> None:
    add(results, "hutter/size/mlstm-3m", 1.6, parameters=3_400_000)
    add(results, "hutter/mlstm", 1.38, dynamic_test_bits_per_char=1.2, dynamic_storage="fp32")
    page = markdown(results)
    assert cells(page, "mLSTM, authors' set-up")[1] == "1.600 (3.4M)"
    assert cells(page, "hutter/mlstm, seed 1")[2] == "1.200"


def test_a_dynamic_figure_without_a_static_one(results: Path) -> None:
    more = {"test_bits_per_char": None, "dynamic_test_bits_per_char": 1.09}
    add(results, "hutter/mlstm-emb-wn-vd-large-fast", 1.22, **more)
    assert "| hutter/mlstm-emb-wn-vd-large-fast, seed 1 | – | 1.090 |" in markdown(results)
