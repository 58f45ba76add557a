"""A corpus of records: each is a text of its own, whole in one part of the split and in one lane."""

from __future__ import annotations

import hashlib
import heapq
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mulstm import data, records
from mulstm.convention import ALPHABETS, Convention
from mulstm.data import store
from mulstm.data.alphabet import Alphabet, Bytes
from mulstm.data.corpus import Corpus, Split, shares_of
from mulstm.data.text import Text
from mulstm.errors import DataError
from mulstm.recipe import DataRecipe

Numbers = NDArray[np.int64]
READING = "4"  # raised when the same file would be read otherwise than by the version before


class RecordChunk(NamedTuple):
    """T steps of B lanes; y = -1: nothing is to be predicted; first: a record begins, forget what was."""

    x: Bytes  # (B, T)
    y: Numbers  # (B, T)
    first: NDArray[np.bool_]  # (B, T)


@dataclass(frozen=True)
class RecordSplit(Split):
    """Some records of a corpus, with all that stands before and after each."""

    # Where each of the corpus's records begins in the text, and which of them are in this part.
    offsets: Numbers = field(default_factory=lambda: np.zeros(1, dtype=np.int64))
    chosen: Numbers = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    given: int = 0  # symbols before a record that are fed and never predicted, less the one always needed

    @property
    def lengths(self) -> Numbers:
        """Steps of each chosen record: one less than its symbols."""
        return self.offsets[self.chosen + 1] - self.offsets[self.chosen] - 1

    @property
    def symbols_count(self) -> int:
        """How many symbols are predicted."""
        return int(self.lengths.sum() - self.given * self.chosen.size)

    def records(self) -> Iterator[tuple[Numbers, Numbers]]:
        """(input, targets) of each record, in the part's order."""
        for k in self.chosen.tolist():
            whole = self.text.read(int(self.offsets[k]), int(self.offsets[k + 1])).astype(np.int64)
            targets = whole[1:].copy()
            targets[: self.given] = -1
            yield whole[:-1], targets


class RecordCorpus(Corpus):
    """Records, encoded once into the cache and memory-mapped; equal ones are always in the same part."""

    def __init__(
        self,
        name: str,
        text: Text,
        alphabet: Alphabet,
        offsets: Numbers,
        shares: tuple[Fraction, Fraction, Fraction],
        given: int,
    ) -> None:
        super().__init__(name, text, alphabet, (0, 0))
        self._offsets, self._given = offsets, given
        self._parts = _parts(text, offsets, shares)

    def split(self, name: str) -> RecordSplit:
        """The part called train, valid or test; or all of it."""
        plain = super().split(name)
        chosen = self._parts[name] if name != "all" else np.arange(self._offsets.size - 1)
        return RecordSplit(
            plain.corpus,
            name,
            self.alphabet,
            self.text,
            0,
            len(self.text),
            offsets=self._offsets,
            chosen=chosen,
            given=self._given,
        )


