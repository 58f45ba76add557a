"""Several files, read as one text without ever being in memory as a whole."""

from __future__ import annotations

import mmap
import zlib
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mulstm.data.alphabet import Bytes
from mulstm.errors import DataError

# A folder may hold more files than a process may have open.
OPEN_FILES = 64
BLOCK = 1 << 20


class Text:
    """Bytes of files (memory-mapped) and of arrays, one after the other."""

    def __init__(self, parts: Sequence[Path | Bytes]) -> None:
        self._parts = list(parts)
        sizes = [part.stat().st_size if isinstance(part, Path) else part.size for part in parts]
        self._starts = [0, *accumulate(sizes)]
        self._open: OrderedDict[int, tuple[mmap.mmap, Bytes]] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        """Files are mapped anew by whoever gets a copy, in another process too."""
        return self.__dict__ | {"_open": OrderedDict()}

    def __len__(self) -> int:
        return self._starts[-1]

    def _part(self, index: int) -> Bytes:
        part = self._parts[index]
        if not isinstance(part, Path):
            return part
        if index not in self._open:
            if len(self._open) >= OPEN_FILES:
                self._open.popitem(last=False)
            try:
                with part.open("rb") as file:
                    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except PermissionError as error:
                raise DataError(f"{part}: {error.strerror}. Check your rights to it.") from None
            except (OSError, ValueError) as error:
                raise DataError(
                    f"{part} can no longer be read ({error}). Put it back and start again."
                ) from None
            if len(mapped) != self._starts[index + 1] - self._starts[index]:
                raise _changed(part)
            self._open[index] = mapped, np.frombuffer(mapped, dtype=np.uint8)
        self._open.move_to_end(index)
        return self._open[index][1]

    def _require_whole(self) -> None:
        """Whoever reads beyond the end of a file that was cut short is ended by the system without a word.

        To ask takes half a microsecond; to read lanes from a file that is not mapped, ten times as long.
        """
        for index, (mapped, found) in self._open.items():
            if mapped.size() < found.size:
                raise _changed(self._parts[index])

    def read(self, start: int, stop: int) -> Bytes:
        """Bytes start ... stop-1."""
        self._require_whole()
        return self._view(start, stop)

    def _view(self, start: int, stop: int) -> Bytes:
        first, last = bisect_right(self._starts, start) - 1, bisect_left(self._starts, stop) - 1
        if first == last:
            origin = self._starts[first]
            return self._part(first)[start - origin : stop - origin]
        # Copied part by part: a view would keep its file open.
        found = np.empty(max(0, stop - start), dtype=np.uint8)
        for index in range(first, last + 1):
            origin, end = self._starts[index], self._starts[index + 1]
            low, high = max(start, origin), min(stop, end)
            if low < high:  # no empty file can be mapped
                found[low - start : high - start] = self._part(index)[low - origin : high - origin]
        return found

    def take(self, places: NDArray[np.int64]) -> Bytes:
        """The bytes at `places` (rows of consecutive ones, mostly), in its shape."""
        self._require_whole()
        if len(self._parts) == 1:
            return self._part(0)[places]
        flat = places.ravel()
        found = np.empty(flat.size, dtype=np.uint8)
        # Cut into stretches of consecutive places, so that each is one read.
        cuts = np.flatnonzero(np.diff(flat) != 1) + 1
        for low, high in zip([0, *cuts], [*cuts, flat.size], strict=True):
            if low < high:
                found[low:high] = self._view(int(flat[low]), int(flat[high - 1]) + 1)
        return found.reshape(places.shape)

    def blocks(self, start: int = 0, stop: int | None = None) -> Iterator[Bytes]:
        """The text in pieces of moderate size."""
        stop = len(self) if stop is None else stop
        for low in range(start, stop, BLOCK):
            yield self.read(low, min(low + BLOCK, stop)).copy()  # at once: the file may be cut short later

    def checksum(self, start: int = 0, stop: int | None = None) -> str:
        """CRC-32 of bytes start ... stop-1, to notice a change; 100 MB take a tenth of a second."""
        crc = 0
        for block in self.blocks(start, stop):
            crc = zlib.crc32(block.data, crc)
        return f"{crc:08x}"


def _changed(part: Path | Bytes) -> DataError:
    return DataError(f"{part} has another length than before. Put it back and start again.")
