from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from mulstm import data
from mulstm.data.corpus import Split
from mulstm.errors import BackendError, DataError, MulstmError, RunError
from mulstm.evaluate import Evaluation, evaluate, evaluate_together
from mulstm.nn.model import LanguageModel
from mulstm.ops import faults
from mulstm.recipe import ModelRecipe


@pytest.fixture
def model() -> LanguageModel:
    torch.manual_seed(1)
    return LanguageModel(ModelRecipe(hidden=11, embedding=6, weight_norm=True), 256)


@pytest.fixture
def split(text_file: Path) -> Split:
    return data.load(text_file).split("test")


def expected(model: LanguageModel, split: Split, lanes: int) -> np.ndarray:
    """Each symbol's nats, from lanes that are run whole, one after the other, in float64."""
    wide = LanguageModel(model.recipe, model.alphabet_size).double()
    wide.load_state_dict(model.state_dict())
    wide.precision, wide.backend = "fp64", "reference"
    n = split.symbols_count
    length = -(-n // lanes)
    losses = []
    for start in range(0, n, length):
        symbols = torch.from_numpy(split.read(start - 1, min(start + length, n)).astype(np.int64))
        logits, _ = wide(symbols[None, :-1])
        losses.append(F.cross_entropy(logits[0], symbols[1:], reduction="none").detach().numpy())
    return np.concatenate(losses)


@pytest.mark.parametrize(("lanes", "chunk"), [(1, 300), (1, 7), (7, 13), (10, 200), (64, 4)])
def test_every_symbol_once_in_text_order(model: LanguageModel, split: Split, lanes: int, chunk: int) -> None:
    nats = expected(model, split, lanes)
    found = evaluate(model, split, lanes, chunk, losses=True)
    assert found.symbols == split.symbols_count == nats.size
    assert found.losses is not None
    np.testing.assert_allclose(found.losses, nats, rtol=0, atol=1e-4)
    assert found.nats == pytest.approx(nats.sum(), rel=1e-6)
    assert found.nats == pytest.approx(found.losses.sum(dtype=np.float64), rel=1e-12)
    assert found.bits_per_char == pytest.approx(nats.mean() / np.log(2), rel=1e-6)


@pytest.mark.parametrize(("lanes", "chunk"), [(1, 7), (10, 200), (7, 3), (2000, 4)])
def test_together_as_each_alone(model: LanguageModel, text_file: Path, lanes: int, chunk: int) -> None:
    corpus = data.load(text_file, split="50-10-40")
    parts = [corpus.split("valid"), corpus.split("test")]
    assert parts[0].symbols_count < parts[1].symbols_count
    for order in (parts, parts[::-1]):
        seen: list[int] = []
        together = evaluate_together(
            model, order, lanes, chunk, progress=lambda done, bits, seen=seen: seen.append(done)
        )
        for part, found in zip(order, together, strict=True):
            assert found.symbols == part.symbols_count
            assert found.nats == pytest.approx(
                expected(model, part, min(lanes, found.symbols)).sum(), rel=1e-6
            )
        assert seen == sorted(seen)
        assert all(done <= sum(part.symbols_count for part in parts) for done in seen)


def test_no_lanes_and_no_chunks(model: LanguageModel, split: Split) -> None:
    for how in ({"lanes": 0}, {"chunk": -5}):
        with pytest.raises(MulstmError, match="Give 1 or more of each"):
            evaluate(model, split, **how)
        with pytest.raises(MulstmError, match="Give 1 or more of each"):
            evaluate_together(model, [split], **how)
    with pytest.raises(MulstmError, match="Give 1 or more of each"):
        evaluate(model, split, symbols=-1)


def test_nothing_together(model: LanguageModel) -> None:
    assert evaluate_together(model, []) == []


def test_a_text_of_another_alphabet(model: LanguageModel, text_file: Path) -> None:
    other = data.load(text_file, alphabet="corpus").split("test")
    with pytest.raises(DataError, match="256 symbols and the alphabet"):
        evaluate(model, other)
    with pytest.raises(DataError, match="256 symbols and the alphabet"):
        evaluate_together(model, [data.load(text_file).split("valid"), other])


def test_losses_are_kept_of_texts_with_words(model: LanguageModel, text_file: Path) -> None:
    corpus = data.load(text_file)
    plain, worded = corpus.split("valid"), replace(corpus.split("test"), has_words=True)
    without, found = evaluate_together(model, [plain, worded], 3, 7)
    assert without.losses is None
    assert found.losses is not None
    alone = evaluate(model, worded, 3, losses=True)
    np.testing.assert_allclose(found.losses, alone.losses, rtol=1e-4, atol=1e-6)


def test_the_beginning_only(model: LanguageModel, split: Split) -> None:
    found = evaluate(model, split, 1, symbols=50)
    assert found.symbols == 50
    assert found.nats == pytest.approx(expected(model, split, 1)[:50].sum(), rel=1e-5)
    assert evaluate(model, split, 1, symbols=10**9).symbols == split.symbols_count


def test_more_lanes_than_symbols(model: LanguageModel, split: Split) -> None:
    assert evaluate(model, split, 1000, symbols=3).symbols == 3


@pytest.mark.parametrize("kind", [Path, str])
def test_losses_to_a_file(model: LanguageModel, split: Split, tmp_path: Path, kind: type[Path | str]) -> None:
    found = evaluate(model, split, 3, losses=kind(tmp_path / "losses.npy"))
    stored = np.load(tmp_path / "losses.npy")
    assert stored.dtype == np.float32
    assert stored.sum(dtype=np.float64) == pytest.approx(found.nats, rel=1e-6)


def test_losses_are_whole_or_not_there(model: LanguageModel, split: Split, tmp_path: Path) -> None:
    def stop(done: int, bits: float) -> None:
        raise KeyboardInterrupt

    path = tmp_path / "kept" / "losses.npy"
    path.parent.mkdir()
    path.write_text("of an earlier time")
    with pytest.raises(KeyboardInterrupt):
        evaluate(model, split, 1, 2, losses=path, progress=stop)
    assert [p.read_text() for p in path.parent.iterdir()] == ["of an earlier time"]


def test_a_disk_too_full_for_losses_is_told(
    model: LanguageModel, split: Split, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is measured: a mapped file that meets a full disk ends the process without a word."""

    def full(*arguments: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    with pytest.raises(RunError, match="No space left"):
        evaluate(model, split, losses=tmp_path / "losses.npy")
    assert not list(tmp_path.glob("*losses*"))


def test_the_model_is_left_as_it_was(model: LanguageModel, split: Split) -> None:
    model.train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.random.get_rng_state()
    evaluate(model, split)
    assert model.training
    assert torch.equal(torch.random.get_rng_state(), state)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_bf16_is_near(model: LanguageModel, split: Split) -> None:
    fp32 = evaluate(model, split).bits_per_char
    model.precision = "bf16"
    bf16 = evaluate(model, split).bits_per_char
    assert bf16 == pytest.approx(fp32, rel=2e-2)
    assert bf16 != fp32


def test_words(model: LanguageModel, split: Split) -> None:
    assert evaluate(model, split, symbols=20).word_perplexity is None
    worded = replace(split, has_words=True)
    found = evaluate(model, worded)
    assert found.words == worded.words
    assert found.word_perplexity == pytest.approx(np.exp(found.nats / found.words))
    assert evaluate(model, worded, symbols=20).words is None  # words of a piece are not counted


def test_the_papers_conversion() -> None:
    found = Evaluation(nats=1.2649 * np.log(2) * 1_256_449, symbols=1_256_449, words=245_569, seconds=1.0)
    assert found.bits_per_char == pytest.approx(1.2649)
    assert found.word_perplexity == pytest.approx(88.8, abs=0.05)


def test_an_empty_part(model: LanguageModel, text_file: Path) -> None:
    with pytest.raises(DataError, match=r"is empty\. Give another part or"):
        evaluate(model, data.load(text_file, split="95-0-5").split("valid"))


def test_progress(model: LanguageModel, split: Split) -> None:
    seen: list[tuple[int, float]] = []
    found = evaluate(model, split, 1, 5, progress=lambda done, bits: seen.append((done, bits)))
    assert [done for done, _ in seen] == [80 * k for k in range(1, len(seen) + 1)]
    assert seen[-1][1] == pytest.approx(found.bits_per_char, rel=0.2)


def test_a_kernel_that_waited_in_vain_is_no_measurement(model: LanguageModel, split: Split) -> None:
    faults.flag(torch.device("cpu")).fill_(1)
    try:
        with pytest.raises(BackendError, match=r"waited in vain.*fused"):
            evaluate(model, split)
        assert evaluate(model, split).symbols == split.symbols_count  # said once, it is forgotten
    finally:
        faults.forget(torch.device("cpu"))
