"""How two models recover from surprises: the paper's test of input-dependent transitions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mulstm import console
from mulstm.errors import DataError
from mulstm.units import bits


@dataclass(frozen=True)
class Recovery:
    """Mean losses in bits on the most surprising symbols (delay 0) and on those that follow them."""

    share: float
    symbols: int  # how many were surprising
    overall: tuple[float, float]  # bits/char of each model on the whole text
    by_delay: tuple[tuple[float, float], ...]  # [delay] -> one value for each model


def recovery(
    nats_a: np.ndarray,  # (n,) loss of one model on each symbol, in text order
    nats_b: np.ndarray,  # (n,) and of the other, on the same symbols
    share: float = 0.1,
    delays: int = 4,
) -> Recovery:
    """The surprising symbols are the `share` with the largest loss, averaged over both models."""
    if nats_a.shape != nats_b.shape or nats_a.ndim != 1:
        raise DataError(
            f"The two models scored {nats_a.size:,} and {nats_b.size:,} symbols. "
            "Score the same text with both."
        )
    count = round(share * nats_a.size)
    surprising = np.argpartition(nats_a + nats_b, -count)[-count:] if count else np.empty(0, dtype=np.intp)
    # The earliest of them must have that many symbols after it: the mean of none is no number.
    if not 0 < count < nats_a.size - delays or surprising.min() + delays >= nats_a.size:
        raise DataError(
            f"{console.counted(nats_a.size, 'symbol')} {'is' if nats_a.size == 1 else 'are'} too few for the "
            f"{100 * share:g}% most surprising and {delays} steps after them. Take a longer text."
        )
    pair = [np.asarray(nats, dtype=np.float64) for nats in (nats_a, nats_b)]
    by_delay = []
    for delay in range(delays + 1):
        later = surprising[surprising < nats_a.size - delay] + delay
        by_delay.append((bits(float(pair[0][later].mean())), bits(float(pair[1][later].mean()))))
    overall = (bits(float(pair[0].mean())), bits(float(pair[1].mean())))
    return Recovery(share, count, overall, tuple(by_delay))
