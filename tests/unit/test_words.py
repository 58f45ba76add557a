"""Words by the product of their bytes' probabilities, against counting by hand."""

from __future__ import annotations

import math
import os

import numpy as np
import pytest

from mulstm import data
from mulstm.units import bits_per_char, word_perplexity
from mulstm.words import word_costs

DATA = os.environ.get("MULSTM_DATA")


def test_each_byte_falls_to_its_word() -> None:
    #               wiki's lines: space, words, space, newline; the second space of two is nobody's
    text = b" the cat \n sat  on\n"
    losses = np.arange(1.0, len(text) + 1)
    costs = word_costs(text, losses)
    assert costs is not None
    # the, cat, newline, sat, on, newline
    assert costs.count == len(text.split()) + 2 == 6
    nobodys = [0, 10, 15]
    assert costs.spaces == len(nobodys)
    assert costs.spaces_nats == losses[nobodys].sum()
    assert costs.nats == losses.sum() - losses[nobodys].sum()
    assert costs.perplexity == pytest.approx(math.exp(costs.nats / 6))


def test_the_conversion_is_never_smaller() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        text = rng.choice(np.frombuffer(b"ab \n\t\r\v\f", dtype=np.uint8), 40).tobytes()
        losses = rng.random(40, dtype=np.float32)
        costs = word_costs(text, losses)
        assert costs is not None
        assert costs.count == len(text.split()) + text.count(b"\n")
        converted = word_perplexity(bits_per_char(float(losses.sum()), 40), 40, costs.count)
        assert costs.perplexity <= converted * (1 + 1e-6)
        if not costs.spaces:
            assert costs.perplexity == pytest.approx(converted, rel=1e-5)


def test_no_words() -> None:
    assert word_costs(b"  ", np.ones(2)) is None
    assert word_costs(b"", np.ones(0)) is None
    with pytest.raises(ValueError, match="3 bytes have 2 losses"):
        word_costs(b"abc", np.ones(2))


@pytest.mark.data
@pytest.mark.skipif(not DATA, reason="MULSTM_DATA does not name a folder with the paper's corpora")
@pytest.mark.parametrize(("name", "words", "spaces"), [("valid", 217_646, 3_760), ("test", 245_569, 4_358)])
def test_the_papers_words(name: str, words: int, spaces: int) -> None:
    part = data.load("wikitext2", data_dir=DATA).split(name)
    costs = word_costs(part.raw(), np.ones(part.symbols_count))
    assert costs is not None
    assert costs.count == part.words == words
    assert costs.spaces == spaces  # one before the words of each line
