"""Units: the conversions every printed number goes through."""

import math

import pytest

from mulstm.units import bits, bits_per_char, perplexity, word_perplexity


def test_nats_to_bits() -> None:
    assert bits(math.log(2.0)) == 1.0
    assert bits_per_char(8 * math.log(2.0), 4) == 2.0


def test_word_perplexity_of_the_paper() -> None:
    # 1.2649 bits/byte on 1,256,449 bytes and 245,569 words.
    assert word_perplexity(1.2649, 1_256_449, 245_569) == pytest.approx(88.76, abs=0.01)


def test_a_perplexity_that_no_float_holds_is_none() -> None:
    assert perplexity(4 * math.log(3.0), 4) == pytest.approx(3.0)
    assert perplexity(709.0, 1) == pytest.approx(math.exp(709.0))
    assert perplexity(710.0, 1) is None
    assert word_perplexity(1.0, 1_023, 1) == 2.0**1023
    assert word_perplexity(8.0, 1_000, 1) is None


def test_nothing_has_no_mean() -> None:
    with pytest.raises(ValueError, match="0 symbols"):
        bits_per_char(0.0, 0)
    with pytest.raises(ValueError, match="0 words"):
        word_perplexity(1.0, 5, 0)
