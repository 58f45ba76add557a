"""Text coloured by a number for each of its symbols: one page that needs nothing else and runs nothing."""

from __future__ import annotations

import html
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mulstm.console import JOINERS

Values = npt.NDArray[np.float64]

LEVELS = 16
# Characters that would change how the rest of the page is read, or cannot be seen.
_HIDDEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}


@dataclass(frozen=True)
class Part:
    """One text with a number for each byte; a character's number is the sum of its bytes' (or their last)."""

    heading: str
    note: str
    text: bytes
    values: Values  # (bytes,)
    end: str = ""  # what stands after the text without being a byte of it, and takes the last value
    monospace: bool = False


@dataclass(frozen=True)
class Scale:
    """How numbers become colours. Diverging scales have two ends, of opposite sign."""

    unit: str
    low: float
    high: float
    diverging: bool = False
    adds: bool = True  # whether a character's number is the sum of its bytes', not the last

    def level(self, value: float) -> int:
        """0 ... LEVELS - 1; what is beyond the ends takes their colour."""
        share = (value - self.low) / (self.high - self.low)
        return int(np.clip(share * LEVELS, 0, LEVELS - 1)) if np.isfinite(share) else 0


def characters(text: bytes, values: Values, adds: bool = True) -> Iterator[tuple[str, float]]:
    """UTF-8 characters, with the marks that combine with them, and their numbers.

    Bytes that are no UTF-8 stand for themselves as \\xNN.
    """
    held: tuple[str, float] | None = None
    place = 0
    while place < len(text):
        size = _size(text[place])
        try:
            shown = text[place : place + size].decode("utf-8")
        except UnicodeDecodeError:
            size, shown = 1, f"\\x{text[place]:02x}"
        taken = values[place : place + size]
        value = float(taken.sum() if adds else taken[-1])
        place += size
        if held is not None and unicodedata.category(shown[0])[0] == "M":
            held = held[0] + shown, held[1] + value if adds else value
            continue
        if held is not None:
            yield held
        held = shown, value
    if held is not None:
        yield held


def page(title: str, lead: str, parts: Iterable[Part], scale: Scale) -> Iterator[str]:
    """The page in pieces. All that comes from outside is escaped here and nowhere else."""
    yield _HEAD.format(title=_safe(title), style=_STYLE + colours(scale))
    yield f"<h1>{_safe(title)}</h1>\n<p>{_safe(lead)}</p>\n{_legend(scale)}\n"
    for part in parts:
        yield f"<section>\n<h2>{_safe(part.heading)}</h2>\n"
        yield f'<p class="note">{_safe(part.note)}</p>\n<pre{_MONOSPACE if part.monospace else ""}>'
        length = len(part.text)
        for shown, value in characters(part.text, part.values[:length], scale.adds):
            yield _span(shown, value, scale)
        if part.end:
            yield _span(part.end, float(part.values[-1]), scale)
        yield "</pre>\n</section>\n"
    yield "</body>\n</html>\n"


def colours(scale: Scale, name: str = "c") -> str:
    """Rules for the classes c0, c1, ... of the levels, on a light page and a dark one."""

    def rules(dark: bool) -> str:
        return "\n".join(f".{name}{k} {{ background: {c} }}" for k, c in enumerate(_ramp(scale, dark)))

    return f"{rules(False)}\n@media (prefers-color-scheme: dark) {{\n{rules(True)}\n}}"


def visible(text: str) -> str:
    """Control and direction characters by their code, so that they can neither hide nor reorder anything."""
    return "".join(_shown(c) for c in text)


def _safe(text: str) -> str:
    return html.escape(visible(text))


def _shown(character: str) -> str:
    if character in "\n\t":
        return character
    if ord(character) < 32:
        return chr(0x2400 + ord(character))
    if character in JOINERS or unicodedata.category(character) not in _HIDDEN:
        return character
    return f"U+{ord(character):04X}"


def _span(text: str, value: float, scale: Scale) -> str:
    tip = f"{value:+.2f}" if scale.diverging else f"{value:.2f}"
    # A line's end has no width of its own, so a sign carries its colour.
    body = "\u21b5</i>\n" if text == "\n" else f"{_safe(text)}</i>"
    return f'<i class="c{scale.level(value)}" title="{tip} {_safe(scale.unit)}">{body}'


def _size(byte: int) -> int:
    return 1 if byte < 0xC0 else 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4


def _legend(scale: Scale) -> str:
    steps = "".join(f'<i class="c{k}">&nbsp;</i>' for k in range(LEVELS))
    low, high = (f"{x:+g}" if scale.diverging else f"{x:g}" for x in (scale.low, scale.high))
    return f'<p class="legend">{low} {steps} {high} {_safe(scale.unit)}</p>'


def _ramp(scale: Scale, dark: bool) -> Sequence[str]:
    """From the page's own colour to a strong one, or between two strong ones."""
    page_colour = np.array([24, 26, 30] if dark else [255, 255, 255], dtype=float)
    warm = np.array([170, 62, 20] if dark else [244, 120, 60], dtype=float)
    cold = np.array([28, 84, 150] if dark else [90, 160, 230], dtype=float)
    ramp = []
    for k in range(LEVELS):
        x = k / (LEVELS - 1)
        strength, end = (abs(2 * x - 1), warm if x > 0.5 else cold) if scale.diverging else (x, warm)
        r, g, b = np.rint(page_colour + strength * (end - page_colour)).astype(int)
        ramp.append(f"rgb({r} {g} {b})")
    return ramp


_MONOSPACE = ' class="monospace"'

_HEAD = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
{style}
</style>
</head>
<body>
"""

_STYLE = """:root { color-scheme: light dark }
body { font: 16px/1.6 Georgia, "Times New Roman", serif; max-width: 46rem; margin: 2rem auto; padding: 0 1rem;
       background: #fff; color: #1b1d21 }
@media (prefers-color-scheme: dark) { body { background: #181a1e; color: #e6e4df } }
h1 { font-size: 1.5rem; line-height: 1.25 }
h2 { font-size: 1.05rem; margin: 2rem 0 0; overflow-wrap: anywhere }
.note, .legend { font: 13px/1.5 system-ui, sans-serif; opacity: .75; margin: .2rem 0 .6rem }
.legend { opacity: 1 }
pre { font: inherit; white-space: pre-wrap; overflow-wrap: anywhere; margin: 0 }
pre.monospace { font: 14px/1.7 ui-monospace, "DejaVu Sans Mono", monospace; overflow-wrap: anywhere }
section { overflow: hidden }
i { font-style: normal }
"""
