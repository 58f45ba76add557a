"""Rows that come in any order, kept on disk until they can be written in the input's order."""

from __future__ import annotations

import contextlib
import errno
import json
import tempfile
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import numpy as np
import numpy.typing as npt

from mulstm.errors import DataError

Rows = npt.NDArray[np.float32]
BLOCK = 4 << 20  # bytes moved at a time
LONGEST_ID = 10_000  # all ids of an .npz are as wide as the longest
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Store:
    """One file of float32 rows for each width, and the records' ids; gone when the block is left.

    Everything lies on the disk of the output, where there is room for it, so that memory does not grow with
    the number of records. The files have no names there: nothing is left, however the process ends.
    """

    def __init__(self, folder: Path, widths: dict[str, int]) -> None:
        self._folder, self.widths = folder, widths
        self.count = self.total = 0
        self.longest_id = 1
        try:
            self._files: dict[str, IO[bytes]] = {n: _nameless(folder) for n in (*widths, "ids")}
            self._offsets = _nameless(folder)
        except OSError as error:
            raise DataError(
                f"The folder {folder} cannot be written ({error.strerror or error}). Choose another place."
            ) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in (*self._files.values(), self._offsets):
            with contextlib.suppress(OSError):  # a full disk does not take the last of them
                file.close()
        if isinstance(error, OSError) and error.errno in FULL:
            raise DataError(
                f"{self._folder} has no room for the rows ({error.strerror}). "
                "Make room there, or choose another place."
            ) from None

    def add(self, id: str, positions: int) -> None:
        """Announces the next record and how many of its positions may be put."""
        if len(id) > LONGEST_ID:
            raise DataError(
                f"The id of record {self.count + 1} has {len(id):,} characters. Give one of at most "
                f"{LONGEST_ID:,}, as by --id-column."
            )
        if "\0" in id:  # an array of numpy's drops those at an id's end
            raise DataError(f"The id {id!r:.80} has a NUL in it. Take it out of the id.")
        self._files["ids"].write(json.dumps(id).encode() + b"\n")
        self._offsets.write(np.int64(self.total).tobytes())
        self.longest_id = max(self.longest_id, len(id))
        self.count += 1
        self.total += positions

    def put(self, name: str, row: int, values: Rows) -> None:
        """Values of one row, or of several consecutive ones."""
        file = self._files[name]
        file.seek(row * self.widths[name] * 4)
        file.write(np.ascontiguousarray(values, dtype="<f4").data)

    def offset(self, record: int) -> int:
        """Where a record's positions begin."""
        if record >= self.count:
            return self.total
        self._offsets.seek(record * 8)
        offset = int(np.frombuffer(self._offsets.read(8), dtype=np.int64)[0])
        self._offsets.seek(0, 2)
        return offset

    def ids(self) -> Iterator[str]:
        """In input order."""
        file = self._files["ids"]
        file.seek(0)
        for line in file:
            yield str(json.loads(line))

    def id_blocks(self) -> Iterator[npt.NDArray[np.str_]]:
        """The ids as arrays of one fixed width."""
        ids, count = self.ids(), -(-BLOCK // (4 * self.longest_id))
        while block := list(islice(ids, count)):
            yield np.array(block, dtype=f"<U{self.longest_id}")

    def rows(self, name: str, start: int = 0, stop: int | None = None) -> Iterator[Rows]:
        """Blocks of rows in order; those of "h" count positions, all others records."""
        width = self.widths[name]
        end = (self.total if name == "h" else self.count) if stop is None else stop
        step = max(1, BLOCK // (4 * max(1, width)))
        file = self._files[name]
        for low in range(start, end, step):
            n = min(step, end - low)
            file.seek(low * width * 4)
            yield np.frombuffer(file.read(n * width * 4), dtype="<f4").reshape(n, width)

    def forget(self, name: str) -> None:
        """Frees the disk that rows already written elsewhere take."""
        self._files[name].truncate(0)


def _nameless(folder: Path) -> IO[bytes]:
    return tempfile.TemporaryFile(dir=folder, prefix=".mulstm-")  # where it must have a name for a moment


def names(widths: dict[str, int]) -> Sequence[str]:
    """The arrays in the order of the output."""
    return [name for name in ("h_mean", "h_final", "c_final", "joined", "h") if name in widths]
