"""How probable a model finds a text: one score a record, with losses, words and the next symbol if wanted."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mulstm import checkpoint
from mulstm.checkpoint import Checkpoint
from mulstm.convention import Convention
from mulstm.errors import DataError, no_number
from mulstm.packing import LANES, Symbols, nats_of, run
from mulstm.predict import impossible
from mulstm.records import Record, texts
from mulstm.units import bits, perplexity
from mulstm.words import SPACES

__all__ = ["Score", "Word", "score", "scores", "total", "words"]


@dataclass(frozen=True)
class Score:
    """The record's own symbols and its end, each predicted once."""

    id: str
    text: bytes  # what was predicted: the cleaned record and the byte that ends it, where a byte does
    symbols: int
    nats: float
    protein: bool = False
    losses: npt.NDArray[np.float64] | None = None  # nats of each symbol
    following: list[tuple[str, float]] = field(default_factory=list)  # likeliest symbols after the record

    @property
    def bits_per_symbol(self) -> float:
        return bits(self.nats) / self.symbols

    @property
    def perplexity(self) -> float | None:
        """Of a symbol."""
        return perplexity(self.nats, self.symbols)

    @cached_property
    def characters(self) -> int:
        """How many the text has."""
        return len(self.text.decode("utf-8", errors="replace"))

    @cached_property
    def words(self) -> int:
        """How many the text has."""
        return len(self.text.split())

    def as_dict(self) -> dict[str, Any]:
        """One JSON object; texts add bytes, characters and words."""
        plain: dict[str, Any] = {
            "id": self.id,
            "symbols": self.symbols,
            "nats": self.nats,
            "bits_per_symbol": self.bits_per_symbol,
            "perplexity": self.perplexity,
        }
        if not self.protein:
            characters, count = self.characters, self.words
            plain |= {"bytes": len(self.text), "characters": characters, "words": count}
            plain["bits_per_byte"] = bits(self.nats) / len(self.text) if self.text else None
            plain["bits_per_character"] = bits(self.nats) / characters if characters else None
            plain["bits_per_word"] = bits(self.nats) / count if count else None
            plain["word_perplexity"] = perplexity(self.nats, count) if count else None
        if self.losses is not None:
            plain["losses"] = self.losses.tolist()
        if self.following:
            plain["next"] = [{"symbol": name, "probability": p} for name, p in self.following]
        return plain


@dataclass(frozen=True)
class Word:
    """A word's nats: those of its bytes and of the one byte that ends it."""

    text: bytes
    start: int  # its first byte's place in the score's text
    nats: float


def words(score: Score) -> Iterator[Word]:
    """The words of a score with losses: a byte model gives word probabilities without a vocabulary."""
    if score.losses is None:
        raise ValueError("words() needs a score with its losses")
    sums = np.concatenate([[0.0], np.cumsum(score.losses)])
    place, n = 0, len(score.text)
    while place < n:
        if score.text[place] in SPACES:
            place += 1
            continue
        end = next((k for k in range(place, n) if score.text[k] in SPACES), n)
        last = min(end + 1, n)
        yield Word(score.text[place:end], place, float(sums[last] - sums[place]))
        place = last


def score(
    model: Checkpoint | str | os.PathLike[str],
    sequences: str | bytes | Iterable[str | bytes],
    *,
    lanes: int = LANES,
    losses: bool = False,
    following: int = 0,
) -> list[Score]:
    """The scores of texts or proteins under the model's own convention, in the order given; see `scores`."""
    loaded = checkpoint.of(model)
    named = (Record(str(k), text) for k, text in enumerate(texts(sequences), 1))
    return list(scores(loaded, named, lanes=lanes, losses=losses, following=following))


def scores(
    loaded: Checkpoint,
    records: Iterable[Record],
    *,
    lanes: int = LANES,
    losses: bool = False,
    following: int = 0,
) -> Iterator[Score]:
    """Scores of a stream of records, in its order."""
    loaded.require_head()
    ready: dict[int, Score] = {}
    place = 0
    for index, done in _unordered(loaded, records, lanes, losses, following):
        ready[index] = done
        while place in ready:
            yield ready.pop(place)
            place += 1


