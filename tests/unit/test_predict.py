from __future__ import annotations

import numpy as np
import pytest
import torch

from mulstm.data import Alphabet
from mulstm.errors import BackendError, DataError, MulstmError
from mulstm.nn.model import LanguageModel
from mulstm.predict import Predictor, impossible
from mulstm.recipe import CELLS, ModelRecipe

ALPHABET = Alphabet(b"abcdefg ")
X = np.random.default_rng(1).integers(8, size=(3, 20))


def made(cell: str = "mlstm", **more: object) -> LanguageModel:
    torch.manual_seed(2)
    return LanguageModel(ModelRecipe(cell=cell, hidden=7, **more), 8)


@pytest.mark.parametrize("cell", CELLS)
def test_steps_equal_the_whole(cell: str) -> None:
    model = made(cell, embedding=4, weight_norm=True)
    predictor = Predictor(model, ALPHABET, lanes=3)
    with torch.no_grad():
        expected = torch.log_softmax(model(torch.from_numpy(X))[0].double(), dim=-1)
    for t in range(X.shape[1]):
        predictor.feed(X[:, t])
        got = predictor.log_probs()
        assert got.dtype == torch.float64
        torch.testing.assert_close(got, expected[:, t], rtol=0, atol=1e-5)


def test_several_symbols_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    one, all_at_once, pieces = (Predictor(made(), ALPHABET, lanes=3) for _ in range(3))
    for t in range(X.shape[1]):
        one.feed(torch.from_numpy(X[:, t]))
    all_at_once.feed(X)
    monkeypatch.setattr("mulstm.predict.LONGEST", 6)
    pieces.feed(X)
    for other in (all_at_once, pieces):
        torch.testing.assert_close(other.log_probs(), one.log_probs(), rtol=0, atol=1e-6)


def test_before_the_first_symbol_and_after_reset() -> None:
    predictor = Predictor(made(), ALPHABET, lanes=2)
    torch.testing.assert_close(predictor.log_probs().exp(), torch.full((2, 8), 0.125).double())
    predictor.feed_text(b"abba")
    once = predictor.log_probs()
    predictor.reset()
    torch.testing.assert_close(predictor.log_probs().exp(), torch.full((2, 8), 0.125).double())
    predictor.feed_text(b"")
    predictor.feed_text(b"abba")
    assert torch.equal(predictor.log_probs(), once)


def test_the_model_is_a_copy() -> None:
    model = made()
    predictor = Predictor(model, ALPHABET)
    predictor.feed_text(b"abc")
    before = predictor.log_probs()
    with torch.no_grad():
        model.W_out.zero_()
    predictor.reset()
    predictor.feed_text(b"abc")
    assert torch.equal(predictor.log_probs(), before)


def test_symbols_that_do_not_fit() -> None:
    with pytest.raises(DataError, match="8 symbols and the alphabet 256"):
        Predictor(made(), Alphabet.bytes())
    with pytest.raises(ValueError, match=r"symbols are \(2,\)\. Give \(3,\), one a lane"):
        Predictor(made(), ALPHABET, lanes=3).feed(np.array([1, 2]))


def test_what_a_kernel_made_that_waited_in_vain_is_no_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    predictor = Predictor(made(), ALPHABET)
    predictor.feed_text(b"abba")
    monkeypatch.setattr("mulstm.nn.packed.has_failed", lambda device: True)
    with pytest.raises(BackendError, match="waited in vain"):
        predictor.log_probs()


def test_what_cannot_be_fed() -> None:
    predictor = Predictor(LanguageModel(ModelRecipe(hidden=4), 256), Alphabet.bytes(), 2)
    for symbols in ([3.7, 1.0], [[0], [256]], [[-1], [3]]):
        with pytest.raises(ValueError, match="Symbols are whole numbers from 0 to 255"):
            predictor.feed(np.array(symbols))
    with pytest.raises(MulstmError, match=r"'text' is no bytes\. Give it encoded"):
        predictor.feed_text("text")  # type: ignore[arg-type]


def test_lanes_to_follow_are_a_tensor_or_a_list() -> None:
    predictor = Predictor(made(), ALPHABET, lanes=2)
    predictor.feed(np.array([1, 2]))
    second = predictor.log_probs()[1]
    predictor.follow([1, 1, 0])
    assert torch.equal(predictor.log_probs()[:2], torch.stack([second, second]))
    predictor.follow(torch.tensor([2]))
    assert predictor.lanes == 1
    assert not torch.equal(predictor.log_probs()[0], second)


@pytest.mark.parametrize("lanes", [0, -1, 2.0, True])
def test_lanes_that_are_none(lanes: int) -> None:
    with pytest.raises(MulstmError, match="lanes cannot be read or drawn"):
        Predictor(made(), ALPHABET, lanes)


def test_symbols_without_a_class_have_a_very_low_bias_and_no_weights() -> None:
    model = made()
    assert impossible(model) == ()
    with torch.no_grad():
        model.get_parameter("b_out")[[2, 5]] = -1e4
        assert impossible(model) == ()  # as a run may leave it that diverged
        model.W_out[[0, 2, 5]] = 0
    assert impossible(model) == (2, 5)
    assert impossible(made(output_bias=False)) == ()