class RecordLanes:
    """The chunks of an epoch: each lane holds whole records, about equally many symbols of them.

    The epoch decides in which order a lane's records come; which records it has never changes, so that
    all epochs have the same number of chunks.
    """

    def __init__(self, split: RecordSplit, lanes: int, chunk: int, *, seed: int, epoch: int) -> None:
        if split.chosen.size == 0:
            raise DataError(
                f"The {split.name} part of {split.corpus} has no record. "
                "Give it a share, such as --set data.split=90-10-0, or more records."
            )
        lengths = split.lengths
        if lanes > lengths.sum():
            raise DataError(
                f"The {split.name} part of {split.corpus} has {lengths.sum():,} symbols, too few for {lanes} "
                f"lanes. Give more records, or --set train.lanes={lengths.size}."
            )
        self.split, self.lanes, self.chunk = split, lanes, chunk
        self._places: list[Numbers] = []  # of each lane's records in the text
        self._ends: list[Numbers] = []  # steps of the lane before the first and after each of them
        for lane, members in enumerate(_fill(lengths, lanes)):
            order = np.random.default_rng([seed, epoch, lane]).permutation(members)
            self._places.append(split.offsets[split.chosen[order]])
            self._ends.append(np.concatenate([[0], np.cumsum(lengths[order])]))
        self._count = -(-max(int(ends[-1]) for ends in self._ends) // chunk)

    def __len__(self) -> int:
        return self._count

    def fresh(self, k: int) -> bool:
        """Whether no state may be carried into chunk k."""
        return k == 0

    def chunk_at(self, k: int) -> RecordChunk:
        """Chunk k of len(self)."""
        if not 0 <= k < len(self):
            raise IndexError(f"chunk {k} of {len(self)}")
        t = np.arange(k * self.chunk, (k + 1) * self.chunk)
        places = np.full((self.lanes, self.chunk), -1, dtype=np.int64)
        step = np.zeros_like(places)  # within the record
        for lane, (starts, ends) in enumerate(zip(self._places, self._ends, strict=True)):
            inside = t < ends[-1]
            which = np.searchsorted(ends, t[inside], side="right") - 1
            step[lane, inside] = t[inside] - ends[which]
            places[lane, inside] = starts[which] + step[lane, inside]
        real = places >= 0
        pairs = self.split.text.take(np.stack([np.maximum(places, 0), np.maximum(places, 0) + 1]))
        y = np.where(real & (step >= self.split.given), pairs[1].astype(np.int64), -1)
        return RecordChunk(pairs[0], y, real & (step == 0))


def load(d: DataRecipe, data_dir: str | Path | None = None) -> Corpus:
    """The corpus a recipe means: one text, or records."""
    if not d.records:
        return data.load(d.corpus, data_dir=data_dir, split=d.split, protocol=d.protocol, alphabet=d.alphabet)
    path = Path(d.corpus)
    if path.is_dir():
        raise DataError(f"{path} is a folder, and records come from one file. Give a file ({d.records}).")
    if not path.is_file():
        raise DataError(f"There is no file {path}. Give a file of records ({d.records}).")
    if d.alphabet not in ALPHABETS:
        raise DataError(
            f'Records cannot be read with data.alphabet = "{d.alphabet}". Say one of {", ".join(ALPHABETS)}.'
        )
    shares = shares_of(d.split, "90-10-0")
    convention = Convention(ALPHABETS[d.alphabet](), d.convention)
    encoded = _encoded(path, d, convention)
    offsets: Numbers = np.load(encoded.with_suffix(".npy"), allow_pickle=False)
    given = max(0, convention.start.size - 1)
    return RecordCorpus(path.name, Text([encoded]), convention.alphabet, offsets, shares, given)


def _encoded(path: Path, d: DataRecipe, convention: Convention) -> Path:
    """A file of all records' symbols, made once, with the records' offsets beside it."""
    how = READING, d.records, d.column, d.convention, convention.alphabet.fingerprint
    key = store.key_of(path, *how)
    target = store.cache_folder() / "records" / f"{key}.symbols"
    beside = target.with_suffix(".npy")
    if store.is_sound(target) and store.is_sound(beside):
        return target
    offsets = array("q", [0])
    what = f"The records of {path} cannot be kept in"
    with store.making(target, what) as temporary, temporary.open("wb") as out:
        for record in records.read(str(path), kind=d.records, column=d.column):
            x, y = convention.scored(record.text, record.id)
            out.write(np.append(x, y[-1]).astype(np.uint8).tobytes())
            offsets.append(offsets[-1] + x.size + 1)
        if len(offsets) == 1:
            raise DataError(f"{path} holds no record. Check the file and data.records.")
        with store.making(beside, what) as other, other.open("wb") as file:
            np.save(file, np.frombuffer(offsets, dtype=np.int64))
    store.seal(target)
    store.seal(beside)
    return target


def _parts(text: Text, offsets: Numbers, shares: tuple[Fraction, Fraction, Fraction]) -> dict[str, Numbers]:
    """Which records belong to which part: shuffled, by a dice that never changes, equal records together."""
    n = offsets.size - 1
    digests = (
        hashlib.blake2b(text.read(int(a), int(b)).tobytes(), digest_size=8).digest()
        for a, b in pairwise(offsets)
    )
    content = np.fromiter((int.from_bytes(d, "little", signed=True) for d in digests), np.int64, count=n)
    _, group = np.unique(content, return_inverse=True)
    groups = int(group.max()) + 1
    rank = np.random.default_rng(0).permutation(groups)[group]
    order = np.argsort(rank, kind="stable")
    sizes = np.bincount(rank, minlength=groups)
    ends = np.cumsum(sizes)
    # Valid and test come first, so that a small share is not rounded away.
    cuts = []
    reached = 0
    for share in shares[1:]:
        wanted = reached + (max(1, round(n * share)) if share else 0)
        reached = int(ends[np.searchsorted(ends, wanted)]) if share and wanted <= n else reached
        cuts.append(reached)
    valid, test, train = np.split(order, cuts)
    parts = {"train": np.sort(train), "valid": np.sort(valid), "test": np.sort(test)}
    for (name, part), share in zip(parts.items(), shares, strict=True):
        if share and part.size == 0:
            raise DataError(
                f"Of {n} records ({groups} different) none is left for the {name} part. "
                "Give more records, or --set data.split=100-0-0."
            )
    return parts


def _fill(lengths: Numbers, lanes: int) -> list[Numbers]:
    """The records of each lane: the longest first, each into the lane that has least so far."""
    members: list[list[int]] = [[] for _ in range(lanes)]
    loads = [(0, lane) for lane in range(lanes)]
    for record in np.argsort(-lengths, kind="stable").tolist():
        load, lane = heapq.heappop(loads)
        members[lane].append(record)
        heapq.heappush(loads, (load + int(lengths[record]), lane))
    return [np.array(lane, dtype=np.int64) for lane in members]
