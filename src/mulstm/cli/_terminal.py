"""A text, or its bytes, on stdout while it is drawn."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

from mulstm import console


def sound(prompt: str) -> str:
    """A prompt as what is drawn after it: bytes that are no UTF-8 become the replacement character."""
    return os.fsencode(prompt).decode(errors="replace")


def write_drawn(prompt: str, pieces: Iterator[list[bytes]]) -> None:
    """A prompt and what one stream draws after it, as it is drawn."""
    from mulstm.sample import as_text

    sys.stdout.write(console.shown(sound(prompt)))
    for text in as_text(piece for (piece,) in pieces):
        sys.stdout.write(console.shown(text))
        sys.stdout.flush()
    console.result("")


def write_bytes(pieces: Iterator[list[bytes]]) -> None:
    """What one stream draws, as it is."""
    for (piece,) in pieces:
        sys.stdout.buffer.write(piece)
        sys.stdout.buffer.flush()
