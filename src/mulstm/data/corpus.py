"""A corpus is a text, its alphabet, and where its train, valid and test parts begin."""

from __future__ import annotations

import os
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mulstm.data import plain, stdlib, store
from mulstm.data.alphabet import Alphabet, Bytes
from mulstm.data.known import KNOWN, Known
from mulstm.data.text import Text
from mulstm.errors import DataError
from mulstm.recipe import parse_split

SPLITS = ("train", "valid", "test", "all")
IN_MEMORY = 1 << 28  # bytes of a user's text that are read at once; longer ones are memory-mapped


@dataclass(frozen=True)
class Split:
    """A part of a corpus; symbol 0 is its first to be predicted, symbol -1 the one before it."""

    corpus: str
    name: str
    alphabet: Alphabet
    text: Text
    start: int  # in the text
    stop: int
    has_words: bool = False

    @property
    def symbols_count(self) -> int:
        """How many symbols are predicted."""
        return max(0, self.stop - self.start)

    def require_symbols(self) -> None:
        """Raises DataError where nothing is to be predicted."""
        if self.symbols_count == 0:
            raise DataError(
                f"The {self.name} part of {self.corpus} is empty. Give another part or, where this one has "
                "a share, a longer text; or train with a share for it, such as --set data.split=90-5-5."
            )

    def read(self, start: int, stop: int) -> Bytes:
        """Symbols start ... stop-1; start may be -1."""
        if not -1 <= start <= stop <= self.symbols_count:
            raise IndexError(f"symbols {start} to {stop} of {self.symbols_count}")
        low = self.start + start
        # A copy: all bytes are their own symbols, and nobody is to write into the text itself.
        return self.alphabet.encode(self.text.read(low, self.start + stop), offset=low).copy()

    def pairs(self, places: NDArray[np.int64]) -> tuple[Bytes, Bytes]:
        """For each place the symbol before it and the symbol there."""
        where = np.stack([places - 1, places]) + self.start
        try:
            x, y = self.alphabet.encode(self.text.take(where))
        except DataError:  # which counted in the block: say it again with the place in the text
            for place in np.unique(where):
                self.alphabet.encode(self.text.read(place, place + 1), offset=int(place))
            raise
        return x, y

    def raw(self) -> bytes:
        """The part as it stands in the file, for those who compress or count it."""
        return self.text.read(self.start, self.stop).tobytes()

    @cached_property
    def words(self) -> int | None:
        """White-space tokens and newlines, for corpora whose words are counted; else None."""
        if not self.has_words:
            return None
        # The first byte of a text is nobody's prediction, but the word it opens counts.
        data = self.text.read(0 if self.start == 1 else self.start, self.stop).tobytes()
        return len(data.split()) + data.count(b"\n")


class Corpus:
    """A text that has been cut; `load` makes it."""

    def __init__(
        self,
        name: str,
        text: Text,
        alphabet: Alphabet,
        ends: tuple[int, int],
        *,
        has_words: bool = False,
    ) -> None:
        self.name, self.text, self.alphabet = name, text, alphabet
        self._ends, self._has_words = ends, has_words

    def split(self, name: str) -> Split:
        """The part called train, valid or test; or all of it."""
        first, second = self._ends
        n = len(self.text)
        ranges = {"train": (0, first), "valid": (first, second), "test": (second, n), "all": (0, n)}
        if name not in ranges:
            raise DataError(f'A corpus has no part called "{name}". Say one of {", ".join(SPLITS)}.')
        start, stop = ranges[name]
        # The very first byte of the text has nothing before it: it is context, not predicted.
        return Split(self.name, name, self.alphabet, self.text, max(1, start), stop, self._has_words)

    def in_alphabet(self, alphabet: Alphabet) -> Corpus:
        """The same text in the symbols of `alphabet`, which must know every byte of it."""
        place = 0
        for block in self.text.blocks():
            alphabet.encode(block, offset=place)
            place += block.size
        return Corpus(self.name, self.text, alphabet, self._ends, has_words=self._has_words)


def load(
    name_or_path: str | Path,
    *,
    data_dir: str | Path | None = None,
    split: str = "",
    protocol: str = "",
    alphabet: str = "bytes",
) -> Corpus:
    """A corpus by its name, or any file or folder.

    `split` gives the shares of train, valid and test (where it is empty the corpus's own, for files
    "90-5-5"); `protocol` is for corpora that have several; `alphabet` is "bytes" or "corpus" (the
    distinct bytes of the whole text).
    """
    if not str(name_or_path):  # else the current folder
        raise DataError("The text's name is empty. Give a file, a folder, or a known corpus.")
    known = KNOWN.get(str(name_or_path))
    train, valid, _ = shares_of(split, "90-5-5")
    _check_protocol(name_or_path, known, protocol)
    ends = None
    if known is None:
        text = _users_text(Path(name_or_path))
    elif not known.files:
        text = Text([stdlib.sources()])
    elif len(known.files) == 1:
        text = Text([store.find(known, known.files[0], data_dir)])
    else:
        if split:
            raise DataError(f"{known.name} comes in its own three parts. Leave data.split empty.")
        protocol = protocol or (known.protocols[0].name if known.protocols else "")
        paths = [store.find(known, file, data_dir) for file in known.files]
        parts = [_under(protocol, path) for path in paths] if known.protocols else paths
        text = Text(parts)
        sizes = [len(Text([part])) for part in parts]
        ends = (sizes[0], sizes[0] + sizes[1])
    if alphabet not in ("bytes", "corpus"):
        raise DataError(f'There is no alphabet "{alphabet}". Say bytes or corpus.')
    symbols = Alphabet.bytes() if alphabet == "bytes" else Alphabet.distinct(text.blocks())
    return Corpus(
        known.name if known else Path(os.path.abspath(name_or_path)).name,  # that of "." too
        text,
        symbols,
        ends or (int(len(text) * train), int(len(text) * (train + valid))),
        has_words=bool(known and known.has_words),
    )


