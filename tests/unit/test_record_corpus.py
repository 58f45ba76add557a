"""Records stay whole: in one part of the split, in one lane, once an epoch, with start and end."""

from __future__ import annotations

import os
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from made import fasta, proteins
from mulstm import recipe as recipes
from mulstm import record_corpus
from mulstm.checkpoint import Checkpoint
from mulstm.data.alphabet import Alphabet
from mulstm.data.text import Text
from mulstm.errors import DataError, RecipeError
from mulstm.evaluate import evaluate
from mulstm.nn.model import LanguageModel
from mulstm.recipe import DataRecipe, ModelRecipe, Recipe
from mulstm.record_corpus import RecordCorpus, RecordLanes, RecordSplit
from mulstm.records import Record
from mulstm.scoring import scores, total
from mulstm.update import Update

SHARES = (Fraction(8, 10), Fraction(1, 10), Fraction(1, 10))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_a_file_in_a_folder_whose_name_is_no_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    folder.mkdir()
    monkeypatch.chdir(folder)
    recipe = fasta(Path("p.fasta"), proteins(20))
    assert record_corpus.load(recipe).split("train").symbols_count > 0


@settings(max_examples=50, deadline=None)
@given(
    sizes=st.lists(st.integers(2, 40), min_size=1, max_size=30),
    lanes=st.integers(1, 6),
    chunk=st.integers(1, 17),
    opening=st.integers(0, 1),
)
def test_every_record_is_in_one_lane_once_and_whole(
    sizes: list[int], lanes: int, chunk: int, opening: int
) -> None:
    data = np.random.default_rng(sum(sizes)).integers(0, 256, sum(sizes)).astype(np.uint8)
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    expected = sorted(bytes(data[a:b]) for a, b in pairwise(offsets))
    split = as_split(data, offsets, opening)
    lanes = min(lanes, sum(sizes) - len(sizes))
    counts = set()
    for epoch in range(2):
        rows = RecordLanes(split, lanes, chunk, seed=1, epoch=epoch)
        counts.add(len(rows))
        chunks = [rows.chunk_at(k) for k in range(len(rows))]
        x, y, first = (np.concatenate(part, axis=1) for part in zip(*chunks, strict=True))
        assert (y >= 0).sum() == split.symbols_count
        found = []
        for lane in range(lanes):
            for a, b in pairwise([*np.flatnonzero(first[lane]).tolist(), x.shape[1]]):
                own = np.flatnonzero(y[lane, a:b] >= 0)
                if own.size == 0:
                    found.append(bytes(x[lane, a : a + 1]))  # a record of its opening only
                    continue
                end = a + int(own[-1]) + 1
                assert own[0] == opening
                assert (y[lane, a + opening : end - 1] == x[lane, a + opening + 1 : end]).all()
                found.append(bytes(x[lane, a:end]) + bytes([y[lane, end - 1]]))
        assert sorted(found) == sorted(e if len(e) > opening + 1 else e[:1] for e in expected)
    assert len(counts) == 1


def as_split(data: np.ndarray, offsets: np.ndarray, opening: int = 0) -> RecordSplit:
    text, chosen = Text([data]), np.arange(len(offsets) - 1)
    return RecordSplit(
        "c", "train", Alphabet.bytes(), text, 0, len(data), offsets=offsets, chosen=chosen, given=opening
    )


def test_lanes_waste_little() -> None:
    sizes = np.random.default_rng(0).integers(30, 1200, 500)
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    split = as_split(np.zeros(int(sizes.sum()), dtype=np.uint8), offsets)
    rows = RecordLanes(split, 32, 128, seed=1, epoch=0)
    assert len(rows) * 32 * 128 < 1.02 * split.symbols_count


def test_no_memory_is_taken_for_more_lanes_than_symbols() -> None:
    split = as_split(np.zeros(12, dtype=np.uint8), np.array([0, 5, 12]))
    assert len(RecordLanes(split, 10, 4, seed=1, epoch=0)) == 2
    sentence = r"The train part of c has 10 symbols, too few for 10000000000 lanes\. .* train\.lanes=2\."
    with pytest.raises(DataError, match=sentence):
        RecordLanes(split, 10**10, 4, seed=1, epoch=0)


def test_each_epoch_has_its_own_order() -> None:
    split = as_split(np.arange(90, dtype=np.uint8), np.arange(0, 91, 9))
    orders = {
        tuple(RecordLanes(split, 1, 80, seed=seed, epoch=epoch).chunk_at(0).x[0].tolist())
        for seed in range(2)
        for epoch in range(3)
    }
    assert len(orders) == 6


def test_the_dice_of_the_lanes_never_change() -> None:
    split = as_split(np.arange(72, dtype=np.uint8), np.arange(0, 73, 6))
    rows = RecordLanes(split, 2, 30, seed=1, epoch=1).chunk_at(0)
    begun = [rows.x[lane][rows.first[lane]].tolist() for lane in range(2)]
    assert begun == [[12, 48, 0, 36, 24, 60], [18, 54, 30, 42, 66, 6]]


