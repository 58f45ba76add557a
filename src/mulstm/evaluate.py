"""Streams a split through a model: every symbol is predicted once, and the loss is summed in float64."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from mulstm.data.corpus import Split
from mulstm.data.lanes import Chunk, Lanes
from mulstm.errors import DataError, MulstmError, no_number
from mulstm.files import replacing
from mulstm.nn.model import LanguageModel, bare
from mulstm.nn.packed import check_kernels
from mulstm.packing import nats_of, run
from mulstm.record_corpus import RecordSplit
from mulstm.replay import scorer
from mulstm.units import bits_per_char, word_perplexity

Losses = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Evaluation:
    """What a text costs under a model."""

    nats: float
    symbols: int
    words: int | None
    seconds: float
    losses: Losses | None = None  # (symbols,) nats of each symbol in text order

    @property
    def bits_per_char(self) -> float:
        """The mean cost of a symbol."""
        return bits_per_char(self.nats, self.symbols)

    @property
    def word_perplexity(self) -> float | None:
        """By the paper's conversion, where the corpus has words."""
        return word_perplexity(self.bits_per_char, self.symbols, self.words) if self.words else None

    def require_number(self, precision: str) -> None:
        """Whoever shows or keeps the cost has one."""
        if not math.isfinite(self.nats):
            raise no_number("this text", precision)


def evaluate(
    model: LanguageModel,
    split: Split,
    lanes: int = 10,
    chunk: int = 200,
    *,
    symbols: int = 0,  # only so many from the beginning; 0: all
    losses: bool | str | os.PathLike[str] = False,  # keep each symbol's loss: in memory, or in this .npy file
    progress: Callable[[int, float], None] | None = None,  # gets the symbols read and their bits/char so far
) -> Evaluation:
    """The cost of a split, cut into `lanes` stretches that each start from a zero state; constant memory."""
    model, file = bare(model), None if isinstance(losses, bool) else Path(losses)
    split.alphabet.require_size(model.alphabet_size)
    _require_sizes(lanes, chunk, symbols)
    if isinstance(split, RecordSplit):
        if losses:
            raise DataError(
                f"{split.corpus} is a file of records, and single losses are kept of one text only. "
                'Give a text, or score each record: "mulstm score --json" with --losses or --words.'
            )
        return _records(model, split, symbols, progress)
    part = _Part(split, lanes, min(symbols or split.symbols_count, split.symbols_count))
    with _room(file or bool(losses), part.total) as kept:
        found = _stream(model, [part], chunk, [kept], progress)[0]
        if file is not None:  # which gets its name now
            found.require_number(model.precision)
        return found


def evaluate_together(
    model: LanguageModel,
    splits: Sequence[Split],
    lanes: int = 10,
    chunk: int = 200,
    *,
    progress: Callable[[int, float], None] | None = None,
) -> list[Evaluation]:
    """As `evaluate` of each split, in the time of the longest: the lanes of all go side by side.

    Single losses are kept of texts that have words.
    """
    if any(isinstance(split, RecordSplit) for split in splits):
        return [evaluate(model, split, lanes, chunk, progress=progress) for split in splits]
    model = bare(model)
    _require_sizes(lanes, chunk)
    for split in splits:
        split.alphabet.require_size(model.alphabet_size)
    if not splits:
        return []
    parts = [_Part(split, lanes, split.symbols_count) for split in splits]
    kept = [np.empty(part.total, dtype=np.float32) if part.split.words else None for part in parts]
    return _stream(model, parts, chunk, kept, progress)


def _require_sizes(lanes: int, chunk: int, symbols: int = 0) -> None:
    if min(lanes, chunk) < 1 or symbols < 0:
        raise MulstmError(
            f"{symbols} symbols cannot be read in {lanes} lanes of chunks of {chunk}. "
            "Give 1 or more of each, or 0 symbols for all."
        )


