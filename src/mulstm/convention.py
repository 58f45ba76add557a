"""How a record becomes symbols for a model: what is cleaned, what stands before it and what ends it."""

from __future__ import annotations

import html
import re
import unicodedata
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mulstm.data.alphabet import Alphabet
from mulstm.errors import DataError
from mulstm.recipe import CONVENTIONS

Symbols = npt.NDArray[np.int16]  # a record may be long, and -1 is a target

# UniRep's tokens 0 ... 23; three letters share the last one with X.
RESIDUES = b"-MRHKDESTNQCUGPAVIFYWLOX"

_TAG = re.compile(r"<.*?>")
_SPACE = re.compile(r"\s+")
_NUMBER = re.compile("&#0*([0-9]+)")
# What ASCII has for signs that Unicode does not decompose.
_SIGNS = str.maketrans({"‘": "'", "’": "'", "“": '"', "”": '"', "–": "-", "—": "--", "•": "*"})


@dataclass(frozen=True)
class Convention:
    """The alphabet of a model with the manner in which its texts are written."""

    alphabet: Alphabet
    name: str = ""  # stored in a checkpoint's source
    opens: bool = False  # trained on records, so that it has read none without what stands before it

    @classmethod
    def of(cls, alphabet: Alphabet, source: Mapping[str, Any], opens: bool = False) -> Convention:
        """What a checkpoint's metadata says; a convention of a later version is an error."""
        name = str(source.get("convention", ""))
        if name not in CONVENTIONS:
            raise DataError(
                f'The model follows the convention "{name}", which this version does not know. '
                "Install a newer mulstm."
            )
        return cls(alphabet, name, opens)

    def cleaned(self, text: bytes) -> bytes:
        """The text as the model's training data had it, without what stands before and after."""
        if self.name == "openai-review":
            return _text(text, lambda s: _unescaped(s).replace("\n", " ").strip())
        if self.name == "nvidia-review":
            return _text(text, _nvidia)
        return text

    @property
    def start(self) -> Symbols:
        """What is fed before a record's own symbols, and never scored."""
        special = self.alphabet.special("start")
        if special is not None:
            return np.array([special], dtype=np.int16)
        if self.name.endswith("-review"):
            return self.encoded(b"\n ")
        return self.encoded(self.alphabet.border)

    @property
    def stop(self) -> Symbols:
        """What ends a record: scored, but no part of its representation."""
        special = self.alphabet.special("stop")
        if special is not None:
            return np.array([special], dtype=np.int16)
        return self.encoded(b" " if self.name.endswith("-review") else self.alphabet.border)

    def body(self, text: bytes, record: str) -> Symbols:
        """The record's own symbols; an error names the record, the letter and the place."""
        if self.name == "protein" and not text:  # what stands around it would be all there is
            raise DataError(f"Record {record} is empty. Take it out of the input.")
        return self.encoded(self.cleaned(text), f"Record {record}")

    @property
    def around(self) -> tuple[int, int]:
        """How many symbols of `read` stand before and after the record's own."""
        if not (self.name or self.opens):
            return 0, 0
        return self.start.size, self.stop.size if self.name == "openai-review" else 0

    def read(self, text: bytes, record: str) -> Symbols:
        """What a representation is made of.

        A protein comes after its start symbol, a review with its opening (and, for OpenAI's model, its
        closing space), a record after the line's end for a model of records; any other text stands alone.
        """
        before, after = self.around
        body = self.body(text, record)
        symbols = np.concatenate([self.start[:before], body, self.stop[:after]])
        if symbols.size == 0:
            raise DataError(f"Record {record} is empty. Take it out of the input.")
        return symbols

    def scored(self, text: bytes, record: str) -> tuple[Symbols, Symbols]:
        """(input, targets), of one length: each of the record's own symbols, and its end, is predicted once.

        A target of -1 is not counted. Where nothing can stand before a record, its first symbol is given.
        """
        whole = np.concatenate([self.start, self.body(text, record), self.stop])
        if whole.size < 2:
            raise DataError(f"Record {record} is too short to be scored. Take it out of the input.")
        targets = whole[1:].copy()
        targets[: max(0, self.start.size - 1)] = -1
        return whole[:-1], targets

    def encoded(self, text: bytes, name: str = "The text") -> Symbols:
        """The symbols of a text as it stands; an error begins with its name."""
        try:
            return self.alphabet.encode(text).astype(np.int16)
        except DataError as error:
            raise self._fault(text, name) from error

    def _fault(self, text: bytes, name: str) -> DataError:
        known = self.alphabet.symbols + self.alphabet.aliases[::2]
        place = next(k for k, byte in enumerate(text) if byte not in known)
        letter = text[place : place + 1]
        shown = repr(letter.decode("ascii")) if 0x20 < letter[0] < 0x7F else f"0x{letter.hex()}"
        if self.name != "protein":
            return DataError(
                f"{name} has the byte {shown} at position {place + 1}, which is not in the model's "
                "alphabet. Take it out, or use a model of all bytes."
            )
        if letter.upper() in known:
            help = "Write residues in upper case (embed, score and neurons do with --upper)."
        elif letter == b">" and place == 0:
            help = (
                "FASTA that its file's name does not tell wants --as fasta (train: --set data.records=fasta)."
            )
        elif letter == b">":
            help = "Begin a new line with it where it opens a FASTA record, or take it out."
        elif letter == b"*" and place == len(text) - 1:
            help = "The end is understood: take the stop sign out."
        elif letter == b"*":
            help = "End the record before the stop sign, or write X in its place."
        else:
            help = "Residues are upper-case letters of the amino-acid code; write X for an unknown one."
        return DataError(f"{name} has {shown} at position {place + 1}, which is no residue. {help}")


