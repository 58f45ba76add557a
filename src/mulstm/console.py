"""What a user sees: results on stdout; everything else, live or in plain lines, on stderr."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

# Seconds between plain lines, and between repaints of the live one.
PLAIN_EVERY = 10.0
PAINT_EVERY = 0.1
JOINERS = "\u200c\u200d"  # cannot be seen, and shape the letters beside them


def result(text: str) -> None:
    """A line of what was asked for."""
    sys.stdout.write(shown(text) + "\n")
    sys.stdout.flush()


def result_json(value: Any, *, indent: int | None = 2) -> None:
    """The same for machines; the numbers JSON has no word for must have been dealt with before."""
    escaped = not (sys.stdout.encoding or "").lower().startswith("utf")  # else another escape would be put in
    result(json.dumps(value, indent=indent, ensure_ascii=escaped, allow_nan=False))


def note(text: str) -> None:
    """A line about what is going on. No work is given up because it cannot be told."""
    if sys.stderr is None:  # of a program without a console
        return
    with contextlib.suppress(OSError):
        sys.stderr.write(printable(text) + "\n")
        sys.stderr.flush()


def printable(text: str) -> str:
    """The text without control characters: names and files hold any, and no terminal is to obey them."""
    return "".join(c if _is_harmless(c) else "\N{REPLACEMENT CHARACTER}" for c in text)


def _is_harmless(c: str) -> bool:
    return c.isprintable() or c in "\n\t" + JOINERS or unicodedata.category(c) == "Zs"


def in_line(text: str) -> str:
    """A name as one field of a row: what would end the line or the field is told by its sign."""
    signs = {"\t": "\N{SYMBOL FOR HORIZONTAL TABULATION}", "\n": "\N{SYMBOL FOR LINE FEED}"}
    return printable("".join(signs.get(c, c) for c in text))


def shown(text: str) -> str:
    """The text as stdout gets it: unchanged in a file or a pipe, printable on a terminal."""
    return printable(text) if sys.stdout.isatty() else text


def error(text: str) -> None:
    """The two sentences of a fault."""
    if is_live():
        _console().print(f"[red]error:[/red] {_escaped(printable(text))}", soft_wrap=True)
    else:
        note(f"error: {text}")


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table on stdout: columns that look like numbers stand right."""
    widths = [max(len(row[i]) for row in [headers, *rows]) for i in range(len(headers))]
    right = [bool(rows) and all(_is_number(row[i]) for row in rows) for i in range(len(headers))]
    for row in [headers, ["-" * width for width in widths], *rows]:
        cells = [c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True)]
        result("  ".join(cells).rstrip())


def speaks() -> bool:
    """Of several processes (torchrun's) the first speaks for all; so does one whose RANK is no number."""
    several, rank = os.environ.get("WORLD_SIZE", "1") != "1", os.environ.get("RANK", "0")
    return not several or not rank.isdecimal() or not rank.strip("0")


def is_live() -> bool:
    """Whether stderr is a terminal that can repaint a line."""
    return sys.stderr is not None and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


def duration(seconds: float) -> str:
    """Seconds as people say them: 0.4 s, 42 s, 3 min 20 s, 1 h 05 min."""
    if 0 < seconds < 0.95:
        return f"{max(seconds, 0.1):.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def quantity(count: float) -> str:
    """Three figures and a letter: 950, 23.4k, 1.42M."""
    for scale, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= scale * 0.9995:
            value = count / scale
            return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f}{letter}"
    return f"{count:.0f}"


def counted(n: int, noun: str) -> str:
    """So many of them: 1 record, 2,000 records."""
    return f"{n:,} {noun}{'s' * (n != 1)}"


def decimal(value: float | None, digits: int) -> str:
    """With so many digits behind the point; what is huge, as an untrained model's perplexity, in short.

    None is more than a float holds.
    """
    if value is None:
        return "> 1e308"
    return f"{value:.{digits}{'f' if value < 1e6 else 'e'}}"