def shares_of(split: str, usual: str) -> tuple[Fraction, Fraction, Fraction]:
    """Of train, valid and test: what the split says, or the usual one where it says nothing."""
    shares = parse_split(split or usual)
    if shares is None:
        raise DataError(f'The split "{split}" does not say three shares of 100. Write it like {usual}.')
    return shares


def fetch(name: str, data_dir: str | Path | None = None) -> list[Path]:
    """Checked local copies of a named corpus's files, fetched where there are none."""
    known = KNOWN.get(name)
    if known is None:
        raise DataError(f'There is no corpus called "{name}". The known ones are {", ".join(KNOWN)}.')
    return [store.find(known, file, data_dir) for file in known.files]


def _check_protocol(name: str | Path, known: Known | None, protocol: str) -> None:
    allowed = [p.name for p in known.protocols] if known else []
    if protocol and protocol not in allowed:
        remedy = f"Say one of {', '.join(allowed)}." if allowed else "Leave data.protocol empty."
        raise DataError(f'{name} has no protocol "{protocol}". {remedy}')


def _under(protocol: str, path: Path) -> Bytes:
    """A PTB word file, where every line is space, words, space, newline, in one of the ways it is counted."""
    data = path.read_bytes()
    if protocol != "raw":
        lines = [line.strip(b" ") for line in data.split(b"\n")]
        data = (b" \n" if protocol == "spaced" else b"\n").join(lines)
    if protocol == "unk":
        data = data.replace(b"<unk>", b"\x1a")
    return np.frombuffer(data, dtype=np.uint8)


def _users_text(path: Path) -> Text:
    """A file, or all of a folder's files, sorted by path; unpacked into the cache where they are packed.

    Hidden files and folders (.git and the like) and empty files are left out; links to files are followed,
    those to folders are not. What is not too long is read now: its owner may change it while it is used.
    """
    if path.is_dir():
        text = Text([_unpacked(p) for p in _files_in(path) if p.stat().st_size])
        what = f"The folder {path}"
    elif path.is_file():
        _require_plain(path)
        text, what = Text([_unpacked(path)]), f"The file {path}"
    elif path.exists():
        raise DataError(f"{path} is neither a file nor a folder. Write what it gives to a file first.")
    else:
        known = ", ".join(KNOWN)
        where = "" if path.is_absolute() else f" in {Path.cwd()}"
        raise DataError(f"There is no file or folder {path}{where}. Give one, or a known corpus: {known}.")
    if len(text) == 0:
        raise DataError(f"{what} is empty. Give a text of some thousand characters or more.")
    if len(text) == 1:
        raise DataError(f"{what} holds one byte, and nothing to predict. Give a longer text.")
    return Text([text.read(0, len(text)).copy()]) if len(text) <= IN_MEMORY else text


def _files_in(folder: Path) -> list[Path]:
    """All below it that are not hidden, in the order of their paths; one folder that is shut is an error."""

    def refuse(error: OSError) -> None:
        raise DataError(f"{error.filename}: {error.strerror}. Check your rights to it.")

    found: list[Path] = []
    for where, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not is_hidden(Path(name))]
        found += [Path(where, name) for name in names if not is_hidden(Path(name))]
    return sorted(path for path in found if path.is_file())


def is_hidden(relative: Path) -> bool:
    """Whether a folder's text leaves this file of it out."""
    return any(part.startswith(".") for part in relative.parts)


def _require_plain(path: Path) -> None:
    """Refuses a file whose bytes are hardly meant as a text; in a folder all are."""
    meant = "If its bytes are meant, put it into a folder of its own and give that."
    if path.suffix.lower() in plain.NOT_READ:
        may_stay = "gz, bz2, xz, zip and tar may stay"
        raise DataError(f"{path} is packed in a way that is not read here. Unpack it; {may_stay}. {meant}")
    if path.suffix.lower() in store.PACKED:
        return
    with path.open("rb") as file:
        fault = plain.fault_of(file.read(plain.HEAD))
    if fault:
        raise DataError(f"{path} {fault.what}. {fault.remedy}. {meant}")


def _unpacked(path: Path) -> Path:
    if path.suffix.lower() not in store.PACKED:
        return path
    name = path.stem.removesuffix(".tar")
    target = store.cache_folder() / "unpacked" / f"{store.key_of(path)}-{name[-50:]}"
    if not store.is_sound(target):
        store.unpack(path, target, name)
        store.seal(target)
    return target
