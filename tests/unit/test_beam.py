from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from mulstm.beam import beam
from mulstm.data import Alphabet
from mulstm.errors import CheckpointError, MulstmError
from mulstm.nn.model import LanguageModel
from mulstm.predict import Predictor
from mulstm.recipe import ModelRecipe
from mulstm.sample import Sampling, sample

ALPHABET = Alphabet(b"\nabc")


def made(N: int = 4, **settings: object) -> LanguageModel:
    torch.manual_seed(2)
    model = LanguageModel(ModelRecipe(hidden=7, **settings), N)
    with torch.no_grad():
        model.W_out *= 6
    return model


def cost(model: LanguageModel, alphabet: Alphabet, prompt: bytes, symbols: tuple[int, ...]) -> float:
    """Symbol by symbol, without a beam."""
    predictor = Predictor(model, alphabet)
    start = alphabet.special("start")
    if start is not None:
        predictor.feed(torch.tensor([start]))
    predictor.feed_text(prompt)
    nats = 0.0
    for symbol in symbols:
        nats -= float(predictor.log_probs()[0, symbol])
        predictor.feed(torch.tensor([symbol]))
    return nats


def test_a_beam_that_drops_nothing_finds_the_likeliest_of_all() -> None:
    model = made()
    every = {s: cost(model, ALPHABET, b"a", s) for s in itertools.product(range(4), repeat=3)}
    ranked = sorted(every, key=lambda s: every[s])
    found = beam(model, ALPHABET, b"a", width=64, length=3)
    assert [one.text for one in found] == [ALPHABET.decode(list(s)) for s in ranked]
    assert [one.nats for one in found] == pytest.approx([every[s] for s in ranked], abs=1e-5)
    # One that drops the unlikely still finds the likeliest here, and greed does not.
    assert beam(model, ALPHABET, b"a", width=8, length=3)[0].text == found[0].text
    assert beam(model, ALPHABET, b"a", width=1, length=3)[0].nats > found[0].nats + 0.01


def test_a_beam_of_one_takes_the_likeliest_symbol() -> None:
    model = made()
    rows = sample(model, ALPHABET, b"ab", Sampling(length=30, temperature=0))
    assert beam(model, ALPHABET, b"ab", width=1, length=30)[0].text == b"".join(row[0] for row in rows)
    with torch.no_grad():
        model.W_out.zero_()  # of several, the first
    assert beam(model, ALPHABET, b"ab", width=1, length=5)[0].text == b"\n" * 5


def test_a_text_ends_with_its_stop() -> None:
    """Texts that have ended, by the stop and after one to three symbols, compete with each other."""
    model = made()
    every = {}
    for n in (1, 2, 3):
        for s in itertools.product(range(4), repeat=n):
            if 2 not in s[:-1] and (n == 3 or s[-1] == 2):
                every[ALPHABET.decode(list(s))] = cost(model, ALPHABET, b"ab", s)
    found = beam(model, ALPHABET, b"ab", width=64, length=3, stop=b"b")
    assert {one.text for one in found} == set(every)
    assert {one.text: one.nats for one in found} == pytest.approx(every, abs=1e-5)
    assert [one.nats for one in found] == sorted(one.nats for one in found)


def test_a_protein_ends_with_its_stop_symbol() -> None:
    alphabet = Alphabet(b"abc", specials=("start", "stop"))
    model = made(N=5)
    found = {one.text: one.nats for one in beam(model, alphabet, b"", width=99, length=2)}
    assert found[b""] == pytest.approx(cost(model, alphabet, b"", (4,)), abs=1e-5)  # the stop alone
    assert found[b"ab"] == pytest.approx(cost(model, alphabet, b"", (0, 1)), abs=1e-5)
    assert len(found) == 1 + 3 + 9  # nothing begins twice


def test_what_no_byte_stands_for_is_not_found() -> None:
    found = beam(made(N=4), Alphabet(b"abc", specials=("pad",)), b"a", width=99, length=2)
    assert sorted(one.text for one in found) == [
        a + b for a in (b"a", b"b", b"c") for b in (b"a", b"b", b"c")
    ]


def test_it_ends_where_all_texts_have(monkeypatch: pytest.MonkeyPatch) -> None:
    fed: list[int] = []
    monkeypatch.setattr(
        Predictor, "feed", lambda self, symbols, feed=Predictor.feed: (fed.append(1), feed(self, symbols))
    )
    model = made()
    with torch.no_grad():
        model.b_out[2] = 50.0
    assert beam(model, ALPHABET, b"a", width=1, length=500, stop=b"b")[0].text == b"b"
    assert len(fed) == 1  # the prompt


def test_a_symbol_without_a_class_is_not_found() -> None:
    model = made()
    with torch.no_grad():
        model.b_out[1], model.W_out[1] = -2e4, 0
    found = beam(model, ALPHABET, b"ab", width=64, length=2)
    assert len(found) == 9
    assert not any(b"a" in one.text for one in found)
    with torch.no_grad():
        model.b_out.fill_(-2e4)
        model.W_out.zero_()
    with pytest.raises(CheckpointError, match="no class for any symbol"):
        beam(model, ALPHABET, b"ab")


def test_no_length_is_no_text() -> None:
    (found,) = beam(made(), ALPHABET, b"ab", length=0)
    assert (found.text, str(found.nats)) == (b"", "0.0")


@pytest.mark.parametrize(
    "how", [{"width": 0}, {"width": True}, {"width": 2.5}, {"length": -1}, {"stop": "b"}]
)
def test_impossible_values(how: dict[str, Any]) -> None:
    with pytest.raises(MulstmError, match=f"The {next(iter(how))} "):
        beam(made(), ALPHABET, **how)


def test_a_model_without_numbers() -> None:
    model = made()
    with torch.no_grad():
        model.W_out.fill_(float("nan"))
    with pytest.raises(CheckpointError, match="no numbers"):
        beam(model, ALPHABET, b"a")


def test_a_default_device_is_for_what_has_none() -> None:
    model = made()

    def used() -> list[Any]:
        drawn = list(sample(model, ALPHABET, b"a", Sampling(length=4)))
        return [drawn, beam(model, ALPHABET, b"a", width=3, length=4)]

    wanted = used()
    try:
        torch.set_default_device("meta")
        assert used() == wanted
        assert Predictor(model, ALPHABET).log_probs().device.type == "cpu"
    finally:
        torch.set_default_device(None)
