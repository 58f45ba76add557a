"""What a model writes may hold control characters; a terminal must not obey them."""

from __future__ import annotations

import sys


def shown(text: str) -> str:
    """The text unchanged when it goes to a file; on a terminal without control characters."""
    if not sys.stdout.isatty():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
