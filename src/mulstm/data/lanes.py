"""A split is cut into lanes, each an unbroken stretch of the text, and lanes into chunks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mulstm.data.alphabet import Bytes
from mulstm.data.corpus import Split
from mulstm.errors import DataError


class Chunk(NamedTuple):
    """T steps of B lanes: x goes in, y is to be predicted (-1: nothing there)."""

    x: Bytes  # (B, T)
    y: NDArray[np.int64]  # (B, T)


class Lanes:
    """The chunks of a split, in order; any of them can be had by its number.

    With `trim` (training) the remainder is dropped, so that all lanes are equally long and all chunks
    full; without it (evaluation) every symbol is predicted exactly once and places past a lane's end
    have y = -1. `offset` rotates the split: lanes start there, and the end is followed by the start.
    `block` cuts the split into blocks of so many symbols first, and each block into lanes.
    """

    def __init__(
        self, split: Split, lanes: int, chunk: int, *, trim: bool, offset: int = 0, block: int = 0
    ) -> None:
        self.split, self.lanes, self.chunk, self.trim, self.offset = split, lanes, chunk, trim, offset
        split.require_symbols()
        n = split.symbols_count
        block = block or n
        # (first symbol, symbols, length of a lane) of each block
        self._blocks: list[tuple[int, int, int]] = []
        self._first_chunk = [0]
        for start in range(0, n, block):
            size = min(block, n - start)
            length = size // lanes // chunk * chunk if trim else -(-size // lanes)
            if length:
                self._blocks.append((start, size, length))
                self._first_chunk.append(self._first_chunk[-1] + -(-length // chunk))
        if not self._blocks:
            fits = f"train.lanes={n // chunk}" if n >= chunk else f"train.lanes=1 --set train.chunk={n}"
            raise DataError(
                f"The {split.name} part of {split.corpus} has {n:,} symbols, too few for {lanes} x {chunk}. "
                f"Take a longer text, or --set {fits}."
            )

    def __len__(self) -> int:
        return self._first_chunk[-1]

    def fresh(self, k: int) -> bool:
        """Whether chunk k begins new stretches of text, so that no state may be carried into it."""
        return k in self._first_chunk

    def chunk_at(self, k: int) -> Chunk:
        """Chunk k of len(self)."""
        if not 0 <= k < len(self):
            raise IndexError(f"chunk {k} of {len(self)}")
        which = int(np.searchsorted(self._first_chunk, k, side="right")) - 1
        start, size, length = self._blocks[which]
        t = (k - self._first_chunk[which]) * self.chunk + np.arange(self.chunk)  # (T) places in a lane
        i = np.arange(self.lanes)[:, None] * length + t  # (B, T) places in the block
        places = (start + i + self.offset) % self.split.symbols_count
        x, y = self.split.pairs(places)
        targets = y.astype(np.int64)
        if not self.trim:
            # A lane's places past its end belong to the next lane, and the last lane's to nobody.
            targets[(t >= length) | (i >= size)] = -1
        return Chunk(x, targets)

    def __iter__(self) -> Iterator[Chunk]:
        for k in range(len(self)):
            yield self.chunk_at(k)