class Progress:
    """One line that says how far, how good and how fast; repainted on a terminal, else now and then.

    A total of 0 is one that is not known: then it says how much.
    """

    def __init__(
        self, total: int, *, label: str = "", done: int = 0, warm_up: int = 0, unit: str = "symbols"
    ) -> None:
        self._total, self._label, self._done, self._unit = total, label, done, unit
        self._extra: dict[str, str] = {}
        # The first `warm_up` of them are slow, something being compiled: no speed is made of them.
        self._warm = done + warm_up
        self._counted = done
        self._marks = [] if warm_up else [(time.monotonic(), done, done)]
        self._updated = self._shown = 0.0
        self._live: Any = None

    def __enter__(self) -> Progress:
        if is_live():
            from rich.live import Live

            # No thread of its own: it repaints when told, and never inside somebody else's work.
            self._live = Live(console=_console(), auto_refresh=False, transient=False)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._updated > self._shown:
            self._show()
        if self._live is not None:
            with contextlib.suppress(OSError):
                self._live.stop()
            self._live = None

    def update(
        self, done: int, *, counted: int | None = None, bits_per_char: float | None = None, **extra: str
    ) -> None:
        """`done` of the total; other words to show come by name, as in valid="1.52".

        Where some of what is done is empty, the speed is told of those `counted`; the time goes by all.
        """
        now = self._updated = time.monotonic()
        self._done, self._counted = done, done if counted is None else counted
        if bits_per_char is not None:
            self._extra["bits/char"] = decimal(bits_per_char, 3)
        self._extra |= extra
        if not self._marks:
            self._marks = [(now, done, self._counted)] if done >= self._warm else []
        elif now - self._marks[-1][0] >= 0.5:
            # The speed of the last half minute or so, not of the whole run.
            self._marks = [*self._marks[-60:], (now, done, self._counted)]
        if now - self._shown >= (PAINT_EVERY if self._live is not None else PLAIN_EVERY):
            self._show()

    def note(self, text: str) -> None:
        """A line that stays, above the live one."""
        if self._live is not None:
            with contextlib.suppress(OSError):
                self._live.console.print(_escaped(printable(text)), highlight=False)
        else:
            note(text)

    def _speeds(self) -> tuple[float, float]:
        """Of all that is done, and of those counted, over the last half minute or so; 0: nothing is known."""
        here = self._updated, self._done, self._counted
        then, done, counted = self._marks[0] if self._marks else here
        seconds = max(1e-9, self._updated - then)
        return (self._done - done) / seconds, (self._counted - counted) / seconds

    def line(self) -> str:
        """What is shown, without colour."""
        share = min(1.0, self._done / self._total) if self._total else 1.0
        parts = [self._label] if self._label else []
        parts.append(f"{share:4.0%}" if self._total else f"{quantity(self._done)} {self._unit}")
        parts += [
            f"{value} {name}" if name == "bits/char" else f"{name} {value}"
            for name, value in self._extra.items()
        ]
        pace, speed = self._speeds()
        if speed > 0:
            parts.append(f"{quantity(speed)} {self._unit}/s")
        if pace > 0 and share < 1:
            parts.append(f"{duration((self._total - self._done) / pace)} left")
        return printable("  ".join(parts))

    def _show(self) -> None:
        self._shown = time.monotonic()
        if self._live is None:
            note(self.line())
            return
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        grid = Table.grid(padding=(0, 1))
        grid.add_column()
        grid.add_column(no_wrap=True)
        bar = ProgressBar(self._total or None, min(self._done, self._total), width=16)
        grid.add_row(bar, Text(self.line()))  # of a plain string Rich would take [name] for markup
        with contextlib.suppress(OSError):
            self._live.update(grid, refresh=True)


@contextlib.contextmanager
def moving(
    total: int, label: str, quiet: bool, unit: str, passes: int = 1
) -> Iterator[Callable[[int], None]]:
    """A function to be told how many more are done; of each it hears `passes` times."""
    if quiet:
        yield lambda more: None
        return
    done = 0
    with Progress(total, label=label, warm_up=1, unit=unit) as screen:

        def add(more: int) -> None:
            nonlocal done
            done += more
            screen.update(done // passes)

        yield add


def _console() -> Console:
    from rich.console import Console

    return Console(stderr=True, highlight=False)


def _escaped(text: str) -> str:
    from rich.markup import escape

    return escape(text)


def _is_number(text: str) -> bool:
    stripped = text.strip().replace(",", "").removesuffix("%")
    try:
        float(stripped or 0)
    except ValueError:
        return stripped in ("-", "–")
    return True
