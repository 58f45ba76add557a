"""What a model writes may hold control characters; a terminal must not obey them."""

from __future__ import annotations

import sys

from mulstm import console


def shown(text: str) -> str:
    """The text unchanged when it goes to a file; on a terminal without control characters."""
    return console.printable(text) if sys.stdout.isatty() else text
