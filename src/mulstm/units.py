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


def perplexity(nats: float, count: float) -> float | None:
    """e to the power of the mean over `count` things that cost `nats` in all; None if no float holds it."""
    try:
        return math.exp(nats / count)
    except OverflowError:
        return None


def word_perplexity(bits_per_symbol: float, symbols: int, words: int) -> float | None:
    """The paper's conversion: 2 to the power of bits/symbol x symbols/words; likewise."""
    if words <= 0:
        raise ValueError(f"a perplexity over {words} words has no value")
    try:
        return float(2.0 ** (bits_per_symbol * symbols / words))
    except OverflowError:
        return None
