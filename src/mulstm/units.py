"""Nats, bits and perplexities are converted here and nowhere else."""

from __future__ import annotations

import math


def bits(nats: float) -> float:
    """The same amount of information in bits."""
    return nats / math.log(2.0)


def bits_per_char(nats: float, symbols: int) -> float:
    """The mean over `symbols` predictions that cost `nats` in all."""
    if symbols <= 0:
        raise ValueError(f"a mean over {symbols} symbols has no value")
    return bits(nats) / symbols


def perplexity(nats: float, count: float) -> float:
    """e to the power of the mean over `count` things that cost `nats` in all."""
    return math.exp(min(nats / count, 700.0))  # e to the 710 is more than a float holds


def word_perplexity(bits_per_symbol: float, symbols: int, words: int) -> float:
    """The paper's conversion: 2 to the power of bits/symbol x symbols/words."""
    if words <= 0:
        raise ValueError(f"a perplexity over {words} words has no value")
    return float(2.0 ** min(bits_per_symbol * symbols / words, 1000.0))