def test_pairs_of_a_protein(tmp_path: Path) -> None:
    corpus = record_corpus.load(fasta(tmp_path / "p.fasta", ["MKT", "GG"] * 2))
    part = corpus.split("all")
    assert isinstance(part, RecordSplit)
    x, y = next(part.records())
    assert x.tolist() == [24, 1, 4, 8]
    assert y.tolist() == [1, 4, 8, 25]
    assert part.symbols_count == 2 * (4 + 3)


def test_reviews_are_given_their_opening(tmp_path: Path) -> None:
    (tmp_path / "r.jsonl").write_text('{"text": "so &amp; so"}\n' * 3)
    recipe = DataRecipe(
        corpus=str(tmp_path / "r.jsonl"), records="jsonl", convention="openai-review", split="100-0-0"
    )
    part = record_corpus.load(recipe).split("train")
    assert isinstance(part, RecordSplit)
    x, y = next(part.records())
    assert bytes(x.astype(np.uint8)) == b"\n so & so"
    assert y.tolist() == [-1, *b"so & so "]
    rows = RecordLanes(part, 1, 9, seed=1, epoch=0)
    assert (rows.chunk_at(0).y[0] == y).all()


def test_whole_records_are_evaluated_until_they_are_enough(tmp_path: Path) -> None:
    (tmp_path / "r.jsonl").write_text('{"text": "so &amp; so"}\n' * 3)
    recipe = DataRecipe(
        corpus=str(tmp_path / "r.jsonl"), records="jsonl", convention="openai-review", split="100-0-0"
    )
    part = record_corpus.load(recipe).split("train")
    model = LanguageModel(ModelRecipe(hidden=4), 256)
    read = {symbols: evaluate(model, part, symbols=symbols).symbols for symbols in (0, 1, 8, 9)}
    assert read == {0: 24, 1: 8, 8: 8, 9: 16}
    told: list[tuple[int, float]] = []
    found = evaluate(model, part, progress=lambda *seen: told.append(seen))
    assert told[0] == (0, 0.0)  # the opening, which is given
    assert told[-1] == (24, found.bits_per_char)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 12), min_size=3, max_size=40))
def test_equal_records_are_in_one_part(kinds: list[int]) -> None:
    data = np.repeat(np.array(kinds, dtype=np.uint8), 4)
    offsets = np.arange(len(kinds) + 1) * 4
    if len(set(kinds)) < 3:
        return
    corpus = RecordCorpus("c", Text([data]), Alphabet.bytes(), offsets, SHARES, 0)
    parts = {name: corpus.split(name).chosen for name in ("train", "valid", "test")}
    assert sorted(np.concatenate(list(parts.values())).tolist()) == list(range(len(kinds)))
    for a, b in (("train", "valid"), ("train", "test"), ("valid", "test")):
        assert not {kinds[k] for k in parts[a]} & {kinds[k] for k in parts[b]}
    assert all(part.size for part in parts.values())


def test_the_dice_of_the_split_never_change() -> None:
    data, offsets = np.arange(40, dtype=np.uint8), np.arange(0, 41, 2)
    corpus = RecordCorpus("c", Text([data]), Alphabet.bytes(), offsets, SHARES, 0)
    assert [corpus.split(name).chosen.tolist() for name in ("valid", "test")] == [[10, 17], [1, 14]]
    assert corpus.split("train").chosen.tolist() == sorted(set(range(20)) - {10, 17, 1, 14})


def test_an_update_over_packed_records_is_that_of_each_alone(tmp_path: Path) -> None:
    recipe = Recipe(
        model=ModelRecipe(hidden=5, layers=2),
        data=fasta(tmp_path / "p.fasta", proteins(7)),
        optimiser=recipes.OptimiserRecipe(name="adam"),
        train=recipes.TrainRecipe(lanes=2, chunk=200),
    )
    corpus = record_corpus.load(recipe.data)
    part = corpus.split("train")
    assert isinstance(part, RecordSplit)
    torch.manual_seed(0)
    model = LanguageModel(recipe.model, 26)
    nats, count = torch.zeros(()), 0
    for x, y in part.records():
        logits, _ = model(torch.from_numpy(x)[None])
        nats = nats + torch.nn.functional.cross_entropy(logits[0], torch.from_numpy(y), reduction="sum")
        count += y.size
    expected = torch.autograd.grad(nats / count, list(model.parameters()))
    work = Update(model, recipe, torch.Generator().manual_seed(1))
    chunk = RecordLanes(part, 2, 200, seed=1, epoch=0).chunk_at(0)
    loss = work(chunk.x, chunk.y, 0.0, first=chunk.first)
    assert float(loss) == pytest.approx(float(nats.detach()) / count, rel=1e-5)
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("cell", ["mlstm", "lstm"])
def test_evaluation_is_the_sum_of_scores(cell: str, tmp_path: Path) -> None:
    texts = proteins(9)
    corpus = record_corpus.load(fasta(tmp_path / "p.fasta", texts))
    torch.manual_seed(0)
    model = LanguageModel(ModelRecipe(hidden=6, cell=cell), 26)
    loaded = Checkpoint(model, corpus.alphabet, Recipe(), {"source": {"convention": "protein"}})
    whole = total(scores(loaded, [Record(str(k), t.encode()) for k, t in enumerate(texts)]))
    found = evaluate(model, corpus.split("all"))
    assert found.symbols == whole["symbols"]
    assert found.nats == pytest.approx(whole["nats"], rel=1e-6)
    assert 0 < evaluate(model, corpus.split("all"), symbols=20).symbols < found.symbols
    with pytest.raises(DataError, match=r"p\.fasta is a file of records.*mulstm score"):
        evaluate(model, corpus.split("all"), losses=True)


