from __future__ import annotations

import numpy as np
import pytest
import torch

from mulstm.data import Alphabet
from mulstm.errors import CheckpointError, MulstmError
from mulstm.nn import packed
from mulstm.nn.model import LanguageModel
from mulstm.predict import Predictor
from mulstm.recipe import ModelRecipe
from mulstm.sample import Sampling, as_text, draw, filtered, go_on, opening, sample

ALPHABET = Alphabet(b"\nabcdefg ")


@pytest.fixture
def model() -> LanguageModel:
    torch.manual_seed(2)
    made = LanguageModel(ModelRecipe(hidden=7), 9)
    with torch.no_grad():
        made.W_out *= 4
    return made


def texts(model: LanguageModel, prompt: bytes = b"", streams: int = 1, **how: object) -> list[bytes]:
    rows = list(sample(model, ALPHABET, prompt, Sampling(**how), streams))
    return [b"".join(row[i] for row in rows) for i in range(streams)]


def test_the_same_seed_draws_the_same_text(model: LanguageModel) -> None:
    assert texts(model, length=60) == texts(model, length=60)
    assert texts(model, length=60) != texts(model, length=60, seed=2)
    assert len(texts(model, length=60)[0]) == 60
    assert texts(model, length=0) == [b""]
    assert len(next(sample(model, ALPHABET, sampling=Sampling(length=10**30)))) == 1


def test_streams_do_not_depend_on_their_neighbours(model: LanguageModel) -> None:
    three = texts(model, b"abc", streams=3, length=40)
    assert len(set(three)) == 3
    assert texts(model, b"abc", length=40) == three[:1]


def test_the_likeliest(model: LanguageModel) -> None:
    predictor = Predictor(model, ALPHABET)
    predictor.feed_text(b"ab")
    expected = b""
    for _ in range(20):
        symbol = predictor.log_probs().argmax(dim=-1)
        expected += ALPHABET.decode(symbol.numpy())
        predictor.feed(symbol)
    assert texts(model, b"ab", length=20, temperature=0) == [expected]
    assert texts(model, b"ab", length=20, top_k=1) == [expected]
    assert texts(model, b"ab", length=20, top_p=1e-9) == [expected]


def test_a_predictor_goes_on_from_where_it_is(model: LanguageModel) -> None:
    whole = texts(model, b"abc", length=12, temperature=0)[0]
    predictor = Predictor(model, ALPHABET)
    predictor.feed_text(b"abc")
    halves = [
        b"".join(row[0] for row in go_on(predictor, sampling=how))
        for how in (Sampling(length=7, temperature=0), Sampling(length=5, temperature=0))
    ]
    assert b"".join(halves) == whole


def test_a_start_symbol_stands_before_the_first_text_only(model: LanguageModel) -> None:
    alphabet = Alphabet(b"\nabcdefg", specials=("start",))
    how = [Sampling(length=length, temperature=0) for length in (12, 7, 5)]
    whole = [row[0] for row in sample(model, alphabet, b"abc", how[0])]
    predictor = Predictor(model, alphabet)
    halves = [row[0] for k, prompt in ((1, b"abc"), (2, b"")) for row in go_on(predictor, prompt, how[k])]
    assert halves == whole


def test_a_start_symbol_is_read(model: LanguageModel) -> None:
    alphabet, how = Alphabet(b"\nabcdefg", specials=("start",)), Sampling(length=30)
    predictor = Predictor(model, alphabet)
    predictor.feed(np.array([alphabet.special("start")]))
    assert list(go_on(predictor, b"ab", how)) == list(sample(model, alphabet, b"ab", how))


def test_a_prompt_changes_what_follows(model: LanguageModel) -> None:
    assert texts(model, b"a", length=30, temperature=0) != texts(model, b"fgfgfg", length=30, temperature=0)


def test_stop(model: LanguageModel) -> None:
    endless = texts(model, b"abc", streams=3, length=300)
    stopped = texts(model, b"abc", streams=3, length=300, stop=b"a")
    for whole, cut in zip(endless, stopped, strict=True):
        assert b"a" in whole
        assert cut == whole[: whole.index(b"a") + 1]
    words = endless[0][4:7]
    (cut,) = texts(model, b"abc", length=300, stop=words)
    assert cut == endless[0][: endless[0].index(words) + 3]


LOG_PROBS = torch.tensor([[0.4, 0.3, 0.2, 0.1], [0.05, 0.1, 0.15, 0.7]], dtype=torch.float64).log()


@pytest.mark.parametrize(
    ("how", "rows"),
    [
        (Sampling(), [[0.4, 0.3, 0.2, 0.1], [0.05, 0.1, 0.15, 0.7]]),
        (Sampling(top_k=2), [[4 / 7, 3 / 7, 0, 0], [0, 0, 3 / 17, 14 / 17]]),
        (Sampling(top_k=99), [[0.4, 0.3, 0.2, 0.1], [0.05, 0.1, 0.15, 0.7]]),
        (Sampling(top_p=0.6), [[4 / 7, 3 / 7, 0, 0], [0, 0, 0, 1]]),
        (Sampling(top_p=0.75, top_k=3), [[4 / 7, 3 / 7, 0, 0], [0, 0, 3 / 17, 14 / 17]]),
        (
            Sampling(temperature=0.5),
            [[16 / 30, 9 / 30, 4 / 30, 1 / 30], [1 / 210, 4 / 210, 9 / 210, 196 / 210]],
        ),
        (Sampling(temperature=0), [[1, 0, 0, 0], [0, 0, 0, 1]]),
        (Sampling(temperature=1e-310), [[1, 0, 0, 0], [0, 0, 0, 1]]),
    ],
)
def test_filters(how: Sampling, rows: list[list[float]]) -> None:
    got = filtered(LOG_PROBS, how)
    np.testing.assert_allclose(got.sum(axis=1), 1)
    np.testing.assert_allclose(got, rows, atol=1e-12)


