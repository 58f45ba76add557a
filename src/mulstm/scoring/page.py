"""The heat map of a model's surprise."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from mulstm import heat
from mulstm.heat import Part, Scale
from mulstm.scoring import Score
from mulstm.units import bits

HIGHEST = 10.0  # bits; what is rarer than one in a thousand looks the same
HIGHEST_RESIDUE = 8.0  # residues are never as rare as letters can be


def surprise(title: str, scores: Sequence[Score]) -> Iterator[str]:
    """The page, in pieces, for scores with losses."""
    lead = (
        "Each character is coloured by the bits that the model needs for it, given all that stands before "
        "it: plain where it was expected, deep where it was a surprise. Rest on a character for its number."
    )
    highest = HIGHEST_RESIDUE if scores and scores[0].protein else HIGHEST
    yield from heat.page(title, lead, (_part(score) for score in scores), Scale("bits", 0.0, highest))


def _part(score: Score) -> Part:
    if score.losses is None:
        raise ValueError("surprise() needs scores with their losses")
    note = f"{score.symbols:,} symbols, {score.bits_per_symbol:.3f} bits each"
    end = "\u25a0" if len(score.text) < score.symbols else ""
    return Part(score.id, note, score.text, np.asarray(bits(1.0) * score.losses), end, score.protein)