@pytest.mark.parametrize("suffix", [".symbols", ".npy"])
@pytest.mark.parametrize("cut", [0, 1])
def test_what_is_cached_is_made_again_where_it_is_damaged(suffix: str, cut: int, tmp_path: Path) -> None:
    recipe = fasta(tmp_path / "p.fasta", ["MKV", "GG", "AAAA"])
    before = record_corpus.load(recipe).split("all").symbols_count
    (kept,) = (tmp_path / "cache" / "mulstm" / "records").glob(f"*{suffix}")
    kept.write_bytes(kept.read_bytes()[:-cut] if cut else b"")
    assert record_corpus.load(recipe).split("all").symbols_count == before


def test_another_reading_of_the_same_file_is_another_text(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("text,other\n" + "".join(f"t{k},oo{k}\n" for k in range(9)))
    recipe = DataRecipe(corpus=str(tmp_path / "t.csv"), records="csv")
    ways = ({}, {"column": "other"}, {"convention": "openai-review"}, {"alphabet": "padded-bytes"})
    found = [record_corpus.load(replace(recipe, **way)) for way in ways]
    assert [corpus.split("all").symbols_count for corpus in found] == [27, 36, 27, 27]
    assert len({corpus.text.read(0, 9).tobytes() for corpus in found[:3]}) == 3
    lines = record_corpus.load(replace(recipe, records="lines"))
    assert lines.split("all").symbols_count == len((tmp_path / "t.csv").read_bytes())


def test_faults(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="There is no file"):
        record_corpus.load(DataRecipe(corpus=str(tmp_path / "no.fasta"), records="fasta"))
    with pytest.raises(DataError, match=r"is a folder, and records come from one file"):
        record_corpus.load(DataRecipe(corpus=str(tmp_path), records="fasta"))
    with pytest.raises(DataError, match=r"Of 3 records \(1 different\) none is left for the train part"):
        record_corpus.load(fasta(tmp_path / "same.fasta", ["MK"] * 3))
    many = replace(
        fasta(tmp_path / "many.fasta", ["MK"] * 6 + ["MAA", "MCC", "MDD", "MEE"]), split="20-40-40"
    )
    with pytest.raises(DataError, match=r"Of 10 records \(5 different\) none is left for the test part"):
        record_corpus.load(many)
    (tmp_path / "blank.txt").write_text("\n \n")
    with pytest.raises(DataError, match=r"blank\.txt holds no record"):
        record_corpus.load(DataRecipe(corpus=str(tmp_path / "blank.txt"), records="lines"))
    kept = tmp_path / "cache" / "mulstm" / "records"
    before = sorted(kept.iterdir())
    assert len(before) == 8
    with pytest.raises(DataError, match="Record p1 has '1' at position 2"):
        record_corpus.load(fasta(tmp_path / "bad.fasta", ["MK", "M1"]))
    with pytest.raises(DataError, match="Record p1 is empty"):
        record_corpus.load(fasta(tmp_path / "none.fasta", ["MK", ""]))
    assert sorted(kept.iterdir()) == before
    for changed in (
        {"records": "fasta", "alphabet": "corpus"},
        {"alphabet": "protein"},
        {"column": "text"},
        {"records": "fasta", "alphabet": "protein"},
    ):
        with pytest.raises(RecipeError):
            recipes.check(Recipe(name="x", data=DataRecipe(**changed)))
    one = record_corpus.load(fasta(tmp_path / "one.fasta", ["MK", "GG"]))
    with pytest.raises(DataError, match="has no record"):
        RecordLanes(one.split("test"), 1, 4, seed=1, epoch=0)  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"is empty\. Give another part or"):
        evaluate(LanguageModel(ModelRecipe(hidden=4), 26), one.split("test"))