def protein_alphabet() -> Alphabet:
    """UniRep's 26 tokens."""
    return Alphabet(RESIDUES, specials=("start", "stop"), aliases=b"ZXBXJX")


def padded_bytes() -> Alphabet:
    """The 256 bytes and, last, a pad symbol that no text holds."""
    return Alphabet(bytes(range(256)), specials=("pad",))


# What a recipe calls the alphabets that records can be written in.
ALPHABETS: dict[str, Callable[[], Alphabet]] = {
    "bytes": Alphabet.bytes,
    "protein": protein_alphabet,
    "padded-bytes": padded_bytes,
}


def name_of(alphabet: Alphabet) -> str:
    """What a recipe calls it: "corpus" where it is the bytes of some text."""
    return next((name for name, make in ALPHABETS.items() if make() == alphabet), "corpus")


def _text(raw: bytes, change: Callable[[str], str]) -> bytes:
    """Bytes that are not UTF-8 pass through unchanged."""
    return change(raw.decode(errors="surrogateescape")).encode(errors="surrogateescape")


def _unescaped(text: str) -> str:
    """Entities resolved; of a number as long as Python refuses to read no character is meant."""
    short = _NUMBER.sub(lambda found: "&#" + (found[1] if len(found[1]) < 9 else "9" * 9), text)
    return html.unescape(short)


def _without_tags(line: str) -> str:
    """Looked for up to the last that closes one: signs that open many and close none would take for ever."""
    end = line.rfind(">") + 1
    return _TAG.sub(" ", line[:end]) + line[end:]


def _nvidia(text: str) -> str:
    """In the order of the original: a space for a tag, ASCII only, entities resolved, one space at a time."""
    untagged = "\n".join(map(_without_tags, text.split("\n")))
    plain = unicodedata.normalize("NFKD", untagged.translate(_SIGNS))
    ascii_only = plain.encode("ascii", errors="ignore").decode()
    return _SPACE.sub(" ", _unescaped(ascii_only)).strip()
