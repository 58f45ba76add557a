"""The page shows what score, sample and neurons tell."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

import foreign
from mulstm import interop, neurons
from mulstm.checkpoint import Checkpoint
from mulstm.demo import reading
from mulstm.demo.reading import PIECE, Reader
from mulstm.errors import CheckpointError, DataError, MulstmError
from mulstm.heat import visible
from mulstm.interop import unirep
from mulstm.recipe import Recipe
from mulstm.records import Record
from mulstm.sample import Sampling, as_text, sample
from mulstm.scoring import score
from mulstm.units import bits
from nn_models import of_bytes

TEXT = "A caf\u00e9,\nand more than one piece of it: " + "abc " * 20


@pytest.fixture
def loaded() -> Checkpoint:
    return of_bytes()


def test_bits_are_those_of_scoring(loaded: Checkpoint) -> None:
    found = Reader(loaded).read(TEXT)
    (expected,) = score(loaded, TEXT, losses=True)
    assert expected.losses is not None
    assert found["symbols"] == expected.symbols - 1  # a text that is still being written has no end
    assert found["bits"] == pytest.approx(bits(float(expected.losses[:-1].sum())), rel=1e-5)
    assert "".join(one["text"] for one in found["characters"]) == TEXT
    accented = found["characters"][5]
    assert accented["text"] == "\u00e9"
    assert accented["bits"] == pytest.approx(bits(float(expected.losses[5:7].sum())), rel=1e-5)
    assert len(accented["guesses"]) == 3


def test_guesses_and_what_comes_next(loaded: Checkpoint) -> None:
    reader = Reader(loaded)
    (expected,) = score(loaded, "abc", following=10)
    likeliest = [(visible(name), pytest.approx(p, rel=1e-5)) for name, p in expected.following]
    assert reader.read("abc")["next"] == likeliest
    assert reader.read("abcd")["characters"][3]["guesses"] == likeliest[:3]
    empty = reader.read("")
    assert (empty["symbols"], empty["bits"], empty["characters"]) == (0, 0.0, [])
    assert len(empty["next"]) == 10


def test_a_text_that_grows_is_not_read_again(loaded: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, read = Reader(loaded), []
    call = reader.memory.call
    monkeypatch.setattr(reader.memory, "call", lambda x, state: (read.append(x.shape[1]), call(x, state))[1])
    reader.read(TEXT)
    size = 1 + len(TEXT.encode())  # and the line's end before it
    assert sum(read) == size
    read.clear()
    grown = reader.read(TEXT + "x")
    assert sum(read) == (size + 1) % PIECE
    fresh = Reader(loaded).read(TEXT + "x")
    assert grown["bits"] == pytest.approx(fresh["bits"], rel=1e-6)
    for other in (TEXT[:40] + "!" + TEXT[41:], TEXT[:50], "", "Another text", TEXT):
        assert reader.read(other)["bits"] == pytest.approx(Reader(loaded).read(other)["bits"], rel=1e-6)


def test_a_reading_that_is_broken_off_leaves_nothing_wrong(
    loaded: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, left = Reader(loaded), [2]
    call = reader.memory.call

    def failing(x: torch.Tensor, state: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            raise MemoryError
        return call(x, state)

    reader.read("x" * 90)
    monkeypatch.setattr(reader.memory, "call", failing)
    with pytest.raises(MemoryError):
        reader.read(TEXT)
    assert reader.read("x" * 90)["bits"] == pytest.approx(Reader(loaded).read("x" * 90)["bits"], rel=1e-6)


def test_what_was_read_before_a_reading_was_broken_off_stays(
    loaded: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, read, left = Reader(loaded), [], [2]
    call = reader.memory.call
    monkeypatch.setattr(reader.memory, "call", lambda x, state: (read.append(x.shape[1]), call(x, state))[1])

    def is_over() -> bool:
        left[0] -= 1
        return left[0] < 0

    with pytest.raises(reading.BrokenOffError):
        reader.read("x" * 200, is_over=is_over)
    assert read == [PIECE, PIECE]
    expected = Reader(loaded).read("x" * 200)["bits"]
    assert reader.read("x" * 200)["bits"] == pytest.approx(expected, rel=1e-6)
    assert sum(read) == 201
    reader.close()
    for work in (lambda: reader.read("y" * 90), lambda: reader.go_on("y" * 90, Sampling())):
        with pytest.raises(reading.BrokenOffError):
            work()


def test_a_character_that_is_not_whole_is_not_given(
    loaded: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    for pieces, text in (
        ([b"a", b"\xd0"], "a"),
        ([b"\xd0", b"\xb0"], "\u0430"),
        ([b"\xd0", b"a"], "\ufffda"),
    ):
        monkeypatch.setattr(reading, "go_on", lambda *_, given=pieces, **__: iter([piece] for piece in given))
        assert "".join(Reader(loaded).go_on("x", Sampling())) == text


def test_reviews_are_gone_on_with_as_they_stand(loaded: Checkpoint) -> None:
    reader = Reader(replace(loaded, meta={"source": {"convention": "openai-review"}}))
    how = Sampling(length=20, seed=3)
    assert reader.read("I am ")["symbols"] == 4
    expected = b"".join(row[0] for row in sample(loaded.model, loaded.alphabet, b"\n I am ", how))
    assert "".join(reader.go_on("I am ", how)) == "".join(as_text([expected], ends=False))


def test_a_unit_is_not_copied_with_all_others(loaded: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    joined, cat = [], torch.cat

    def watched(pieces: list[torch.Tensor]) -> torch.Tensor:
        joined.append(cat(pieces))
        return joined[-1]

    monkeypatch.setattr(torch, "cat", watched)
    Reader(loaded).read(TEXT, unit=4)
    assert [one.shape[1:] for one in joined] == [(256,), ()]


def test_a_model_that_gives_no_number(loaded: Checkpoint) -> None:
    with torch.no_grad():
        loaded.model.W_out.mul_(1e39)
    with pytest.raises(CheckpointError, match=r"gives no number for this text: its weights are too large"):
        Reader(loaded).read("abc")


def test_costs_and_a_unit_are_read_in_one_pass(loaded: Checkpoint) -> None:
    reader, steps, size = Reader(loaded), [], 1 + len(TEXT.encode())
    layer = reader.predictor.model.layers[0]
    layer.register_forward_pre_hook(lambda _, given: steps.append(given[2].shape[0]))
    for unit, read in ((4, size), (3, size % PIECE), (None, size % PIECE)):
        reader.read(TEXT, unit)
        assert sum(steps) == read
        steps.clear()


def test_units_are_those_of_neurons_after_a_line_end(loaded: Checkpoint) -> None:
    found = Reader(loaded).read("\u00e9a", unit=4)
    traced = neurons.trace(loaded, Record("1", "\n\u00e9a".encode()), [4]).values[1:, 0]
    assert [one["value"] for one in found["characters"]] == pytest.approx([traced[1], traced[2]], rel=1e-5)
    assert found["scale"]["both"]
    assert {one["level"] for one in found["characters"]} & {0, 15}
    with pytest.raises(DataError, match=r"no unit 9: the model has 9"):
        Reader(loaded).read("a", unit=9)


def test_going_on_draws_what_sample_draws_after_a_line_end(loaded: Checkpoint) -> None:
    how = Sampling(length=50, temperature=0.7, seed=3)
    drawn = b"".join(row[0] for row in sample(loaded.model, loaded.alphabet, b"\n" + TEXT.encode(), how))
    reader = Reader(loaded)
    assert "".join(reader.go_on(TEXT, how)) == "".join(as_text([drawn], ends=False))
    with pytest.raises(MulstmError, match=r"length of -1"):
        reader.go_on(TEXT, Sampling(length=-1))


def test_a_later_turn_ends_the_one_before(loaded: Checkpoint) -> None:
    reader = Reader(loaded)
    first = reader.go_on("ab", Sampling(length=500))
    next(first)
    expected = "".join(Reader(loaded).go_on("cd", Sampling(length=30)))
    second = reader.go_on("cd", Sampling(length=30))
    assert len(list(first)) <= 1  # what was held back of a character
    assert "".join(second) == expected


def test_nothing_is_drawn_when_the_server_ends(loaded: Checkpoint) -> None:
    reader, text = Reader(loaded), "x" * (PIECE - 1)  # and the line's end: one whole piece, which is kept
    drawn = reader.go_on(text, Sampling(length=500))
    next(drawn)
    reader.close()
    assert len(list(drawn)) <= 1  # what was held back of a character
    assert list(reader.go_on(text, Sampling(length=500))) == []


def test_texts_that_cannot_be_read(loaded: Checkpoint) -> None:
    reader = Reader(loaded)
    with pytest.raises(DataError, match="half a character"):
        reader.read("a\ud800")
    with pytest.raises(DataError, match=r"20,002 bytes. Give at most 20,000"):
        reader.read("\u00e9" * 10_001)
    hidden = reader.read("a\u202eb\x00")["characters"]
    assert [one["text"] for one in hidden] == ["a", "U+202E", "b", "\u2400"]


def test_proteins_and_models_without_a_head() -> None:
    weights = unirep.from_arrays(foreign.unirep(H=7).arrays, "unirep", "w")
    loaded = interop.to_checkpoint(weights)
    found = Reader(loaded).read("mkta\nYIAKQR ")
    (expected,) = score(loaded, "MKTAYIAKQR", losses=True)
    assert expected.losses is not None
    assert found["bits"] == pytest.approx(bits(float(expected.losses[:-1].sum())), rel=1e-5)
    with pytest.raises(DataError, match="which is no residue"):
        Reader(loaded).read("MK1")
    for read in (Reader(loaded).read, partial(score, loaded)):  # neither of them costs a gap
        with pytest.raises(DataError, match=r"has '-' at position 3, which .* has no class for. Take it out"):
            read("MK-TA")
    headless = Checkpoint(
        loaded.model, loaded.alphabet, Recipe(), {"source": weights.source | {"head": False}}
    )
    with pytest.raises(CheckpointError, match="without its output layer"):
        Reader(headless)
