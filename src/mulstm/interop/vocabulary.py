"""The alphabets of foreign models, with their start, stop and pad symbols."""

from __future__ import annotations

from mulstm.convention import RESIDUES, padded_bytes, protein_alphabet
from mulstm.data.alphabet import Alphabet
from mulstm.interop.weights import Array

BYTES = 256
TEXT8 = 27

START = len(RESIDUES)


def protein() -> Alphabet:
    """UniRep's 26 tokens."""
    return protein_alphabet()


def bytes_() -> Alphabet:
    """The 256 bytes."""
    return Alphabet.bytes()


def bytes_and_pad() -> Alphabet:
    """The 256 bytes and, last, a pad symbol that no text holds."""
    return padded_bytes()


def pad_last(rows: Array) -> Array:
    """Rows that begin with the pad symbol, in our order; 256 rows have none."""
    return rows if len(rows) == BYTES else rows[[*range(1, len(rows)), 0]]


def pad_first(rows: Array) -> Array:
    """The way back."""
    return rows if len(rows) == BYTES else rows[[-1, *range(len(rows) - 1)]]