class _Part:
    """The first `total` symbols of a split, cut into lanes."""

    def __init__(self, split: Split, lanes: int, total: int) -> None:
        split.require_symbols()
        self.split, self.total, self.lanes = split, total, min(lanes, total)
        self.beginning = replace(split, stop=split.start + total)
        self.length = -(-total // self.lanes)  # symbols of a lane

    def chunks(self, chunk: int, count: int) -> Iterator[Chunk]:
        """So many chunks; those behind the part's end are empty."""
        lanes = Lanes(self.beginning, self.lanes, chunk, trim=False)
        for k in range(count):
            if k * chunk < self.length:
                yield lanes.chunk_at(k)
            else:
                shape = self.lanes, chunk
                yield Chunk(np.zeros(shape, dtype=np.uint8), np.full(shape, -1))


def _stream(
    model: LanguageModel,
    parts: list[_Part],
    chunk: int,
    kept: Sequence[Losses | None],  # room for those of each part
    progress: Callable[[int, float], None] | None,
) -> list[Evaluation]:
    """The cost of each part; one pass over the longest."""
    device = model.device
    folded = model.folded().eval()
    nats = torch.zeros(len(parts), dtype=torch.float64, device=device)
    started = time.perf_counter()
    lanes, length = [part.lanes for part in parts], max(part.length for part in parts)
    chunk = min(chunk, length)
    count = -(-length // chunk)
    score = scorer(folded, sum(lanes), chunk, count)
    for k, chunks in enumerate(zip(*(part.chunks(chunk, count) for part in parts), strict=True)):
        x, y = (
            torch.from_numpy(np.concatenate(side)).to(device, torch.long)
            for side in zip(*chunks, strict=True)
        )
        each = torch.split(score(x, y), lanes)  # of each part
        nats += torch.stack([rows.sum(dtype=torch.float64) for rows in each])
        for part, room, rows, own in zip(parts, kept, each, chunks, strict=True):
            if room is not None:
                _keep(room, rows.cpu().numpy(), own.y, k * chunk, part.length)
        # Asking for the sum makes a GPU wait, so it is asked for now and then only.
        if progress is not None and k % 16 == 15:
            done = sum(min((k + 1) * chunk * part.lanes, part.total) for part in parts)
            progress(done, bits_per_char(float(nats.sum()), done))
    check_kernels(device)
    seconds = time.perf_counter() - started
    return [
        Evaluation(
            nats=cost,
            symbols=part.total,
            words=part.split.words if part.total == part.split.symbols_count else None,
            seconds=seconds,
            losses=room,
        )
        for part, cost, room in zip(parts, nats.tolist(), kept, strict=True)
    ]


def _records(
    model: LanguageModel, split: RecordSplit, symbols: int, progress: Callable[[int, float], None] | None
) -> Evaluation:
    """Records are read each from a zero state, so lanes are a matter of speed only; whole records count."""
    split.require_symbols()
    started = time.perf_counter()
    targets: dict[int, npt.NDArray[np.int64]] = {}

    def read() -> Iterator[npt.NDArray[np.int64]]:
        taken = 0
        for k, (x, y) in enumerate(split.records()):
            if symbols and taken >= symbols:
                return
            taken += int((y >= 0).sum())
            targets[k] = y
            yield x

    folded = model.folded().eval()
    nats, done = 0.0, 0
    for packed, logits, _ in run(folded, folded, read()):
        each, counted = nats_of(packed, logits, targets)
        nats, done = nats + float(each.sum()), done + int(counted.sum())
        for lane in packed.ended:
            del targets[packed.record[lane]]
        if progress is not None:
            progress(done, bits_per_char(nats, max(1, done)))
    return Evaluation(nats, done, None, time.perf_counter() - started)


@contextlib.contextmanager
def _room(losses: bool | Path, total: int) -> Iterator[Losses | None]:
    """For single losses, where they are wanted; a file gets its name once it is whole."""
    if isinstance(losses, Path):
        with replacing(losses) as temporary:
            kept = np.lib.format.open_memmap(temporary, mode="w+", dtype=np.float32, shape=(total,))
            _reserve(temporary)
            yield kept
            kept.flush()
    else:
        yield np.empty(total, dtype=np.float32) if losses else None


def _reserve(path: Path) -> None:
    """Takes a file's room at once: a mapped file that meets a full disk ends the process without a word."""
    if hasattr(os, "posix_fallocate"):
        with path.open("rb+") as file:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)


def _keep(kept: Losses, each: Losses, y: npt.NDArray[np.int64], start: int, length: int) -> None:
    """Puts the losses of a chunk where its symbols stand in the text: lane b begins at b x length."""
    for b in range(y.shape[0]):
        real = int((y[b] >= 0).sum())
        place = b * length + start
        kept[place : place + real] = each[b, :real]
