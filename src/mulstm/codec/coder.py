"""The range coder: symbols' shares to words and back, by constriction or, without it, by plain Python."""

from __future__ import annotations

from bisect import bisect_right
from importlib.util import find_spec
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mulstm.codec.tables import TOTAL_BITS
from mulstm.errors import BackendError, CheckFailedError, ExtraError

Whole = NDArray[np.int64]
KINDS = ("constriction", "python")
_WORD = 0xFFFFFFFF
_STATE = 0xFFFFFFFFFFFFFFFF


class Encoder(Protocol):
    """Takes symbols in the order in which they will be asked for."""

    def put(self, begins: Whole, symbols: Whole) -> None:
        """The symbols (n) with their tables (n, entries + 1)."""

    def finish(self) -> bytes:
        """All words, little-endian."""


class Decoder(Protocol):
    """Gives the symbols back in the same order."""

    def get(self, begins: Whole) -> Whole:
        """One symbol for each table."""


def encoder(kind: str = "auto") -> Encoder:
    """A new encoder. All kinds write the same bytes."""
    return _ConstrictionEncoder() if _resolve(kind) == "constriction" else PythonEncoder()


def decoder(data: bytes, kind: str = "auto") -> Decoder:
    """A decoder of what an encoder of any kind has written."""
    if len(data) % 4:
        raise CheckFailedError(
            f"A coded stream of {len(data)} bytes is not made of whole words. Take another copy of it."
        )
    return _ConstrictionDecoder(data) if _resolve(kind) == "constriction" else PythonDecoder(data)


def _resolve(kind: str) -> str:
    installed = find_spec("constriction") is not None
    if kind == "auto":
        return "constriction" if installed else "python"
    if kind not in KINDS:
        raise BackendError(f"There is no coder {kind!r}. Choose auto, {' or '.join(KINDS)}.")
    if kind == "constriction" and not installed:
        raise ExtraError('constriction is not installed. Run "pip install mulstm[codec]".')
    return kind


def uniform(n: int) -> Whole:
    """The table of n equally likely entries, (n + 1)."""
    return (np.arange(n + 1, dtype=np.int64) << TOTAL_BITS) // n


class PythonEncoder:
    """A range coder with 64 bits of state and words of 32; carries go into words already written."""

    def __init__(self) -> None:
        self._low, self._range = 0, _STATE
        self._words: list[int] = []

    def put(self, begins: Whole, symbols: Whole) -> None:
        rows = np.arange(len(symbols))
        lefts, rights = begins[rows, symbols].tolist(), begins[rows, symbols + 1].tolist()
        low, span, words = self._low, self._range, self._words
        for left, right in zip(lefts, rights, strict=True):
            scale = span >> TOTAL_BITS
            low += scale * left
            span = scale * (right - left)
            if low > _STATE:
                low &= _STATE
                _carry(words)
            if span <= _WORD:
                words.append(low >> 32)
                low = (low << 32) & _STATE
                span <<= 32
        self._low, self._range = low, span

    def finish(self) -> bytes:
        words = list(self._words)
        if self._range != _STATE:
            # The shortest word that lies inside the last interval, whatever comes after it.
            point = self._low + _WORD
            if point > _STATE:
                _carry(words)
            words.append((point & _STATE) >> 32)
            if (self._low + self._range & _STATE) >> 32 == words[-1]:
                words.append(0)
        return np.array(words, dtype="<u4").tobytes()


def _carry(words: list[int]) -> None:
    k = len(words) - 1
    while words[k] == _WORD:
        words[k] = 0
        k -= 1
    words[k] += 1


class PythonDecoder:
    """The other half; words past the end count as zero."""

    def __init__(self, data: bytes) -> None:
        self._words = np.frombuffer(data, dtype="<u4").tolist()
        self._words.reverse()
        self._range = _STATE
        self._point = self._next() << 32 | self._next()  # less what has been decoded

    def _next(self) -> int:
        return self._words.pop() if self._words else 0

    def get(self, begins: Whole) -> Whole:
        n, width = begins.shape
        table = memoryview(np.ascontiguousarray(begins).reshape(-1).data)
        symbols = np.empty(n, dtype=np.int64)
        point, span = self._point, self._range
        for row in range(n):
            first = row * width
            scale = span >> TOTAL_BITS
            place = point // scale
            if place >> TOTAL_BITS:
                raise _broken()
            k = bisect_right(table, place, first, first + width) - 1
            left = table[k]
            point -= scale * left
            span = scale * (table[k + 1] - left)
            if span <= _WORD:
                point = point << 32 | self._next()
                span <<= 32
            symbols[row] = k - first
        self._point, self._range = point, span
        return symbols


class _ConstrictionEncoder:
    def __init__(self) -> None:
        self._family, queue = _library()
        self._encoder = queue.RangeEncoder()

    def put(self, begins: Whole, symbols: Whole) -> None:
        if len(symbols):
            self._encoder.encode(np.ascontiguousarray(symbols, dtype=np.int32), self._family, _counts(begins))

    def finish(self) -> bytes:
        return bytes(self._encoder.get_compressed().astype("<u4").tobytes())


class _ConstrictionDecoder:
    def __init__(self, data: bytes) -> None:
        self._family, queue = _library()
        self._decoder = queue.RangeDecoder(np.frombuffer(data, dtype="<u4").astype(np.uint32))

    def get(self, begins: Whole) -> Whole:
        if not len(begins):
            return np.empty(0, dtype=np.int64)
        try:
            symbols = self._decoder.decode(self._family, _counts(begins))
        except AssertionError as fault:
            raise _broken() from fault
        return np.asarray(symbols, dtype=np.int64)


def _library() -> tuple[Any, Any]:
    import constriction

    return constriction.stream.model.Categorical(perfect=False), constriction.stream.queue


def _counts(begins: Whole) -> NDArray[np.float64]:
    """Whole numbers that sum to 2**24 - entries: constriction adds one to each and rounds nothing."""
    counts: NDArray[np.float64] = (np.diff(begins, axis=1) - 1).astype(np.float64)
    return counts


def _broken() -> CheckFailedError:
    return CheckFailedError("The coded stream is damaged. Take another copy of the archive.")
