"""What words cost under a model of bytes: the probabilities of their bytes and of their end, multiplied."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mulstm.units import perplexity

SPACES = b" \t\n\r\v\f"
_NEWLINE = 10


@dataclass(frozen=True)
class WordCosts:
    """A text's cost in two parts: its words and newlines, and the white space that belongs to none."""

    count: int  # words and newlines, as the paper counts them
    nats: float
    spaces: int  # symbols of white space that end no word and no line
    spaces_nats: float

    @property
    def perplexity(self) -> float | None:
        """Of a word by its own bytes. The paper's conversion adds `spaces_nats`, so it is never smaller."""
        return perplexity(self.nats, self.count)


def word_costs(text: bytes, losses: npt.NDArray[np.floating]) -> WordCosts | None:
    """From the nats of each byte of a text; None if there is no word and no newline in it."""
    data = np.frombuffer(text, dtype=np.uint8)
    if data.shape != losses.shape:
        raise ValueError(f"{data.size} bytes have {losses.size} losses")
    is_space = np.isin(data, np.frombuffer(SPACES, dtype=np.uint8))
    after_space = np.concatenate([[True], is_space[:-1]])
    is_newline = data == _NEWLINE
    count = int((~is_space & after_space).sum() + is_newline.sum())
    # The first space after a word ends it; a newline is a word of its own, or ends one.
    is_other = is_space & after_space & ~is_newline
    nats = float(losses.sum(dtype=np.float64))
    other = float(losses[is_other].sum(dtype=np.float64))
    return WordCosts(count, nats - other, int(is_other.sum()), other) if count else None