@dataclass
class _Open:
    """A record that is being read."""

    id: str
    text: bytes
    nats: float = 0.0
    losses: list[npt.NDArray[np.float64]] = field(default_factory=list)


def _unordered(
    loaded: Checkpoint,
    records: Iterable[Record],
    lanes: int,
    losses: bool,
    following: int,
) -> Iterator[tuple[int, Score]]:
    if following < 0:
        raise DataError(f"The {following} likeliest symbols cannot be told. Give 0 or more.")
    model, convention = loaded.model, loaded.convention
    reading: dict[int, _Open] = {}
    targets: dict[int, Symbols] = {}
    never = impossible(model)
    names = [symbol_name(convention, k) for k in range(convention.alphabet.size)] if following else []

    def read() -> Iterator[Symbols]:
        for index, record in enumerate(records):
            x, y = convention.scored(record.text, record.id)
            require_possible(y, never, convention, f"Record {record.id}")
            reading[index] = _Open(record.id, convention.alphabet.decode(y[y >= 0]))
            targets[index] = y
            yield x

    for packed, logits, _ in run(model, model, read(), lanes=lanes):
        nats, counted = nats_of(packed, logits, targets)
        for lane, index in enumerate(packed.record):
            piece = nats[lane][counted[lane]]
            reading[index].nats += float(piece.sum())
            if losses:
                reading[index].losses.append(piece)
        for lane in packed.ended:
            done = reading.pop(packed.record[lane])
            if not math.isfinite(done.nats):
                raise no_number(f"record {done.id}", model.precision)
            symbols = int((targets.pop(packed.record[lane]) >= 0).sum())
            after: list[tuple[str, float]] = []
            if following:
                (after,) = likeliest(torch.softmax(logits[lane, -1:].double(), dim=-1), names, following)
            yield (
                packed.record[lane],
                Score(
                    done.id,
                    done.text,
                    symbols,
                    done.nats,
                    convention.name == "protein",
                    np.concatenate(done.losses) if losses else None,
                    after,
                ),
            )


def require_possible(y: Symbols, never: Sequence[int], convention: Convention, name: str) -> None:
    """A symbol without a class would cost thousands of nats, and say nothing about the text."""
    if never and (bad := np.flatnonzero(np.isin(y, never))).size:
        place = int(bad[0]) + 1 - int((y < 0).sum())
        raise DataError(
            f"{name} has {symbol_name(convention, int(y[bad[0]]))!r} at position {place}, which the model's "
            "output layer has no class for. Take it out."
        )


def likeliest(p: Tensor, names: Sequence[str], count: int) -> list[list[tuple[str, float]]]:
    """For each row of probabilities, (n, N), its likeliest symbols."""
    top = p.topk(min(count, p.shape[1]), dim=1)
    rows = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    return [[(names[symbol], share) for symbol, share in zip(*row, strict=True)] for row in rows]


def symbol_name(convention: Convention, symbol: int) -> str:
    """How a symbol is shown: its character, or its special name in angle brackets."""
    specials = convention.alphabet.specials
    ordinary = convention.alphabet.size - len(specials)
    if symbol >= ordinary:
        return f"<{specials[symbol - ordinary]}>"
    byte = convention.alphabet.decode([symbol])
    return byte.decode("ascii") if byte.isascii() else f"0x{byte.hex()}"


def total(parts: Iterable[Score]) -> dict[str, Any]:
    """All records together, as one object without an id."""
    nats, symbols, length, characters, count, records = 0.0, 0, 0, 0, 0, 0
    for part in parts:
        records, nats, symbols = records + 1, nats + part.nats, symbols + part.symbols
        if not part.protein:
            length += len(part.text)
            characters += part.characters
            count += part.words
    whole: dict[str, Any] = {"records": records, "symbols": symbols, "nats": nats}
    if symbols:
        whole |= {"bits_per_symbol": bits(nats) / symbols, "perplexity": perplexity(nats, symbols)}
    if length:
        whole |= {"bits_per_byte": bits(nats) / length, "bits_per_character": bits(nats) / characters}
    if count:
        whole |= {"words": count, "word_perplexity": perplexity(nats, count)}
    return whole