def test_what_reaches_p_is_enough() -> None:
    assert filtered(torch.zeros(1, 4, dtype=torch.float64), Sampling(top_p=0.5)).tolist() == [
        [0.5, 0.5, 0, 0]
    ]
    assert filtered(LOG_PROBS[:1], Sampling(top_p=0.4)).tolist() == [[1, 0, 0, 0]]


def test_draws_follow_the_weights() -> None:
    die = np.random.default_rng(0)
    weights = np.array([0.0, 0.25, 0.0, 0.75, 0.0])
    counts = np.bincount([draw(weights, die) for _ in range(4000)], minlength=5) / 4000
    np.testing.assert_allclose(counts, weights, atol=0.03)
    assert counts[[0, 2, 4]].tolist() == [0, 0, 0]


class Loaded:
    """A die that always shows the same number."""

    def __init__(self, shown: float) -> None:
        self.shown = shown

    def random(self) -> float:
        return self.shown


def test_a_symbol_without_a_class_is_not_drawn_at_any_temperature(model: LanguageModel) -> None:
    with torch.no_grad():
        model.W_out[7] = 0
        model.get_parameter("b_out")[7] = -1e4  # as importers give it
    predictor = Predictor(model, ALPHABET)
    predictor.feed(np.array([1]))
    weights = filtered(predictor.log_probs(), Sampling(temperature=1e6))[0]
    assert weights[7] == 0.0
    assert np.delete(weights, 7).min() > 0.1


@pytest.mark.parametrize("lacks", [False, True])
def test_a_gpu_draws_by_itself_where_that_is_the_same(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch, lacks: bool
) -> None:
    """At a high temperature its loop would draw symbols without a class."""
    asked = []
    monkeypatch.setattr(packed, "sampler", lambda *given, **named: asked.append(named))
    if lacks:
        with torch.no_grad():
            model.W_out[7] = 0
            model.get_parameter("b_out")[7] = -1e4
    for temperature in (0.0, 1.0, 1.1):
        next(sample(model, ALPHABET, b"", Sampling(temperature=temperature)))
    assert [given["greedy"] for given in asked] == [True, False, *[False] * (not lacks)]


def test_a_symbol_without_weight_is_never_drawn() -> None:
    assert draw(np.array([0.5, 0.5, 0.0]), Loaded(1.0)) == 1
    assert draw(np.array([0.0, 0.5, 0.5]), Loaded(0.0)) == 1


@pytest.mark.parametrize(
    "how",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"length": -1},
        {"stop": "ab"},
        {"seed": -1},
        {"top_k": 2.5},
        {"top_k": True},
        {"temperature": None},
        {"top_p": "all"},
        {"length": 3.5},
    ],
)
def test_impossible_values(model: LanguageModel, how: dict[str, float]) -> None:
    with pytest.raises(MulstmError, match=r"\. Give"):
        texts(model, **how)


def test_no_streams(model: LanguageModel) -> None:
    with pytest.raises(MulstmError, match="0 streams"):
        list(sample(model, ALPHABET, b"", Sampling(), 0))
    with pytest.raises(MulstmError, match=r"2\.0 lanes cannot be"):
        sample(model, ALPHABET, b"", Sampling(), 2.0)  # type: ignore[arg-type]


def test_numbers_of_numpy_are_numbers(model: LanguageModel) -> None:
    how = {"length": np.int64(9), "temperature": np.float32(1), "top_k": np.int32(9), "seed": np.uint8(3)}
    assert texts(model, **how) == texts(model, length=9, temperature=1.0, top_k=9, seed=3)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nothing_is_drawn_from_no_numbers(model: LanguageModel, temperature: float) -> None:
    with torch.no_grad():
        model.layers[0].W_mh.fill_(float("nan"))
    with pytest.raises(CheckpointError, match="gives no numbers for the next symbol"):
        texts(model, b"ab", length=3, temperature=temperature)


def test_opening() -> None:
    assert opening(ALPHABET) == b"\n"
    assert opening(Alphabet(b"ab ")) == b" "
    assert opening(Alphabet(b"ba")) == b"b"


def test_characters_are_written_whole() -> None:
    text = "naïve — 漢字 🙂"
    assert list(as_text(bytes([byte]) for byte in text.encode())) == list(text)


def test_bytes_that_are_no_characters() -> None:
    pieces = [b"a\xffb", "漢".encode()[:2]]
    assert list(as_text(pieces)) == ["a\N{REPLACEMENT CHARACTER}b", "\N{REPLACEMENT CHARACTER}"]
